"""How well a rollout's success is told before it is paid for: by its prompt's features, by its prompt's record, by both."""

from __future__ import annotations

from dataclasses import dataclass

from rollalloc.lab.waste.shares import Share


@dataclass(frozen=True, slots=True)
class Predicted:
    """How good cross-validated predictions were.

    Attributes:
        auc: the chance that a right rollout was given a higher rate than a wrong one.
        log_loss: nats a rollout.
    """

    auc: Share
    log_loss: Share


@dataclass(frozen=True, slots=True)
class Predictability:
    """Predictions by what is known beforehand; None: by that nothing could be said.

    Attributes:
        features: numbers of the prompt's text.
        record: the rate of the prompt's other rollouts.
        both: the two together.
        blind: log-loss of the mean rate, in nats a rollout.
        note: what could not be said, and why; empty: all was.
    """

    features: Predicted | None
    record: Predicted | None
    both: Predicted | None
    blind: float
    note: str = ""

    @property
    def auc(self) -> float | None:
        """By the most that is known; None where nothing could be said."""
        best = self.both or self.record or self.features
        return None if best is None else best.auc.value
