"""Averaged weights: a running mean of the trained weights, for sampling, evaluation and the saved model."""

from __future__ import annotations

from copy import deepcopy

import torch
from transformers import PreTrainedModel

from rollalloc.models.weights import trained

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
