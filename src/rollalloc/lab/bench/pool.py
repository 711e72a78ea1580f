"""A process a core, each of which carries out one run after the other; one that dies costs the run it was at."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Protocol

from rollalloc.processes.spawned import Spawned
from rollalloc.processes.stopping import StopRequest
from rollalloc.train.description import Run
from rollalloc.train.execution import execute, one_thread

_LOOKS_S = 0.5  # how often it is looked at what the runs are doing
_SIGN_S = 5.0  # between two signs of life of a process
_SILENT_S = 60.0  # without one, after which that is said
_GRACE_S = 5.0  # between a process's last word and its exit code
_AT_WORK = "at work"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """A run and the folder that it is carried out in."""

    run: Run
    place: Path


@dataclass(frozen=True, slots=True)
class Failure:
    """A run that did not come to its end: `kind` is the class of the exception, "" where its process died."""

    job: Job
    kind: str
    message: str

    @property
    def is_the_runs(self) -> bool:
        """Whether the run itself led there, its weights having diverged, so that it would fail again."""
        return self.kind == FloatingPointError.__name__

    def __str__(self) -> str:
        run = self.job.run
        return f"{run.name} with seed {run.settings.seed} failed: {self.message}"


class Failed(RuntimeError):
    """Some runs failed, at least one; the others were finished first."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        super().__init__("; ".join(map(str, failures)))
        self.failures = tuple(failures)


class Agenda(Protocol):
    """Which runs there are to do; what comes next may depend on how others ended."""

    def next(self) -> Job | None:
        """What to begin now; None: nothing, before another run has ended."""
        ...

    def ended(self, job: Job, failure: Failure | None) -> None:
        """A run is over."""
        ...


def processes_at_once(given: int | None) -> int:
    """How many processes there are at a time, one a core where it is not said.

    Raises:
        ValueError: less than one.
    """
    if given is not None and given < 1:
        raise ValueError(f"processes must be at least 1, or None for one a core, got {given}")
    return given or os.cpu_count() or 1


def carry_out(
    agenda: Agenda,
    processes: int,
    stop: StopRequest,
    watch: Callable[[Sequence[Job]], object],
    *,
    overwrite: bool = False,
) -> None:
    """Have the runs of an agenda carried out, until there is none or it is asked to stop.

    A run that has a checkpoint in its folder goes on from it. A process that gives no sign of life is named in a warning.

    Args:
        agenda: asked whenever a process is free.
        processes: at a time, at least 1.
        stop: once it is made, the runs at work are saved, and nothing more is begun.
        watch: called about twice a second with the runs at work.
        overwrite: remove what another run wrote in a run's folder.
    """
    workers: list[_Worker] = []
    asked = False
    try:
        while True:
            while stop.by is None and _has_room(workers, processes) and (job := agenda.next()):
                _free(workers, overwrite).give(job)
            if not (busy := [worker for worker in workers if worker.job is not None]):
                return
            wait([worker.spawned.connection for worker in busy], timeout=_LOOKS_S)
            for worker in busy:
                if (ended := worker.hear(replace=not asked)) and not asked:
                    agenda.ended(*ended)
            if stop.by is not None and not asked:
                asked = True
                for worker in workers:
                    worker.ask_to_stop()
            watch([worker.job for worker in busy if worker.job is not None])
    finally:
        for worker in workers:
            worker.spawned.end()


def _has_room(workers: Sequence[_Worker], processes: int) -> bool:
    return sum(worker.job is not None for worker in workers) < processes


def _free(workers: list[_Worker], overwrite: bool) -> _Worker:
    """A worker without a run; a new one where all have one."""
    for worker in workers:
        if worker.job is None:
            return worker
    workers.append(_Worker(overwrite))
    return workers[-1]


class _Worker:
    """A process that carries out one run after the other."""

    def __init__(self, overwrite: bool = False) -> None:
        self.overwrite = overwrite
        self.job: Job | None = None  # that it is at
        self._start()

    def _start(self) -> None:
        self.spawned = Spawned(_work, self.overwrite, name="rollalloc run")
        self._signed, self._said = time.monotonic(), False  # when it last gave a sign of life; whether silence was said

    def give(self, job: Job) -> None:
        """Let it carry out a run."""
        self.job, self._signed = job, time.monotonic()
        try:
            self.spawned.connection.send((job.run, job.place))
        except OSError:  # it died between two runs, and costs none
            self._start()
            self.spawned.connection.send((job.run, job.place))

    def ask_to_stop(self) -> None:
        """Let it finish its batch, save and leave the run."""
        self.spawned.process.terminate()

    def hear(self, *, replace: bool = True) -> tuple[Job, Failure | None] | None:
        """The run it was at, and what went wrong with it, once that has ended; None before.

        Args:
            replace: start another process where it died.
        """
        if self.job is None:
            return None
        alive = self.spawned.process.is_alive()  # asked first: what it sent before its end is in the pipe then
        try:
            while self.spawned.connection.poll():
                if (message := self.spawned.connection.recv()) != _AT_WORK:
                    return self._ended(message)
                self._signed, self._said = time.monotonic(), False
            if alive:
                self._warn_of_silence()
                return None
        except (EOFError, OSError):  # the other end may be reset rather than closed
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
        """One that was stopped (SIGSTOP), or for which the machine has no time, would else be waited for without a word."""
        silent_s = time.monotonic() - self._signed
        if self.job is not None and silent_s > _SILENT_S and not self._said:
            self._said = True
            run, pid = self.job.run, self.spawned.process.pid
            log.warning(
                "%s with seed %d: its process (%d) has given no sign of life for %.0f s; where it was stopped, "
                "kill -CONT %d lets it go on, and kill -KILL %d gives this run up",
                *(run.name, run.settings.seed, pid, silent_s, pid, pid),
            )


def _work(connection: Connection, overwrite: bool) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as Ctrl-C, which is unheard, it reaches all of a terminal
    sending = threading.Lock()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    threading.Thread(target=_give_signs, args=(connection, sending), daemon=True).start()
    one_thread()
    while True:
        try:
            run, place = connection.recv()
        except EOFError:  # the comparison is over
            return
        error = None
        try:
            is_begun = run.is_in(place)
            execute(run, place, resume=is_begun, overwrite=overwrite and not is_begun)
        except Exception as raised:
            kind = type(raised).__name__
            error = (kind, f"{kind}: {raised}")
        with sending:
            connection.send(error)


def _give_signs(connection: Connection, sending: threading.Lock) -> None:
    while True:
        time.sleep(_SIGN_S)
        try:
            with sending:
                connection.send(_AT_WORK)
        except OSError:  # nobody listens any more
            return


def _end_with_parent() -> None:
    """A comparison that is killed must not leave runs behind: they would write beside those of the next one."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
