"""Turns a batch of the core into the tensors for TRL's loss."""

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
from rollalloc.drivers.trl.distributed import model_to_call
from rollalloc.drivers.trl.generation import Generator, logprobs_of, steps_per_batch, widened
from rollalloc.drivers.trl.rollout import Rollout, Tokens, idle_rollout
from rollalloc.models.likelihood import padded
from rollalloc.models.settings import Clip

# These losses average over the rows in the tensors. All others divide by `num_items_in_batch`, a number of tokens.
_MEANS_OVER_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")
_DIVIDE_BY_TOKENS = ("dapo", "cispo", "vespo")


def training_inputs(
    trainer: Any, generate: Generator, batch: Batch | None, rollouts: Sequence[Rollout]
) -> dict[str, Tensor]:
    """The tensors of this process's share of a batch.

    Rows with advantage 0 are left out, unless the loss needs them (see `needs_every_row`). All processes get the same number
    of rows, a multiple of the number of micro-batches. To reach this number, rows are added whose tokens are all masked
    (padding). If the loss averages over rows, advantages are scaled, so that the loss is the mean over all rows of the
    batch, including the rows that were left out.

    A row's advantage is multiplied by its weight. If the batch has rows that were sampled from older weights, each token's
    advantage is also multiplied by a truncated importance weight, as in rollalloc's own trainer:

        A[b, t] = advantage[b] · weight[b] · min(exp(proximal[b, t] - behaviour[b, t]), 2)

    Args:
        trainer: TRL's trainer.
        generate: the generator of the rollouts.
        batch: the core's batch. None: the run is over, and all rows are padding.
        rollouts: the rollouts of the batch's rows, in order.

    Returns:
        Tensors by the names that TRL's loss uses: B rows, with prompts padded to P tokens and completions to T tokens.
    """
    batch = batch or Batch((), 0)
    accelerator, processes = trainer.accelerator, trainer.accelerator.num_processes
    # TRL splits the tensors into this many micro-batches, so their number of rows must be a multiple of it on every
    # process. Otherwise a process would wait for ever in a collective operation.
    parts = processes * trainer.args.steps_per_generation
    every = needs_every_row(trainer)
    # A row without an advantage has no gradient, but would cost a forward and a backward pass.
    needed = [at for at, row in enumerate(batch.rows) if every or row.advantage * row.weight]
    whole = max(1, -(-len(needed) // parts)) * parts
    # Every n-th row, so that the numbers of rows of two processes differ by at most one.
    mine = needed[accelerator.process_index :: processes]
    rows, kept = [batch.rows[at] for at in mine], [rollouts[at] for at in mine]
    padding = whole // processes - len(rows)
    filled = kept + [idle_rollout(generate.eos_ids)] * padding  # the model needs at least one token per row

    pad_id, device = generate.pad_id, accelerator.device
    prompts, completions = [each.prompt_tokens for each in filled], [each.made.tokens for each in filled]
    prompt_BP, prompt_mask_BP = widened(trainer, padded(prompts, pad_id, side="left", device=device), side="left")
    completion_BT, mask_BT = widened(trainer, padded(completions, pad_id, side="right", device=device), side="right")
    for at, rollout in enumerate(filled):
        if at >= len(kept) or not counts(trainer, rollout):
            # TRL's own way to leave a row out. Its tokens are still in the tensors.
            mask_BT[at] = False
    # The loss will divide by the rows in the tensors (`whole` on all processes together). It should divide by the
    # rows of the batch, because rows with advantage 0 count in the mean.
    share = whole / len(batch.rows) if needed and trainer.loss_type in _MEANS_OVER_ROWS else 1.0
    # Over the whole batch, not over this process's rows: every process divides by the same number.
    tokens = sum(rollout.length for rollout in rollouts if counts(trainer, rollout))
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
    """Whether rows with advantage 0 change the loss, for example by a KL term, an entropy term or a router's loss.

    If the loss averages in an unknown way, the answer is True.
    """
    return (
        trainer.loss_type not in (*_MEANS_OVER_ROWS, *_DIVIDE_BY_TOKENS)
        or trainer.beta != 0.0
        or trainer.top_entropy_quantile < 1.0
        or trainer.args.use_liger_kernel
        or getattr(trainer, "_entropy_bonus_enabled", False)
        or getattr(trainer, "aux_loss_enabled", False)
    )


def counts(trainer: Any, rollout: Rollout) -> bool:
    """Whether the loss has the rollout's tokens. With `mask_truncated_completions`, it leaves truncated ones out."""
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
    """Tensors that correct the loss if rows were sampled by another engine, or from weights other than the trained weights.

    Every process returns the same keys, even a process whose rows need no correction.
    """
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
    # The rows that need a forward pass. All rows, if vLLM's probabilities differ from the trainer's, or if TRL needs
    # old probabilities and those of the generation are only close to the model's (half precision). Otherwise only
    # rows of older weights.
    every = set(range(len(filled))) if engine or (several and not generate.gives_the_policys) else older
    # Fresh rows were sampled from the averaged weights, so they are compared with these weights.
    by_the_mean = every - older if trainer.averaged.window else set[int]()
    proximal = dict(enumerate(behaviour))
    if by_the_mean:
        with trainer.averaged.sampling():
            proximal |= _by_place(generate, filled, by_the_mean)
    # Also without rows here: other processes may have some, and every process must make equally many forward passes.
    proximal |= _by_place(generate, filled, every - by_the_mean)
    proximal_BT = _like(mask_BT, [proximal[at] for at in range(len(filled))])
    if several:
        given["old_per_token_logps"] = proximal_BT
    if engine or age:
        # For some tokens, vLLM gives no log-probability (NaN). Their importance weight is 1.
        difference_BT = proximal_BT - given["sampling_per_token_logps"]
        own_BT = _own(mask_BT, filled)
        importance_BT = (difference_BT.nan_to_num(0.0) * own_BT).exp().clamp(max=Clip().stale)
        if engine:
            given["importance_sampling_ratio"] = importance_BT
            known_BT = mask_BT & own_BT & ~difference_BT.isnan()
            _log_differences(trainer, difference_BT[known_BT].abs(), importance_BT[known_BT])
        else:
            given["advantages"] = advantages_B[:, None] * importance_BT
    return given


def _log_differences(trainer: Any, difference_K: Tensor, importance_K: Tensor) -> None:
    """Log how far vLLM's log-probabilities are from the trainer's, under the names of stock TRL.

    Args:
        trainer: TRL's trainer.
        difference_K: absolute differences of the log-probabilities of this process's K tokens.
        importance_K: their importance weights, truncated.
    """
    # NaN marks a process without such tokens. It must still take part in `gather`, or the other processes would wait
    # for ever.
    own_5 = torch.full((5,), torch.nan, device=difference_K.device)
    if len(difference_K):
        own_5[:2] = torch.stack([difference_K.mean(), difference_K.max()])
        own_5[2:] = torch.stack([importance_K.min(), importance_K.mean(), importance_K.max()])
    everywhere: Any = trainer.accelerator.gather(own_5[None])
    gathered_P5 = everywhere.cpu().numpy()
    gathered_P5 = gathered_P5[~np.isnan(gathered_P5[:, 0])]  # without processes that had no token to compare
    if not len(gathered_P5):
        return
    mean_5, least_5, most_5 = gathered_P5.mean(axis=0), gathered_P5.min(axis=0), gathered_P5.max(axis=0)
    metrics = trainer._metrics["train"]
    metrics["sampling/sampling_logp_difference/mean"].append(float(mean_5[0]))
    metrics["sampling/sampling_logp_difference/max"].append(float(most_5[1]))
    metrics["sampling/importance_sampling_ratio/min"].append(float(least_5[2]))
    metrics["sampling/importance_sampling_ratio/mean"].append(float(mean_5[3]))
    metrics["sampling/importance_sampling_ratio/max"].append(float(most_5[4]))


def _by_place(
    generate: Generator, filled: Sequence[Rollout], places: Collection[int]
) -> dict[int, NDArray[np.float32]]:
    """Log-probabilities of some rollouts under the model's current weights.

    `places` are the indices of these rollouts in `filled`. They are also the keys of the result.
    """
    return dict(zip(sorted(places), generate.logprobs(_pairs(filled[at] for at in sorted(places))), strict=True))


def _reference_logprobs(trainer: Any, filled: Sequence[Rollout]) -> list[NDArray[np.float32]]:
    """Log-probabilities under the reference model.

    If an adapter is trained, the reference is the adapter "ref" or, if there is no such adapter, the model without adapters.
    """
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    if trainer.ref_model is not None:
        reference, without_adapter = model_to_call(trainer, trainer.ref_model), nullcontext()
    else:
        reference = model_to_call(trainer, trainer.model_wrapped)
        without_adapter = use_adapter(model, "ref" if "ref" in model.peft_config else None)
    with without_adapter:
        return logprobs_of(trainer, reference, _pairs(filled))


def _pairs(rollouts: Iterable[Rollout]) -> list[tuple[Tokens, Tokens]]:
    return [(rollout.prompt_tokens, rollout.made.tokens) for rollout in rollouts]


def _own(mask_BT: Tensor, rollouts: Sequence[Rollout]) -> Tensor:
    """A mask of shape (B, T), False for tokens of tools' answers and True for all others."""
    # True in the padding too, which other masks exclude.
    own_BT = torch.ones(mask_BT.shape, dtype=torch.bool)
    for at, rollout in enumerate(rollouts):
        if rollout.own is not None:
            own_BT[at, : len(rollout.own)] = torch.tensor(rollout.own)
    return own_BT.to(mask_BT.device)


def _like(mask_BT: Tensor, rows: Sequence[NDArray[np.float32]]) -> Tensor:
    """Rows of different lengths as a float32 matrix of the mask's shape (B, T), padded with 0."""
    filled_BT = torch.zeros(mask_BT.shape, dtype=torch.float32)
    for at, row_T in enumerate(rows):
        filled_BT[at, : len(row_T)] = torch.from_numpy(row_T)
    return filled_BT.to(mask_BT.device)
