"""Trains on a batch at a service."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from secrets import token_hex
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rollalloc.core.events import Batch, Row
from rollalloc.drivers.tinker.costs import Usage
from rollalloc.drivers.tinker.service import Service
from rollalloc.drivers.tinker.trajectories import Piece, Trajectory
from rollalloc.models.checkpoint import PAYLOADS, Checkpoint
from rollalloc.models.weights import check_figures
from rollalloc.train.config import Config
from rollalloc.train.update import mini_batches, shares

Sequence = tuple[tuple[int, ...], dict[str, list[Any]]]  # input token ids; targets, log-probabilities and advantages


class RemoteUpdater:
    """Trains on batches at a service.

    The service's losses are sums over tokens. With "importance_sampling", the loss of a token is −ρ·A, where ρ is the ratio
    of the token's probabilities under the trained weights and under the sampling weights. To get a mean over
    the batch, the advantage is multiplied by the row's weight and by the row's share of the loss:

        A_t = advantage · weight · share,    share: see `rollalloc.train.update.shares`

    The mean includes rows with advantage 0. Such rows have no gradient, so they are not sent to the service and not billed.

    Args:
        service: the service that trains.
        config: configuration of the run.

    Attributes:
        steps: optimizer steps taken so far.
    """

    entries: ClassVar[tuple[str, ...]] = ("tinker",)
    files: ClassVar[tuple[str, ...]] = (PAYLOADS,)

    def __init__(self, service: Service, config: Config) -> None:
        self.service, self.config = service, config
        self.steps = 0

    def save(self, batches: int) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
        """See `Updates.save`. The service keeps the weights, and the checkpoint contains their path."""
        path = self.service.keep(f"batch-{batches}-{token_hex(4)}")
        return {"tinker": {"path": path, "cost": asdict(self.service.usage)}}, {}

    def load(self, saved: Checkpoint) -> None:
        """See `Updates.load`."""
        state = saved.state["tinker"]
        self.service.restore(state["path"])
        self.service.usage = Usage(**state["cost"])

    def moved(self, batch: Batch, generations: Mapping[int, Trajectory]) -> float:
        """Not supported: the trainer refuses a recipe with a gate before the run."""
        raise NotImplementedError("the service does not measure how far the policy has moved from replayed rows")

    def update(
        self,
        batch: Batch,
        generations: Mapping[int, Trajectory],
        *,
        spent: float | None = None,
        measure_kl: bool = False,
        between_passes: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """Take the configured number of optimizer steps. A mini-batch without a gradient is skipped.

        Returns:
            Means over the steps. `sampler_kl` is the KL divergence from the sampling weights to the trained weights, in nats
            per token. The service's own metrics are `loss_sum`, `grad_norm` and all metrics under `tinker/`. The result
            also has `steps_in_batch` and `learning_rate`.

        Raises:
            ServiceFailed: the service failed.
            Diverged: a metric is not finite.
        """
        metrics: list[dict[str, float]] = []
        config = self.config

        def rate(step: int) -> float:
            return config.learning_rate * config.schedule.share(max(1, step), spent)

        for part in mini_batches(batch.rows, config.optimizer_steps_per_batch, config.seed, batch.version):
            rows = [batch.rows[index] for index in part]
            data = self._data(rows, generations)
            if data:
                metrics.append(self._step(data, rate(self.steps + 1)))
        names = dict.fromkeys(name for step in metrics for name in step)
        means = {name: float(np.mean([step[name] for step in metrics if name in step])) for name in names}
        return {**means, "steps_in_batch": len(metrics), "learning_rate": rate(self.steps)}

    def _data(self, rows: list[Row], generations: Mapping[int, Trajectory]) -> list[Sequence]:
        config = self.config
        trajectories = [generations[row.rollout] for row in rows]
        lengths_B = torch.tensor([max(1, trajectory.length) for trajectory in trajectories])
        shares_B = shares(lengths_B, config.loss.aggregation, config.sampling.max_new_tokens).tolist()
        return [
            sequence(piece, row.advantage * row.weight * share)
            for row, trajectory, share in zip(rows, trajectories, shares_B, strict=True)
            for piece in trajectory.pieces
            if row.advantage * row.weight and piece.sampled.any()
        ]

    def _step(self, data: list[Sequence], rate: float) -> dict[str, float]:
        config, clip = self.config, self.config.loss.clip
        self.steps += 1
        adam = {
            "learning_rate": rate,
            "beta1": config.betas[0],
            "beta2": config.betas[1],
            "weight_decay": config.weight_decay,
            "grad_clip_norm": config.max_grad_norm,
        }
        clips = self.service.remote.loss != "importance_sampling"
        thresholds = {"clip_low_threshold": 1 - clip.low, "clip_high_threshold": 1 + clip.high} if clips else None
        logprobs, measured = self.service.step(data, adam, thresholds)
        distance = _distance(data, logprobs)
        # The service takes the step together with the backward pass, before we know the figures.
        check_figures(measured | distance, self.steps, "the service took the step, but its weights are not saved")
        return {_renamed(name): value for name, value in measured.items()} | distance


def sequence(piece: Piece, advantage: float) -> Sequence:
    """A piece in the service's format: the input is all tokens except the last, the targets are all except the first.

    Args:
        piece: a piece whose first token was read, not sampled.
        advantage: advantage of each sampled token. Tokens that were read get 0, so they have no gradient.
    """
    next_T = piece.sampled[1:]
    return piece.tokens[:-1], {
        "target_tokens": list(piece.tokens[1:]),
        "logprobs": np.nan_to_num(piece.logprobs[1:]).tolist(),
        "advantages": [advantage if sampled else 0.0 for sampled in next_T.tolist()],
    }


def _distance(data: list[Sequence], logprobs: list[Any]) -> dict[str, float]:
    """Estimate the KL divergence from the sampling weights to the trained weights, over sampled tokens.

    mean of exp(d) − d − 1,    d = trained log-probability − sampling log-probability
    """
    total = tokens = 0.0
    if len(logprobs) != len(data):
        return {}
    for (_, inputs), trained_T in zip(data, logprobs, strict=True):
        if trained_T is None or len(trained_T) != len(inputs["logprobs"]):
            return {}
        taken_T = np.asarray(inputs["advantages"]) != 0
        d_T = (np.asarray(trained_T, np.float64) - np.asarray(inputs["logprobs"], np.float64))[taken_T]
        with np.errstate(over="ignore", invalid="ignore"):  # the caller raises an error if the value is not finite
            total, tokens = total + float((np.expm1(d_T) - d_T).sum()), tokens + taken_T.sum()
    return {"sampler_kl": total / tokens} if tokens else {}


def _renamed(name: str) -> str:
    """The name under which our metrics show a metric of the service."""
    last = name.rsplit("/", 1)[-1]
    known = {"grad_norm": "grad_norm", "grad_norm:mean": "grad_norm", "loss:sum": "loss_sum"}
    return known.get(last, f"tinker/{last}")
