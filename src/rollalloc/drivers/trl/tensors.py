"""A batch of the core as the tensors that TRL's loss takes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from trl.trainer.utils import use_adapter

from rollalloc.core.events import Batch, Row
from rollalloc.drivers.trl.allocation import Rollout, idle_rollout
from rollalloc.drivers.trl.chats import Tokens
from rollalloc.drivers.trl.checks import steps_per_batch
from rollalloc.drivers.trl.generation import Generator, logprobs_of, widened
from rollalloc.models.likelihood import padded
from rollalloc.train.objective import Clip

# Losses that average over the rows they are given, and losses that divide by the number of tokens they are told.
_MEANS_OVER_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")
_DIVIDE_BY_TOKENS = ("dapo", "cispo", "vespo")


def training_inputs(
    trainer: Any, generate: Generator, batch: Batch | None, rollouts: Sequence[Rollout]
) -> dict[str, Tensor]:
    """This process's share of a batch: as many rows as any other's, and a multiple of the micro-batches.

    Rows without advantage have no gradient: they count in the means, but are left out unless they bear on something else
    in the loss. What is lacking to a multiple is filled with padding, rows without a token that counts. The mean over rows
    that some losses take is corrected for both. A row's advantage is multiplied with its weight. Where a batch has rows
    sampled from older weights, each token's is multiplied with its truncated importance weight, too, as in rollalloc's own
    trainer:

        A[b, t] = advantage[b] · weight[b] · min(exp(proximal[b, t] - behaviour[b, t]), 2)

    Args:
        trainer: the trainer.
        generate: what generated the rollouts.
        batch: of the core; None, where the run is over, gives padding only.
        rollouts: those of its rows.
    """
    batch = batch or Batch((), 0)
    accelerator, processes = trainer.accelerator, trainer.accelerator.num_processes
    parts = processes * trainer.args.steps_per_generation
    every = needs_every_row(trainer)
    needed = [at for at, row in enumerate(batch.rows) if every or row.advantage * row.weight]
    whole = max(1, -(-len(needed) // parts)) * parts
    mine = needed[accelerator.process_index :: processes]
    rows, kept = [batch.rows[at] for at in mine], [rollouts[at] for at in mine]
    padding = whole // processes - len(rows)
    filled = kept + [idle_rollout(generate.eos_ids)] * padding  # the model has to read something

    pad_id, device = generate.pad_id, accelerator.device
    prompts, completions = [each.prompt_tokens for each in filled], [each.made.tokens for each in filled]
    prompt_BP, prompt_mask_BP = widened(trainer, padded(prompts, pad_id, side="left", device=device), side="left")
    completion_BT, mask_BT = widened(trainer, padded(completions, pad_id, side="right", device=device), side="right")
    for at, rollout in enumerate(filled):
        if at >= len(kept) or not _counts(trainer, rollout):
            mask_BT[at] = False
    share = whole / len(batch.rows) if needed and trainer.loss_type in _MEANS_OVER_ROWS else 1.0
    tokens = sum(rollout.length for rollout in rollouts if _counts(trainer, rollout))
    advantages = [row.advantage * row.weight * share for row in rows] + [0.0] * padding
    inputs = {
        "prompt_ids": prompt_BP,
        "prompt_mask": prompt_mask_BP.long(),
        "completion_ids": completion_BT,
        "completion_mask": mask_BT.long(),
        "advantages": torch.tensor(advantages, dtype=torch.float32, device=device),
        "num_items_in_batch": torch.tensor(max(1, tokens), device=device),
    }
    if generate.turns is not None:
        inputs["tool_mask"] = _own(mask_BT, filled).long()
    if trainer.beta != 0.0:
        inputs["ref_per_token_logps"] = _like(mask_BT, _reference_logprobs(trainer, filled))
    return inputs | _corrections(trainer, generate, batch, rows, filled, inputs["advantages"], mask_BT)


def needs_every_row(trainer: Any) -> bool:
    """Whether a row without advantage bears on the loss: by a KL term, entropy, a router, or as one more to average over."""
    return (
        trainer.loss_type not in (*_MEANS_OVER_ROWS, *_DIVIDE_BY_TOKENS)
        or trainer.beta != 0.0
        or trainer.top_entropy_quantile < 1.0
        or trainer.args.use_liger_kernel
        or getattr(trainer, "_entropy_bonus_enabled", False)
        or getattr(trainer, "aux_loss_enabled", False)
    )


def _counts(trainer: Any, rollout: Rollout) -> bool:
    return not (trainer.mask_truncated_completions and rollout.made.truncated)


def _corrections(
    trainer: Any,
    generate: Generator,
    batch: Batch,
    rows: Sequence[Row],
    filled: Sequence[Rollout],
    advantages_B: Tensor,
    mask_BT: Tensor,
) -> dict[str, Tensor]:
    """What corrects for weights, or an engine, other than those that are trained; keys alike on every process."""
    engine = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    age = any(row.version < batch.version for row in batch.rows)
    several = steps_per_batch(trainer.args) > 1 or trainer.averaged.window > 0
    given: dict[str, Tensor] = {}
    behaviour = [rollout.made.logprobs for rollout in filled]
    if generate.knows_logprobs:
        given["sampling_per_token_logps"] = _like(mask_BT, behaviour)
    if not (engine or age or several):
        return given
    older = {at for at, row in enumerate(rows) if row.version < batch.version}
    every = set(range(len(filled))) if engine or (several and not generate.gives_the_policys) else older
    # Of fresh rows it is what sampled them. Sharded models are not averaged: all processes pass them as often.
    by_the_mean = every - older if trainer.averaged.window else set[int]()
    with trainer.averaged.sampling():
        proximal = dict(enumerate(behaviour)) | _by_place(generate, filled, by_the_mean)
    proximal |= _by_place(generate, filled, every - by_the_mean)
    proximal_BT = _like(mask_BT, [proximal[at] for at in range(len(filled))])
    if several:
        given["old_per_token_logps"] = proximal_BT
    if engine or age:
        # vLLM has none for some tokens; they are not corrected.
        drift_BT = (proximal_BT - given["sampling_per_token_logps"]).nan_to_num(0.0) * _own(mask_BT, filled)
        importance_BT = drift_BT.exp().clamp(max=Clip().stale)
        if engine:
            given["importance_sampling_ratio"] = importance_BT
        else:
            given["advantages"] = advantages_B[:, None] * importance_BT
    return given


def _by_place(
    generate: Generator, filled: Sequence[Rollout], places: Collection[int]
) -> dict[int, NDArray[np.float32]]:
    """Log-probabilities under the weights of now."""
    return dict(zip(sorted(places), generate.logprobs(_pairs(filled[at] for at in sorted(places))), strict=True))


def _reference_logprobs(trainer: Any, filled: Sequence[Rollout]) -> list[NDArray[np.float32]]:
    """Under the reference model or, where only an adapter is trained, under the model without it."""
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    if trainer.ref_model is not None:
        reference, without_adapter = trainer.accelerator.unwrap_model(trainer.ref_model), nullcontext()
    else:
        reference, without_adapter = model, use_adapter(model, "ref" if "ref" in model.peft_config else None)
    with without_adapter:
        return logprobs_of(trainer, reference, _pairs(filled))


def _pairs(rollouts: Iterable[Rollout]) -> list[tuple[Tokens, Tokens]]:
    return [(rollout.prompt_tokens, rollout.made.tokens) for rollout in rollouts]


def _own(mask_BT: Tensor, rollouts: Sequence[Rollout]) -> Tensor:
    """False at the tokens that tools answered, of the mask's shape."""
    own_BT = torch.ones(mask_BT.shape, dtype=torch.bool)
    for at, rollout in enumerate(rollouts):
        if rollout.own is not None:
            own_BT[at, : len(rollout.own)] = torch.tensor(rollout.own)
    return own_BT.to(mask_BT.device)


def _like(mask_BT: Tensor, rows: Sequence[NDArray[np.float32]]) -> Tensor:
    """Rows of unequal length as a float32 matrix of the mask's shape, 0 beyond a row's end."""
    filled_BT = torch.zeros(mask_BT.shape, dtype=torch.float32)
    for at, row_T in enumerate(rows):
        filled_BT[at, : len(row_T)] = torch.from_numpy(row_T)
    return filled_BT.to(mask_BT.device)
