"""Advantages: what each trained rollout is credited with, relative to its group.

The kernels are plain functions of rewards. They subtract the first reward before anything else, so that the advantages
of a group of equal rewards are exactly 0 for any value. `OverGroup` and `OverChosen` make rules of them: group statistics
before, or after, the choice of rows. `GRPO` is `grpo` with its deviation said; plain `grpo` leaves it to what trains, see
`settled`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isnan
from statistics import fmean
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollalloc.core.group import GroupView, as_floats
from rollalloc.core.rule import AdvantageRule, BatchRule, Traits, View

Kernel = Callable[[NDArray[np.float64]], NDArray[np.float64]]
Promises = Callable[[NDArray[np.float64], NDArray[np.float64]], dict[str, bool]]
_K = TypeVar("_K", bound=Callable[..., NDArray[np.float64]])


@runtime_checkable
class _Promising(Protocol):
    """A kernel that promises more than what every kernel does (see `_OfKernel`)."""

    def promises(self, rewards_G: NDArray[np.float64], advantages_G: NDArray[np.float64], /) -> dict[str, bool]:
        """Of a whole group: each promise in plain words, and whether it is kept."""
        ...


def promising(promises: Promises) -> Callable[[_K], _K]:
    """Make a kernel `_Promising`."""

    def state(kernel: _K) -> _K:
        kernel.__dict__["promises"] = promises
        return kernel

    return state


def _centred(rewards_G: NDArray[np.float64], advantages_G: NDArray[np.float64]) -> dict[str, bool]:
    size = float(np.abs(advantages_G).sum())
    return {
        "the advantages sum to 0": bool(abs(advantages_G.sum()) <= 1e-6 * max(1e-6, size)),
        "rewards that differ have advantages that differ": len(set(rewards_G.tolist())) < 2 or size > 0,
    }


_MOST_EPS = 1e-3  # that a kernel adds to a deviation


def _standardised(ddof: int) -> Promises:
    def promises(rewards_G: NDArray[np.float64], advantages_G: NDArray[np.float64]) -> dict[str, bool]:
        if advantages_G.size <= ddof or not advantages_G.any():
            return _centred(rewards_G, advantages_G)
        std, spread = float(advantages_G.std(ddof=ddof)), float(rewards_G.std(ddof=ddof))
        least = spread / (spread + _MOST_EPS)
        return _centred(rewards_G, advantages_G) | {
            "their deviation is 1, less what `eps` takes": least - 1e-9 < std < 1 + 1e-9
        }

    return promises


def _shifted(rewards_G: ArrayLike) -> NDArray[np.float64]:
    """Rewards relative to the first: the differences of equal rewards are exact zeros."""
    reward_G = as_floats(rewards_G, "rewards_G")
    return reward_G - reward_G[0] if reward_G.size else reward_G


@promising(_standardised(ddof=0))
def grpo(rewards_G: ArrayLike, *, eps: float = 1e-6, ddof: int = 0) -> NDArray[np.float64]:
    """Group-relative advantage: A_i = (r_i - mean) / (std + eps).

    Shao et al., DeepSeekMath, arXiv 2402.03300.

    Args:
        rewards_G: shape (G,), finite.
        eps: keeps a small std from blowing up; above 0.
        ddof: 0 for the population's std, 1 for the unbiased one.

    Returns:
        Shape (G,); all 0 where the rewards are equal.

    Raises:
        ValueError: rewards that are not finite or not of one axis.
    """
    shifted_G = _shifted(rewards_G)
    if shifted_G.size <= ddof:
        return np.zeros_like(shifted_G)
    # What `mean` and `std` compute, without their cost for a handful of values: this is called for every group.
    from_mean_G = shifted_G - shifted_G.sum() / shifted_G.size
    std = np.sqrt((from_mean_G * from_mean_G).sum() / (shifted_G.size - ddof))
    return from_mean_G / (std + eps)


@promising(_centred)
def dr_grpo(rewards_G: ArrayLike) -> NDArray[np.float64]:
    """A_i = r_i - mean: GRPO without the division that favours groups of little variance.

    Liu et al., Dr. GRPO, arXiv 2503.20783.

    Args:
        rewards_G: shape (G,), finite.

    Returns:
        Shape (G,).

    Raises:
        ValueError: rewards that are not finite or not of one axis.
    """
    shifted_G = _shifted(rewards_G)
    return shifted_G - shifted_G.mean() if shifted_G.any() else np.zeros_like(shifted_G)


@promising(_centred)
def rloo(rewards_G: ArrayLike) -> NDArray[np.float64]:
    """REINFORCE with a leave-one-out baseline: A_i = r_i - mean of the others.

    Ahmadian et al., arXiv 2402.14740. A single rollout has no others: 0.

    Args:
        rewards_G: shape (G,), finite.

    Returns:
        Shape (G,).

    Raises:
        ValueError: rewards that are not finite or not of one axis.
    """
    centred_G = dr_grpo(rewards_G)
    count = centred_G.size
    return centred_G * (count / (count - 1)) if count > 1 else centred_G


@promising(_standardised(ddof=1))
def pods(rewards_M: ArrayLike) -> NDArray[np.float64]:
    """GRPO's advantage as PODS computes it on the rows it kept: unbiased std, eps 1e-4.

    Xu et al., arXiv 2504.13818.

    Args:
        rewards_M: shape (M,), finite.

    Returns:
        Shape (M,).

    Raises:
        ValueError: rewards that are not finite or not of one axis.
    """
    return grpo(rewards_M, eps=1e-4, ddof=1)


Deviation = Literal["population", "sample"]


@dataclass(frozen=True, slots=True)
class GRPO:
    """`grpo` with its deviation said, as a kernel: A_i = (r_i - mean) / (std + eps), whatever trains.

    Attributes:
        ddof: 0 for the population's std, 1 for the sample's; of (1, 0, 0, 0) the first gets 1.732 or 1.5.
        eps: keeps a small std from blowing up; above 0.

    Raises:
        ValueError: a value out of its range.
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

    def promises(self, rewards_G: NDArray[np.float64], advantages_G: NDArray[np.float64]) -> dict[str, bool]:
        return _standardised(self.ddof)(rewards_G, advantages_G)


