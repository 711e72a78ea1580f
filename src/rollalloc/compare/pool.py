"""A pool of worker processes. Each carries out one run after another. If a process dies, only its current run fails."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from rollalloc.files.text import told
from rollalloc.processes.spawned import Spawned
from rollalloc.processes.stopping import StopRequest
from rollalloc.train.config import Config, is_run_in
from rollalloc.train.loading import one_thread
from rollalloc.train.train import train

_LOOKS_S = 0.5  # seconds between two checks of the runs
_SIGN_S = 5.0  # seconds between two signs of life of a process
_SILENT_S = 60.0  # seconds without a sign of life after which a warning is logged
_GRACE_S = 5.0  # seconds to wait for a process's exit code after its last message
_AT_WORK = "at work"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """A run and the folder in which it is carried out."""

    run: Config
    place: Path


@dataclass(frozen=True, slots=True)
class Failure:
    """A run that failed. `kind` is the exception's class, or "" if the process died."""

    job: Job
    kind: str
    message: str

    @property
    def is_the_runs(self) -> bool:
        """Whether the weights of the run diverged. Such a run would fail again."""
        return self.kind == FloatingPointError.__name__

    def __str__(self) -> str:
        run = self.job.run
        return f"{run.name} with seed {run.seed} failed: {self.message}"


