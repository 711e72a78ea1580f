"""The one schema that every log is read into: groups, each one visit of one prompt."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one visit of one prompt.

    Attributes:
        prompt: its key, the same at every visit.
        step: of the training run; None where the log does not say.
        rewards_G: of each rollout, shape (G,), the `first` ones before the others; NaN where it has no score.
        truncated: rollouts that hit the length limit; None where the log does not say.
        first: rollouts ordered before any result was known: the others' number may depend on what these came to.
    """

    prompt: str
    step: int | None
    rewards_G: NDArray[np.float64]
    truncated: int | None
    first: int


@dataclass(slots=True)
class Log:
    """What was read.

    Attributes:
        format: which reader read it.
        groups: in the order of their first rollout.
        accounts: rollouts by cause as the trainer itself booked them; None where it did not.
        complete: False where groups without variance may have been left out before the log was written.
        notes: what a reader of the result should know.
        bad: lines or rows that could not be used.
        first_bad: where the first of them is and what is wrong with it.
    """

    format: str
    groups: list[Group] = field(default_factory=list)
    accounts: dict[str, int] | None = None
    complete: bool = True
    notes: list[str] = field(default_factory=list)
    bad: int = 0
    first_bad: str = ""

    def reject(self, where: str, why: str) -> None:
        """Count a line that cannot be used; the first is told of."""
        self.bad += 1
        self.first_bad = self.first_bad or f"{where}: {why}"


class Gathering:
    """Rollouts, as they are read, put into groups. Holds numbers and keys; texts are hashed and forgotten."""

    def __init__(self) -> None:
        self._open: dict[Hashable, _Open] = {}

    def add(
        self, group: Hashable, prompt: str, step: int | None, reward: float | None,
        *, truncated: bool | None = None, stage: int = 0,
    ) -> None:  # fmt: skip
        """A rollout of a group; `prompt` and `step` count where it is the group's first."""
        held = self._open.get(group)
        if held is None:
            held = self._open[group] = _Open(prompt, step, truncated=None if truncated is None else 0)
        # Before those of later stages: early verdicts let a stage begin while the one before it still runs.
        at = held.first if stage == 0 else len(held.rewards)
        held.rewards.insert(at, np.nan if reward is None else reward)
        held.first += stage == 0
        if held.truncated is not None:
            held.truncated += bool(truncated)

    def groups(self) -> list[Group]:
        """All groups."""
        return [
            Group(held.prompt, held.step, np.array(held.rewards, np.float64), held.truncated, held.first)
            for held in self._open.values()
        ]


@dataclass(slots=True)
class _Open:
    prompt: str
    step: int | None
    truncated: int | None
    first: int = 0
    rewards: array[float] = field(default_factory=lambda: array("d"))


def outcomes(groups: Iterable[Group], threshold: float | None) -> list[Group]:
    """The groups with 1 for each reward of at least `threshold` and 0 for each below; as they are where it is None."""
    if threshold is None:
        return list(groups)
    return [
        Group(
            group.prompt,
            group.step,
            np.where(np.isnan(group.rewards_G), np.nan, group.rewards_G >= threshold),
            group.truncated,
            group.first,
        )
        for group in groups
    ]


def key_of(text: str) -> str:
    """A short key of a text."""
    return blake2b(text.encode("utf-8", "replace"), digest_size=10).hexdigest()
