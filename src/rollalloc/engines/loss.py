"""The policy-gradient loss of the GRPO family, per token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Clip:
    """How far a token's ratio may leave 1 before its gradient stops, and how much a stale row may weigh.

    Attributes:
        low: the ratio is clipped below 1 - low, in (0, 1].
        high: and above 1 + high; larger than low is "clip-higher" (DAPO, arXiv 2503.14476). Above 0.
        stale: truncation of the importance weight of rows sampled from older weights, at least 1.

    Raises:
        ValueError: a value out of its range.
    """

    low: float = 0.2
    high: float = 0.28
    stale: float = 2.0

    def __post_init__(self) -> None:
        if not (0 < self.low <= 1 and self.high > 0 and self.stale >= 1):
            raise ValueError(f"expected low in (0, 1], high above 0 and stale of at least 1, got {self}")


def token_losses(
    logprobs_BT: Tensor, proximal_BT: Tensor, behaviour_BT: Tensor, advantages_B: Tensor, weights_B: Tensor, clip: Clip
) -> Tensor:
    """Clipped surrogate with decoupled importance weights.

        rho = exp(logprobs - proximal),   iw = min(exp(proximal - behaviour), clip.stale)
        loss = -weight · iw · min(rho · A, clamp(rho, 1 - low, 1 + high) · A)

    The proximal policy is the one before this batch's first step, the behaviour policy the one that sampled. For fresh
    rows they are the same and iw is 1; for stale ones iw corrects, truncated, for what was sampled from older weights.
    PPO, arXiv 1707.06347; decoupled, arXiv 2110.00641; truncated importance sampling, arXiv 1802.01561.

    Args:
        logprobs_BT: under the policy being trained, with gradient.
        proximal_BT: under the policy before the batch's first step.
        behaviour_BT: under the policy that sampled each row.
        advantages_B: one a row.
        weights_B: the rows' loss weights.
        clip: limits.

    Returns:
        Shape (B, T); mean over the tokens of a batch is the caller's.
    """
    ratio_BT = (logprobs_BT - proximal_BT).exp()
    advantage_B1 = advantages_B[:, None]
    surrogate_BT = torch.minimum(ratio_BT * advantage_B1, ratio_BT.clamp(1 - clip.low, 1 + clip.high) * advantage_B1)
    importance_BT = (proximal_BT - behaviour_BT).exp().clamp(max=clip.stale)
    return -weights_B[:, None] * importance_BT.detach() * surrogate_BT
