"""Ends a run under verl after an update whose loss or gradient is not finite, before verl saves or sends the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollalloc.core.events import Batch
from rollalloc.models.weights import Diverged, check_figures, in_batch

_ENGINES = ("fsdp_config", "fsdp", "megatron", "torchtitan", "veomni")  # verl's sections that have a network's `dtype`
_NEWEST = "latest_checkpointed_iteration.txt"  # verl's file; it has the step of the newest complete checkpoint


def check_update(
    metrics: Mapping[str, Any],
    role: str,
    network: Mapping[str, Any],
    *,
    step: int,
    batch: Batch,
    folder: Path,
) -> None:
    """Raise an error if an update was not finite. verl itself skips an optimizer step whose gradient is not finite.

    In half precision (float16), verl scales the loss, and a scaled gradient overflows now and then. There, only the loss
    is checked.

    Args:
        metrics: verl's metrics of the update.
        role: "actor" or "critic".
        network: verl's configuration of this network.
        step: verl's number of the training step.
        batch: the core's batch.
        folder: folder of verl's checkpoints.

    Raises:
        Diverged: the loss or the gradient's norm is NaN or infinite. The message names the batch, its prompts and the newest
            checkpoint.
    """
    half = any((network.get(engine) or {}).get("dtype") == "float16" for engine in _ENGINES)
    names = ("loss",) if half else ("loss", "grad_norm")
    figures = {f"{role}/{name}": float(metrics[f"{role}/{name}"]) for name in names if f"{role}/{name}" in metrics}
    try:
        check_figures(figures, step, "verl skips a step whose gradient is not finite")
    except Diverged as error:
        raise in_batch(error, batch, "row {}".format, newest_checkpoint(folder)) from None


def newest_checkpoint(folder: Path) -> str:
    """Say where verl's newest complete checkpoint is."""
    try:
        return f"the last checkpoint is {folder / f'global_step_{int((folder / _NEWEST).read_text())}'}"
    except (OSError, ValueError):
        return f"{folder / _NEWEST} names no checkpoint"
