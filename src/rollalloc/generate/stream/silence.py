"""Watches a process that others wait for: warns if it is silent, and gives it up after a limit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic

from rollalloc.generate.stream.backend import BackendDied

log = logging.getLogger(__name__)

LOOK_S = 1.0  # maximum seconds between two checks
_SAID_S = 10.0  # seconds of silence before the first warning; each later warning waits twice as long
_BEGINS_S = (
    120.0  # minimum limit for a process that has given no sign yet, because it imports modules and builds its model
)


class Silence:
    """Measures how long a process has given no sign of life.

    Only time during which this process was awake counts: if it was suspended for an hour, it has not waited for an hour.
    A process that is busy with a long rollout reports that it works, so it is not silent.

    Args:
        who: returns the name of the process, with its id.
        limit_s: seconds of silence after which it is given up, above 0.
        clock: returns monotonic seconds.
    """

    def __init__(self, who: Callable[[], str], limit_s: float, clock: Callable[[], float] = monotonic) -> None:
        self._who, self.limit_s, self._clock = who, limit_s, clock
        self.begin()

    def begin(self) -> None:
        """Begin to watch another process."""
        self._signs, self._silent_s, self._say_s, self._looked = 0, 0.0, 0.0, self._clock()

    def look(self, signs: int, what: str) -> None:
        """Check the process. Call it at least once in `LOOK_S` while something waits.

        Args:
            signs: number of signs of life so far.
            what: names what waits, for the message.

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