def kernel_of(deviation: Deviation | None) -> Kernel:
    """The kernel that a recipe's `deviation` names; None: plain `grpo`, which leaves it to what trains.

    Raises:
        ValueError: another name.
    """
    kernels: dict[Deviation | None, Kernel] = {None: grpo, "population": GRPO(ddof=0), "sample": GRPO(ddof=1)}
    if deviation not in [*kernels]:  # a list cannot be looked up in a dictionary
        raise ValueError(f"deviation must be population, sample or None (that of what trains), got {deviation!r}")
    return kernels[deviation]


@dataclass(frozen=True, slots=True, repr=False)
class _OfKernel(AdvantageRule):
    kernel: Kernel

    @property
    def traits(self) -> Traits:
        return Traits(reads=("rewards_G",))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self.kernel, '__name__', self.kernel)})"

    def kept(
        self, rewards_G: NDArray[np.float64], made_M: NDArray[np.float64], of_M: NDArray[np.float64]
    ) -> dict[str, bool]:
        """What every group-relative kernel promises, and this one.

        Args:
            rewards_G: those that the statistics are of.
            made_M: the advantages of the rows.
            of_M: the rewards of the rows.
        """
        order_M = np.argsort(of_M, kind="stable")
        rises, gains = np.diff(of_M[order_M]), np.diff(made_M[order_M])
        equal = bool((rewards_G == rewards_G[:1]).all())
        more = self.kernel.promises if isinstance(self.kernel, _Promising) else None
        return {
            "equal rewards have the advantage 0": not equal or not made_M.any(),
            "a higher reward never has the lower advantage, an equal one has the same": bool(
                (gains >= 0).all() and (gains[rises == 0] == 0).all()
            ),
        } | (more(of_M, made_M) if more and of_M.size == rewards_G.size else {})


@dataclass(frozen=True, slots=True, repr=False)
class OverGroup(_OfKernel):
    """Advantages from the statistics of the whole group, before the choice of rows."""

    def __call__(self, group: GroupView, chosen_M: NDArray[np.int64]) -> NDArray[np.float64]:
        return self.kernel(group.rewards_G)[chosen_M]

    def promises(
        self, advantages_M: NDArray[np.float64], group: GroupView, chosen_M: NDArray[np.int64]
    ) -> dict[str, bool]:
        every_G = self(group, np.arange(group.scored))
        return self.kept(group.rewards_G, every_G, group.rewards_G) | {
            "what a row is credited with does not depend on the other rows": bool(
                (every_G[chosen_M] == advantages_M).all()
            )
        }


