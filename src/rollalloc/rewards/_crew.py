"""The parent's side of `WorkerScorer`: a thread that distributes samples to workers and replaces dead workers.

`WorkerHandle` sends one worker its samples, reads its answers and ends it. `Tally` counts what a scorer did.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from reprlib import repr as short
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from threading import Lock, Thread, current_thread
from time import monotonic
from typing import Any

from rollalloc.rewards import _keeper
from rollalloc.rewards._channel import LOST_CHANNEL, Answer, InvalidMessage, ParentEnd, Ready, Started, new_request
from rollalloc.rewards.function import Outcome, Sample, Scored, Unscored

_NAMED = 20  # maximum number of slow samples, and of lost samples, in a report
_REASONS = 50  # maximum number of reasons to count separately; an exception's text may differ for every sample


class Tally:
    """Counts outcomes. Keeps the 20 slowest samples, and the 20 slowest samples whose worker died or was killed."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._scored = 0
        self._seconds = 0.0
        self._discarded = 0
        self._unscored: Counter[str] = Counter()
        self._slowest: list[dict[str, Any]] = []
        self._lost: list[dict[str, Any]] = []

    def add(self, sample: Sample, outcome: Outcome, seconds: float, lost: bool = False) -> None:
        """Count a sample.

        Args:
            sample: the sample.
            outcome: its outcome.
            seconds: time that the sample took.
            lost: whether the sample's worker died or was killed.
        """
        name = sample.name or f"{sample.data_source or 'a sample'} that answers {short(sample.completion)}"
        entry = {"name": name, "seconds": round(seconds, 3)}
        with self._lock:
            self._seconds += seconds
            if isinstance(outcome, Scored):
                self._scored += 1
            else:
                known = outcome.reason in self._unscored or len(self._unscored) < _REASONS
                self._unscored[outcome.reason if known else "other reasons"] += 1
                entry["reason"] = outcome.reason
            _keep_slowest(self._lost if lost else self._slowest, entry)

    def add_discarded(self, answers: int) -> None:
        """Count messages of workers that did not answer a request, or had a wrong form."""
        with self._lock:
            self._discarded += answers

    def report(self) -> dict[str, Any]:
        """The counts and names as plain JSON data; see `Scorer.report`."""
        with self._lock:
            return {
                "scored": self._scored,
                "discarded": self._discarded,
                "seconds": round(self._seconds, 3),
                "unscored": dict(self._unscored.most_common()),
                "slowest": [dict(entry) for entry in self._slowest],
                "lost": [dict(entry) for entry in self._lost],
            }


def _keep_slowest(entries: list[dict[str, Any]], entry: dict[str, Any]) -> None:
    if len(entries) < _NAMED or entry["seconds"] > entries[-1]["seconds"]:
        entries.append(entry)
        entries.sort(key=lambda entry: -entry["seconds"])
        del entries[_NAMED:]


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


