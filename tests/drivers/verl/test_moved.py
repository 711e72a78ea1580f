"""Keys that verl composes, but that its V1 trainers do not read."""

import pytest

pytest.importorskip("omegaconf", reason="verl's environment: make verl-test")

from omegaconf import OmegaConf

from rollalloc.drivers.verl.moved import refuse_moved_keys

pytestmark = pytest.mark.verl
# As in verl 0.9.1: all old keys are null, but the norm of the gradient.
COMPOSED = {
    "reward_model": {"reward_manager": None, "model": {"path": None}, "rollout": {"name": None}},
    "custom_reward_function": {"path": None, "name": None},
    "sandbox_fusion": {"url": None},
    "actor_rollout_ref": {"actor": {"grad_clip": 1.0, "optim": {"clip_grad": 0.3}}},
    "reward": {"reward_manager": {"name": "naive"}},
}


def config(*words):
    return OmegaConf.merge(OmegaConf.create(COMPOSED), OmegaConf.from_dotlist([*words]))


def test_what_verl_composes_by_default_is_accepted():
    refuse_moved_keys(config())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("reward_model.reward_manager=dapo", "reward.reward_manager.name"),
        ("reward_model.num_workers=4", "reward.num_workers"),
        ("reward_model.reward_loop_module_path=a.py", "reward.reward_manager.module.path"),
        ("custom_reward_function.path=reward.py", "reward.custom_reward_function.path"),
        ("custom_reward_function.name=score", "reward.custom_reward_function.name"),
        ("reward_model.overlong_buffer.len=4096", "+reward.reward_kwargs.overlong_buffer_cfg.len"),
        ("reward_model.reward_kwargs.max_resp_len=9", "+reward.reward_kwargs.max_resp_len"),
        ("reward_model.model.path=m", "reward.reward_model.model_path"),
        ("reward_model.rollout.name=vllm", "reward.reward_model.rollout.name"),
        ("sandbox_fusion.url=here", "reward.sandbox_fusion.url"),
        ("actor_rollout_ref.actor.grad_clip=0.5", "actor_rollout_ref.actor.optim.clip_grad"),
    ],
)
def test_an_old_key_is_refused_with_the_new_one_unless_that_has_the_same_value(old, new):
    with pytest.raises(ValueError, match="do not read these keys") as refused:
        refuse_moved_keys(config(old))
    assert str(refused.value).endswith(f"{old}: use {new}")
    refuse_moved_keys(config(old, f"{new.lstrip('+')}={old.partition('=')[2]}"))


def test_all_old_keys_are_named_at_once():
    with pytest.raises(ValueError, match=r"name=score: use .*; reward_model.reward_manager=dapo: use reward\.reward_m"):
        refuse_moved_keys(config("reward_model.reward_manager=dapo", "custom_reward_function.name=score"))
