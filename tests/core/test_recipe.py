"""Recipes that can never teach are refused before their first rollout."""

import re
from dataclasses import dataclass

import numpy as np
import pytest

from rollalloc import Allocator, recipes
from rollalloc.core.events import Done, Updated
from rollalloc.core.recipe import doubts, unteachable
from rollalloc.core.rule import AdvantageRule, BatchRule, SizeRule, Traits
from rollalloc.recipes.reinforce import RunningMean
from rollalloc.rules import advantages, judges, rows, sizes
from rollalloc.rules.advantages import AgainstBaseline, BatchMean, BatchNormalised, OverChosen, OverGroup, Rewards

ONE_OF_A_PROMPT = "compares the rollouts of a prompt, but the recipe generates one rollout of each"
ONE_ROW = "compares the rows of a prompt, but the recipe trains on one row of each"
ONE_OF_A_BATCH = "compares the rows of a batch, but a batch has one row"


@dataclass(frozen=True, slots=True)
class OwnBaseline(BatchRule):
    """A batch rule of one's own that computes advantages from the rewards."""

    def __call__(self, advantages, groups, chosen, view):
        return [group.rewards_G[rows_M] - 0.5 for group, rows_M in zip(groups, chosen, strict=True)]


@dataclass(frozen=True, slots=True)
class Halves(AdvantageRule):
    """An advantage rule of one's own that declares nothing about what it compares."""

    traits = Traits(reads=("rewards_G",))

    def __call__(self, group, chosen_M):
        return group.rewards_G[chosen_M] - 0.5


@dataclass(frozen=True, slots=True)
class Some(SizeRule):
    """A size rule of one's own that does not declare how many rollouts it gives."""

    def __call__(self, groups, view, memory):
        return [1] * len(groups)


def pairs_of(recipe):
    """The recipe with one rollout of each prompt less than it takes."""
    return recipe.replace(size=sizes.Fixed(1))


NEVER = {
    "grpo": (recipes.grpo(4, 1), ONE_OF_A_PROMPT),
    "mopps": (recipes.mopps(4, 1), ONE_OF_A_PROMPT),
    "dr_grpo": (pairs_of(recipes.dr_grpo(4, 2)), ONE_OF_A_PROMPT),
    "rloo": (pairs_of(recipes.rloo(4, 2)), ONE_OF_A_PROMPT),
    "over the chosen rows": (recipes.raft(4).replace(advantage=OverChosen(advantages.grpo)), ONE_OF_A_PROMPT),
    "normalised over the batch": (recipes.grpo(4, 1).replace(over_batch=BatchNormalised()), ONE_OF_A_PROMPT),
    "no baseline of the prompt": (recipes.grpo(4, 1).replace(advantage=AgainstBaseline()), ONE_OF_A_PROMPT),
    "pods with one row": (recipes.pods(4, 8, 2).replace(rows=rows.MaxVariance(1)), ONE_ROW),
    "darts with one row": (recipes.darts(4, 1, 0), ONE_ROW),
    "reinforce with one row": (recipes.reinforce(1), ONE_OF_A_BATCH),
    "spo with one row": (recipes.spo(1), ONE_OF_A_BATCH),
    "dapo": (pairs_of(recipes.dapo(4, 2)), "only if it has at least 2 scored rollouts, .* 'rollout' it has 1 at most"),
    "dapo without groups": (recipes.mix(recipes.reinforce(4), recipes.dapo(4, 4, 12)), "at least 2 scored rollouts"),
    "vcrl": (pairs_of(recipes.vcrl(4, 2)), "at least 2 scored rollouts"),
    "racing": (
        recipes.racing(4, (2, 4)).replace(stage="to 2", size=sizes.Fixed(1)), "after the stage 'to 2' it has 1 at most",
    ),
}  # fmt: skip

MAY_TEACH = {
    "reinforce": recipes.reinforce(2),
    "a running baseline": recipes.reinforce(1, baseline="running"),
    "raft": recipes.raft(1),
    "spo": recipes.spo(2),
    "foresight": recipes.foresight(1),
    "rewards": recipes.grpo(4, 1).replace(advantage=Rewards()),
    "a batch rule of one's own": recipes.grpo(4, 1).replace(over_batch=OwnBaseline()),
    "an advantage rule of one's own": recipes.grpo(4, 1).replace(advantage=Halves()),
    "a size rule of one's own": recipes.grpo(4, 2).replace(size=Some()),
    "one pilot": recipes.pilot_commit(4, 1, 1),
    "one row of a group of eight": recipes.grpo(4, 8).replace(rows=rows.MaxReward(1)),
}


