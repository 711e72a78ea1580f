"""The policy-gradient losses of the GRPO family: clipped surrogate, KL to a reference, and averaging over tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from rollalloc.models.settings import Aggregation, Loss


def token_losses(
    logprobs_BT: Tensor,
    proximal_BT: Tensor,
    behaviour_BT: Tensor,
    advantages_B: Tensor,
    weights_B: Tensor,
    loss: Loss,
    reference_BT: Tensor | None = None,
) -> Tensor:
    """Clipped surrogate with decoupled importance weights, and a KL term.

        rho = exp(logprobs - proximal),   iw = min(exp(proximal - behaviour), stale)
        surrogate = min(rho · A, clamp(rho, 1 - low, 1 + high) · A)
        surrogate = max(surrogate, dual · A) where A < 0
        losses = weight · iw · (kl · rho · k3 - surrogate)

    The proximal policy is the policy before this batch's first step. The behaviour policy is the policy that sampled the
    rows. For fresh rows, both are the same policy, so iw is 1. The dual clip bounds the loss of a bad token that has become
    much more likely. rho · k3 instead of k3 (see `divergences`) makes the gradient of the KL term unbiased, as with TRL's
    `use_bias_correction_kl`. PPO, arXiv 1707.06347; dual clip, arXiv 1912.09729; decoupled, arXiv 2110.00641; truncated
    importance sampling, arXiv 1802.01561; KL, arXiv 2512.02556.

    Args:
        logprobs_BT: log-probabilities under the policy being trained, with gradient.
        proximal_BT: log-probabilities under the policy before the batch's first step.
        behaviour_BT: log-probabilities under the policy that sampled each row.
        advantages_B: the advantage of each row.
        weights_B: the rows' loss weights.
        loss: the clipping limits and the weight of the KL term.
        reference_BT: log-probabilities under the reference policy. None: no KL term.

    Returns:
        Shape (B, T). The caller sums over tokens, and multiplies each row by its share (see `shares`).
    """
    clip, advantage_B1 = loss.clip, advantages_B[:, None]
    ratio_BT = (logprobs_BT - proximal_BT).exp()
    surrogate_BT = torch.minimum(ratio_BT * advantage_B1, ratio_BT.clamp(1 - clip.low, 1 + clip.high) * advantage_B1)
    if clip.dual is not None:
        bounded_BT = torch.maximum(surrogate_BT, clip.dual * advantage_B1)
        surrogate_BT = torch.where(advantage_B1 < 0, bounded_BT, surrogate_BT)
    losses_BT = -surrogate_BT
    if reference_BT is not None:
        losses_BT = losses_BT + loss.kl * ratio_BT * divergences(logprobs_BT, reference_BT)
    importance_BT = (proximal_BT - behaviour_BT).exp().clamp(max=clip.stale)
    return weights_B[:, None] * importance_BT.detach() * losses_BT


def divergences(logprobs_BT: Tensor, reference_BT: Tensor) -> Tensor:
    """Per-token estimate of the KL divergence from the policy to a reference; never negative.

        k3 = exp(reference - logprobs) - (reference - logprobs) - 1

    The estimate is unbiased for tokens that the policy sampled (http://joschu.net/blog/kl-approx.html). GRPO uses this
    estimate (arXiv 2402.03300).

    Args:
        logprobs_BT: log-probabilities under the policy being trained, with gradient.
        reference_BT: log-probabilities under the reference policy.
    """
    log_ratio_BT = reference_BT - logprobs_BT
    return log_ratio_BT.expm1() - log_ratio_BT


def shares(lengths_B: Tensor, aggregation: Aggregation, max_new_tokens: int) -> Tensor:
    """The weight of each row's summed token losses in the loss of a mini-batch of B rows.

        loss = Σ_b shares[b] · Σ_t losses[b, t]
        token_mean       1 / Σ lengths                every token has the same weight (DAPO, arXiv 2503.14476)
        sequence_mean    1 / (B · lengths[b])         every row has the same weight (GRPO, arXiv 2402.03300)
        dr_grpo          1 / (B · max_new_tokens)     the weight of a token is a constant (Dr. GRPO, arXiv 2503.20783)

    A mini-batch has all rows of one optimizer step, even if they take several forward passes. B includes rows without an
    advantage. In a run with one process, TRL's "dapo" is `token_mean`, "grpo" is `sequence_mean`, and "dr_grpo" is
    `dr_grpo`. "bnpo" is `token_mean` if a step has one forward pass.

    Args:
        lengths_B: tokens of each row's completion, at least 1.
        aggregation: "token_mean", "sequence_mean" or "dr_grpo".
        max_new_tokens: the length limit of a completion; used by `dr_grpo`.
    """
    rows = len(lengths_B)
    match aggregation:
        case "token_mean":
            return torch.ones(rows) / int(lengths_B.sum())
        case "sequence_mean":
            return 1 / lengths_B / rows
        case "dr_grpo":
            return torch.full((rows,), 1 / max_new_tokens) / rows
