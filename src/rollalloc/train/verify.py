"""Check that a run that is killed and resumed equals a run without interruption."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rollalloc.files.names import METRICS
from rollalloc.processes.stopping import unheard
from rollalloc.runs.reader import lines_in
from rollalloc.train.config import Config
from rollalloc.train.train import train


def first_difference(config: Config, batches: int, folder: Path) -> str | None:
    """Train the first batches of a run twice: without interruption, and killed half-way and resumed. Each uses its own
    process.

    Args:
        config: configuration of the run. Its limit of batches and its target are replaced.
        batches: number of batches to train, at least 2.
        folder: gets `unbroken` and `resumed`.

    Returns:
        The first difference between their metrics, ignoring times, or between their final weights. None if they are equal.

    Raises:
        ValueError: there are fewer than 2 batches, the run ends before it can be killed, or its batches depend on a clock.
        RuntimeError: a run failed.
    """
    if batches < 2:
        raise ValueError(f"batches must be at least 2, one before the kill and one after, got {batches}")
    if config.engine == "async" and config.streaming.overlap:
        raise ValueError(
            "a run whose generator has a process of its own (--engine async) never repeats exactly: which rollouts end "
            "first depends on the clock, and those in flight start again after a kill. With --no-overlap, or --engine sync, "
            "a resumed run is identical"
        )
    half = batches // 2
    config = replace(config, max_batches=batches, target=None, checkpoint_every=half)
    unbroken, resumed = folder / "unbroken", folder / "resumed"
    _succeed(config, unbroken)
    if _exit_code(config, resumed, kill_after=half + 1) != -signal.SIGKILL:
        raise ValueError(f"the run ended before batch {half + 1}, so it could not be killed; verify fewer batches")
    _succeed(config, resumed)
    return _in_metrics(unbroken, resumed) or _in_weights(unbroken, resumed)


def _succeed(config: Config, folder: Path) -> None:
    code = _exit_code(config, folder)
    if code != 0:
        raise RuntimeError(f"the run in {folder} failed with exit code {code}; its error is above")


def _exit_code(config: Config, folder: Path, kill_after: int | None = None) -> int | None:
    process = multiprocessing.get_context("spawn").Process(target=_execute, args=(config, folder, kill_after))
    with unheard():
        process.start()
    try:
        process.join()
    finally:
        process.kill()  # after Ctrl-C; does nothing to a process that has ended
    return process.exitcode


def _execute(config: Config, folder: Path, kill_after: int | None) -> None:
    """Train or resume. After `kill_after` batches this process kills itself with SIGKILL."""

    def listen(line: dict[str, Any]) -> None:
        if kill_after is not None and line["kind"] == "batch" and line["batch"] >= kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    train(config, folder, listen, resume=True)


def _in_metrics(unbroken: Path, resumed: Path) -> str | None:
    pairs = zip_longest(*(_untimed(folder) for folder in (unbroken, resumed)))
    for number, (one, other) in enumerate(pairs, start=1):
        if one is None or other is None:
            return f"metrics: the {'unbroken' if other is None else 'resumed'} run has more than {number - 1} lines"
        for name in dict.fromkeys([*one, *other]):
            if one.get(name) != other.get(name):
                return f"metrics line {number}, {name}: unbroken {one.get(name)}, resumed {other.get(name)}"
    return None


def _untimed(folder: Path) -> list[dict[str, Any]]:
    """The lines of the metrics without measured times."""
    return [without_times(line) for line in lines_in(folder / METRICS)]


def without_times(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the metrics without measured times, also in nested figures such as `streaming`."""
    return {
        name: without_times(value) if isinstance(value, Mapping) else value
        for name, value in line.items()
        if not name.endswith("seconds")
    }


def _in_weights(unbroken: Path, resumed: Path) -> str | None:
    for file in sorted((unbroken / "model").glob("*.safetensors")):
        one, other = load_file(file), load_file(resumed / "model" / file.name)
        for name, tensor in one.items():
            if not torch.equal(tensor, other[name]):
                furthest = float((tensor.double() - other[name].double()).abs().max())
                return f"weights {name}: they differ by up to {furthest:g}"
    return None
