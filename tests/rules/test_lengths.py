"""Predicted lengths: what draws goes on drawing, and what sizes and stops make of what was learned."""

import json
from dataclasses import replace

import numpy as np
import pytest

from rollalloc import Allocator, PromptTable, recipes
from rollalloc.core.events import Cancelled, Done, Updated
from rollalloc.core.group import GroupView
from rollalloc.core.ledger import Ledger
from rollalloc.core.recipe import View
from rollalloc.core.seeds import rng
from rollalloc.predict.lengths import LengthPredictor, expected
from rollalloc.predict.predictor import Predictor
from rollalloc.rules import beliefs, prompts
from rollalloc.rules.lengths import PredictedLengths, laws
from rollalloc.rules.sizes import Priced, Redundant, _deviations
from rollalloc.rules.stops import SampledTail

QUICK = LengthPredictor(ridges=(0.1,), events=64, first_fits=(16,), fit_every=32, record_weight=2.0)
RATES = Predictor(ridges=(1.0,), events=64, first_fits=(8, 16), fit_every=32, track_every=8)
ORDERS = (prompts.Shuffled(), prompts.InOrder(), prompts.Banked(), beliefs.Foresight(warm=8, predictor=RATES))
LATENCY = ((1, 1.0), (64, 2.0))


def table(count=24):
    """Prompts whose features say how long they are."""
    return PromptTable([f"p{at}" for at in range(count)], features={"x": np.linspace(-1, 1, count)[:, None]})


def run(allocator, batches, begin=0):
    """Batches of rollouts whose lengths follow the features, 8 to 60 tokens in the median; what was ordered."""
    ordered = []
    while begin < batches:
        actions = allocator.ask()
        lengths = {r: length(o.prompt, r) for o in actions.generate for r in o.rollouts}
        ordered += [(o.prompt, len(o.rollouts)) for o in actions.generate]
        for rollout in sorted(lengths, key=lambda r: (lengths[r], r)):
            if rollout in lengths:
                allocator.tell(
                    [Done(rollout, float(rollout % 2), float(rollout % 2), lengths[rollout], allocator.version)]
                )
                stopped = allocator.ask(0)
                allocator.tell([Cancelled(each, lengths[rollout]) for each in stopped.cancel])
                for each in stopped.cancel:
                    del lengths[each]
                actions = stopped if stopped.batch else actions
        if actions.batch or allocator.batch:
            begin += 1
            allocator.tell([Updated(allocator.version + 1)])
    return ordered


def length(prompt, rollout):
    return int(
        np.ceil(np.exp(3 + np.linspace(-1, 1, 24)[prompt] + 0.5 * rng(8200, "length", rollout).standard_normal()))
    )


def learned(batches=5, tail="none", order=ORDERS[0], **how):
    recipe = replace(recipes.darts(4, 3, 1, tail=tail, **how), prompts=PredictedLengths(order, QUICK))
    allocator = Allocator(recipe, table(), 3)
    run(allocator, batches)
    return allocator


def view_of(allocator, rows=4, longest=0):
    run = allocator._run
    return View.of(run.table, ledger=run.ledger, memory=run.memory, rows=rows, longest=longest)


# -------------------------------------------------------------------------------------------------------------------- draws


@pytest.mark.parametrize("order", ORDERS, ids=repr)
def test_it_draws_as_the_order_does(order):
    made = [replace(recipes.grpo(4, 4), prompts=rule) for rule in (order, PredictedLengths(order, QUICK))]
    one, other = (Allocator(recipe, table(), 3) for recipe in made)
    assert run(one, 4) == run(other, 4)
    memory = other.state_dict()["memory"]
    assert {key: value for key, value in memory.items() if key != "lengths"} == one.state_dict()["memory"]
    assert memory["lengths"]["fits"] > 0


def test_it_says_of_itself_what_the_order_says_and_that_it_reads_features_and_lengths():
    plain, foresight = PredictedLengths(), PredictedLengths(beliefs.Foresight())
    for name, expected_of in (("believes", True), ("reads_rate", True), ("reads_moved", False)):
        assert (getattr(plain, name), getattr(foresight, name)) == (False, expected_of)
    assert PredictedLengths(beliefs.Tracker()).reads_moved
    assert (plain.reads, foresight.reads) == (None, beliefs.Foresight.reads)
    recipe = recipes.darts(4, 3, 1, predict_lengths=True)
    assert recipe.prompts == plain
    assert (recipe.reads_features, recipe.reads_lengths) == (True, True)
    assert not recipes.darts(4, 3, 1).reads_lengths


def test_an_order_that_a_loader_feeds_is_refused():
    with pytest.raises(ValueError, match="for prompts that a rule draws, got AsOffered"):
        PredictedLengths(prompts.AsOffered())


