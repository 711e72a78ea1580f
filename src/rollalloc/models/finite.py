"""Checks that losses, gradients and weights are finite, before a trainer steps on them, averages them or saves them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import isfinite

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from rollalloc.core.events import Batch

_NAMED = 5  # an error names at most this many prompts
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # quantized weights are stored in other formats


class Diverged(FloatingPointError):
    """A loss, a gradient or a weight is NaN or infinite, so the run cannot go on."""


def check_figures(figures: Mapping[str, float], step: int, consequence: str) -> None:
    """Raise an error if the loss or another figure of an optimizer step is not finite.

    Args:
        figures: the figures by name, for example "the loss".
        step: number of the optimizer step; the first step has the number 1.
        consequence: what became of the step, for the message.

    Raises:
        Diverged: a figure is NaN or infinite.
    """
    if wrong := [f"{name} is {value:g}" for name, value in figures.items() if not isfinite(value)]:
        raise Diverged(f"{' and '.join(wrong)} in optimizer step {step}: the training diverged, and {consequence}")


def check_tensors(named: Iterable[tuple[str, Tensor]], when: str, norm: float | None = None) -> None:
    """Raise an error if a weight is not finite. Waits for the device once, or not at all where a finite norm is given.

    Args:
        named: tensors by name.
        when: the moment, for the message, for example "after optimizer step 3".
        norm: `norm_of` the tensors, if it is known.

    Raises:
        Diverged: an entry is NaN or infinite. The message names the first such tensor.
    """
    if norm is not None and isfinite(norm):
        return
    if (name := first_not_finite(named)) is not None:
        raise Diverged(f"weights are not finite {when}: the first of them is {name}")


def first_not_finite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first tensor with an entry that is NaN or infinite; None if there is none. Not all dtypes are read."""
    read = _read(named)
    # The norm is infinite for huge finite entries, too, so what it finds is read again.
    if norm_of(read).isfinite():
        return None
    return next((name for name, tensor in read if not tensor.isfinite().all()), None)


def norm_of(named: Iterable[tuple[str, Tensor]]) -> Tensor:
    """The norm over all entries that are read, on their device. It is not finite if one entry is NaN or infinite."""
    return get_total_norm([tensor for _, tensor in _read(named)])


def _read(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return [(name, tensor) for name, tensor in named if tensor.dtype in _FLOATS and tensor.numel()]


def in_batch(error: Diverged, batch: Batch, name_of: Callable[[int], str], saved: str) -> Diverged:
    """The error with the batch, its prompts and the last checkpoint in its message.

    Args:
        error: what is not finite.
        batch: the batch that the trainer was training on.
        name_of: returns the name of a prompt, given its index.
        saved: a sentence without a period that says where the last good checkpoint is.
    """
    prompts = list(dict.fromkeys(row.prompt for row in batch.rows))
    names = ", ".join(name_of(prompt) for prompt in prompts[:_NAMED])
    more = f" and {len(prompts) - _NAMED} more" if len(prompts) > _NAMED else ""
    return Diverged(
        f"{error}. It was batch {batch.version + 1}, with the prompts {names}{more}. {saved[:1].upper()}{saved[1:]}. Look "
        "at the rollouts and rewards of this batch, and try a smaller learning rate"
    )
