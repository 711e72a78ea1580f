"""One batch as optimizer steps of the service: its rows as sequences, with the share of the loss that each has."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from math import isfinite
from typing import Any

import numpy as np
import torch

from rollalloc.core.events import Batch, Row
from rollalloc.drivers.tinker.service import Service
from rollalloc.drivers.tinker.trajectories import Piece, Trajectory
from rollalloc.train.loss import shares
from rollalloc.train.settings import Settings
from rollalloc.train.update import mini_batches

log = logging.getLogger(__name__)


class RemoteUpdater:
    """Trains on batches at a service.

    The service's losses are sums over tokens, of −ρ·A where the loss is "importance_sampling" and ρ the ratio to the
    log-probability with which a token was sampled. What a row is to weigh is folded into its advantage:

        A_t = advantage · weight · share,    share as in `rollalloc.train.loss.shares`

    so that the gradient is that of a mean, whatever the sizes of groups. A row of advantage 0 has no gradient: it counts
    in the means, is not sent, and not billed.

    Args:
        service: trains.
        settings: of the trainer.

    Attributes:
        steps: taken so far.
    """

    def __init__(self, service: Service, settings: Settings) -> None:
        self.service, self.settings = service, settings
        self.steps = 0

    def update(
        self,
        batch: Batch,
        generations: Mapping[int, Trajectory],
        *,
        spent: float | None = None,
        measure_kl: bool = False,
    ) -> dict[str, Any]:
        """Take the configured number of optimizer steps; fewer where a part has no gradient.

        Returns:
            `loss_sum` of the service where it says so, `sampler_kl`, how far the weights that are trained were from those
            that sampled, in nats per token, other figures of the service under `tinker/`, and what every trainer says.

        Raises:
            ServiceFailed: the service failed.
            FloatingPointError: what it measured is not finite.
        """
        figures: list[dict[str, float]] = []
        settings = self.settings

        def rate(step: int) -> float:
            return settings.learning_rate * settings.schedule.share(max(1, step), spent)

        for part in mini_batches(batch.rows, settings.optimizer_steps_per_batch, settings.seed, batch.version):
            rows = [batch.rows[index] for index in part]
            data = self._data(rows, generations)
            if data:
                figures.append(self._step(data, rate(self.steps + 1)))
        names = dict.fromkeys(name for step in figures for name in step)
        means = {name: float(np.mean([step[name] for step in figures if name in step])) for name in names}
        return {**means, "steps_in_batch": len(figures), "learning_rate": rate(self.steps)}

    def _data(
        self, rows: list[Row], generations: Mapping[int, Trajectory]
    ) -> list[tuple[tuple[int, ...], dict[str, list[Any]]]]:
        settings = self.settings
        made = [generations[row.rollout] for row in rows]
        lengths_B = torch.tensor([max(1, each.length) for each in made])
        shares_B = shares(lengths_B, settings.loss.aggregation, settings.sampling.max_new_tokens).tolist()
        return [
            sequence(piece, row.advantage * row.weight * share)
            for row, each, share in zip(rows, made, shares_B, strict=True)
            for piece in each.pieces
            if row.advantage * row.weight and piece.sampled.any()
        ]

    def _step(self, data: list[tuple[tuple[int, ...], dict[str, list[Any]]]], rate: float) -> dict[str, float]:
        settings, clip = self.settings, self.settings.loss.clip
        self.steps += 1
        adam = {
            "learning_rate": rate,
            "beta1": settings.betas[0],
            "beta2": settings.betas[1],
            "weight_decay": settings.weight_decay,
            "grad_clip_norm": settings.max_grad_norm,
        }
        clips = self.service.remote.loss != "importance_sampling"
        thresholds = {"clip_low_threshold": 1 - clip.low, "clip_high_threshold": 1 + clip.high} if clips else None
        logprobs, measured = self.service.step(data, adam, thresholds)
        distance = _distance(data, logprobs)
        for name, value in (measured | distance).items():
            if not isfinite(value):
                raise FloatingPointError(
                    f"{name} is {value} in optimizer step {self.steps}: the training diverged; try a smaller learning rate"
                )
        return {_renamed(name): value for name, value in measured.items()} | distance


def sequence(piece: Piece, advantage: float) -> tuple[tuple[int, ...], dict[str, list[Any]]]:
    """A piece as the service takes it: all but its last token, and for each the next one, sampled or only read.

    Args:
        piece: its first token was read.
        advantage: of each sampled token, 0 for the others: these have no gradient.
    """
    next_T = piece.sampled[1:]
    return piece.tokens[:-1], {
        "target_tokens": list(piece.tokens[1:]),
        "logprobs": [float(value) for value in piece.logprobs[1:]],
        "advantages": [advantage if sampled else 0.0 for sampled in next_T.tolist()],
    }


def _distance(data: list[tuple[tuple[int, ...], dict[str, list[Any]]]], logprobs: list[Any]) -> dict[str, float]:
    """How far what is trained is from what sampled: of sampled tokens the mean of exp(d) − d − 1, d = trained − sampled."""
    total = tokens = 0.0
    if len(logprobs) != len(data):
        return {}
    for (_, inputs), trained_T in zip(data, logprobs, strict=True):
        if trained_T is None or len(trained_T) != len(inputs["logprobs"]):
            return {}
        taken_T = np.asarray(inputs["advantages"]) != 0
        d_T = (np.asarray(trained_T, np.float64) - np.asarray(inputs["logprobs"], np.float64))[taken_T]
        with np.errstate(over="ignore", invalid="ignore"):  # whoever asks refuses what is not finite
            total, tokens = total + float((np.expm1(d_T) - d_T).sum()), tokens + taken_T.sum()
    return {"sampler_kl": total / tokens} if tokens else {}


def _renamed(name: str) -> str:
    """The service's figures by our names where we have one."""
    last = name.rsplit("/", 1)[-1]
    known = {"grad_norm": "grad_norm", "grad_norm:mean": "grad_norm", "loss:sum": "loss_sum"}
    return known.get(last, f"tinker/{last}")
