"""Tests of our section of verl's configuration: what it may say, and what is refused by name."""

from dataclasses import replace

import pytest

from rollalloc import recipes
from rollalloc.core.recipe import Replay
from rollalloc.drivers.verl.settings import read_settings
from rollalloc.rules.advantages import GRPO, BatchNormalised, OverChosen, OverGroup
from rollalloc.rules.prompts import AsOffered

PILOT_COMMIT = {"recipe": "pilot_commit", "n_pilot": 4, "n_commit": 12, "gen_groups": 48}
REFUSED = {
    "a recipe": ({"recipe": "pilot_comit"}, "did you mean 'pilot_commit'"),
    "no recipe": ({}, "recipe must be a name"),
    "a parameter": (PILOT_COMMIT | {"n_comit": 3}, "did you mean 'n_commit'"),
    "a setting": (PILOT_COMMIT | {"reward_timout": 3}, "did you mean 'reward_timeout'"),
    "a value": (PILOT_COMMIT | {"reward_timeout": 0}, "above 0"),
    "no timeout": (
        PILOT_COMMIT | {"reward_timeout": None},
        "reward_timeout must be a number of seconds above 0, got None",
    ),
    "a timeout without end": (PILOT_COMMIT | {"reward_timeout": float("nan")}, "reward_timeout must be a number"),
    "no patience with tools": (PILOT_COMMIT | {"tool_timeout": 0}, "tool_timeout must be a number .* above 0, got 0"),
    "a word for patience": (PILOT_COMMIT | {"tool_timeout": "long"}, "tool_timeout must be a number .* got 'long'"),
    "a poll interval": (PILOT_COMMIT | {"poll_interval": "often"}, "poll_interval must be in .* got 'often'"),
    "a negative seed": (PILOT_COMMIT | {"seed": -1}, "seed must be a whole number of at least 0, got -1"),
    "a seed that is no number": (PILOT_COMMIT | {"seed": "x"}, "seed must be a whole number of at least 0, got 'x'"),
    "no rollouts": (PILOT_COMMIT | {"max_rollouts": 0}, "max_rollouts must be a whole number of at least 1"),
    "a word for a flag": (PILOT_COMMIT | {"rollout_correction": "no"}, "rollout_correction must be true or false"),
    "a metric": (PILOT_COMMIT | {"metric": 7}, "metric must be the name of a field of the reward, got 7"),
    "a word for another": (PILOT_COMMIT | {"notices": 1}, "notices must be true or false, got 1"),
    "a rule of PODS": (
        {"recipe": "pods", "m": 4, "rule": "best"},
        "rule must be one of max_variance, max_reward, random",
    ),
    "a subset larger than a group": ({"recipe": "pods", "m": 9}, "m must be at most n=8"),
    "verl's own": (PILOT_COMMIT | {"groups": 8}, "data.train_batch_size"),
    "no such file": (
        {"recipe": "foresight", "features": "none.safetensors"},
        r"features must be the path of a file, got 'none.safetensors'; `rollalloc features --model",
    ),
    "features of a model": ({"recipe": "foresight", "features": True}, "features must be the path of a file, got True"),
    "another number of groups": ({"recipe": f"{__name__}:EIGHT"}, "make them equal"),
}
EIGHT = recipes.grpo(8, 4)


@pytest.mark.parametrize(("section", "says"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_is_refused_by_the_right_name(section, says):
    with pytest.raises(ValueError, match=says):
        read_settings(section, 16, 8)


def test_recipes_are_mixed_each_with_its_own_parameters():
    mixed = recipes.mix(recipes.pilot_commit(16, 4, 12, 48, p_lower=0.1), recipes.pods(16, 16, 8))
    for name in ("pilot_commit+pods", "pods+pilot_commit"):  # whose stages say n, whatever verl's own is
        recipe = read_settings(PILOT_COMMIT | {"recipe": name, "m": 8, "p_lower": 0.1}, 16, 4).recipe
        assert recipe == replace(mixed, prompts=AsOffered())


def test_a_deviation_left_open_is_verls_and_one_that_is_said_holds():
    """Plain GRPO's advantages stay verl's own to compute; a recipe's own, as DARTS's, get verl's deviation and eps."""
    darts = {"recipe": "darts", "shortest": 3, "longest": 1}
    pods = {"recipe": "pods", "m": 4}
    for section, own in (({"recipe": "grpo"}, False), (PILOT_COMMIT, False), (pods, True), (darts, True)):
        assert read_settings(section, 16, 16).own_advantages is own
    assert read_settings(darts, 4, 4).recipe.advantage == OverChosen(GRPO(ddof=1, eps=1e-6))
    said = read_settings(darts | {"deviation": "population"}, 4, 4).recipe
    assert said.advantage == OverChosen(GRPO(ddof=0))
    plain = read_settings({"recipe": "grpo", "deviation": "population"}, 4, 4)
    assert plain.own_advantages
    assert plain.recipe.advantage == OverGroup(GRPO(ddof=0))


@pytest.mark.parametrize(
    ("section", "made", "draws"),
    [
        ({"recipe": "foresight", "neg": 0.5, "exponent": None}, recipes.foresight(8, 2, None, 0.5), False),
        ({"recipe": "reinforce", "neg": 0.5}, recipes.reinforce(8, 2, neg=0.5), True),
        ({"recipe": "reinforce", "baseline": "running"}, recipes.reinforce(8, 2, "running"), False),
        ({"recipe": "rloo"}, recipes.rloo(8, 2), True),
        ({"recipe": "raft"}, recipes.raft(8, 2), True),
        ({"recipe": "spo"}, recipes.spo(8, 2), False),
    ],
)
def test_recipes_with_baselines_compute_their_own_advantages(section, made, draws):
    """`n` is verl's, the advantages are never verl's, and what only shuffles takes verl's order."""
    settings = read_settings(section, 8, 2)
    assert settings.recipe == (replace(made, prompts=AsOffered()) if draws else made)
    assert settings.loader_draws is draws
    assert settings.own_advantages


@pytest.mark.parametrize(
    "change",
    [{"replay": Replay(rows=4, max_staleness=2)}, {"over_batch": BatchNormalised()}],
    ids=["replay", "over batch"],
)
def test_rows_that_come_again_and_a_rule_over_the_batch_make_plain_advantages_the_recipes_own(change, monkeypatch):
    """verl's estimator would compare rows that come again with those of another batch."""
    monkeypatch.setattr(f"{__name__}.EIGHT", replace(EIGHT, **change))
    settings = read_settings({"recipe": f"{__name__}:EIGHT"}, 8, 4)
    assert settings.own_advantages
    assert settings.recipe.advantage == OverGroup(GRPO(ddof=1, eps=1e-6))


def test_replay_is_a_setting_of_a_recipe():
    assert read_settings({"recipe": "foresight", "replay": 8}, 8, 1).recipe.replay == Replay(rows=8, max_staleness=12)
