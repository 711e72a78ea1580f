"""Finds the trainer's checkpoints: the newest, the complete ones, and those whose weights are finite."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers.trainer import TRAINER_STATE_NAME

from rollalloc.models import checkpoint
from rollalloc.models.finite import first_not_finite

log = logging.getLogger(__name__)

FOLDER = "rollalloc"  # the folder inside each of the trainer's checkpoints


def checkpoint_of(args: Any, state: Any) -> Path:
    """The folder in which the trainer saves its current step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def numbered(output_dir: Path | str) -> list[Path]:
    """The trainer's checkpoints, newest first."""
    return sorted(
        (place for place in Path(output_dir).glob("checkpoint-*") if step_of(place) >= 0), key=step_of, reverse=True
    )


def newest_whole(places: Sequence[Path]) -> Path | None:
    """The first complete checkpoint of `places`, or None. Log a warning for each incomplete checkpoint before it."""
    whole = next((place for place in places if _has_state(place) and not killed_within(place)), None)
    for place in places[: places.index(whole)] if whole else ():
        log.warning(
            "%s is incomplete (%s), probably because the run was killed while saving it; resuming from an earlier "
            "checkpoint",
            place,
            f"no {TRAINER_STATE_NAME}" if _has_state(place) else "no state of rollalloc",
        )
    return whole


def killed_within(place: Path) -> bool:
    """Whether the run was killed while it saved this checkpoint.

    The trainer writes `trainer_state.json` last. If our folder exists and this file is missing or incomplete, the run was
    killed.
    """
    if not (place / FOLDER).is_dir():
        return False
    try:
        json.loads((place / TRAINER_STATE_NAME).read_text())
    except (OSError, ValueError):
        return True
    return False


def refuse_without_state(place: Path) -> None:
    """Raise an error if the recipe's state cannot be restored from a checkpoint.

    Raises:
        FileNotFoundError: the checkpoint is incomplete or has no state of rollalloc. The message says what to do.
    """
    if killed_within(place):
        raise FileNotFoundError(
            f"{place} is incomplete: the run was killed while saving it; resume from another checkpoint, or start afresh"
        )
    if not _has_state(place):
        raise FileNotFoundError(
            f"{place} has no state of rollalloc, so the recipe cannot continue: the checkpoint was saved without a recipe, "
            "or between the optimizer steps of one batch; resume from another checkpoint, or start afresh"
        )


def _has_state(place: Path) -> bool:
    return checkpoint.newest(place / FOLDER) is not None


def last_good(output_dir: Path | str, until: int) -> str:
    """Say which checkpoint a run can resume from: the newest complete one, until this step, whose weights are finite."""
    places = (place for place in numbered(output_dir) if step_of(place) <= until)
    for place in places:
        if _has_state(place) and not killed_within(place) and _finite(place):
            return f"the last checkpoint with finite weights is {place} (resume_from_checkpoint continues from it)"
    return f"there is no earlier checkpoint with finite weights in {output_dir}"


def _finite(place: Path) -> bool:
    """Whether the weights in a checkpoint's safetensors files can be read and are finite. Other files are not read."""
    ours = (
        place / FOLDER
    )  # of which only the trained weights are read: a rollout's log-probability may be unknown (NaN)
    files = (
        file for file in place.rglob("*.safetensors") if ours not in file.parents or file.stem == checkpoint.TRAINED
    )
    try:
        return not any(first_not_finite(load_file(file).items()) for file in files)
    except (OSError, SafetensorError):
        return False


def step_of(place: Path) -> int:
    """The number at the end of a checkpoint's name; -1 if there is no number, for example in a user's copy."""
    number = place.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1
