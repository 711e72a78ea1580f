"""Rollouts as plain data and tensors, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rollalloc.generate.sampler import Generation


def pack_generations(generations: Sequence[Generation]) -> tuple[list[list[int]], dict[str, Tensor]]:
    """Rollouts as [id, tokens, truncated] each, and their tokens and log-probabilities one after the other."""
    described = [[made.rollout, len(made.tokens), int(made.truncated)] for made in generations]
    tokens = [token for made in generations for token in made.tokens]
    logprobs = np.concatenate([np.zeros(0, np.float32), *(made.logprobs for made in generations)])
    return described, {"tokens": torch.tensor(tokens, dtype=torch.int64), "logprobs": torch.from_numpy(logprobs)}


def unpack_generations(described: Sequence[Sequence[int]], tensors: Mapping[str, Tensor]) -> list[Generation]:
    """The inverse of `pack_generations`."""
    tokens, logprobs, start = tensors["tokens"].tolist(), tensors["logprobs"].numpy(), 0
    generations: list[Generation] = []
    for rollout, length, truncated in described:
        here = slice(start, start + length)
        generations.append(Generation(rollout, tuple(tokens[here]), logprobs[here].copy(), bool(truncated)))
        start += length
    return generations
