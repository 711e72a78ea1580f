"""Judges: what happens to a group when its results have arrived."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from rollalloc.core.group import GroupView
from rollalloc.core.prompt_pool import NEXT_EPOCH, Until
from rollalloc.core.rule import ALIKE, Act, JudgeRule, JudgeTraits, Verdict, View

SUCCESS_ABOVE = 0.7  # a metric above this is a success, as in Reinforce-Ada
TINY = 1e-9  # tolerance for rounding: 1 - 0.9 is a little less than 0.1


def mixed(group: GroupView, min_spread: float = 0.0) -> bool:
    """Whether metrics of the group differ, and the largest exceeds the smallest by at least `min_spread`."""
    if group.metrics_G.size == 0:
        return False
    low, high = float(group.metrics_G.min()), float(group.metrics_G.max())
    return low != high and high - low >= min_spread - TINY


def refuse_spread(min_spread: float) -> None:
    """Raise a ValueError unless `min_spread` is a finite number of 0 or more."""
    if not 0 <= min_spread < inf:
        raise ValueError(f"min_spread must be a difference of metrics, 0 or more and finite; got {min_spread!r}")


@dataclass(frozen=True, slots=True)
class Complete(JudgeRule):
    """Train on every group when all its rollouts have ended (GRPO). `until`: when its prompt may be drawn again."""

    until: Until = NEXT_EPOCH

    @property
    def traits(self) -> JudgeTraits:
        return JudgeTraits(reads=(), waits_for_all=True, after_failure=self.until)

    def __call__(self, group: GroupView, view: View) -> Verdict | None:
        return None if group.unfinished else Verdict(Act.TRAIN, until=self.until)

    def promises(self, verdict: Verdict | None, group: GroupView, view: View) -> dict[str, bool]:
        return {
            "it decides exactly when all rollouts have ended": (verdict is None) == (group.unfinished > 0),
            "every group is trained on": verdict is None or verdict.act is Act.TRAIN,
        }


@dataclass(frozen=True, slots=True)
class NonzeroVariance(JudgeRule):
    """Keep a complete group if its metrics differ, and drop it otherwise: DAPO's dynamic sampling, arXiv 2503.14476.

        kept if  max m_i - min m_i ≥ min_spread,  and above 0        m_i: the group's metrics

    Attributes:
        act: the verdict for a group that is kept: TRAIN in the last stage, NEXT in an earlier one.
        early: keep a group as soon as two metrics differ, without waiting for its other rollouts.
        until: when the prompt may be drawn again.
        min_spread: metrics that differ by less than this count as equal; 0 or more. For graded metrics, which are
            rarely equal. 0 drops only groups whose metrics are equal.

    Raises:
        ValueError: `min_spread` is negative or not finite.
    """

    act: Act = Act.TRAIN
    early: bool = False
    until: Until = NEXT_EPOCH
    min_spread: float = 0.0

    def __post_init__(self) -> None:
        refuse_spread(self.min_spread)

    @property
    def traits(self) -> JudgeTraits:
        return JudgeTraits(reads=("metrics_G",), waits_for_all=not self.early)

    def __call__(self, group: GroupView, view: View) -> Verdict | None:
        if group.unfinished and not self.early:
            return None
        if mixed(group, self.min_spread):
            return Verdict(self.act, until=self.until)
        return None if group.unfinished else Verdict(Act.DROP, ALIKE if mixed(group) else "zero_variance", self.until)

    def promises(self, verdict: Verdict | None, group: GroupView, view: View) -> dict[str, bool]:
        metrics, ended = sorted(group.metrics_G.tolist()), not group.unfinished
        differ = len(set(metrics)) > 1 and metrics[-1] - metrics[0] >= self.min_spread - TINY
        return {
            "a group goes on only if its metrics differ": verdict is None or verdict.act is Act.DROP or differ,
            "a group is dropped only if it ended and its metrics are equal": (
                verdict is None or verdict.act is not Act.DROP or (ended and not differ)
            ),
            "it decides when all rollouts ended, and early just where it says so": (
                (verdict is not None) == (ended or (self.early and differ))
            ),
        }
