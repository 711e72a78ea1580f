"""The parent's handle of one worker process: sends it samples, reads its answers, and ends it."""

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
from rollalloc.rewards._channel import LOST_CHANNEL, Answer, InvalidMessage, ParentEnd, Ready, Started, new_request
from rollalloc.rewards.function import Outcome, Unscored

_START_LIMIT_S = 300.0  # long, because the user's module may load a model from a slow disk
_EXIT_GRACE_S = 1.0  # seconds to wait for the exit code after the channel is closed
_KILL_GRACE_S = 5.0  # seconds to wait while the keeper kills the processes that the worker started


@dataclass(frozen=True)
class Limits:
    """The reward function and the limits of the workers; see `WorkerScorer`."""

    reward: str
    workers: int
    limit_s: float
    memory_gb: float
    max_chars: int


class Lost(Exception):
    """A worker died or must be killed. The message says why the worker's current sample, if any, has no score.

    Attributes:
        discarded: number of the worker's answers that were discarded.
    """

    def __init__(self, reason: str, discarded: int = 0) -> None:
        super().__init__(reason)
        self.discarded = discarded


@dataclass(frozen=True)
class Answered:
    """A task's outcome and seconds; whether the worker may get more tasks; whether this was the worker's first sample."""

    task: Any
    outcome: Outcome
    seconds: float
    fit: bool
    first: bool


class WorkerHandle:
    """One worker process.

    Attributes:
        pending: requests without an answer, and their tasks, in order. The worker is scoring the first.
        fresh: True until the worker has answered for the first time.
        since: time at which the worker began its current task.
        deadline: time until which the current task must be answered. It has no meaning while the worker is idle.
    """

    def __init__(self, limits: Limits) -> None:
        self.pending: deque[tuple[str, Any]] = deque()
        self.fresh = True
        self.since = monotonic()
        self.deadline = self.since + _START_LIMIT_S
        self._limits = limits
        self._process_id: int | None = None
        self._ready = False
        ours, theirs = socket.socketpair()
        with theirs:
            self.channel = ParentEnd(ours)  # created before the worker, so that the kernel reports all senders
            self._keeper = _start(limits, theirs.fileno())

    @property
    def idle(self) -> bool:
        return self._ready and not self.pending

    def give(self, tasks: Sequence[tuple[Any, bytes]]) -> None:
        """Send an idle worker its next tasks, each with its message."""
        for task, message in tasks:
            request, frame = new_request(message)
            self.pending.append((request, task))
            self.channel.queue(frame)
        self._restart_clock()
        self.channel.flush()

    def next_answer(self) -> Answered | None:
        """The worker's next answer; None if none has arrived.

        Raises:
            Lost: the worker died, exceeded its time limit, or sent something other than its own answer to the first
                request in `pending`.
            RuntimeError: the worker could not load the function. Or it was not ready yet when it died, exceeded the time
                limit for starting, or sent an invalid message.
        """
        try:
            while (message := self.channel.receive()) is not None:
                if isinstance(message, Answer):
                    return self._check(message)
                self._note_start(message)
        except EOFError:
            raise self._lost(self._end()) from None
        except InvalidMessage:
            raise self._lost("sent an invalid answer, or another process answered for it", discarded=1) from None
        if not self.idle and monotonic() >= self.deadline:
            if self._ready:
                raise Lost(f"timed out after {self._limits.limit_s:g} s")
            raise self._lost(f"was not ready after {_START_LIMIT_S:g} s")
        return None

    def ask_to_stop(self) -> None:
        """Ask the keeper to kill the worker and every process it started."""
        with suppress(ProcessLookupError):
            self._keeper.send_signal(signal.SIGTERM)
            self._keeper.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Kill the worker and every process it started, and wait until they have ended."""
        self.ask_to_stop()
        try:
            self._keeper.wait(_KILL_GRACE_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        self.channel.close()
        # If the keeper was killed, the worker may still be running.
        if self._process_id is not None and self._keeper.returncode == -signal.SIGKILL:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process_id, signal.SIGKILL)

    def _check(self, answer: Answer) -> Answered:
        if not self.pending or answer.request != self.pending[0][0]:
            raise InvalidMessage
        if isinstance(answer.outcome, Unscored) and answer.outcome.reason.startswith("MemoryError"):
            # The worker may keep this memory, and the next samples would run out of memory too.
            raise Lost(f"worker ran out of memory (limit {self._limits.memory_gb:g} GB)")
        (_, task), seconds = self.pending.popleft(), monotonic() - self.since
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
            raise InvalidMessage

    def _restart_clock(self) -> None:
        self.since = monotonic()
        self.deadline = self.since + self._limits.limit_s

    def _end(self) -> str:
        """Describe how the worker ended, after its channel was closed."""
        try:
            exit_code = self._keeper.wait(_EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            exit_code = LOST_CHANNEL
        return "closed its channel" if exit_code == LOST_CHANNEL else f"died (exit code {exit_code})"

    def _lost(self, problem: str, discarded: int = 0) -> Exception:
        if self._ready:
            return Lost(f"worker {problem}", discarded)
        return RuntimeError(
            f"a worker for reward {self._limits.reward!r} {problem} while it started; "
            "import the module in a Python interpreter to see why"
        )


def _start(limits: Limits, descriptor: int) -> subprocess.Popen[bytes]:
    """Start a keeper, which forks the worker. Only the worker imports the package."""
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
        start_new_session=True,  # so that Ctrl-C in the terminal does not reach the keeper
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
