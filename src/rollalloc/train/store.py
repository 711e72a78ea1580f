"""What a run keeps, in memory and in its folder.

- `RunState` is what a checkpoint contains; it says whether a checkpoint belongs to this run.
- `RunFolder` creates the folder of a run, resumes the run in it, or refuses to use it. Only one trainer at a time uses it.
- `Checkpoints` writes checkpoints when they are due, and loads the newest. What a checkpoint is on disk is in
  `rollalloc.models.checkpoint`.
- `DecisionLog` writes what became of every rollout, `Grid` keeps which evaluations are due and what they said.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

from safetensors import SafetensorError
from torch import Tensor

from rollalloc.core.allocator import Allocator, MetricError
from rollalloc.core.events import Batch
from rollalloc.core.packing import differences
from rollalloc.core.recipe import Budget
from rollalloc.core.saved_state import another
from rollalloc.data.encoded_file import LEAST_PROMPTS, MOST_TOKENS, encoder_digest, write_encoded
from rollalloc.data.feature_blocks import Features
from rollalloc.data.feature_file import save_features
from rollalloc.data.prompts import EncodedPrompts
from rollalloc.files.claims import HIDDEN, Claims, Lock, refuse_foreign, refuse_read_only
from rollalloc.files.names import (
    ALLOCATOR,
    CHECKPOINTS,
    DECISIONS,
    DESCRIPTION,
    ENCODED,
    FEATURES,
    METRICS,
    MODEL,
    REWARDS,
    ROLLOUTS,
)
from rollalloc.files.regular import append_text, naming, remove_partials, sync
from rollalloc.generate.engine import RolloutEngine
from rollalloc.models import checkpoint
from rollalloc.models.checkpoint import PAYLOADS, Checkpoint
from rollalloc.models.policy import Policy
from rollalloc.models.weights import Diverged, check_tensors, first_not_finite
from rollalloc.runs.reader import newest_line
from rollalloc.train.config import Config, share_spent
from rollalloc.train.evaluation import Evaluation, HeldOut
from rollalloc.train.notices import counted

log = logging.getLogger(__name__)


@dataclass
class Counters:
    """Counts that the trainer itself keeps.

    Attributes:
        batches: number of batches trained so far.
        seconds: time spent so far, without evaluation.
        next_at: number of paid rollouts at which the next evaluation is due.
        made: rollouts and tokens paid at the newest update, as fields for a line of the metrics.
        accuracies: (version, accuracy) of the versions evaluated on the grid.
        barren_groups: number of groups trained since the last group with a nonzero advantage.
    """

    batches: int = 0
    seconds: float = 0.0
    next_at: int = 0
    made: dict[str, Any] = field(default_factory=dict[str, Any])
    accuracies: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    barren_groups: int = 0


@dataclass(frozen=True, slots=True)
class ChangedPrompts:
    """Numbers of prompts that are missing, new or kept, compared with a checkpoint."""

    lost: int
    new: int
    kept: int

    def __str__(self) -> str:
        return f"{self.lost} lost, {self.new} new, {self.kept} kept by key"


@dataclass(frozen=True, slots=True)
class ChangedData:
    """How the data differ from the data that a checkpoint was saved with.

    Attributes:
        prompts: changes of the training prompts, or None.
        others: names of other data that differ, from `_OTHER_DATA`.
    """

    prompts: ChangedPrompts | None
    others: tuple[str, ...]

    def __str__(self) -> str:
        of_prompts = [] if self.prompts is None else [f"run.prompts: {self.prompts}"]
        return "; ".join([*of_prompts, *(f"run.{name}: {_OTHER_DATA[name]}" for name in self.others)])


# The entries of a run's identity that describe data other than the training prompts.
_OTHER_DATA = {
    "heldout": "the held-out prompts differ, so that accuracies before and after cannot be compared",
    "template": "the chat template or its arguments differ, so that the same prompts have other tokens",
}


class Updates(Protocol):
    """Trains on batches, and saves and loads the weights.

    Attributes:
        steps: optimizer steps so far.
        entries: names of the entries that this object adds to the state of a checkpoint.
        files: names of the files of tensors in each checkpoint.
    """

    steps: int
    entries: ClassVar[tuple[str, ...]]
    files: ClassVar[tuple[str, ...]]

    def update(
        self,
        batch: Batch,
        generations: Any,
        *,
        spent: float | None = None,
        measure_kl: bool = False,
        between_passes: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """Train on a batch and return its figures. See `Updater.update` for the arguments.

        Raises:
            Diverged: the loss, the gradient or the weights are not finite.
        """
        ...

    def moved(self, batch: Batch, generations: Any) -> float:
        """The share of the replayed rows' tokens that have moved, see `Updater.moved`. Called only if there is a gate."""
        ...

    def save(self, batches: int) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
        """The weights for the checkpoint after this many batches: entries of its state, and tensors by file and name."""
        ...

    def load(self, saved: Checkpoint) -> None:
        """Load the weights from a checkpoint."""
        ...


