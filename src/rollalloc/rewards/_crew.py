"""The parent's side of `WorkerScorer`: the processes, and the thread that minds them."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from multiprocessing.connection import Connection, wait
from threading import Lock, Thread, current_thread
from time import monotonic

from rollalloc.rewards.cache import OutcomeCache
from rollalloc.rewards.function import Outcome, Sample, Scored, Unscored
from rollalloc.rewards.tally import Tally

_START_LIMIT_S = 300.0  # importing a user's module may load a model from a slow disk
_EXIT_GRACE_S = 1.0  # between a dying process's last breath on the socket and its exit code
_CHUNK = 64  # samples sent at once: few enough that their outcomes fit into the socket's buffer
_CHUNK_BYTES = 65_536  # the same for the samples themselves; a longer one goes alone
_ANSWER_BYTES = 65_536  # no answer is longer


@dataclass(frozen=True)
class Limits:
    """What workers run and may use; see `WorkerScorer`."""

    reward: str
    workers: int
    limit_s: float
    memory_gb: float
    max_chars: int


class Job:
    """The samples of one call, and the future of their outcomes."""

    def __init__(self, samples: Sequence[Sample], max_chars: int) -> None:
        self.future: Future[list[Outcome]] = Future()
        self.tasks = [Task(self, sample, max_chars) for sample in samples]
        self._unanswered = len(samples)
        if not samples:
            self.future.set_result([])

    def note_answer(self) -> None:
        """Completes the future once all samples have their outcome; one that was cancelled stays so."""
        self._unanswered -= 1
        if self._unanswered == 0 and self.future.set_running_or_notify_cancel():
            self.future.set_result([task.outcome for task in self.tasks if task.outcome is not None])


class Task:
    """One sample, as it is sent to a worker, and its outcome once it is known."""

    def __init__(self, job: Job, sample: Sample, max_chars: int) -> None:
        self.job = job
        self.sample = sample
        self.outcome: Outcome | None = None
        self.message = b""
        if len(sample.completion) > max_chars:
            reason = f"completion has {len(sample.completion)} characters, more than the limit of {max_chars}"
            self.outcome = Unscored(reason)
        else:
            fields = (sample.data_source, sample.completion, sample.ground_truth, sample.extra_info)
            self.message = pickle.dumps(fields)
        self.digest = sha256(self.message).digest()


class Crew:
    """Worker processes, and a thread that hands them samples and replaces them; it ends with its first error.

    Args:
        limits: of each worker, and their number.
        tally: counts the outcomes.
        cache: scores that need no worker.
    """

    def __init__(self, limits: Limits, tally: Tally, cache: OutcomeCache) -> None:
        self._limits = limits
        self._tally = tally
        self._cache = cache
        self._workers: list[_Worker] = []
        self._waiting: deque[Task] = deque()
        self._lock = Lock()  # between a new job and the end
        self._ended = False
        self._process_id = os.getpid()
        self._bell, self._bell_button = socket.socketpair()
        self._bell_button.setblocking(False)
        self._thread = Thread(target=self._run, name="rollalloc reward workers", daemon=True)
        self._thread.start()

    def take(self, job: Job) -> bool:
        """Queues a job; False where this crew has ended, or was made before this process was forked off."""
        with self._lock:
            if self._ended or os.getpid() != self._process_id:
                return False
            self._waiting.extend(job.tasks)
            self._ring()
            return True

    def close(self) -> None:
        """Ends the processes; jobs that are not done are cancelled."""
        with self._lock:
            if self._ended or os.getpid() != self._process_id:
                return
            self._ended = True
            self._ring()
        if current_thread() is not self._thread:  # it calls back when a future completes
            self._thread.join()

    def _ring(self) -> None:
        with suppress(BlockingIOError):  # so many rings are not to be missed
            self._bell_button.send(b"!")

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while not self._ended:
                self._staff()
                self._hand_out()
                self._listen()
        except BaseException as caught:
            error = caught
        finally:
            self._dismiss(error)

    def _staff(self) -> None:
        """Replaces workers that died idle, and starts as many as there is work for."""
        for worker in [worker for worker in self._workers if worker.idle and worker.process.poll() is not None]:
            worker.stop()
            self._workers.remove(worker)
        wanted = sum(not worker.idle for worker in self._workers) + len(self._waiting)
        while len(self._workers) < min(self._limits.workers, wanted):
            self._workers.append(_Worker(self._limits))

    def _hand_out(self) -> None:
        for worker in self._workers:
            if worker.idle and (tasks := self._next_chunk()):
                worker.give(tasks)

    def _next_chunk(self) -> list[Task]:
        """The next samples that need a worker; small towards the end, so that workers finish together."""
        size = min(_CHUNK, -(-len(self._waiting) // (4 * self._limits.workers)))
        tasks: list[Task] = []
        length = 0
        while self._waiting and len(tasks) < size and (not tasks or length < _CHUNK_BYTES):
            task = self._waiting.popleft()
            if not self._answer_without_worker(task):
                tasks.append(task)
                length += len(task.message)
        return tasks

    def _answer_without_worker(self, task: Task) -> bool:
        if task.job.future.cancelled():
            return True
        if task.outcome is not None:  # too long
            self._settle(task, task.outcome, 0.0)
            return True
        score = self._cache.get(task.digest)
        if score is None:
            return False
        self._tally.add_cached()
        task.outcome = score
        task.job.note_answer()
        return True

    def _listen(self) -> None:
        """Waits until the bell rings or a worker has something to say or is overdue."""
        busy = [worker for worker in self._workers if not worker.idle]
        if not busy and self._waiting:
            return  # what was at hand needed no worker
        patience = max(0.0, min(worker.deadline for worker in busy) - monotonic()) if busy else None
        speaking = wait([self._bell, *(worker.connection for worker in busy)], timeout=patience)
        if self._bell in speaking:
            self._bell.recv(4096)
        for worker in busy:
            if worker.connection in speaking or monotonic() >= worker.deadline:
                self._hear(worker)

    def _hear(self, worker: _Worker) -> None:
        seconds = monotonic() - worker.since
        try:
            outcome = worker.hear()
        except _Lost as lost:
            self._workers.remove(worker)
            task = worker.given.popleft()
            self._waiting.extendleft(reversed(worker.given))
            self._settle(task, Unscored(str(lost)), seconds, lost=True)
        else:
            if outcome is not None:
                self._settle(worker.given.popleft(), outcome, seconds)

    def _settle(self, task: Task, outcome: Outcome, seconds: float, lost: bool = False) -> None:
        self._tally.add(task.sample, outcome, seconds, lost)
        if isinstance(outcome, Scored):
            self._cache.put(task.digest, outcome)
        task.outcome = outcome
        task.job.note_answer()

    def _dismiss(self, error: BaseException | None) -> None:
        """Stops the workers, and tells whoever still waits."""
        with self._lock:
            self._ended = True
        unanswered = [*self._waiting, *(task for worker in self._workers for task in worker.given)]
        for worker in self._workers:
            worker.stop()
        self._bell.close()
        self._bell_button.close()
        for job in {task.job for task in unanswered}:
            if error is None:
                job.future.cancel()
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(error)


class _Lost(Exception):
    """A worker is gone, and this is why the sample at hand has no score."""


class _Worker:
    """One process, and which samples it was given and has not answered; it is at the first of them."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.ready = False
        self.given: deque[Task] = deque()
        self.since = monotonic()
        self.deadline = self.since + _START_LIMIT_S
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = _start(limits, theirs.fileno())
        # A process that does not listen, though it is idle, must not hold up the thread that minds the others.
        timeout = struct.pack("ll", int(limits.limit_s), int(limits.limit_s % 1 * 1e6) + 1)
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, timeout)
        self.connection = Connection(ours.detach())

    @property
    def idle(self) -> bool:
        return self.ready and not self.given

    def give(self, tasks: Iterable[Task]) -> None:
        """Sends an idle worker its next samples."""
        self.given.extend(tasks)
        with suppress(OSError):  # a dead worker is heard of by its end of file, a deaf one by its deadline
            for task in self.given:
                self.connection.send_bytes(task.message)
        self._restart_clock()

    def hear(self) -> Outcome | None:
        """The outcome that has come in of the first sample of `given`; None where the worker said that it is ready.

        Raises:
            _Lost: it died or overran its limit at that sample; it is stopped.
            RuntimeError: the same before it was ready, or it could not load the function.
        """
        if not self.connection.poll():
            raise self._lost(overdue=True)
        try:
            answer = json.loads(self.connection.recv_bytes(_ANSWER_BYTES))
        except (EOFError, OSError, ValueError):
            raise self._lost(overdue=False) from None
        if not self.ready:
            if answer is not None:
                raise RuntimeError(f"reward {self.limits.reward!r} could not be loaded in a worker: {answer}")
            self.ready = True
            return None
        self._restart_clock()
        if isinstance(answer, list):
            return Scored(*answer)
        if answer.startswith("MemoryError"):  # what holds the memory would cost the next samples theirs
            self.stop()
            raise _Lost(f"worker ran out of memory (limit {self.limits.memory_gb:g} GB)")
        return Unscored(answer)

    def stop(self, grace_s: float = 0.0) -> int:
        """Ends the process and all that it started; its exit code, its own where it exits within the grace."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        with suppress(ProcessLookupError, PermissionError):  # nobody left in the group
            os.killpg(self.process.pid, signal.SIGKILL)
        self.connection.close()
        return self.process.wait()

    def _restart_clock(self) -> None:
        self.since = monotonic()
        self.deadline = self.since + self.limits.limit_s

    def _lost(self, overdue: bool) -> Exception:
        # A process that died but left a child which holds the socket open is overdue as well; its exit code tells.
        overdue = overdue and self.process.poll() is None
        exit_code = self.stop(0.0 if overdue else _EXIT_GRACE_S)
        if self.ready:
            limit = f"timed out after {self.limits.limit_s:g} s"
            return _Lost(limit if overdue else f"worker died (exit code {exit_code})")
        what = f"was not ready after {_START_LIMIT_S:g} s" if overdue else f"died (exit code {exit_code}) at its start"
        return RuntimeError(
            f"a worker for reward {self.limits.reward!r} {what}; "
            "import the module in an interpreter of your own to see why"
        )


def _start(limits: Limits, descriptor: int) -> subprocess.Popen[bytes]:
    memory_bytes = int(limits.memory_gb * 2**30)
    arguments = (descriptor, os.getpid(), limits.reward, limits.limit_s, memory_bytes)
    call = f"from rollalloc.rewards._worker import serve; serve(*{arguments!r})"
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {call}"],
        pass_fds=(descriptor,),
        start_new_session=True,  # one group to kill, and out of reach of the terminal's Ctrl-C
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