class WorkerHandle:
    """One worker process.

    Attributes:
        pending: requests without an answer, and their tasks, in order. The worker is scoring the first.
        fresh: whether the worker has not answered yet. The crew sets it to False.
        since: time at which the worker began its current task.
        deadline: time until which the worker must be ready, or must answer the current task. No meaning for an idle worker.
    """

    def __init__(self, limits: Limits) -> None:
        self.pending: deque[tuple[str, Task]] = deque()
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

    def give(self, tasks: Sequence[Task]) -> None:
        """Send tasks to a worker that is idle, or still starts."""
        requests = [new_request(task.message) for task in tasks]
        self.pending.extend((request, task) for (request, _), task in zip(requests, tasks, strict=True))
        self.channel.send(b"".join(frame for _, frame in requests))
        if self._ready:
            self._restart_clock()

    def next_answer(self) -> tuple[Task, Answer, float] | None:
        """A task, its answer and the seconds that it took; None if no answer has arrived.

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

    def _check(self, answer: Answer) -> tuple[Task, Answer, float]:
        if not self.pending or answer.request != self.pending[0][0]:
            raise InvalidMessage
        if isinstance(answer.outcome, Unscored) and answer.outcome.reason.startswith("MemoryError"):
            # The worker may keep this memory, and the next samples would run out of memory too.
            raise Lost(f"worker ran out of memory (limit {self._limits.memory_gb:g} GB)")
        (_, task), seconds = self.pending.popleft(), monotonic() - self.since
        self._restart_clock()
        return task, answer, seconds

    def _note_start(self, message: Started | Ready | Answer) -> None:
        if isinstance(message, Started) and self._process_id is None:
            self._process_id = message.process_id
        elif isinstance(message, Ready) and self._process_id is not None and not self._ready:
            if message.error is not None:
                raise RuntimeError(f"reward {self._limits.reward!r} could not be loaded in a worker: {message.error}")
            self._ready = True
            self._restart_clock()
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


_CHUNK = 64  # maximum number of samples sent at once; their outcomes must fit into the socket's buffer
_CHUNK_BYTES = 65_536  # maximum number of bytes of samples sent at once; a longer sample is sent alone
# If a used worker raises an error, the sample is normally tried again in a fresh worker. The error is accepted at once if
# fresh workers have raised the same message `TRUSTED_MESSAGE` times, or the same type of error `TRUSTED_TYPE` times.
TRUSTED_MESSAGE, TRUSTED_TYPE = 2, 8
_MAX_MESSAGES = 1000  # maximum number of messages and types of errors to count


class Job:
    """The samples of one call, and the future of their outcomes."""

    def __init__(self, samples: Sequence[Sample], max_chars: int) -> None:
        self.future: Future[list[Outcome]] = Future()
        self.tasks = [Task(self, sample, max_chars) for sample in samples]
        self._unanswered = len(samples)
        if not samples:
            self.future.set_result([])

    def note_answer(self) -> None:
        """Count an outcome. Complete the future when all samples have an outcome, unless it was cancelled."""
        self._unanswered -= 1
        if self._unanswered == 0 and self.future.set_running_or_notify_cancel():
            self.future.set_result([task.outcome for task in self.tasks if task.outcome is not None])


class Task:
    """A sample, the message that sends it to a worker, and later its outcome."""

    def __init__(self, job: Job, sample: Sample, max_chars: int) -> None:
        self.job = job
        self.sample = sample
        self.outcome: Outcome | None = None
        self.doubted: Outcome | None = None  # the error from a used worker, if the sample was retried
        self.message = b""
        if len(sample.completion) > max_chars:
            reason = f"completion has {len(sample.completion)} characters, more than the limit of {max_chars}"
            self.outcome = Unscored(reason)
        else:
            fields = (sample.data_source, sample.completion, sample.ground_truth, sample.extra_info)
            self.message = pickle.dumps(fields)


class _TrustedErrors:
    """Counts the errors that fresh workers raise.

    An error that fresh workers raise often is caused by the samples themselves, not by samples that a worker scored before.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def doubts(self, outcome: Outcome) -> bool:
        """Whether the outcome is an error that an earlier sample of the worker may have caused."""
        if not isinstance(outcome, Unscored) or not outcome.raised:
            return False
        return self._counts[outcome.reason] < TRUSTED_MESSAGE and self._counts[_type(outcome)] < TRUSTED_TYPE

    def note(self, before: Outcome | None, outcome: Outcome) -> None:
        """Count a fresh worker's outcome.

        Args:
            before: the error of the same sample in a worker that had scored other samples; None if this is the first try.
            outcome: the fresh worker's outcome.
        """
        if isinstance(outcome, Unscored) and outcome.raised:
            self._counts[_type(outcome)] += 1
            if len(self._counts) < _MAX_MESSAGES:  # limited, because each sample may raise a different message
                self._counts[outcome.reason] += 1
        elif isinstance(before, Unscored):  # the worker caused the error, not the sample: start to count again
            self._counts[_type(before)] = self._counts[before.reason] = 0


def _type(outcome: Unscored) -> str:
    """The exception's type with a colon, as a key that differs from the reasons of all errors."""
    return outcome.reason.partition(":")[0] + ":"