_ENTRIES = ("identity", "allocator", "counters", "optimizer_steps", "rollouts", "written")


class RunState:
    """The state of a run that a checkpoint contains.

    Args:
        config: configuration of the run.
        allocator: the core of the run.
        engine: supplies the state of the rollouts.
        updater: saves and loads the weights.
        identity: returns the values that a checkpoint of this run must have, apart from the recipe. The value "prompts" is a
            digest of the prompts. The function is called once, when a checkpoint is first saved or loaded.

    Attributes:
        counters: counts that the trainer itself keeps.
    """

    def __init__(
        self,
        config: Config,
        allocator: Allocator,
        engine: RolloutEngine,
        updater: Updates,
        identity: Callable[[], dict[str, Any]],
    ) -> None:
        self.config, self.allocator, self.engine, self.updater = config, allocator, engine, updater
        self.counters = Counters()
        self._identity = identity

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The values that a checkpoint of this run must have."""
        return self._identity()

    def packed(self, written: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
        """The state for `checkpoint.save`: plain data, and tensors by file and name.

        Args:
            written: the sizes of the files that grow during the run (`synced_sizes`).
        """
        rollouts, payloads = self.engine.state()
        entries, weights = self.updater.save(self.counters.batches)
        state = {
            "identity": self.identity,
            "allocator": self.allocator.state_dict(),
            "counters": asdict(self.counters),
            "optimizer_steps": self.updater.steps,
            "rollouts": rollouts,
            "written": dict(written),
            **entries,
        }
        return state, {**weights, PAYLOADS: payloads}

    def refuse_another(self, saved: Checkpoint, place: Path, *, accept_data: bool) -> ChangedData | None:
        """Raise an error if a checkpoint belongs to another run. With `accept_data`, its data may differ.

        Returns:
            How the data differ; None if they are the same.

        Raises:
            ValueError: the checkpoint belongs to another run. The message names each difference.
        """
        state, entries, files = saved.state, (*_ENTRIES, *self.updater.entries), self.updater.files
        if state.keys() != {*entries} or not saved.tensors.keys() >= {*files}:
            raise ValueError(
                f"the checkpoint after batch {saved.batches} in {place} is not of this kind of trainer: expected "
                f"{', '.join((*entries, *files))}, got {', '.join((*state, *saved.tensors))}"
            )
        changed = self._changed_data(state)
        others = [*differences(_but_data(state["identity"]), _but_data(self.identity), "run")]
        if changed and not accept_data:
            others.append(f"{changed} (accept_data=True, or --accept-data, continues with them)")
        elif changed and changed.prompts and state["allocator"]["batch"] is not None:
            others.append(f"{changed}, and a batch of the old prompts is still to be trained")
        if others:
            raise ValueError(
                f"the checkpoint after batch {saved.batches} in {place} is of another run: {'; '.join(others)}; "
                "use the saved settings, or give another folder"
            )
        return changed

    def load(self, saved: Checkpoint, *, accept_recipe: bool, remap: bool) -> None:
        """Load a checkpoint. Log a warning if the checkpoint was saved under another recipe.

        Raises:
            ValueError: the checkpoint was saved under another recipe, and `accept_recipe` is False. Nothing was changed.
        """
        state = saved.state
        others = list(differences(state["allocator"]["recipe"], self.allocator.recipe.description))
        if others and not accept_recipe:
            what = f"the checkpoint was saved under {another(others)}, {'; '.join(others)}"
            raise ValueError(f"{what}; accept_recipe=True, or --accept-recipe, continues with the new recipe")
        self.allocator.load_state_dict(state["allocator"], accept_recipe=accept_recipe, remap="keys" if remap else None)
        if others:
            log.warning("continuing with %s: %s", another(others), "; ".join(others))
        self.updater.load(saved)
        rollouts = state["rollouts"]
        if remap and "stream" in rollouts:  # rollouts in flight start again: their prompts may have changed
            rollouts = rollouts | {"stream": None}
        self.engine.load_state(rollouts, saved.tensors[PAYLOADS])
        for name, value in state["counters"].items():
            setattr(self.counters, name, value)
        self.updater.steps = state["optimizer_steps"]

    def _changed_data(self, state: Mapping[str, Any]) -> ChangedData | None:
        """How the data differ from a checkpoint's data; None if they are the same."""
        before, now = state["identity"], self.identity
        others = tuple(name for name in _OTHER_DATA if name in now and before.get(name, now[name]) != now[name])
        prompts = None if before["prompts"] == now["prompts"] else self._changed_prompts(state)
        return ChangedData(prompts, others) if prompts or others else None

    def _changed_prompts(self, state: Mapping[str, Any]) -> ChangedPrompts:
        saved = state["allocator"]["prompts"]
        source_N = self.allocator.table.source_of(saved, "keys")
        assert source_N is not None
        new = int((source_N < 0).sum())
        return ChangedPrompts(lost=saved["count"] - (len(source_N) - new), new=new, kept=len(source_N) - new)


