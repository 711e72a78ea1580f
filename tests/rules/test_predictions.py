"""Prompt rules that say what they expect: by hand, what they draw and how often, what they refuse, and what a move keeps."""

# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportOptionalOperand=false, reportPossiblyUnboundVariable=false

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollalloc import Allocator, PromptTable, recipes
from rollalloc.core.events import Done, Updated
from rollalloc.core.group import GroupView
from rollalloc.core.packing import pack_tree
from rollalloc.core.rule import View
from rollalloc.core.seeds import rng
from rollalloc.predict.predictor import Predictor
from rollalloc.recipes.foresight import Foresight
from rollalloc.recipes.knapsack import LastVisit
from rollalloc.recipes.reinforce import RunningMean
from rollalloc.recipes.spo import Tracker

QUICK = Predictor(ridges=(1.0,), events=64, first_fits=(8, 16), fit_every=32, track_every=8)
VIEW = View.of(4)
RULES = (RunningMean(), Tracker(), Foresight(), Foresight(warm=0), Foresight(None), Foresight(warm=0, floor=1.0))


def draw(rule, memory, k, free_N, call=0, view=VIEW):
    return rule.pick(memory, k, np.asarray(free_N, bool), view, rng(0, "pick", call))


def firsts(rule, memory, times, free_N):
    """How often each prompt is drawn first, of so many draws."""
    return Counter(draw(rule, memory, 1, free_N, call)[0].prompt for call in range(times))


# ----------------------------------------------------------------------------------------------------- what all of them do


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_few_free_prompts_are_all_drawn_once(rule):
    memory = rule.init(PromptTable(4))
    assert list(draw(rule, memory, 3, [0, 0, 0, 0])) == []
    assert [each.prompt for each in draw(rule, memory, 3, [0, 0, 1, 0])] == [2]
    assert sorted(each.prompt for each in draw(rule, memory, 99, [1, 1, 0, 1])) == [0, 1, 3]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_visit_without_a_score_teaches_nothing(rule):
    memory = rule.init(PromptTable(4))
    rule.observe(memory, GroupView.of([1, 0], prompt=1), View.of(4, kl_sum=0.1))
    before = json.dumps(pack_tree(memory))
    rule.observe(memory, GroupView.of([], prompt=1), View.of(4, kl_sum=0.4))
    assert json.dumps(pack_tree(memory)) == before


# ----------------------------------------------------------------------------------------------------------- running mean


def test_the_running_mean_by_hand():
    """b = Σ w_i r_i / Σ w_i with w halved every rollout: (-1 and 3) · 1/2 + 2, of weights 2 · 1/2 + 1."""
    rule = RunningMean(half_life=1.0)
    memory = rule.init(PromptTable(4))
    assert draw(rule, memory, 1, [1] * 4)[0].baseline is None
    rule.observe(memory, GroupView.of([0, 1], rewards=[-1.0, 3.0], prompt=0), VIEW)
    assert draw(rule, memory, 1, [1] * 4)[0].baseline == 1.0
    rule.observe(memory, GroupView.of([0], rewards=[2.0], prompt=3), VIEW)
    picked = draw(rule, memory, 4, [1] * 4)
    assert {each.baseline for each in picked} == {(2 * 0.5 + 2) / (2 * 0.5 + 1)}
    assert {(each.predicted, each.sampling_ratio) for each in picked} == {(None, None)}
    assert json.loads(json.dumps(pack_tree(memory)))["reward_sum"] == 3.0


# ---------------------------------------------------------------------------------------------------------------- tracker


