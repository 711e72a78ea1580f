"""Carry out a leaderboard: the searches, then the final runs with the settings they chose; resumes wherever it stopped."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollalloc.files.atomic import write_text
from rollalloc.files.claims import Claims, Lock
from rollalloc.files.opening import read_text
from rollalloc.lab.bench.compare import is_finished, standing
from rollalloc.lab.bench.contestants import Contestant
from rollalloc.lab.bench.plan import DIVERGED, KIND, Plan, TaskPlan, freeze, frozen_in, settings_file
from rollalloc.lab.bench.pool import Failure, Job, RunsFailed, carry_out, processes_at_once
from rollalloc.lab.bench.presets import DEFAULT_OPTIMIZER, Tuned, task_run
from rollalloc.lab.bench.search import Search, Trial
from rollalloc.lab.bench.summary import ended
from rollalloc.lab.bench.tiers import seconds_of
from rollalloc.processes.stopping import Stopped, StopRequest
from rollalloc.runs.reader import newest_line
from rollalloc.runs.recorded import RecordedRun, share_done
from rollalloc.train.config import Config
from rollalloc.train.folder import RunFolder
from rollalloc.train.run_json import folder_of


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a leaderboard.

    `seconds` is process time without evaluation; `share` is the share of the estimated work that is done, in [0, 1].
    """

    over: int
    runs: int
    rollouts: int
    seconds: float
    share: float
    at_work: Sequence[tuple[Config, RecordedRun]]


Watcher = Callable[[Progress], None]
BaseOf = Callable[[TaskPlan, Path], Config]


def run_leaderboard(
    plan: Plan,
    folder: Path,
    tasks: Path,
    *,
    processes: int | None = None,
    watcher: Watcher | None = None,
    base_of: BaseOf | None = None,
    stop: StopRequest | None = None,
) -> None:
    """Carry out a plan, or the rest of it.

    Args:
        plan: frozen in the folder before the first run; see `rollalloc.lab.bench.plan.freeze`.
        folder: gets a folder for each run, the plan and the settings that were found.
        tasks: where built-in tasks are created and kept.
        processes: at a time, at least 1; by default one per core.
        watcher: called about twice a second.
        base_of: (a task of the plan, `tasks`) → a run on it, whose recipe, seed and setting are replaced; None: that of a
            built-in task.
        stop: request to stop, which the caller may also make.

    Raises:
        ValueError: no process; the folder has another plan.
        FileExistsError: files that are not ours are in the way.
        InUse: another leaderboard is at work in the folder.
        Stopped: SIGTERM, SIGINT (Ctrl-C) or SIGHUP came; active runs were saved, and the same call continues them.
        Failed: a run failed, other than by diverging, which counts as a result; the others were finished first.
    """
    at_once = processes_at_once(processes)
    stop = stop or StopRequest()
    Claims(folder, KIND).refuse_taken()
    with Lock(folder, KIND):
        freeze(plan, folder)
        agenda = _Agenda(plan, folder, tasks, base_of or _base)  # may create tasks, which Ctrl-C interrupts at once
        with stop.heard():
            carry_out(agenda, at_once, stop, lambda at_work: watcher and watcher(agenda.progress(at_work)))
            agenda.save_settings()
    if stop.by is not None:
        raise Stopped(
            f"stopped by {stop.by.name} with {agenda.over} of {plan.runs} runs done; finished and started runs are saved in "
            f"{folder}, and the same command continues",
            stop.by,
        )
    if agenda.failures:
        raise RunsFailed(agenda.failures)


def diverged_in(folder: Path) -> dict[str, str]:
    """The runs of a leaderboard whose weights diverged: folder → error message.

    Raises:
        ValueError: the file that records them is damaged.
    """
    path = folder / DIVERGED
    if DIVERGED not in Claims(folder, KIND).names() or not path.exists():
        return {}
    try:
        reasons = json.loads(read_text(path))
    except (ValueError, RecursionError):  # also raised for bad UTF-8 and JSON
        reasons = None
    if not isinstance(reasons, dict):
        raise ValueError(f"{path} does not say which runs diverged; it is damaged, or another program wrote it")
    return {str(name): str(why) for name, why in reasons.items()}


