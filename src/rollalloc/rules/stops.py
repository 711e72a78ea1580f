"""Stops: which rollouts of a group are cancelled before they end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollalloc.core.group import GroupView
from rollalloc.core.rule import Sample, StopRule, Traits, View, longest_in, rows_of


@dataclass(frozen=True, slots=True)
class SampledTail(StopRule):
    """Once K rollouts are there that were not truncated, keep L random ones of those running, stop the rest.

    K + L are the rows that the recipe's row rule takes of a group, L those that it takes of this one for being the longest.
    Each of the r that run goes on with probability L / r, or 1 where no more than L run, and the group keeps that with it.
    With L = 0 nothing is kept. With L ≥ 1 the longest rollouts are replaced by a random sample of the late ones: no rollout
    can be known to be the longest while others run.

    A prompt whose earlier visits succeeded at a rate of `solved` at least, or of which so much is expected
    (`group.predicted`) where it has none, has no tail, but for a share `share` of its visits, by a draw of its own: there
    each goes on with probability `share` · L / r, so that the few stand for all.

    Attributes:
        solved: in (0, 1]; None: every prompt has its tail.
        share: in (0, 1].

    Raises:
        ValueError: a number out of its range.
    """

    solved: float | None = None
    share: float = 0.1

    def __post_init__(self) -> None:
        if self.solved is not None and not 0 < self.solved <= 1:
            raise ValueError(f"solved must be a success rate in (0, 1], or None, got {self.solved!r}")
        if not 0 < self.share <= 1:
            raise ValueError(
                f"share must be in (0, 1], or no late rollout of a solved prompt is seen, got {self.share!r}"
            )

    def least_scored(self, view: View) -> int:
        """K where L is largest: scored rollouts before which nothing is stopped."""
        return rows_of(view) - view.longest

    @property
    def traits(self) -> Traits:
        return Traits(reads=("truncated_G",), reads_rate=self.solved is not None, reads_rows=True)

    def __call__(self, group: GroupView, view: View, rng: np.random.Generator) -> Sequence[int] | Sample:
        # Only this stage's own rollouts count: pilots that are there before it begins would stop it at once.
        tail = longest_in(group, view)
        if not group.unfinished or group.whole < rows_of(view) - tail:
            return ()
        running = sorted(group.running)
        # A group of which some were kept has its sample already; looking again would thin it out.
        if not group.kept.keys().isdisjoint(running):
            return ()
        share = 1.0
        if tail and self._is_solved(group):
            share = self.share
            if rng.random() >= share:
                return Sample(running, {})
        if len(running) <= tail:
            return Sample((), dict.fromkeys(running, share))
        kept = set(rng.permutation(len(running))[:tail].tolist())
        return Sample(
            [rollout for at, rollout in enumerate(running) if at not in kept],
            {running[at]: share * tail / len(running) for at in sorted(kept)},
        )

    def _is_solved(self, group: GroupView) -> bool:
        """By the visits before this one, or what was expected of it: neither changes while the group runs."""
        if self.solved is None:
            return False
        record, predicted = group.record, group.predicted
        if record.attempts:
            return record.successes >= self.solved * record.attempts
        return predicted is not None and predicted >= self.solved

    def promises(self, made: Sequence[int] | Sample, group: GroupView, view: View) -> dict[str, bool]:
        whole = sum(
            not truncated and stage == group.stage
            for truncated, stage in zip(group.truncated_G.tolist(), group.stages_G.tolist(), strict=True)
        )
        stopped, kept = (made.cancel, made.kept) if isinstance(made, Sample) else (made, {})
        running = set(group.running)
        longest = view.longest if group.longest is None else group.longest
        due = whole >= rows_of(view) - longest and not running & set(group.kept)
        left = running - set(stopped)
        share = self.share if longest and self._is_solved(group) else 1.0
        none_kept = share < 1 and due and not left
        return {
            "only rollouts that run are stopped": set(stopped) <= running,
            "none is stopped before K of its stage are there, nor twice": due or not stopped,
            "then just L go on, or none of a solved prompt": (
                not due or none_kept or len(left) == min(longest, len(running))
            ),
            "each that goes on is recorded, with the share of those running that do, of a solved prompt's visits, too": (
                kept == (dict.fromkeys(left, share * len(left) / len(running)) if due and running else {})
            ),
        }


@dataclass(frozen=True, slots=True)
class ShortestOnly(StopRule):
    """Stop a group of which no row is to be the longest once its rows are there that were not truncated; let others run."""

    def least_scored(self, view: View) -> int:
        """The rows of a group: scored rollouts before which nothing is stopped."""
        return rows_of(view)

    @property
    def traits(self) -> Traits:
        return Traits(reads=("truncated_G",), reads_rows=True)

    def __call__(self, group: GroupView, view: View, rng: np.random.Generator) -> Sequence[int]:
        over = not longest_in(group, view) and group.whole >= rows_of(view)
        return sorted(group.running) if over else ()

    def promises(self, made: Sequence[int] | Sample, group: GroupView, view: View) -> dict[str, bool]:
        whole = sum(
            not truncated and stage == group.stage
            for truncated, stage in zip(group.truncated_G.tolist(), group.stages_G.tolist(), strict=True)
        )
        shortest_only = (view.longest if group.longest is None else group.longest) == 0
        return {
            "all that run are stopped once the rows are there, of a group without a longest, and none else": (
                list(made) == (sorted(group.running) if shortest_only and whole >= rows_of(view) else [])
            )
        }
