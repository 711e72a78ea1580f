"""The update: optimizer steps on a batch of rows."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rollalloc.core.events import Batch, Row
from rollalloc.core.seeds import rng
from rollalloc.engines.likelihood import completion_logprobs
from rollalloc.engines.loss import token_losses
from rollalloc.engines.policy import Policy
from rollalloc.engines.sampler import Generation

if TYPE_CHECKING:
    from rollalloc.engines.native import Settings

log = logging.getLogger(__name__)

Generations = Mapping[int, Generation]


class Updater:
    """Trains a policy on batches.

    Args:
        policy: the model; trained in place.
        prompts: token ids of each prompt.
        settings: of the trainer.

    Attributes:
        optimizer: AdamW.
        steps: taken so far.
    """

    def __init__(self, policy: Policy, prompts: Sequence[Sequence[int]], settings: Settings) -> None:
        self.policy, self.prompts, self.settings = policy, prompts, settings
        self.optimizer = torch.optim.AdamW(
            policy.model.parameters(),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
        )
        self.steps = 0

    def update(self, batch: Batch, generations: Generations) -> dict[str, Any]:
        """Take the configured number of optimizer steps.

        Args:
            batch: rows with advantages and weights.
            generations: by rollout, at least those of the batch.

        Returns:
            Means over the steps, their number, and the last one's learning rate.

        Raises:
            FloatingPointError: a gradient is not finite.
        """
        proximal = self._proximal(batch, generations)
        figures = [self._step(rows, generations, proximal) for rows in self._mini_batches(batch)]
        return {
            **{name: float(np.mean([step[name] for step in figures])) for name in figures[0]},
            "steps_in_batch": len(figures),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
        }

    def _mini_batches(self, batch: Batch) -> Iterator[list[Row]]:
        """The batch in as many parts as there are optimizer steps: by groups, or by rows where groups are too few."""
        parts = self.settings.optimizer_steps_per_batch
        by_group: dict[int, list[Row]] = {}
        for row in batch.rows:
            by_group.setdefault(row.group, []).append(row)
        units = list(by_group.values()) if len(by_group) >= parts else [[row] for row in batch.rows]
        if len(units) < parts:
            log.warning("%d rows cannot be split into %d optimizer steps; each row gets one", len(units), parts)
        order = rng(self.settings.seed, "mini-batches", batch.version).permutation(len(units))
        for part in np.array_split(order, min(parts, len(units))):
            yield [row for unit in part.tolist() for row in units[unit]]

    def _proximal(self, batch: Batch, generations: Generations) -> dict[int, Tensor]:
        """Log-probabilities of stale rows under the weights before the first step; fresh rows keep their sampler's."""
        stale = [row for row in batch.rows if row.version < batch.version and row.advantage]
        found: dict[int, Tensor] = {}
        with torch.no_grad():
            for rows in _chunks(stale, self.settings.rows_per_forward):
                logprobs_BT, mask_BT = self._logprobs(rows, generations)
                found |= {row.rollout: l_T[m_T] for row, l_T, m_T in zip(rows, logprobs_BT, mask_BT, strict=True)}
        return found

    def _step(self, rows: list[Row], generations: Generations, proximal: dict[int, Tensor]) -> dict[str, float]:
        """One optimizer step on the mean loss over the tokens of a mini-batch.

        A row without advantage has no gradient: its tokens count in the mean, but it needs no forward pass.
        """
        tokens = sum(len(generations[row.rollout].tokens) for row in rows)
        self.optimizer.zero_grad(set_to_none=False)
        loss_sum, clipped = 0.0, 0
        for chunk in _chunks([row for row in rows if row.advantage], self.settings.rows_per_forward):
            loss, outside = self._loss(chunk, generations, proximal)
            (loss / tokens).backward()
            loss_sum += loss.item()
            clipped += outside
        parameters = list(self.policy.model.parameters())
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.settings.max_grad_norm))
        if not isfinite(norm):
            raise FloatingPointError(
                f"the gradient's norm is {norm} in optimizer step {self.steps + 1}: the training diverged; "
                "try a smaller learning rate"
            )
        self._warm_up()
        self.optimizer.step()
        self.steps += 1
        return {"loss": loss_sum / tokens, "grad_norm": norm, "clip_fraction": clipped / tokens}

    def _loss(self, rows: list[Row], generations: Generations, proximal: dict[int, Tensor]) -> tuple[Tensor, int]:
        """Summed loss of some rows, and how many of their tokens are outside the clip range."""
        logprobs_BT, mask_BT = self._logprobs(rows, generations)
        behaviour_BT, proximal_BT = torch.zeros_like(logprobs_BT), torch.zeros_like(logprobs_BT)
        for at, row in enumerate(rows):
            sampled_T = torch.from_numpy(generations[row.rollout].logprobs).to(logprobs_BT)
            behaviour_BT[at, : len(sampled_T)] = sampled_T
            proximal_BT[at, : len(sampled_T)] = proximal.get(row.rollout, sampled_T)
        column = [
            torch.tensor([getattr(row, name) for row in rows]).to(logprobs_BT) for name in ("advantage", "weight")
        ]
        clip = self.settings.clip
        losses_BT = token_losses(logprobs_BT, proximal_BT, behaviour_BT, column[0], column[1], clip)
        ratio_BT = (logprobs_BT.detach() - proximal_BT).exp()
        outside_BT = (ratio_BT < 1 - clip.low) | (ratio_BT > 1 + clip.high)
        return (losses_BT * mask_BT).sum(), int((outside_BT & mask_BT).sum())

    def _logprobs(self, rows: Sequence[Row], generations: Generations) -> tuple[Tensor, Tensor]:
        return completion_logprobs(
            self.policy.model,
            [self.prompts[row.prompt] for row in rows],
            [generations[row.rollout].tokens for row in rows],
            pad_id=self.policy.pad_id,
            temperature=self.settings.sampling.temperature,
        )

    def _warm_up(self) -> None:
        share = min(1.0, (self.steps + 1) / max(1, self.settings.warmup_steps))
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * share


def _chunks(rows: Sequence[Row], size: int) -> Iterator[list[Row]]:
    for start in range(0, len(rows), size):
        yield list(rows[start : start + size])
