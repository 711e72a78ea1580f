"""The phases of a group's way, and which may follow which."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """Where a group stands."""

    DRAWN = "drawn"  # its prompt is drawn, no rollout is decided
    RUNNING = "running"  # rollouts of its stage are decided; the stage's judge is asked as they end
    WAITING = "waiting"  # it passed a stage that is not the last one, and waits to go on
    READY = "ready"  # nothing more is to come; it waits for a batch
    TRAINED = "trained"  # over: it was in a batch
    DROPPED = "dropped"  # over: nothing of it was trained

    __hash__ = object.__hash__  # a phase is looked up at every step of every group, and an Enum's own hash is slow


OVER = frozenset({Phase.TRAINED, Phase.DROPPED})

# The whole table: what is not here cannot happen.
FOLLOWING: dict[Phase, frozenset[Phase]] = {
    Phase.DRAWN: frozenset({Phase.RUNNING}),
    Phase.RUNNING: frozenset({Phase.WAITING, Phase.READY, Phase.DROPPED}),
    Phase.WAITING: frozenset({Phase.RUNNING, Phase.DROPPED}),
    Phase.READY: frozenset({Phase.TRAINED, Phase.DROPPED}),
    Phase.TRAINED: frozenset(),
    Phase.DROPPED: frozenset(),
}