@dataclass(frozen=True, slots=True, repr=False)
class OverChosen(_OfKernel):
    """Advantages from the statistics of the chosen rows alone."""

    def __call__(self, group: GroupView, chosen_M: NDArray[np.int64]) -> NDArray[np.float64]:
        return self.kernel(group.rewards_G[chosen_M])

    def promises(
        self, advantages_M: NDArray[np.float64], group: GroupView, chosen_M: NDArray[np.int64]
    ) -> dict[str, bool]:
        chosen = GroupView.of(group.rewards_G[chosen_M].tolist())
        alone_M = self(chosen, np.arange(chosen_M.size))
        return self.kept(group.rewards_G[chosen_M], advantages_M, group.rewards_G[chosen_M]) | {
            "what is not chosen does not count": bool((alone_M == advantages_M).all())
        }


@dataclass(frozen=True, slots=True)
class Rewards(AdvantageRule):
    """A_i = r_i: REINFORCE without a baseline, or with one over the batch (`BatchMean`)."""

    @property
    def traits(self) -> Traits:
        return Traits(reads=("rewards_G",))

    def __call__(self, group: GroupView, chosen_M: NDArray[np.int64]) -> NDArray[np.float64]:
        return group.rewards_G[chosen_M]

    def promises(
        self, advantages_M: NDArray[np.float64], group: GroupView, chosen_M: NDArray[np.int64]
    ) -> dict[str, bool]:
        return {"the reward itself": advantages_M.tolist() == [group.in_order[g].reward for g in chosen_M.tolist()]}


