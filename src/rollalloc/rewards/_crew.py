"""The parent's side of `WorkerScorer`: who scores what, and the thread that minds the workers."""

from __future__ import annotations

import os
import pickle
import socket
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from hashlib import sha256
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from threading import Lock, Thread, current_thread
from time import monotonic

from rollalloc.rewards._handle import Limits, Lost, WorkerHandle
from rollalloc.rewards.function import Outcome, Sample, Scored, Unscored
from rollalloc.rewards.tally import KnownScores, Tally

_CHUNK = 64  # samples sent at once: few enough that their outcomes fit into the socket's buffer
_SURE, _SURE_OF_TYPE = 2, 8  # times that fresh processes raised the same words, or the same type
_MOST_NOTED = 1000
_CHUNK_BYTES = 65_536  # the same for the samples themselves; a longer one goes alone


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
        self.doubted: Outcome | None = None  # what a process said in which others ran before
        self.message = b""
        if len(sample.completion) > max_chars:
            reason = f"completion has {len(sample.completion)} characters, more than the limit of {max_chars}"
            self.outcome = Unscored(reason)
        else:
            fields = (sample.data_source, sample.completion, sample.ground_truth, sample.extra_info)
            self.message = pickle.dumps(fields)
        self.digest = sha256(self.message).digest()


class _Own:
    """Which exceptions are the samples' own: those that fresh processes raised, in the same words or of the same type."""

    def __init__(self) -> None:
        self._times: Counter[str] = Counter()

    def doubts(self, outcome: Outcome) -> bool:
        """Whether what others left behind in the process may have raised it."""
        if not isinstance(outcome, Unscored) or not outcome.raised:
            return False
        return self._times[outcome.reason] < _SURE and self._times[_type(outcome)] < _SURE_OF_TYPE

    def note(self, before: Outcome | None, outcome: Outcome) -> None:
        """What a fresh process made of a sample, and what another one had made of it."""
        if isinstance(outcome, Unscored) and outcome.raised:
            self._times[_type(outcome)] += 1
            if len(self._times) < _MOST_NOTED:  # words may be others for each sample
                self._times[outcome.reason] += 1
        elif isinstance(before, Unscored):  # it was the process
            self._times[_type(before)] = self._times[before.reason] = 0


def _type(outcome: Unscored) -> str:
    """The exception's, with the colon, so that it is no exception's words."""
    return outcome.reason.partition(":")[0] + ":"


