"""The same number of optimizer steps per batch for every recipe, whatever the size of its groups."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm


def optimizer_steps(configured: int, rows: int) -> int:
    """Optimizer steps to take on a batch: those configured, or one a row where there are fewer rows."""
    return max(1, min(configured, rows))


def rows_multiple(ranks: int, steps: Sequence[int], train_micro: int | None, infer_micro: int | None) -> int:
    """The number of rows must be a multiple of this, so that ranks, mini-batches and micro-batches are of equal size.

    Args:
        ranks: data-parallel ranks.
        steps: optimizer steps of each network that trains on the batch.
        train_micro: rows of a training micro-batch on a rank; None: sized by tokens.
        infer_micro: rows of a micro-batch without gradients; None: sized by tokens.
    """
    return ranks * lcm(*(count * (train_micro or 1) for count in steps), infer_micro or 1)


def spread(padding_B: Sequence[bool], ranks: int, steps: int) -> list[int]:
    """An order of the rows in which padding is shared out evenly among the mini-batches.

    Rank r holds rows [r·B/R, (r+1)·B/R) and its mini-batch j the j-th part of those; rows stay on their rank. So no
    mini-batch consists of padding alone as long as there are as many other rows as steps.

    Args:
        padding_B: whether each row is padding, shape (B,), B a multiple of ranks · steps.
        ranks: data-parallel ranks R.
        steps: mini-batches.
    """
    share = len(padding_B) // ranks
    order: list[int] = []
    turn = 0  # goes on from rank to rank, or the first mini-batches would get the odd rows of every rank
    for rank in range(ranks):
        rows = range(rank * share, (rank + 1) * share)
        parts: list[list[int]] = [[] for _ in range(steps)]
        for row in (row for row in rows if padding_B[row]):
            parts[turn % steps].append(row)
            turn += 1
        real = iter([row for row in rows if not padding_B[row]])
        for part in parts:
            order += [next(real) for _ in range(share // steps - len(part))] + part
    return order
