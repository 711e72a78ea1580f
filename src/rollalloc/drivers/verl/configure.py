# pyright: reportMissingImports=false
# (verl and what it needs live in an environment of their own: constraints/verl-cpu.txt)
"""verl's configuration as the driver needs it: checked, and completed where a recipe asks for more."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf, open_dict

from rollalloc.drivers.verl.settings import SECTION, Settings, read_settings

MANAGER = "rollalloc.drivers.verl.workers.Manager"


def configure(config: Any) -> Settings:
    """Check the configuration, complete it in place, and return our settings. Doing so twice changes nothing more.

    Args:
        config: verl's, with `trainer.v1.trainer_mode=rollalloc`.

    Raises:
        ValueError: a wrong key or value of ours, or one of verl's that cannot go with them; names what to do.
    """
    section = OmegaConf.to_container(config.trainer.v1.get("rollalloc") or OmegaConf.create({}), resolve=True)
    rollout = config.actor_rollout_ref.rollout
    settings = read_settings(section, config.data.train_batch_size, rollout.n)  # pyright: ignore[reportArgumentType]
    for wrong, why in _conflicts(config, settings):
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
            settings.stops and rollout.name != "vllm",
            f"{SECTION}.recipe stops rollouts, which is implemented for rollout.name=vllm, got {rollout.name}",
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
