"""Checkpoints, and the places in the trainer's loop where the core has to be told something."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from transformers import TrainerCallback

from rollalloc.core.packing import exact_keys
from rollalloc.drivers.trl.allocation import Allocation, Rollout
from rollalloc.drivers.trl.checks import check_saving, steps_per_batch
from rollalloc.drivers.trl.failures import uninterrupted
from rollalloc.engines import checkpoint

log = logging.getLogger(__name__)

_FOLDER = "rollalloc"  # within a checkpoint of the trainer
_STATE = ("allocator", "generations", "prompts", "scores", "logged", "prompt_tokens")


class AllocationCallback(TrainerCallback):
    """Saves an allocation with the trainer's checkpoints and loads it when the trainer resumes.

    Attributes:
        allocation: the recipe at work.
        resume_from: the checkpoint that the trainer is about to resume from; None: the one of that step in its folder.
    """

    def __init__(self, allocation: Allocation) -> None:
        self.allocation = allocation
        self.resume_from: Path | None = None
        self._stepped = False  # whether the optimizer began a step on the outstanding batch
        self._watch: Any = None  # what says so

    def on_train_begin(self, args: Any, state: Any, control: Any, *, optimizer: Any, **_: Any) -> None:
        check_saving(args, state)
        if state.global_step:
            load(self.allocation, self.resume_from or _checkpoint(args, state))
        elif self._stepped and self.allocation.allocator.batch:
            log.warning("the last training ended within the optimizer steps of a batch, which counts as trained")
            self.allocation.trained()
        self._stepped = False
        self._watch_steps(getattr(optimizer, "optimizer", optimizer))  # accelerate wraps it

    def _watch_steps(self, optimizer: Any) -> None:
        """Hear of each step from the optimizer itself: a callback before ours may raise, and ours is not called then."""
        if self._watch is not None:
            self._watch.remove()
        if isinstance(optimizer, Optimizer):  # DeepSpeed's is none
            self._watch = optimizer.register_step_pre_hook(self._on_step)

    def _on_step(self, *_: Any) -> None:
        self._stepped = True

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._on_step()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        if self.allocation.finished:
            model.zero_grad(set_to_none=True)  # there is no batch: the optimizer must not even decay its moments

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.allocation.finished:
            log.warning("the recipe has finished: %s", self.allocation.finished)
            control.should_training_stop = True
        elif state.global_step % steps_per_batch(args) == 0:
            self.allocation.trained()
            self._stepped = False

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        place = _checkpoint(args, state)
        if self.allocation.allocator.batch is not None:
            log.warning(
                "%s was saved between the optimizer steps of one batch: no run can be resumed from it; save every multiple "
                "of %d steps",
                place,
                steps_per_batch(args),
            )
        elif args.should_save:
            save(self.allocation, place)


def newest_with_state(output_dir: Path | str) -> Path | None:
    """The trainer's newest checkpoint that has rollalloc's state, or its newest of all where none has; None without any.

    The state is written after everything else, so that the last checkpoint of a run that was killed may lack it.
    """
    numbered = (place for place in Path(output_dir).glob("checkpoint-*") if _step(place) >= 0)
    places = sorted(numbered, key=_step, reverse=True)
    found = next((place for place in places if checkpoint.newest(place / _FOLDER) is not None), None)
    for place in places[: places.index(found)] if found else ():
        log.warning(
            "%s has no state of rollalloc, as if the run was killed while it was saved; resuming before it", place
        )
    return found or next(iter(places), None)


def save(allocation: Allocation, place: Path) -> None:
    """Write an allocation, held rollouts included, into a checkpoint of the trainer, as safetensors and JSON.

    Raises:
        OSError: it could not be written.
    """
    held = list(allocation.rollouts.values())
    described, tensors = checkpoint.pack_generations([rollout.made for rollout in held])
    state = {
        "allocator": allocation.allocator.state_dict(),
        "generations": described,
        "prompts": [rollout.prompt for rollout in held],
        "scores": [rollout.scores_F for rollout in held],
        "logged": [_plain(rollout.logged) for rollout in held],
        "prompt_tokens": {str(rollout.prompt): rollout.prompt_tokens for rollout in held},
    }
    (place / _FOLDER).mkdir(parents=True, exist_ok=True)
    checkpoint.save(place / _FOLDER, allocation.allocator.version, state, {"generations": tensors}, keep=1)


def load(allocation: Allocation, place: Path) -> None:
    """Let an allocation go on from a checkpoint of the trainer.

    Raises:
        FileNotFoundError: the checkpoint has no state of rollalloc.
        ValueError: it is torn, or of another recipe, seed or data set; names the difference.
    """
    if checkpoint.newest(place / _FOLDER) is None:
        raise FileNotFoundError(
            f"{place} has no state of rollalloc, so that the recipe cannot go on from it; it was saved without it, or "
            "between the optimizer steps of one batch: resume from another checkpoint, or start afresh"
        )
    saved = checkpoint.load_newest(place / _FOLDER)
    exact_keys(saved.state, _STATE, "rollalloc's state")
    made = checkpoint.unpack_generations(saved.state["generations"], saved.tensors["generations"])
    tokens_of = {int(prompt): tuple(ids) for prompt, ids in saved.state["prompt_tokens"].items()}
    rollouts = {
        each.rollout: Rollout(prompt, tokens_of[prompt], each, scores_F, logged)
        for each, prompt, scores_F, logged in zip(
            made, saved.state["prompts"], saved.state["scores"], saved.state["logged"], strict=True
        )
    }
    with uninterrupted():
        allocation.allocator.load_state_dict(saved.state["allocator"])
        allocation.rollouts = rollouts


def _plain(logged: dict[str, Any]) -> dict[str, Any]:
    """What reward functions logged, as JSON can hold it: NumPy's numbers as numbers, anything else as its text."""
    return json.loads(json.dumps(logged, default=lambda value: value.item() if hasattr(value, "item") else str(value)))


def _step(place: Path) -> int:
    """The number in a checkpoint's name; -1 where it has none, as in a copy of the user's."""
    number = place.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
