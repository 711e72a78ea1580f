"""Mixtures of recipes that expect something of a prompt, or of the batch, with those that stage, choose and stop."""

from dataclasses import replace

import pytest

from rollalloc import Allocator, recipes
from rollalloc.core.events import Done
from rollalloc.core.prompts import NEXT_EPOCH, NOW
from rollalloc.core.recipe import Replay
from rollalloc.predict.predictor import Predictor
from rollalloc.recipes.darts import ShortestAndLongest
from rollalloc.rules import advantages, judges, prompts, rows, sizes
from rollalloc.testing import check_recipe

PILOT_COMMIT = recipes.pilot_commit(4, 4, 4, 12)
# Fitted early, and cheap to copy: the kit copies a rule's memory at every decision.
QUICK = Predictor(ridges=(1.0,), events=48, first_fits=(8, 16), fit_every=32, track_every=8)


def foresight(*given, **more):
    recipe = recipes.foresight(*given, **more)
    return replace(recipe, prompts=replace(recipe.prompts, pool=4, warm=8, predictor=QUICK))


MIXTURES = {
    "pilot_commit+foresight": (PILOT_COMMIT, foresight(4)),
    "pilot_commit+foresight, replayed": (PILOT_COMMIT, foresight(4, replay=4, replay_staleness=3)),
    "pilot_commit+reinforce": (PILOT_COMMIT, recipes.reinforce(4)),
    "foresight+pods": (foresight(4, 8), recipes.pods(4, 8, 4)),
    "foresight+darts": (foresight(4), recipes.darts(4, 3, 1, tail="sampled")),
    "dapo+foresight, drawn uniformly": (recipes.dapo(4, 4, 12), foresight(4, exponent=None)),
    "pilot_commit+darts, its sizes": (PILOT_COMMIT, recipes.darts(4, 3, 1, tail="sampled")),
}
TAKEN = {"pilot_commit+darts, its sizes": {"size": "second"}}


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_keeps_every_law_and_either_order_is_the_same_method(name):
    first, second = MIXTURES[name]
    mixed = recipes.mix(first, second, take=TAKEN.get(name))
    check_recipe(mixed, seeds=(0,), batches=4)
    if len(first.stages) > 1 and name not in TAKEN:
        assert recipes.mix(second, first) == mixed


def test_foresight_draws_and_credits_where_pilot_commit_stages():
    predicting = recipes.foresight(4, replay=4)
    mixed = recipes.mix(PILOT_COMMIT, predicting)
    assert mixed.prompts == predicting.prompts
    assert mixed.over_batch == advantages.BatchMean(None)
    assert mixed.replay == predicting.replay == Replay(rows=4, max_staleness=12)
    assert mixed.stages == PILOT_COMMIT.stages  # a prompt comes back when Pilot-Commit says so
    assert predicting.stages[0].judge == judges.Complete(NEXT_EPOCH)
    assert recipes.foresight(4, once=False).stages[0].judge == judges.Complete(NOW)
    assert mixed.stages[-1].judge == judges.Complete(NEXT_EPOCH)


def test_pods_and_darts_choose_rows_and_bring_no_statistics_where_a_baseline_is_known():
    for recipe in (recipes.foresight(4, 8), recipes.spo(4, 8), recipes.reinforce(4, 8), recipes.raft(4, 8)):
        pods = recipes.mix(recipe, recipes.pods(4, 8, 4))
        assert (pods.rows, pods.advantage, pods.over_batch) == (
            rows.MaxVariance(4),
            recipe.advantage,
            recipe.over_batch,
        )
        darts = recipes.mix(recipe, recipes.darts(4, 3, 1))
        assert (darts.rows, darts.advantage) == (ShortestAndLongest(3, 1), recipe.advantage)
        assert darts.stages[0].judge == recipe.stages[0].judge
    assert recipes.mix(recipes.rloo(4, 8), recipes.darts(4, 3, 1)).advantage == advantages.OverChosen(advantages.rloo)


