"""Averaged weights: what samples, is evaluated and is kept is the running mean of the weights that are trained."""

from __future__ import annotations

from copy import deepcopy

import torch
from transformers import PreTrainedModel

from rollalloc.models.weights import trained

_BEGINS = 9.0  # steps: the mean's window is about a ninth of the steps so far, until its rows bound it


class WeightAverage:
    """A model that is trained beside the one that holds the mean of its weights.

        mean ← d_t · mean + (1 - d_t) · weights,  d_t = min(1 - rows / window, t / (t + 9)) after step t = 1, 2 ...

    The window grows with the steps taken, so that a run of a few steps is not held back by where it began, up to so many
    rows: however they are cut into batches, the mean is as far behind, and as free of noise (Hilton et al., arXiv
    2110.00641). Averaging removes the noise of a constant learning rate.

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
    """What the mean keeps of itself after a step, the first of which is 1, on so many rows."""
    return max(0.0, min(1 - rows / window, step / (step + _BEGINS)))
