"""The token sequences of a rollout, some tokens read and some sampled, and their form in a checkpoint."""

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

SHAPE = [(int, bool, [int])]  # of the first result of `pack`
_COLUMNS = {"tokens": torch.int64, "logprobs": torch.float32, "sampled": torch.bool}


@dataclass(frozen=True, slots=True)
class Piece:
    """A sequence for one forward pass.

    Attributes:
        tokens: ids of the tokens that were read and sampled, in order; the first was read.
        logprobs: float32; the log-probability of each sampled token, 0 for the others.
        sampled: for each token, whether it was sampled.
    """

    tokens: tuple[int, ...]
    logprobs: NDArray[np.float32]
    sampled: NDArray[np.bool_]

    def then(self, tokens: Sequence[int], logprobs: Sequence[float] | None = None) -> Piece:
        """This piece followed by more tokens: sampled if `logprobs` is given, else read."""
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
    """The tokens of a rollout; a new piece starts at each observation that does not extend the tokens before it."""

    rollout: int
    pieces: tuple[Piece, ...]
    truncated: bool

    @property
    def length(self) -> int:
        """Number of sampled tokens."""
        return sum(int(piece.sampled.sum()) for piece in self.pieces)

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """Log-probabilities of the sampled tokens, turn by turn."""
        return np.concatenate([np.zeros(0, np.float32), *(piece.logprobs[piece.sampled] for piece in self.pieces)])

    def generation(self) -> Generation:
        """The sampled tokens, turn by turn, in the form that evaluations expect."""
        tokens = tuple(
            t for piece in self.pieces for t, sampled in zip(piece.tokens, piece.sampled, strict=True) if sampled
        )
        return Generation(self.rollout, tokens, self.logprobs, self.truncated)


def pack(trajectories: Sequence[Trajectory]) -> tuple[list[Any], dict[str, Tensor]]:
    """For each trajectory [rollout, truncated, lengths of its pieces]; and one tensor per column, over all pieces."""
    described = [
        [trajectory.rollout, trajectory.truncated, [len(piece.tokens) for piece in trajectory.pieces]]
        for trajectory in trajectories
    ]
    pieces = [piece for trajectory in trajectories for piece in trajectory.pieces]
    columns = {name: [np.asarray(getattr(piece, name)) for piece in pieces] for name in _COLUMNS}
    return described, {
        name: torch.tensor(np.concatenate(columns[name]) if pieces else [], dtype=dtype)
        for name, dtype in _COLUMNS.items()
    }


def unpack(described: Any, tensors: Mapping[str, Tensor], where: str) -> list[Trajectory]:
    """The inverse of `pack`.

    Raises:
        ValueError: the description and the tensors do not fit each other; the message begins with `where`.
    """
    check_shape(described, SHAPE, where)
    total = sum(length for _, _, lengths in described for length in lengths)
    held = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    if held != {name: ((total,), dtype) for name, dtype in _COLUMNS.items()}:
        raise ValueError(
            f"{where}: expected {list(_COLUMNS)} of {total} entries, got {held}; the checkpoint was changed"
        )
    tokens, logprobs, sampled = (tensors[name].numpy() for name in _COLUMNS)
    start, trajectories = 0, []
    for rollout, truncated, lengths in described:
        pieces = []
        for length in lengths:
            span = slice(start, start + length)
            pieces.append(Piece(tuple(tokens[span].tolist()), logprobs[span].copy(), sampled[span].copy()))
            start += length
        trajectories.append(Trajectory(rollout, tuple(pieces), truncated))
    return trajectories
