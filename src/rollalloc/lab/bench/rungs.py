"""Rungs of the ladder. A rung is a TOML file that describes a model, its warm-up, its questions and its runs' budget.

Built-in rungs are in `ladder/NAME.toml`; `read_rung` reads any file.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from rollalloc.files.opening import read_text
from rollalloc.files.text import one_line
from rollalloc.models.dtypes import Precision
from rollalloc.models.pretrained import MODELS

__all__ = ["PREFIX", "RUNGS", "Budgeted", "LadderRung", "Model", "Questions", "WarmedUp", "read_rung"]

PREFIX = "ladder/"  # prefix of the tasks' names
_NAME = re.compile(r"(?!.*\.\.)[a-z0-9][a-z0-9._-]{0,59}")
_MOST_SEEDS = 1000
_SHOWN = 1000  # maximum number of characters of an error message


def _check_precision(where: str, precision: str) -> None:
    if precision not in get_args(Precision):
        raise ValueError(f"{where}: precision must be one of {', '.join(get_args(Precision))}, got {precision!r}")


def _are_counts(*values: object) -> bool:
    return all(type(value) is int and value >= 1 for value in values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """Where a rung's model comes from: a new model of a given shape, a name of `rollalloc model`, or a name on the hub.

    Attributes:
        hidden: width of a new Llama, a multiple of 32; see `rollalloc.lab.bench.tasks.tiny.Shape`.
        layers: number of layers of the new Llama.
        pretrained: a key of `rollalloc.models.pretrained.MODELS`.
        hub: a name on the hub, for `from_pretrained`.
    """

    hidden: int | None = None
    layers: int | None = None
    pretrained: str | None = None
    hub: str | None = None

    def __post_init__(self) -> None:
        if (self.hidden is None) != (self.layers is None):
            raise ValueError("model: give both hidden and layers, or neither")
        if sum(each is not None for each in (self.hidden, self.pretrained, self.hub)) != 1:
            raise ValueError("model: expected either hidden with layers, or pretrained, or hub")
        if self.hidden is not None and (self.hidden < 32 or self.hidden % 32 or (self.layers or 0) < 1):
            raise ValueError(
                f"model: expected hidden a multiple of 32 and layers at least 1, got {self.hidden}, {self.layers}"
            )
        if self.pretrained is not None and self.pretrained not in MODELS:
            raise ValueError(f"model: no pretrained {self.pretrained!r}; there is {', '.join(MODELS)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """Questions other than the ladder's mixture.

    Attributes:
        train: file from `rollalloc data prepare`, by its name without suffix, or a path.
        heldout: the held-out questions, in the same form.
        sets: arguments for `rollalloc data prepare`, quoted in the error if files are missing.
        reward: `package.module:function`.
        single_answer: each question has exactly one right answer string.
    """

    train: str
    heldout: str
    reward: str
    sets: Sequence[str] = ()
    single_answer: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmedUp:
    """Supervised training that stops when the share of right answers on training prompts is in [low, high].

    Attributes:
        steps: maximum number of steps.
        batch: examples per step.
        learning_rate: peak learning rate; see `rollalloc.lab.bench.tasks.tiny.WarmUp`.
        check_every: steps between two checks.
        low: minimum share of sampled answers that are right.
        high: maximum share of sampled answers that are right.
        pass_at_8: minimum probability that one of eight answers is right; below it, the warm-up continues.
        precision: precision of the computation; see `rollalloc.train.config.Config`.
    """

    steps: int
    batch: int
    learning_rate: float
    check_every: int
    low: float = 0.25
    high: float = 0.35
    pass_at_8: float = 0.7
    precision: Precision = "fp32"

    def __post_init__(self) -> None:
        _check_precision("warm_up", self.precision)
        if not _are_counts(self.steps, self.batch, self.check_every) or not 0 < self.learning_rate < inf:
            raise ValueError("warm_up: expected whole steps, batch and check_every, and a learning_rate, above 0")
        if not 0 <= self.low < self.high <= 1 or not 0 <= self.pass_at_8 <= 1:
            raise ValueError(
                f"warm_up: expected 0 <= low < high <= 1, got {self.low}, {self.high}; and a pass_at_8 in [0, 1]"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Budgeted:
    """Budget and evaluation of a rung's final runs.

    Attributes:
        target: held-out accuracy, fixed before the runs.
        max_rollouts: rollouts of each run.
        learning_rate: learning rate of every method.
        eval_every: rollouts between two points of the evaluation grid.
        max_new_tokens: maximum tokens per rollout.
        seeds: number of seeds.
        eval_samples: samples per held-out prompt, if accuracy is sampled.
        rollouts_per_second: rollouts per second of one core or device, for `--plan`; None: not measured.
        device: e.g. "cpu"; None: a GPU if there is one.
        precision: precision of updates and exact evaluations; see `rollalloc.train.config.Config`.
    """

    target: float
    max_rollouts: int
    learning_rate: float
    eval_every: int
    max_new_tokens: int
    seeds: int
    eval_samples: int = 4
    rollouts_per_second: float | None = None
    device: str | None = None
    precision: Precision = "auto"

    def __post_init__(self) -> None:
        _check_precision("run", self.precision)
        counts = (self.max_rollouts, self.eval_every, self.max_new_tokens, self.seeds, self.eval_samples)
        if not _are_counts(*counts) or not 0 < self.learning_rate < inf or not 0 < self.target <= 1:
            raise ValueError(
                f"run: expected whole numbers of at least 1, a learning_rate above 0 and a target in (0, 1], got {self}"
            )
        if self.seeds > _MOST_SEEDS:
            raise ValueError(f"run: expected at most {_MOST_SEEDS:,} seeds, got {self.seeds:,}")
        if self.rollouts_per_second is not None and not self.rollouts_per_second > 0:
            raise ValueError(f"run: rollouts_per_second must be above 0, got {self.rollouts_per_second}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LadderRung:
    """A rung: a model of some size, with its warm-up, questions and runs.

    Attributes:
        name: name of the rung; the task is "ladder/NAME".
        parameters: approximate number of the model's parameters.
        about: one sentence about the rung.
        model: where the model comes from.
        run: budget and evaluation.
        warm_up: how the model is warmed up; None: it is used as it is.
        questions: None: the six families of questions of `rollalloc data ladder`.
    """

    name: str
    parameters: int
    about: str
    model: Model
    run: Budgeted
    warm_up: WarmedUp | None = None
    questions: Questions | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"name: expected at most 60 lower-case letters, digits, '.', '_' and '-', no '..', got {self.name!r}"
            )
        if self.parameters < 1:
            raise ValueError(f"parameters must be at least 1, got {self.parameters}")
        if self.warm_up is None and self.model.hidden is not None:
            raise ValueError("warm_up: a model from scratch needs one")
        if self.warm_up is not None and (self.questions is not None or self.model.hub is not None):
            raise ValueError("warm_up: only works with the ladder's own questions and a local model")

    @property
    def task(self) -> str:
        """Its task's name."""
        return f"{PREFIX}{self.name}"


