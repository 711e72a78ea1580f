"""The state of a run in a checkpoint, and a check that a checkpoint belongs to this run."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor

from rollalloc.core.allocator import Allocator
from rollalloc.core.events import Batch
from rollalloc.core.packing import differences
from rollalloc.core.saved_state import another
from rollalloc.data.prompts import EncodedPrompts
from rollalloc.generate.engine import RolloutEngine
from rollalloc.models.policy import Policy
from rollalloc.train.checkpoint import PAYLOADS, Checkpoint
from rollalloc.train.config import Config
from rollalloc.train.evaluation import HeldOut

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
            written: the sizes of the files that grow during the run (`saving.synced_sizes`).
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
