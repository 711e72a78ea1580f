"""The one schema that every log is read into: groups, each one visit of one prompt, in columns."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollalloc.lab.waste.texts import NOTHING, WIDTH, answer_hash, features_of

NO_STEP = -(1 << 62)  # in a column of steps: the log does not say
NOT_SAID = -1  # in a column of truncated rollouts or of tokens
SAME = 1e-9  # rewards that differ by no more are the same


@dataclass(frozen=True, eq=False)
class Groups:
    """V visits of P prompts with R rollouts in all, as columns: a group is one visit of one prompt.

    Attributes:
        keys: of the prompts, each once, length P.
        prompt_V: index into `keys`.
        step_V: of the training run, `NO_STEP` where the log does not say.
        begin_V: index of each visit's first rollout in `rewards_R`; a visit has at least one.
        first_V: rollouts of each that were ordered before any result was known.
        truncated_V: rollouts of each that hit the length limit, `NOT_SAID` where the log does not say.
        rewards_R: visit after visit; NaN where a rollout has no score.
        tokens_R: of each rollout, `NOT_SAID` where the log does not say.
        characters_R: of each rollout's text, `NOT_SAID` where the log has none.
        answer_R: a hash of each rollout's answer, the same for the same answer within this process; 0 where the log has no
            text.
        features_PD: numbers of each prompt's text, NaN where the log has none (`texts.features_of`).
    """

    keys: Sequence[str]
    prompt_V: NDArray[np.int64]
    step_V: NDArray[np.int64]
    begin_V: NDArray[np.int64]
    first_V: NDArray[np.int64]
    truncated_V: NDArray[np.int64]
    rewards_R: NDArray[np.float64]
    tokens_R: NDArray[np.int64]
    characters_R: NDArray[np.int64]
    answer_R: NDArray[np.int64]
    features_PD: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.prompt_V)

    def take(self, which: NDArray[Any]) -> Groups:
        """Some of the groups, by index or by a mask, in that order."""
        rows = np.flatnonzero(which) if which.dtype == bool else which
        size_V = self.size_V[rows]
        begin_V = np.cumsum(size_V) - size_V
        taken_R = np.repeat(self.begin_V[rows] - begin_V, size_V) + np.arange(size_V.sum())
        return Groups(
            self.keys,
            self.prompt_V[rows],
            self.step_V[rows],
            begin_V,
            self.first_V[rows],
            self.truncated_V[rows],
            self.rewards_R[taken_R],
            self.tokens_R[taken_R],
            self.characters_R[taken_R],
            self.answer_R[taken_R],
            self.features_PD,
        )

    def first(self) -> Groups:
        """With those rollouts alone that were ordered before any result was known; visits without any are left out."""
        size_V = np.minimum(self.first_V, self.size_V)
        place_R = np.arange(len(self.rewards_R)) - np.repeat(self.begin_V, self.size_V)
        kept_R, kept_V = place_R < np.repeat(size_V, self.size_V), size_V > 0
        return Groups(
            self.keys,
            self.prompt_V[kept_V],
            self.step_V[kept_V],
            (np.cumsum(size_V) - size_V)[kept_V],
            size_V[kept_V],
            np.where(self.first_V >= self.size_V, self.truncated_V, NOT_SAID)[kept_V],
            self.rewards_R[kept_R],
            self.tokens_R[kept_R],
            self.characters_R[kept_R],
            self.answer_R[kept_R],
            self.features_PD,
        )

    def judged(self, threshold: float | None) -> Groups:
        """With 1 for each reward of at least `threshold`, 0 for each below; as they are where it is None."""
        if threshold is None:
            return self
        right_R = (self.rewards_R >= threshold).astype(np.float64)
        return replace(self, rewards_R=np.where(np.isnan(self.rewards_R), np.nan, right_R))

    @cached_property
    def size_V(self) -> NDArray[np.int64]:
        """Rollouts of each visit."""
        return np.diff(self.begin_V, append=len(self.rewards_R))

    @cached_property
    def scored_V(self) -> NDArray[np.int64]:
        """Rollouts of each visit that have a score."""
        return np.add.reduceat(~np.isnan(self.rewards_R), self.begin_V, dtype=np.int64) if len(self) else self.size_V

    @cached_property
    def low_V(self) -> NDArray[np.float64]:
        """Lowest score of each visit, NaN where there is none."""
        return np.fmin.reduceat(self.rewards_R, self.begin_V) if len(self) else np.zeros(0)

    @cached_property
    def high_V(self) -> NDArray[np.float64]:
        """Highest score of each visit, NaN where there is none."""
        return np.fmax.reduceat(self.rewards_R, self.begin_V) if len(self) else np.zeros(0)

    @cached_property
    def mixed_V(self) -> NDArray[np.bool_]:
        """Visits whose scores differ."""
        return self.high_V - self.low_V > SAME

    @cached_property
    def visited(self) -> NDArray[np.int64]:
        """Indices into `keys` of the prompts that were visited, sorted by key."""
        return np.array(sorted(np.unique(self.prompt_V).tolist(), key=self.keys.__getitem__), np.int64)


@dataclass(slots=True)
class Log:
    """What was read.

    Attributes:
        format: which reader read it.
        groups: in the order of their first rollout; None where the log has only sums.
        accounts: rollouts by cause as the trainer itself booked them; None where it did not.
        complete: False where groups without variance may have been left out before the log was written.
        notes: what a reader of the result should know.
        bad: lines or rows that could not be used.
        first_bad: where the first of them is and what is wrong with it.
        odd: fields that are not what they should be and count as not there.
        first_odd: where the first of them is and what is wrong with it.
    """

    format: str
    groups: Groups | None = None
    accounts: dict[str, int] | None = None
    complete: bool = True
    notes: list[str] = field(default_factory=list)
    bad: int = 0
    first_bad: str = ""
    odd: int = 0
    first_odd: str = ""

    def reject(self, where: str, why: str) -> None:
        """Count a line that cannot be used; the first is told of."""
        self.bad += 1
        self.first_bad = self.first_bad or f"{where}: {why}"

    def doubt(self, where: str, why: str, fields: int = 1) -> None:
        """Count fields that are taken as not there; the first is told of."""
        self.odd += fields
        self.first_odd = self.first_odd or f"{where}: {why}"


class Gathering:
    """Rollouts, as they are read, put into groups. Holds numbers and keys; texts are hashed and forgotten."""

    def __init__(self) -> None:
        self._open: dict[Hashable, int] = {}
        self._number: dict[str, int] = {}  # by prompt
        self._prompt_V, self._step_V = array("q"), array("q")
        self._visit_R, self._reward_R = array("q"), array("d")
        self._tokens_R, self._characters_R, self._answer_R = array("q"), array("q"), array("q")
        self._features = array("f")  # prompt after prompt
        self._late_R, self._truncated_R = array("b"), array("b")

    def add(
        self, group: Hashable, prompt: str, step: int | None, reward: float | None,
        *, truncated: bool | None = None, stage: int = 0, tokens: int | None = None, asked: str | None = None,
        answered: str | None = None,
    ) -> None:  # fmt: skip
        """A rollout of a group.

        Args:
            group: its name.
            prompt: its key; this, `step` and `asked` count where the rollout is the group's first.
            step: as in `Groups`, like all that follow.
            asked: the prompt's text, None where the log has none; numbers of it are kept.
            answered: the rollout's text, likewise.
        """
        visit = self._open.get(group)
        if visit is None:
            visit = self._open[group] = len(self._prompt_V)
            self._prompt_V.append(self._numbered(prompt, asked))
            self._step_V.append(NO_STEP if step is None else step)
        self._visit_R.append(visit)
        self._reward_R.append(np.nan if reward is None else reward)
        self._tokens_R.append(NOT_SAID if tokens is None else tokens)
        self._characters_R.append(NOT_SAID if answered is None else len(answered))
        self._answer_R.append(0 if answered is None else answer_hash(answered))
        self._late_R.append(stage != 0)
        self._truncated_R.append(NOT_SAID if truncated is None else truncated)

    def _numbered(self, prompt: str, asked: str | None) -> int:
        number = self._number.setdefault(prompt, len(self._number))
        if number * WIDTH == len(self._features):
            self._features.extend(NOTHING if asked is None else features_of(asked))
        return number

    def close(self) -> None:
        """Forget the names of groups: no rollout of them comes any more."""
        self._open.clear()

    def groups(self) -> Groups:
        """All groups."""
        visit_R, late_R = np.array(self._visit_R, np.int64), np.array(self._late_R, np.bool_)
        # Those of later stages last: early verdicts let a stage begin while the one before it still runs.
        order_R = np.lexsort((late_R, visit_R))
        visits = len(self._prompt_V)
        begin_V = np.searchsorted(visit_R[order_R], np.arange(visits))
        truncated_R = np.array(self._truncated_R, np.int64)[order_R]
        said_V = truncated_R[begin_V] != NOT_SAID
        truncated_V = np.bincount(visit_R[order_R], truncated_R == 1, visits).astype(np.int64)
        return Groups(
            tuple(self._number),
            np.array(self._prompt_V, np.int64),
            np.array(self._step_V, np.int64),
            begin_V,
            np.bincount(visit_R, ~late_R, visits).astype(np.int64),
            np.where(said_V, truncated_V, NOT_SAID),
            np.array(self._reward_R, np.float64)[order_R],
            np.array(self._tokens_R, np.int64)[order_R],
            np.array(self._characters_R, np.int64)[order_R],
            np.array(self._answer_R, np.int64)[order_R],
            np.array(self._features, np.float32).reshape(-1, WIDTH),
        )


def key_of(text: str) -> str:
    """A short key of a text."""
    return blake2b(text.encode("utf-8", "replace"), digest_size=10).hexdigest()