def test_the_ledger_keeps_laws_for_it_although_nothing_is_stopped():
    assert learned(5, "exact").ledger.log_length_2N is not None
    assert Allocator(recipes.darts(4, 3, 1), 24, 0).ledger.log_length_2N is None
    assert learned(5, "exact")._run.memory["lengths"]["fits"] > 0


# --------------------------------------------------------------------------------------------------------------------- laws


def test_a_law_is_the_record_beside_what_is_predicted():
    allocator = learned()
    view, memory = view_of(allocator), allocator._run.memory["lengths"]
    seen = int(np.flatnonzero(~np.isnan(allocator.ledger.log_length_2N[0]))[0])
    new = int(np.flatnonzero(np.isnan(allocator.ledger.log_length_2N[0]))[0])
    said = expected(memory, view.table.features, np.array([seen, new]))
    count = int(allocator.ledger.attempts_N[seen])
    record = allocator.ledger.log_length_2N[:, seen].astype(float)
    assert count >= 4
    mean, var = laws(view, [seen, new])
    np.testing.assert_allclose([mean[0], var[0]], (count * record + 2.0 * said[0]) / (count + 2.0), rtol=1e-6)
    np.testing.assert_allclose([mean[1], var[1]], said[1], rtol=1e-6)


def test_without_a_prediction_the_others_mean_stands_in_and_without_those_nothing():
    ledger = Ledger(3, laws=True)
    assert laws(View.of(3, ledger=ledger), [0, 1]) is None
    assert laws(View.of(3), [0, 1]) is None
    ledger.log_length_2N[:, :2] = [[1.0, 3.0], [0.5, 0.25]]
    mean, var = laws(View.of(3, ledger=ledger), [2, 0, 1])
    assert (mean.tolist(), var.tolist()) == ([2.0, 1.0, 3.0], [0.375, 0.5, 0.25])
    unfitted = {"lengths": QUICK.init(3, {})}
    mean, _ = laws(View.of(3, ledger=ledger, memory=unfitted), [2, 0, 1])
    assert mean.tolist() == [2.0, 1.0, 3.0]


@pytest.mark.parametrize("rule", [Redundant(1.5, 2.0), Priced(2.0, LATENCY)], ids=repr)
def test_a_prompt_that_is_new_has_the_size_that_its_features_say(rule):
    """The second half of the prompts is the longer; a ledger alone cannot tell two of which it knows nothing."""
    view = view_of(learned(7))
    blank = Ledger(24, laws=True)
    groups = [GroupView.of([], prompt=prompt, group=prompt) for prompt in (2, 21)]
    short, long = rule(groups, view._replace(ledger=blank), view.memory)
    assert long > short
    unknown = rule(groups, view._replace(ledger=blank, memory={}), {})
    assert unknown[0] == unknown[1]
    assert all(rule.promises((short, long), groups, view._replace(ledger=blank), view.memory).values())


def test_the_deviation_that_sizes_go_by_is_that_of_the_law_in_tokens():
    """Of a log-normal law, against a sample of it: mean and variance of the logarithms both count."""
    view = view_of(learned(7))
    prompts_K = np.array([0, 9, 23])
    mean_K, var_K = laws(view, prompts_K)
    found_K = _deviations([GroupView.of([], prompt=int(at), group=int(at)) for at in prompts_K], view)
    drawn_KR = np.exp(mean_K[:, None] + np.sqrt(var_K)[:, None] * rng(8200, "law", 0).standard_normal(200_000))
    np.testing.assert_allclose(found_K, drawn_KR.std(axis=1), rtol=0.02)


def test_before_a_first_fit_sizes_are_those_of_the_record():
    allocator = learned(0)
    ledger = allocator.ledger
    ledger.length_std_N[:3] = [1.0, 2.0, 3.0]
    ledger.log_length_2N[:, :3] = [[1.0, 2.0, 3.0], [0.5, 0.5, 0.5]]
    groups = [GroupView.of([], prompt=prompt, group=prompt) for prompt in range(4)]
    for rule in (Redundant(1.5, 2.0), Priced(2.0, LATENCY)):
        view = view_of(allocator)
        assert rule(groups, view, view.memory) == rule(groups, view._replace(memory={}), {})


# -------------------------------------------------------------------------------------------------------------- saved, moved


@pytest.mark.parametrize("order", ORDERS, ids=repr)
@pytest.mark.parametrize("tail", ["exact", "sampled"])
def test_a_run_that_is_saved_and_loaded_goes_on_as_if_it_never_had_been(order, tail):
    one = learned(3, tail, order, latency=LATENCY)
    other = Allocator(one.recipe, table(), 3)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert run(one, 4) == run(other, 4)
    assert json.dumps(one.state_dict()) == json.dumps(other.state_dict())
    assert one._run.memory["lengths"]["fits"] > 2


