"""Saves and restores the recipe's state with TRL's checkpoints, and reports trained batches to the core.

The metrics of a batch are TRL's own under TRL's names, and the recipe's under `rollalloc/`.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DefaultFlowCallback, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME

from rollalloc.core.events import Batch
from rollalloc.core.packing import differences, exact_keys
from rollalloc.core.prompts import GONE
from rollalloc.drivers.trl.allocation import Allocation
from rollalloc.drivers.trl.averaging import AveragedWeights
from rollalloc.drivers.trl.checkpoints import (
    FOLDER,
    FiniteTraining,
    checkpoint_of,
    killed_within,
    newest_whole,
    numbered,
    refuse_without_state,
)
from rollalloc.drivers.trl.checks import check_saving
from rollalloc.drivers.trl.dataset import keyed
from rollalloc.drivers.trl.distributed import uninterrupted
from rollalloc.drivers.trl.generation import steps_per_batch
from rollalloc.drivers.trl.rewards import RewardFunctions, Score
from rollalloc.drivers.trl.rollout import Rollout
from rollalloc.generate.sampler import pack_generations, unpack_generations
from rollalloc.models import checkpoint
from rollalloc.runs.learning_signal import notices
from rollalloc.runs.metrics import of_batch, pass_at_k, prediction, scalars, totals

log = logging.getLogger(__name__)

# Fields of a rollout that are saved in addition to its generation.
_SAVED = ("prompt", "prompt_tokens", "texts", "own", "scores_F", "logged")
# Features that the model computed are saved, because later weights would give other values.
_FEATURES = "features"
_CORE = "allocator"  # the core's state as JSON, compressed because most records of a long data set are empty

Figures = dict[str, float]


def generated_figures(allocation: Allocation) -> Figures:
    """Metrics of all rollouts that were generated to their end, including those that are not trained on.

    A mean over the trained rollouts would mislead, because the recipe selects them.
    """
    rewards, everything = allocation.rewards, allocation.generated
    made = [rollout for rollout in everything if not rollout.made.cancelled]
    counts: Figures = {
        "rollalloc/generated": len(everything),
        "rollalloc/stopped": len(everything) - len(made),
        "rollalloc/failed": allocation.failed,
    }
    if not made:
        return counts if everything else {}
    found = _lengths("completions", [rollout.length for rollout in made])
    found["completions/clipped_ratio"] = float(np.mean([rollout.made.truncated for rollout in made]))
    found |= _lengths("completions", [rollout.length for rollout in made if not rollout.made.truncated], "_terminated")
    for at, name in enumerate(rewards.names):
        scores = [score for rollout in made if (score := rollout.scores_F[at]) is not None]
        found |= _moments(f"rewards/{name}/mean", f"rewards/{name}/std", scores)
    scored = [reward for rollout in made if (reward := rewards.reward(rollout.scores_F)) is not None]
    found |= _moments("reward", "reward_std", scored)
    found |= {name: float(np.mean(values or [0.0])) for name, values in allocation.logged.items()}
    own = [slice(None) if rollout.own is None else np.array(rollout.own) for rollout in everything]
    logprobs_T = np.concatenate([rollout.made.logprobs[at] for rollout, at in zip(everything, own, strict=True)])
    if logprobs_T.size and not np.isnan(logprobs_T).any():
        # The mean is over all rollouts. TRL's entropy is a mean over trained rows only.
        found["rollalloc/entropy"] = -float(logprobs_T.mean())
    return found | counts


def batch_figures(allocation: Allocation, batch: Batch) -> Figures:
    """Metrics of the rows that are trained on."""
    groups: dict[int, list[float]] = {}
    for row in batch.rows:
        if not row.replays:
            groups.setdefault(row.group, []).append(row.advantage)
    equal = float(np.mean([not any(advantages) for advantages in groups.values()]))
    core = allocation.allocator
    gated = {} if core.recipe.gate is None else {"moved": allocation.moved, "left_out": core.left_out}
    return {"frac_reward_zero_std": equal} | scalars(of_batch(core, batch) | gated)


def evaluated_figures(
    rewards: RewardFunctions, scores_BF: Sequence[Sequence[Score]], completions: Sequence[Sequence[int]], each: int
) -> Figures:
    """Metrics of an evaluation: success in several attempts (pass@k), and how much a prompt's right answers differ.

    Args:
        rewards: the reward functions.
        scores_BF: one score per completion and function. The completions of a prompt follow one another.
        completions: token ids of this process's completions. If other processes have some of the B completions, the metrics
            that compare answers are left out.
        each: number of completions per prompt.
    """
    if rewards.is_weighted_sum:
        return {}  # a score of 1 does not mean a right answer
    metrics = [np.nan if (metric := rewards.selected_by(scores_F)) is None else metric for scores_F in scores_BF]
    if not metrics or len(metrics) % each:
        return {}
    metrics_NE = np.array(metrics, np.float64).reshape(-1, each)
    scored_N = np.asarray(~np.isnan(metrics_NE).all(axis=1))
    if not scored_N.any():
        return {}
    all_here = len(completions) == len(metrics)
    answers = [hash(tuple(ids)) for ids in completions] if all_here else [0] * len(metrics)
    found = pass_at_k(np.array(answers).reshape(-1, each)[scored_N], metrics_NE[scored_N])
    if not all_here:
        del found["distinct_right"], found["right_pairs_differ"]
    return scalars({"breadth": found})


def running_totals(allocation: Allocation) -> Figures:
    """Totals of the run so far: rollouts and tokens, the state of the prompts, and the quality of predictions."""
    core = allocation.allocator
    return scalars(totals(core) | prediction(core) | {"held": {"rollouts": len(allocation.rollouts)}})


def tokens_generated(made: Sequence[Rollout]) -> int:
    """Number of tokens of prompts and completions, as TRL's `num_tokens` counts them.

    A rollout that was stopped before it began does not count.
    """
    return sum(len(rollout.prompt_tokens) + rollout.length for rollout in made if rollout.made.tokens)


def _lengths(prefix: str, lengths: Sequence[int], kind: str = "") -> Figures:
    lengths = lengths or [0]
    return {
        f"{prefix}/{name}{kind}_length": float(statistic(lengths))
        for name, statistic in (("mean", np.mean), ("min", np.min), ("max", np.max))
    }


def _moments(mean: str, std: str, values: Sequence[float]) -> Figures:
    return (
        {mean: float(np.mean(values)), std: float(np.std(values, ddof=1)) if len(values) > 1 else 0.0} if values else {}
    )


class AllocationCallback(TrainerCallback):
    """Saves the recipe's state in the trainer's checkpoints, and loads it when the trainer resumes.

    Attributes:
        allocation: the recipe's state.
        averaged: the averaged weights.
        finite: checks that the weights are finite before training begins.
        accept_recipe: True: resume even if the checkpoint was saved with another recipe.
        accept_data: True: resume even if prompts of the checkpoint are missing in the data set.
        notices: True: warn when most of the recent rollouts had no effect on training.
        resume_from: the checkpoint that the trainer will resume from. None: the checkpoint of the trainer's current step,
            in its output folder.
    """

    def __init__(
        self,
        allocation: Allocation,
        averaged: AveragedWeights,
        finite: FiniteTraining,
        *,
        accept_recipe: bool,
        accept_data: bool,
        notices: bool = True,
    ) -> None:
        self.allocation, self.averaged, self.finite = allocation, averaged, finite
        self.accept_recipe, self.accept_data, self.notices = accept_recipe, accept_data, notices
        self.resume_from: Path | None = None
        self._began = False  # whether the optimizer has taken a step on the outstanding batch

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Load the checkpoint that the trainer resumes from.

        Without a checkpoint, a batch counts as trained if the last call of `train` ended between two of the batch's
        optimizer steps.
        """
        check_saving(args, state)
        if state.global_step:
            place = self.resume_from or checkpoint_of(args, state)
            saved = read(place)
            trained = saved.tensors.get(checkpoint.TRAINED)
            self.finite.begin(place, trained or {})
            self.averaged.check(trained, place)
            load(self.allocation, saved, place, accept_recipe=self.accept_recipe, accept_data=self.accept_data)
            self.averaged.begin(trained)
        else:
            self.finite.begin()
            if self._began and self.allocation.allocator.batch:
                log.warning(
                    "the last training ended between the optimizer steps of a batch; the batch counts as trained"
                )
                self.allocation.trained()
            self.averaged.begin(None)
        self._began = False

    def resume(self, given: str | bool | None, output_dir: Any) -> str | bool | None:
        """Find the checkpoint to resume from, and store its path for `on_train_begin`.

        Args:
            given: the argument `resume_from_checkpoint` of `train`. True: the newest complete checkpoint. If the run was
                killed while it saved its first checkpoint, the run starts from the beginning.
            output_dir: the trainer's output folder.

        Returns:
            The value to pass to TRL's `train`.

        Raises:
            FileNotFoundError: the checkpoint is incomplete or has no state of rollalloc.
        """
        if given is True and (places := numbered(str(output_dir))):
            whole = newest_whole(places)
            given = str(whole or places[0])
            if whole is None and all(killed_within(place) for place in places):
                log.warning(
                    "%s: the run was killed while it saved its first checkpoint, so there is nothing to resume from; "
                    "the run starts afresh",
                    places[0],
                )
                given = None
        self.resume_from = None if isinstance(given, bool | None) else Path(given)
        if self.resume_from is not None and self.resume_from.is_dir():
            refuse_without_state(self.resume_from)
        return given

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        self._began = True
        if self.allocation.finished:
            # The recipe has finished, so all rows are padding. Without gradients, the optimizer changes nothing.
            model.zero_grad(set_to_none=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % steps_per_batch(args):
            return
        if self.allocation.finished:
            log.warning("the recipe has finished: %s", self.allocation.finished)
            last = copy(state)
            last.max_steps = state.global_step
            DefaultFlowCallback().on_step_end(args, last, control)  # evaluates, saves and stops as at max_steps
        else:
            if self.notices and state.is_world_process_zero:
                for line in notices(self.allocation.allocator, self._of_a_sum()):
                    log.warning("%s", line)
            self.allocation.trained()
            self._began = False

    def _of_a_sum(self) -> str:
        """For a warning about rewards: which functions they are the sum of. Empty if there is only one function."""
        rewards = self.allocation.rewards
        if not rewards.is_weighted_sum or len(rewards.names) == 1:
            return ""
        return (
            f". Right and wrong are judged by the weighted sum of {', '.join(rewards.names)}. The functions may differ "
            "between rollouts and yet cancel each other out in the sum"
        )

    def before_saving(self, args: Any, state: Any) -> None:
        """Write the recipe's state, before the trainer writes its part of the checkpoint.

        The trainer writes `trainer_state.json` last, so a checkpoint with this file and the recipe's state is complete.
        Then the trainer removes older checkpoints, so a run that is killed while it saves still has the previous checkpoint.
        """
        place = checkpoint_of(args, state)
        if args.should_save:  # remove files of an earlier run, which would look like part of this checkpoint
            (place / TRAINER_STATE_NAME).unlink(missing_ok=True)
            if (place / FOLDER).is_dir():
                checkpoint.remove_all(place / FOLDER)
        if self.allocation.allocator.batch is not None:
            log.warning(
                "%s was saved between the optimizer steps of one batch, so no run can resume from it; save at multiples "
                "of %d steps",
                place,
                steps_per_batch(args),
            )
        elif args.should_save:
            save(self.allocation, place, self.averaged.to_save())


def save(
    allocation: Allocation,
    place: Path,
    trained: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write the recipe's state, and the rollouts that the core still needs, into a checkpoint, as safetensors and JSON.

    Args:
        allocation: the state to save.
        place: folder of the checkpoint.
        trained: the trained weights, if the checkpoint's model has averaged weights; otherwise None.

    Raises:
        OSError: a file could not be written.
    """
    held = list(allocation.rollouts.values())
    described, tensors = pack_generations([rollout.made for rollout in held])
    of_each = [{name: _plain(getattr(rollout, name)) for name in _SAVED} for rollout in held]
    state = {"generations": described, "rollouts": of_each}
    (place / FOLDER).mkdir(parents=True, exist_ok=True)
    core = json.dumps({"state": allocation.allocator.state_dict(), "keys": allocation.keys})
    packed = torch.frombuffer(bytearray(zlib.compress(core.encode(), level=1)), dtype=torch.uint8)
    files: dict[str, Any] = {"generations": tensors, _CORE: {"json": packed}}
    if allocation.made is not None:
        files[_FEATURES] = {name: torch.tensor(block_ND) for name, block_ND in allocation.made.items()}
    if trained is not None:
        files[checkpoint.TRAINED] = trained
    checkpoint.save(place / FOLDER, allocation.allocator.version, state, files, keep=1)


def read(place: Path) -> checkpoint.Checkpoint:
    """Read the state that `save` wrote into a checkpoint.

    Raises:
        FileNotFoundError: the checkpoint has no state of rollalloc.
        ValueError: a file is missing or was changed; the message names it.
    """
    refuse_without_state(place)
    try:
        return checkpoint.load_newest(place / FOLDER)
    except checkpoint.CorruptCheckpoint as error:
        raise ValueError(f"{error}, or resume from another checkpoint in {place.parent}") from None


def load(
    allocation: Allocation, saved: checkpoint.Checkpoint, place: Path, *, accept_recipe: bool, accept_data: bool
) -> None:
    """Restore the recipe's state from a checkpoint.

    Prompts are matched by their keys, so the data set may be in another order. If prompts are new or missing, the log says
    how many.

    Args:
        allocation: the object that gets the state.
        saved: the result of `read`.
        place: folder of the checkpoint.
        accept_recipe: True: load even if the state was saved with another recipe.
        accept_data: True: load even if prompts are missing in the data set. Their records and rollouts are dropped.

    Raises:
        ValueError: the recipe, the seed or the data set differs; the message names the difference.
    """
    exact_keys(saved.state, ("generations", "rollouts"), "rollalloc's state")
    core = json.loads(zlib.decompress(saved.tensors[_CORE]["json"].numpy().tobytes()))
    exact_keys(core, ("state", "keys"), "rollalloc's state")
    _check_run(allocation, core["state"], place, accept_recipe)
    source_N = _moved(allocation, core["keys"], place, accept_data)
    here = None if source_N is None else {old: new for new, old in enumerate(source_N.tolist()) if old != GONE}
    made = unpack_generations(saved.state["generations"], saved.tensors["generations"])
    rollouts = {
        each.rollout: Rollout(
            prompt=of["prompt"] if here is None else here.get(of["prompt"], GONE),
            prompt_tokens=tuple(of["prompt_tokens"]),
            made=each,
            texts=tuple(of["texts"]),
            own=of["own"] and tuple(of["own"]),
            scores_F=of["scores_F"],
            logged=of["logged"],
        )
        for each, of in zip(made, saved.state["rollouts"], strict=True)
    }
    _prepare(allocation, saved.tensors.get(_FEATURES), moved=source_N is not None)
    with uninterrupted():
        allocation.allocator.load_state_dict(core["state"], accept_recipe=accept_recipe, remap=source_N)
        allocation.rollouts = rollouts


def _check_run(allocation: Allocation, core: Mapping[str, Any], place: Path, accept_recipe: bool) -> None:
    """Raise an error if the checkpoint has another seed or, without `accept_recipe`, another recipe."""
    if core["seed"] != allocation.allocator.seed:
        raise ValueError(
            f"{place} was saved with seed {core['seed']}, this run has seed {allocation.allocator.seed}; set GRPOConfig's "
            "seed to the saved one"
        )
    if others := "; ".join(differences(core["recipe"], allocation.allocator.recipe.description)):
        if not accept_recipe:
            raise ValueError(
                f"{place} was saved under another recipe: {others}. Use the saved recipe or, to continue with this "
                "one, set accept_recipe=True"
            )
        log.warning("resuming from %s with another recipe: %s", place, others)


def _moved(allocation: Allocation, saved: Any, place: Path, accept_data: bool) -> NDArray[np.int64] | None:
    """For each prompt, its index in the saved data set, or -1 if it is new. None if both data sets have the same keys."""
    if saved == allocation.keys:
        return None
    source_N = keyed(allocation.dataset, allocation.key).source_of(saved, "keys")
    assert source_N is not None
    kept = int((source_N >= 0).sum())
    lost, new = saved["count"] - kept, len(source_N) - kept
    if lost and not accept_data:
        raise ValueError(
            f"{lost} of the {saved['count']} prompts that {place} was saved with are not in this data set, {new} of its "
            f"{len(source_N)} are new (prompts are identified by {allocation.key or 'their text'}). Give the saved data or, "
            "to continue without these prompts, set accept_data=True"
        )
    log.warning("resuming from %s with other data: %d prompts found again, %d missing, %d new", place, kept, lost, new)
    return source_N


def _prepare(allocation: Allocation, saved: Mapping[str, torch.Tensor] | None, *, moved: bool) -> None:
    """Take the saved features. If the data set changed, compute the features again."""
    if saved is not None and not moved:
        allocation.prepare({name: tensor.numpy() for name, tensor in saved.items()})
        return
    allocation.prepare()
    if saved is not None and allocation.made is not None:
        log.warning(
            "the data changed, so features were computed again from the current weights; predictions are poor at first. To "
            "avoid this, give a file of features (features=FILE)"
        )


def _plain(logged: Any) -> Any:
    """Convert a value to plain data for JSON. NumPy numbers become Python numbers, unknown objects become text."""
    return json.loads(json.dumps(logged, default=lambda value: value.item() if hasattr(value, "item") else str(value)))
