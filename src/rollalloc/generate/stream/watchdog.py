"""Watches a process that others wait for. It warns if the process is silent, and gives up after a limit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic

from rollalloc.generate.stream.backend import BackendDied

log = logging.getLogger(__name__)

LOOK_S = 1.0  # maximum seconds between two checks
_SAID_S = 10.0  # seconds of silence before the first warning; each later warning waits twice as long
_BEGINS_S = 120.0  # minimum limit before the first sign, because the process imports modules and builds its model


class Silence:
    """Measures how long a process has given no sign of life.

    Time in which this machine was suspended does not count. A process that works on a long rollout sends signs of life.

    Args:
        who: returns a name for the process, including its id.
        limit_s: seconds of silence after which `BackendDied` is raised, above 0.
        clock: returns monotonic seconds.
    """

    def __init__(self, who: Callable[[], str], limit_s: float, clock: Callable[[], float] = monotonic) -> None:
        self._who, self.limit_s, self._clock = who, limit_s, clock
        self.begin()

    def begin(self) -> None:
        """Begin to watch a new process."""
        self._signs, self._silent_s, self._say_s, self._looked = 0, 0.0, 0.0, self._clock()

    def check(self, signs: int, what: str) -> None:
        """Check the process. Call this at least once every `LOOK_S` seconds while something waits for it.

        Args:
            signs: number of signs of life so far.
            what: the subject of "... wait for it" in the message, for example "3 rollouts".

        Raises:
            BackendDied: the process was silent for too long.
        """
        now = self._clock()
        since, self._looked = min(now - self._looked, 2 * LOOK_S), now
        if signs != self._signs:
            if self._say_s:
                log.warning("%s responds again", self._who())
            self._signs, self._silent_s, self._say_s = signs, 0.0, 0.0
            return
        self._silent_s += since
        limit_s = self.limit_s if signs else max(self.limit_s, _BEGINS_S)
        silence = f"{self._who()} has given no sign of life for {self._silent_s:.0f} s, and {what} wait for it"
        if self._silent_s >= limit_s:
            raise BackendDied(f"{silence}: it was killed after this limit (--generator-limit, generator_limit_s)")
        if self._silent_s >= (self._say_s or (_SAID_S if signs else _BEGINS_S / 2)):
            log.warning("%s; it will be killed after %.0f s", silence, limit_s)
            self._say_s = 2 * self._silent_s