@pytest.mark.parametrize("order", ORDERS, ids=repr)
def test_what_was_learned_outlives_a_change_of_the_data(order):
    allocator = learned(order=order)
    fewer = PromptTable(
        ["new", *(f"p{at}" for at in range(23, 3, -1))], features={"x": np.linspace(1, -1, 21)[:, None]}
    )
    moved = Allocator(allocator.recipe, fewer, 3)
    moved.load_state_dict(allocator.state_dict(), remap="keys")
    before, here = allocator._run.memory["lengths"], moved._run.memory["lengths"]
    assert here["fits"] == before["fits"]
    np.testing.assert_array_equal(here["theta/x"], before["theta/x"])
    assert here["event_prompt"].max() < 21
    kept = before["event_prompt"] >= 4
    np.testing.assert_array_equal(here["event_prompt"][kept], 24 - before["event_prompt"][kept])
    if isinstance(order, beliefs.Foresight):  # what moves by itself did
        np.testing.assert_array_equal(moved._run.memory["count_N"][1:], allocator._run.memory["count_N"][:3:-1])
    moved.ask()


def test_what_an_order_knows_of_each_prompt_follows_it():
    rule = PredictedLengths(beliefs.LastVisit(), QUICK)
    memory = rule.init(table(3))
    memory["rate_N"][:] = [0.25, 0.5, 1.0]
    assert rule.moved(memory, np.array([2, -1, 0]), table(3))["rate_N"].tolist() == [1.0, -1.0, 0.25]


@pytest.mark.parametrize("torn", ["x", None, {}, {"seen": 3}])
def test_a_memory_that_it_cannot_have_written_is_refused(torn):
    allocator = learned(2)
    state = allocator.state_dict()
    for memory in (torn, state["memory"]["lengths"] | {"fits": -1}):
        state["memory"]["lengths"] = memory
        with pytest.raises(ValueError, match="memory"):
            Allocator(allocator.recipe, table(), 3).load_state_dict(state)


def test_what_the_order_cannot_have_remembered_is_refused_too():
    allocator = learned(2, order=prompts.Banked())
    state = allocator.state_dict()
    state["memory"]["bank"] = [[99, 0.5, 1]]
    with pytest.raises(ValueError, match="memory"):
        Allocator(allocator.recipe, table(), 3).load_state_dict(state)


def test_its_figures_stand_beside_the_orders():
    figures = learned(6, order=ORDERS[3]).prompt_figures()
    assert {"length_explained", "drift", "rollouts"} <= figures.keys()
    assert "drift" not in learned(6).prompt_figures()


# -------------------------------------------------------------------------------------------------------------- composition


def test_it_composes_with_what_else_draws():
    darts = recipes.darts(4, 3, 1, tail="sampled", predict_lengths=True)
    foresight = recipes.foresight(4)
    for mixed in (recipes.mix(foresight, darts), recipes.mix(darts, foresight)):
        assert mixed.prompts == PredictedLengths(foresight.prompts)
        assert mixed.advantage == foresight.advantage
    assert recipes.mix(recipes.dapo(4, 4, 12), darts).prompts == PredictedLengths()
    assert recipes.mix(darts, darts).prompts == PredictedLengths()
    taken = recipes.mix(foresight, darts, take={"prompts": "first"})
    assert taken.prompts == foresight.prompts
    with pytest.raises(ValueError, match=r"both recipes change prompts: Tracker.* and Foresight"):
        recipes.mix(replace(darts, prompts=PredictedLengths(beliefs.Tracker())), foresight)
    other = replace(darts, prompts=PredictedLengths(predictor=QUICK))
    with pytest.raises(ValueError, match="both recipes change prompts"):
        recipes.mix(darts, other)


# -------------------------------------------------------------------------------------------------------------------- stops


@pytest.mark.parametrize(
    ("attempts", "successes", "belief", "solved"),
    [
        (0, 0, None, False),
        (0, 0, 0.95, True),
        (0, 0, 0.9, True),
        (0, 0, 0.85, False),
        (4, 4, 0.1, True),
        (4, 1, 0.95, False),
    ],
)
def test_a_prompt_without_a_record_is_solved_where_that_is_expected_of_it(attempts, successes, belief, solved):
    """Three are there, of five that run none goes on: but for one visit in ten."""
    group = GroupView.of([1, 1, 1], running=[5] * 5, belief=belief)
    group._ledger.attempts_N[0], group._ledger.successes_N[0] = attempts, successes
    view = View.of(rows=4, longest=1)
    made = [SampledTail(0.9, 0.1)(group, view, rng(8200, "stop", at)) for at in range(200)]
    assert all(len(each.kept) in (0, 1) for each in made)
    tails = sum(bool(each.kept) for each in made)
    assert (tails == 200) != solved
    if solved:  # 20 are expected of 200: beyond 5 or 40 once in 10,000
        assert 5 < tails < 40
        assert {share for each in made for share in each.kept.values()} == {0.1 / 5}