def test_the_tracker_by_hand():
    """α = β = 4 at first; D = 0.06 at half_way 0.12 gives ρ = √½, kept at most at `most`."""
    rule = Tracker(half_way=0.12, least=0.5, most=0.75, spread=0.05)
    memory = rule.init(PromptTable(3, prior_N=[0.25, np.nan, 1.0]))
    assert (memory["hits_N"].tolist(), memory["misses_N"].tolist()) == ([0.5, 1.0, 2.0], [1.5, 1.0, 0.0])
    rule.observe(memory, GroupView.of([1.0, 0.0], prompt=1), View.of(3))  # nothing told: ρ = least, then most
    assert (memory["hits_N"][1], memory["misses_N"][1]) == (0.75 * (0.5 + 1), 0.75 * 0.5 + 1)
    rule.observe(memory, GroupView.of([1.0], prompt=1), View.of(3, kl_sum=0.06))
    np.testing.assert_allclose(memory["hits_N"][1], np.sqrt(0.5) * 1.125 + 1, rtol=1e-6)
    before = memory["misses_N"][1]
    rule.observe(memory, GroupView.of([1.0], prompt=1), View.of(3, kl_sum=0.0601))  # hardly moved: ρ = most
    np.testing.assert_allclose(memory["misses_N"][1], 0.75 * before, rtol=1e-6)
    before = memory["misses_N"][1]
    rule.observe(memory, GroupView.of([1.0], prompt=1), View.of(3, kl_sum=9.0))  # far away: ρ = least
    np.testing.assert_allclose(memory["misses_N"][1], 0.5 * before, rtol=1e-6)
    assert (memory["hits_N"][0], memory["misses_N"][0]) == (0.5, 1.5)


def test_what_was_learned_under_weights_of_now_is_kept_however_far_they_went_before():
    """Two visits between which nothing moved: ρ = most. Where nobody says how far anything moved: least."""
    rule = Tracker(half_way=0.12, least=0.5, most=0.75)
    for moved, kept in ((0.25, 0.75), (0.0, 0.5)):  # a quarter is the same in float32
        memory = rule.init(PromptTable(1))
        for _ in range(2):
            before = float(memory["hits_N"][0])
            rule.observe(memory, GroupView.of([1.0]), View.of(kl_sum=moved))
        assert memory["hits_N"][0] == kept * before + 1


def test_the_tracker_takes_metrics_that_rounding_put_beyond_1_and_keeps_its_rates():
    rule = Tracker()
    memory = rule.init(PromptTable(1))
    for _ in range(400):
        rule.observe(memory, GroupView.of([1 + 1e-6]), View.of())
    (drawn,) = draw(rule, memory, 1, [1], view=View.of())
    assert 0.999 < drawn.predicted <= 1


def test_the_trackers_memory_follows_its_prompts():
    keys, recipe = tuple("abcdef"), recipes.spo(2)
    allocator = Allocator(recipe, PromptTable(keys), 0)
    allocator.tell([Done(r, 1.0, 1.0, 1, 0) for o in allocator.ask().generate for r in o.rollouts])
    allocator.ask()
    allocator.tell([Updated(1, 0.25)])
    allocator.tell([Done(r, 1.0, 1.0, 1, 1) for o in allocator.ask().generate for r in o.rollouts])
    allocator.ask()
    copy = Allocator(recipe, PromptTable(("z", *keys[::-1]), prior_N=[0.25] * 7), 0)
    copy.load_state_dict(json.loads(json.dumps(allocator.state_dict())), remap="keys")
    for name in ("hits_N", "misses_N", "kl_N"):
        assert copy._run.memory[name][1:].tolist() == allocator._run.memory[name][::-1].tolist()
    assert (copy._run.memory["hits_N"][0], copy._run.memory["kl_N"][0]) == (2.0, 0.0)


# -------------------------------------------------------------------------------------------------------------- foresight


def test_foresight_chances_by_hand():
    """(1 - f) p(1 - p)^a / Σ + f / K: of .5, .2 and .8 with a = 3 the scores are .0625, .1024, .0064."""
    rule = Foresight(exponent=3.0, floor=0.1)
    score_K = np.array([0.0625, 0.1024, 0.0064])
    np.testing.assert_allclose(
        rule.chances(np.array([0.5, 0.2, 0.8])), 0.9 * score_K / score_K.sum() + 0.1 / 3, rtol=1e-12
    )
    np.testing.assert_allclose(
        replace(rule, exponent=0.0).chances(np.array([0.1, 0.3])), [0.9 / 4 + 0.05, 0.9 * 0.75 + 0.05]
    )
    np.testing.assert_allclose(replace(rule, exponent=None).chances(np.array([0.1, 0.3])), [0.5, 0.5])
    np.testing.assert_allclose(replace(rule, floor=1.0).chances(np.array([0.1, 0.3])), [0.5, 0.5])


