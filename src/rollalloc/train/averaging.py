"""Averaged weights: what samples, is evaluated and is kept is the running mean of the weights that are trained."""

from __future__ import annotations

from copy import deepcopy

import torch
from transformers import PreTrainedModel

from rollalloc.models.weights import trained

_WAITS = 2.0  # windows of rows that are trained before the mean begins
_BEGINS = 9.0  # once it has begun, its window is about a ninth of the steps since, until the rows bound it


class WeightAverage:
    """A model that is trained beside the one that holds the mean of its weights.

        mean ← d · mean + (1 - d) · weights,  d = min(1 - rows / window, t / (t + 9)),  t = step - 2 window / rows

    Averaging removes the noise of a constant learning rate. Until two windows of rows are trained (t ≤ 0), the mean is the
    weights themselves (d = 0): a short run learns most of what it learns in those steps, and a mean would lag behind that.
    The window is in rows: the mean is then as far behind, and as free of noise, however rows are cut into batches (Hilton
    et al., arXiv 2110.00641).

    Args:
        mean: the model that samples; its parameters are the mean, and it is left without gradients.
        window: rows, 0 or more; 0: no mean, and the model that is trained is this one.

    Attributes:
        model: what is trained. Frozen weights are shared, so that adapters alone are there twice.
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
        """Let the mean take in the weights after a step of the optimizer, the first of which is 1, on so many rows."""
        if self.window:
            torch._foreach_lerp_(self._mean, self._trained, 1 - kept_share(self.window, step, rows))


def kept_share(window: int, step: int, rows: float) -> float:
    """The share of itself that the mean keeps after a step, the first of which is 1, on so many rows."""
    since = step - _WAITS * window / rows
    return max(0.0, min(1 - rows / window, since / (since + _BEGINS))) if since > 0 else 0.0
