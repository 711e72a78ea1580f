"""What share of a run's rollouts taught something, and warnings if most of them did not, or if few prompts are left.

All commands, logs and pages use this definition and these words.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollalloc.core.allocator import Allocator
from rollalloc.core.teaching import WINDOW, are_alone, never_differed, silent

_LEADS = 2.0  # advice is given if the most frequent cause has at least this many times the share of any other
_WOULD_HELP = {
    "wrong": "easier prompts or a stronger model to begin with would help",
    "right": "harder prompts would help, or the run is done",
    "alike": "a reward that tells rollouts apart would help",
}
_MIXED_CAUSES = "no one cause leads, so prompts that are sometimes solved would help more than easier or harder ones"
_CHECK = {  # advice if the last rollouts all had the same outcome
    "wrong": "check the reward function: the last rollouts were all wrong. Try it on an answer that you know to be right, "
    "look at the form of the ground truths, and see whether rollouts are cut off before they answer. If all that is "
    "in order, the model cannot do the task: easier prompts or a stronger model would help",
    "right": "the last rollouts were all right: harder prompts would help, or the run is done. If all rollouts were right "
    "from the start, check the reward function on an answer that you know to be wrong",
    "alike": "check the reward function: in each of the last groups, all rollouts got the same reward, so nothing can be "
    "learned. The reward must be higher for a better answer",
}


def share_taught(accounts: Mapping[str, int]) -> float | None:
    """The share of a run's rollouts that taught something: trained on, in a group with an advantage other than 0.

        trained / (all causes − open)

    This holds for every recipe. Without groups, each row is a group of its own, and its advantage is relative to a
    prediction or a mean.

    Args:
        accounts: number of rollouts by cause, as `Allocator.accounts` counts them.

    Returns:
        The share, in [0, 1]; None if no rollout has ended.
    """
    ended = sum(accounts.values()) - accounts.get("open", 0)
    return accounts.get("trained", 0) / ended if ended > 0 else None


def notices(allocator: Allocator, more: str = "") -> list[str]:
    """The warnings to log after a batch: most rollouts had no effect, few prompts are left, or replay gives nothing.

    Args:
        allocator: the run's allocator.
        more: text to add to the first of these warnings.
    """
    line = in_words(allocator.teaching.shares()) if allocator.teaching.should_warn else None
    lines = (None if line is None else line + more, allocator.few_prompts(), allocator.shut_gate())
    return [line for line in lines if line is not None]


def in_words(shares: Mapping[str, float]) -> str | None:
    """The warning that most of the recent rollouts had no effect on training, with advice; None if no warning is needed.

    Args:
        shares: shares of the recent rollouts by outcome, from `Teaching.shares` or a line of the metrics.
    """
    share, limits = silent(shares)
    if share < limits.begin:
        return None
    if (outcome := never_differed(shares)) is not None:
        return _CHECK[outcome]
    alone = are_alone(shares)
    beginnings = ("",) if alone else ("all_", "pilots_")
    share_of = {cause: sum(shares.get(f"{begin}{cause}", 0.0) for begin in beginnings) for cause in _WOULD_HELP}
    most, *others = sorted(share_of, key=lambda cause: -share_of[cause])
    sentence = (
        f"{share_of[most]:.0%} of the last {WINDOW:,} rollouts were {'' if alone else 'in groups that were all '}{most}"
    )
    if not alone:
        sentence += "".join(f", {share_of[cause]:.0%} all {cause}" for cause in others if share_of[cause] >= 0.005)
    leads = share_of[most] >= _LEADS * share_of[others[0]]
    return f"{sentence}: almost nothing is learned from them; {_WOULD_HELP[most] if leads else _MIXED_CAUSES}"