@dataclass(frozen=True, slots=True)
class Successes(AdvantageRule):
    """A_i = max(r_i, 0): only what was rewarded is learned from (RAFT, arXiv 2304.06767, 2504.11343)."""

    @property
    def traits(self) -> Traits:
        return Traits(reads=("rewards_G",))

    def __call__(self, group: GroupView, chosen_M: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.maximum(group.rewards_G[chosen_M], 0.0)

    def promises(
        self, advantages_M: NDArray[np.float64], group: GroupView, chosen_M: NDArray[np.int64]
    ) -> dict[str, bool]:
        rewards = [group.in_order[g].reward for g in chosen_M.tolist()]
        return {
            "a reward above 0 is what it is, any other counts for nothing": all(
                (made == reward) if reward > 0 else made == 0
                for made, reward in zip(advantages_M.tolist(), rewards, strict=True)
            )
        }


@dataclass(frozen=True, slots=True)
class AgainstBaseline(AdvantageRule):
    """A_i = r_i - b; b is what was expected when the prompt was drawn.

    Where nothing was expected yet, b is the mean of the group's rewards: a rollout alone then counts for nothing.
    """

    @property
    def traits(self) -> Traits:
        return Traits(reads=("rewards_G",))

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
        return {"what it has above what was expected": bool(np.allclose(advantages_M, over_M, atol=1e-9))}


Batchwise = Sequence[NDArray[np.float64]]
Chosen = Sequence[NDArray[np.int64]]
_ROUNDING = 1e-9  # of an advantage that is none
USUAL_NEG = 0.1  # weight of failures where nothing is known of how uncertain rollouts were


def variance_ratio(over_R: NDArray[np.float64], uncertainty_R: NDArray[np.float64]) -> float:
    """The weight of failures at which the update varies least: how uncertain successes were over how uncertain failures.

        neg = min(1, mean of u over A > 0  /  mean of u over A < 0)

    Since p · E[∇ log π | right] = -(1 - p) · E[∇ log π | wrong] = ∇p, successes and failures estimate the same gradient.
    With a baseline of p, weights in inverse proportion to the variances of the two estimates make neg the ratio of
    E|∇ log π|² of the one to that of the other, and u goes in proportion to |∇ log π|². It is small where a right answer is
    nearly certain and a wrong one is one of many, and large where many are right. With a handful of rows on one side it is
    as noisy as their mean. It takes a row's tokens for summed, not averaged (`token_mean`). Ours; see docs/foresight.md.

    Args:
        over_R: what each row has above its baseline, shape (R,).
        uncertainty_R: `Done.uncertainty` of each, shape (R,); NaN where it is unknown.

    Returns:
        In [0, 1]; `USUAL_NEG` where no row of one of the two sides is known.
    """
    known_R = ~np.isnan(uncertainty_R)
    right_R, wrong_R = (over_R > _ROUNDING) & known_R, (over_R < -_ROUNDING) & known_R
    if not (right_R.any() and wrong_R.any()):
        return USUAL_NEG
    right, wrong = float(uncertainty_R[right_R].mean()), float(uncertainty_R[wrong_R].mean())
    return 1.0 if right >= wrong else right / wrong


@dataclass(frozen=True, slots=True)
class BatchMean(BatchRule):
    """A baseline over the batch: each advantage less the mean of the batch's others, times neg where that is below 0.

        A_i ← A_i - mean of A_j, j ≠ i  =  (A_i - mean) · M / (M - 1)
        A_i ← A_i - b  where something was expected of the prompt when it was drawn, b

    With `Rewards` this is REINFORCE with a leave-one-out baseline over the whole batch, unbiased; under a prompt rule that
    expects something, such as a running mean, the batch serves only the prompts that were drawn before it could. A row
    alone: 0. Of binary rewards and b = p̂, the expected update is ∇p · (1 - p̂ + neg · p̂): neg changes how much each prompt
    counts, and the variance, but not the direction.

    Attributes:
        neg: weight of what did worse than the others, 0 or more; None: each batch's `variance_ratio`.

    Raises:
        ValueError: a negative weight, or one that is not finite.
    """

    neg: float | None = 1.0

    def __post_init__(self) -> None:
        if self.neg is not None and not 0 <= self.neg < float("inf"):
            raise ValueError(
                f"neg must be 0 or more and finite, or None to follow the batch's variance, got {self.neg!r}"
            )

    @property
    def traits(self) -> Traits:
        return Traits(reads=("uncertainties_G",) if self.neg is None else ())

    def __call__(self, advantages: Batchwise, groups: Sequence[GroupView], chosen: Chosen, view: View) -> Batchwise:
        before_R = np.concatenate(advantages)
        expected = [group.baseline for group, rows_M in zip(groups, advantages, strict=True) for _ in rows_M]
        expected_R = np.array(expected, np.float64)  # None becomes NaN
        over_R = np.where(np.isnan(expected_R), rloo(before_R), before_R - expected_R)
        return _split_as(advantages, np.where(over_R < 0, self._weight(over_R, groups, chosen) * over_R, over_R))

    def _weight(self, over_R: NDArray[np.float64], groups: Sequence[GroupView], chosen: Chosen) -> float:
        if self.neg is not None:
            return self.neg
        of_rows = [group.uncertainties_G[chosen_M] for group, chosen_M in zip(groups, chosen, strict=True)]
        return variance_ratio(over_R, np.concatenate(of_rows))

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
            "what it has above what was expected, or above the mean of the others, or neg times what it lacks": bool(
                np.allclose(after, np.maximum(over, 0) + neg * np.minimum(over, 0), atol=1e-9)
            ),
            "neg is in [0, 1] where nobody gave it": self.neg is not None or 0 <= neg <= 1,
        }

    @staticmethod
    def _weight_row_by_row(over: Sequence[float], groups: Sequence[GroupView], chosen: Chosen) -> float:
        """`variance_ratio` of the rows that are trained on, each looked up by itself."""
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
    """A_i ← (A_i - mean) / (std + eps) over the batch: SPO's, arXiv 2509.13232.

    Attributes:
        eps: keeps a small std from blowing up; above 0.

    Raises:
        ValueError: eps not above 0 and finite.
    """

    eps: float = 1e-6

    def __post_init__(self) -> None:
        if not 0 < self.eps < float("inf"):
            raise ValueError(f"eps must be above 0 and finite, got {self.eps!r}")

    @property
    def traits(self) -> Traits:
        return Traits(reads=())

    def __call__(self, advantages: Batchwise, groups: Sequence[GroupView], chosen: Chosen, view: View) -> Batchwise:
        return _split_as(advantages, grpo(np.concatenate(advantages), eps=self.eps))

    def promises(
        self, made: Batchwise, advantages: Batchwise, groups: Sequence[GroupView], chosen: Chosen, view: View
    ) -> dict[str, bool]:
        before, after = np.concatenate(advantages), np.concatenate(made)
        std = float(before.std())
        return {
            "equal ones are 0": bool(np.ptp(before) > 0 or not after.any()),
            "what it has above the mean, in deviations": bool(
                np.allclose(after * (std + self.eps), before - before.mean(), atol=1e-9 * (1 + np.abs(before).max()))
            ),
        }


def _split_as(like: Batchwise, made_R: NDArray[np.float64]) -> Batchwise:
    """One array for the whole batch, cut into those of its groups."""
    return np.split(made_R, np.cumsum([each.size for each in like])[:-1])


def settled(rule: Any, kernel: GRPO) -> Any:
    """An advantage rule with the deviation of the framework that trains, where the rule leaves it open.

    Args:
        rule: any; one of plain `grpo` leaves it open, and stands for the population's where nobody settles it.
        kernel: the framework's.
    """
    return replace(rule, kernel=kernel) if isinstance(rule, _OfKernel) and rule.kernel is grpo else rule
