"""Finds the trainer's checkpoints: the newest, the complete ones, and those whose weights are finite.

`FiniteTraining` ends a run before TRL's trainer steps on, averages or saves what is not finite.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import isfinite, nan
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME

from rollalloc.drivers.trl.distributed import is_sharded, local_part
from rollalloc.models import checkpoint
from rollalloc.models.weights import Diverged, check_figures, first_not_finite, in_batch, trained

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


LEAST_SCALE = 1.0  # a gradient that overflows in half precision at this scale of the loss is no matter of the scale


class FiniteTraining(TrainerCallback):
    """Checks the loss and the gradient before each optimizer step, and the weights after it and before they are saved.

    In half precision (fp16), the loss is scaled, and a scaled gradient overflows now and then. The scaler then skips the
    step and halves the scale, so this is an error only if the scale is already below `LEAST_SCALE`.

    DeepSpeed takes the step within the backward pass. There, only the loss is checked before the step.

    An error is raised in all processes. It names the batch, its prompts and the last checkpoint with finite weights.

    Args:
        trainer: TRL's trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loss: Tensor | None = None  # sum over the micro-batches of the optimizer step
        self._weights: list[tuple[str, Tensor]] = []  # listed when training begins, because this takes time

    def begin(self, place: Path | None = None, beside: Mapping[str, Tensor] | None = None) -> None:
        """Check the weights that training begins with.

        Args:
            place: the checkpoint that the run resumes from; None: the run does not resume.
            beside: weights of the checkpoint that are not in the model.

        Raises:
            Diverged: a weight is not finite. If the run resumes, the message names the last checkpoint with finite weights.
        """
        model = self._trainer.model
        self._loss, self._weights = None, list(trained(model))
        named = chain(((name, local_part(each)) for name, each in model.named_parameters()), (beside or {}).items())
        if (name := self._first_anywhere(named)) is None:
            return
        if place is None:
            raise Diverged(f"the model's weights are not finite: the first of them is {name}; load the model again")
        saved = last_good(place.parent, self._trainer.state.global_step - 1)
        raise Diverged(
            f"no run can resume from {place}: its weights are not finite, the first of them is {name}; {saved}"
        )

    def see(self, loss: Tensor) -> None:
        """Take the loss of a micro-batch before its backward pass."""
        self._loss = loss.detach().sum() + (0.0 if self._loss is None else self._loss)
        if self._trainer.is_deepspeed_enabled:
            self._check_step(())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, optimizer: Any, **_: Any) -> None:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        self._check_step(local_part(each.grad) for each in parameters if each.grad is not None)
        self._loss = None

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if (name := self._first_anywhere((name, local_part(each)) for name, each in self._weights)) is not None:
            self._raise(
                Diverged(
                    f"weights are not finite after optimizer step {state.global_step + 1}: the first of them is {name}"
                )
            )

    def check_before_saving(self) -> None:
        """Raise an error if the trained weights that the model has now are not finite.

        Raises:
            Diverged: a weight is not finite, and nothing was saved.
        """
        named = ((name, local_part(each)) for name, each in trained(self._trainer.model))
        # Only a sharded model is saved by all processes together.
        name = self._first_anywhere(named) if is_sharded(self._trainer) else first_not_finite(named)
        if name is not None:
            self._raise(Diverged(f"weights are not finite, so they are not saved: the first of them is {name}"))

    def _check_step(self, gradients: Iterable[Tensor]) -> None:
        overflowed = first_not_finite(("", each) for each in gradients) is not None
        scaler = self._trainer.accelerator.scaler
        skipped = overflowed and scaler is not None and scaler.get_scale() >= LEAST_SCALE
        here = (0.0 if self._loss is None else float(self._loss), nan if overflowed and not skipped else 0.0)
        loss, gradient = (
            next((value for value in of if not isfinite(value)), 0.0) for of in zip(*self._all(here), strict=True)
        )
        step = self._trainer.state.global_step + 1
        try:
            check_figures({"the loss": loss, "the gradient": gradient}, step, "the step was not taken")
        except Diverged as error:
            self._raise(error)

    def _raise(self, error: Diverged) -> None:
        trainer = self._trainer
        saved = last_good(trainer.args.output_dir, trainer.state.global_step)
        batch = trainer.allocation.allocator.batch
        raise (
            Diverged(f"{error}; {saved}") if batch is None else in_batch(error, batch, "row {}".format, saved)
        ) from None

    def _first_anywhere(self, named: Iterable[tuple[str, Tensor]]) -> str | None:
        """The first tensor that is not finite, in any process; None if there is none."""
        name = first_not_finite(named)
        anywhere = any(bad for (bad,) in self._all((float(name is not None),)))
        return name if name is not None or not anywhere else "one in another process"

    def _all(self, figures: tuple[float, ...]) -> list[list[float]]:
        """The figures of all processes, one list for each."""
        accelerator = self._trainer.accelerator
        if accelerator.num_processes == 1:
            return [list(figures)]
        return accelerator.gather(torch.tensor([figures], dtype=torch.float32, device=accelerator.device)).tolist()
