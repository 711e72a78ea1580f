"""A process a core, each of which carries out one run after the other; one that dies costs the run it was at."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
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
_GRACE_S = 5.0  # between a process's last word and its exit code


@dataclass(frozen=True, slots=True)
class Job:
    """A run and the folder that it is carried out in."""

    run: Run
    place: Path


@dataclass(frozen=True, slots=True)
class Failure:
    """A run that did not come to its end.

    Attributes:
        job: it.
        kind: class of the exception; "" where its process died.
        message: what went wrong.
    """

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
    """Some runs failed; the others were finished first.

    Args:
        failures: at least one.
    """

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


def carry_out(
    agenda: Agenda,
    processes: int,
    stop: StopRequest,
    watch: Callable[[Sequence[Job]], None],
    *,
    overwrite: bool = False,
) -> None:
    """Have the runs of an agenda carried out, until there is none or it is asked to stop.

    A run that has a checkpoint in its folder goes on from it.

    Args:
        agenda: asked whenever a process is free.
        processes: at a time, at least 1.
        stop: looked at; the runs at work are saved then, and nothing more is begun.
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

    def give(self, job: Job) -> None:
        """Let it carry out a run."""
        self.job = job
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
        connection, process = self.spawned.connection, self.spawned.process
        if self.job is None or not (connection.poll() or not process.is_alive()):
            return None
        job, self.job = self.job, None
        try:
            if not connection.poll():
                raise EOFError  # which what it forked may keep from coming
            error = connection.recv()
        except (EOFError, OSError):  # the other end may be reset rather than closed
            error = ("", f"its process died with exit code {self.spawned.end(_GRACE_S)}")
            if replace:
                self._start()
        return job, None if error is None else Failure(job, *error)


def _work(connection: Connection, overwrite: bool) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as Ctrl-C, which is unheard, it reaches all of a terminal
    threading.Thread(target=_end_with_parent, daemon=True).start()
    one_thread()
    while True:
        try:
            run, place = connection.recv()
        except EOFError:  # the comparison is over
            return
        try:
            is_begun = run.is_in(place)
            execute(run, place, resume=is_begun, overwrite=overwrite and not is_begun)
            connection.send(None)
        except Exception as error:
            kind = type(error).__name__
            connection.send((kind, f"{kind}: {error}"))


def _end_with_parent() -> None:
    """A comparison that is killed must not leave runs behind: they would write beside those of the next one."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
