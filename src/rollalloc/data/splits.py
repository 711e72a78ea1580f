"""Which files of a local folder hold a split of a data set, by the layouts that the Hugging Face hub knows."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from reprlib import repr as short
from typing import Any

log = logging.getLogger(__name__)

ALL = "all"  # choice of every file of a folder, whatever split it is of

SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".tsv")
_NO_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "prepared.json"}
# Words that the hub looks for in the names of files and folders.
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLIT_OF = {word: split for split, words in _WORDS.items() for word in words}
_SHARD = re.compile(r"(?P<split>\w[\w.]*?)-\d{5}-of-\d{5}(?:-[0-9a-f]+)?$")  # train-00000-of-00002, also with a hash
_SHOWN = 12  # choices in an error message


@dataclass(frozen=True)
class Wanted:
    """A split of a data set.

    Attributes:
        name: of the data set on the hub, for error messages.
        split: e.g. "test".
        config: configuration of the data set, e.g. GSM8K's "main"; None: it has one only.
        choice: what the user chose among the choices of an error message; None: nothing.
    """

    name: str
    split: str
    config: str | None = None
    choice: str | None = None

    @property
    def named(self) -> str:
        """Split and configuration as a choice is written."""
        return self.split if self.config is None else f"{self.config}/{self.split}"


def files_of_split(folder: Path, wanted: Wanted) -> list[Path]:
    """The files of a folder that hold a split.

    In this order: the user's choice; the `configs:` of the folder's README.md; names of files and folders
    (`data/train-00000-of-00002.parquet`, `test.jsonl`, `main/test/0.parquet`). If no name says a split, all files are of
    the one split that was asked for.

    Args:
        folder: of one data set.
        wanted: the split.

    Returns:
        At least one file, in order of their names.

    Raises:
        ValueError: the names do not say which files hold the split; names the choices.
        FileNotFoundError: the folder holds no file with data.
    """
    files = [path for path in sorted(folder.rglob("*")) if _holds_data(path, folder)]
    if not files:
        raise FileNotFoundError(
            f"{folder}: expected files of {wanted.name} ({', '.join(SUFFIXES)}), found none; download the data set into it"
        )
    groups = _by_readme(folder, files) or _by_name(folder, files)
    if wanted.choice is not None:
        groups[ALL] = files
        if wanted.choice in groups:
            return groups[wanted.choice]
        raise ValueError(f"{folder} has no split {wanted.choice!r}; {_choices(groups, wanted)}")
    chosen = _chosen(groups, wanted)
    if chosen is None:
        raise ValueError(
            f"{folder}: cannot tell which files are the split {wanted.named!r} of {wanted.name}; {_choices(groups, wanted)}"
        )
    if chosen == ALL:
        log.warning(
            "%s: no name of a file says a split, so all %d files are taken for the %r split of %s; if they hold others "
            "too, choose with --split, or put the files of each into a folder named after it",
            folder,
            len(files),
            wanted.split,
            wanted.name,
        )
    return groups[chosen]


def _holds_data(path: Path, folder: Path) -> bool:
    if path.suffix not in SUFFIXES or path.name in _NO_DATA:
        return False
    return path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)


def _chosen(groups: Mapping[str, Sequence[Path]], wanted: Wanted) -> str | None:
    """The one group that is the wanted split; None: there is none, or several could be."""
    if wanted.named in groups:
        return wanted.named
    if list(groups) == [ALL]:  # no name says anything
        return ALL
    same = [name for name in groups if name.rpartition("/")[2] == wanted.split]
    if wanted.config is not None:  # another configuration has other rows
        same = [name for name in same if "/" not in name]
    return same[0] if len(same) == 1 else None


def _choices(groups: Mapping[str, Sequence[Path]], wanted: Wanted) -> str:
    counted = [f"{name} ({len(files)} file{'s' * (len(files) > 1)})" for name, files in groups.items() if name != ALL]
    more = f" and {len(counted) - _SHOWN} more" if len(counted) > _SHOWN else ""
    example = next((name for name in groups if name != ALL), ALL)
    return (
        f"it holds {', '.join(counted[:_SHOWN]) or 'files without a split in their names'}{more}. Choose with --split "
        f"SET=NAME, for example --split {wanted.name.rpartition('/')[2]}={example}; {ALL!r} takes every file"
    )


# --------------------------------------------------------------------------------------------------------------- names


def _by_name(folder: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Files by "split" or "folder/split"; files whose names say no split are under `ALL`, or under their folder's name."""
    named = [(_group(path.relative_to(folder)), path) for path in files]
    if not any(split for (_, split), _ in named):
        named = [(("/".join(path.relative_to(folder).parts[:-1]), ""), path) for path in files]
        if len({group for group, _ in named}) == 1:
            return {ALL: list(files)}
    groups: dict[str, list[Path]] = {}
    for (prefix, split), path in named:
        groups.setdefault("/".join(filter(None, (prefix, split))) or path.name, []).append(path)
    return dict(sorted(groups.items()))


