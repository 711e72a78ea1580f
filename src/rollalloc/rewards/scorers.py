"""Running a reward function over samples: in this process, or in processes that may be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import wait
from threading import RLock
from time import monotonic
from typing import Any, Protocol, Self

from rollalloc.rewards.function import Outcome, RewardFunction, Sample, Unscored, score_sample
from rollalloc.rewards.tally import Tally

_START_LIMIT_S = 300.0  # importing a user's module may load a model from a slow disk
_EXIT_GRACE_S = 1.0  # between a dying process's last breath on the pipe and its exit code
_CHUNK = 64  # samples sent at once: few enough that their outcomes fit into the pipe's buffer


class Scorer(Protocol):
    """Scores samples; a context manager that closes itself."""

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """One outcome a sample, in order."""
        ...

    def submit(self, samples: Sequence[Sample]) -> Future[list[Outcome]]:
        """The same, while the caller goes on."""
        ...

    def report(self) -> dict[str, Any]:
        """What has been scored so far, as plain JSON data.

        `scored`: their number, of which `cached` were known already; `unscored`: number by reason; `slowest` and
        `lost`: at most 20 samples each, slowest first, with `name`, `seconds` and, if unscored, `reason`; the lost ones
        are those whose worker had to be killed or died.
        """
        ...

    def close(self) -> None:
        """Frees what scoring holds."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True)
class InlineScorer(Scorer):
    """Calls a trusted function in this process: no limit, no isolation. Not for use within a running event loop."""

    function: RewardFunction
    _tally: Tally = field(default_factory=Tally, init=False, repr=False, compare=False)

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        return [self._score(sample) for sample in samples]

    def submit(self, samples: Sequence[Sample]) -> Future[list[Outcome]]:
        future: Future[list[Outcome]] = Future()
        future.set_result(self.score(samples))
        return future

    def report(self) -> dict[str, Any]:
        return self._tally.report()

    def close(self) -> None:
        pass

    def _score(self, sample: Sample) -> Outcome:
        start = monotonic()
        outcome = score_sample(self.function, sample)
        self._tally.add(sample, outcome, monotonic() - start)
        return outcome


