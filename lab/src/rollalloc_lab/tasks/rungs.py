"""Rungs of the ladder. A rung is a model of a certain size, with its warm-up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rollalloc.models.settings import Precision

PREFIX = "ladder/"  # prefix of the tasks' names


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """Where a rung's model comes from: a new Llama of a given shape, or a pretrained model of `rollalloc model`.

    Attributes:
        hidden: width of a new Llama, a multiple of 32; see `rollalloc.tasks.tiny.Shape`.
        layers: number of layers of the new Llama.
        pretrained: a key of `rollalloc.models.pretrained.MODELS`; None: a new Llama.
    """

    hidden: int = 0
    layers: int = 0
    pretrained: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmedUp:
    """Supervised training that stops when the share of right answers on training prompts is in [low, high].

    Attributes:
        steps: maximum number of steps.
        batch: examples per step.
        learning_rate: peak learning rate; see `rollalloc.tasks.tiny.WarmUp`.
        check_every: steps between two checks.
        low: lower end of the band, a share of right answers among sampled answers.
        high: upper end of the band.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class LadderRung:
    """A rung.

    Attributes:
        name: name of the rung; the task is "ladder/NAME".
        parameters: number of the model's parameters.
        model: where the model comes from.
        warm_up: how the model is warmed up.
    """

    name: str
    parameters: int
    model: Model
    warm_up: WarmedUp

    @property
    def task(self) -> str:
        """Its task's name."""
        return f"{PREFIX}{self.name}"


_RUNGS = (
    LadderRung(
        name="0.15m",
        parameters=137_024,
        model=Model(hidden=64, layers=2),
        warm_up=WarmedUp(steps=3000, batch=64, learning_rate=6e-3, check_every=100, pass_at_8=0.65),
    ),
    LadderRung(
        name="1m",
        parameters=1_060_992,
        model=Model(hidden=128, layers=4),
        warm_up=WarmedUp(steps=1500, batch=64, learning_rate=3e-3, check_every=100),
    ),
    LadderRung(
        name="8m",
        parameters=7_991_712,
        model=Model(hidden=288, layers=6),
        warm_up=WarmedUp(steps=800, batch=64, learning_rate=1.5e-3, check_every=50),
    ),
    LadderRung(
        name="135m",
        parameters=134_515_008,
        model=Model(pretrained="smollm2"),
        warm_up=WarmedUp(steps=400, batch=32, learning_rate=1e-4, check_every=20, precision="bf16"),
    ),
)
RUNGS: Mapping[str, LadderRung] = MappingProxyType({rung.name: rung for rung in _RUNGS})
