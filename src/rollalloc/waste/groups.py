"""The form into which every log is read: groups, stored in columns. A group is one visit of a prompt."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.teaching import SAME
from rollalloc.runs.own import OwnRun
from rollalloc.runs.unusable import Unusable
from rollalloc.waste.texts import NOTHING, WIDTH, answer_hash, features_of

NO_STEP = -(1 << 62)  # stands for a step that was not logged
NOT_SAID = -1  # stands for a number of tokens, characters or truncated rollouts that was not logged
_OF_VISITS = ("prompt_V", "step_V", "begin_V", "first_V")
_OF_ROLLOUTS = ("rewards_R", "truncated_R", "limited_R", "tokens_R", "characters_R", "answer_R")


@dataclass(frozen=True, eq=False)
class Groups:
    """V visits of P prompts with R rollouts in all, in columns. A group is one visit of one prompt.

    Attributes:
        keys: the different keys of prompts, length P.
        prompt_V: index of each visit's prompt in `keys`.
        step_V: training step of each visit; `NO_STEP` if not logged.
        begin_V: index of each visit's first rollout in `rewards_R`. Every visit has at least one rollout.
        first_V: number of each visit's rollouts that were ordered before any result was known.
        rewards_R: rewards, visit after visit; NaN for a rollout without a score.
        truncated_R: 1 for a rollout that reached the length limit, otherwise 0; `NOT_SAID` if not logged.
        limited_R: 1 for a rollout that reached the recipe's own limit (`rollalloc.Limit`), otherwise 0; 0 if not logged.
        tokens_R: length of each rollout in tokens; `NOT_SAID` if not logged.
        characters_R: length of each rollout's text in characters; `NOT_SAID` if not logged.
        answer_R: hash of each rollout's answer, comparable only within this process; 0 if the text is not logged.
        features_PD: features of each prompt's text (`texts.features_of`); NaN if not logged.
    """

    keys: Sequence[str]
    prompt_V: NDArray[np.int64]
    step_V: NDArray[np.int64]
    begin_V: NDArray[np.int64]
    first_V: NDArray[np.int64]
    rewards_R: NDArray[np.float64]
    truncated_R: NDArray[np.int64]
    limited_R: NDArray[np.int64]
    tokens_R: NDArray[np.int64]
    characters_R: NDArray[np.int64]
    answer_R: NDArray[np.int64]
    features_PD: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.prompt_V)

    def take(self, which: NDArray[Any]) -> Groups:
        """Some of the groups, by index or mask, in the given order."""
        rows = np.flatnonzero(which) if which.dtype == bool else which
        size_V = self.size_V[rows]
        begin_V = np.cumsum(size_V) - size_V
        taken_R = np.repeat(self.begin_V[rows] - begin_V, size_V) + np.arange(size_V.sum())
        return self._part(rows, taken_R, begin_V=begin_V)

    def first(self) -> Groups:
        """Only the rollouts that were ordered before any result was known. Visits without such rollouts are left out."""
        size_V = np.minimum(self.first_V, self.size_V)
        place_R = np.arange(len(self.rewards_R)) - np.repeat(self.begin_V, self.size_V)
        kept_R, kept_V = place_R < np.repeat(size_V, self.size_V), size_V > 0
        return self._part(
            kept_V,
            kept_R,
            begin_V=(np.cumsum(size_V) - size_V)[kept_V],
            first_V=size_V[kept_V],
        )

    def _part(self, visits: NDArray[Any], rollouts: NDArray[Any], **changes: NDArray[np.int64]) -> Groups:
        """Some visits and rollouts, by index or mask. `changes` replaces columns."""
        of_visits = {name: getattr(self, name)[visits] for name in _OF_VISITS}
        of_rollouts = {name: getattr(self, name)[rollouts] for name in _OF_ROLLOUTS}
        return replace(self, **{**of_visits, **of_rollouts, **changes})

    def judged(self, threshold: float | None) -> Groups:
        """Replace rewards by 1 if they are at least `threshold`, otherwise by 0. Without a threshold, they are unchanged."""
        if threshold is None:
            return self
        right_R = (self.rewards_R >= threshold).astype(np.float64)
        return replace(self, rewards_R=np.where(np.isnan(self.rewards_R), np.nan, right_R))

    @cached_property
    def size_V(self) -> NDArray[np.int64]:
        """Number of rollouts of each visit."""
        return np.diff(self.begin_V, append=len(self.rewards_R))

    @cached_property
    def scored_V(self) -> NDArray[np.int64]:
        """Number of rollouts of each visit that have a score."""
        return np.add.reduceat(~np.isnan(self.rewards_R), self.begin_V, dtype=np.int64) if len(self) else self.size_V

    @cached_property
    def truncated_V(self) -> NDArray[np.int64]:
        """Number of rollouts of each visit that reached the length limit; `NOT_SAID` if not logged."""
        return self._truncated(self.truncated_R)

    @cached_property
    def truncated_scored_V(self) -> NDArray[np.int64]:
        """Number of scored rollouts of each visit that reached the length limit; `NOT_SAID` if not logged."""
        return self._truncated(np.where(np.isnan(self.rewards_R), np.minimum(self.truncated_R, 0), self.truncated_R))

    @cached_property
    def limited_V(self) -> NDArray[np.int64]:
        """Number of rollouts of each visit that the recipe's own limit stopped."""
        return self._sum(self.limited_R)

    @cached_property
    def limited_scored_V(self) -> NDArray[np.int64]:
        """Number of scored rollouts of each visit that the recipe's own limit stopped."""
        return self._sum(np.where(np.isnan(self.rewards_R), 0, self.limited_R))

    def _sum(self, count_R: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.add.reduceat(count_R, self.begin_V) if len(self) else self.size_V

    def _truncated(self, truncated_R: NDArray[np.int64]) -> NDArray[np.int64]:
        if not len(self):
            return self.size_V
        logged_V = np.minimum.reduceat(truncated_R, self.begin_V) != NOT_SAID
        return np.where(logged_V, self._sum(truncated_R), NOT_SAID)

    @cached_property
    def low_V(self) -> NDArray[np.float64]:
        """Lowest score of each visit; NaN without a score."""
        return np.fmin.reduceat(self.rewards_R, self.begin_V) if len(self) else np.zeros(0)

    @cached_property
    def high_V(self) -> NDArray[np.float64]:
        """Highest score of each visit; NaN without a score."""
        return np.fmax.reduceat(self.rewards_R, self.begin_V) if len(self) else np.zeros(0)

    @cached_property
    def mixed_V(self) -> NDArray[np.bool_]:
        """Whether each visit's scores differ."""
        return self.high_V - self.low_V > SAME

    @cached_property
    def visited(self) -> NDArray[np.int64]:
        """Indices in `keys` of the prompts that have a visit, sorted by key."""
        return np.array(sorted(np.unique(self.prompt_V).tolist(), key=self.keys.__getitem__), np.int64)


@dataclass(slots=True)
class Log(Unusable):
    """The contents of a log.

    Attributes:
        format: format of the files.
        groups: the groups, in the order of their first rollout. None: the log has only totals.
        accounts: the trainer's own numbers of rollouts by cause. None: not logged.
        complete: False if groups without variance may have been left out before the log was written.
        runs: the runs of rollalloc that wrote the log, by their own records.
        selected: why the rollouts are not a fair sample of those that were paid, so that success rates cannot be read from
            them; empty if they are.
        remedy: what gives a fair sample instead, if `selected` is set.
        skipped: number of rollouts that the log's ids show to be missing in the middle of a batch; 0 if there are no ids.
        notes: notes for readers of the result.
        odd: number of invalid fields, which are treated as missing.
        first_odd: place and problem of the first such field.
    """

    format: str
    groups: Groups | None = None
    accounts: dict[str, int] | None = None
    complete: bool = True
    runs: list[OwnRun] = field(default_factory=list[OwnRun])
    selected: str = ""
    remedy: str = ""
    skipped: int = 0
    notes: list[str] = field(default_factory=list)
    odd: int = 0
    first_odd: str = ""

    def doubt(self, where: str, why: str) -> None:
        """Count an invalid field, which is treated as missing, and store the first one."""
        self.odd += 1
        self.first_odd = self.first_odd or f"{where}: {why}"


class Gathering:
    """Collects rollouts into groups while a log is read. It keeps numbers, keys and hashes, but no texts."""

    def __init__(self) -> None:
        self._open: dict[Hashable, int] = {}
        self._number: dict[str, int] = {}  # index of each prompt key
        self._prompt_V, self._step_V = array("q"), array("q")
        self._visit_R, self._reward_R = array("q"), array("d")
        self._tokens_R, self._characters_R, self._answer_R = array("q"), array("q"), array("q")
        self._features = array("f")  # features, prompt after prompt
        self._late_R, self._truncated_R, self._limited_R = array("b"), array("b"), array("b")

    def add(
        self, group: Hashable, prompt: str, step: int | None, reward: float | None,
        *, truncated: bool | None = None, limited: bool = False, stage: int = 0, tokens: int | None = None,
        asked: str | None = None, answered: str | None = None,
    ) -> None:  # fmt: skip
        """Add a rollout to a group. `Groups` describes the arguments that are not listed here.

        Args:
            group: any hashable name of the group.
            prompt: key of the prompt. `prompt`, `step` and `asked` are read only for the group's first rollout.
            step: the training step; None if not logged.
            asked: the prompt's text, from which features are computed; None if not logged.
            answered: the rollout's text, from which a hash is computed; None if not logged.
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
        self._limited_R.append(limited)

    def _numbered(self, prompt: str, asked: str | None) -> int:
        number = self._number.setdefault(prompt, len(self._number))
        if number * WIDTH == len(self._features):
            self._features.extend(NOTHING if asked is None else features_of(asked))
        return number

    def close(self) -> None:
        """Forget the names of the groups. Call this when no more rollouts of these groups can come."""
        self._open.clear()

    def groups(self) -> Groups:
        """All groups so far."""
        visit_R, late_R = np.array(self._visit_R, np.int64), np.array(self._late_R, np.bool_)
        # Sort by stage, because rollouts of a stage may be logged before those of the previous stage.
        order_R = np.lexsort((late_R, visit_R))
        visits = len(self._prompt_V)
        begin_V = np.searchsorted(visit_R[order_R], np.arange(visits))
        return Groups(
            tuple(self._number),
            np.array(self._prompt_V, np.int64),
            np.array(self._step_V, np.int64),
            begin_V,
            np.bincount(visit_R, ~late_R, visits).astype(np.int64),
            np.array(self._reward_R, np.float64)[order_R],
            np.array(self._truncated_R, np.int64)[order_R],
            np.array(self._limited_R, np.int64)[order_R],
            np.array(self._tokens_R, np.int64)[order_R],
            np.array(self._characters_R, np.int64)[order_R],
            np.array(self._answer_R, np.int64)[order_R],
            np.array(self._features, np.float32).reshape(-1, WIDTH),
        )


def key_of(text: str) -> str:
    """A short key for a text."""
    return blake2b(text.encode("utf-8", "replace"), digest_size=10).hexdigest()
