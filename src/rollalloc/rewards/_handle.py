"""One worker process as its parent holds it: what it was given, what it says, and its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

from rollalloc.rewards import _keeper
from rollalloc.rewards._channel import LOST_CHANNEL, Answer, ParentEnd, Polluted, Ready, Started, new_request
from rollalloc.rewards.function import Outcome, Unscored

_START_LIMIT_S = 300.0  # importing a user's module may load a model from a slow disk
_EXIT_GRACE_S = 1.0  # between a dying process's last breath on the channel and its exit code
_KILL_GRACE_S = 5.0  # for the keeper to end what the worker started


@dataclass(frozen=True)
class Limits:
    """What workers run and may use; see `WorkerScorer`."""

    reward: str
    workers: int
    limit_s: float
    memory_gb: float
    max_chars: int


class Lost(Exception):
    """A worker is of no more use, and this is why the sample at hand, if any, has no score.

    Attributes:
        discarded: how many answers of its were discarded.
    """

    def __init__(self, reason: str, discarded: int = 0) -> None:
        super().__init__(reason)
        self.discarded = discarded


@dataclass(frozen=True)
class Answered:
    """A task's outcome, what it took, whether the worker may go on, and whether it was the worker's first."""

    task: Any
    outcome: Outcome
    seconds: float
    fit: bool
    first: bool


class WorkerHandle:
    """One process.

    Attributes:
        given: requests and tasks that it has not answered; it is at the first.
        fresh: whether nothing was answered yet.
        since: when it began with what it is at.
        deadline: when it is overdue, unless idle.
    """

    def __init__(self, limits: Limits) -> None:
        self.given: deque[tuple[str, Any]] = deque()
        self.fresh = True
        self.since = monotonic()
        self.deadline = self.since + _START_LIMIT_S
        self._limits = limits
        self._process_id: int | None = None
        self._ready = False
        ours, theirs = socket.socketpair()
        with theirs:
            self.channel = ParentEnd(ours)  # before the worker can say anything, so that the kernel notes who does
            self._keeper = _start(limits, theirs.fileno())

    @property
    def idle(self) -> bool:
        return self._ready and not self.given

    def give(self, tasks: Sequence[tuple[Any, bytes]]) -> None:
        """Sends an idle worker its next tasks, each with its message."""
        for task, message in tasks:
            name, frame = new_request(message)
            self.given.append((name, task))
            self.channel.queue(frame)
        self._restart_clock()
        self.channel.flush()

    def hear(self) -> Answered | None:
        """The next answer; None where there is none yet.

        Raises:
            Lost: the worker died, overran its limit, or something came that is no answer of its own to the first of
                `given`.
            RuntimeError: the same before it was ready, or it could not load the function.
        """
        try:
            while (message := self.channel.receive()) is not None:
                if isinstance(message, Answer):
                    return self._check(message)
                self._note_start(message)
        except EOFError:
            raise self._lost(self._end()) from None
        except Polluted:
            raise self._lost("was not alone to answer, or sent what is no answer", discarded=1) from None
        if not self.idle and monotonic() >= self.deadline:
            if self._ready:
                raise Lost(f"timed out after {self._limits.limit_s:g} s")
            raise self._lost(f"was not ready after {_START_LIMIT_S:g} s")
        return None

    def ask_to_stop(self) -> None:
        """Has the keeper end the process and all that it started."""
        with suppress(ProcessLookupError):
            self._keeper.send_signal(signal.SIGTERM)
            self._keeper.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """The same, and waits for it."""
        self.ask_to_stop()
        try:
            self._keeper.wait(_KILL_GRACE_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        self.channel.close()
        if self._process_id is not None and self._keeper.returncode == -signal.SIGKILL:  # it may not have come to it
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process_id, signal.SIGKILL)

    def _check(self, answer: Answer) -> Answered:
        if not self.given or answer.request != self.given[0][0]:
            raise Polluted
        if isinstance(answer.outcome, Unscored) and answer.outcome.reason.startswith("MemoryError"):
            # What holds the memory would cost the next samples theirs.
            raise Lost(f"worker ran out of memory (limit {self._limits.memory_gb:g} GB)")
        (_, task), seconds = self.given.popleft(), monotonic() - self.since
        first, self.fresh = self.fresh, False
        self._restart_clock()
        return Answered(task, answer.outcome, seconds, answer.fit, first)

    def _note_start(self, message: Started | Ready | Answer) -> None:
        if isinstance(message, Started) and self._process_id is None:
            self._process_id = message.process_id
        elif isinstance(message, Ready) and self._process_id is not None and not self._ready:
            if message.error is not None:
                raise RuntimeError(f"reward {self._limits.reward!r} could not be loaded in a worker: {message.error}")
            self._ready = True
        else:
            raise Polluted

    def _restart_clock(self) -> None:
        self.since = monotonic()
        self.deadline = self.since + self._limits.limit_s

    def _end(self) -> str:
        """How a worker that hung up has ended."""
        try:
            exit_code = self._keeper.wait(_EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            exit_code = LOST_CHANNEL
        return "closed its channel" if exit_code == LOST_CHANNEL else f"died (exit code {exit_code})"

    def _lost(self, what: str, discarded: int = 0) -> Exception:
        if self._ready:
            return Lost(f"worker {what}", discarded)
        return RuntimeError(
            f"a worker for reward {self._limits.reward!r} {what} at its start; "
            "import the module in an interpreter of your own to see why"
        )


def _start(limits: Limits, descriptor: int) -> subprocess.Popen[bytes]:
    """Starts a keeper, which forks the worker; the package is imported in the worker only."""
    settings = (limits.reward, int(limits.memory_gb * 2**30))
    program = f"""
import sys
sys.path[:] = {sys.path!r}
def serve(descriptor):
    from rollalloc.rewards._worker import serve
    serve(descriptor, *{settings!r})
from runpy import run_path
run_path({_keeper.__file__!r})["keep"]({os.getpid()}, {descriptor}, serve)
"""
    return subprocess.Popen(
        [sys.executable, "-c", program],
        pass_fds=(descriptor,),
        start_new_session=True,  # out of reach of the terminal's Ctrl-C
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