def read_rung(path: Path) -> LadderRung:
    """Read a rung from a TOML file.

    Raises:
        OSError: it cannot be read.
        ValueError: names the file and what is missing, unknown or out of range.
    """
    return _rung(str(path), lambda: read_text(path))


_TABLES = {"model": Model, "run": Budgeted, "warm_up": WarmedUp, "questions": Questions}


def _rung(place: str, text: Callable[[], str]) -> LadderRung:
    try:
        fields: dict[str, Any] = tomllib.loads(text())
        return LadderRung(**{name: _TABLES[name](**of) if name in _TABLES else of for name, of in fields.items()})
    except (ValueError, TypeError, RecursionError) as error:  # raised for invalid UTF-8 or TOML
        raise ValueError(f"{place} describes no rung of the ladder: {one_line(str(error), _SHOWN)}") from None


def _own() -> dict[str, LadderRung]:
    """The built-in rungs, the small ones first."""
    folder = files("rollalloc.lab.bench") / "ladder"
    rungs = [_rung(entry.name, partial(entry.read_text, encoding="utf-8")) for entry in folder.iterdir()]
    return {entry.name: entry for entry in sorted(rungs, key=lambda rung: rung.parameters)}


RUNGS: Mapping[str, LadderRung] = MappingProxyType(_own())
