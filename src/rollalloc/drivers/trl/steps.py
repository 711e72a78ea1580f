"""Whether the optimizer began a step: a batch may have been trained although no callback heard of it."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


class OptimizerSteps:
    """Hears of each step from the optimizer itself: a callback before ours may raise, and ours is not called then.

    Attributes:
        began: whether a step began since that was last set to False.
    """

    def __init__(self) -> None:
        self.began = False
        self._watch: Any = None

    def watch(self, optimizer: Any) -> None:
        """Listen to this optimizer from now on."""
        if self._watch is not None:
            self._watch.remove()
        optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        if isinstance(optimizer, Optimizer):  # DeepSpeed's is none
            self._watch = optimizer.register_step_pre_hook(self.begin)

    def begin(self, *_: Any) -> None:
        """A step begins."""
        self.began = True