def _group(path: PurePath) -> tuple[str, str]:
    """The folders of a file that are no split, and its split; "" where its name says none."""
    shard = _SHARD.match(path.stem)
    splits = [[shard["split"]] if shard else _splits_in(path.stem)]
    prefix: list[str] = []
    for part in reversed(path.parts[:-1]):
        if words := _splits_in(part):
            splits.append(words)
        elif part != "data":
            prefix.insert(0, part)
    said = next((words for words in splits if words), [])  # the innermost name counts
    return "/".join(prefix), "+".join(said)


def _splits_in(name: str) -> list[str]:
    """The splits that a name says, each once: ["train"] of "math_train_v2"."""
    words = re.split(r"[\W_\d]+", name.lower())
    return list(dict.fromkeys(_SPLIT_OF[word] for word in words if word in _SPLIT_OF))


# -------------------------------------------------------------------------------------------------------------- README


def _by_readme(folder: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Files by "config/split", and of the default configuration also by "split", as README.md's `configs:` says."""
    groups: dict[str, list[Path]] = {}
    for config in _listed(_metadata(folder).get("configs")):
        if not isinstance(config, Mapping):
            continue
        name = str(config.get("config_name", "default"))
        for split, patterns in _data_files(config.get("data_files")).items():
            if matching := _matching(folder, patterns, files):
                groups.setdefault(f"{name}/{split}", matching)
                if name == "default" or config.get("default") is True:
                    groups.setdefault(split, matching)
    return groups


def _metadata(folder: Path) -> dict[str, Any]:
    """The YAML head of README.md; empty where there is none that can be read."""
    from huggingface_hub import metadata_load

    try:
        return metadata_load(folder / "README.md") or {}
    except Exception:  # which one depends on the library's version and its YAML parser's
        return {}


def _data_files(entries: Any) -> dict[str, list[str]]:
    """Patterns by split; data files without a split are the split "train", as the hub has it."""
    patterns: dict[str, list[str]] = {}
    for entry in _listed(entries):
        split, paths = (entry.get("split"), entry.get("path")) if isinstance(entry, Mapping) else ("train", entry)
        patterns.setdefault(str(split), []).extend(path for path in _listed(paths) if isinstance(path, str))
    return patterns


def _listed(value: Any) -> list[Any]:
    """A list as it is, nothing as an empty one, and anything else as a list of one."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _matching(folder: Path, patterns: Sequence[str], files: Sequence[Path]) -> list[Path]:
    """Files that a pattern names, or a folder that it names holds; a pattern cannot leave the folder."""
    matched: set[Path] = set()
    for pattern in patterns:
        try:
            matched |= set(folder.glob(pattern.removeprefix("./")))
        except (ValueError, NotImplementedError, IndexError):
            raise ValueError(
                f"{folder / 'README.md'}: data_files has a path that is none, {short(pattern)}; mend it, or choose "
                "files with --split"
            ) from None
    return [path for path in files if path in matched or any(parent in matched for parent in path.parents)]
