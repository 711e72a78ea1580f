"""`run.json` in a run's folder: the configuration, and digests of the files that it names. Needs no PyTorch."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from errno import ENOENT
from functools import cache
from hashlib import file_digest
from importlib.machinery import PathFinder
from pathlib import Path
from reprlib import repr as short
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import rollalloc
from rollalloc.core.packing import differences
from rollalloc.files.names import DESCRIPTION
from rollalloc.files.origin import origin
from rollalloc.files.regular import read_text, write_text
from rollalloc.files.text import visible
from rollalloc.train.config import SCHEMA, WHERE_IT_RUNS, Config

_VERSION = 40  # a version of more characters is cut in an error


def write_config(config: Config, folder: Path) -> None:
    """Write `run.json`. `starts` says when and by what the run was started, and each time that it was resumed."""
    starts = [*_starts_in(folder), origin()]
    described = config.description() | {"digests": digests_of(config), "starts": starts}
    write_text(folder / DESCRIPTION, json.dumps(described, indent=2))


def _starts_in(folder: Path) -> list[Any]:
    """The starts in a folder's `run.json`; empty if there are none."""
    try:
        starts = json.loads(read_text(folder / DESCRIPTION)).get("starts")
    except (OSError, ValueError, AttributeError, RecursionError):
        return []
    return starts if isinstance(starts, list) else []


def read_config(folder: Path) -> Config:
    """The configuration in a folder's `run.json`.

    Raises:
        FileNotFoundError: there is no `run.json`.
        ValueError: `run.json` is damaged, or a different version of rollalloc wrote it.
    """
    path = folder / DESCRIPTION
    if not path.exists():
        raise FileNotFoundError(ENOENT, "expected the folder of a run, with run.json in it", str(folder))
    try:
        saved = _saved_in(folder)[0]
        config = _revived(Config, {name: value for name, value in saved.items() if name != "schema"})
    except (TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is damaged or from a different version of rollalloc ({error}); use the version that wrote it"
        ) from None
    if missing := [name for name in config.description() if name not in saved]:
        raise ValueError(f"{path} lacks {', '.join(missing)}; {_why_it_lacks(folder)}")
    return config


def _why_it_lacks(folder: Path) -> str:
    """Why fields are missing in a folder's `run.json`, and what to do: by the version that wrote it last, if it says so."""
    starts = _starts_in(folder)
    version = starts[-1].get("rollalloc") if starts and isinstance(starts[-1], dict) else None
    if not isinstance(version, str):
        return "it is damaged, or an earlier version of rollalloc wrote it: restore it, or give another folder"
    if version == rollalloc.__version__:
        return "it is damaged: restore it, or give another folder"
    return (
        f"rollalloc {visible(version)[:_VERSION]} wrote it, and this is {rollalloc.__version__}, which records more: use "
        "the version that wrote it, or give another folder"
    )


def is_run_in(config: Config, folder: Path) -> bool:
    """Whether a folder's `run.json` describes this run, and the input files still have the same contents."""
    saved, digests = _saved_in(folder)
    config = _named_as(saved, config)
    if saved != config.description():
        return False
    # Files that are missing on this machine are not compared.
    return all(digests.get(name) == digest for name, digest in digests_of(config).items())


def is_described_in(config: Config, folder: Path) -> bool:
    """Whether a folder's `run.json` describes this run. Fast, because the contents of input files are not compared."""
    saved = _saved_in(folder)[0]
    return saved == _named_as(saved, config).description()


def was_begun_in(config: Config, folder: Path) -> bool:
    """Like `is_described_in`, but the device and the number of workers may differ."""
    if not (folder / DESCRIPTION).exists():
        return False
    begun = read_config(folder)
    return is_described_in(replace(config, **{name: getattr(begun, name) for name in WHERE_IT_RUNS}), folder)


def resumed(config: Config, folder: Path) -> Config:
    """The configuration with which the run in the folder is resumed: files have the names that the run's `run.json` has.

    Raises:
        ValueError: the configuration is of another run. The message names the differences.
    """
    config = _named_as(_saved_in(folder)[0], config)
    if others := list(differences(read_config(folder).identity(), config.identity(), "config")):
        raise ValueError(
            f"the checkpoints in {folder} are of another run: {'; '.join(others)}; use the settings of "
            "that run, or give another folder"
        )
    return config


