"""Averaged weights: what samples, is evaluated and is kept is the running mean of the weights that are trained."""

from __future__ import annotations

from copy import deepcopy

import torch
from transformers import PreTrainedModel

from rollalloc.models.weights import trained

_BEGINS = 9.0  # steps: the mean's window is about a ninth of the steps so far, until the decay bounds it


class WeightAverage:
    """A model that is trained beside the one that holds the mean of its weights.

        mean ← d_t · mean + (1 - d_t) · weights,  d_t = min(decay, t / (t + 9)) after step t = 1, 2 ...

    The window grows with the steps taken, so that a run of a few steps is not held back by where it began. The mean keeps
    what the steps have in common and loses their noise, which is what a constant learning rate makes falls of.

    Args:
        mean: the model that samples; its parameters are the mean, and it is left without gradients.
        decay: of the mean, in [0, 1); 0: none, and the model that is trained is this one.

    Attributes:
        model: what is trained. Frozen weights are shared, so that adapters alone are there twice.
    """

    def __init__(self, mean: PreTrainedModel, decay: float) -> None:
        self.decay = decay
        if not decay:
            self.model = mean
            return
        frozen = {id(parameter): parameter for parameter in mean.parameters() if not parameter.requires_grad}
        self.model = deepcopy(mean, memo=frozen)
        self._mean = [parameter.data for _, parameter in trained(mean)]
        self._trained = [parameter.data for _, parameter in trained(self.model)]

    def take(self, step: int) -> None:
        """Let the mean take in the weights after a step of the optimizer, the first of which is 1."""
        if self.decay:
            torch._foreach_lerp_(self._mean, self._trained, 1 - kept_share(self.decay, step))


def kept_share(decay: float, step: int) -> float:
    """What the mean keeps of itself after a step, the first of which is 1."""
    return min(decay, step / (step + _BEGINS))
