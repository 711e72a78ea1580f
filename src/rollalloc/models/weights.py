"""A model's trained weights: by name, to save, send and load; their running mean; and whether they are finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from math import isfinite

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from transformers import PreTrainedModel

from rollalloc.core.events import Batch
from rollalloc.core.packing import exact_keys


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Trained parameters and persistent buffers by name. A tied parameter occurs only once."""
    saved = model.state_dict(keep_vars=True)
    buffers = {name: tensor for name, tensor in model.named_buffers() if name in saved}
    return dict(trained(model)) | buffers


def trained(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """A model's parameters that require gradients, by name."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def load_weights(model: torch.nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Copy weights into a model of the same kind.

    Raises:
        ValueError: names or shapes differ from the model's.
    """
    check_weights(model, saved)
    with torch.no_grad():
        for name, tensor in weights_of(model).items():
            tensor.copy_(saved[name])


def check_weights(model: torch.nn.Module, saved: Mapping[str, Tensor], what: str = "weights") -> None:
    """Raise an error if weights do not fit a model.

    Args:
        model: the model.
        saved: weights by name.
        what: name of the weights, for the error message.

    Raises:
        ValueError: names or shapes differ from the model's.
    """
    expected = weights_of(model)
    exact_keys(saved, expected, what)
    for name, tensor in expected.items():
        if tensor.shape != saved[name].shape:
            raise ValueError(
                f"{what}: {name} must have shape {tuple(tensor.shape)}, got {tuple(saved[name].shape)}; "
                "these are the weights of another model"
            )


WINDOWS_BEFORE = 2.0  # averaging begins after this many times `window` rows
_BEGINS = 9.0  # at first, the mean covers about a ninth of the steps since averaging began


class WeightAverage:
    """Keeps the running mean of a model's weights in one model, and trains a second model.

        mean ← d · mean + (1 - d) · weights,  d = min(1 - rows / window, t / (t + 9)),  t = step - 2 window / rows

    Averaging removes the noise of a constant learning rate. It begins after 2 · window rows, because a model learns fast in
    the first steps, and a mean over these steps would lag behind. Until then, t ≤ 0 and d = 0. The window is a number of
    rows, so the lag and the noise of the mean do not depend on the batch size (Hilton et al., arXiv 2110.00641).

    Args:
        mean: the model that samples. Its parameters become the mean; it gets no gradients.
        window: number of rows, 0 or more. 0: no averaging, and `mean` itself is trained.

    Attributes:
        model: the model that is trained. It shares frozen weights with `mean`, so only trained weights need more memory.
    """

    def __init__(self, mean: PreTrainedModel, window: int) -> None:
        self.window = window
        if not window:
            self.model = mean
            return
        frozen = {id(parameter): parameter for parameter in mean.parameters() if not parameter.requires_grad}
        self.model = deepcopy(mean, memo=frozen)
        self._mean = [parameter.data for _, parameter in trained(mean)]
        self._trained = [parameter.data for _, parameter in trained(self.model)]

    def take(self, step: int, rows: int) -> None:
        """Update the mean after an optimizer step on this many rows; the first step has the number 1."""
        if self.window:
            torch._foreach_lerp_(self._mean, self._trained, 1 - kept_share(self.window, step, rows))


def kept_share(window: int, step: int, rows: float) -> float:
    """The factor d of the mean at an optimizer step on this many rows; the first step has the number 1."""
    since = step - WINDOWS_BEFORE * window / rows
    return max(0.0, min(1 - rows / window, since / (since + _BEGINS))) if since > 0 else 0.0


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
