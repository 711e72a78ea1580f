"""The token sequences of a rollout, made of tokens that the model read and tokens that were sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rollalloc.generate.sampler import Generation, pack_generations, unpack_generations


@dataclass(frozen=True, slots=True)
class Piece:
    """A sequence for one forward pass.

    Attributes:
        tokens: token ids. Each token was either read or sampled. The first token was read.
        logprobs: the log-probability of each sampled token, and NaN for each token that was read.
    """

    tokens: tuple[int, ...]
    logprobs: NDArray[np.float32]

    @property
    def sampled(self) -> NDArray[np.bool_]:
        """For each token, whether it was sampled."""
        return ~np.isnan(self.logprobs)

    def then(self, tokens: Sequence[int], logprobs: Sequence[float] | None = None) -> Piece:
        """This piece with more tokens at its end: sampled tokens if `logprobs` is given, otherwise tokens that were read."""
        added_T = np.full(len(tokens), np.nan) if logprobs is None else np.asarray(logprobs)
        return Piece((*self.tokens, *tokens), np.concatenate([self.logprobs, added_T]).astype(np.float32))


NOTHING = Piece((), np.zeros(0, np.float32))


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The tokens of a rollout. An observation that does not continue the previous tokens begins a new piece."""

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
        """The sampled tokens of all turns, in the form that evaluations use."""
        tokens = tuple(
            t for piece in self.pieces for t, sampled in zip(piece.tokens, piece.sampled, strict=True) if sampled
        )
        return Generation(self.rollout, tokens, self.logprobs, self.truncated)


def pack(trajectories: Sequence[Trajectory]) -> tuple[list[list[int]], dict[str, Tensor]]:
    """Pack all pieces with `pack_generations`, as if each piece were a rollout."""
    return pack_generations(
        [
            Generation(trajectory.rollout, piece.tokens, piece.logprobs, trajectory.truncated)
            for trajectory in trajectories
            for piece in trajectory.pieces
        ]
    )


def unpack(described: Sequence[Sequence[int]], tensors: Mapping[str, Tensor]) -> list[Trajectory]:
    """The inverse of `pack`. Trajectories without pieces are lost. Every scored trajectory has a piece."""
    pieces: dict[int, list[Piece]] = {}
    truncated: dict[int, bool] = {}
    for packed in unpack_generations(described, tensors):
        pieces.setdefault(packed.rollout, []).append(Piece(packed.tokens, packed.logprobs))
        truncated[packed.rollout] = packed.truncated
    return [Trajectory(rollout, tuple(its_pieces), truncated[rollout]) for rollout, its_pieces in pieces.items()]
