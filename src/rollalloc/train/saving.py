"""Write checkpoints when they are due, load the newest checkpoint, and keep track of the files that grow during a run."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rollalloc.core.recipe import Budget
from rollalloc.files.atomic import sync
from rollalloc.files.names import CHECKPOINTS, DECISIONS, METRICS, ROLLOUTS
from rollalloc.models.finite import Diverged, check_tensors, first_not_finite
from rollalloc.train import checkpoint
from rollalloc.train.checkpoint import PAYLOADS, Checkpoint
from rollalloc.train.config import Config
from rollalloc.train.folder import RunFolder
from rollalloc.train.schedule import share_spent
from rollalloc.train.state import ChangedData, RunState

log = logging.getLogger(__name__)

_GROWING = (METRICS, ROLLOUTS, DECISIONS)


class Checkpoints:
    """The checkpoints of a run.

    Args:
        place: the run's folder; None: nothing is written.
        state: the contents of a checkpoint.
        config: says when checkpoints are due.

    Attributes:
        newest: number of batches trained at the newest checkpoint that this run wrote or resumed from. None: no checkpoint.
    """

    def __init__(self, place: RunFolder | None, state: RunState, config: Config) -> None:
        self._place, self._state, self._config = place, state, config
        self.newest: int | None = None
        self._saved_s = 0.0  # monotonic time of the newest checkpoint, or of the beginning of the run

    def start_clock(self) -> None:
        """Start to count the minutes until the next checkpoint."""
        self._saved_s = time.monotonic()

    def is_due(self) -> bool:
        """Whether a checkpoint is due, by batches or by minutes."""
        batches, minutes = self._config.checkpoint_every, self._config.checkpoint_minutes
        enough_batches = batches is not None and self._state.counters.batches % batches == 0
        return enough_batches or (minutes is not None and time.monotonic() - self._saved_s >= 60 * minutes)

    def save(self) -> bool:
        """Write a checkpoint. Return False if this batch's checkpoint exists already, or if the run writes nothing.

        Raises:
            Diverged: a weight, or a moment of the optimizer, is not finite.
            OSError: see `checkpoint.save`.
        """
        batches = self._state.counters.batches
        if self._place is None or self.newest == batches:
            return False
        state, tensors = self._state.packed(synced_sizes(self._place.path))
        try:
            check_tensors(_trained_in(tensors), f"after batch {batches}, so no checkpoint of them is written")
        except Diverged as error:
            raise Diverged(f"{error}; {self.where()}") from None
        checkpoint.save(self._place.path, batches, state, tensors, keep=self._config.keep_checkpoints)
        self.newest = batches
        self.start_clock()
        return True

    def where(self) -> str:
        """Say where the newest checkpoint is, for a message about a run that ended early."""
        if self._place is None or self.newest is None:
            return "there is no checkpoint yet"
        return f"a checkpoint after batch {self.newest} is in {self._place.path}; --resume continues from it"

    def load(self, *, accept_recipe: bool, accept_data: bool) -> ChangedData | None:
        """Load the newest undamaged checkpoint. See `Loop.resume` for the arguments and errors.

        Returns:
            How the data differ from the checkpoint's data; None if they are the same.
        """
        if self._place is None:
            raise ValueError("a trainer without a folder has no checkpoints; give it the folder of the run")
        folder = self._place.path
        try:
            self._place.lock()
            saved = checkpoint.load_newest(folder)
            _refuse_diverged(saved, folder)
            changed = self._state.refuse_another(saved, folder, accept_data=accept_data)
            _refuse_cut_files(saved, folder)
            remap = changed is not None and changed.prompts is not None
            self._state.load(saved, accept_recipe=accept_recipe, remap=remap)
        except BaseException:
            self._place.release()
            raise
        self._place.go_on()
        checkpoint.clear_away(folder)
        cut(folder, saved.state["written"])
        self.newest = saved.batches
        self._warn_of_another_budget(saved.state["allocator"]["recipe"]["budget"])
        if changed is not None:
            log.warning("continuing with other data: %s", changed)
            if "heldout" in changed.others:
                self._state.counters.accuracies.clear()
            if changed.prompts is not None:
                self._state.counters.barren_groups = 0
        return changed

    def _warn_of_another_budget(self, saved: Mapping[str, Any]) -> None:
        """Warn if the learning rate depends on the share of the budget that is spent, and the budget was changed."""
        config, counters, budget = self._config, self._state.counters, self._state.allocator.recipe.budget
        if not config.schedule.over_budget:
            return
        before = Budget(**{name: value for name, value in saved.items() if name != "is"})
        was, now = (share_spent(each, config.max_batches, counters.batches, counters.made) for each in (before, budget))
        if before != budget and was is not None and now is not None:
            step = self._state.updater.steps + 1
            rates = [config.learning_rate * config.schedule.share(step, spent) for spent in (was, now)]
            log.warning(
                "the learning rate falls over the budget, and the budget has changed: %.0f%% of it is spent instead "
                "of %.0f%%, so the rate changes from %.3g to %.3g",
                *(100 * now, 100 * was, *rates),
            )


def synced_sizes(folder: Path) -> dict[str, int]:
    """Sync the metrics and the rollout log to disk, because a resumed run continues them. Return their sizes in bytes."""
    there = [name for name in _GROWING if (folder / name).exists()]
    for name in there:
        sync(folder / name)
    return {name: (folder / name).stat().st_size for name in there}


def cut(folder: Path, written: Mapping[str, int]) -> None:
    """Cut the metrics and the rollout log back to their sizes at a checkpoint, `written`."""
    for name in _GROWING:
        if (folder / name).exists():
            os.truncate(folder / name, written.get(name, 0))


def _refuse_diverged(saved: Checkpoint, folder: Path) -> None:
    """Raise an error if the checkpoint's weights are not finite. The message names the newest checkpoint that is."""
    if (name := first_not_finite(_trained_in(saved.tensors))) is None:
        return
    newest = folder / CHECKPOINTS / str(saved.batches)
    earlier = (each for each in checkpoint.undamaged(folder) if each.batches < saved.batches)
    whole = next((each.batches for each in earlier if first_not_finite(_trained_in(each.tensors)) is None), None)
    raise Diverged(
        f"{newest} cannot be resumed: its weights are not finite, the first of them is {name}. "
        + (
            "No other checkpoint is finite; start a new run with --overwrite"
            if whole is None
            else f"The newest finite checkpoint is after batch {whole}; to go on from it, remove the later ones"
        )
    )


def _trained_in(tensors: Mapping[str, Mapping[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights and moments in the files of a checkpoint. (A rollout's log-probabilities may be unknown, which is NaN.)"""
    return (
        (f"{name} of {file}", tensor)
        for file, of_file in tensors.items()
        if file != PAYLOADS
        for name, tensor in of_file.items()
    )


def _refuse_cut_files(saved: Checkpoint, folder: Path) -> None:
    """Raise a ValueError if the metrics or the rollout log are shorter than at the checkpoint."""
    for name, size in saved.state["written"].items():
        file = folder / name
        now = file.stat().st_size if file.exists() else 0
        if now < size:
            newest = folder / CHECKPOINTS / str(saved.batches)
            raise ValueError(
                f"{file} has {now:,} bytes, but had {size:,} at the checkpoint after batch {saved.batches}; put it back "
                f"from a copy, remove {newest} to go on from an earlier checkpoint, or start the run afresh (--overwrite)"
            )
