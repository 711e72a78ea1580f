"""Several runs, a process each, and what they paid."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from rollalloc.bench.cost import cost_to_target, curve_of, read_metrics
from rollalloc.bench.runs import Run, execute, folder_of, one_thread

Watcher = Callable[[Sequence[tuple[Run, dict[str, Any] | None]]], None]


def compare(
    runs: Sequence[Run], folder: Path, *, processes: int | None = None, watcher: Watcher | None = None
) -> list[dict[str, Any]]:
    """Carry out runs, a process each, and write `results.json`.

    A run that is finished in the folder, with the same description, is not repeated.

    Args:
        runs: each with a name and a seed that no other run has together.
        folder: gets a folder for each run and `results.json`.
        processes: at a time; one a core by default.
        watcher: called about twice a second with each run and the latest line of its metrics.

    Returns:
        What `results.json` holds: a result for each run, in order.

    Raises:
        ValueError: two runs of the same name and seed.
        RuntimeError: a run failed; the others were finished first.
    """
    places = [folder_of(run, folder) for run in runs]
    if len(set(places)) < len(places):
        raise ValueError(f"each run needs a name and seed of its own, got {[place.name for place in places]}")
    spawn = multiprocessing.get_context("spawn")
    failures: list[str] = []
    with ProcessPoolExecutor(processes or os.cpu_count(), mp_context=spawn, initializer=one_thread) as pool:
        pending = {
            pool.submit(execute, run, place): run
            for run, place in zip(runs, places, strict=True)
            if not is_finished(run, place)
        }
        while pending:
            done, _ = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
            failures += [_failure(pending.pop(future), future) for future in done if future.exception()]
            for future in done:
                pending.pop(future, None)
            if watcher is not None:
                watcher([(run, latest(place)) for run, place in zip(runs, places, strict=True)])
    if failures:
        raise RuntimeError("; ".join(failures))
    results = [result_of(run, read_metrics(place / "metrics.jsonl")) for run, place in zip(runs, places, strict=True)]
    (folder / "results.json").write_text(json.dumps(results, indent=2))
    return results


def result_of(run: Run, metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a finished run paid, from its metrics; the accounts sum to `rollouts_paid`."""
    curve, end = curve_of(metrics), metrics[-1]
    target = run.settings.target
    cost = None if target is None else cost_to_target(curve.rollouts, curve.accuracy, target)
    return {
        "recipe": run.name,
        "seed": run.settings.seed,
        "reached": cost is not None,
        "rollouts_to_target": None if cost is None else round(cost),
        "rollouts_paid": end["rollouts_paid"],
        "accounts": end["accounts"],
        "tokens_paid": end["tokens_paid"],
        "seconds": end["seconds"],
        "optimizer_steps_per_batch": run.settings.optimizer_steps_per_batch,
        "learning_rate": run.settings.learning_rate,
        "parameters": dict(run.parameters),
        "target": target,
        "accuracy": curve.accuracy[-1] if curve.accuracy else None,
        "why": end["why"],
    }


def is_finished(run: Run, folder: Path) -> bool:
    """Whether the folder holds this very run, whole."""
    description, metrics = folder / "run.json", folder / "metrics.jsonl"
    if not (description.exists() and metrics.exists()):
        return False
    last = latest(folder)
    return json.loads(description.read_text()) == run.description() and last is not None and last["kind"] == "end"


def latest(folder: Path) -> dict[str, Any] | None:
    """The newest line of a run's metrics; None before the first."""
    path = folder / "metrics.jsonl"
    lines = read_metrics(path) if path.exists() else []
    return lines[-1] if lines else None


def _failure(run: Run, future: Future[str]) -> str:
    error = future.exception()
    return f"{run.name} with seed {run.settings.seed} failed: {type(error).__name__}: {error}"
