"""What verl and the driver think of a command, before anything runs."""

import pytest

pytest.importorskip("verl", reason="verl's environment: make verl-test")

from rollalloc.drivers.verl.check import main

pytestmark = pytest.mark.verl
STOCK = ["algorithm.adv_estimator=grpo", "data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=32"]
STOCK += ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.n=8"]
STOCK += ["actor_rollout_ref.actor.use_dynamic_bsz=True"]
OURS = [*STOCK, "trainer.v1.trainer_mode=rollalloc", "+trainer.v1.rollalloc.recipe=pods", "+trainer.v1.rollalloc.m=4"]


def test_a_command_of_verl_is_taken_as_it_would_be_typed(capsys):
    assert main(["python", "-m", "verl.trainer.main_ppo", *STOCK]) == 0
    out = capsys.readouterr().out
    assert "mode sync: 64 groups per batch, 8 rows each, 2 optimizer steps per batch" in out
    assert "stock verl, 8 rollouts per prompt" in out


def test_one_of_ours_says_its_recipe(capsys):
    assert main(OURS) == 0
    out = capsys.readouterr().out
    assert "4 rows each" in out
    assert "rows=MaxVariance(m=4)" in out


@pytest.mark.parametrize(
    ("wrong", "code", "says"),
    [
        (["data.train_batch_sise=3"], 2, "train_batch_sise"),
        (["--config-name", "none"], 2, "none"),
        (["not an override"], 2, "not an override"),
        (["a\x1b[31m=3"], 2, "a␛[31m=3"),
        (["trainer.v1=3"], 1, "refused: AttributeError: 'int' object has no"),
        (["trainer.v1.rollalloc=7"], 1, "trainer.v1.rollalloc must be a section"),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=0"], 1, "ppo_mini_batch_size must be a whole number of at"),
        (["+trainer.v1.rollalloc.n_comit=4"], 1, "n_comit"),
        (["algorithm.filter_groups.enable=True"], 1, "filter_groups"),
        (
            ["actor_rollout_ref.rollout.val_kwargs.do_sample=True", "actor_rollout_ref.rollout.temperature=0"],
            1,
            "temperature should be greater than 0",  # verl's own words
        ),
        (["trainer.v1.trainer_mode=sync"], 1, "trainer.v1.rollalloc is set, but nothing reads it"),
    ],
)
def test_what_is_wrong_is_named_and_no_success(wrong, code, says, capsys):
    assert main([*OURS, *wrong]) == code
    shown = capsys.readouterr()
    assert says in shown.err
    assert not shown.out


def test_without_a_command_it_says_how_it_is_called(capsys):
    assert main([]) == 2
    assert "rollalloc.drivers.verl.check" in capsys.readouterr().err