def identity_of(
    policy: Policy, train: EncodedPrompts, heldout: HeldOut | None, config: Config, reference: str | None
) -> dict[str, Any]:
    """The identity of a run whose model is in this process. `reference` is a digest of the reference's weights."""
    model, tokenizer = policy.model, policy.tokenizer
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    frozen = {} if policy.adapter is None else {"frozen": policy.adapter.base}
    return {
        **frozen,
        "config": config.identity(),
        "prompts": digest(train),
        "heldout": heldout and {"prompts": digest(heldout.prompts), "exact": heldout.answers is not None},
        "template": template_digest(train, tokenizer),
        "tokenizer": sha(sorted(tokenizer.get_vocab().items())),
        "model": {"is": type(model).__name__, "parameters": model.num_parameters(), "shapes": sha(shapes)},
        "reference": reference,
    }


def _but_data(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of the identity that do not describe the data."""
    return {name: value for name, value in identity.items() if name not in ("prompts", *_OTHER_DATA)}


def digest(prompts: EncodedPrompts) -> str:
    """A digest of the prompts before the chat template is applied, because a template may insert the date."""
    texts = prompts.prompt_set
    return sha([texts.keys, texts.prompts, texts.sources, texts.ground_truths, texts.extra_infos])


def template_digest(prompts: EncodedPrompts, tokenizer: Any) -> str | None:
    """A digest of the chat template's text and arguments; None if no prompt uses the template."""
    if all(isinstance(prompt, str) for prompt in prompts.prompt_set.prompts):
        return None
    return sha([getattr(tokenizer, "chat_template", None), sorted(prompts.template_args.items())])


def sha(value: Any) -> str:
    return sha256(json.dumps(value, default=repr).encode()).hexdigest()[:16]


_PARTIAL = ".unfinished-model"
# Everything that a run writes, except the files of trackers. The metrics, which mark a run's folder, are written first.
_NAMES = (
    METRICS,
    DESCRIPTION,
    ROLLOUTS,
    DECISIONS,
    REWARDS,
    ALLOCATOR,
    FEATURES,
    ENCODED,
    MODEL,
    _PARTIAL,
    CHECKPOINTS,
)
_PRODUCTS = (MODEL, ALLOCATOR, ROLLOUTS, DECISIONS)
_NEW_FOLDER = "give a new or empty folder (--out)"
_REMEDY = "give another folder (--out), or move it away"
_ANOTHER = "go on with it (--resume), replace what it wrote (--overwrite), or give another folder (--out)"


class Saves(Protocol):
    """A model that can be saved to a folder."""

    def save(self, folder: Path) -> None:
        """Write the model into the folder."""


class RunFolder:
    """The folder of a run.

    `check` (if the folder exists), `begin` and `go_on` lock the folder, and `release` unlocks it. Only files in the manifest
    of the folder's runs are overwritten or removed (see `rollalloc.files.claims`).

    Args:
        path: the folder; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._claims, self._lock = Claims(path, "run"), Lock(path, "run")
        self._begun = self._checked = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def lock(self) -> None:
        """Take the lock, until `release`. Raise `InUse` if another trainer has it."""
        self._lock.take()

    def release(self) -> None:
        """Release the lock. If no run began, also remove the files that were created for the lock."""
        if self._begun:
            self._lock.release()
        else:
            self._lock.withdraw()
        self._begun = False

    def held(self) -> str | None:
        """Describe the files of a run in the folder; None if there is nothing to lose."""
        if METRICS not in self._claims.names():
            return None
        last, saved = newest_line(self.path), checkpoint.newest(self.path)
        if last is not None and last["kind"] == "end":
            return "a run that has ended"
        if saved is not None:
            return f"a run that has not ended, with a checkpoint after batch {saved}"
        if last is not None:
            return "a run that has not ended, without a checkpoint"
        left = [name for name in _PRODUCTS if (self.path / name).exists()]
        return f"{', '.join(left)} of a run" if left else None

    def is_broken(self) -> bool:
        """Whether the folder's run can only start again: it did not end, and has no checkpoint."""
        return (
            checkpoint.newest(self.path) is None
            and not any((self.path / name).exists() for name in (MODEL, ALLOCATOR))
            and METRICS in self._claims.names()
        )

    def check(self, *, overwrite: bool = False, remedy: str = _ANOTHER) -> None:
        """Raise an error if a new run must not begin in this folder. Nothing is changed.

        Args:
            overwrite: True: files of another run in the folder may be removed.
            remedy: what to do if the folder has another run.

        Raises:
            InUse: another trainer is using the folder.
            FileExistsError: the folder has a run that must not be overwritten, or files that rollalloc did not write.
            PermissionError: the folder cannot be created.
        """
        if not self._checked:  # check only once, because trackers write files into the folder later
            self._claims.refuse_taken(_NEW_FOLDER)
            self._checked = True
        if not self.path.exists():  # nothing to lose; raise now, before the model is loaded, if it cannot be created
            refuse_read_only(self.path)
            return
        self._refuse_what_is_there(overwrite, remedy)

    def _refuse_what_is_there(self, overwrite: bool, remedy: str) -> None:
        """Lock the folder, and raise an error for a run in it or for files that rollalloc did not write; see `check`."""
        self.lock()
        held = self.held()
        if held is not None and not overwrite:
            raise FileExistsError(f"{self.path} holds {held}; {remedy}")
        inside = [*self._claims.foreign_files(self._inside(MODEL)), *checkpoint.foreign_files(self.path)]
        refuse_foreign(self.path, self._claims.foreign_files(_NAMES) or inside, _REMEDY)

    def begin(self, *, overwrite: bool = False) -> None:
        """Begin a new run in the folder. A second call does nothing. For arguments and errors see `check`."""
        if self._begun:
            return
        self.check(overwrite=overwrite)
        # Once more under the lock: where `check` found no folder, another trainer may have run since.
        self._refuse_what_is_there(overwrite, _ANOTHER)
        ours = self._claims.names()
        if ours:
            self._claims.remove([METRICS])
            checkpoint.remove_all(self.path)
            shutil.rmtree(self.path / _PARTIAL, ignore_errors=True)
            self._claims.remove(ours)
        self._claims.keep(_NAMES)
        (self.path / METRICS).write_text("")
        self._begun = True

    def go_on(self) -> None:
        """Continue the run in the folder. Call it after checking that the checkpoint belongs to this run."""
        self.lock()
        for folder in (self.path, self.path / HIDDEN):
            remove_partials(folder)
        self._begun = True

    def save_features(self, keys: Sequence[str], features: Features) -> None:
        """Save the run's features for a resumed run, because another machine could compute slightly different features."""
        self._claims.add({FEATURES})
        save_features(self.path / FEATURES, keys, features)

    def save_encoded(self, prompts: EncodedPrompts, tokenizer: Any) -> None:
        """Save the token ids of many prompts for a resumed run, because encoding takes longer than reading them."""
        if len(prompts.tokens) < LEAST_PROMPTS or sum(map(len, prompts.tokens)) > MOST_TOKENS:
            return
        encoder = encoder_digest(tokenizer, prompts.template_args)
        if encoder is None:
            return
        self._claims.add({ENCODED})
        write_encoded(self.path / ENCODED, encoder, prompts.prompt_set.prompts, prompts.tokens)

    def save_model(self, model: Saves) -> None:
        """Write the model completely or not at all. It replaces only an earlier model of a run.

        Raises:
            FileExistsError: a file that rollalloc did not write has the name of the model's folder.
            OSError: the model could not be written, for example because the disk is full. The message names the folder.
                The last checkpoint is kept.
        """
        partial, final = self.path / _PARTIAL, self.path / MODEL
        if partial.exists():  # left by a run that was killed
            shutil.rmtree(partial)
        with naming(final):
            try:
                model.save(partial)
            except SafetensorError as error:  # safetensors raises its own error, even if the disk is full
                full = "No space left" in str(error) or "os error 28" in str(error)
                raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from error
        files = [file.relative_to(partial).as_posix() for file in partial.rglob("*") if file.is_file()]
        before = {name for name in self._claims.names() if name.startswith(f"{MODEL}/")}
        # The names include files in subfolders.
        names = {f"{MODEL}/{path.relative_to(partial).as_posix()}" for path in partial.rglob("*")}
        self._claims.add(names)
        self._claims.remove(before - names)
        for file in files:
            (final / file).parent.mkdir(parents=True, exist_ok=True)
            (partial / file).replace(final / file)
        shutil.rmtree(partial)
        self._claims.keep(self._claims.names() - (before - names))

    def slim(self) -> None:
        """Remove the model and the checkpoints of a finished run. Its metrics, and files of others, are kept."""
        self.lock()
        checkpoint.remove_all(self.path)
        names = {name for name in self._claims.names() if name.startswith(f"{MODEL}/")}
        self._claims.remove({*names, MODEL, ALLOCATOR, FEATURES, ENCODED, CHECKPOINTS})

    def _inside(self, folder: str) -> list[str]:
        """The files in a folder of the run."""
        return [
            file.relative_to(self.path).as_posix()
            for file in (self.path / folder).rglob("*")
            if file.is_symlink() or not file.is_dir()
        ]


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


class DecisionLog:
    """Writes what the allocator decided about rollouts. Nothing is written if the path is None.

    A line has the number of the `batch` (null if groups ended without one), its `rows` as lists of rollout, group and
    advantage, and `groups`: the ids of the groups that ended, by fate.
    """

    def __init__(self, path: Path | None, allocator: Allocator) -> None:
        self._path = path
        self._ended: dict[str, list[int]] = {}
        if path is not None:
            allocator.watch(lambda group, fate: self._ended.setdefault(fate, []).append(group))

    def write(self, number: int | None = None, batch: Batch | None = None) -> None:
        """Write a line for a batch or, without a batch, for the groups that ended since the last line."""
        if self._path is None or (batch is None and not self._ended):
            return
        new = () if batch is None else [row for row in batch.rows if not row.replays]
        rows = [[row.rollout, row.group, round(row.advantage, 6)] for row in new]
        append_text(self._path, json.dumps({"batch": number, "rows": rows, "groups": self._ended}) + "\n")
        self._ended.clear()


_ROUNDING = 1e-6  # tolerance: a mean of float32 scores may be slightly above 1


class Grid:
    """Says when an evaluation is due, and stores the newest evaluation.

    Attributes:
        prompts: number of held-out prompts. 0: no evaluation.
        latest: the newest version evaluated in this process, or None.
    """

    def __init__(self, prompts: int, config: Config, counters: Counters) -> None:
        self.prompts = prompts
        self.latest: int | None = None
        self._config, self._counters = config, counters
        self._evaluation = Evaluation(None, None)

    def is_due(self, rollouts: int) -> bool:
        """Whether some grid point up to this number of rollouts was not evaluated yet."""
        return self.prompts > 0 and self._counters.next_at <= rollouts

    def add(self, version: int, evaluation: Evaluation) -> None:
        """Store an evaluation of these weights.

        Raises:
            FloatingPointError: the accuracy is not finite.
            MetricError: there is a target, but the mean metric is not an accuracy.
        """
        accuracy, target = evaluation.accuracy, self._config.target
        if accuracy is None:
            if self._counters.batches:  # `Notices` warns about the first evaluation
                log.warning("no held-out sample has a score: %s", counted(evaluation.unscored))
        elif not isfinite(accuracy):
            raise FloatingPointError(
                f"the held-out accuracy is {accuracy}: the weights diverged; try a smaller learning rate"
            )
        elif target is not None and not -_ROUNDING <= accuracy <= 1 + _ROUNDING:
            raise MetricError(
                f"the target {target} is an accuracy, but the mean held-out metric is {accuracy:g}; "
                'let the reward function return {"score": reward, "acc": 1.0 if right else 0.0}, or set no target'
            )
        self.latest, self._evaluation = version, evaluation

    def record(self, at: int | None) -> dict[str, Any]:
        """Record the newest evaluation for a grid point. Return it as fields for a line of the metrics.

        Args:
            at: the grid point. None: the end of the run. An evaluation at the end does not count for the target.
        """
        version, evaluation, accuracies = self.latest, self._evaluation, self._counters.accuracies
        assert version is not None, "record follows add"
        is_new = not accuracies or accuracies[-1][0] != version
        if at is not None and evaluation.accuracy is not None and is_new:
            accuracies.append((version, evaluation.accuracy))
        return {
            "at": at,
            "accuracy": evaluation.accuracy,
            "standard_error": evaluation.standard_error,
            "breadth": None if evaluation.breadth is None else asdict(evaluation.breadth),
            "eval_unscored": sum(evaluation.unscored.values()),
        }

    def confirmed(self) -> float | None:
        """The newest accuracy, if the last two versions evaluated on the grid reached the target; otherwise None."""
        target, latest = self._config.target, [accuracy for _, accuracy in self._counters.accuracies[-2:]]
        return latest[-1] if target is not None and len(latest) == 2 and min(latest) >= target else None