@pytest.mark.parametrize("name", NEVER)
def test_a_recipe_that_can_never_teach_is_refused_when_its_allocator_is_made(name):
    recipe, message = NEVER[name]
    with pytest.raises(ValueError, match=message):
        Allocator(recipe, 100, 0)


@pytest.mark.parametrize("name", NEVER)
def test_a_refused_recipe_teaches_nothing_over_a_hundred_batches(name, monkeypatch):
    """Without the refusal, no row of a batch has an advantage, or there is no batch."""
    monkeypatch.setattr("rollalloc.core.allocator.refuse_unteachable", lambda recipe: None)
    allocator, coin = Allocator(NEVER[name][0], 100, 0), np.random.default_rng(0)
    for _ in range(100):
        actions = allocator.ask()
        if actions.batch:
            assert not any(row.advantage for row in actions.batch.rows)
            allocator.tell([Updated(allocator.version + 1)])
        drawn = [rollout for order in actions.generate for rollout in order.rollouts]
        won = coin.integers(2, size=len(drawn)).tolist()
        allocator.tell(
            [Done(*each, each[1], 5, allocator.version) for each in zip(drawn, map(float, won), strict=True)]
        )


@pytest.mark.parametrize("name", MAY_TEACH)
def test_a_recipe_that_may_teach_is_not_refused(name):
    assert unteachable(MAY_TEACH[name]) is None
    Allocator(MAY_TEACH[name], 100, 0)


def test_a_baseline_that_the_prompt_rule_gives_teaches_a_lone_rollout():
    alone = recipes.grpo(1, 1).replace(advantage=Rewards(), over_batch=BatchMean())
    assert unteachable(alone) is not None
    assert unteachable(alone.replace(prompts=RunningMean())) is None


@pytest.mark.parametrize(
    ("given", "doubt"),
    [
        ({}, None),
        ({"n_pilot": 2}, None),
        ({"n_pilot": 1, "p_lower": 0.0}, None),  # a wrong pilot passes
        ({"n_pilot": 1}, r"no mean of 1 metrics of 0 and 1 lies in the window \[0.125, 0.75\]"),
        (
            {"n_pilot": 2, "p_lower": 0.6, "p_upper": 0.1},
            r"no mean of 2 metrics of 0 and 1 lies in the window \[0.6, 0.9\]",
        ),
        ({"p_upper": 0.75}, r"mean in \[0.125, 0.25\]. If 0.75 should be the end, set p_upper=0.25"),
    ],
)
def test_a_window_that_was_probably_not_meant_is_reported(given, doubt):
    said = ". ".join(doubts(recipes.pilot_commit(4, **({"n_pilot": 4, "n_commit": 4} | given))))
    assert bool(said) == (doubt is not None)
    assert re.search(doubt or "", said)


def test_a_run_that_no_pilot_passes_says_why(drive):
    driver = drive(recipes.pilot_commit(4, 1, 3), default=(1.0, 0.0, 1.0))
    end = driver.until_end()
    assert end.startswith("barren")
    assert "no mean of 1 metrics of 0 and 1 lies in the window [0.125, 0.75]" in end


def test_fewer_candidates_than_a_batch_has_groups_are_refused():
    with pytest.raises(ValueError, match=r"max_candidates must be .* at least 4 \(a batch has 4 groups\), got 3"):
        recipes.dapo(4, 2, max_candidates=3)
    assert recipes.dapo(4, 2, max_candidates=4).max_candidates == 4


def test_the_rollouts_of_stages_add_up():
    """One rollout of each of two stages makes a group of two."""
    staged = recipes.pilot_commit(4, 1, 1)
    assert unteachable(staged) is None
    refused = staged.replace(stage="pilot", judge=judges.NonzeroVariance(judges.Act.NEXT))
    assert "after the stage 'pilot' it has 1 at most" in (unteachable(refused) or "")
    group = staged.replace(advantage=OverGroup(advantages.grpo))
    assert unteachable(group.replace(stage="commit", judge=judges.NonzeroVariance())) is None
