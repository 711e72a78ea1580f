"""What is trained on: sequences of tokens of which some were sampled, and how a checkpoint holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollalloc.files.json_shape import check_shape
from rollalloc.generate.sampler import Generation

SHAPE = [(int, bool, [int])]  # of what `pack` describes
_COLUMNS = {"tokens": torch.int64, "logprobs": torch.float32, "sampled": torch.bool}


@dataclass(frozen=True, slots=True)
class Piece:
    """A sequence that one forward pass trains on.

    Attributes:
        tokens: ids, what was read and what was sampled, in their order; the first was read.
        logprobs: float32, of each token where it was sampled, else 0.
        sampled: whether each was.
    """

    tokens: tuple[int, ...]
    logprobs: NDArray[np.float32]
    sampled: NDArray[np.bool_]

    def then(self, tokens: Sequence[int], logprobs: Sequence[float] | None = None) -> Piece:
        """With tokens behind it, which were read, or sampled with these log-probabilities."""
        added_T = np.zeros(len(tokens), np.float32) if logprobs is None else np.asarray(logprobs, np.float32)
        flags_T = np.full(len(tokens), logprobs is not None)
        return Piece(
            (*self.tokens, *tokens),
            np.concatenate([self.logprobs, added_T]),
            np.concatenate([self.sampled, flags_T]),
        )


NOTHING = Piece((), np.zeros(0, np.float32), np.zeros(0, np.bool_))


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A rollout's payload: more than one piece where what was read does not go on from what came before."""

    rollout: int
    pieces: tuple[Piece, ...]
    truncated: bool

    @property
    def length(self) -> int:
        """Sampled tokens."""
        return sum(int(piece.sampled.sum()) for piece in self.pieces)

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """Of the sampled tokens, turn after turn."""
        return np.concatenate([np.zeros(0, np.float32), *(piece.logprobs[piece.sampled] for piece in self.pieces)])

    def generation(self) -> Generation:
        """What was sampled, turn after turn, as evaluations take it."""
        tokens = tuple(
            t for piece in self.pieces for t, sampled in zip(piece.tokens, piece.sampled, strict=True) if sampled
        )
        return Generation(self.rollout, tokens, self.logprobs, self.truncated)


def pack(trajectories: Sequence[Trajectory]) -> tuple[list[Any], dict[str, Tensor]]:
    """Trajectories as [rollout, truncated, length of each piece], and their columns one after the other."""
    described = [[each.rollout, each.truncated, [len(piece.tokens) for piece in each.pieces]] for each in trajectories]
    pieces = [piece for each in trajectories for piece in each.pieces]
    columns = {name: [np.asarray(getattr(piece, name)) for piece in pieces] for name in _COLUMNS}
    return described, {
        name: torch.tensor(np.concatenate(columns[name]) if pieces else [], dtype=dtype)
        for name, dtype in _COLUMNS.items()
    }


def unpack(described: Any, tensors: Mapping[str, Tensor], where: str) -> list[Trajectory]:
    """The inverse of `pack`.

    Raises:
        ValueError: one does not fit the other; begins with `where`.
    """
    check_shape(described, SHAPE, where)
    total = sum(length for _, _, lengths in described for length in lengths)
    held = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    if held != {name: ((total,), dtype) for name, dtype in _COLUMNS.items()}:
        raise ValueError(
            f"{where}: expected {list(_COLUMNS)} of {total} entries, got {held}; the checkpoint was changed"
        )
    tokens, logprobs, sampled = (tensors[name].numpy() for name in _COLUMNS)
    at, trajectories = 0, []
    for rollout, truncated, lengths in described:
        pieces = []
        for length in lengths:
            here = slice(at, at + length)
            pieces.append(Piece(tuple(tokens[here].tolist()), logprobs[here].copy(), sampled[here].copy()))
            at += length
        trajectories.append(Trajectory(rollout, tuple(pieces), truncated))
    return trajectories
