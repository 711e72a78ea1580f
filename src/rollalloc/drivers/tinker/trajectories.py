"""The token sequences of a rollout, some tokens read and some sampled, and their form in a checkpoint."""

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
        tokens: ids of the tokens that were read and sampled, in order; the first was read.
        logprobs: float32; the log-probability of each sampled token, NaN for the others.
    """

    tokens: tuple[int, ...]
    logprobs: NDArray[np.float32]

    @property
    def sampled(self) -> NDArray[np.bool_]:
        """For each token, whether it was sampled."""
        return ~np.isnan(self.logprobs)

    def then(self, tokens: Sequence[int], logprobs: Sequence[float] | None = None) -> Piece:
        """This piece followed by more tokens: sampled if `logprobs` is given, else read."""
        added_T = np.full(len(tokens), np.nan) if logprobs is None else np.asarray(logprobs)
        return Piece((*self.tokens, *tokens), np.concatenate([self.logprobs, added_T]).astype(np.float32))


NOTHING = Piece((), np.zeros(0, np.float32))


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


def pack(trajectories: Sequence[Trajectory]) -> tuple[list[list[int]], dict[str, Tensor]]:
    """Each piece as `pack_generations` packs a rollout."""
    return pack_generations(
        [
            Generation(trajectory.rollout, piece.tokens, piece.logprobs, trajectory.truncated)
            for trajectory in trajectories
            for piece in trajectory.pieces
        ]
    )


def unpack(described: Sequence[Sequence[int]], tensors: Mapping[str, Tensor]) -> list[Trajectory]:
    """The inverse of `pack`, for trajectories with at least one piece. Every scored trajectory has one."""
    pieces: dict[int, list[Piece]] = {}
    truncated: dict[int, bool] = {}
    for packed in unpack_generations(described, tensors):
        pieces.setdefault(packed.rollout, []).append(Piece(packed.tokens, packed.logprobs))
        truncated[packed.rollout] = packed.truncated
    return [Trajectory(rollout, tuple(its_pieces), truncated[rollout]) for rollout, its_pieces in pieces.items()]