@given(
    st.lists(st.floats(0.001, 0.999), min_size=1, max_size=40),
    st.floats(0, 1e6),
    st.sampled_from([0.0, 1e-300, 0.1, 1.0]),
)
def test_foresight_chances_are_probabilities_for_any_exponent(predictions, exponent, floor):
    chance_K = Foresight(exponent=exponent, floor=floor).chances(np.array(predictions))
    assert chance_K.sum() == pytest.approx(1)
    assert ((chance_K > 0) & (chance_K <= 1)).all()


def believing(rule, rate_N):
    """A memory in which each prompt has a record of this rate, so long that nothing counts beside it."""
    memory = rule.init(PromptTable(len(rate_N)))
    memory["hits_N"][:], memory["count_N"][:] = 1e6 * np.asarray(rate_N), 1e6
    memory["paid"], memory["last_N"][:] = 1000, 1000
    memory["fit_at"] = memory["track_at"] = 10**9
    memory["loss_E"] = np.array([50.0, 0.0])  # the mean, the record
    return memory


@pytest.mark.parametrize(
    ("rule", "score"),
    [
        (Tracker(spread=0.1), lambda v: np.sqrt(v * (1 - v)) + 0.1),
        (Foresight(exponent=3.0, floor=0.1), Foresight(exponent=3.0, floor=0.1).chances),
        (Foresight(warm=2000), np.ones_like),  # not warm yet
        (Foresight(None), np.ones_like),
        (Foresight(floor=1.0), np.ones_like),
    ],
    ids=["tracker", "foresight", "foresight that is not warm", "without an exponent", "with a floor of 1"],
)
def test_prompts_are_drawn_in_proportion_to_their_scores_and_the_ratio_is_said(rule, score):
    """2,000 first draws: a count off by 5 standard errors has probability below 1e-6."""
    times, rate_N = 2_000, np.array([0.5, 0.2, 0.8, 0.05])
    memory = rule.init(PromptTable(4, prior_N=rate_N)) if isinstance(rule, Tracker) else believing(rule, rate_N)
    share_N = score(rate_N) / score(rate_N).sum()
    for each in draw(rule, memory, 4, [1] * 4):
        assert each.sampling_ratio == pytest.approx(4 * share_N[each.prompt], rel=1e-4)
        assert each.predicted == pytest.approx(rate_N[each.prompt], rel=1e-4)
        assert each.baseline == pytest.approx(each.predicted)
    counts = firsts(rule, memory, times, [1] * 4)
    for prompt, share in enumerate(share_N):
        assert abs(counts[prompt] - times * share) < 5 * np.sqrt(times * share * (1 - share)) + 1e-3 * times * share


def test_the_second_prompt_of_a_draw_is_drawn_among_the_remaining_ones():
    """P(i, then j) = q_i q_j / (1 - q_i): 2,000 pairs, each within 5 standard errors (all twelve: above 1 - 1e-5)."""
    rule, times, rate_N = Foresight(exponent=1.0, floor=0.0), 2_000, np.array([0.5, 0.2, 0.9, 0.05])
    memory, share_N = believing(rule, rate_N), rule.chances(rate_N)
    pairs = Counter(
        tuple(each.prompt for each in draw(rule, memory, 2, [1] * 4, call, View.of(4))) for call in range(times)
    )
    for i in range(4):
        for j in set(range(4)) - {i}:
            share = share_N[i] * share_N[j] / (1 - share_N[i])
            assert abs(pairs[i, j] - times * share) < 5 * np.sqrt(times * share * (1 - share)) + 1e-3 * times * share


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.25, 1.0]), st.floats(-5, 5)), min_size=0, max_size=30),
)
def test_the_reward_line_is_the_least_squares_drawn_to_the_identity(pairs):
    """c, s minimise Σ (r - c - s m)² + c² + (s - 1)²: least squares with two more rows, solved by numpy."""
    rule = Foresight()
    memory = rule.init(PromptTable(4))
    for metric, reward in pairs:
        rule.observe(memory, GroupView.of([metric], rewards=[reward]), VIEW)
    rows = np.array([[1.0, metric] for metric, _ in pairs] + [[1, 0], [0, 1]])
    wanted = np.array([reward for _, reward in pairs] + [0.0, 1.0])
    offset, slope = np.linalg.lstsq(rows, wanted, rcond=None)[0]
    for each in draw(rule, memory, 4, [1] * 4):
        assert each.baseline == pytest.approx(offset + slope * each.predicted, abs=1e-8)


