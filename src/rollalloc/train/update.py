"""The update: optimizer steps on a batch of rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from rollalloc.core.events import Batch, Row
from rollalloc.core.seeds import rng
from rollalloc.generate.sampler import Generation
from rollalloc.models.adapter import digest_of
from rollalloc.models.likelihood import Tokens, completion_logprobs, sent
from rollalloc.models.policy import Policy, computing, in_bf16
from rollalloc.models.recomputing import recomputing
from rollalloc.models.weights import trained
from rollalloc.train.averaging import WeightAverage
from rollalloc.train.clipping import NormLimit
from rollalloc.train.loss import denominator, divergences, own_shares, token_losses
from rollalloc.train.settings import Settings

log = logging.getLogger(__name__)

MEASURED = 16  # rows by which the way of the weights is measured


@dataclass(slots=True, eq=False)
class Example:
    """A row with what its loss needs; each tensor has one entry a token of the completion, where the model is.

    Attributes:
        row: of the batch.
        prompt: token ids.
        tokens: of the completion.
        behaviour_T: log-probabilities when it was sampled.
        proximal_T: those under the weights before the batch's first step; None until a forward pass gave them.
        reference_T: those under the initial policy; None without a KL term.
        share: of the row's summed losses in its mini-batch's loss.
        early: whether its gradient was added up before the batch came.
    """

    row: Row
    prompt: Tokens
    tokens: Tokens
    behaviour_T: Tensor
    proximal_T: Tensor | None
    reference_T: Tensor | None = None
    share: float = 0.0
    early: bool = False


@dataclass(slots=True, eq=False)
class Early:
    """What was done for a batch before it came, under the weights that it is trained with.

    Attributes:
        version: of these weights.
        examples: rows that it was expected to have, by rollout.
        sums: of the passes whose gradients are added up, as `Updater._add_up` gives them, but with `own_shares` only; None:
            there was none.
        discarded: rows of such passes that the batch did not have.
    """

    version: int = -1
    examples: dict[int, Example] = field(default_factory=dict[int, Example])
    sums: Tensor | None = None
    discarded: int = 0


class Updater:
    """Trains a policy on batches.

    Args:
        policy: the model; trained in place. With a KL term it is also the reference, as it is now: a resumed run must be
            given the policy that it began with.
        prompts: token ids of each prompt.
        settings: of the trainer.

    Raises:
        ValueError: the model's layers cannot be computed again, and the settings say so.

    Attributes:
        model: what is trained: the policy's, whose weights are the mean of this one's where they are averaged.
        optimizer: AdamW.
        steps: taken so far.
        limit: what the next gradient's norm is clipped to.
        reference: a frozen copy of the initial policy's model; None without a KL term.
        between: called after each forward pass, backward pass included: a moment for others.
    """

    def __init__(self, policy: Policy, prompts: Sequence[Tokens], settings: Settings) -> None:
        self.policy, self.prompts, self.settings = policy, prompts, settings
        self._average = WeightAverage(policy.model, settings.averaging)
        self.model = self._average.model
        self._parameters = [parameter for _, parameter in trained(self.model)]
        adam = {"lr": settings.learning_rate, "betas": settings.betas, "weight_decay": settings.weight_decay}
        self.optimizer = torch.optim.AdamW(self._parameters, **adam)
        self.steps = 0
        self.limit = NormLimit(most=settings.max_grad_norm, factor=settings.adaptive_clip)
        self.between: Callable[[], None] = _nothing
        self._early = Early()
        self.reference = deepcopy(policy.model).requires_grad_(False) if settings.loss.kl else None
        with self._recomputing():  # one that cannot be is refused now
            pass

    def update(
        self,
        batch: Batch,
        generations: Mapping[int, Generation],
        *,
        spent: float | None = None,
        measure_kl: bool = False,
    ) -> dict[str, Any]:
        """Take the configured number of optimizer steps.

        Args:
            batch: rows with advantages and weights.
            generations: by rollout, at least those of the batch.
            spent: share of the run's budget that was spent before the batch, for a rate that falls over it.
            measure_kl: find out, by a forward pass of a few rows, how far the steps moved the policy.

        Returns:
            Means over the steps, their number, and the last one's learning rate; with `measure_kl` also "approx_kl", in nats
            a token. Where rows are passed early (`ahead`), "early_rows" that were, and "early_discarded" in vain.

        Raises:
            FloatingPointError: a gradient is not finite.
        """
        examples = self._examples(batch, generations, measure_kl=measure_kl)
        early = {"early_rows": sum(each.early for each in examples), "early_discarded": self._early.discarded}
        before = self._before(examples) if measure_kl and self.averages else {}
        first, *later = self._parts(examples, batch.version)
        self._judge([each for part in later for each in part] + [each for each in first if not each.row.advantage])
        figures = [self._step(part, spent) for part in (first, *later)]
        self._early = Early()
        moved = {"approx_kl": self._moved(examples, before)} if measure_kl else {}
        return {
            **{name: float(np.mean([step[name] for step in figures])) for name in figures[0]},
            **moved,
            **(early if self.settings.works_early else {}),
            "steps_in_batch": len(figures),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
        }

    def begun(self) -> set[int]:
        """Groups of the rows that were given to `ahead` since the last update."""
        return {each.row.group for each in self._early.examples.values()}

    def ahead(self, rows: Sequence[Row], version: int, generations: Mapping[int, Generation]) -> bool:
        """Do one pass of what the next update would have to do, for rows that its batch is expected to have.

        Where a batch is one optimizer step, the rows' gradients are added up, each by its own share; `update` divides them
        by what only the whole batch says. If that has not all of these rows just as they are here, all that was added is
        discarded. Where a batch is split into several steps, log-probabilities are computed that no sampler gave.

        Args:
            rows: as `Allocator.preview` gives them; those given before since the last update need not be among them.
            version: of the weights; what was done under others is forgotten.
            generations: by rollout, at least those of the rows.

        Returns:
            Whether there was a pass to do.
        """
        if self._early.version != version:
            self._early = Early(version)
        self._take(rows, generations)
        waiting = [each for each in self._early.examples.values() if self._waits(each)]
        if not waiting:
            return False
        part = next(passes(waiting, self.settings.tokens_per_forward))
        if self.reference is not None:
            for example, logprobs_T in self._passed(self.reference, part):
                example.reference_T = logprobs_T
        if self.settings.optimizer_steps_per_batch == 1:
            self._add_early(part)
        elif part := [each for each in part if each.proximal_T is None]:
            for example, logprobs_T in self._passed(self.model, part):
                example.proximal_T = logprobs_T
        return True

    def _waits(self, example: Example) -> bool:
        """Whether there is a pass to do for a row before its batch is there."""
        if self.settings.optimizer_steps_per_batch == 1:
            return not example.early and self._has_gradient(example)
        return example.proximal_T is None or (self.reference is not None and example.reference_T is None)

    def _add_early(self, part: Sequence[Example]) -> None:
        """Add up the gradient of some rows, each by its own share."""
        early = self._early
        if early.sums is None:
            self.optimizer.zero_grad(set_to_none=False)
        self._weigh(part, 1)
        sums = self._add_up(part)
        early.sums = sums if early.sums is None else early.sums + sums
        for each in part:
            each.early = True

    def _settle(self, batch: Batch) -> None:
        """Keep what was done for this batch before it came; gradients only where it has all of these rows as they were."""
        early, rows = self._early, {row.rollout: row for row in batch.rows}
        added = [each.row for each in early.examples.values() if each.early]
        if early.version != batch.version or any(rows.get(row.rollout) != row for row in added):
            self._early = Early(batch.version, discarded=len(added))
            return
        for row in [each.row for each in early.examples.values()]:
            if rows.get(row.rollout) != row:
                del early.examples[row.rollout]

    def _before(self, examples: Sequence[Example]) -> dict[int, Tensor]:
        """Log-probabilities of a few rows under averaged weights, before the batch's steps, by rollout."""
        return {each.row.rollout: now_T for each, now_T in self._judged(self.policy.model, _measured(examples))}

    def _moved(self, examples: Sequence[Example], before: Mapping[int, Tensor]) -> float:
        """The divergence of the policy before the batch's steps from the one after, by the tokens of a few of its rows.

        mean over tokens of k3 = exp(after - before) - (after - before) - 1

        Where weights are not averaged, the rows' proximal log-probabilities are those before.
        """
        sums, tokens = list[Tensor](), 0
        for example, after_T in self._judged(self.policy.model, _measured(examples)):
            before_T = before.get(example.row.rollout, example.proximal_T)
            assert before_T is not None, "a row whose step was taken has them"
            sums.append(divergences(before_T, after_T).sum())
            tokens += len(after_T)
        return sum(torch.stack(sums).tolist()) / tokens

    def reference_digest(self) -> str | None:
        """Names the reference's weights; None without a KL term."""
        return None if self.reference is None else digest_of(self.reference)[:16]

    def _examples(
        self, batch: Batch, generations: Mapping[int, Generation], *, measure_kl: bool = False
    ) -> list[Example]:
        """The batch's rows, with their log-probabilities under the reference, where there is one."""
        self._settle(batch)
        self._take(batch.rows, generations)
        examples = [self._early.examples[row.rollout] for row in batch.rows]
        if self._rounds and measure_kl and not self.averages:  # or the rounding would be measured as a movement
            for each in _measured(examples):
                if not (each.early and each.row.advantage):
                    each.proximal_T = None
        if self.reference is not None:
            unknown = [each for each in examples if each.reference_T is None]
            for example, logprobs_T in self._judged(self.reference, unknown):
                example.reference_T = logprobs_T
        return examples

    def _take(self, rows: Sequence[Row], generations: Mapping[int, Generation]) -> None:
        """Make examples of those rows that there are none of.

        A fresh row's proximal log-probabilities are its sampler's: where weights are averaged the mean's, so that the clip
        bounds how far from it what is trained may go. Without a mean, and where the sampler or the update computes in half
        precision, these are not what a forward pass gives, so that every row is treated as stale: the importance weight,
        truncated, then corrects for the difference. A stale row's are still to be found, see `_judge`.
        """
        early = self._early
        new = [row for row in rows if row.rollout not in early.examples]
        if not new:
            return
        of_rows = [generations[row.rollout] for row in new]
        sampled = sent(np.concatenate([made.logprobs for made in of_rows]), self.policy.model.device)
        parts = sampled.split([len(made.tokens) for made in of_rows])
        for row, made, sampled_T in zip(new, of_rows, parts, strict=True):
            stale = row.advantage and (row.version < early.version or (self._rounds and not self.averages))
            proximal_T = None if stale else sampled_T
            early.examples[row.rollout] = Example(row, self.prompts[row.prompt], made.tokens, sampled_T, proximal_T)

    @property
    def averages(self) -> bool:
        """Whether the policy's weights are the mean of those that are trained, in a model of their own."""
        return self.model is not self.policy.model

    @property
    def _rounds(self) -> bool:
        """Whether the sampler or the update computes in half precision."""
        settings = self.settings
        return in_bf16(self.policy.model.device, settings.precision) or settings.sampling_dtype != "float32"

    def _judge(self, examples: Sequence[Example]) -> None:
        """Find the proximal log-probabilities of those rows that have none.

        A row of the batch's first step needs no pass for that: the weights that its loss is computed with are the proximal
        ones still, so that `_loss` has them anyway.
        """
        for example, logprobs_T in self._judged(self.model, [e for e in examples if e.proximal_T is None]):
            example.proximal_T = logprobs_T

    def _parts(self, examples: Sequence[Example], version: int) -> Iterator[list[Example]]:
        parts = self.settings.optimizer_steps_per_batch
        for part in mini_batches([example.row for example in examples], parts, self.settings.seed, version):
            yield [examples[index] for index in part]

    def _step(self, examples: Sequence[Example], spent: float | None) -> dict[str, float]:
        """One optimizer step on the loss of a mini-batch."""
        names, figures = self._backward(examples)
        norms = torch.nn.utils.clip_grad_norm_(self._parameters, self.limit.value)
        *found, norm = torch.cat([figures, norms.double()[None]]).tolist()  # all that the host waits for in a step
        if not isfinite(norm):
            what = f"the gradient's norm is {norm} in optimizer step {self.steps + 1}: the training diverged"
            raise FloatingPointError(f"{what}; try a smaller learning rate")
        if any(each.row.advantage for each in examples):  # of a KL term alone it may be what rounding makes
            self.limit.saw(norm)
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * self.settings.schedule.share(self.steps, spent)
        self.optimizer.step()
        self._average.take(self.steps, len(examples))
        return {**dict(zip(names, found, strict=True)), "grad_norm": norm}

    def _backward(self, examples: Sequence[Example]) -> tuple[tuple[str, ...], Tensor]:
        """Add up the gradient of a mini-batch's loss; returns the loss, and means over the mini-batch's tokens, with names.

        Without a KL term, a row without advantage has no gradient: it counts in the means, but needs no forward pass.
        """
        lengths_B = torch.tensor([len(each.tokens) for each in examples])
        whole = denominator(lengths_B, self.settings.loss.aggregation)
        names = ("loss", "clip_fraction") + (() if self.reference is None else ("kl",))
        tokens = [int(lengths_B.sum())] * (len(names) - 1)
        counts = sent(np.array([1, *tokens], np.float64), self.policy.model.device)
        figures = self._begin_gradient(whole, counts)
        self._weigh(examples, whole)
        needed = [each for each in examples if self._has_gradient(each) and not each.early]
        for part in passes(needed, self.settings.tokens_per_forward):
            figures += self._add_up(part) / counts
            self.between()
        return names, figures

    def _begin_gradient(self, whole: int, counts: Tensor) -> Tensor:
        """The gradient and the figures of what was added up early, now divided by what the mini-batch says; else zeros."""
        sums, self._early.sums = self._early.sums, None
        if sums is None:
            self.optimizer.zero_grad(set_to_none=False)
            return torch.zeros_like(counts)
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad /= whole
        sums[0] /= whole
        return sums / counts

    def _weigh(self, examples: Sequence[Example], whole: int) -> None:
        """Say each row's share of a loss whose mini-batch has that denominator."""
        settings, lengths_B = self.settings, torch.tensor([len(each.tokens) for each in examples])
        of_rows = own_shares(lengths_B, settings.loss.aggregation, settings.sampling.max_new_tokens) / whole
        for example, share in zip(examples, of_rows.tolist(), strict=True):
            example.share = share

    def _has_gradient(self, example: Example) -> bool:
        return bool(example.row.advantage) or self.reference is not None

    def _add_up(self, examples: Sequence[Example]) -> Tensor:
        """Add up the gradient of some rows; returns their loss, and the sums over their tokens of what is reported."""
        loss, sums = self._loss(examples)
        loss.backward()
        return torch.stack([loss.detach().double(), *(of_tokens.double() for of_tokens in sums.values())])

    def _loss(self, examples: Sequence[Example]) -> tuple[Tensor, dict[str, Tensor]]:
        """What some rows add to their mini-batch's loss, and the sums over their tokens of what is reported."""
        loss = self.settings.loss
        with self._recomputing():
            logprobs_BT, mask_BT = self._logprobs(self.model, examples)
        for each, now_T in zip(examples, logprobs_BT.detach(), strict=True):
            if each.proximal_T is None:
                each.proximal_T = now_T[: len(each.tokens)]
        behaviour_BT = _beside([each.behaviour_T for each in examples], logprobs_BT)
        proximal_BT = _beside([each.proximal_T for each in examples if each.proximal_T is not None], logprobs_BT)
        columns = zip(*((each.row.advantage, each.row.weight, each.share) for each in examples), strict=True)
        advantages_B, weights_B, shares_B = sent(np.array(list(columns), np.float32), logprobs_BT.device)
        reference_BT = None
        if self.reference is not None:
            reference_BT = _beside([each.reference_T for each in examples if each.reference_T is not None], logprobs_BT)
        losses_BT = token_losses(logprobs_BT, proximal_BT, behaviour_BT, advantages_B, weights_B, loss, reference_BT)
        with torch.no_grad():
            ratio_BT = (logprobs_BT - proximal_BT).exp()
            outside_BT = (ratio_BT < 1 - loss.clip.low) | (ratio_BT > 1 + loss.clip.high)
            sums = {"clip_fraction": (outside_BT & mask_BT & (advantages_B != 0)[:, None]).sum()}
            if reference_BT is not None:
                sums["kl"] = (divergences(logprobs_BT, reference_BT) * mask_BT).sum()
        return (losses_BT * mask_BT).sum(dim=1) @ shares_B, sums

    def _judged(self, model: PreTrainedModel, examples: Sequence[Example]) -> Iterator[tuple[Example, Tensor]]:
        """Log-probabilities of each row under a model, without gradient; kept where the model is."""
        for part in passes(examples, self.settings.tokens_per_forward):
            found = self._passed(model, part)
            self.between()
            yield from found

    def _passed(self, model: PreTrainedModel, part: Sequence[Example]) -> list[tuple[Example, Tensor]]:
        """As `_judged`, of rows that share a pass."""
        with torch.no_grad():
            logprobs_BT, _ = self._logprobs(model, part)
        return [(each, l_T[: len(each.tokens)]) for each, l_T in zip(part, logprobs_BT, strict=True)]

    def _logprobs(self, model: PreTrainedModel, examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
        with computing(model, self.settings.precision, again=self.settings.gradient_checkpointing):
            return completion_logprobs(
                model,
                [each.prompt for each in examples],
                [each.tokens for each in examples],
                pad_id=self.policy.pad_id,
                temperature=self.settings.sampling.temperature,
                share=not self.settings.gradient_checkpointing,  # it needs a cache
            )

    def _recomputing(self) -> AbstractContextManager[None]:
        return recomputing(self.model) if self.settings.gradient_checkpointing else nullcontext()


def _measured(examples: Sequence[Example]) -> list[Example]:
    """The rows by which the way of the weights is measured."""
    return [each for each in examples if not each.row.replays][:MEASURED] or list(examples[:MEASURED])


def mini_batches(rows: Sequence[Row], parts: int, seed: int, version: int) -> Iterator[list[int]]:
    """Indices of a batch's rows, in as many parts as there are optimizer steps: by groups, or rows where these are few."""
    by_group: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        by_group.setdefault(row.group, []).append(index)
    units = list(by_group.values()) if len(by_group) >= parts else [[index] for index in range(len(rows))]
    if len(units) < parts:
        log.warning("%d rows cannot be split into %d optimizer steps; each row gets one", len(units), parts)
    order = rng(seed, "mini-batches", version).permutation(len(units))
    for part in np.array_split(order, min(parts, len(units))):
        yield [index for unit in part.tolist() for index in units[unit]]


def passes(examples: Iterable[Example], tokens_per_forward: int) -> Iterator[list[Example]]:
    """Rows that share a forward pass: of like length, and with padding no more than so many tokens, or a row alone."""
    part: list[Example] = []
    longest_prompt = 0
    for example in sorted(examples, key=lambda each: (len(each.tokens), len(each.prompt))):
        longest_prompt = max(longest_prompt, len(example.prompt))
        width = longest_prompt + len(example.tokens)
        if part and (len(part) + 1) * width > tokens_per_forward:
            yield part
            part, longest_prompt = [], len(example.prompt)
        part.append(example)
    if part:
        yield part


def _nothing() -> None:
    pass


def _beside(rows: Sequence[Tensor], like_BT: Tensor) -> Tensor:
    """A row's entries a row of a matrix, 0 beyond its end."""
    return pad_sequence(list(rows), batch_first=True).to(like_BT.dtype)
