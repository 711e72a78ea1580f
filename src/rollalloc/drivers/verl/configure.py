# pyright: reportMissingImports=false
# (verl and its dependencies are installed in a separate environment: constraints/verl-cpu.txt)
"""Checks verl's configuration for a run with a recipe, and sets the keys that the recipe needs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf, open_dict

from rollalloc.core.recipe import at_least, doubts, unteachable
from rollalloc.core.rule import called
from rollalloc.drivers.verl.modes import Overlap, verls_mode
from rollalloc.drivers.verl.moved import refuse_moved_keys
from rollalloc.drivers.verl.paths import make_absolute
from rollalloc.drivers.verl.reserved import SINGLE_TURN, refuse_reward_arguments
from rollalloc.drivers.verl.settings import SECTION, WITHOUT_GROUPS, VerlSettings, read_settings
from rollalloc.rewards.overlong import doubts_of_penalty

MANAGER = "rollalloc.drivers.verl.workers.Manager"
log = logging.getLogger(__name__)
_OR_NO_STOPS = "or choose a recipe that does not stop rollouts"
# The engines in which `client` can abort single requests, and that read `max_tokens` of a request.
ENGINES_THAT_STOP = ("vllm", "sglang")


def configure(config: Any) -> VerlSettings:
    """Check the configuration, complete it in place, and return the settings of our section. A second call changes nothing.

    Args:
        config: verl's configuration, with one of our modes as `trainer.v1.trainer_mode`.

    Raises:
        ValueError: a key or value of our section is wrong, or contradicts a key of verl. The message says what to do.
    """
    section = config.trainer.v1.get("rollalloc") or OmegaConf.create({})
    if not OmegaConf.is_dict(section):
        raise ValueError(f"{SECTION} must be a section, as +{SECTION}.recipe=dapo makes it, got {section!r}")
    make_absolute(config)
    section = OmegaConf.to_container(config.trainer.v1.get("rollalloc") or section, resolve=True)
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    refuse_reward_arguments((config.reward.get("custom_reward_function") or {}).get("reward_kwargs") or ())
    at_least("actor_rollout_ref.actor.ppo_mini_batch_size", actor.ppo_mini_batch_size, 1)
    at_least("trainer.nnodes", config.trainer.nnodes, 1)
    at_least("trainer.n_gpus_per_node", config.trainer.n_gpus_per_node, 1)
    refuse_moved_keys(config)
    refuse_limits_of_vllm(rollout)
    mode = verls_mode(config.trainer.v1.trainer_mode)
    overlap = overlap_of(config)
    sizes = config.data.train_batch_size, rollout.n
    settings = read_settings(section, *sizes, overlap)  # pyright: ignore[reportArgumentType]
    if overlap is not None:
        overlap.patience(settings.recipe)  # raises an error if the strategy contradicts the limit
    conflicts = [*_conflicts(config, settings), *(_conflicts_of_separate(config) if mode == "separate_async" else ())]
    if conflicts:
        raise ValueError(conflicts[0])
    penalty = ((config.reward.get("reward_kwargs") or {}).get("overlong_buffer_cfg") or {}).get("enable")
    for doubt in (*doubts(settings.recipe), *(doubts_of_penalty(settings.recipe) if penalty else ())):
        log.warning(doubt)
    with open_dict(config):
        rollout.agent.agent_loop_manager_class = MANAGER
        if settings.recipe.trains_older_rows and settings.rollout_correction:
            rollout.calculate_log_probs = True
            correction = config.algorithm.get("rollout_correction") or OmegaConf.create({})
            if correction.get("rollout_is") is None:
                config.algorithm.rollout_correction = OmegaConf.merge(
                    correction, {"rollout_is": "token", "rollout_is_threshold": 2.0}
                )
    return settings


def refuse_limits_of_vllm(rollout: Any) -> None:
    """Raise an error for limits that vLLM would refuse when it starts, after Ray and the model have been loaded.

    Args:
        rollout: verl's `actor_rollout_ref.rollout`. As in verl, values in `engine_kwargs.vllm` have precedence.

    Raises:
        ValueError: max_num_batched_tokens is below max_num_seqs; or, without chunked prefill, below max_model_len.
    """
    if rollout.name != "vllm":
        return
    given = (rollout.get("engine_kwargs") or {}).get("vllm") or {}
    keys = ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "enable_chunked_prefill")
    tokens, sequences, longest, chunked = (given.get(key, rollout.get(key)) for key in keys)
    if tokens is None or sequences is None:  # vLLM chooses the missing value
        return
    # Without chunked prefill, verl raises the token limit to the length of the longest sequence, unless `engine_kwargs` sets
    # the token limit.
    if not rollout.enable_chunked_prefill and not given.get(keys[0]):
        # If max_model_len is unset, vLLM derives it from the model.
        tokens = max(tokens, rollout.max_model_len or sequences)
    name = "actor_rollout_ref.rollout"
    if tokens < sequences:
        raise ValueError(
            f"{name}.max_num_batched_tokens must be at least max_num_seqs, got {tokens} and {sequences}: vLLM would refuse "
            f"them when it starts; set {name}.max_num_seqs={tokens} or less, or raise max_num_batched_tokens"
        )
    if not chunked and tokens < (longest or 0):
        raise ValueError(
            f"{name}.max_num_batched_tokens must be at least max_model_len without chunked prefill, got {tokens} and "
            f"{longest}: vLLM would refuse them when it starts; set {name}.enable_chunked_prefill=True, or raise "
            "max_num_batched_tokens"
        )


def _conflicts(config: Any, settings: VerlSettings) -> Iterator[str]:
    """Error messages about keys of verl's configuration that contradict a recipe, in any mode."""
    rollout, reward, algorithm = config.actor_rollout_ref.rollout, config.reward.reward_model, config.algorithm
    manager = rollout.agent.get("agent_loop_manager_class")
    sampler = config.trainer.v1.sampler.get("custom_sampler") or {}
    if not config.trainer.get("use_v1", True):
        yield "trainer.use_v1=False selects verl's older trainer, which has no recipes; set it to True"
    if (algorithm.get("filter_groups") or {}).get("enable"):
        yield f"algorithm.filter_groups would drop groups that {SECTION}.recipe chose; disable it and use recipe=dapo"
    if (prompts := config.data.get("gen_batch_size")) is not None:
        yield (
            f"data.gen_batch_size={prompts} has no effect under a recipe, which draws its own prompts; leave it out, or use "
            f"+{SECTION}.gen_groups for a recipe that has this parameter"
        )
    if sampler.get("path"):
        yield f"trainer.v1.sampler.custom_sampler and {SECTION} both choose the rows of a batch; unset one of them"
    if manager not in (None, "", MANAGER):
        yield (
            f"rollout.agent.agent_loop_manager_class must be unset, got {manager}; set agent_loop_config_path for your "
            "loops"
        )
    if reward.enable and not reward.enable_resource_pool:
        yield (
            "a reward model on the trainer's devices scores too late for a recipe, only after all generation; set "
            "reward.reward_model.enable_resource_pool=True"
        )
    if (settings.recipe.stopping or settings.recipe.limit is not None) and rollout.name not in ENGINES_THAT_STOP:
        how, instead = (
            (" at a length (limit_at)", "or leave limit_at out") if settings.recipe.limit else ("", _OR_NO_STOPS)
        )
        yield (
            f"the recipe stops rollouts{how}, so rollout.name must be one of {', '.join(ENGINES_THAT_STOP)}, got "
            f"{rollout.name}; change it, {instead}"
        )
    if settings.recipe.limit is not None and (loop := rollout.agent.default_agent_loop) != SINGLE_TURN:
        yield (
            f"the recipe stops rollouts at a length (limit_at), which counts all turns of the model, so "
            f"rollout.agent.default_agent_loop must be {SINGLE_TURN}, got {loop}; change it, or leave limit_at out"
        )
    if settings.recipe.stopping and rollout.disaggregation.enabled:
        yield (
            "rollout.disaggregation moves requests to another server, where the recipe cannot stop them; disable it, "
            f"{_OR_NO_STOPS}"
        )
    recomputes = settings.rollout_correction and not (algorithm.get("rollout_correction") or {}).get("bypass_mode")
    if settings.recipe.gate is not None and not recomputes:
        yield (
            f"{SECTION}.replay_moved compares the log-probabilities of replayed rows with those of their generation, which "
            f"needs {SECTION}.rollout_correction=true and algorithm.rollout_correction.bypass_mode=False; set these, or "
            "leave replay_moved out"
        )
    if not settings.loader_draws and not config.data.get("shuffle", True):
        rule = called(settings.recipe.prompts)
        yield f"data.shuffle=False, but the recipe draws prompts by {rule}; leave data.shuffle alone"
    compared = settings.own_advantages or algorithm.adv_estimator not in WITHOUT_GROUPS
    if compared and (why := unteachable(settings.recipe)):
        yield f"{SECTION}.recipe with actor_rollout_ref.rollout.n={rollout.n}: {why}"
    if settings.own_advantages and algorithm.use_kl_in_reward:
        yield (
            "the recipe computes its own advantages, without the KL term of algorithm.use_kl_in_reward; set it to False, "
            "and use actor_rollout_ref.actor.use_kl_loss"
        )
    if settings.own_advantages and algorithm.adv_estimator == "gae":
        yield f"{SECTION}.recipe computes its own advantages, which need no critic; set algorithm.adv_estimator=grpo"