REFUSED = {
    "both recipes change judge: Complete.* and NonzeroVariance": (
        recipes.foresight(4, 4, once=False),
        recipes.dapo(4, 4, 12),
    ),
    "both recipes change prompts: Posterior.* and Tracker": (recipes.mopps(4), recipes.spo(4)),
    "both recipes change over_batch: BatchMean.* and BatchNormalised": (recipes.reinforce(4), recipes.spo(4)),
    r"both recipes change advantage: Rewards\(\) and OverChosen\(GRPO": (
        recipes.foresight(4),
        recipes.darts(4, 3, 1, deviation="sample"),
    ),
    r"both recipes change advantage: Rewards\(\) and Successes": (recipes.foresight(4), recipes.raft(4)),
    "both recipes change advantage: rloo and pods; .*plain value": (recipes.rloo(4, 8), recipes.pods(4, 8, 4)),
    "both recipes change replay: Replay.*rows=4.* and Replay.*rows=8": (
        recipes.foresight(4, replay=4),
        recipes.foresight(4, replay=8),
    ),
    r"trains on 4 rollouts but the stages generate only 1; .* n of at least 4": (
        recipes.foresight(4),
        recipes.pods(4, 8, 4),
    ),
}


@pytest.mark.parametrize("says", REFUSED)
def test_recipes_that_make_no_sense_together_are_refused_by_name(says):
    with pytest.raises(ValueError, match=says):
        recipes.mix(*REFUSED[says])


def test_darts_beside_pilot_commit_is_refused_by_name_and_joined_on_request():
    darts = recipes.darts(4, 3, 1, tail="sampled")
    for pair in ((PILOT_COMMIT, darts), (darts, PILOT_COMMIT)):
        with pytest.raises(
            ValueError, match=r"both recipes change size: Fixed.* and Redundant.*take=\{'size': \.\.\.\}"
        ):
            recipes.mix(*pair)
    fixed = recipes.mix(PILOT_COMMIT, darts, take={"size": "first"})
    assert [stage.size for stage in fixed.stages] == [stage.size for stage in PILOT_COMMIT.stages]
    assert (fixed.rows, fixed.stages[-1].stop) == (darts.rows, darts.stages[0].stop)
    assert fixed == recipes.mix(darts, PILOT_COMMIT, take={"size": "second"})
    sized = recipes.mix(PILOT_COMMIT, darts, take={"size": "second"})
    assert sized.stages[-1].size == sizes.InAll(darts.stages[0].size)


@pytest.mark.parametrize(
    ("single", "in_all"),
    [
        (recipes.darts(4, 3, 1, 2.0), 6),  # 1.5 rollouts for each of 4 rows, for a group without a record
        (recipes.grpo(4, 7), 7),
        (recipes.grpo(4, 4), 5),  # the pilots already are as many
        (replace(recipes.knapsack(4, 9, least=5), prompts=prompts.Shuffled()), 9),
    ],
)
def test_sizes_of_a_method_without_stages_are_of_all_rollouts_of_a_group(single, in_all):
    """Pilot-Commit's 4 pilots count: the last stage orders what they leave of the other method's number, at least 1."""
    staged = recipes.pilot_commit(4, 4, 4, 4, p_lower=0.0, max_staleness=0)
    allocator = Allocator(recipes.mix(staged, single, take={"size": "second"}), 4, 0)
    pilots = allocator.ask().generate
    assert [len(order.rollouts) for order in pilots] == [4] * 4
    allocator.tell([Done(r, r % 2, r % 2, 5, 0) for order in pilots for r in order.rollouts])
    assert [4 + len(order.rollouts) for order in allocator.ask().generate] == [in_all] * 4


def test_the_argument_take_of_mix_is_checked():
    with pytest.raises(ValueError, match=r"take: unknown slot 'sizes'; the slots are prompts, .*size"):
        recipes.mix(PILOT_COMMIT, recipes.pods(4, 8, 4), take={"sizes": "first"})
    with pytest.raises(ValueError, match="must be one of first, second, got 'both'"):
        recipes.mix(PILOT_COMMIT, recipes.pods(4, 8, 4), take={"size": "both"})
    take = {"prompts": "second", "advantage": "first"}
    either = recipes.mix(recipes.foresight(4), recipes.spo(4), take=take)
    assert (either.prompts, either.advantage, either.over_batch) == (
        recipes.spo(4).prompts,
        recipes.foresight(4).advantage,
        recipes.foresight(4).over_batch,
    )
    rloo = recipes.mix(recipes.foresight(4, 4), recipes.rloo(4, 4), take={"advantage": "second"})
    assert (rloo.advantage, rloo.over_batch) == (recipes.rloo(4, 4).advantage, None)
