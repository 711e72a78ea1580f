# pyright: reportMissingImports=false
# (verl and its dependencies are installed in a separate environment: constraints/verl-cpu.txt)
"""verl's three V1 trainers with a recipe: the core draws the prompts, and chooses the rows of each batch."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.workers.rollout.llm_server import LLMServerClient

from rollalloc.core.allocator import Allocator
from rollalloc.core.packing import exact_keys
from rollalloc.data.prompts import warn_of_copies, warn_of_shared
from rollalloc.drivers.verl.client import Client, ResumingClient, requests_left
from rollalloc.drivers.verl.configure import configure, overlap_of
from rollalloc.drivers.verl.diverging import check_update
from rollalloc.drivers.verl.loader import Prompts, fill_samples, refuse_columns_of
from rollalloc.drivers.verl.minibatches import optimizer_steps, rows_multiple, spread
from rollalloc.drivers.verl.reserved import READ_IN_VALIDATION
from rollalloc.drivers.verl.rounds import Finished, Rounds, Session, SessionOutcome, Submission, TrainingRows
from rollalloc.drivers.verl.settings import WITHOUT_GROUPS
from rollalloc.drivers.verl.step_metrics import COLUMNS
from rollalloc.files.regular import write_text
from rollalloc.models.settings import has_moved
from rollalloc.rules.advantages import Rewards
from rollalloc.runs.learning_signal import notices
from rollalloc.runs.metrics import PREFIX, of_batch, scalars

log = logging.getLogger(__name__)

_PARTITION = "train"
_STATE = "rollalloc.json"  # name of our file in each checkpoint folder


class _Buffer(ReplayBuffer):
    """verl's replay buffer. Validation works as in verl, but training batches come from the trainer."""

    def __init__(self, sample_training: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._sample_training = sample_training

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Return the keys of a batch, and metrics."""
        if partition_id == _PARTITION:
            return self._sample_training()
        return super().sample(global_steps, partition_id, batch_size)


class _Crew:
    """Implements `rounds.Crew` with verl's workers and verl's TransferQueue."""

    def __init__(self, trainer: RecipeTrainer) -> None:
        self._trainer = trainer

    def submit(self, submissions: Sequence[Submission]) -> None:
        trainer = self._trainer
        trainer.agent_loop_manager.generate_sequences(trainer.prompts.rows(submissions, trainer.global_steps))

    def cancel(self, sessions: Sequence[Session]) -> None:
        self._trainer.agent_loop_manager.cancel(sessions)

    def outcomes(self, wait: bool = True) -> Sequence[SessionOutcome]:
        return self._trainer.agent_loop_manager.outcomes(wait)

    def copy(self, keys: Mapping[str, str]) -> None:
        tags, fields = tq.kv_list(_PARTITION)[_PARTITION], tq.kv_batch_get(keys=list(keys), partition_id=_PARTITION)
        copied = [tags[key] for key in keys]
        tq.kv_batch_put(keys=list(keys.values()), partition_id=_PARTITION, fields=fields, tags=copied)

    def release(self, keys: Sequence[str]) -> None:
        tq.kv_clear(keys=list(keys), partition_id=_PARTITION)


class RecipeTrainer(PPOTrainer):
    """The changes that a recipe makes to verl's trainers. A subclass also derives from one of the three trainers.

    Attributes:
        overlaps: whether rollouts continue during an update.
    """

    overlaps = True

    def __init__(self, config: Any) -> None:
        self.settings = configure(config)
        self._trained: TrainingRows | None = None  # the current batch
        super().__init__(config)

    @property
    def _is_last_step(self) -> bool:
        return self.global_steps >= self.total_training_steps

    def fit(self, agent_loop_manager: Any) -> None:
        """Train until verl's last step, or until the recipe has no more batches."""
        try:
            super().fit(agent_loop_manager)
        except Finished as end:
            self._end_early(str(end))

    def _end_early(self, why: str) -> None:
        self.global_steps -= 1  # the current step has no batch
        log.warning("the run ends after step %d: %s", self.global_steps, why)
        trainer = self.config.trainer
        if trainer.test_freq > 0 and self.global_steps % trainer.test_freq:
            self.logger.log(data=self._validate(), step=self.global_steps)
        if trainer.save_freq > 0 and self.global_steps % trainer.save_freq:
            self._save_checkpoint()
        self._shutdown_dump_executor()

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> KVBatchMeta:
        """Run one training step, then tell the core that the weights changed. verl writes checkpoints after this call."""
        batch = super().step(metrics, timing_raw)
        self.rounds.trained(self.global_steps)
        return batch

    # ------------------------------------------------------------------------------------------------- what to train on

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        recipe, features = self.settings.recipe, self.settings.features
        self.prompts = Prompts(self.config.data, self.train_dataset, limited=recipe.limit is not None)
        refuse_columns_of(self.val_dataset, "data.val_files", READ_IN_VALIDATION)
        fill_samples(self.val_dataset, self.config.actor_rollout_ref.rollout.val_kwargs.n)
        train, held = (getattr(dataset, "dataframe", None) for dataset in (self.train_dataset, self.val_dataset))
        prompt_key = self.config.data.get("prompt_key", "prompt")
        warn_of_shared(train, held, "data.val_files", prompt_key)
        if train is not None and prompt_key in getattr(train, "column_names", ()):
            warn_of_copies(train[prompt_key], "data.train_files")
        self.train_dataloader = self.prompts.index_loader
        if recipe.reads_features and features is None:
            log.warning(
                "no features: until a prompt has outcomes, it is predicted to succeed as often as the average prompt"
            )
        if not self.settings.own_advantages and self.config.algorithm.adv_estimator in WITHOUT_GROUPS:
            recipe = replace(recipe, advantage=Rewards())  # a rollout teaches, whatever the others of its group are
        allocator = Allocator(recipe, self.prompts.table(features), self.settings.seed)
        loader = self.prompts if self.settings.loader_draws else None
        overlap = overlap_of(self.config)
        patience = None if overlap is None else overlap.patience(recipe)
        self.rounds = Rounds(allocator, _Crew(self), loader, self.overlaps, patience)

    def _build_replay_buffer(self) -> ReplayBuffer:
        sampler = self.config.trainer.v1.sampler
        return _Buffer(
            self._sample,
            trainer_mode=self.trainer_mode,
            trainer_config=self.config.trainer.v1.rollalloc,
            max_off_policy_threshold=sampler.max_off_policy_threshold,
            max_off_policy_strategy=sampler.max_off_policy_strategy,
            sampler_kwargs=sampler.sampler_kwargs,
            poll_interval=self.settings.poll_interval,
        )

    def on_train_begin(self) -> None:
        """Do nothing. verl would submit prompts here, but under a recipe `Rounds` submits the core's orders."""

    def prepare_step(self) -> dict[str, Any]:
        """Do nothing. verl would submit prompts here, but under a recipe `Rounds` submits the core's orders."""
        return {}

    def _sample(self) -> tuple[KVBatchMeta, dict[str, Any]]:
        rows = self._trained = self.rounds.next_batch(self._is_last_step)
        if rows.batch.short_because:
            log.warning("step %d: a short batch: %s", self.global_steps, rows.batch.short_because)
        for reason, count in self.rounds.reasons.items():
            log.warning("step %d: %d rollouts failed: %s", self.global_steps, count, reason)
        if self.settings.notices:
            for line in notices(self.rounds.allocator):
                log.warning("step %d: %s", self.global_steps, line)
        keys = list(rows.keys)
        if len(self.settings.recipe.stages) > 1 or self.overlaps:  # verl's estimators group rows by this field
            groups = np.array([f"g{row.group}" for row in rows.rows], dtype=object)
            tq.kv_batch_put(keys=keys, partition_id=_PARTITION, fields=tu.get_tensordict({"uid": groups}))
        tags = tq.kv_list(_PARTITION)[_PARTITION]
        metrics: dict[str, Any] = self.rounds.metrics(rows.batch)
        show_groups(self.logger, self.rounds.groups_table(), self.global_steps)
        if self.settings.recipe.stopping and not self.overlaps:
            metrics["rollalloc/requests_left"] = self._requests_left()
        return KVBatchMeta(partition_id=_PARTITION, keys=keys, tags=[tags[key] for key in keys]), metrics

    def _requests_left(self) -> int:
        servers = [server for replica in self.llm_server_manager.get_replicas() for server in replica.servers[:1]]
        return sum(ray.get([server.__ray_call__.remote(requests_left) for server in servers]))

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self._admit(metrics)
        batch = super()._compute_advantage(batch, metrics)
        assert self._trained is not None
        own = self.settings.own_advantages
        factors = self._trained.factors(own, self.config.algorithm.adv_estimator not in WITHOUT_GROUPS)
        if not own and all(factor == 1 for factor in factors.values()):
            return batch
        field = "response_mask" if own else "advantages"
        values = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[field])[field]
        scaled = [  # the factor of padding rows is 0
            value.float() * factors.get(key, 0.0) for key, value in zip(batch.keys, values.unbind(), strict=True)
        ]
        nested = torch.nested.as_nested_tensor(scaled, layout=torch.jagged)
        fields = TensorDict({"advantages": nested}, batch_size=len(batch.keys))
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def _admit(self, metrics: dict[str, Any]) -> None:
        """Let the recipe's gate decide whether the replayed rows of the batch are trained on."""
        rows, core, moved = self._trained, self.rounds.allocator, None
        assert rows is not None
        if self.settings.recipe.gate is None:
            return
        if keys := [key for key, row in zip(rows.keys, rows.rows, strict=True) if row.replays]:
            fields = ["old_log_probs", "rollout_log_probs", "response_mask"]
            data = tq.kv_batch_get(keys=keys, partition_id=_PARTITION, select_fields=fields)
            now, before, own = (torch.cat([*data[field].unbind()]) for field in fields)
            moved = has_moved((now - before)[own.bool()]).float().mean().item()
            rows = self._trained = self.rounds.admit(rows, moved)
            if self.settings.notices and (line := core.shut_gate()) is not None:
                log.warning("step %d: %s", self.global_steps, line)
        # Again, because the figures of `Rounds.metrics` are of the batch before the gate.
        metrics |= scalars(of_batch(core, rows.batch) | {"moved": moved, "left_out": core.left_out})

    def _log_rollout_data(self, batch: KVBatchMeta, timing_raw: dict[str, Any], rollout_data_dir: str) -> None:
        """Write rollouts to disk as verl does, but without padding rows, and without replayed rows, which are on disk."""
        assert self._trained is not None
        fresh = {key for key, row in zip(self._trained.keys, self._trained.rows, strict=True) if not row.replays}
        indices = [index for index, key in enumerate(batch.keys) if key in fresh]
        keys, tags = [batch.keys[index] for index in indices], [batch.tags[index] for index in indices]
        written = KVBatchMeta(partition_id=batch.partition_id, keys=keys, tags=tags)
        super()._log_rollout_data(written, timing_raw, rollout_data_dir)

    # --------------------------------------------------------------------------------------------------- mini-batches

    @property
    def _actor_steps(self) -> int:
        return self._steps(self.config.actor_rollout_ref.actor.ppo_mini_batch_size)

    @property
    def _critic_steps(self) -> int:
        return self._steps(self.config.critic.ppo_mini_batch_size)

    def _steps(self, mini_batch_size: int) -> int:
        assert self._trained is not None
        return optimizer_steps(self.config.data.train_batch_size // mini_batch_size, len(self._trained.keys))

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        actor, rollout = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout
        steps = [self._actor_steps, *([self._critic_steps] if self.use_critic else [])]
        dynamic = actor.use_dynamic_bsz
        return rows_multiple(
            dp_size,
            steps,
            None if dynamic else actor.ppo_micro_batch_size_per_gpu,
            None if dynamic else rollout.log_prob_micro_batch_size_per_gpu,
        )

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> KVBatchMeta:
        batch = super()._balance_batch(batch, metrics, *args, **kwargs)
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        padding = [tag.get("is_padding", False) for tag in batch.tags]
        metrics["rollalloc/padding_rows"] = sum(padding)
        batch.reorder(spread(padding, ranks, self._actor_steps))
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        rows = len(batch.keys) // self._actor_steps
        metrics["rollalloc/steps_in_batch"] = self._actor_steps
        with self._rows_per_step(self.config.actor_rollout_ref.actor, rows):
            batch = super()._update_actor(batch, metrics)
        self._check_update(metrics, "actor", self.config.actor_rollout_ref.actor)
        return batch

    def _update_critic(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        with self._rows_per_step(self.config.critic, len(batch.keys) // self._critic_steps):
            batch = super()._update_critic(batch, metrics)
        self._check_update(metrics, "critic", self.config.critic)
        return batch

    def _check_update(self, metrics: Mapping[str, Any], role: str, network: Any) -> None:
        assert self._trained is not None
        folder = Path(self.config.trainer.default_local_dir)
        check_update(metrics, role, network, step=self.global_steps, batch=self._trained.batch, folder=folder)

    @contextmanager
    def _rows_per_step(self, network: Any, rows: int) -> Iterator[None]:
        """A context in which verl's mini-batches have `rows` rows instead of ppo_mini_batch_size · rollout.n."""
        rollout = self.config.actor_rollout_ref.rollout
        before = network.ppo_mini_batch_size, rollout.n
        with open_dict(self.config):
            network.ppo_mini_batch_size, rollout.n = rows, 1
            try:
                yield
            finally:
                network.ppo_mini_batch_size, rollout.n = before

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def _save_checkpoint(self) -> None:
        """Write our state, then verl's part of the checkpoint.

        verl marks a checkpoint as the latest when verl's part is complete, so our part must be written first. If writing
        verl's part fails, our part is removed.
        """
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        state = {"rounds": self.rounds.state_dict(), "epoch": self.prompts.epoch, "step": self.global_steps}
        write_text(folder / _STATE, json.dumps(state))
        try:
            super()._save_checkpoint()
        except BaseException:  # without our state, a resume reports that the folder is corrupt
            (folder / _STATE).unlink(missing_ok=True)
            raise

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if not self.global_steps:
            return
        trainer = self.config.trainer
        named = trainer.resume_from_path if trainer.resume_mode == "resume_path" else None
        path = Path(named or Path(trainer.default_local_dir) / f"global_step_{self.global_steps}") / _STATE
        if not path.exists():
            raise ValueError(
                f"{path} is missing: the checkpoint was not written with a trainer mode of rollalloc, or is corrupt; resume "
                "from another one, or start afresh with trainer.resume_mode=disable"
            )
        state = _read_state(path)
        if state["step"] != self.global_steps:
            raise ValueError(
                f"{path} is corrupt: it is of step {state['step']}, but verl resumes at {self.global_steps}"
            )
        present = set(tq.kv_list(_PARTITION).get(_PARTITION, {}))
        unneeded = self.rounds.load_state_dict(state["rounds"], present)
        self.prompts.epoch = state["epoch"]
        if unneeded:
            self.rounds.crew.release(sorted(unneeded))


def show_groups(logger: Any, groups: Sequence[tuple[Any, ...]], step: int) -> None:
    """Log a step's table of groups to W&B, if verl logs there.

    Args:
        logger: verl's `Tracking` object.
        groups: rows with the columns of `step_metrics.COLUMNS`.
        step: verl's number of the step.
    """
    wandb = logger.logger.get("wandb")
    if wandb is not None and groups:
        table = wandb.Table(columns=list(COLUMNS), data=[list(row) for row in groups])
        wandb.log({f"{PREFIX}/groups_table": table}, step=step)


def _read_state(path: Path) -> dict[str, Any]:
    """Read our state from a checkpoint. Raise a ValueError if `_save_checkpoint` did not write this file."""
    try:
        state = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is corrupt: {error}; resume from another checkpoint") from error
    exact_keys(state, ("rounds", "epoch", "step"), f"{path} is corrupt; resume from another checkpoint")
    return state


@register_trainer("rollalloc")
class RollallocTrainer(RecipeTrainer, PPOTrainerSync):
    """`trainer.v1.trainer_mode=rollalloc`: synchronous training. Update and generation share the devices."""

    overlaps = False

    def get_llm_client(self) -> LLMServerClient:
        """verl's client, with the ability to stop single requests."""
        return self.llm_server_manager.get_client(client_cls=Client)


@register_trainer("rollalloc_colocate_async")
class RollallocColocateAsync(RecipeTrainer, PPOTrainerColocateAsync):
    """Asynchronous training on shared devices. Rollouts that an update interrupts continue after the update."""

    def get_llm_client(self) -> LLMServerClient:
        """verl's client, with the ability to continue interrupted requests and to stop single requests."""
        return self.llm_server_manager.get_client(client_cls=ResumingClient)


@register_trainer("rollalloc_separate_async")
class RollallocSeparateAsync(RecipeTrainer, PPOTrainerSeparateAsync):
    """Asynchronous training with separate devices for generation, which continues during an update.

    Between the stages of an update, finished rollouts are reported to the core, and the core's new orders and stops are
    carried out.
    """

    def get_llm_client(self) -> LLMServerClient:
        """verl's client for servers on separate devices, with the abilities of `RollallocColocateAsync`'s client."""
        return self.standalone_server_manager.get_client(client_cls=ResumingClient)

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch = super()._compute_old_log_prob(batch, metrics)
        self.rounds.attend(self._is_last_step)
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self.rounds.attend(self._is_last_step)
        batch = super()._update_actor(batch, metrics)
        self.rounds.attend(self._is_last_step)
        return batch
