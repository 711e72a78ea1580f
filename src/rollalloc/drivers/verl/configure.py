# pyright: reportMissingImports=false
# (verl and what it needs live in an environment of their own: constraints/verl-cpu.txt)
"""verl's configuration as the driver needs it: checked, and completed where a recipe asks for more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf, open_dict

from rollalloc.drivers.verl.modes import Overlap, verls_mode
from rollalloc.drivers.verl.settings import SECTION, Settings, read_settings

MANAGER = "rollalloc.drivers.verl.workers.Manager"
ENGINES_THAT_STOP = ("vllm", "sglang")  # `client` knows how to end one request of theirs


def configure(config: Any) -> Settings:
    """Check the configuration, complete it in place, and return our settings. Doing so twice changes nothing more.

    Args:
        config: verl's, with a `trainer.v1.trainer_mode` of ours.

    Raises:
        ValueError: a wrong key or value of ours, or one of verl's that cannot go with them; names what to do.
    """
    section = OmegaConf.to_container(config.trainer.v1.get("rollalloc") or OmegaConf.create({}), resolve=True)
    rollout = config.actor_rollout_ref.rollout
    mode = verls_mode(config.trainer.v1.trainer_mode)
    overlap = None if mode == "sync" else _overlap(config.trainer.v1, mode)
    sizes = config.data.train_batch_size, rollout.n
    settings = read_settings(section, *sizes, overlap)  # pyright: ignore[reportArgumentType]
    for wrong, why in [*_conflicts(config, settings), *_CONFLICTS_OF[mode](config)]:
        if wrong:
            raise ValueError(why)
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


def _conflicts(config: Any, settings: Settings) -> list[tuple[Any, str]]:
    """What cannot go together, and what to do about it."""
    rollout, reward = config.actor_rollout_ref.rollout, config.reward.reward_model
    manager = rollout.agent.get("agent_loop_manager_class")
    sampler = config.trainer.v1.sampler.get("custom_sampler") or {}
    filters = config.algorithm.get("filter_groups") or {}
    return [
        (
            not config.trainer.get("use_v1", True),
            "trainer.use_v1=False takes verl's former trainer, which knows no recipe; set it to True",
        ),
        (
            filters.get("enable"),
            f"algorithm.filter_groups filters what {SECTION}.recipe allots; disable it and take recipe=dapo",
        ),
        (
            sampler.get("path"),
            f"trainer.v1.sampler.custom_sampler and {SECTION} both choose what is trained on; unset one",
        ),
        (
            manager not in (None, "", MANAGER),
            (
                f"actor_rollout_ref.rollout.agent.agent_loop_manager_class must be unset, {SECTION} brings its own, got "
                f"{manager}; agent loops of your own are registered by agent_loop_config_path"
            ),
        ),
        (
            reward.enable and not reward.enable_resource_pool,
            (
                "a reward model on the trainer's devices scores after sampling, when it is too late to allot rollouts; set "
                "reward.reward_model.enable_resource_pool=True or use a reward function"
            ),
        ),
        (
            settings.stops and rollout.name not in ENGINES_THAT_STOP,
            (
                f"{SECTION}.recipe stops rollouts, for which actor_rollout_ref.rollout.name must be one of "
                f"{', '.join(ENGINES_THAT_STOP)}, got {rollout.name}; take one of these, or a recipe without stops"
            ),
        ),
        (
            settings.stops and rollout.disaggregation.enabled,
            (
                f"{SECTION}.recipe stops rollouts, but with actor_rollout_ref.rollout.disaggregation the request that "
                "decodes is on another server, under an id of its own; disable it, or take a recipe without stops"
            ),
        ),
        (
            not settings.loader_draws and not config.data.get("shuffle", True),
            (
                f"data.shuffle=False, but {SECTION}.recipe draws the prompts itself, by {settings.recipe.prompts!r}; leave "
                "data.shuffle alone"
            ),
        ),
        (
            settings.own_advantages and config.algorithm.use_kl_in_reward,
            (
                f"{SECTION}.recipe names its own advantages, which know nothing of algorithm.use_kl_in_reward; use "
                "actor_rollout_ref.actor.use_kl_loss"
            ),
        ),
        (
            settings.own_advantages and config.algorithm.adv_estimator == "gae",
            f"{SECTION}.recipe names its own advantages, which need no critic; set algorithm.adv_estimator=grpo",
        ),
    ]


def _overlap(v1: Any, mode: str) -> Overlap:
    sampler = v1.sampler
    return Overlap(
        mode=mode, max_versions=sampler.max_off_policy_threshold, batches=v1[mode].get("num_warmup_batches", 0)
    )


def _conflicts_of_overlap(config: Any) -> list[tuple[Any, str]]:
    """What cannot go together where rollouts go on over an update."""
    return [
        (
            config.trainer.v1.sampler.max_off_policy_strategy != "drop",
            (
                "trainer.v1.sampler.max_off_policy_strategy=wait, but the recipe drops what is too old and asks for other "
                "rollouts instead of waiting; set it to drop"
            ),
        ),
    ]


def _conflicts_of_separate(config: Any) -> list[tuple[Any, str]]:
    """What cannot go together where rollouts have devices of their own."""
    actor, rollout, separate = (
        config.actor_rollout_ref.actor,
        config.actor_rollout_ref.rollout,
        config.trainer.v1.separate_async,
    )
    steps = config.data.train_batch_size / actor.ppo_mini_batch_size
    return [
        *_conflicts_of_overlap(config),
        (
            rollout.checkpoint_engine.backend == "naive",
            (
                "actor_rollout_ref.rollout.checkpoint_engine.backend=naive copies weights within a process's own devices; "
                "with rollouts on devices of their own set it to nccl, nixl or mooncake (hccl on NPUs), which need GPUs or "
                "NPUs, or use trainer_mode=rollalloc_colocate_async"
            ),
        ),
        (
            not (rollout.nnodes > 0 and rollout.n_gpus_per_node > 0),
            (
                "rollouts need devices of their own: set actor_rollout_ref.rollout.nnodes and "
                f"actor_rollout_ref.rollout.n_gpus_per_node above 0, got {rollout.nnodes} and {rollout.n_gpus_per_node}"
            ),
        ),
        (
            separate.parameter_sync_step != steps,
            (
                "trainer.v1.separate_async.parameter_sync_step must be data.train_batch_size / "
                f"actor.ppo_mini_batch_size = {steps:g}, optimizer steps between two syncs of the weights, got "
                f"{separate.parameter_sync_step}"
            ),
        ),
        (
            separate.hybrid_rollout.enable_switch,
            (
                "trainer.v1.separate_async.hybrid_rollout.enable_switch=True lends the trainer's devices until verl's "
                "buffer has enough prompts, of which the recipe keeps its own count; set it to False"
            ),
        ),
    ]


_CONFLICTS_OF: dict[str, Callable[[Any], list[tuple[Any, str]]]] = {
    "sync": lambda _: [],
    "colocate_async": _conflicts_of_overlap,
    "separate_async": _conflicts_of_separate,
}