class WorkerScorer(Scorer):
    """Runs a reward function in processes of its own, which a hanging or crashing sample costs nothing but themselves.

    A sample that takes too long, or whose process dies, is `Unscored`; its process is replaced, together with all that
    it started, and the samples after it go on. Processes start with the first `score`, are kept until `close`, and are
    ended when the interpreter exits; what the function prints is discarded. They are fresh interpreters that do not
    import the caller's main module, so that a script needs no `if __name__ == "__main__"` and a replacement starts
    fast. `score` may be called from several threads, which take turns. POSIX only.

    Args:
        reward: path of the function, as `load_reward` takes it.
        workers: most processes at a time, at least 1.
        limit_s: seconds a sample may take, positive; importing the function's module does not count.

    Raises:
        ValueError: `workers` or `limit_s` out of range.
    """

    def __init__(self, reward: str, workers: int = 1, limit_s: float = 10.0) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}; to score in this process use InlineScorer")
        if not limit_s > 0:
            raise ValueError(f"limit_s must be a positive number of seconds, got {limit_s}")
        self.reward = reward
        self.workers = workers
        self.limit_s = limit_s
        self._workers: list[_Worker] = []
        self._turn = RLock()
        self._tally = Tally()
        self._background = ThreadPoolExecutor(1)
        weakref.finalize(self, _stop_all, self._workers)

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """One outcome a sample, in order.

        Raises:
            RuntimeError: a worker could not load the reward function.
        """
        with self._turn:
            try:
                return self._score(samples)
            except BaseException:
                self.close()  # what the workers still answer would be taken for the next call's
                raise

    def submit(self, samples: Sequence[Sample]) -> Future[list[Outcome]]:
        """Scores in the background; the future's error is `score`'s."""
        return self._background.submit(self.score, list(samples))

    def report(self) -> dict[str, Any]:
        return self._tally.report()

    def close(self) -> None:
        """Ends the processes; a later `score` starts new ones."""
        with self._turn:
            _stop_all(self._workers)

    def _score(self, samples: Sequence[Sample]) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        waiting = deque(range(len(samples)))
        while len(outcomes) < len(samples):
            self._staff(len(samples) - len(outcomes))
            for worker in self._workers:
                if worker.idle and waiting:
                    size = min(_CHUNK, -(-len(waiting) // (4 * self.workers)))  # small at the end, to finish together
                    chunk = [waiting.popleft() for _ in range(size)]
                    worker.give(chunk, [samples[index] for index in chunk])
            for worker in self._next_events():
                try:
                    outcomes |= worker.hear()
                except _Lost as lost:
                    self._workers.remove(worker)
                    outcomes[worker.given.popleft()] = Unscored(str(lost))
                    waiting.extendleft(reversed(worker.given))
        return [outcomes[index] for index in range(len(samples))]

    def _staff(self, unanswered: int) -> None:
        """Replaces workers that died idle, and starts as many as there is work for."""
        for worker in [worker for worker in self._workers if worker.idle and worker.process.poll() is not None]:
            worker.stop()
            self._workers.remove(worker)
        while len(self._workers) < min(self.workers, unanswered):
            self._workers.append(_Worker(self.reward, self.limit_s))

    def _next_events(self) -> list[_Worker]:
        """Waits until a worker has something to say or is overdue; those that are either."""
        busy = [worker for worker in self._workers if not worker.idle]
        patience = min(worker.deadline for worker in busy) - monotonic()
        speaking = wait([worker.connection for worker in busy], timeout=max(0.0, patience))
        return [worker for worker in busy if worker.connection in speaking or monotonic() >= worker.deadline]


class _Lost(Exception):
    """A worker is gone, and this is why the sample at hand has no score."""


class _Worker:
    """One process, and which samples it was given and has not answered; it is at the first of them."""

    def __init__(self, reward: str, limit_s: float) -> None:
        self.reward = reward
        self.limit_s = limit_s
        self.ready = False
        self.given: deque[int] = deque()
        self.deadline = monotonic() + _START_LIMIT_S
        self.connection, theirs = Pipe()
        with theirs:
            call = f"from rollalloc.rewards._worker import serve; serve({theirs.fileno()}, {reward!r}, {limit_s!r})"
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {call}"],
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # one group to kill, and out of reach of the terminal's Ctrl-C
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    @property
    def idle(self) -> bool:
        return self.ready and not self.given

    def give(self, indices: Sequence[int], samples: Sequence[Sample]) -> None:
        """Sends an idle worker its next samples."""
        self.given.extend(indices)
        with suppress(BrokenPipeError, ConnectionResetError):  # a dead worker is heard of by its end of file
            self.connection.send(samples)
        self.deadline = monotonic() + self.limit_s

    def hear(self) -> dict[int, Outcome]:
        """The outcome that has come in, by the sample's index; none where the worker said that it is ready.

        Raises:
            _Lost: it died or overran its limit at the first sample of `given`; it is stopped.
            RuntimeError: the same before it was ready, or it could not load the function.
        """
        if not self.connection.poll():
            raise self._lost(overdue=True)
        try:
            message: Any = self.connection.recv()
        except (EOFError, OSError):
            raise self._lost(overdue=False) from None
        if not self.ready:
            if message is not None:
                raise RuntimeError(f"reward {self.reward!r} could not be loaded in a worker: {message}")
            self.ready = True
            return {}
        self.deadline = monotonic() + self.limit_s
        return {self.given.popleft(): message}

    def stop(self, grace_s: float = 0.0) -> int:
        """Ends the process and all that it started; its exit code, its own where it exits within the grace."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        with suppress(ProcessLookupError, PermissionError):  # nobody left in the group
            os.killpg(self.process.pid, signal.SIGKILL)
        self.connection.close()
        return self.process.wait()

    def _lost(self, overdue: bool) -> Exception:
        # A process that died but left a child which holds the pipe open is overdue as well; its exit code tells.
        overdue = overdue and self.process.poll() is None
        exit_code = self.stop(0.0 if overdue else _EXIT_GRACE_S)
        if self.ready:
            limit = f"timed out after {self.limit_s:g} s"
            return _Lost(limit if overdue else f"worker died (exit code {exit_code})")
        what = f"was not ready after {_START_LIMIT_S:g} s" if overdue else f"died (exit code {exit_code}) at its start"
        return RuntimeError(
            f"a worker for reward {self.reward!r} {what}; import the module in an interpreter of your own to see why"
        )


def _stop_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().stop()
