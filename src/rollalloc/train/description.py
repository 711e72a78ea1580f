"""One run as a value: a model, prompts, a reward, a recipe and settings. Needs no PyTorch, which `execution` does."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from errno import ENOENT
from functools import cache
from hashlib import file_digest
from importlib.machinery import PathFinder
from pathlib import Path
from reprlib import repr as short
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from rollalloc.core.recipe import Recipe, at_least
from rollalloc.data.encoding import template_arguments
from rollalloc.files.names import DESCRIPTION
from rollalloc.files.opening import read_text
from rollalloc.models.lora import Lora
from rollalloc.named import make_recipe
from rollalloc.recipes.streaming import streamed
from rollalloc.train.settings import ASYNC, SAVING, WAITING, Settings

_SCHEMA = 2  # of run.json
_MOST_WORKERS = 1024  # processes that score: each is a Python of its own


@dataclass(frozen=True, kw_only=True)
class Source:
    """What is trained, on what, for what reward.

    Attributes:
        model: name or folder of a causal language model.
        prompts: parquet or JSONL files in verl's schema.
        heldout: such a file for evaluation; None: no evaluation.
        reward: `package.module:function`, or `file.py:function`, with verl's `compute_score` signature.
        single_answer: every held-out prompt has just one right answer, its ground truth: accuracy is then exact.
        drop_overlong: leave out prompts that do not fit the model's context, instead of refusing them.
        reward_workers: processes that score; 0 scores in this process, for trusted rewards only.
        reward_limit_s: seconds per sample may take, in a process of its own.
        reward_cache: scores to remember; 0 for a reward that is not deterministic.
        overlong_buffer: last tokens of a rollout over which DAPO's overlong penalty grows; None: no penalty.
        device: e.g. "cpu"; None: a GPU where there is one.
        features: file of features of the prompts, for a recipe that predicts; "none": it goes without; None: made by the
            initial model where the recipe uses them.
        lora: adapters that are trained instead of the model's own weights; None: those are trained.
        chat_template_args: further arguments of the chat template as a JSON object, e.g. '{"enable_thinking": false}'; None:
            none.
        accept_overlap: train although more than `rollalloc.data.overlap.MOST_SHARED` of the held-out prompts are in the
            training set.

    Raises:
        ValueError: a number out of its range.
    """

    model: str
    prompts: tuple[str, ...]
    heldout: str | None = None
    reward: str
    single_answer: bool = False
    drop_overlong: bool = False
    reward_workers: int = 1
    reward_limit_s: float = 10.0
    reward_cache: int = 10_000
    overlong_buffer: int | None = None
    device: str | None = None
    features: str | None = None
    lora: Lora | None = None
    chat_template_args: str | None = None
    accept_overlap: bool = False

    def __post_init__(self) -> None:
        template_arguments(self.chat_template_args)
        at_least("reward_workers", self.reward_workers, 0, "0 scores in this process")
        if self.reward_workers > _MOST_WORKERS:
            raise ValueError(f"reward_workers must be at most {_MOST_WORKERS} processes, got {self.reward_workers}")
        at_least("reward_cache", self.reward_cache, 0, "0 remembers nothing")
        if not 0 < self.reward_limit_s < 1e6:
            raise ValueError(f"reward_limit must be a positive number of seconds, got {self.reward_limit_s}")
        if self.overlong_buffer is not None:
            at_least("overlong_buffer", self.overlong_buffer, 1)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run.

    Attributes:
        source: model, prompts and reward.
        recipe: name of a recipe, as `rollalloc.named.make_recipe` takes it.
        parameters: of the recipe.
        settings: of the trainer.
        max_rollouts: rollouts the run may pay; None: no limit.
        staleness: instead of the recipe's `max_staleness`; None: that, or what `ahead` wants.
        ahead: batches that the asynchronous engine generates while one is trained; see `recipes.streamed`.
        label: what the run is called in tables and figures; the recipe's name by default.
        task: the built-in task that it trains on; "" for a model and prompts of the user's own.
        track: trackers that its metrics go to as well (see `rollalloc.train.trackers`); they change nothing.

    Raises:
        ValueError: a number out of its range.
    """

    source: Source
    recipe: str
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    settings: Settings
    max_rollouts: int | None = None
    staleness: int | None = None
    ahead: int | None = None
    label: str = ""
    task: str = ""
    track: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_rollouts is not None:
            at_least("max_rollouts", self.max_rollouts, 1)
        buffer, longest = self.source.overlong_buffer, self.settings.sampling.max_new_tokens
        if buffer is not None and buffer > longest:
            raise ValueError(f"overlong_buffer must be at most max_new_tokens, {longest}, got {buffer}")
        if self.staleness is not None:
            at_least("staleness", self.staleness, 0)
        if self.ahead is not None and self.settings.engine == "sync":
            raise ValueError(
                "ahead: the synchronous engine trains nothing while it generates; take engine=async as well"
            )

    def made_recipe(self) -> Recipe:
        """The recipe as the engine carries it out, with the run's budget; a `ValueError` where it cannot be made."""
        recipe = make_recipe(self.recipe, self.parameters)
        if self.settings.engine == "async":
            recipe = streamed(recipe, staleness=self.staleness, ahead=self.ahead)
        elif self.staleness is not None:
            recipe = replace(recipe, max_staleness=self.staleness)
        if self.max_rollouts is None:
            return recipe
        return replace(recipe, budget=replace(recipe.budget, run_rollouts=self.max_rollouts))

    @property
    def name(self) -> str:
        """The label, or the recipe's name."""
        return self.label or self.recipe

    def description(self) -> dict[str, Any]:
        """The run as plain data: what must be equal for a finished run to be used again."""
        described = {"schema": _SCHEMA, **asdict(self)}
        for name in (*SAVING, *WAITING, *(ASYNC if self.settings.engine == "sync" else ())):
            del described["settings"][name]
        del described["track"]
        return json.loads(json.dumps(described))

    def is_in(self, folder: Path) -> bool:
        """Whether a folder's `run.json` is of this very run, on files with the same contents as now."""
        saved, digests = self._saved_in(folder)
        if saved != self.description():
            return False
        now = digests_of(self.source)
        # A file that is gone has no contents that could differ.
        return all(digests.get(name) == now[name] for name in now)

    def is_described_in(self, folder: Path) -> bool:
        """Whether a folder's `run.json` says the same, whatever its files held then; quick, however large they are."""
        return self._saved_in(folder)[0] == self.description()

    @staticmethod
    def _saved_in(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
        """The description in a folder, and the digests of the run's files beside it; empty where there is none.

        Raises:
            ValueError: it is damaged, or of another schema.
        """
        path = folder / DESCRIPTION
        if not path.exists():
            return {}, {}
        try:
            saved = json.loads(read_text(path))
            schema, digests = saved.get("schema"), saved.pop("digests", {})
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} does not describe a run ({error}); it is damaged, or another program's") from None
        if schema != _SCHEMA:
            raise ValueError(
                f"{path} has schema {short(schema)}, expected {_SCHEMA}; it is not of this version of rollalloc, which can "
                "neither resume nor reuse the run: use the version that wrote it, or give another folder (--out)"
            )
        return saved, digests

    @staticmethod
    def described_in(folder: Path) -> Run:
        """The run that a folder's `run.json` describes.

        Raises:
            FileNotFoundError, ValueError: there is none, or it is damaged or of another version.
        """
        path = folder / DESCRIPTION
        if not path.exists():
            raise FileNotFoundError(ENOENT, "expected the folder of a run, with run.json in it", str(folder))
        try:
            saved = Run._saved_in(folder)[0]
            return _revived(Run, {name: value for name, value in saved.items() if name != "schema"})
        except (TypeError, KeyError) as error:
            raise ValueError(
                f"{path} is not of this version of rollalloc ({error}); the one that wrote it reads it"
            ) from None