class _Agenda:
    """The runs of a plan, in the order of its tasks. What the searches find decides the runs of the tuned track.

    Attributes:
        failures: failed runs that might succeed if repeated.
        over: runs that have ended.
    """

    def __init__(self, plan: Plan, folder: Path, tasks: Path, base_of: BaseOf) -> None:
        self.plan, self.folder = plan, folder
        self.failures: list[Failure] = []
        self.over, self._rollouts, self._seconds, self._share = 0, 0, 0.0, 0.0
        self._diverged = diverged_in(folder)
        self._known: dict[Path, bool] = {}  # folder → whether its run is over, for all runs checked so far
        self._begun: set[Path] = set()
        self._trials: dict[Path, tuple[str, str]] = {}  # folder of a search run → its task and method
        self._total = plan.seconds
        self._bases = {task.name: base_of(task, tasks) for task in plan.tasks}
        self._searches: dict[tuple[str, str], Search] = {}
        self._waiting: deque[Job] = deque()
        for task in plan.tasks:
            self._list(task)

    def next(self) -> Job | None:
        return self._waiting.popleft() if self._waiting else None

    def ended(self, job: Job, failure: Failure | None) -> None:
        if failure is not None and not failure.is_the_runs:
            self.failures.append(failure)
            return
        if failure is not None:
            self._diverged[self._name(job)] = failure.message
            self._write(DIVERGED, self._diverged)
        self._count(job)
        if job.place in self._trials:
            self._waiting.extendleft(reversed(self._tuned(*self._trials[job.place])))

    def progress(self, at_work: Sequence[Job]) -> Progress:
        now = [(job.run, standing(job.run, job.place)) for job in at_work]
        begun = sum(self._part(job.run) * (share_done(run) or 0.0) for job, (_, run) in zip(at_work, now, strict=True))
        paid = self._rollouts + sum(run.paid for _, run in now)
        return Progress(self.over, self.plan.runs, paid, self._seconds, min(1.0, self._share + begun), now)

    def save_settings(self) -> None:
        """Write the settings found for each task, in the format of this package's `tuned/TASK.json`."""
        for task in self.plan.tasks:
            settings = {
                label: self._found(label, search)
                for (name, label), search in self._searches.items()
                if name == task.name and search.found is not None
            }
            if settings:
                last = self.plan.search[-1]
                self._write(
                    settings_file(task.name),
                    {
                        "task": task.name,
                        "date": frozen_in(self.folder)[1],
                        "budget": last.budget(task.budget),
                        "seeds": list(last.seeds),
                        "recipes": settings,
                    },
                )

    # ---------------------------------------------------------------------------------------------------- what there is

    def _list(self, task: TaskPlan) -> None:
        for contestant in self.plan.contestants if "tuned" in self.plan.tracks else ():
            search = Search(self.plan.search, task.budget, task.target, self._trial(task, contestant))
            self._searches[task.name, contestant.label] = search
            self._waiting += self._tuned(task.name, contestant.label)
        finals = [
            job
            for contestant in self.plan.contestants
            if contestant.defaults is not None and "defaults" in self.plan.tracks
            for job in self._finals(
                "defaults", task, contestant, Tuned(contestant.defaults, self.plan.rate_of(task), DEFAULT_OPTIMIZER)
            )
        ]
        # Seed by seed, so that an interrupted leaderboard has the same seeds for all methods.
        self._waiting += sorted(finals, key=lambda job: job.run.seed)

    def _tuned(self, name: str, label: str) -> list[Job]:
        """The next runs of a method on a task in the tuned track that are known by now and were not returned before."""
        search = self._searches[name, label]
        if todo := search.advance(self._is_over, self._trial_of):
            self._trials |= {job.place: (name, label) for job in todo}
            return self._new(todo)
        task = next(task for task in self.plan.tasks if task.name == name)
        contestant = next(contestant for contestant in self.plan.contestants if contestant.label == label)
        assert search.found is not None
        return self._finals("tuned", task, contestant, _tuned(contestant, search.found))

    def _finals(self, track: str, task: TaskPlan, contestant: Contestant, setting: Tuned) -> list[Job]:
        """The final runs that are still to do. They do not stop at the target, but when their budget is spent."""
        runs = [self._run(task, contestant, setting, seed, target=None) for seed in self.plan.seeds_of(track, task)]
        return self._new([Job(run, folder_of(run, self.folder / track)) for run in runs])

    def _new(self, jobs: Sequence[Job]) -> list[Job]:
        """Those that are neither over nor started."""
        new = [job for job in jobs if not self._is_over(job) and job.place not in self._begun]
        self._begun |= {job.place for job in new}
        return new

    def _is_over(self, job: Job) -> bool:
        if job.place not in self._known:
            self._known[job.place] = False
            if self._name(job) in self._diverged or is_finished(job.run, job.place):
                self._count(job)
        return self._known[job.place]

    def _name(self, job: Job) -> str:
        return job.place.relative_to(self.folder).as_posix()

    def _count(self, job: Job) -> None:
        """Record that a run is over, and delete its weights: thousands of models would fill a disk."""
        with RunFolder(job.place) as place:
            place.slim()
        self._known[job.place] = True
        self.over += 1
        self._share += self._part(job.run)
        if (last := newest_line(job.place)) is not None:
            self._rollouts += last["rollouts_paid"]
            self._seconds += last["seconds"]

    def _part(self, run: Config) -> float:
        """A run's share of the estimated work."""
        return seconds_of(run.task, run.max_rollouts or 0) / self._total

    def _trial_of(self, job: Job) -> Trial | None:
        """The result of a finished search run; None if its weights diverged."""
        if self._name(job) in self._diverged or (run := ended(job.run, job.place)) is None:
            return None
        return Trial(run.curve, run.last["accuracy"] or 0.0)

    # ------------------------------------------------------------------------------------------------------------- runs

    def _trial(self, task: TaskPlan, contestant: Contestant) -> Callable[[int, int, int], Job]:
        """(rung, setting, seed) → a run of the search; it stops at the target."""

        def job_of(rung: int, setting: int, seed: int) -> Job:
            tuned = _tuned(contestant, setting)
            run = self._run(task, contestant, tuned, seed, target=task.target)
            budget = self.plan.search[rung].budget(task.budget)
            run = replace(run, max_rollouts=budget, label=f"{contestant.label}-{setting + 1}")
            return Job(run, folder_of(run, self.folder / "tuning" / f"rung-{rung + 1}"))

        return job_of

    def _run(self, task: TaskPlan, contestant: Contestant, setting: Tuned, seed: int, target: float | None) -> Config:
        base = self._bases[task.name]
        return replace(
            base,
            recipe=contestant.recipe,
            parameters=dict(setting.parameters),
            label=contestant.label,
            seed=seed,
            learning_rate=setting.learning_rate,
            target=target,
            **setting.optimizer,
        )

    def _found(self, label: str, search: Search) -> dict[str, Any]:
        contestant = next(contestant for contestant in self.plan.contestants if contestant.label == label)
        assert search.found is not None
        tried = {"costs": search.costs(self._trial_of), "settings_tried": search.rungs[0].settings}
        return {**contestant.grid[search.found], "optimizer": dict(DEFAULT_OPTIMIZER), **tried}

    def _write(self, name: str, value: Any) -> None:
        write_text(self.folder / name, json.dumps(value, indent=1))


def _tuned(contestant: Contestant, number: int) -> Tuned:
    setting = contestant.grid[number]
    return Tuned(setting["parameters"], setting["learning_rate"], DEFAULT_OPTIMIZER)


def _base(task: TaskPlan, tasks: Path) -> Config:
    """A run on a task, whose files are created if missing; recipe, seed and setting are placeholders."""
    changes: dict[str, Any] = {"eval_every": task.eval_every, "eval_samples": task.eval_samples, "keep_checkpoints": 1}
    run = task_run(task.name, "grpo", 0, tasks, target=None, **changes)
    return replace(run, max_rollouts=task.budget)
