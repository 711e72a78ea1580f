"""Splits a batch into mini-batches, so that every recipe takes the configured number of optimizer steps per batch."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm


def optimizer_steps(configured: int, rows: int) -> int:
    """Optimizer steps for a batch: the configured number, but at most one per row."""
    return max(1, min(configured, rows))


def rows_multiple(ranks: int, steps: Sequence[int], train_micro: int | None, infer_micro: int | None) -> int:
    """The smallest m such that any multiple of m rows can be split evenly into ranks, mini-batches and micro-batches.

    Args:
        ranks: number of data-parallel ranks.
        steps: for each network that is trained on the batch, its number of optimizer steps.
        train_micro: number of rows of a training micro-batch on a rank. None: micro-batches are limited by tokens.
        infer_micro: number of rows of a micro-batch without gradients. None: micro-batches are limited by tokens.
    """
    return ranks * lcm(*(count * (train_micro or 1) for count in steps), infer_micro or 1)


def spread(padding_B: Sequence[bool], ranks: int, steps: int) -> list[int]:
    """An order of the rows in which padding is spread evenly over the mini-batches.

    Rank r holds the rows [r·B/R, (r+1)·B/R), and mini-batch j is the j-th part of each rank's rows. Rows do not change
    their rank. If there are at least as many real rows as steps, every mini-batch has a real row.

    Args:
        padding_B: whether each row is padding, shape (B,); B is a multiple of ranks · steps.
        ranks: number of data-parallel ranks R.
        steps: number of mini-batches.
    """
    share = len(padding_B) // ranks
    order: list[int] = []
    # `turn` continues from rank to rank. Otherwise the first mini-batches would get more padding rows than the others.
    turn = 0
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
