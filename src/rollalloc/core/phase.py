"""The phases of a group, and which phase may follow which."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """The phase of a group."""

    DRAWN = "drawn"  # its prompt is drawn, no rollout is decided yet
    RUNNING = "running"  # rollouts of its stage are decided; the judge is asked as they end
    WAITING = "waiting"  # it passed a stage and waits for the next one
    READY = "ready"  # it waits for a batch; no more rollouts will come
    TRAINED = "trained"  # over: it was in a batch
    DROPPED = "dropped"  # over: none of its rollouts was trained on

    __hash__ = object.__hash__  # phases are looked up very often, and the hash of Enum is slow


OVER = frozenset({Phase.TRAINED, Phase.DROPPED})

# All legal transitions.
FOLLOWING: dict[Phase, frozenset[Phase]] = {
    Phase.DRAWN: frozenset({Phase.RUNNING}),
    Phase.RUNNING: frozenset({Phase.WAITING, Phase.READY, Phase.DROPPED}),
    Phase.WAITING: frozenset({Phase.RUNNING, Phase.DROPPED}),
    Phase.READY: frozenset({Phase.TRAINED, Phase.DROPPED}),
    Phase.TRAINED: frozenset(),
    Phase.DROPPED: frozenset(),
}
