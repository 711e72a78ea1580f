"""How the asynchronous engine works, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

OnWeightUpdate = Literal["continue", "restart", "stop"]


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """How the asynchronous engine works; see docs/streaming.md.

    Attributes:
        overlap: generation has a process of its own, which goes on while rewards are scored and batches trained. False: it
            is one decoding step after the other in this process, a few of them while a batch is trained, so that a run
            depends on no clock.
        early: where nothing may be stale, rows that the batch in the making will surely have are passed forward and backward
            while its others are generated. Only with overlap; changes the gradient by its rounding alone.
        on_weight_update: what becomes of rollouts that are running when the weights change. "continue": they go on under
            the new ones; each token's log-probability is that under which it was drawn, which the importance weights use.
            "restart": they begin again, what they had is lost. "stop": they are cancelled.
        keep_stopped: what was generated of a rollout that is stopped, by this or by the recipe, is kept, and a rollout of
            its prompt goes on from there where that prompt is drawn again while the recipe's `max_staleness` allows it.

    Raises:
        ValueError: another policy for on_weight_update.
    """

    overlap: bool = True
    early: bool = True
    on_weight_update: OnWeightUpdate = "continue"
    keep_stopped: bool = False

    def __post_init__(self) -> None:
        if self.on_weight_update not in get_args(OnWeightUpdate):
            raise ValueError(
                f"on_weight_update must be one of {', '.join(get_args(OnWeightUpdate))}, got {self.on_weight_update!r}"
            )
