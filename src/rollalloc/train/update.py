"""The update: optimizer steps on a batch of rows, with the policy-gradient losses of the GRPO family.

The losses are the clipped surrogate, KL to a reference, and averaging over tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from rollalloc.core.events import Batch, Row
from rollalloc.core.seeds import rng
from rollalloc.generate.sampler import Generation
from rollalloc.models.checkpoint import FILES, TRAINED, Checkpoint
from rollalloc.models.likelihood import KL_ROWS, Tokens, completion_logprobs, recomputing, sent
from rollalloc.models.policy import Policy, computing, digest_of, in_bf16
from rollalloc.models.settings import Aggregation, Loss, has_moved
from rollalloc.models.weights import (
    WeightAverage,
    check_figures,
    check_tensors,
    load_weights,
    norm_of,
    trained,
    weights_of,
)
from rollalloc.train.config import Config

log = logging.getLogger(__name__)


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


@dataclass(slots=True, eq=False)
class Example:
    """A row with everything that its loss needs. Tensors have one entry per completion token, on the model's device.

    Attributes:
        row: the row of the batch.
        prompt: token ids of the prompt.
        tokens: token ids of the completion.
        behaviour_T: log-probabilities of the completion when it was sampled.
        proximal_T: log-probabilities under the weights before the batch's first step; None if not computed yet.
        reference_T: log-probabilities under the initial policy; None without a KL term.
        share: weight of the row's summed token losses in the loss of its mini-batch.
    """

    row: Row
    prompt: Tokens
    tokens: Tokens
    behaviour_T: Tensor
    proximal_T: Tensor | None
    reference_T: Tensor | None = None
    share: float = 0.0


class Updater:
    """Trains a policy on batches.

    Args:
        policy: the model; trained in place. With a KL term, it is copied at creation as the reference, so a resumed run must
            begin with the initial policy of the run.
        prompts: token ids of each prompt.
        config: configuration of the trainer.

    Raises:
        ValueError: gradient checkpointing is on, but the model's layers cannot be recomputed.

    Attributes:
        model: the model that is trained. Without averaging, this is the policy's own model. With averaging, this is a second
            model, and the policy's model has the mean.
        optimizer: AdamW.
        steps: number of steps taken so far.
        reference: a frozen copy of the initial policy's model; None without a KL term.
    """

    entries: ClassVar[tuple[str, ...]] = ()
    files: ClassVar[tuple[str, ...]] = FILES

    def __init__(self, policy: Policy, prompts: Sequence[Tokens], config: Config) -> None:
        self.policy, self.prompts, self.config = policy, prompts, config
        self._average = WeightAverage(policy.model, config.averaging)
        self.model = self._average.model
        self._parameters = [parameter for _, parameter in trained(self.model)]
        adam = {"lr": config.learning_rate, "betas": config.betas, "weight_decay": config.weight_decay}
        self.optimizer = torch.optim.AdamW(self._parameters, **adam, fused=_can_fuse(self._parameters))
        self.steps = 0
        self._between_passes: Callable[[], None] | None = None
        self.reference = deepcopy(policy.model).requires_grad_(False) if config.loss.kl else None
        with self._recomputing():  # raise now if the layers cannot be recomputed
            pass

    def save(self, batches: int) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
        """See `Updates.save`."""
        averaged = {TRAINED: weights_of(self.model)} if self.averages else {}
        moments = {
            f"{name}:{entry}": tensor
            for name, parameter in trained(self.model)
            for entry, tensor in self.optimizer.state.get(parameter, {}).items()
        }
        return {}, {"weights": weights_of(self.policy.model), "optimizer": moments, **averaged}

    def load(self, saved: Checkpoint) -> None:
        """See `Updates.load`.

        Each parameter with moments gets a gradient of zero, as in an uninterrupted run. Without a gradient, AdamW would
        skip the parameter in a step in which no row has an advantage.
        """
        load_weights(self.policy.model, saved.tensors["weights"])
        if self.averages:
            load_weights(self.model, saved.tensors[TRAINED])
        index_of = {name: index for index, (name, _) in enumerate(trained(self.model))}
        state: dict[int, dict[str, Tensor]] = {}
        for key, tensor in saved.tensors["optimizer"].items():
            name, _, entry = key.rpartition(":")
            if name not in index_of:
                raise ValueError(
                    f"optimizer: {key!r} belongs to no parameter of this model; the checkpoint belongs to another model"
                )
            state.setdefault(index_of[name], {})[entry] = tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter in self.optimizer.state else None

    def update(
        self,
        batch: Batch,
        generations: Mapping[int, Generation],
        *,
        spent: float | None = None,
        measure_kl: bool = False,
        between_passes: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """Take the configured number of optimizer steps.

        Args:
            batch: rows with advantages and weights.
            generations: generations by rollout id, at least those of the batch.
            spent: share of the run's budget that was spent before the batch, for a learning rate that falls over the budget.
            measure_kl: True: measure on a few rows how far the steps moved the policy.
            between_passes: called after each forward and backward pass, so that generation can continue.

        Returns:
            Means over the steps, the number of steps, and the learning rate of the last step. With `measure_kl` also
            "approx_kl", in nats per token.

        Raises:
            Diverged: the loss or the gradient is not finite, and the step was not taken; or the step made a weight
                infinite or NaN.
        """
        self._between_passes = between_passes
        examples = self._examples(batch, generations, measure_kl=measure_kl)
        before: dict[int, Tensor] = {}  # log-probabilities under the averaged weights before the batch, by rollout
        if measure_kl and self.averages:
            before |= {each.row.rollout: now_T for each, now_T in self._judged(self.policy.model, _measured(examples))}
        parts = mini_batches(batch.rows, self.config.optimizer_steps_per_batch, self.config.seed, batch.version)
        first, *later = ([examples[index] for index in part] for part in parts)
        self._judge(
            [example for part in later for example in part]
            + [example for example in first if not example.row.advantage]
        )
        figures = [self._step(part, spent) for part in (first, *later)]
        moved = {"approx_kl": self._moved(examples, before)} if measure_kl else {}
        return {
            **{name: float(np.mean([step[name] for step in figures])) for name in figures[0]},
            **moved,
            "steps_in_batch": len(figures),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
        }

    def moved(self, batch: Batch, generations: Mapping[int, Generation]) -> float:
        """The share of the replayed rows' tokens whose probability has changed since they were sampled (`has_moved`).

        Args:
            batch: a batch with replayed rows.
            generations: generations by rollout id, at least those of the replayed rows.
        """
        self._between_passes = None  # an earlier update's
        replayed = self._sampled([row for row in batch.rows if row.replays], generations)
        counts = [
            torch.stack([has_moved(now_T - example.behaviour_T).sum(), torch.tensor(len(now_T), device=now_T.device)])
            for example, now_T in self._judged(self.model, replayed)
        ]
        moved, tokens = torch.stack(counts).sum(dim=0).tolist()
        return moved / tokens

    def _moved(self, examples: Sequence[Example], before: Mapping[int, Tensor]) -> float:
        """Estimate on a few rows how far the batch's steps moved the policy, as the KL divergence KL(before ‖ after).

            mean over tokens of k3 = exp(after - before) - (after - before) - 1

        If weights are not averaged, the rows' proximal log-probabilities are used as `before`.
        """
        sums, tokens = list[Tensor](), 0
        for example, after_T in self._judged(self.policy.model, _measured(examples)):
            before_T = before.get(example.row.rollout, example.proximal_T)
            assert before_T is not None, "every trained row has proximal log-probabilities"
            sums.append(divergences(before_T, after_T).sum())
            tokens += len(after_T)
        return sum(torch.stack(sums).tolist()) / tokens

    def reference_digest(self) -> str | None:
        """A digest of the reference's weights; None without a KL term."""
        return None if self.reference is None else digest_of(self.reference)[:16]

    def _examples(
        self, batch: Batch, generations: Mapping[int, Generation], *, measure_kl: bool = False
    ) -> list[Example]:
        """The batch's rows with their log-probabilities. With a KL term, also log-probabilities under the reference.

        For fresh rows, the sampler's log-probabilities are the proximal log-probabilities. If weights are averaged, the
        sampler uses the mean, so the clip bounds the distance between the trained weights and the mean. For stale rows,
        `_judge` computes the proximal log-probabilities. If weights are not averaged, and the sampler or the update uses
        half precision, their log-probabilities differ slightly. In this case all rows are treated as stale, so that the
        truncated importance weight corrects the difference.
        """
        examples = self._sampled(batch.rows, generations)
        rounded = self._rounds and not self.averages
        for example in examples:
            row = example.row
            if not (row.advantage and (row.version < batch.version or rounded)):
                example.proximal_T = example.behaviour_T
        if rounded and measure_kl:  # recompute, so that rounding is not measured as movement
            for example in _measured(examples):
                example.proximal_T = None
        if self.reference is not None:
            for example, logprobs_T in self._judged(self.reference, examples):
                example.reference_T = logprobs_T
        return examples

    def _sampled(self, rows: Sequence[Row], generations: Mapping[int, Generation]) -> list[Example]:
        """The rows with their log-probabilities when they were sampled."""
        of_rows = [generations[row.rollout] for row in rows]
        sampled = sent(np.concatenate([generation.logprobs for generation in of_rows]), self.policy.model.device)
        parts = sampled.split([len(generation.tokens) for generation in of_rows])
        return [
            Example(row, self.prompts[row.prompt], generation.tokens, sampled_T, None)
            for row, generation, sampled_T in zip(rows, of_rows, parts, strict=True)
        ]

    @property
    def averages(self) -> bool:
        """Whether weights are averaged: the policy has the mean, and another model is trained."""
        return self.model is not self.policy.model

    @property
    def _rounds(self) -> bool:
        """Whether the sampler or the update computes in half precision."""
        config = self.config
        return in_bf16(self.policy.model.device, config.precision) or config.sampling_dtype != "float32"

    def _judge(self, examples: Sequence[Example]) -> None:
        """Compute the proximal log-probabilities of the rows that lack them.

        Rows of the batch's first step need no extra pass, because their loss is computed with the proximal weights anyway.
        """
        for example, logprobs_T in self._judged(self.model, [e for e in examples if e.proximal_T is None]):
            example.proximal_T = logprobs_T

    def _step(self, examples: Sequence[Example], spent: float | None) -> dict[str, float]:
        """Take one optimizer step on the loss of a mini-batch."""
        names, figures = self._backward(examples)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.config.max_grad_norm)
        figures = torch.cat([figures, norm.double()[None]])
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * self.config.schedule.share(self.steps + 1, spent)
        size = self._stepped(figures)
        *found, norm, size = torch.cat([figures, size.double()[None]]).tolist()  # waits for the device, once a step
        measured = {"the loss": found[0], "the gradient's norm": norm}
        check_figures(measured, self.steps + 1, "the step was not taken")
        self.steps += 1
        check_tensors(trained(self.model), f"after optimizer step {self.steps}", size)
        self._average.take(self.steps, len(examples))
        return {**dict(zip(names, found, strict=True)), "grad_norm": norm}

    def _stepped(self, figures: Tensor) -> Tensor:
        """Let AdamW take its step if all figures are finite, and return the norm of the weights after it."""
        whole = figures.isfinite().all()
        if self.optimizer.defaults["fused"]:
            # The fused kernel reads this number on the device, as it does for a `GradScaler`: at 1 it changes nothing.
            self.optimizer.found_inf = (~whole).float()  # pyright: ignore[reportAttributeAccessIssue]
            self.optimizer.step()
        elif whole:
            self.optimizer.step()
        return norm_of(trained(self.model))

    def _backward(self, examples: Sequence[Example]) -> tuple[tuple[str, ...], Tensor]:
        """Accumulate the gradient of a mini-batch's loss. Return names and values of the loss and other figures.

        Without a KL term, a row without an advantage has no gradient: it counts in the means, but needs no forward pass.
        """
        lengths_B = torch.tensor([len(example.tokens) for example in examples])
        names = ("loss", "clip_fraction") + (() if self.reference is None else ("kl",))
        tokens = [int(lengths_B.sum())] * (len(names) - 1)
        counts = sent(np.array([1, *tokens], np.float64), self.policy.model.device)
        self.optimizer.zero_grad(set_to_none=False)
        figures = torch.zeros_like(counts)
        config = self.config
        for example, share in zip(
            examples, shares(lengths_B, config.loss.aggregation, config.sampling.max_new_tokens).tolist(), strict=True
        ):
            example.share = share
        needed = [example for example in examples if example.row.advantage or self.reference is not None]
        for part in passes(needed, config.tokens_per_forward):
            loss, sums = self._loss(part)
            loss.backward()
            figures += (
                torch.stack([loss.detach().double(), *(of_tokens.double() for of_tokens in sums.values())]) / counts
            )
            self._pass_ended()
        return names, figures

    def _loss(self, examples: Sequence[Example]) -> tuple[Tensor, dict[str, Tensor]]:
        """What these rows add to the loss of their mini-batch, and figures summed over their tokens."""
        loss = self.config.loss
        with self._recomputing():
            logprobs_BT, mask_BT = self._logprobs(self.model, examples)
        for example, now_T in zip(examples, logprobs_BT.detach(), strict=True):
            if example.proximal_T is None:
                example.proximal_T = now_T[: len(example.tokens)]
        behaviour_BT = _beside([example.behaviour_T for example in examples], logprobs_BT)
        proximal_BT = _beside(
            [example.proximal_T for example in examples if example.proximal_T is not None], logprobs_BT
        )
        columns = zip(
            *((example.row.advantage, example.row.weight, example.share) for example in examples), strict=True
        )
        advantages_B, weights_B, shares_B = sent(np.array(list(columns), np.float32), logprobs_BT.device)
        reference_BT = None
        if self.reference is not None:
            reference_BT = _beside(
                [example.reference_T for example in examples if example.reference_T is not None], logprobs_BT
            )
        losses_BT = token_losses(logprobs_BT, proximal_BT, behaviour_BT, advantages_B, weights_B, loss, reference_BT)
        with torch.no_grad():
            ratio_BT = (logprobs_BT - proximal_BT).exp()
            outside_BT = (ratio_BT < 1 - loss.clip.low) | (ratio_BT > 1 + loss.clip.high)
            sums = {"clip_fraction": (outside_BT & mask_BT & (advantages_B != 0)[:, None]).sum()}
            if reference_BT is not None:
                sums["kl"] = (divergences(logprobs_BT, reference_BT) * mask_BT).sum()
        return (losses_BT * mask_BT).sum(dim=1) @ shares_B, sums

    def _judged(self, model: PreTrainedModel, examples: Sequence[Example]) -> Iterator[tuple[Example, Tensor]]:
        """Log-probabilities of each row under a model, without gradient, on the model's device."""
        for part in passes(examples, self.config.tokens_per_forward):
            with torch.no_grad():
                logprobs_BT, _ = self._logprobs(model, part)
            self._pass_ended()
            for example, logprobs_T in zip(part, logprobs_BT, strict=True):
                yield example, logprobs_T[: len(example.tokens)]

    def _logprobs(self, model: PreTrainedModel, examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
        with computing(model, self.config.precision, again=self.config.gradient_checkpointing):
            return completion_logprobs(
                model,
                [example.prompt for example in examples],
                [example.tokens for example in examples],
                pad_id=self.policy.pad_id,
                temperature=self.config.sampling.temperature,
                share=not self.config.gradient_checkpointing,  # sharing needs a cache, which checkpointing does not allow
            )

    def _pass_ended(self) -> None:
        if self._between_passes is not None:
            self._between_passes()

    def _recomputing(self) -> AbstractContextManager[None]:
        return recomputing(self.model) if self.config.gradient_checkpointing else nullcontext()


def _can_fuse(parameters: Sequence[Tensor]) -> bool:
    """Whether AdamW can update all parameters in one kernel: the same step but for rounding, 3 to 4 times as fast."""
    return all(each.device.type in ("cpu", "cuda") and each.is_floating_point() for each in parameters)


def _measured(examples: Sequence[Example]) -> list[Example]:
    """The rows on which the change of the policy is measured."""
    return [example for example in examples if not example.row.replays][:KL_ROWS] or list(examples[:KL_ROWS])


def mini_batches(rows: Sequence[Row], parts: int, seed: int, version: int) -> Iterator[list[int]]:
    """Split a batch's rows into one part per optimizer step, by index.

    Groups stay together, unless there are fewer groups than parts.
    """
    by_group: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        by_group.setdefault(row.group, []).append(index)
    units = list(by_group.values()) if len(by_group) >= parts else [[index] for index in range(len(rows))]
    if len(units) < parts:
        log.warning("%d rows cannot be split into %d optimizer steps; each row gets one step", len(units), parts)
    order = rng(seed, "mini-batches", version).permutation(len(units))
    for part in np.array_split(order, min(parts, len(units))):
        yield [index for unit in part.tolist() for index in units[unit]]


def passes(examples: Iterable[Example], tokens_per_forward: int) -> Iterator[list[Example]]:
    """Split rows into forward passes of similar lengths. A pass has at most this many tokens, including padding.

    A longer row gets a pass of its own.
    """
    part: list[Example] = []
    longest_prompt = 0
    for example in sorted(examples, key=lambda example: (len(example.tokens), len(example.prompt))):
        longest_prompt = max(longest_prompt, len(example.prompt))
        width = longest_prompt + len(example.tokens)
        if part and (len(part) + 1) * width > tokens_per_forward:
            yield part
            part, longest_prompt = [], len(example.prompt)
        part.append(example)
    if part:
        yield part


def _beside(rows: Sequence[Tensor], like_BT: Tensor) -> Tensor:
    """The values of all rows as one matrix, padded with 0 to the shape of `like_BT`."""
    return pad_sequence(list(rows), batch_first=True).to(like_BT.dtype)
