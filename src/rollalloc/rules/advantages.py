"""Advantages: how much better or worse each trained rollout did than its baseline.

The kernels are plain functions of rewards. A rule applies a kernel: `OverGroup` to all rewards of the group,
`OverChosen` to the rewards of the chosen rows. With the kernel `grpo`, the training framework decides between the
population's and the sample's standard deviation (see `settled`). With the kernel `GRPO`, the recipe decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isnan
from statistics import fmean
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollalloc.core.group import GroupView, as_floats, parts
from rollalloc.core.rule import AdvantageRule, AdvantageTraits, BatchRule, View

Kernel = Callable[[NDArray[np.float64]], NDArray[np.float64]]
Promises = Callable[[NDArray[np.float64], NDArray[np.float64]], dict[str, bool]]


def _centred(rewards_G: NDArray[np.float64], advantages_G: NDArray[np.float64]) -> dict[str, bool]:
    size = float(np.abs(advantages_G).sum())
    return {
        "the advantages sum to 0": bool(abs(advantages_G.sum()) <= 1e-6 * max(1e-6, size)),
        "rewards that differ give advantages that are not all 0": len(set(rewards_G.tolist())) < 2 or size > 0,
    }


_MOST_EPS = 1e-3  # largest eps of any kernel


def _standardised(ddof: int) -> Promises:
    def promises(rewards_G: NDArray[np.float64], advantages_G: NDArray[np.float64]) -> dict[str, bool]:
        if advantages_G.size <= ddof or not advantages_G.any():
            return _centred(rewards_G, advantages_G)
        std, spread = float(advantages_G.std(ddof=ddof)), float(rewards_G.std(ddof=ddof))
        least = spread / (spread + _MOST_EPS)
        return _centred(rewards_G, advantages_G) | {
            "their standard deviation is 1, or less because of `eps`": least - 1e-9 < std < 1 + 1e-9
        }

    return promises


def _shifted(rewards_G: ArrayLike) -> NDArray[np.float64]:
    """Subtract the first reward from all rewards, so that equal rewards give advantages of exactly 0."""
    reward_G = as_floats(rewards_G, "rewards_G")
    return reward_G - reward_G[0] if reward_G.size else reward_G


def grpo(rewards_G: ArrayLike, *, eps: float = 1e-6, ddof: int = 0) -> NDArray[np.float64]:
    """GRPO's group-relative advantage: A_i = (r_i - mean) / (std + eps).

    Shao et al., DeepSeekMath, arXiv 2402.03300.

    Args:
        rewards_G: shape (G,), finite.
        eps: avoids division by a very small std; above 0.
        ddof: 0 for the population's std, 1 for the sample's.

    Returns:
        Shape (G,); all 0 if the rewards are equal.

    Raises:
        ValueError: the rewards are not finite, or do not have one axis.
    """
    shifted_G = _shifted(rewards_G)
    if shifted_G.size <= ddof:
        return np.zeros_like(shifted_G)
    # For the few values of a group, this is faster than numpy's `mean` and `std`.
    from_mean_G = shifted_G - shifted_G.sum() / shifted_G.size
    std = np.sqrt((from_mean_G * from_mean_G).sum() / (shifted_G.size - ddof))
    return from_mean_G / (std + eps)


def dr_grpo(rewards_G: ArrayLike) -> NDArray[np.float64]:
    """Dr. GRPO's advantage: A_i = r_i - mean. A division by std, as in GRPO, would favour groups with little variance.

    Liu et al., Dr. GRPO, arXiv 2503.20783.

    Args:
        rewards_G: shape (G,), finite.

    Returns:
        Shape (G,).

    Raises:
        ValueError: the rewards are not finite, or do not have one axis.
    """
    shifted_G = _shifted(rewards_G)
    return shifted_G - shifted_G.mean() if shifted_G.any() else np.zeros_like(shifted_G)


def rloo(rewards_G: ArrayLike) -> NDArray[np.float64]:
    """Advantage with a leave-one-out baseline: A_i = r_i - mean of the other rewards.

    Ahmadian et al., arXiv 2402.14740. The advantage of a single rollout is 0.

    Args:
        rewards_G: shape (G,), finite.

    Returns:
        Shape (G,).

    Raises:
        ValueError: the rewards are not finite, or do not have one axis.
    """
    centred_G = dr_grpo(rewards_G)
    count = centred_G.size
    return centred_G * (count / (count - 1)) if count > 1 else centred_G


def pods(rewards_M: ArrayLike) -> NDArray[np.float64]:
    """GRPO's advantage as in PODS: over the kept rows, with the sample's std and eps 1e-4.

    Xu et al., arXiv 2504.13818.

    Args:
        rewards_M: shape (M,), finite.

    Returns:
        Shape (M,).

    Raises:
        ValueError: the rewards are not finite, or do not have one axis.
    """
    return grpo(rewards_M, eps=1e-4, ddof=1)


Deviation = Literal["population", "sample"]


@dataclass(frozen=True, slots=True)
class GRPO:
    """The kernel `grpo` with a fixed kind of standard deviation: A_i = (r_i - mean) / (std + eps).

    Attributes:
        ddof: 0 for the population's std, 1 for the sample's. The first of the rewards (1, 0, 0, 0) has the advantage
            1.732 if ddof is 0, and 1.5 if ddof is 1.
        eps: avoids a division by a very small std; above 0.

    Raises:
        ValueError: a value is out of its range.
    """

    ddof: Literal[0, 1]
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.ddof not in (0, 1):
            raise ValueError(f"ddof must be 0 (the population's std) or 1 (the sample's), got {self.ddof!r}")
        if not 0 < self.eps < float("inf"):
            raise ValueError(f"eps must be above 0 and finite, got {self.eps!r}")

    def __call__(self, rewards_G: NDArray[np.float64]) -> NDArray[np.float64]:
        return grpo(rewards_G, eps=self.eps, ddof=self.ddof)


def kernel_of(deviation: Deviation | None) -> Kernel:
    """The kernel for a recipe's parameter `deviation`. None: `grpo`, and the training framework chooses the deviation.

    Raises:
        ValueError: the name is unknown.
    """
    kernels: dict[Deviation | None, Kernel] = {None: grpo, "population": GRPO(ddof=0), "sample": GRPO(ddof=1)}
    if deviation not in [*kernels]:  # search a list, because the value may be unhashable
        raise ValueError(f"deviation must be population, sample or None (the trainer's own), got {deviation!r}")
    return kernels[deviation]


def _promises_of(kernel: Kernel) -> Promises | None:
    """Further promises that a known kernel keeps if it is applied to a whole group. None for other kernels."""
    if isinstance(kernel, GRPO):
        return _standardised(kernel.ddof)
    known: dict[Kernel, Promises] = {
        grpo: _standardised(0), pods: _standardised(1), dr_grpo: _centred, rloo: _centred
    }  # fmt: skip
    return known.get(kernel)


@dataclass(frozen=True, slots=True, repr=False)
class _OfKernel(AdvantageRule):
    kernel: Kernel

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self.kernel, '__name__', self.kernel)})"

    def kept(
        self, rewards_G: NDArray[np.float64], made_M: NDArray[np.float64], of_M: NDArray[np.float64]
    ) -> dict[str, bool]:
        """Check the promises of every group-relative kernel, and the promises of this kernel.

        Args:
            rewards_G: the rewards to which the kernel was applied.
            made_M: the advantages of the rows.
            of_M: the rewards of the rows.
        """
        order_M = np.argsort(of_M, kind="stable")
        rises, gains = np.diff(of_M[order_M]), np.diff(made_M[order_M])
        equal = bool((rewards_G == rewards_G[:1]).all())
        more = _promises_of(self.kernel)
        return {
            "equal rewards give advantages of 0": not equal or not made_M.any(),
            "a higher reward never gives a lower advantage, and equal rewards give equal advantages": bool(
                (gains >= 0).all() and (gains[rises == 0] == 0).all()
            ),
        } | (more(of_M, made_M) if more and of_M.size == rewards_G.size else {})


@dataclass(frozen=True, slots=True, repr=False)
class OverGroup(_OfKernel):
    """Apply the kernel to the rewards of the whole group, and take the advantages of the chosen rows."""

    traits = AdvantageTraits(reads=("rewards_G",), compares="group")

    def __call__(self, group: GroupView, chosen_M: NDArray[np.int64]) -> NDArray[np.float64]:
        return self.kernel(group.rewards_G)[chosen_M]

    def promises(
        self, advantages_M: NDArray[np.float64], group: GroupView, chosen_M: NDArray[np.int64]
    ) -> dict[str, bool]:
        every_G = self(group, np.arange(group.scored))
        return self.kept(group.rewards_G, every_G, group.rewards_G) | {
            "a row's advantage does not depend on which other rows were chosen": bool(
                (every_G[chosen_M] == advantages_M).all()
            )
        }


@dataclass(frozen=True, slots=True, repr=False)
class OverChosen(_OfKernel):
    """Apply the kernel to the rewards of the chosen rows alone."""

    traits = AdvantageTraits(reads=("rewards_G",), compares="chosen")

    def __call__(self, group: GroupView, chosen_M: NDArray[np.int64]) -> NDArray[np.float64]:
        return self.kernel(group.rewards_G[chosen_M])

    def promises(
        self, advantages_M: NDArray[np.float64], group: GroupView, chosen_M: NDArray[np.int64]
    ) -> dict[str, bool]:
        chosen = GroupView.of(group.rewards_G[chosen_M].tolist())
        alone_M = self(chosen, np.arange(chosen_M.size))
        return self.kept(group.rewards_G[chosen_M], advantages_M, group.rewards_G[chosen_M]) | {
            "rollouts that were not chosen do not affect the advantages": bool((alone_M == advantages_M).all())
        }


@dataclass(frozen=True, slots=True)
class Rewards(AdvantageRule):
    """A_i = r_i: REINFORCE without a baseline. The batch rule `BatchMean` may subtract a baseline."""

    traits = AdvantageTraits(reads=("rewards_G",))

    def __call__(self, group: GroupView, chosen_M: NDArray[np.int64]) -> NDArray[np.float64]:
        return group.rewards_G[chosen_M]

    def promises(
        self, advantages_M: NDArray[np.float64], group: GroupView, chosen_M: NDArray[np.int64]
    ) -> dict[str, bool]:
        return {"the reward itself": advantages_M.tolist() == [group.in_order[g].reward for g in chosen_M.tolist()]}


@dataclass(frozen=True, slots=True)
class Successes(AdvantageRule):
    """A_i = max(r_i, 0): learn only from rewarded rollouts (RAFT, arXiv 2304.06767, 2504.11343)."""

    traits = AdvantageTraits(reads=("rewards_G",))

    def __call__(self, group: GroupView, chosen_M: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.maximum(group.rewards_G[chosen_M], 0.0)

    def promises(
        self, advantages_M: NDArray[np.float64], group: GroupView, chosen_M: NDArray[np.int64]
    ) -> dict[str, bool]:
        rewards = [group.in_order[g].reward for g in chosen_M.tolist()]
        return {
            "the advantage is the larger of the reward and 0": all(
                (made == reward) if reward > 0 else made == 0
                for made, reward in zip(advantages_M.tolist(), rewards, strict=True)
            )
        }


@dataclass(frozen=True, slots=True)
class AgainstBaseline(AdvantageRule):
    """A_i = r_i - b, where b is the reward that the prompt rule expected when it drew the prompt.

    If the prompt rule expected no reward, b is the mean of the group's rewards. The advantage of a single rollout is then 0.
    """

    traits = AdvantageTraits(reads=("rewards_G",), compares="group", or_baseline=True)

    def __call__(self, group: GroupView, chosen_M: NDArray[np.int64]) -> NDArray[np.float64]:
        if group.baseline is None:
            return dr_grpo(group.rewards_G)[chosen_M]
        return group.rewards_G[chosen_M] - group.baseline

    def promises(
        self, advantages_M: NDArray[np.float64], group: GroupView, chosen_M: NDArray[np.int64]
    ) -> dict[str, bool]:
        rewards = [group.in_order[g].reward for g in range(group.scored)]
        baseline = sum(rewards) / len(rewards) if group.baseline is None else group.baseline
        over_M = [rewards[g] - baseline for g in chosen_M.tolist()]
        return {
            "each advantage is the reward minus the expected reward": bool(np.allclose(advantages_M, over_M, atol=1e-9))
        }


Batchwise = Sequence[NDArray[np.float64]]
Chosen = Sequence[NDArray[np.int64]]
_ROUNDING = 1e-9  # smaller advantages count as 0
USUAL_NEG = 0.1  # weight of negative advantages if the uncertainty of rollouts is unknown


def variance_ratio(over_R: NDArray[np.float64], uncertainty_R: NDArray[np.float64]) -> float:
    """The weight of negative advantages that minimises the variance of the update. Our method, see docs/foresight.md.

        neg = min(1, mean of u over rows with A > 0  /  mean of u over rows with A < 0),  u: `Done.uncertainty`

    Successes and failures estimate the same gradient: p · E[∇ log π | right] = -(1 - p) · E[∇ log π | wrong] = ∇p. The
    sum of two estimates has the smallest variance if each is weighted by the inverse of its variance. If the baseline
    is p, failures then weigh E[|∇ log π|² | right] / E[|∇ log π|² | wrong] times as much as successes. |∇ log π|² is
    roughly proportional to u.

    The weight is small if right answers are nearly certain and wrong answers are diverse. It is noisy if few rows have
    A > 0 or few rows have A < 0. The method assumes a loss that sums over a row's tokens (`token_mean`).

    Args:
        over_R: advantage of each row over its baseline, shape (R,).
        uncertainty_R: `Done.uncertainty` of each row, shape (R,); NaN if unknown.

    Returns:
        A weight in [0, 1]; `USUAL_NEG` if no row with A > 0, or no row with A < 0, has a known uncertainty.
    """
    known_R = ~np.isnan(uncertainty_R)
    right_R, wrong_R = (over_R > _ROUNDING) & known_R, (over_R < -_ROUNDING) & known_R
    if not (right_R.any() and wrong_R.any()):
        return USUAL_NEG
    right, wrong = float(uncertainty_R[right_R].mean()), float(uncertainty_R[wrong_R].mean())
    return 1.0 if right >= wrong else right / wrong


@dataclass(frozen=True, slots=True)
class BatchMean(BatchRule):
    """Subtract a baseline from each advantage of the batch, and multiply negative results by neg.

        A_i ← A_i - b                              if the prompt rule expected a reward b when it drew the prompt
        A_i ← A_i - mean of A_j over j ≠ i         otherwise, over all other rows of the batch

    With `Rewards` and no expected rewards, this is REINFORCE with an unbiased leave-one-out baseline over the batch. The
    advantage of a single row is 0. If rewards are binary and b = p̂, the expected update for a prompt is
    ∇p · (1 - p̂ + neg · p̂): neg changes the length and the variance of the update, but not its direction.

    Attributes:
        neg: weight of negative advantages, 0 or more. None: the result of `variance_ratio` for each batch.

    Raises:
        ValueError: the weight is negative or not finite.
    """

    neg: float | None = 1.0

    def __post_init__(self) -> None:
        if self.neg is not None and not 0 <= self.neg < float("inf"):
            raise ValueError(
                f"neg must be 0 or more and finite, or None to compute it from each batch, got {self.neg!r}"
            )

    @property
    def traits(self) -> AdvantageTraits:
        reads = ("uncertainties_G",) if self.neg is None else ()
        return AdvantageTraits(reads=reads, compares="batch", or_baseline=True)

    def __call__(self, advantages: Batchwise, groups: Sequence[GroupView], chosen: Chosen, view: View) -> Batchwise:
        before_R = np.concatenate(advantages)
        expected_G = np.array([group.baseline for group in groups], np.float64)  # turns None into NaN
        expected_R = np.repeat(expected_G, [rows_M.size for rows_M in advantages])
        over_R = np.where(np.isnan(expected_R), rloo(before_R), before_R - expected_R)
        return _split_as(advantages, np.where(over_R < 0, self._weight(over_R, groups, chosen) * over_R, over_R))

    def _weight(self, over_R: NDArray[np.float64], groups: Sequence[GroupView], chosen: Chosen) -> float:
        if self.neg is not None:
            return self.neg
        # Not from `uncertainties_G`: an array for each group would take longer than all other steps for groups of one row.
        rows = [(group.in_order, chosen_M.tolist()) for group, chosen_M in zip(groups, chosen, strict=True)]
        uncertainty_R = np.array([done_G[g].uncertainty for done_G, chosen_G in rows for g in chosen_G], np.float64)
        return variance_ratio(over_R, uncertainty_R)

    def promises(
        self, made: Batchwise, advantages: Batchwise, groups: Sequence[GroupView], chosen: Chosen, view: View
    ) -> dict[str, bool]:
        before, after = np.concatenate(advantages), np.concatenate(made)
        expected = [group.baseline for group, rows_M in zip(groups, advantages, strict=True) for _ in rows_M]
        over = before - np.array(
            [_mean_of_others(before, i) if baseline is None else baseline for i, baseline in enumerate(expected)]
        )
        neg = self._weight_row_by_row(over.tolist(), groups, chosen) if self.neg is None else self.neg
        return {
            "each advantage is the reward minus the baseline, times neg if negative": bool(
                np.allclose(after, np.maximum(over, 0) + neg * np.minimum(over, 0), atol=1e-9)
            ),
            "neg is in [0, 1] if it was not set": self.neg is not None or 0 <= neg <= 1,
        }

    @staticmethod
    def _weight_row_by_row(over: Sequence[float], groups: Sequence[GroupView], chosen: Chosen) -> float:
        """Compute `variance_ratio` of the trained rows in a second way."""
        rows = [(group, row) for group, chosen_M in zip(groups, chosen, strict=True) for row in chosen_M.tolist()]
        known = [(above, float(group.uncertainties_G[row])) for above, (group, row) in zip(over, rows, strict=True)]
        right = [each for above, each in known if above > _ROUNDING and not isnan(each)]
        wrong = [each for above, each in known if above < -_ROUNDING and not isnan(each)]
        if not right or not wrong:
            return USUAL_NEG
        return 1.0 if fmean(right) >= fmean(wrong) else fmean(right) / fmean(wrong)


def _mean_of_others(values: NDArray[np.float64], i: int) -> float:
    return float(np.delete(values, i).mean()) if values.size > 1 else float(values[i])


@dataclass(frozen=True, slots=True)
class BatchNormalised(BatchRule):
    """Normalise the advantages over the batch: A_i ← (A_i - mean) / (std + eps). SPO, arXiv 2509.13232.

    Attributes:
        eps: avoids a division by a very small std; above 0.

    Raises:
        ValueError: eps is not above 0, or not finite.
    """

    eps: float = 1e-6

    def __post_init__(self) -> None:
        if not 0 < self.eps < float("inf"):
            raise ValueError(f"eps must be above 0 and finite, got {self.eps!r}")

    traits = AdvantageTraits(reads=(), compares="batch")

    def __call__(self, advantages: Batchwise, groups: Sequence[GroupView], chosen: Chosen, view: View) -> Batchwise:
        return _split_as(advantages, grpo(np.concatenate(advantages), eps=self.eps))

    def promises(
        self, made: Batchwise, advantages: Batchwise, groups: Sequence[GroupView], chosen: Chosen, view: View
    ) -> dict[str, bool]:
        before, after = np.concatenate(advantages), np.concatenate(made)
        std = float(before.std())
        return {
            "equal advantages become 0": bool(np.ptp(before) > 0 or not after.any()),
            "each advantage is normalised by the mean and the standard deviation of the batch": bool(
                np.allclose(after * (std + self.eps), before - before.mean(), atol=1e-9 * (1 + np.abs(before).max()))
            ),
        }


def _split_as(like: Batchwise, made_R: NDArray[np.float64]) -> Batchwise:
    """Split an array over the whole batch into one array for each group."""
    return parts(made_R, [each.size for each in like])


def settled(rule: Any, kernel: GRPO) -> Any:
    """Replace the kernel `grpo` of an advantage rule by the training framework's kernel.

    Args:
        rule: any advantage rule. Rules with other kernels are returned unchanged.
        kernel: the framework's kernel, which fixes the kind of standard deviation.
    """
    return replace(rule, kernel=kernel) if isinstance(rule, _OfKernel) and rule.kernel is grpo else rule
