"""Replicas that decode: each has a clock in tokens, by which all rollouts on it advance together.

How fast a token comes depends on how many decode, not on which. So a replica keeps the tokens that any rollout would have
made there since the beginning, its *reading*: one that begins at reading v with n tokens to go ends at v + n, whoever comes
and goes. The next to end is the least of these sums, and nothing happens between two ends, starts or stops.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf


class Replica:
    """One replica.

    Attributes:
        at: seconds up to which it is accounted for.
        resume: seconds until which it does something else than decode.
        reading: tokens that a rollout decoded from the beginning would have by `at`.
        rollouts: on it.
        ends: heap of (reading at its end, rollout); those stopped stay until they come up.
        stamp: of its newest entry among the fleet's moments.
        decoding, paused, empty: seconds so far with rollouts, without progress, with nothing to do.
    """

    __slots__ = ("at", "decoding", "empty", "ends", "paused", "reading", "resume", "rollouts", "stamp")

    def __init__(self) -> None:
        self.at = self.resume = self.reading = 0.0
        self.decoding = self.paused = self.empty = 0.0
        self.rollouts = self.stamp = 0
        self.ends: list[tuple[float, int]] = []

    def advance(self, now: float, seconds_N: Sequence[float]) -> None:
        """Bring it up to date; `seconds_N` are seconds per token by rollouts."""
        passed = now - self.at
        if passed <= 0:
            return
        if self.resume > self.at:
            paused = min(now, self.resume) - self.at
            self.paused += paused
            passed -= paused
        self.at = now
        if passed > 0:
            if self.rollouts:
                self.decoding += passed
                self.reading += passed / seconds_N[self.rollouts]
            else:
                self.empty += passed


class Fleet:
    """All replicas.

    Args:
        replicas: how many, at least 1.
        seconds_N: seconds per token at 0 to as many rollouts as a replica has slots.

    Attributes:
        place: by rollout, its replica and the reading at which it began.
        free: slots.
    """

    def __init__(self, replicas: int, seconds_N: Sequence[float]) -> None:
        self.replicas = [Replica() for _ in range(replicas)]
        self.seconds_N = seconds_N
        self.place: dict[int, tuple[int, float]] = {}
        self.slots = replicas * (len(seconds_N) - 1)
        self.free = self.slots
        self.now = 0.0
        self.slot_seconds = 0.0
        self._moments: list[tuple[float, int, int]] = []  # when the next ends, replica, stamp
        self._loads = [
            (0, at) for at in range(replicas)
        ]  # rollouts and replica; entries of another time are passed over
        self._changed: set[int] = set()

    def __len__(self) -> int:
        return len(self.place)

    def pass_to(self, now: float) -> None:
        """Let time pass until then, in which nothing ends."""
        self.slot_seconds += (now - self.now) * len(self.place)
        self.now = now

    def least_loaded(self) -> int:
        """The replica with fewest rollouts, the first of several."""
        while True:
            load, at = self._loads[0]
            if self.replicas[at].rollouts == load:
                return at
            heappop(self._loads)

    def start(self, rollout: int, tokens: int, at: int) -> None:
        """Begin a rollout of so many tokens on a replica that has a slot."""
        replica = self.replicas[at]
        replica.advance(self.now, self.seconds_N)
        heappush(replica.ends, (replica.reading + tokens, rollout))
        self.place[rollout] = (at, replica.reading)
        self.free -= 1
        self._count(at, replica, 1)

    def pause(self, at: int, seconds: float) -> None:
        """Let a replica do something else for so long, after what else it has to do."""
        replica = self.replicas[at]
        replica.advance(self.now, self.seconds_N)
        replica.resume = max(replica.resume, self.now) + seconds
        self._changed.add(at)

    def stop(self, rollout: int) -> int:
        """Take a rollout off its replica; how many whole tokens it has."""
        at, began = self.place.pop(rollout)
        replica = self.replicas[at]
        replica.advance(self.now, self.seconds_N)
        self._free(at, replica)
        return int(replica.reading - began + 1e-6)  # what rounding lacks of a token is no token

    def next_end(self) -> float:
        """When the next rollout ends; infinity where none runs."""
        for at in self._changed:
            self._schedule(at, self.replicas[at])
        self._changed.clear()
        moments = self._moments
        while moments and self.replicas[moments[0][1]].stamp != moments[0][2]:
            heappop(moments)
        return moments[0][0] if moments else inf

    def end(self) -> list[int]:
        """The rollouts that end next, on one replica at one moment, which must be now."""
        _, at, _ = heappop(self._moments)
        replica = self.replicas[at]
        replica.advance(self.now, self.seconds_N)
        ends, ended = replica.ends, list[int]()
        reading = replica.reading = ends[0][0]  # exactly, whatever rounding made of it
        while ends and ends[0][0] <= reading:
            rollout = heappop(ends)[1]
            if self.place.pop(rollout, None) is not None:
                self._free(at, replica)
                ended.append(rollout)
        self._changed.add(at)
        return ended

    def lend(self, until: float) -> None:
        """Give all replicas, on which nothing runs, to somebody else until then; it is accounted for there."""
        for replica in self.replicas:
            replica.advance(self.now, self.seconds_N)
            replica.at = replica.resume = until
        self.now = until

    def advance(self) -> None:
        """Bring all replicas up to date."""
        for replica in self.replicas:
            replica.advance(self.now, self.seconds_N)

    def _free(self, at: int, replica: Replica) -> None:
        self.free += 1
        self._count(at, replica, -1)

    def _count(self, at: int, replica: Replica, more: int) -> None:
        replica.rollouts += more
        heappush(self._loads, (replica.rollouts, at))
        self._changed.add(at)

    def _schedule(self, at: int, replica: Replica) -> None:
        """Say when the next rollout on a replica ends."""
        replica.stamp += 1
        ends = replica.ends
        while ends and ends[0][1] not in self.place:
            heappop(ends)
        if ends:
            to_go = (ends[0][0] - replica.reading) * self.seconds_N[replica.rollouts]
            heappush(self._moments, (max(replica.at, replica.resume) + to_go, at, replica.stamp))
