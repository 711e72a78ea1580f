"""Replicas that decode: each has a clock in tokens, by which all rollouts on it advance together.

How fast a token comes depends on how many decode and on what they hold, not on which. So a replica keeps the tokens that any
rollout would have made there since the beginning, its *reading*: one that begins at reading v with n tokens to go ends at
v + n, whoever comes and goes. The next to end is the least of these sums, and nothing happens between two ends, starts,
stops and the moment at which the memory for keys and values is full.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from rollalloc.lab.simulate.cost import Pace


@dataclass(slots=True)
class Placed:
    """A rollout on a replica.

    Attributes:
        at: its replica.
        prompt: tokens of its prompt.
        tokens: that it will make.
        since: the replica's reading when it began, or was taken up again.
        made: tokens that it had made then; where it is preempted, has.
    """

    at: int
    prompt: int
    tokens: int
    since: float = 0.0
    made: float = 0.0

    @property
    def end(self) -> float:
        """The reading at which it ends."""
        return self.since + self.tokens - self.made


class Replica:
    """One replica.

    Attributes:
        at: seconds up to which it is accounted for.
        resume: seconds until which it does something else than decode.
        reading: tokens that a rollout decoded from the beginning would have by `at`.
        running: rollouts that decode, the last to begin last.
        preempted: rollouts that wait for room, the first to be taken up again last.
        held: tokens of context of those that decode.
        ends: heap of (reading at its end, rollout); those stopped or preempted stay until they come up.
        stamp: of its newest entry among the fleet's moments.
        decoding, paused, empty: seconds so far with rollouts, without progress, with nothing to do.
    """

    __slots__ = (
        "at", "decoding", "empty", "ends", "held", "paused", "preempted", "reading", "resume", "running", "stamp",
    )  # fmt: skip

    def __init__(self) -> None:
        self.at = self.resume = self.reading = self.held = 0.0
        self.decoding = self.paused = self.empty = 0.0
        self.stamp = 0
        self.running: dict[int, None] = {}
        self.preempted: dict[int, None] = {}
        self.ends: list[tuple[float, int]] = []

    @property
    def rollouts(self) -> int:
        """On it, decoding or preempted."""
        return len(self.running) + len(self.preempted)

    def advance(self, now: float, pace: Pace) -> None:
        """Bring it up to date."""
        passed = now - self.at
        if passed <= 0:
            return
        if self.resume > self.at:
            paused = min(now, self.resume) - self.at
            self.paused += paused
            passed -= paused
        self.at = now
        if passed > 0:
            if running := len(self.running):
                self.decoding += passed
                self.pass_tokens(pace.tokens(passed, running, self.held))
            else:
                self.empty += passed

    def pass_tokens(self, tokens: float) -> None:
        """Let each rollout make so many."""
        self.reading += tokens
        self.held += tokens * len(self.running)

    def fits(self, context: float, room: float) -> bool:
        """Whether a context has room, with a token more of each; an empty replica holds any that was let in."""
        return not self.running or self.held + context + len(self.running) + 1 <= room


class Fleet:
    """All replicas.

    A replica whose memory is full preempts the last to begin, as vLLM does (docs.vllm.ai, "Optimization and Tuning"): its
    keys and values are dropped, and when there is room again it is the first to go on, its context computed anew. Until then
    nothing new begins there. Every rollout must fit on a replica by itself.

    Args:
        replicas: how many, at least 1.
        pace: of each.

    Attributes:
        place: by rollout, where it is.
        free: slots that no rollout has, preempted ones counted as having one.
        preemptions: so far.
    """

    def __init__(self, replicas: int, pace: Pace) -> None:
        self.replicas = [Replica() for _ in range(replicas)]
        self.pace = pace
        self.place: dict[int, Placed] = {}
        self.slots = replicas * (len(pace.seconds_N) - 1)
        self.free = self.slots
        self.now = 0.0
        self.slot_seconds = 0.0
        self.preemptions = 0
        self._moments: list[tuple[float, int, int]] = []  # when something happens next, replica, stamp
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

    def fits(self, at: int, prompt: int) -> bool:
        """Whether a replica has room for a prompt, and nobody who waits for room there."""
        replica = self.replicas[at]
        if self.pace.room == inf:
            return True
        replica.advance(self.now, self.pace)
        return not replica.preempted and replica.fits(prompt, self.pace.room)

    def start(self, rollout: int, tokens: int, at: int, prompt: int = 0) -> None:
        """Begin a rollout of so many tokens on a replica that has a slot and room."""
        self.place[rollout] = Placed(at, prompt, tokens)
        self.free -= 1
        self._begin(rollout, self.replicas[at])
        self._count(at)

    def pause(self, at: int, seconds: float) -> None:
        """Let a replica do something else for so long, after what else it has to do."""
        replica = self.replicas[at]
        replica.advance(self.now, self.pace)
        replica.resume = max(replica.resume, self.now) + seconds
        self._changed.add(at)

    def stop(self, rollout: int) -> int:
        """Take a rollout off its replica; how many whole tokens it has."""
        at = self.place[rollout].at
        self.replicas[at].advance(self.now, self.pace)
        made = self._remove(rollout)
        self._go_on(at)
        return int(made + 1e-6)  # what rounding lacks of a token is no token

    def next_end(self) -> float:
        """When the next rollout ends, or is preempted; infinity where none runs."""
        for at in self._changed:
            self._schedule(at, self.replicas[at])
        self._changed.clear()
        moments = self._moments
        while moments and self.replicas[moments[0][1]].stamp != moments[0][2]:
            heappop(moments)
        return moments[0][0] if moments else inf

    def end(self) -> list[int]:
        """The rollouts that end next, on one replica at one moment, which must be now; none where one is preempted."""
        _, at, _ = heappop(self._moments)
        replica = self.replicas[at]
        replica.advance(self.now, self.pace)
        self._changed.add(at)
        if self._full(replica, replica.ends[0][0] - replica.reading, slack=1e-6):
            self._preempt(replica)
            return []
        ends, ended = replica.ends, list[int]()
        replica.pass_tokens(ends[0][0] - replica.reading)
        reading = replica.reading = ends[0][0]  # exactly, whatever rounding made of it
        while ends and ends[0][0] <= reading:
            rollout = ends[0][1]
            if self._is_current(heappop(ends)):
                self._remove(rollout)
                ended.append(rollout)
        self._go_on(at)
        return ended

    def lend(self, until: float) -> None:
        """Give all replicas, on which nothing runs, to somebody else until then; it is accounted for there."""
        for replica in self.replicas:
            replica.advance(self.now, self.pace)
            replica.at = replica.resume = until
        self.now = until

    def advance(self) -> None:
        """Bring all replicas up to date."""
        for replica in self.replicas:
            replica.advance(self.now, self.pace)

    def _begin(self, rollout: int, replica: Replica) -> None:
        """Let it decode from what it has made."""
        placed = self.place[rollout]
        replica.advance(self.now, self.pace)
        placed.since = replica.reading
        replica.running[rollout] = None
        replica.held += placed.prompt + placed.made
        heappush(replica.ends, (placed.end, rollout))
        self._changed.add(placed.at)

    def _pull(self, rollout: int, replica: Replica) -> float:
        """Take it from those that decode; the tokens that it has made."""
        placed = self.place[rollout]
        del replica.running[rollout]
        placed.made += replica.reading - placed.since
        replica.held = replica.held - placed.prompt - placed.made if replica.running else 0.0
        return placed.made

    def _remove(self, rollout: int) -> float:
        """Take it away for good; the tokens that it has made."""
        placed = self.place[rollout]
        replica = self.replicas[placed.at]
        if rollout in replica.running:
            self._pull(rollout, replica)
        else:
            del replica.preempted[rollout]
        del self.place[rollout]
        self.free += 1
        self._count(placed.at)
        return placed.made

    def _preempt(self, replica: Replica) -> None:
        """Put the last to begin back, before those that were put back earlier."""
        rollout = next(reversed(replica.running))
        self._pull(rollout, replica)
        replica.preempted[rollout] = None
        self.preemptions += 1

    def _go_on(self, at: int) -> None:
        """Take up again what was preempted, as far as there is room."""
        replica = self.replicas[at]
        while replica.preempted:
            rollout = next(reversed(replica.preempted))
            context = self.place[rollout].prompt + self.place[rollout].made
            if not replica.fits(context, self.pace.room):
                return
            del replica.preempted[rollout]
            self._begin(rollout, replica)
            self.pause(at, self.pace.prefill * context)

    def _count(self, at: int) -> None:
        heappush(self._loads, (self.replicas[at].rollouts, at))
        self._changed.add(at)

    def _is_current(self, entry: tuple[float, int]) -> bool:
        """Whether an entry of a replica's heap is of a rollout that still decodes, and of the last time that it began."""
        end, rollout = entry
        placed = self.place.get(rollout)
        return placed is not None and rollout in self.replicas[placed.at].running and placed.end == end

    def _full(self, replica: Replica, to_go: float, slack: float = 0.0) -> bool:
        """Whether the memory is full before each rollout has made so many tokens more, up to what rounding makes of it."""
        running = len(replica.running)
        return running > 1 and replica.held + running * (to_go - slack) > self.pace.room

    def _schedule(self, at: int, replica: Replica) -> None:
        """Say when the next rollout on a replica ends or is preempted."""
        replica.stamp += 1
        ends = replica.ends
        while ends and not self._is_current(ends[0]):
            heappop(ends)
        if ends:
            running, to_go = len(replica.running), ends[0][0] - replica.reading
            if self._full(replica, to_go):
                to_go = max(0.0, (self.pace.room - replica.held) / running)
            seconds = self.pace.seconds(to_go, running, replica.held)
            heappush(self._moments, (max(replica.at, replica.resume) + seconds, at, replica.stamp))
