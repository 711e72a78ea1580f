"""TRL's losses, computed from the tensors that the trainer's own loss gets. Advantages are positive, ratios are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_BY_TOKENS = ("cispo", "dapo", "vespo")
KNOWN = ("grpo", "sapo", "bnpo", "dr_grpo", "luspo", *_BY_TOKENS)
NEED_LOGPROBS = ("cispo", "vespo")  # these multiply by log-probabilities, and not only by their ratios
MEANS_OVER_TOKENS = ("grpo", "sapo")  # of a row, so that an advantage of the whole row hides which of its tokens count


def counted(inputs: Mapping[str, Tensor]) -> Tensor:
    """The mask of the tokens that the loss counts, shape (B, T): completion tokens, without tokens of tools' answers."""
    mask_BT = inputs["completion_mask"]
    return (mask_BT * inputs["tool_mask"] if "tool_mask" in inputs else mask_BT).float()


def losses(
    trainer: Any, inputs: Mapping[str, Tensor], log_ratio_BT: Tensor, logprobs_BT: Tensor | None
) -> list[Tensor]:
    """The loss of a micro-batch, one value for each way in which releases of TRL divide it.

    Args:
        trainer: TRL's trainer. Its settings are used, but none of its methods except `get_gamma_weights`.
        inputs: TRL's tensors. Advantages are above 0, so that ratios below 1 are never clipped.
        log_ratio_BT: logarithm of the policy's probability over the one in `old_per_token_logps`.
        logprobs_BT: the policy's log-probabilities; needed for the losses `NEED_LOGPROBS`, and for a KL term.

    Returns:
        Scalars, one or two.
    """
    mask_BT, args = counted(inputs), trainer.args
    of_tokens_BT = _of_tokens(trainer, inputs, log_ratio_BT * mask_BT, logprobs_BT) * mask_BT
    lengths_B = mask_BT.sum(dim=1)
    parts = trainer.current_gradient_accumulation_steps if trainer.model.training else 1
    if trainer.loss_type in _BY_TOKENS:
        items = inputs["num_items_in_batch"].float().clamp(min=1) / trainer.accelerator.num_processes
        # Since 1.10, TRL divides by the tokens of one optimizer step, and no longer by those of the generation batch.
        windows = [1.0, parts / args.steps_per_generation] if trainer.model.training else [1.0]
        return [of_tokens_BT.sum() / (items * window) for window in windows]
    match trainer.loss_type:
        case "grpo" | "sapo":
            loss = (of_tokens_BT.sum(dim=1) / lengths_B.clamp(min=1)).mean()
        case "bnpo":
            loss = of_tokens_BT.sum() / mask_BT.sum().clamp(min=1)
        case "dr_grpo":
            loss = of_tokens_BT.sum() / (len(mask_BT) * trainer.max_completion_length)
        case _:
            loss = of_tokens_BT.sum(dim=1).mean()
    return [loss / parts]


def _of_tokens(trainer: Any, inputs: Mapping[str, Tensor], log_ratio_BT: Tensor, logprobs_BT: Tensor | None) -> Tensor:
    """The loss of each token, shape (B, T)."""
    advantages = inputs["advantages"]
    advantages_BT = (advantages[:, None] if advantages.dim() == 1 else advantages).expand_as(log_ratio_BT)
    mask_BT, args = counted(inputs), trainer.args
    log_ratio = log_ratio_BT
    if trainer.importance_sampling_level == "sequence":
        log_ratio = (log_ratio_BT.sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1))[:, None].expand_as(log_ratio_BT)
    ratio_BT = log_ratio.exp()
    importance_BT = inputs.get("importance_sampling_ratio")
    match trainer.loss_type:
        case "cispo":
            loss_BT = -ratio_BT.clamp(max=trainer.epsilon_high) * advantages_BT * _given(logprobs_BT)
        case "vespo":
            weights = {name: getattr(args, f"vespo_{name}") for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")}
            phi_B1 = trainer.get_gamma_weights(
                advantages=advantages_BT[:, :1],
                log_ratio_per_token=log_ratio_BT,
                mask=mask_BT,
                importance_sampling_ratio=importance_BT,
                **weights,
            )
            return -phi_B1 * advantages_BT * _given(logprobs_BT) + _kl(trainer, inputs, ratio_BT, logprobs_BT)
        case "sapo":
            hot = args.sapo_temperature_pos
            loss_BT = -torch.sigmoid(hot * (ratio_BT - 1)) * 4 / hot * advantages_BT
        case _:
            clipped_BT = ratio_BT.clamp(1 - trainer.epsilon_low, 1 + trainer.epsilon_high)
            loss_BT = -torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    if importance_BT is not None:
        loss_BT = loss_BT * importance_BT
    return loss_BT + _kl(trainer, inputs, ratio_BT, logprobs_BT)


def _kl(trainer: Any, inputs: Mapping[str, Tensor], ratio_BT: Tensor, logprobs_BT: Tensor | None) -> Tensor | float:
    """beta · (exp(reference - policy) - (reference - policy) - 1), as TRL estimates the KL divergence of each token."""
    if trainer.beta == 0.0 or "ref_per_token_logps" not in inputs:
        return 0.0
    difference_BT = inputs["ref_per_token_logps"] - _given(logprobs_BT)
    kl_BT = trainer.beta * (difference_BT.expm1() - difference_BT)
    return kl_BT * ratio_BT if getattr(trainer.args, "use_bias_correction_kl", False) else kl_BT


def _given(logprobs_BT: Tensor | None) -> Tensor:
    assert logprobs_BT is not None
    return logprobs_BT