def _revived(kind: type[Any], saved: Mapping[str, Any]) -> Any:
    """A dataclass from what `asdict` and JSON made of it; in it, lists were tuples.

    Raises:
        TypeError: a value is not of its field's type, or there is no such field.
    """
    hints = get_type_hints(kind)
    given: dict[str, Any] = {}
    for name, value in saved.items():
        nested = next((each for each in (hints.get(name), *get_args(hints.get(name))) if is_dataclass(each)), None)
        if nested is not None and isinstance(value, dict):
            given[name] = _revived(cast("type[Any]", nested), value)
        else:
            given[name] = tuple(value) if isinstance(value, list) else value
        if name in hints and not _fits(given[name], hints[name]):
            expected = hints[name].__name__ if type(hints[name]) is type else hints[name]
            raise TypeError(f"{kind.__name__}.{name}: expected {expected}, got {short(value)}")
    return kind(**given)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type, of those that the fields of a run have."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(_fits(value, each) for each in inner)
    if kind is Literal:
        return value in inner
    if kind is tuple:
        kinds = inner[:1] * len(value) if inner[-1] is ... and isinstance(value, tuple) else inner
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(_fits, value, kinds))
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return hint is Any or isinstance(value, kind or hint)


def folder_of(run: Run, folder: Path) -> Path:
    """Where a run stands among others."""
    return folder / run.task.replace("/", "-") / f"{run.name}-{run.settings.seed}"


def digests_of(source: Source) -> dict[str, str]:
    """SHA-256 of each file that a source names and that is on this machine, by its path."""
    named = [*source.prompts, source.heldout, source.model, _reward_file(source.reward)]
    places = [Path(name) for name in named if name is not None]
    files = [file for place in places for file in (sorted(place.rglob("*")) if place.is_dir() else [place])]
    return {str(file): _digest(file, file.stat().st_mtime_ns) for file in files if file.is_file()}


@cache
def _digest(file: Path, changed_ns: int) -> str:
    with file.open("rb") as opened:
        return file_digest(opened, "sha256").hexdigest()


def _reward_file(reward: str) -> str | None:
    """The file of a reward function, `file.py:function` or `package.module:function`; nothing is imported."""
    module = reward.rpartition(":")[0]
    if module.endswith(".py"):
        return module
    package, *inner = module.split(".")
    found = PathFinder.find_spec(package, [str(Path.cwd()), *sys.path])
    if found is None or not inner:
        return None if found is None else found.origin
    places = [Path(place, *inner) for place in found.submodule_search_locations or ()]
    files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]
    return str(files[0]) if files else None