def overlap_of(config: Any) -> Overlap | None:
    """The settings with which the configured mode overlaps rollouts with updates. None: no overlap.

    Raises:
        ValueError: the mode is not a mode of rollalloc.
    """
    v1, mode = config.trainer.v1, verls_mode(config.trainer.v1.trainer_mode)
    if mode == "sync":
        return None
    sampler = v1.sampler
    return Overlap(
        mode=mode,
        max_versions=sampler.max_off_policy_threshold,
        batches=v1[mode].get("num_warmup_batches", 0),
        strategy=sampler.max_off_policy_strategy,
    )


def _conflicts_of_separate(config: Any) -> Iterator[str]:
    """As `_conflicts`, for modes in which generation has its own devices."""
    rollout, separate = config.actor_rollout_ref.rollout, config.trainer.v1.separate_async
    prompts, mini_batch = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    steps = prompts / mini_batch
    if prompts % mini_batch:
        yield (
            "data.train_batch_size must be a multiple of actor_rollout_ref.actor.ppo_mini_batch_size under "
            f"trainer.v1.separate_async, got {prompts} and {mini_batch}"
        )
    if rollout.checkpoint_engine.backend == "naive":
        yield (
            "checkpoint_engine.backend=naive cannot send weights to the separate devices of generation; set it to nccl, "
            "nixl, mooncake or hccl, or use trainer_mode=rollalloc_colocate_async"
        )
    if not (rollout.nnodes > 0 and rollout.n_gpus_per_node > 0):
        yield (
            "generation needs its own devices: set actor_rollout_ref.rollout.nnodes and n_gpus_per_node above 0, got "
            f"{rollout.nnodes} and {rollout.n_gpus_per_node}"
        )
    if separate.parameter_sync_step != steps:
        yield (
            "trainer.v1.separate_async.parameter_sync_step must be data.train_batch_size / actor.ppo_mini_batch_size = "
            f"{steps:g}, got {separate.parameter_sync_step}"
        )
    if separate.hybrid_rollout.enable_switch:
        yield (
            "hybrid_rollout.enable_switch=True waits for verl's own buffer, which stays empty under a recipe; set it to "
            "False"
        )