def _named_as(saved: Mapping[str, Any], config: Config) -> Config:
    """The configuration with a saved one's names of model, data and reward, where both names lead to the same file."""
    names = {name: getattr(config, name) for name in ("model", "prompts", "heldout", "reward")}
    same = {
        name: saved[name]
        for name, own in names.items()
        if name in saved and _places(name, saved[name]) == _places(name, own)
    }
    return replace(config, **{name: tuple(value) if isinstance(value, list) else value for name, value in same.items()})


def _places(name: str, value: Any) -> Any:
    """Where a name, or each of several, leads: a path, or the name itself if there is no such file here."""
    if isinstance(value, (list, tuple)):
        return [_places(name, each) for each in value]
    if not isinstance(value, str):
        return value
    if name != "reward":
        return Path(value).resolve() if Path(value).exists() else value
    file = _reward_file(value)
    return (Path(file).resolve(), value.rpartition(":")[2]) if file else value


def folder_of(config: Config, folder: Path) -> Path:
    """The path of a run's folder inside a folder of many runs."""
    return folder / config.task.replace("/", "-") / f"{config.name}-{config.seed}"


def _saved_in(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The description and the digests in a folder's `run.json`; both empty if there is no `run.json`."""
    path = folder / DESCRIPTION
    if not path.exists():
        return {}, {}
    try:
        saved = json.loads(read_text(path))
        schema, digests = saved.get("schema"), saved.pop("digests", {})
        saved.pop("starts", None)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"{path} does not describe a run ({error}); it is damaged, or another program wrote it"
        ) from None
    if schema != SCHEMA:
        raise ValueError(
            f"{path} has schema {short(schema)}, expected {SCHEMA}; this version of rollalloc can neither resume "
            "nor reuse the run: use the version that wrote it, or give another folder (--out)"
        )
    return saved, digests


def _revived(kind: type[Any], saved: Mapping[str, Any]) -> Any:
    """Rebuild a dataclass from the JSON of its `asdict`. Raise a TypeError if a field has another type or is missing."""
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, value in saved.items():
        hint = hints.get(name)
        nested = next((inner for inner in (hint, *get_args(hint)) if is_dataclass(inner)), None)
        if nested is not None and isinstance(value, dict):
            values[name] = _revived(cast("type[Any]", nested), value)
        else:
            values[name] = tuple(value) if isinstance(value, list) else value
        if name in hints and not _fits(values[name], hints[name]):
            expected = hints[name].__name__ if type(hints[name]) is type else hints[name]
            raise TypeError(f"{kind.__name__}.{name}: expected {expected}, got {short(value)}")
    if kind is not Config and (missing := [field.name for field in fields(kind) if field.name not in saved]):
        raise TypeError(f"{kind.__name__} lacks {', '.join(missing)}")
    return kind(**values)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has this type. Supports the types that occur in a configuration."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(_fits(value, option) for option in inner)
    if kind is Literal:
        return value in inner
    if kind is tuple:
        kinds = inner[:1] * len(value) if inner[-1] is ... and isinstance(value, tuple) else inner
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(_fits, value, kinds))
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return hint is Any or isinstance(value, kind or hint)


def digests_of(config: Config) -> dict[str, str]:
    """SHA-256, by path, of each file that a configuration names and that is on this machine."""
    named = [*config.prompts, config.heldout, config.model, _reward_file(config.reward)]
    places = [Path(name) for name in named if name]
    files = [file for place in places for file in (sorted(place.rglob("*")) if place.is_dir() else [place])]
    return {str(file): _digest(file, file.stat().st_mtime_ns) for file in files if file.is_file()}


@cache
def _digest(file: Path, changed_ns: int) -> str:
    with file.open("rb") as opened:
        return file_digest(opened, "sha256").hexdigest()


def _reward_file(reward: str) -> str | None:
    """The file of a reward function `file.py:function` or `package.module:function`. The function is not imported."""
    module = reward.rpartition(":")[0]
    if not module or module.endswith(".py"):
        return module or None
    package, *inner = module.split(".")
    spec = PathFinder.find_spec(package, [str(Path.cwd()), *sys.path])
    if spec is None or not inner:
        return None if spec is None else spec.origin
    places = [Path(place, *inner) for place in spec.submodule_search_locations or ()]
    files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]
    return str(files[0]) if files else None
