# pyright: reportMissingImports=false
# (verl and its dependencies are installed in a separate environment: constraints/verl-cpu.txt)
"""Keys of older versions of verl that its V1 trainers compose, but do not read: they would have no effect.

The papers' scripts were written for verl 0.5 and set some of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

_REWARD_MODEL = "reward_model"
_MOVED = {  # of a key, or of all keys below it: its new name. The longest name that fits counts
    "custom_reward_function": "reward.custom_reward_function",
    "sandbox_fusion": "reward.sandbox_fusion",
    _REWARD_MODEL: "reward.reward_model",
    f"{_REWARD_MODEL}.num_workers": "reward.num_workers",
    f"{_REWARD_MODEL}.reward_manager": "reward.reward_manager.name",
    f"{_REWARD_MODEL}.reward_loop_source": "reward.reward_manager.source",
    f"{_REWARD_MODEL}.reward_loop_module_path": "reward.reward_manager.module.path",
    f"{_REWARD_MODEL}.reward_loop_class_name": "reward.reward_manager.module.name",
    f"{_REWARD_MODEL}.model.path": "reward.reward_model.model_path",
    f"{_REWARD_MODEL}.reward_kwargs": "+reward.reward_kwargs",
    f"{_REWARD_MODEL}.overlong_buffer": "+reward.reward_kwargs.overlong_buffer_cfg",
}
_SECTIONS = ("custom_reward_function", _REWARD_MODEL, "sandbox_fusion")  # all their defaults are null
_ACTOR, _CRITIC = "actor_rollout_ref.actor", "critic"
_DEFAULTS = {f"{_ACTOR}.grad_clip": 1.0, f"{_CRITIC}.grad_clip": 1.0}
_MOVED |= {f"{part}.grad_clip": f"{part}.optim.clip_grad" for part in (_ACTOR, _CRITIC)}


def refuse_moved_keys(config: Any) -> None:
    """Raise an error if keys are set that verl's V1 trainers do not read, unless the new key has the same value.

    Raises:
        ValueError: such keys are set. The message has the key to use for each.
    """
    moved = {key: (value, _new_name(key)) for key, value in _set_keys(config)}
    lost = [
        f"{key}={value}: use {new}"
        for key, (value, new) in moved.items()
        if OmegaConf.select(config, new.lstrip("+")) != value
    ]
    if lost:
        raise ValueError(f"verl's V1 trainers do not read these keys of older versions. {'; '.join(lost)}")


def _set_keys(config: Any) -> Iterator[tuple[str, Any]]:
    for section in _SECTIONS:
        value = OmegaConf.select(config, section)
        if value is not None:
            yield from _leaves(section, OmegaConf.to_container(value, resolve=True))
    for key, default in _DEFAULTS.items():
        if (value := OmegaConf.select(config, key)) not in (None, default):
            yield key, value


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(f"{name}.{key}", each)
    elif value is not None:
        yield name, value


def _new_name(key: str) -> str:
    old = max((old for old in _MOVED if key == old or key.startswith(f"{old}.")), key=len)
    return _MOVED[old] + key.removeprefix(old)
