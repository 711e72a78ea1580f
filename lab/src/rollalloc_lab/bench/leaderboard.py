"""Run a leaderboard. It can be interrupted and resumed at any time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollalloc.compare.compare import is_finished, standing
from rollalloc.compare.pool import Failure, Job, RunsFailed, carry_out, processes_at_once
from rollalloc.files.claims import Claims, Lock
from rollalloc.files.regular import write_text
from rollalloc.processes.stopping import Stopped, StopRequest
from rollalloc.runs.reader import newest_line
from rollalloc.runs.recorded import RecordedRun, share_done
from rollalloc.runs.values import parsed
from rollalloc.tasks.presets import DEFAULT_OPTIMIZER, task_run
from rollalloc.train.config import Config, folder_of
from rollalloc.train.store import RunFolder
from rollalloc_lab.bench.plan import DIVERGED, KIND, Contestant, Plan, TaskPlan, freeze
from rollalloc_lab.bench.tiers import seconds_of


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a leaderboard.

    `seconds` is process time without evaluation. `share` is the share of the estimated work that is done, in [0, 1].
    """

    over: int
    runs: int
    rollouts: int
    seconds: float
    share: float
    at_work: Sequence[tuple[Config, RecordedRun]]


Watcher = Callable[[Progress], None]


def run_leaderboard(
    plan: Plan,
    folder: Path,
    tasks: Path,
    *,
    processes: int | None = None,
    watcher: Watcher | None = None,
) -> None:
    """Run a plan, or the rest of it.

    Args:
        plan: the plan, which must be frozen in the folder; see `rollalloc_lab.bench.plan.freeze`.
        folder: folder of the leaderboard, for the plan and a folder for each run.
        tasks: folder where built-in tasks are created and kept.
        processes: number of runs at a time, at least 1. None: one per core.
        watcher: called about twice a second with the progress.

    Raises:
        ValueError: `processes` is below 1, or the folder has another plan.
        FileExistsError: files that are not ours have names that the leaderboard needs.
        InUse: another leaderboard is running in the folder.
        Stopped: SIGTERM, SIGINT (Ctrl-C) or SIGHUP stopped it. Active runs were saved, and the same call continues them.
        RunsFailed: a run failed. The others were finished first. (A run that diverges has not failed: it is a result.)
    """
    at_once, stop = processes_at_once(processes), StopRequest()
    Claims(folder, KIND).refuse_taken()
    with Lock(folder, KIND):
        freeze(plan, folder)
        work = _Work(plan, folder, tasks)  # not under `stop.heard`, so that Ctrl-C ends the creation of tasks at once
        with stop.heard():
            carry_out(
                work.waiting, at_once, stop, work.ended, lambda at_work: watcher and watcher(work.progress(at_work))
            )
    if stop.by is not None:
        raise Stopped(
            f"stopped by {stop.by.name} with {work.over} of {plan.runs} runs done; finished and started runs are saved in "
            f"{folder}, and the same command continues",
            stop.by,
        )
    if work.failures:
        raise RunsFailed(work.failures)


def diverged_in(folder: Path) -> dict[str, str]:
    """The runs of a leaderboard whose weights diverged: the error message by the run's folder.

    Raises:
        ValueError: the file that records them is damaged.
    """
    path = folder / DIVERGED
    if DIVERGED not in Claims(folder, KIND).names() or not path.exists():
        return {}
    try:
        return parsed(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} does not say which runs diverged ({error}); it is damaged: remove it") from None


class _Work:
    """The runs of a plan: waiting runs, ended runs, and the total costs of the ended runs.

    Attributes:
        waiting: runs to do, sorted by task and then by seed. For each seed, the runs of all methods come together, so
            that an interrupted leaderboard has nearly the same seeds for all methods.
        failures: failed runs that may succeed if they are repeated.
        over: number of runs that have ended.
    """

    def __init__(self, plan: Plan, folder: Path, tasks: Path) -> None:
        self.plan, self.folder = plan, folder
        self.waiting: list[Job] = []
        self.failures: list[Failure] = []
        self.over, self._rollouts, self._seconds, self._share = 0, 0, 0.0, 0.0
        self._diverged = diverged_in(folder)
        for task in plan.tasks:
            base = _base(task, tasks)
            for seed in plan.seeds_of(task):
                for contestant in plan.contestants:
                    self._list(_run(base, contestant, plan.rate_of(task), seed))

    def _list(self, run: Config) -> None:
        job = Job(run, folder_of(run, self.folder))
        if self._name(job) in self._diverged or is_finished(run, job.place):
            self._count(job)
        else:
            self.waiting.append(job)

    def ended(self, job: Job, failure: Failure | None) -> None:
        """Count a run that has ended."""
        if failure is not None and not failure.is_the_runs:
            self.failures.append(failure)
            return
        if failure is not None:
            self._diverged[self._name(job)] = failure.message
            write_text(self.folder / DIVERGED, json.dumps(self._diverged, indent=1))
        self._count(job)

    def progress(self, at_work: Sequence[Job]) -> Progress:
        """The progress while these runs are active."""
        now = [(job.run, standing(job.run, job.place)) for job in at_work]
        begun = sum(self._part(job.run) * (share_done(run) or 0.0) for job, (_, run) in zip(at_work, now, strict=True))
        paid = self._rollouts + sum(run.paid for _, run in now)
        return Progress(self.over, self.plan.runs, paid, self._seconds, min(1.0, self._share + begun), now)

    def _count(self, job: Job) -> None:
        """Record that a run is over, and delete its weights. (Thousands of models would fill a disk.)"""
        with RunFolder(job.place) as place:
            place.slim()
        self.over += 1
        self._share += self._part(job.run)
        if (last := newest_line(job.place)) is not None:
            self._rollouts += last["rollouts_paid"]
            self._seconds += last["seconds"]

    def _name(self, job: Job) -> str:
        return job.place.relative_to(self.folder).as_posix()

    def _part(self, run: Config) -> float:
        """A run's share of the estimated work."""
        return seconds_of(run.task, run.max_rollouts or 0) / self.plan.seconds


def _run(base: Config, contestant: Contestant, rate: float, seed: int) -> Config:
    """A method's run on a task. It spends its whole budget, and does not stop at the target."""
    return replace(
        base,
        recipe=contestant.recipe,
        parameters=dict(contestant.parameters),
        label=contestant.label,
        seed=seed,
        learning_rate=rate,
        target=None,
        **DEFAULT_OPTIMIZER,
    )


def _base(task: TaskPlan, tasks: Path) -> Config:
    """A run on a task, with placeholders for recipe and seed. The task's files are created if they are missing."""
    changes: dict[str, Any] = {"eval_every": task.eval_every, "eval_samples": task.eval_samples, "keep_checkpoints": 1}
    run = task_run(task.name, "grpo", 0, tasks, target=None, **changes)
    return replace(run, max_rollouts=task.budget)