@pytest.mark.parametrize("predicted", [0.0, 1.0, None, 1e-9])
def test_foresight_takes_a_group_that_another_rule_drew(predicted):
    """As after a load under an accepted recipe: SPO's predicted may be 0 or 1."""
    rule = Foresight()
    memory = rule.init(PromptTable(1))
    rule.observe(memory, GroupView.of([1 + 1e-6, 1], predicted=predicted), View.of())
    assert (memory["paid"], memory["seen"]) == (2, 1)
    (kept,) = memory["event_belief"][:1]  # a rate of 0 or 1 would make its log-loss infinite
    assert np.isnan(kept) if predicted is None else 0 < kept < 1


def visited(table, recipe, steps=30):
    """An allocator whose prompts succeed where their first feature is above 0."""
    allocator = Allocator(recipe, table, 0)
    block = next(iter(table.features.values()))
    for _ in range(steps):
        actions = allocator.ask()
        wins = {r: float(block[o.prompt, 0] > 0) for o in actions.generate for r in o.rollouts}
        allocator.tell([Done(r, win, win, 1, allocator.version) for r, win in wins.items()])
        if allocator.batch:
            allocator.tell([Updated(allocator.version + 1)])
    return allocator


def test_foresight_learns_from_the_tables_features_and_takes_them_to_other_data():
    """Prompts never visited before, in a data set that changed: those of higher x are expected to do better at once."""
    recipe = replace(recipes.foresight(4), prompts=Foresight(warm=8, predictor=QUICK))
    x_N = np.linspace(-2, 2, 40)
    allocator = visited(PromptTable([f"p{i}" for i in range(40)], features={"x": x_N[:, None]}), recipe)
    table = PromptTable(["p3", *(f"new{i}" for i in range(20))], features={"x": np.linspace(-2, 2, 21)[:, None]})
    copy = Allocator(recipe, table, 0)
    copy.load_state_dict(json.loads(json.dumps(allocator.state_dict())), remap="keys")
    memory = copy._run.memory
    rate_N = recipe.prompts.predictor(memory, table.features, np.arange(1, 21))
    assert rate_N[-1] > 0.8 > 0.2 > rate_N[0]
    assert (memory["count_N"][0] > 0, memory["count_N"][1:].any()) == (allocator._run.memory["count_N"][3] > 0, False)
    assert memory["line"] == allocator._run.memory["line"]


def test_last_visit_by_hand():
    rule, table = LastVisit(), PromptTable(4, prior_N=[np.nan, 0.25, np.nan, 1.0])
    memory = rule.init(table)
    rule.observe(memory, GroupView.of([1, 0, 0, 0, 0], prompt=0), VIEW)
    rule.observe(memory, GroupView.of([1, 1], rewards=[-3.0, 0.0], prompt=0), VIEW)  # the last one, and its metric
    rule.observe(memory, GroupView.of([0, 1], prompt=1), VIEW)
    rule.observe(memory, GroupView.of([], prompt=1), VIEW)  # without a score
    drawn = draw(rule, memory, 4, [1, 1, 1, 1])
    assert {each.prompt: each.predicted for each in drawn} == {0: 1.0, 1: 0.5, 2: None, 3: 1.0}
    assert {each.baseline for each in drawn} == {None}
