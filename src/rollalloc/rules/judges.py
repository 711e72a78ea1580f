"""Judges: they decide what happens to a group as its results arrive."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rollalloc.core.group import GroupView
from rollalloc.core.prompts import NEXT_EPOCH, Until
from rollalloc.core.rule import Act, JudgeRule, JudgeTraits, Verdict, View
from rollalloc.core.teaching import SAME

SUCCESS_ABOVE = 0.7  # a metric above this is a success, as in Reinforce-Ada
TINY = 1e-9  # tolerance for rounding: 1 - 0.9 is a little less than 0.1


def mixed(group: GroupView) -> bool:
    """Whether the metrics of the group differ by more than rounding: 0.1 + 0.2 equals 0.3. `waste` counts alike."""
    return group.metrics_G.size > 0 and bool(np.ptp(group.metrics_G) > SAME)


@lru_cache(64)
def _trained(until: Until) -> Verdict:
    """The verdict TRAIN. Verdicts cannot change, and making one for each group takes four times as long."""
    return Verdict(Act.TRAIN, until=until)


@dataclass(frozen=True, slots=True)
class Complete(JudgeRule):
    """Train on every group when all its rollouts have ended (GRPO). `until` says when its prompt may be drawn again."""

    until: Until = NEXT_EPOCH

    @property
    def traits(self) -> JudgeTraits:
        return JudgeTraits(reads=(), waits_for_all=True, after_failure=self.until)

    def __call__(self, group: GroupView, view: View) -> Verdict | None:
        return None if group.unfinished else _trained(self.until)

    def promises(self, verdict: Verdict | None, group: GroupView, view: View) -> dict[str, bool]:
        return {
            "the judge decides exactly when all rollouts have ended": (verdict is None) == (group.unfinished > 0),
            "every group is trained on": verdict is None or verdict.act is Act.TRAIN,
        }


@dataclass(frozen=True, slots=True)
class NonzeroVariance(JudgeRule):
    """Train on a group if its metrics differ, and drop it otherwise. DAPO's dynamic sampling, arXiv 2503.14476.

    Attributes:
        act: the verdict if metrics differ: TRAIN in the last stage, NEXT in an earlier stage.
        early: whether to decide as soon as two metrics differ. If False, the judge waits until all rollouts have ended.
        until: when the prompt may be drawn again.
    """

    act: Act = Act.TRAIN
    early: bool = False
    until: Until = NEXT_EPOCH

    @property
    def traits(self) -> JudgeTraits:
        return JudgeTraits(reads=("metrics_G",), least_scored=2, waits_for_all=not self.early)

    def __call__(self, group: GroupView, view: View) -> Verdict | None:
        if group.unfinished and not self.early:
            return None
        if mixed(group):
            return Verdict(self.act, until=self.until)
        return None if group.unfinished else Verdict(Act.DROP, "zero_variance", self.until)

    def promises(self, verdict: Verdict | None, group: GroupView, view: View) -> dict[str, bool]:
        metrics, ended = group.metrics_G.tolist(), not group.unfinished
        differ = bool(metrics) and max(metrics) - min(metrics) > SAME
        return {
            "a group goes on only if its metrics differ": verdict is None or verdict.act is Act.DROP or differ,
            "a group is dropped only if all its rollouts have ended and its metrics are equal": (
                verdict is None or verdict.act is not Act.DROP or (ended and not differ)
            ),
            "the judge decides when all rollouts have ended, or with `early` as soon as metrics differ": (
                (verdict is not None) == (ended or (self.early and differ))
            ),
        }
