"""Carry out a comparison: one process per run, then a summary of the costs of each run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollalloc.compare.pool import Failure, Job, RunsFailed, carry_out, processes_at_once
from rollalloc.files.claims import Claims, Lock, refuse_foreign
from rollalloc.files.names import METRICS
from rollalloc.files.regular import write_text
from rollalloc.processes.stopping import Stopped, StopRequest
from rollalloc.runs.cost import COSTS, cost_to_target, curve_of, whole_curve_of
from rollalloc.runs.reader import newest_line, newest_lines, read_metrics, read_run
from rollalloc.runs.recorded import RecordedRun
from rollalloc.train.config import OF_DATA_AND_REWARD, Config, folder_of, is_described_in, is_run_in
from rollalloc.train.loading import CheckedRun, check_run
from rollalloc.train.store import RunFolder

RESULTS = "results.json"
_REMEDY = "give another folder (--out), or move it away"
_OTHER_SETTINGS = (
    "its settings or data are others than this command's: give those of the run to reuse it, replace it (--overwrite), or "
    "give another folder (--out)"
)
# Called with each run and the state read from its folder.
Watcher = Callable[[Sequence[tuple[Config, RecordedRun]]], None]


def compare(
    runs: Sequence[Config],
    folder: Path,
    *,
    processes: int | None = None,
    watcher: Watcher | None = None,
    overwrite: bool = False,
) -> list[dict[str, Any]]:
    """Carry out runs, one process each, and write `results.json`.

    A finished run in the folder is not repeated if its description and the contents of its files are unchanged. An
    unfinished run continues from its checkpoint.

    Args:
        runs: the runs, each with a distinct combination of task, name and seed.
        folder: gets a folder for each run, and `results.json`.
        processes: number of runs at a time, at least 1; by default one per core.
        watcher: called about twice a second.
        overwrite: delete files that other runs wrote into these folders, as listed in their manifests.

    Returns:
        The contents of `results.json`: a result for each run, in order.

    Raises:
        ValueError: two runs have the same task, name and seed, or `processes` is below 1.
        FileExistsError: the folder holds other runs that are not to be overwritten, or files that are not ours.
        InUse: another comparison is at work in the folder.
        Stopped: SIGTERM, SIGINT (Ctrl-C) or SIGHUP came; active runs were saved, and the same call continues them.
        Failed: a run failed, or its process died. The other runs were finished first, and their results are written.
    """
    at_once = processes_at_once(processes)
    Claims(folder, "comparison").refuse_taken(beside="run")
    places = {folder_of(run, folder): run for run in runs}
    if len(places) < len(runs):
        names = [folder_of(run, folder).name for run in runs]
        raise ValueError(f"each run needs a name and seed of its own, got {names}")
    todo = {place: run for place, run in places.items() if not is_finished(run, place)}
    for place, run in todo.items():
        if not is_run_in(run, place):
            RunFolder(place).check(overwrite=overwrite, remedy=_OTHER_SETTINGS)
    claims, stop = Claims(folder, "comparison"), StopRequest()
    refuse_foreign(folder, claims.foreign_files([RESULTS]), _REMEDY)
    failures: list[Failure] = []
    if todo:
        with Lock(folder, "comparison"), stop.heard():
            claims.add([RESULTS])
            failures = _carry_out(todo, places, at_once, watcher, overwrite, stop)
    finished = [(run, place) for place, run in places.items() if is_finished(run, place)]
    results = [result_of(run, read_metrics(place / METRICS)) for run, place in finished]
    if finished:
        claims.add([RESULTS])
        write_text(folder / RESULTS, json.dumps(results, indent=2))
    if stop.by is not None:
        left = len(runs) - len(finished)
        raise Stopped(
            f"stopped by {stop.by.name} with {left} of {len(runs)} runs to go; finished and started runs are saved in "
            f"{folder}, and the same command continues",
            stop.by,
        )
    if failures:
        raise RunsFailed(failures)
    return results


def check_places(runs: Sequence[Config], folder: Path) -> None:
    """Refuse a folder if a file that is not ours has a name that a run needs. Nothing is changed.

    Raises:
        FileExistsError: there is such a file; the message names it.
        InUse: another process is writing there.
    """
    claims = Claims(folder, "comparison")
    claims.refuse_taken(beside="run")
    refuse_foreign(folder, claims.foreign_files([RESULTS]), _REMEDY)
    for run in runs:
        with RunFolder(folder_of(run, folder)) as place:
            # Accept our own runs here. They are compared with the new runs later, when the data of the new runs is known.
            place.check(overwrite=True)


def check_runs(runs: Sequence[Config], folder: Path) -> None:
    """Raise an error, before any run starts, if a run is impossible. Finished runs in the folder are not checked.

    Raises:
        ValueError, OSError, ImportError: for the same reasons as in `rollalloc.train.loading.check_run`.
    """
    checked: dict[tuple[Any, ...], CheckedRun] = {}
    for run in runs:
        if not is_finished(run, folder_of(run, folder)):
            data = tuple(getattr(run, name) for name in OF_DATA_AND_REWARD)
            checked[data] = check_run(run, checked.get(data))


def _carry_out(
    todo: Mapping[Path, Config],
    places: Mapping[Path, Config],
    processes: int,
    watcher: Watcher | None,
    overwrite: bool,
    stop: StopRequest,
) -> list[Failure]:
    """Carry out the runs until all are done or a stop is requested; returns the failures."""
    failures: list[Failure] = []
    over: list[Job] = []  # runs that ended since the last check
    known = {} if watcher is None else {place: standing(run, place, whole=True) for place, run in places.items()}

    def ended(job: Job, failure: Failure | None) -> None:
        over.append(job)
        failures.extend([] if failure is None else [failure])

    def watch(at_work: Sequence[Job]) -> None:
        if watcher is not None:
            known.update({job.place: standing(job.run, job.place) for job in (*over, *at_work)})
            watcher([(run, known[place]) for place, run in places.items()])
        over.clear()

    jobs = [Job(run, place) for place, run in todo.items()]
    carry_out(jobs, processes, stop, ended, watch, overwrite=overwrite)
    return failures


def result_of(run: Config, metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Costs and final accuracy of a finished run, from its metrics. The accounts sum to `rollouts_paid`."""
    curve, end = whole_curve_of(metrics), metrics[-1]
    target = run.target
    cost = None if target is None else cost_to_target(curve_of(metrics), target)
    reached = cost is not None and not cost.censored
    return {
        "task": run.task,
        "recipe": run.name,
        "seed": run.seed,
        "reached": reached,
        **{f"{name}_to_target": round(cost.paid[name], 3) if cost and reached else None for name in COSTS},
        "rollouts_paid": end["rollouts_paid"],
        "accounts": end["accounts"],
        "tokens_paid": end["tokens_paid"],
        "seconds": end["seconds"],
        "optimizer_steps_per_batch": run.optimizer_steps_per_batch,
        "learning_rate": run.learning_rate,
        "parameters": dict(run.parameters),
        "target": target,
        "accuracy": curve.accuracy[-1] if curve.accuracy else None,
        "breadth": next((line.get("breadth") for line in reversed(metrics) if line["kind"] == "eval"), None),
        "standard_error": curve.standard_error[-1] if curve.accuracy else None,
        "why": end["why"],
    }


def is_finished(run: Config, folder: Path) -> bool:
    """Whether the folder holds exactly this run, finished."""
    last = newest_line(folder)
    return last is not None and last["kind"] == "end" and is_run_in(run, folder)


def standing(run: Config, folder: Path, *, whole: bool = False) -> RecordedRun:
    """The state of a run. Files that another run left in its folder are ignored.

    Args:
        whole: read all metrics instead of the newest lines, to get the earlier evaluations too.
    """
    if not is_described_in(run, folder):
        lines = list[dict[str, Any]]()
    else:
        lines = list(read_run(folder).metrics) if whole else newest_lines(folder)
    return RecordedRun(folder, {"max_rollouts": run.max_rollouts}, lines)
