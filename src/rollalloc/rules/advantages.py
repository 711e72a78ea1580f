"""Advantages: what each trained rollout is credited with, relative to its group.

The kernels are plain functions of rewards. They subtract the first reward before anything else, so that the advantages
of a group of equal rewards are exactly 0 for any value. `OverGroup` and `OverChosen` make rules of them: group statistics
before, or after, the choice of rows. `GRPO` is `grpo` with its deviation said; plain `grpo` leaves it to what trains, see
`settled`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollalloc.core.group import GroupView, as_floats

Kernel = Callable[[NDArray[np.float64]], NDArray[np.float64]]


def _shifted(rewards_G: ArrayLike) -> NDArray[np.float64]:
    """Rewards relative to the first: the differences of equal rewards are exact zeros."""
    reward_G = as_floats(rewards_G, "rewards_G")
    return reward_G - reward_G[0] if reward_G.size else reward_G


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
    if shifted_G.size <= ddof or not shifted_G.any():
        return np.zeros_like(shifted_G)
    # What `mean` and `std` compute, without their cost for a handful of values: this is called for every group.
    from_mean_G = shifted_G - shifted_G.sum() / shifted_G.size
    std = np.sqrt((from_mean_G * from_mean_G).sum() / (shifted_G.size - ddof))
    return from_mean_G / (std + eps)


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


def maxrl(rewards_G: ArrayLike) -> NDArray[np.float64]:
    """A_i = (r_i - mean) / mean: the gradient of log p rather than of p.

    MaxRL, as summarised in PAPERS.md.

    Args:
        rewards_G: shape (G,), finite, 0 or more.

    Returns:
        Shape (G,); all 0 where the rewards are equal.

    Raises:
        ValueError: rewards that are not finite, not of one axis, or negative (log p has no meaning for them).
    """
    reward_G = as_floats(rewards_G, "rewards_G")
    if np.any(reward_G < 0):
        raise ValueError(
            f"maxrl needs rewards of 0 or more, got {reward_G.min()}; use grpo, dr_grpo or rloo for shaped rewards"
        )
    centred_G = dr_grpo(reward_G)
    return centred_G / reward_G.mean() if centred_G.any() else centred_G


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


def commit_loo(rewards_G: ArrayLike, stages_G: ArrayLike) -> NDArray[np.float64]:
    """Leave-one-out baseline over the commits only: exactly unbiased although pilots decided whether there are commits.

    A commit's advantage is its reward minus the mean of the other commits; a pilot's is its reward minus the mean of all
    commits. A single commit has no others: 0.

    Args:
        rewards_G: shape (G,), finite.
        stages_G: shape (G,), index of the stage that ordered each: 0 for pilots, 1 or more for commits.

    Returns:
        Shape (G,); all 0 where there are no commits.

    Raises:
        ValueError: rewards that are not finite, or shapes that differ.
    """
    reward_G = as_floats(rewards_G, "rewards_G")
    commit_G = np.asarray(stages_G) > 0
    if commit_G.shape != reward_G.shape:
        raise ValueError(f"stages_G must have the shape of rewards_G, {reward_G.shape}, got {commit_G.shape}")
    advantage_G = np.zeros_like(reward_G)
    if commit_G.any():
        reference = reward_G[commit_G][0]  # commits that are equal get exact zeros
        advantage_G[commit_G] = rloo(reward_G[commit_G])
        advantage_G[~commit_G] = (reward_G[~commit_G] - reference) - (reward_G[commit_G] - reference).mean()
    return advantage_G


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


def kernel_of(deviation: Deviation | None) -> Kernel:
    """The kernel that a recipe's `deviation` names; None: plain `grpo`, which leaves it to what trains.

    Raises:
        ValueError: another name.
    """
    kernels: dict[Deviation | None, Kernel] = {None: grpo, "population": GRPO(ddof=0), "sample": GRPO(ddof=1)}
    if deviation not in kernels:
        raise ValueError(f"deviation must be population, sample or None (that of what trains), got {deviation!r}")
    return kernels[deviation]


@dataclass(frozen=True, slots=True, repr=False)
class _OfKernel:
    kernel: Kernel

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self.kernel, '__name__', self.kernel)})"


@dataclass(frozen=True, slots=True, repr=False)
class OverGroup(_OfKernel):
    """Advantages from the statistics of the whole group, before the choice of rows."""

    def __call__(self, group: GroupView, chosen_M: NDArray[np.int64]) -> NDArray[np.float64]:
        return self.kernel(group.rewards_G)[chosen_M]


@dataclass(frozen=True, slots=True, repr=False)
class OverChosen(_OfKernel):
    """Advantages from the statistics of the chosen rows alone."""

    def __call__(self, group: GroupView, chosen_M: NDArray[np.int64]) -> NDArray[np.float64]:
        return self.kernel(group.rewards_G[chosen_M])


@dataclass(frozen=True, slots=True)
class CommitLeaveOneOut:
    """`commit_loo` as a rule, for recipes with a pilot stage."""

    def __call__(self, group: GroupView, chosen_M: NDArray[np.int64]) -> NDArray[np.float64]:
        return commit_loo(group.rewards_G, group.stages_G)[chosen_M]


def settled(rule: Any, kernel: GRPO) -> Any:
    """An advantage rule with the deviation of the framework that trains, where the rule leaves it open.

    Args:
        rule: any; one of plain `grpo` leaves it open, and stands for the population's where nobody settles it.
        kernel: the framework's.
    """
    return replace(rule, kernel=kernel) if isinstance(rule, _OfKernel) and rule.kernel is grpo else rule
