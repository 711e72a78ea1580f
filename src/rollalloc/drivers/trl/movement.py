"""Measures how far the policy moves: in an update, by which some recipes discount records, and since rows were sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from accelerate.utils import broadcast_object_list
from numpy.typing import NDArray

from rollalloc.core.events import Batch
from rollalloc.drivers.trl.generation import Generator
from rollalloc.drivers.trl.rollout import Rollout
from rollalloc.models.likelihood import KL_ROWS
from rollalloc.models.settings import has_moved


class Movement:
    """Estimates the KL divergence between the policies before and after training on a batch, from a few of its rows.

        mean over tokens of k3 = exp(after - before) - (after - before) - 1

    `before` and `after` are log-probabilities of sampled tokens. rollalloc's own trainer uses the same estimate. The
    measurement takes one forward pass after training. If the sampled log-probabilities cannot be used as `before`, it takes
    a second pass before training.

    Args:
        generate: computes log-probabilities under the model.
    """

    def __init__(self, generate: Generator) -> None:
        self._generate = generate
        self._rollouts: list[Any] = []
        self._before: Sequence[NDArray[np.float32]] = ()

    def begin(self, batch: Batch, rollouts: Sequence[Any]) -> None:
        """Store the log-probabilities of a few of the batch's rows, before training on the batch."""
        fresh = [(row, rollout) for row, rollout in zip(batch.rows, rollouts, strict=True) if not row.replays][:KL_ROWS]
        self._rollouts = [rollout for _, rollout in fresh]
        known = self._generate.gives_the_policys and all(row.version == batch.version for row, _ in fresh)
        self._before = [each.made.logprobs for each in self._rollouts] if known else self._now()

    def end(self) -> float | None:
        """The estimate after training, in nats per token, equal in every process. None if `begin` was not called."""
        if not self._rollouts:
            return None
        sums = tokens = 0.0
        for rollout, before_T, after_T in zip(self._rollouts, self._before, self._now(), strict=True):
            drift_T = (after_T - before_T)[_own(rollout)].astype(np.float64)
            sums += float((np.expm1(drift_T) - drift_T).sum())
            tokens += drift_T.size
        self._rollouts, self._before = [], ()
        return _equal_everywhere(self._generate, sums / tokens if tokens else 0.0)

    def _now(self) -> list[NDArray[np.float32]]:
        with self._generate.trainer.averaged.sampling():
            return self._generate.logprobs([(each.prompt_tokens, each.made.tokens) for each in self._rollouts])


def moved_share(generate: Generator, rollouts: Sequence[Rollout]) -> float:
    """The share of these rollouts' tokens whose probability has changed since they were sampled (`has_moved`).

    The probabilities now are those under the weights that the next step changes. Tokens of tools' answers do not count.

    Args:
        generate: computes log-probabilities under the model.
        rollouts: at least one rollout; every process has all of them.
    """
    now = generate.logprobs([(each.prompt_tokens, each.made.tokens) for each in rollouts])
    moved = [has_moved((now_T - each.made.logprobs)[_own(each)]) for each, now_T in zip(rollouts, now, strict=True)]
    return _equal_everywhere(generate, float(np.concatenate(moved).mean()))


def _own(rollout: Rollout) -> slice | NDArray[np.bool_]:
    """Selects the model's own tokens from a rollout's."""
    return slice(None) if rollout.own is None else np.array(rollout.own)


def _equal_everywhere(generate: Generator, value: float) -> float:
    """The first process's value: processes may round differently, but their copies of the core must be told the same."""
    found = [value]
    if generate.trainer.accelerator.num_processes > 1:
        broadcast_object_list(found)
    return found[0]