class Crew:
    """Worker processes, and a thread that sends them samples and replaces dead workers.

    An error in the thread ends the crew.

    If a sample raises an error or kills its worker, an earlier sample in the same worker may be the cause. The sample is
    then tried again in a fresh worker, and the second outcome counts. Starting a process is expensive, so an error that
    fresh workers raise often (`_TrustedErrors`) is accepted without a second try.

    Args:
        limits: the limits of each worker, and the number of workers.
        tally: counts the outcomes.
    """

    def __init__(self, limits: Limits, tally: Tally) -> None:
        self._limits = limits
        self._tally = tally
        self._workers: list[WorkerHandle] = []
        self._jobs: set[Job] = set()  # jobs whose futures are not done
        self._waiting: deque[Task] = deque()
        self._errors = _TrustedErrors()
        self._lock = Lock()  # held so that no job is queued after the crew has ended
        self._ended = False
        self._process_id = os.getpid()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._thread = Thread(target=self._run, name="rollalloc reward workers", daemon=True)
        self._thread.start()

    def take(self, job: Job) -> bool:
        """Queue a job. Return False if this crew has ended, or if this process is a fork of the crew's process."""
        with self._lock:
            if self._ended or os.getpid() != self._process_id:
                return False
            self._jobs.add(job)
            self._waiting.extend(job.tasks)
            self._wake()
        job.future.add_done_callback(lambda _: self._forget(job))
        return True

    def close(self) -> None:
        """End the workers and cancel jobs that are not done."""
        with self._lock:
            if self._ended or os.getpid() != self._process_id:
                return
            self._ended = True
            self._wake()
        if current_thread() is not self._thread:  # a future's callback runs in the thread itself, and may call `close`
            self._thread.join()

    def _forget(self, job: Job) -> None:
        """Drop a job whose future is done. If the future was cancelled, wake the crew's thread to stop the job's samples."""
        self._jobs.discard(job)
        if job.future.cancelled() and os.getpid() == self._process_id:
            self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # the thread has ended, or the buffer is full of wake-ups
            self._wake_sender.send(b"!")

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while not self._ended:
                self._drop_cancelled()
                self._start_workers()
                self._hand_out()
                self._listen()
        except BaseException as caught:
            error = caught
        finally:
            self._shut_down(error)

    def _drop_cancelled(self) -> None:
        """End the workers whose current job was cancelled. Waiting tasks of cancelled jobs are dropped later."""
        for worker in [worker for worker in self._workers if worker.pending]:
            if worker.pending[0][1].job.future.cancelled():
                self._end(worker)

    def _start_workers(self) -> None:
        """Start as many workers as there is work for."""
        busy = sum(bool(worker.pending) for worker in self._workers)
        while len(self._workers) < min(self._limits.workers, busy + len(self._waiting)):
            self._workers.append(WorkerHandle(self._limits))

    def _hand_out(self) -> None:
        for worker in self._workers:
            if worker.idle and (tasks := self._next_chunk()):
                worker.give(tasks)

    def _next_chunk(self) -> list[Task]:
        """The next tasks that need a worker. Chunks get smaller towards the end, so that workers finish at the same time."""
        size = min(_CHUNK, -(-len(self._waiting) // (4 * self._limits.workers)))
        tasks: list[Task] = []
        length = 0
        while self._waiting and len(tasks) < size and length < _CHUNK_BYTES:
            task = self._waiting.popleft()
            if task.job.future.cancelled():
                continue
            if task.outcome is not None:  # the completion is too long
                self._settle(task, task.outcome, 0.0)
                continue
            tasks.append(task)
            length += len(task.message)
        return tasks

    def _listen(self) -> None:
        """Wait until a worker answers or is overdue, or this thread is woken; then handle the answers."""
        deadlines = [worker.deadline for worker in self._workers if not worker.idle]
        with DefaultSelector() as selector:
            selector.register(self._wake_receiver, EVENT_READ)
            for worker in self._workers:
                events = EVENT_READ | (EVENT_WRITE if worker.channel.has_unsent else 0)
                selector.register(worker.channel, events, worker)
            ready = selector.select(max(0.0, min(deadlines) - monotonic()) if deadlines else None)
        for key, events in ready:
            if key.data is None:
                self._wake_receiver.recv(4096)
            elif events & EVENT_WRITE:
                key.data.channel.send()
        readable = [key.data for key, events in ready if events & EVENT_READ]
        for worker in list(self._workers):
            if worker in readable or (not worker.idle and monotonic() >= worker.deadline):
                self._take_answers(worker)

    def _take_answers(self, worker: WorkerHandle) -> None:
        try:
            while (answered := worker.next_answer()) is not None:
                task, answer, seconds = answered
                if worker.fresh:
                    self._errors.note(task.doubted, answer.outcome)
                elif self._errors.doubts(answer.outcome):
                    task.doubted = answer.outcome
                    self._replace(worker, task)
                    return
                worker.fresh = False
                self._settle(task, answer.outcome, seconds)
                if not answer.fit:
                    self._end(worker)
                    return
        except Lost as lost:
            self._tally.add_discarded(lost.discarded)
            if not worker.pending:
                self._end(worker)
                return
            _, task = worker.pending.popleft()
            if worker.fresh:
                self._settle(task, Unscored(str(lost)), monotonic() - worker.since, lost=True)
                self._end(worker)
            else:
                self._replace(worker, task)

    def _replace(self, worker: WorkerHandle, task: Task) -> None:
        """End a worker, and have a fresh one try its current task again."""
        self._end(worker)
        self._workers.append(WorkerHandle(self._limits))
        self._workers[-1].give([task])

    def _end(self, worker: WorkerHandle) -> None:
        """End a worker. Its unanswered tasks will get another worker."""
        self._workers.remove(worker)
        worker.stop()
        self._waiting.extendleft(task for _, task in reversed(worker.pending))

    def _settle(self, task: Task, outcome: Outcome, seconds: float, lost: bool = False) -> None:
        self._tally.add(task.sample, outcome, seconds, lost)
        task.outcome = outcome
        task.job.note_answer()

    def _shut_down(self, error: BaseException | None) -> None:
        """Stop the workers, and complete all open futures, even if stopping fails.

        The futures raise `error`. If `error` is None, they are cancelled.
        """
        with self._lock:
            self._ended = True
        try:
            for worker in self._workers:
                worker.ask_to_stop()
            for worker in self._workers:
                worker.stop()
        finally:
            self._wake_receiver.close()
            self._wake_sender.close()
            for job in list(self._jobs):
                if error is None:
                    job.future.cancel()
                if job.future.set_running_or_notify_cancel():
                    job.future.set_exception(error)
