"""Decoding replicas. Each has a clock in tokens, by which all of its rollouts advance together.

The time for a token depends on how many rollouts decode and how much context they hold, but it is the same for all of them.
So each replica counts the tokens that a rollout would have if it had decoded from the beginning. This count is its
*reading*. A rollout that starts at reading v and has n tokens to generate ends at reading v + n, even if other rollouts
start or stop. The smallest of these sums is the next end. So only four kinds of events must be simulated: ends, starts,
stops, and a memory that becomes full.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from rollalloc_lab.simulate.cost import Pace


@dataclass(slots=True)
class Placed:
    """A rollout on a replica.

    Attributes:
        at: index of its replica.
        prompt: number of tokens of its prompt.
        tokens: number of completion tokens at its end.
        since: the replica's `reading` when the rollout started or was last resumed.
        made: number of completion tokens when it started or was last resumed; for a preempted rollout, the present number.
    """

    at: int
    prompt: int
    tokens: int
    since: float = 0.0
    made: float = 0.0

    @property
    def end(self) -> float:
        """The replica's reading at which the rollout ends."""
        return self.since + self.tokens - self.made


class Replica:
    """One replica.

    Attributes:
        at: simulated time, in seconds, up to which the replica has been advanced.
        resume: time until which the replica does something other than decoding.
        reading: number of tokens that a rollout would have now if it had decoded from the beginning.
        running: decoding rollouts, in the order in which they started.
        preempted: rollouts that wait for memory. The last one is resumed first.
        held: tokens of context of the decoding rollouts.
        ends: heap of (reading at the end, rollout). Entries of stopped or preempted rollouts stay until they are on top.
        stamp: stamp of the replica's newest entry in the fleet's list of events. Entries with older stamps are invalid.
        decoding, paused, empty: seconds so far in which the replica decoded, in which its rollouts made no progress, and in
            which it had no rollouts.
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
        """Number of its rollouts, decoding or preempted."""
        return len(self.running) + len(self.preempted)

    def advance(self, now: float, pace: Pace) -> None:
        """Advance the replica to this time."""
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
        """Let each decoding rollout generate this many tokens."""
        self.reading += tokens
        self.held += tokens * len(self.running)

    def fits(self, context: float, room: float) -> bool:
        """Whether a context fits, with one more token for each rollout. In an empty replica, every rollout fits."""
        return not self.running or self.held + context + len(self.running) + 1 <= room


class Fleet:
    """All replicas.

    If a replica's memory is full, it preempts the rollout that started last, as vLLM does (docs.vllm.ai, "Optimization and
    Tuning"): it drops the keys and values of this rollout. When there is room again, it resumes this rollout first, and
    recomputes its context. Until then, nothing new starts there. Every rollout must fit on an empty replica.

    Args:
        replicas: number of replicas, at least 1.
        pace: pace of each replica.

    Attributes:
        place: replica and progress of each rollout.
        free: number of slots without a rollout. Preempted rollouts keep their slots.
        preemptions: number of preemptions so far.
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
        self._moments: list[tuple[float, int, int]] = []  # heap of (time of the next event, replica, stamp)
        self._loads = [(0, at) for at in range(replicas)]  # heap of (rollouts, replica); outdated entries are skipped
        self._changed: set[int] = set()

    def __len__(self) -> int:
        return len(self.place)

    def pass_to(self, now: float) -> None:
        """Let time pass until this moment. No rollout may end before it."""
        self.slot_seconds += (now - self.now) * len(self.place)
        self.now = now

    def least_loaded(self) -> int:
        """The replica with the fewest rollouts. If there are several, the first."""
        while True:
            load, at = self._loads[0]
            if self.replicas[at].rollouts == load:
                return at
            heappop(self._loads)

    def fits(self, at: int, prompt: int) -> bool:
        """Whether a replica has room for a prompt and has no preempted rollout."""
        replica = self.replicas[at]
        if self.pace.room == inf:
            return True
        replica.advance(self.now, self.pace)
        return not replica.preempted and replica.fits(prompt, self.pace.room)

    def start(self, rollout: int, tokens: int, at: int, prompt: int = 0) -> None:
        """Start a rollout with `tokens` to generate on a replica that has a slot and room."""
        self.place[rollout] = Placed(at, prompt, tokens)
        self.free -= 1
        self._begin(rollout, self.replicas[at])
        self._count(at)

    def pause(self, at: int, seconds: float) -> None:
        """Let a replica stop decoding for this many seconds, after the pauses that were already requested."""
        replica = self.replicas[at]
        replica.advance(self.now, self.pace)
        replica.resume = max(replica.resume, self.now) + seconds
        self._changed.add(at)

    def stop(self, rollout: int) -> int:
        """Remove a rollout from its replica. Return its number of complete tokens."""
        at = self.place[rollout].at
        self.replicas[at].advance(self.now, self.pace)
        made = self._remove(rollout)
        self._go_on(at)
        return int(made + 1e-6)  # rounding may have made a whole number slightly smaller

    def next_end(self) -> float:
        """The time at which the next rollout ends or is preempted; infinity if none is running."""
        for at in self._changed:
            self._schedule(at, self.replicas[at])
        self._changed.clear()
        moments = self._moments
        while moments and self.replicas[moments[0][1]].stamp != moments[0][2]:
            heappop(moments)
        return moments[0][0] if moments else inf

    def end(self) -> list[int]:
        """The rollouts that end at the current moment on one replica; none if a rollout is preempted instead."""
        _, at, _ = heappop(self._moments)
        replica = self.replicas[at]
        replica.advance(self.now, self.pace)
        self._changed.add(at)
        if self._full(replica, replica.ends[0][0] - replica.reading, slack=1e-6):
            self._preempt(replica)
            return []
        ends, ended = replica.ends, list[int]()
        replica.pass_tokens(ends[0][0] - replica.reading)
        reading = replica.reading = ends[0][0]  # the exact value, without rounding
        while ends and ends[0][0] <= reading:
            rollout = ends[0][1]
            if self._is_current(heappop(ends)):
                self._remove(rollout)
                ended.append(rollout)
        self._go_on(at)
        return ended

    def lend(self, until: float) -> None:
        """Use all replicas, which must be idle, for other work until this time. The caller counts the cost of the work."""
        for replica in self.replicas:
            replica.advance(self.now, self.pace)
            replica.at = replica.resume = until
        self.now = until

    def advance(self) -> None:
        """Advance all replicas to the present time."""
        for replica in self.replicas:
            replica.advance(self.now, self.pace)

    def _begin(self, rollout: int, replica: Replica) -> None:
        """Start or resume decoding a rollout."""
        placed = self.place[rollout]
        replica.advance(self.now, self.pace)
        placed.since = replica.reading
        replica.running[rollout] = None
        replica.held += placed.prompt + placed.made
        heappush(replica.ends, (placed.end, rollout))
        self._changed.add(placed.at)

    def _pull(self, rollout: int, replica: Replica) -> float:
        """Remove a rollout from those that decode. Return the tokens that it has."""
        placed = self.place[rollout]
        del replica.running[rollout]
        placed.made += replica.reading - placed.since
        replica.held = replica.held - placed.prompt - placed.made if replica.running else 0.0
        return placed.made

    def _remove(self, rollout: int) -> float:
        """Remove a rollout for good. Return the tokens that it has."""
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
        """Preempt the rollout that started last. If more are preempted later, they are resumed before it."""
        rollout = next(reversed(replica.running))
        self._pull(rollout, replica)
        replica.preempted[rollout] = None
        self.preemptions += 1

    def _go_on(self, at: int) -> None:
        """Resume preempted rollouts while there is room."""
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
        """Whether an entry of the heap is valid: its rollout is decoding, and was not resumed after the entry was made."""
        end, rollout = entry
        placed = self.place.get(rollout)
        return placed is not None and rollout in self.replicas[placed.at].running and placed.end == end

    def _full(self, replica: Replica, to_go: float, slack: float = 0.0) -> bool:
        """Whether the memory fills up before each rollout has generated `to_go` more tokens; `slack` allows for rounding."""
        running = len(replica.running)
        return running > 1 and replica.held + running * (to_go - slack) > self.pace.room

    def _schedule(self, at: int, replica: Replica) -> None:
        """Schedule the replica's next event: a rollout's end or a preemption."""
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
