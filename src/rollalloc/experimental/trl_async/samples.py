"""A batch of the recipe as what TRL's trainer takes from its queue."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from rollalloc.core.events import Batch, Row
from rollalloc.drivers.trl.allocation import Rollout
from rollalloc.drivers.trl.rewards import RewardFunctions

FILLER = -1  # the group of rows that only fill up a short batch


def samples_of(
    batch: Batch,
    rollouts: Sequence[Rollout],
    rewards: RewardFunctions,
    *,
    steps: tuple[int, int],
    offset: int,
    end_id: int,
) -> list[RolloutSample]:
    """The rows of a batch, in its order; a short batch is filled up with rows that teach nothing.

    A row's weight has no place of its own in a sample and multiplies its advantage. Fillers are spread over the
    micro-batches, each of which TRL's loss takes the mean of; where a micro-batch has a real row, they add nothing to it,
    not even to the number of its tokens.

    Args:
        batch: of the recipe.
        rollouts: one a row.
        rewards: names what they were scored by.
        steps: micro-batches of an optimizer step, and rows of each.
        offset: what TRL's version of the weights is ahead of the core's.
        end_id: a token, for fillers.

    Raises:
        ValueError: more rows than the trainer's step has.
    """
    count, size = steps
    if len(batch.rows) > count * size:
        raise ValueError(
            f"the recipe made a batch of {len(batch.rows)} rows, and an optimizer step has {count} × {size}; raise "
            "gradient_accumulation_steps or per_device_train_batch_size, or change the recipe"
        )
    now = time.time()
    made = [_sample(row, rollout, rewards, offset, now) for row, rollout in zip(batch.rows, rollouts, strict=True)]
    bounds = np.linspace(0, len(made), count + 1).round().astype(int).tolist()
    found: list[RolloutSample] = []
    for first, end in pairwise(bounds):
        alone = first == end  # a micro-batch without a single token to learn from fails in TRL's loss
        found += made[first:end]
        fillers = range(size - (end - first))
        found += [_filler(end_id, batch.version + offset, trained=alone and not at, now=now) for at in fillers]
    return found


def _sample(row: Row, rollout: Rollout, rewards: RewardFunctions, offset: int, now: float) -> RolloutSample:
    prompt, completion = rollout.prompt_tokens, rollout.made.tokens
    said, answered = rollout.said
    scores = {f"rewards/{name}": score for name, score in zip(rewards.names, rollout.scores_F, strict=True)}
    reward = rewards.reward(rollout.scores_F)
    return RolloutSample(
        prompt=_messages(said, "user"),
        completion=_messages(answered, "assistant"),
        input_ids=np.array([*prompt, *completion], np.int64),
        completion_mask=np.repeat(np.array([0, 1], np.int64), [len(prompt), len(completion)]),
        old_log_probs=np.concatenate([np.zeros(len(prompt), np.float32), rollout.made.logprobs]),
        advantage=row.advantage * row.weight,
        model_version=row.version + offset,
        group_id=row.group,
        metrics={name: score for name, score in {"trained/reward": reward, **scores}.items() if score is not None},
        enqueued_at=now,
    )


def _filler(end_id: int, version: int, *, trained: bool, now: float) -> RolloutSample:
    return RolloutSample(
        prompt=[],
        completion=[],
        input_ids=np.array([end_id, end_id], np.int64),
        completion_mask=np.array([0, int(trained)], np.int64),
        old_log_probs=np.zeros(2, np.float32),
        advantage=0.0,
        model_version=version,
        group_id=FILLER,
        metrics={},
        enqueued_at=now,
    )


def _messages(said: Any, role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": said}] if isinstance(said, str) else list(said)
