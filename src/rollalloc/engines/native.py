"""The native trainer: one process, one model, any recipe.

The whole of it is `Trainer.run`: ask the allocator, generate what it orders, tell it the scores, train on the batch it
returns, tell it that the weights changed. Everything a recipe decides, it decides in the core.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any, get_args

import numpy as np

from rollalloc.core.allocator import Allocator
from rollalloc.core.events import Batch, Updated
from rollalloc.core.packing import describe, differences
from rollalloc.core.recipe import Recipe
from rollalloc.data.prompts import EncodedPrompts
from rollalloc.engines import checkpoint
from rollalloc.engines.evaluation import Evaluation, HeldOut, evaluate
from rollalloc.engines.loss import Loss
from rollalloc.engines.policy import Policy, Precision
from rollalloc.engines.rollouts import Roller
from rollalloc.engines.sampler import Generation, Sampling
from rollalloc.engines.schedule import Schedule
from rollalloc.engines.update import Updater
from rollalloc.rewards.function import Outcome
from rollalloc.rewards.scorers import Scorer

log = logging.getLogger(__name__)

Listener = Callable[[dict[str, Any]], None]
_PATIENCE = 256  # groups, at least, without variance before a run is given up
_POLITE_S = 0.1  # how often the run looks whether it was asked to stop, while it waits for scores of held-out samples
_NAMED = 20  # quarantined prompts that the last line of the metrics names

SAVING = ("checkpoint_every", "keep_checkpoints", "log_rollouts")  # settings that change nothing but what is saved
_ENDING = ("max_batches", "stop_when_barren", "target")  # settings that say when a run ends: others may be given later
_MEMORY = ("tokens_per_forward",)  # settings that bound it: a run that ran out of it may go on with less
_COUNTERS = ("batches", "seconds", "next_at", "made", "accuracies", "barren_groups")


class Stopped(RuntimeError):
    """The run was asked to stop (SIGTERM), was saved, and can be resumed."""


class _Interrupted(Exception):
    """An evaluation was given up because the run was asked to stop."""


@dataclass(frozen=True, slots=True)
class _ChangedData:
    """Prompts that are gone, that are new, and that are still there, since a checkpoint was saved."""

    lost: int
    new: int
    kept: int

    def __str__(self) -> str:
        return f"{self.lost} lost, {self.new} new, {self.kept} kept by key"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is the same for every recipe.

    Attributes:
        seed: of prompts, sampling, mini-batches.
        sampling: of rollouts; top-k and top-p must be off, since the update needs the distribution that was sampled from.
        learning_rate: AdamW's.
        weight_decay: AdamW's.
        betas: AdamW's.
        schedule: of the learning rate, over optimizer steps.
        optimizer_steps_per_batch: a batch is split into this many mini-batches, whatever the size of its groups.
        loss: its clipping, its aggregation over tokens, its KL term.
        max_grad_norm: gradients are clipped to this norm.
        tokens_per_forward: tokens of one forward and backward pass, prompts and padding included; a longer row has one
            of its own. Bounds memory, changes nothing else.
        precision: the update computes in, "fp32", "bf16" or "auto": bf16 on a GPU that has it, else fp32. Weights,
            gradients, optimizer and log-probabilities are in fp32 whatever it is.
        eval_every: rollouts paid between two points of the grid of evaluations.
        eval_samples: rollouts a held-out prompt, where it has not one single right answer.
        max_batches: batches after which the run ends; None: no limit.
        stop_when_barren: end the run when as many groups as there are prompts, and at least 256, had no reward variance.
        target: held-out accuracy at which the run ends, once two weights evaluated in a row reach it; None: none.
        checkpoint_every: batches between two checkpoints; None: only at the end, and on SIGTERM.
        keep_checkpoints: newest checkpoints to keep, at least 1.
        log_rollouts: write each rollout's text and score to `rollouts.jsonl`.

    Raises:
        ValueError: a value out of its range.
    """

    seed: int = 0
    sampling: Sampling
    learning_rate: float = 1e-6
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    schedule: Schedule = field(default_factory=Schedule)
    optimizer_steps_per_batch: int = 1
    loss: Loss = field(default_factory=Loss)
    max_grad_norm: float = 1.0
    tokens_per_forward: int = 8192
    precision: Precision = "auto"
    eval_every: int = 2000
    eval_samples: int = 4
    max_batches: int | None = None
    stop_when_barren: bool = True
    target: float | None = None
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    log_rollouts: bool = False

    def __post_init__(self) -> None:
        if self.sampling.top_p < 1 or self.sampling.top_k > 0:
            raise ValueError(
                "rollouts to train on must be sampled without top_p and top_k, or their log-probabilities are not the "
                f"policy's; got {self.sampling}"
            )
        for name in (
            "optimizer_steps_per_batch",
            "tokens_per_forward",
            "eval_every",
            "eval_samples",
            "keep_checkpoints",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_batches", "checkpoint_every"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise ValueError(f"{name} must be at least 1, or None, got {given}")
        if self.target is not None and not 0 < self.target <= 1:
            raise ValueError(f"target must be an accuracy in (0, 1], got {self.target}")
        if self.precision not in get_args(Precision):
            raise ValueError(f"precision must be one of {', '.join(get_args(Precision))}, got {self.precision!r}")
        if not (self.learning_rate > 0 and self.max_grad_norm > 0):
            raise ValueError(f"learning_rate and max_grad_norm must be above 0, got {self}")


class Trainer:
    """Trains a policy under a recipe.

    Args:
        policy: the model; trained in place.
        recipe: which prompts get how many rollouts; its budget ends the run.
        train: prompts to train on.
        scorer: rewards.
        settings: everything else.
        heldout: prompts to evaluate on; None: no evaluation.
        folder: gets `metrics.jsonl`, `rewards.json`, checkpoints, and at the end the model and the allocator's state;
            None: nothing is written.
        listener: called with each line of the metrics, for progress.
    """

    def __init__(
        self,
        policy: Policy,
        recipe: Recipe,
        train: EncodedPrompts,
        scorer: Scorer,
        settings: Settings,
        *,
        heldout: HeldOut | None = None,
        folder: Path | None = None,
        listener: Listener | None = None,
    ) -> None:
        self.policy, self.train, self.scorer, self.settings = policy, train, scorer, settings
        self.heldout, self.folder, self.listener = heldout, folder, listener
        self.allocator = Allocator(recipe, train.prompt_set.table(), settings.seed)
        logged = folder / checkpoint.ROLLOUTS if folder is not None and settings.log_rollouts else None
        self.roller = Roller(policy, train, scorer, settings.sampling, settings.seed, logged)
        self.updater = Updater(policy, train.tokens, settings)
        self._batches = 0
        self._seconds = 0.0  # spent on anything but evaluation
        self._next_at = 0  # the next grid point, in rollouts paid
        self._evaluated: tuple[int, Evaluation] | None = None  # the last, with the version of its weights
        self._accuracies: list[tuple[int, float]] = []  # of versions evaluated on the grid, where they have one
        self._barren_groups = 0  # groups trained since one had an advantage
        self._saved_at: int | None = None  # batches trained at the newest checkpoint of this run
        self._asked_to_stop = False
        self._made = self._spent()  # when the weights were made

    # ------------------------------------------------------------------------------------------------------- the loop

    def run(self) -> str:
        """Train until the budget is spent, the data are used up or the target is reached; returns why it ended.

        Raises:
            Stopped: SIGTERM came, and a checkpoint was written after the batch that was at work, or in the evaluation that
                was. Only a run with a folder, in the main thread, is stopped so.
            OSError: a checkpoint could not be written; the one before it is still there.
        """
        if self._saved_at is None and self.folder is not None:
            checkpoint.start_afresh(self.folder)
        with _sigterm_asks(self._ask_to_stop, when=self.folder is not None):
            try:
                return self._run()
            except _Interrupted:
                self._save()
                raise self._stopped("in an evaluation after") from None

    def _run(self) -> str:
        self._evaluate_until(0)
        why = self._why_stop()
        while why is None:
            if self.allocator.batch is None:  # one is there where the run was stopped in the evaluation before it
                why = self._roll_out()
            if batch := self.allocator.batch:
                # The batch's own weights come too late for the points that its rollouts went beyond.
                self._evaluate_until(self.allocator.paid - 1)
                self._train_on(batch)
                why = self._why_stop()
                if why is None:
                    self._save_if_due()
        self._finish(why)
        return why

    def _roll_out(self) -> str | None:
        """Have the allocator's orders carried out; says why the run is over, if it is."""
        started = time.perf_counter()
        actions = self.allocator.ask()
        self.roller.carry_out(actions, self.allocator)
        self._seconds += time.perf_counter() - started
        if actions.finished is None or 2 * self.allocator.accounts()["failed"] <= self.allocator.paid:
            return actions.finished
        return f"{actions.finished}. Most rollouts have no score, mostly because: {self.roller.commonest_failure()}"

    def _finish(self, why: str) -> None:
        """The last evaluation and everything that is written at the end; the metrics' last line says that it all is."""
        self._save()
        self._evaluate_until(self.allocator.paid)
        self._evaluate()
        if self.folder is not None:
            self.policy.save(self.folder / "model")
            (self.folder / "allocator.json").write_text(json.dumps(self.allocator.state_dict()))
            self._report()
        named = self._quarantined()[:_NAMED]
        self._write({"kind": "end", "why": why, **self._spent(), **self.allocator.away(), "quarantined_keys": named})

    def _why_stop(self) -> str | None:
        """Why the run is over after this batch, if it is."""
        target, latest = self.settings.target, [accuracy for _, accuracy in self._accuracies[-2:]]
        if target is not None and len(latest) == 2 and min(latest) >= target:
            return f"target: held-out accuracy {latest[-1]:.4f} reaches {target}"
        if self.settings.max_batches is not None and self._batches >= self.settings.max_batches:
            return f"max_batches: {self._batches} batches are trained"
        if self.settings.stop_when_barren and self._barren_groups >= max(_PATIENCE, len(self.train.tokens)):
            return (
                f"barren: the last {self._barren_groups} groups had no reward variance, so nothing was learned; prompts by "
                f"the fate of their last visit: {self.allocator.ledger.counts()}. For this model they are solved or "
                "impossible"
            )
        return None

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def resume(self, *, accept_recipe: bool = False, accept_data: bool = False) -> int:
        """Take the state of the newest whole checkpoint in the folder, so that `run` goes on from it.

        What the metrics hold beyond it is cut off: the run writes it again.

        Args:
            accept_recipe: go on under this trainer's recipe although the checkpoint was saved under another.
            accept_data: go on with this trainer's prompts although the checkpoint was saved with others; each is found again
                by its key. What is known of prompts that are gone is dropped, their rollouts too; how many are gone and how
                many are new is logged, and written to the metrics as a line of kind "resume".

        Returns:
            The batches trained so far.

        Raises:
            FileNotFoundError: no checkpoint.
            ValueError: no folder, no checkpoint that is whole, or one of another recipe, data set, model or other settings
                than when to end and when to save; names the difference. Nothing was changed.
        """
        if self.folder is None:
            raise ValueError("a trainer without a folder has no checkpoints; give it the folder of the run")
        saved = checkpoint.load_newest(self.folder)
        state = saved.state
        checkpoint.check_trainer(saved, self.folder)
        changed = self._changed_data(state)
        others = [*differences(_but_prompts(state["identity"]), _but_prompts(self._identity), "run")]
        if changed and not accept_data:
            others.append(f"run.prompts: {changed} (accept_data=True, or --accept-data, goes on with them)")
        elif changed and state["allocator"]["batch"] is not None:
            others.append(f"run.prompts: {changed}, and a batch of the old ones is still to be trained")
        if others:
            raise ValueError(
                f"the checkpoint after batch {saved.batches} in {self.folder} is of another run: {'; '.join(others)}; "
                "give what it was saved with, or start afresh in another folder"
            )
        checkpoint.check_written(self.folder, state["written"])
        others = list(differences(state["allocator"]["recipe"], self.allocator.recipe.description))
        remap = "keys" if changed else None
        self.allocator.load_state_dict(state["allocator"], accept_recipe=accept_recipe, remap=remap)
        if others:
            log.warning("going on under another recipe: %s", "; ".join(others))
        checkpoint.cut_written(self.folder, state["written"])
        checkpoint.load_weights(self.policy.model, saved.tensors["weights"])
        checkpoint.load_moments(self.policy.model, self.updater.optimizer, saved.tensors["optimizer"])
        self.roller.load_state(state["rollouts"], saved.tensors["payloads"])
        for name in _COUNTERS:
            setattr(self, f"_{name}", state["counters"][name])
        self.updater.steps = state["optimizer_steps"]
        self._saved_at = saved.batches
        if changed:
            self._barren_groups = 0  # counted groups of the old ones
            log.warning("going on with other prompts: %s", changed)
            self._write({"kind": "resume", **self._spent(), "lost": changed.lost, "new": changed.new})
        return saved.batches

    def _changed_data(self, state: Mapping[str, Any]) -> _ChangedData | None:
        """How the prompts differ from a checkpoint's; None where they do not."""
        if state["identity"]["prompts"] == self._identity["prompts"]:
            return None
        saved = state["allocator"]["prompts"]
        source_N = self.allocator.table.source_of(saved, "keys")
        assert source_N is not None
        new = int((source_N < 0).sum())
        return _ChangedData(lost=saved["count"] - (len(source_N) - new), new=new, kept=len(source_N) - new)

    def _save_if_due(self) -> None:
        every = self.settings.checkpoint_every
        if self._asked_to_stop or (every is not None and self._batches % every == 0):
            self._save()
        if self._asked_to_stop:
            raise self._stopped("after")

    def _stopped(self, when: str) -> Stopped:
        return Stopped(
            f"stopped by SIGTERM {when} batch {self._batches}; a checkpoint is in {self.folder}, resuming goes on from it"
        )

    def _save(self) -> None:
        """Write a checkpoint, unless there is one after this batch or the run writes nothing."""
        if self.folder is None or self._saved_at == self._batches:
            return
        rollouts, payloads = self.roller.state()
        state = {
            "identity": self._identity,
            "allocator": self.allocator.state_dict(),
            "counters": {name: getattr(self, f"_{name}") for name in _COUNTERS},
            "optimizer_steps": self.updater.steps,
            "rollouts": rollouts,
            "written": checkpoint.bytes_written(self.folder),
        }
        model = self.policy.model
        tensors = {
            "weights": checkpoint.weights(model),
            "optimizer": checkpoint.moments(model, self.updater.optimizer),
            "payloads": payloads,
        }
        checkpoint.save(self.folder, self._batches, state, tensors, keep=self.settings.keep_checkpoints)
        self._saved_at = self._batches
        self._report()

    def _ask_to_stop(self) -> None:
        self._asked_to_stop = True

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """What must be the same, besides the recipe, for a checkpoint to belong to this run."""
        may_differ = (*SAVING, *_ENDING, *_MEMORY)
        settings = {name: value for name, value in describe(self.settings).items() if name not in may_differ}
        model, heldout = self.policy.model, self.heldout
        shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
        return {
            "settings": settings,
            "prompts": _digest(self.train),
            "heldout": None
            if heldout is None
            else {"prompts": _digest(heldout.prompts), "answers": _sha(heldout.answers)},
            "model": {"is": type(model).__name__, "parameters": model.num_parameters(), "shapes": _sha(shapes)},
            "reference": self.updater.reference_digest(),
        }

    # -------------------------------------------------------------------------------------------------------- updates

    def _train_on(self, batch: Batch) -> None:
        """The configured number of optimizer steps on a batch; then the weights have a new version."""
        started = time.perf_counter()
        figures = self.updater.update(batch, self.roller.generations)
        self._batches += 1
        groups = len({row.group for row in batch.rows})
        self._barren_groups = 0 if any(row.advantage for row in batch.rows) else self._barren_groups + groups
        self.allocator.tell([Updated(batch.version + 1)])
        seconds = time.perf_counter() - started
        self._seconds += seconds
        self._made = self._spent()
        ages = [batch.version - row.version for row in batch.rows]
        self._write(
            {
                "kind": "batch",
                "batch": self._batches,
                **self._made,
                **self.roller.figures(),
                "rows": len(batch.rows),
                "groups": groups,
                "short_because": batch.short_because,
                "staleness_mean": float(np.mean(ages)),
                "staleness_max": max(ages),
                "ages": {str(age): ages.count(age) for age in sorted(set(ages))},
                **self.allocator.away(),
                **figures,
                "update_seconds": round(seconds, 4),
            }
        )

    # ------------------------------------------------------------------------------------------------------ evaluation

    def _evaluate_until(self, rollouts: int) -> None:
        """Evaluate at each point of the grid, up to that many rollouts, at which it was not done yet."""
        while self.heldout is not None and self._next_at <= rollouts:
            self._evaluate(self._next_at)
            self._next_at += self.settings.eval_every

    def _evaluate(self, at: int | None = None) -> None:
        """Write the held-out accuracy of the weights, beside what was paid when they were made.

        Args:
            at: the grid point; None: the last evaluation of the run.
        """
        if self.heldout is None:
            return
        started, version = time.perf_counter(), self.allocator.version
        if self._evaluated is None or self._evaluated[0] != version:
            self._evaluated = version, self._measure(self.heldout)
        found = self._evaluated[1]
        if at is not None and found.accuracy is not None and [version] != [known for known, _ in self._accuracies[-1:]]:
            self._accuracies.append((version, found.accuracy))
        line = {
            "kind": "eval",
            **self._made,
            "at": at,
            "accuracy": found.accuracy,
            "standard_error": found.standard_error,
            "eval_unscored": found.unscored,
        }
        self._write(line | {"eval_seconds": round(time.perf_counter() - started, 4)})

    def _measure(self, heldout: HeldOut) -> Evaluation:
        """Evaluate the weights as they are."""
        settings = self.settings
        found = evaluate(
            self.policy,
            heldout,
            self._score,
            sampling=settings.sampling,
            samples=settings.eval_samples,
            seed=settings.seed,
        )
        if found.accuracy is None:
            log.warning("no held-out sample has a score (%d unscored); the accuracy is not known", found.unscored)
        elif not isfinite(found.accuracy):
            raise FloatingPointError(
                f"the held-out accuracy is {found.accuracy} after {self.updater.steps} optimizer steps: the "
                "weights diverged; try a smaller learning rate"
            )
        return found

    def _score(self, prompts: EncodedPrompts, made: Sequence[tuple[int, Generation]]) -> list[Outcome]:
        """The outcomes of held-out samples, which may hang by the hundred; given up when the run is asked to stop."""
        future = self.roller.submit(prompts, made)
        while not future.done():
            if self._asked_to_stop:
                future.cancel()
                raise _Interrupted
            wait([future], _POLITE_S)
        return future.result()

    # --------------------------------------------------------------------------------------------------------- figures

    def _spent(self) -> dict[str, Any]:
        return {
            "rollouts_paid": self.allocator.paid,
            "tokens_paid": self.allocator.tokens_paid,
            "optimizer_steps": self.updater.steps,
            "version": self.allocator.version,
            "epoch": self.allocator.epoch,
            "seconds": round(self._seconds, 3),
            "accounts": self.allocator.accounts(),
            "unscored": dict(self.roller.unscored),
            "prompts": self.allocator.ledger.counts(),
        }

    def _quarantined(self) -> list[str]:
        """Keys of the prompts whose rollouts always failed."""
        return [self.train.prompt_set.keys[prompt] for prompt in self.allocator.quarantined()]

    def _report(self) -> None:
        """Write what scoring was like since this process began, and which prompts it has given up."""
        assert self.folder is not None
        report = self.scorer.report() | {"quarantined": self._quarantined()}
        checkpoint.write_whole(self.folder / checkpoint.REWARDS, json.dumps(report, indent=1))

    def _write(self, line: dict[str, Any]) -> None:
        if self.folder is not None:
            with (self.folder / checkpoint.METRICS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        if self.listener is not None:
            self.listener(line)


@contextmanager
def _sigterm_asks(ask: Callable[[], None], *, when: bool) -> Iterator[None]:
    """Let SIGTERM ask instead of kill, where that is wanted and this thread may decide it."""
    if not when or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: ask())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _but_prompts(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in identity.items() if name != "prompts"}


def _digest(prompts: EncodedPrompts) -> str:
    given = prompts.prompt_set
    return _sha([given.keys, prompts.tokens, given.sources, given.ground_truths, given.extra_infos])


def _sha(value: Any) -> str:
    return sha256(json.dumps(value, default=repr).encode()).hexdigest()[:16]