class Crew:
    """Worker processes, and a thread that hands them samples and replaces them; it ends with its first error.

    A sample is given up only where a fresh process is lost at it, or raises: where others ran there before, what they left
    behind may be to blame, and the sample is tried once more, as the first of a new one. An exception that fresh processes
    raise again and again (`_Own`) is believed at once, since a process costs more than a sample.

    Args:
        limits: of each worker, and their number.
        tally: counts the outcomes.
        cache: scores that need no worker.
    """

    def __init__(self, limits: Limits, tally: Tally, cache: KnownScores) -> None:
        self._limits = limits
        self._tally = tally
        self._cache = cache
        self._workers: list[WorkerHandle] = []
        self._jobs: set[Job] = set()  # whose futures are not done
        self._waiting: deque[Task] = deque()
        self._again: deque[Task] = deque()  # for fresh workers only
        self._own = _Own()
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
            self._jobs.add(job)
            self._waiting.extend(job.tasks)
            self._ring()
        job.future.add_done_callback(lambda _: self._forget(job))
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

    def _forget(self, job: Job) -> None:
        """A future is done, or was cancelled, which is to be heeded soon."""
        self._jobs.discard(job)
        if job.future.cancelled() and os.getpid() == self._process_id:
            self._ring()

    def _ring(self) -> None:
        with suppress(OSError):  # so many rings are not to be missed, or nobody is there to hear
            self._bell_button.send(b"!")

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while not self._ended:
                self._drop_cancelled()
                self._staff()
                self._hand_out()
                self._listen()
        except BaseException as caught:
            error = caught
        finally:
            self._dismiss(error)

    def _drop_cancelled(self) -> None:
        """Ends what runs for nobody; what waits for nobody is dropped when its turn comes."""
        for worker in [worker for worker in self._workers if worker.given]:
            if worker.given[0][1].job.future.cancelled():
                self._let_go(worker)

    def _staff(self) -> None:
        """Starts as many workers as there is work for, and makes room for those that must be fresh."""
        lacking = len(self._again) - sum(worker.fresh and not worker.given for worker in self._workers)
        used = [worker for worker in self._workers if worker.idle and not worker.fresh]
        room = self._limits.workers - len(self._workers)
        for worker in used[: max(0, lacking - room)]:
            self._let_go(worker)
        busy = sum(bool(worker.given) for worker in self._workers)
        wanted = max(busy + len(self._waiting) + len(self._again), len(self._workers) + lacking)
        while len(self._workers) < min(self._limits.workers, wanted):
            self._workers.append(WorkerHandle(self._limits))

    def _hand_out(self) -> None:
        for worker in [worker for worker in self._workers if worker.idle]:
            if tasks := (worker.fresh and self._next_again()) or self._next_chunk():
                worker.give([(task, task.message) for task in tasks])

    def _next_again(self) -> list[Task]:
        while self._again:
            task = self._again.popleft()
            if not self._answer_without_worker(task):
                return [task]
        return []

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
        due = [worker.deadline for worker in self._workers if not worker.idle]
        if not due and (self._waiting or self._again):
            return  # what was at hand needed no worker
        with DefaultSelector() as selector:
            selector.register(self._bell, EVENT_READ)
            for worker in self._workers:
                events = EVENT_READ | (EVENT_WRITE if worker.channel.has_unsent else 0)
                selector.register(worker.channel, events, worker)
            ready = selector.select(max(0.0, min(due) - monotonic()) if due else None)
        for key, events in ready:
            if key.data is None:
                self._bell.recv(4096)
            elif events & EVENT_WRITE:
                key.data.channel.flush()
        speaking = [key.data for key, events in ready if events & EVENT_READ]
        for worker in list(self._workers):
            if worker in speaking or (not worker.idle and monotonic() >= worker.deadline):
                self._hear(worker)

    def _hear(self, worker: WorkerHandle) -> None:
        try:
            while (answer := worker.hear()) is not None:
                if again := not answer.first and self._own.doubts(answer.outcome):
                    answer.task.doubted = answer.outcome
                    self._again.append(answer.task)
                else:
                    if answer.first:
                        self._own.note(answer.task.doubted, answer.outcome)
                    self._settle(answer.task, answer.outcome, answer.seconds)
                if again or not answer.fit:
                    self._let_go(worker)
                    return
        except Lost as lost:
            self._tally.add_discarded(lost.discarded)
            if worker.given and worker.fresh:
                _, task = worker.given.popleft()
                self._settle(task, Unscored(str(lost)), monotonic() - worker.since, lost=True)
            elif worker.given:
                self._again.append(worker.given.popleft()[1])
            self._let_go(worker)

    def _let_go(self, worker: WorkerHandle) -> None:
        """Ends a worker; what it has not answered is tried elsewhere."""
        self._workers.remove(worker)
        worker.stop()
        self._waiting.extendleft(task for _, task in reversed(worker.given))

    def _settle(self, task: Task, outcome: Outcome, seconds: float, lost: bool = False) -> None:
        self._tally.add(task.sample, outcome, seconds, lost)
        if isinstance(outcome, Scored):
            self._cache.put(task.digest, outcome)
        task.outcome = outcome
        task.job.note_answer()

    def _dismiss(self, error: BaseException | None) -> None:
        """Stops the workers, and tells whoever still waits, whatever comes between."""
        with self._lock:
            self._ended = True
        try:
            for worker in self._workers:
                worker.ask_to_stop()
            for worker in self._workers:
                worker.stop()
        finally:
            self._bell.close()
            self._bell_button.close()
            for job in list(self._jobs):
                if error is None:
                    job.future.cancel()
                if job.future.set_running_or_notify_cancel():
                    job.future.set_exception(error)