class RunsFailed(RuntimeError):
    """At least one run failed. The other runs were finished first."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        super().__init__("; ".join(map(str, failures)))
        self.failures = tuple(failures)


@dataclass(frozen=True, slots=True)
class _Notice:
    """A warning from the process of a run."""

    level: int
    text: str


class _Notices:
    """Logs the warnings of all runs in this process. (The runs' own processes would write into the live table.)

    A warning is not repeated if it differs only in its numbers from an earlier one of the same recipe and task.
    """

    def __init__(self) -> None:
        self._given: set[tuple[str, str, str]] = set()

    def give(self, run: Config, notice: _Notice) -> None:
        """Log a warning of this run."""
        key = run.task, run.name, re.sub(r"[\d.,]+", "#", notice.text)
        if key not in self._given:
            self._given.add(key)
            log.log(notice.level, "%s with seed %d: %s", run.name, run.seed, notice.text)


def processes_at_once(processes: int | None) -> int:
    """The number of parallel processes. None: one per core.

    Raises:
        ValueError: the number is below 1.
    """
    if processes is not None and processes < 1:
        raise ValueError(f"processes must be at least 1, or None for one per core, got {processes}")
    return processes or os.cpu_count() or 1


def carry_out(
    jobs: Iterable[Job],
    processes: int,
    stop: StopRequest,
    ended: Callable[[Job, Failure | None], object],
    watch: Callable[[Sequence[Job]], object],
    *,
    overwrite: bool = False,
) -> None:
    """Carry out runs, in their order, until none is left or a stop is requested.

    A run with a checkpoint in its folder continues from it. If a process gives no signs of life, a warning is logged.

    Args:
        jobs: the runs.
        processes: number of runs at a time, at least 1.
        stop: after it is requested, active runs are saved and no more runs are started.
        ended: called when a run has ended, with its failure or None.
        watch: called about twice a second with the active runs.
        overwrite: True: first remove the files of other runs in the runs' folders.
    """
    waiting = iter(jobs)
    workers: list[_Worker] = []
    notices, stop_requested = _Notices(), False
    try:
        while True:
            busy = [worker for worker in workers if worker.job is not None]
            while stop.by is None and len(busy) < processes and (job := next(waiting, None)):
                idle = next((worker for worker in workers if worker.job is None), None)
                if idle is None:
                    idle = _Worker(overwrite, notices)
                    workers.append(idle)
                idle.give(job)
                busy.append(idle)
            if not busy:
                return
            wait([worker.spawned.connection for worker in busy], timeout=_LOOKS_S)
            for worker in busy:
                if (outcome := worker.hear(replace=not stop_requested)) and not stop_requested:
                    ended(*outcome)
            if stop.by is not None and not stop_requested:
                stop_requested = True
                for worker in workers:
                    worker.ask_to_stop()
            watch([worker.job for worker in busy if worker.job is not None])
    finally:
        for worker in workers:
            worker.spawned.end()


class _Worker:
    """A process that carries out one run after another."""

    def __init__(self, overwrite: bool, notices: _Notices) -> None:
        self.overwrite, self.notices = overwrite, notices
        self.job: Job | None = None  # current run
        self._start()

    def _start(self) -> None:
        self.spawned = Spawned(_work, self.overwrite, name="rollalloc run")
        # `_signed` is the time of the last sign of life; `_said` is whether a warning about silence was logged.
        self._signed, self._said = time.monotonic(), False

    def give(self, job: Job) -> None:
        """Start a run in this process."""
        self.job, self._signed = job, time.monotonic()
        try:
            self.spawned.connection.send((job.run, job.place))
        except OSError:  # the process died between two runs, so no run was lost
            self._start()
            self.spawned.connection.send((job.run, job.place))

    def ask_to_stop(self) -> None:
        """Ask the process to finish its batch, save the run and end the run."""
        self.spawned.process.terminate()

    def hear(self, *, replace: bool = True) -> tuple[Job, Failure | None] | None:
        """The run that just ended, and its failure if it failed; None while it runs.

        Args:
            replace: True: if this process died, start another one.
        """
        if self.job is None:
            return None
        # Check this first: if the process is dead now, everything that it sent is already in the pipe.
        alive = self.spawned.process.is_alive()
        try:
            while self.spawned.connection.poll():
                message = self.spawned.connection.recv()
                if isinstance(message, _Notice):
                    self.notices.give(self.job.run, message)
                elif message != _AT_WORK:
                    return self._ended(message)
                self._signed, self._said = time.monotonic(), False
            if alive:
                self._warn_of_silence()
                return None
        except (EOFError, OSError):  # the process died; its pipe is closed or reset
            pass
        error = ("", f"its process died with exit code {self.spawned.end(_GRACE_S)}")
        if replace:
            self._start()
        return self._ended(error)

    def _ended(self, error: tuple[str, str] | None) -> tuple[Job, Failure | None]:
        assert self.job is not None
        job, self.job = self.job, None
        return job, None if error is None else Failure(job, *error)

    def _warn_of_silence(self) -> None:
        """Warn of a process that was suspended (SIGSTOP) or gets no CPU time, because nothing else would report it."""
        silent_s = time.monotonic() - self._signed
        if self.job is not None and silent_s > _SILENT_S and not self._said:
            self._said = True
            run, pid = self.job.run, self.spawned.process.pid
            log.warning(
                "%s with seed %d: its process (%d) has not responded for %.0f s; if it was stopped, "
                "kill -CONT %d continues it; kill -KILL %d gives up this run",
                *(run.name, run.seed, pid, silent_s, pid, pid),
            )


def _work(connection: Connection, overwrite: bool) -> None:
    # A terminal sends SIGHUP, like Ctrl-C, to all processes. Only the parent may decide when a run ends.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sending = threading.Lock()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    threading.Thread(target=_give_signs, args=(connection, sending), daemon=True).start()
    logging.basicConfig(level=logging.WARNING, handlers=[_ToParent(connection, sending)], force=True)
    one_thread()
    while True:
        try:
            run, place = connection.recv()
        except EOFError:  # the parent has no more runs for this process
            return
        error = None
        try:
            is_begun = is_run_in(run, place)
            train(run, place, resume=is_begun, overwrite=overwrite and not is_begun)
        except Exception as raised:
            error = (type(raised).__name__, told(raised))
        with sending:
            connection.send(error)


class _ToParent(logging.Handler):
    """Sends the log records of this process to the parent."""

    def __init__(self, connection: Connection, sending: threading.Lock) -> None:
        super().__init__()
        self._connection, self._sending = connection, sending

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError), self._sending:  # without a parent, this process ends soon
            self._connection.send(_Notice(record.levelno, record.getMessage()))


def _give_signs(connection: Connection, sending: threading.Lock) -> None:
    while True:
        time.sleep(_SIGN_S)
        try:
            with sending:
                connection.send(_AT_WORK)
        except OSError:  # the parent is gone
            return


def _end_with_parent() -> None:
    """End this process when its parent ends. Otherwise it would write into the folders of the next comparison."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
