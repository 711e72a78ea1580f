"""The length predictor: by hand, in a world of its own under censoring, and what it refuses."""

import json
from dataclasses import replace

import numpy as np
import pytest

from rollalloc.core.ledger import Ledger
from rollalloc.core.packing import pack_tree, unpack_tree
from rollalloc.predict import ring
from rollalloc.predict.lengths import LengthPredictor, expected

QUICK = LengthPredictor(ridges=(0.1,), half_life=8.0, loss_half_life=8.0, events=16, first_fits=(4, 8), fit_every=8)
LINE = {"length": np.linspace(-1, 1, 8, dtype=np.float32)[:, None]}


def laws(*means, prompts=8):
    laws_2N = np.full((2, prompts), np.nan, np.float32)
    laws_2N[:, : len(means)] = [means, np.full(len(means), 0.25)]
    return laws_2N


def after(visits=(0, 1, 2, 3), laws_2N=None, predictor=QUICK, features=LINE):
    """A memory after single visits of these prompts, fitted whenever it is due."""
    laws_2N = laws(1.0, 2.0, 3.0, 4.0) if laws_2N is None else laws_2N
    memory = predictor.init(laws_2N.shape[1], {name: each.shape[1] for name, each in features.items()})
    for at, prompt in enumerate(visits):
        predictor.observe(memory, prompt, 1, prompt not in visits[:at])
        if predictor.due(memory):
            predictor.refit(memory, features, laws_2N)
    return memory


def dumped(memory):
    return json.dumps(pack_tree(memory))


# ------------------------------------------------------------------------------------------------------------------ by hand


def test_a_fit_is_to_what_the_ledger_believes_the_newest_counting_most():
    memory = after(predictor=LengthPredictor(ridges=(0.1,), half_life=0.5, first_fits=(4,)))
    weight_K, mean_K = np.array([1 / 16, 1 / 4, 1]), np.array([2.0, 3.0, 4.0])  # the first has faded to 1 / 64
    mean = np.average(mean_K, weights=weight_K)
    assert memory["fits"] == 1
    np.testing.assert_allclose(memory["mean_2"], [mean, 0.25])
    assert memory["spread_2"][0] == pytest.approx(np.average((mean_K - mean) ** 2, weights=weight_K) ** 0.5)
    assert memory["spread_2"][1] == 0.01  # they are all alike, and stay so
    np.testing.assert_allclose(memory["least_2"], [2.0, 0.25])
    np.testing.assert_allclose(memory["most_2"], [4.0, 0.25])


def test_what_is_expected_is_the_mixture_and_never_beyond_what_was_seen():
    memory = after()
    theta_F2 = memory["theta/length"][0]
    x = 4.0 * (
        LINE["length"][1:3, 0] - memory["centre/length"][0]
    )  # 4 / √D, D = 1; columns of less than 1 are not blown up
    own_K = memory["mean_2"][0] + memory["spread_2"][0] * (x * theta_F2[0, 0] + theta_F2[1, 0])
    np.testing.assert_allclose(
        expected(memory, LINE, np.array([1, 2]))[:, 0], (own_K + memory["mean_2"][0]) / 2, rtol=1e-6
    )
    memory["loss_E"] = np.array([0.0, 50.0])
    assert (own_K > 1.5).all()
    assert own_K[0] < own_K[1] < 3.5
    np.testing.assert_allclose(expected(memory, LINE, np.array([1, 2]))[:, 0], own_K, rtol=1e-6)
    assert expected(memory, LINE, np.array([7])).tolist() == [[4.0, 0.25]]  # the line says 8


def test_the_losses_are_of_prompts_that_were_new_by_the_parameters_from_before():
    laws_2N = laws(1.0, 2.0, 3.0, 4.0, 4.5, np.nan)
    memory = after(laws_2N=laws_2N)
    assert memory["loss_E"].tolist() == [0.0, 0.0]  # nobody had said anything yet
    theta_F2, centre = memory["theta/length"][0], memory["centre/length"][0]
    own_2 = memory["mean_2"] + memory["spread_2"] * (4.0 * (LINE["length"][4, 0] - centre) * theta_F2[0] + theta_F2[1])
    assert own_2[0] > 4.0  # longer than any seen: it passes for that
    own_2[0], mean_2 = 4.0, memory["mean_2"]
    said = float(expected(memory, LINE, np.array([4]))[0, 0])
    for prompt, first in (
        (0, False),
        (4, True),
        (5, True),
        (1, False),
    ):  # of the sixth nothing is known even afterwards
        QUICK.observe(memory, prompt, 1, first)
    QUICK.refit(memory, LINE, laws_2N)
    missed_22 = [((laws_2N[:, 4] - said_2) / memory["spread_2"]) ** 2 for said_2 in (own_2, mean_2)]
    np.testing.assert_allclose(memory["loss_E"], np.sum(missed_22, axis=1) / 2, rtol=1e-6)
    figures = QUICK.figures(memory)
    assert figures["length_explained"] == pytest.approx(1 - (4.5 - said) ** 2 / (4.5 - mean_2[0]) ** 2, rel=1e-5)
    before_E = memory["loss_E"]
    for _ in range(8):
        QUICK.observe(memory, 0, 1, False)
    QUICK.refit(memory, LINE, laws_2N)
    np.testing.assert_allclose(memory["loss_E"], before_E / 2)  # 8 rollouts: a half-life
    assert QUICK.figures(memory) == {}


def test_it_is_due_after_the_first_rollouts_named_and_then_regularly():
    memory, due = QUICK.init(8, {}), []
    for paid in range(1, 33):
        QUICK.observe(memory, 0, 1, paid == 1)
        if QUICK.due(memory):
            due.append(paid)
            QUICK.refit(memory, {}, laws(1.0))
    assert due == [4, 8, 16, 24, 32]
    assert expected(memory, {}, np.array([3])).tolist() == [[1.0, 0.25]]  # without features, the mean


def test_what_was_not_scored_or_not_learned_yet_is_no_visit():
    memory = QUICK.init(8, {"length": 1})
    QUICK.observe(memory, 0, 0, True)
    assert memory["seen"] == 0
    QUICK.observe(memory, 0, 4, True)
    for unknown in (None, laws()):  # its stopped rollouts run yet
        QUICK.refit(memory, LINE, unknown)
        assert memory["fits"] == 0
    QUICK.refit(memory, LINE, laws(2.0))
    assert memory["mean_2"][0] == 2.0


# ------------------------------------------------------------------------------------------------------------------ a world


def world(seed, slope, prompts=400, visited=300, rollouts=8, stopped=3):
    """Log-lengths of mean 3 + xβ and deviation .6, of which a visit's longest are stopped at the longest that ended.

    Returns the squared errors of prediction and mean over the prompts that were never visited, by the true means.
    """
    rng = np.random.default_rng([8200, seed])
    x_ND = rng.standard_normal((prompts, 4)).astype(np.float32)
    true_N = 3 + x_ND @ (slope * np.array([0.5, -0.3, 0.2, 0.0]))
    predictor, ledger = LengthPredictor(), Ledger(prompts, laws=True)
    memory = predictor.init(prompts, {"x": 4})
    for prompt in range(visited):
        lengths_G = np.sort(np.ceil(np.exp(true_N[prompt] + 0.6 * rng.standard_normal(rollouts)))).astype(int).tolist()
        ended, cut = lengths_G[: rollouts - stopped], [lengths_G[rollouts - stopped - 1]] * stopped
        predictor.observe(memory, prompt, len(ended), True)
        ledger.see_lengths(prompt, ended, cut)
        if predictor.due(memory):
            predictor.refit(memory, {"x": x_ND}, ledger.log_length_2N)
    left = np.arange(visited, prompts)
    said_K = expected(memory, {"x": x_ND}, left)[:, 0]
    return float(((said_K - true_N[left]) ** 2).sum()), float(((memory["mean_2"][0] - true_N[left]) ** 2).sum())


@pytest.mark.parametrize("seed", range(3))
def test_it_finds_a_linear_law_of_lengths_under_censoring(seed):
    """A twentieth of the mean's error is left at most. None of 200 worlds had more: fewer than 1.5% have, at 95%."""
    error, of_mean = world(seed, 1.0)
    assert error < of_mean / 20


@pytest.mark.parametrize("seed", range(3))
def test_where_features_say_nothing_it_says_the_mean(seed):
    """Its mean squared error is at most .001 above the mean's. Of 200 worlds none had more: fewer than 1.5% have, at 95%."""
    error, of_mean = world(seed, 0.0)
    assert error / 100 < of_mean / 100 + 0.001


# ---------------------------------------------------------------------------------------------------- saved, moved, refused


def test_state_goes_through_json_and_on_as_if_it_never_had():
    memory = after((0, 1, 2, 3, 0))
    other = unpack_tree(json.loads(dumped(memory)))
    QUICK.check(other, 8, {"length": 1})
    for each in (memory, other):
        for prompt in (5, 3, 6, 7, 1, 1):
            QUICK.observe(each, prompt, 2, prompt > 4)
            if QUICK.due(each):
                QUICK.refit(each, LINE, laws(1.0, 2.0, 3.0, 4.0, 5.0, 5.5, 6.0))
    assert dumped(memory) == dumped(other)
    assert memory["fits"] == 3
    QUICK.check(memory, 8, {"length": 1})


def test_visits_follow_their_prompts_into_another_data_set():
    memory = after()
    before, frozen = expected(memory, LINE, np.arange(8)), dumped(memory)
    source_N = np.array([-1, 7, 3, 0])
    here = QUICK.moved(memory, source_N, {"length": 1})
    assert dumped(memory) == frozen
    assert here["event_prompt"][:4].tolist() == [3, ring.GONE, ring.GONE, 2]
    features = {"length": np.concatenate([[[0.0]], LINE["length"][source_N[1:]]])}
    np.testing.assert_array_equal(expected(here, features, np.arange(1, 4)), before[source_N[1:]])
    QUICK.check(here, 4, {"length": 1})
    QUICK.refit(here, features, laws(np.nan, np.nan, 4.0, 1.0, prompts=4))  # visits of prompts that left: no error
    assert (here["least_2"][0], here["most_2"][0]) == (1.0, 4.0)


def test_features_of_other_widths_are_fitted_to_at_once():
    here = QUICK.moved(after(), np.arange(8), {"other": 2})
    QUICK.check(here, 8, {"other": 2})
    assert here["fits"] == 0
    assert QUICK.due(here)
    QUICK.refit(here, {"other": np.tile(LINE["length"], 2)}, laws(1.0, 2.0, 3.0, 4.0))
    assert here["fits"] == 1
    assert here["theta/other"].any()


def test_a_memory_of_another_setting_has_this_ones_from_the_next_fit_on():
    memory, other = after(), replace(QUICK, record_weight=5.0, half_life=3.0)
    other.check(memory, 8, {"length": 1})
    other.refit(memory, LINE, laws(1.0))
    assert memory["record_weight"] == 5.0


@pytest.mark.parametrize("features", [{}, {"length": LINE["length"][:7]}, {"length": np.full((8, 1), np.inf)}])
def test_features_that_cannot_be_are_refused_and_nothing_is_written(features):
    memory = QUICK.init(8, {"length": 1})
    QUICK.observe(memory, 0, 4, True)
    frozen = dumped(memory)
    with pytest.raises(ValueError, match="features 'length'"):
        QUICK.refit(memory, features, laws(1.0))
    assert dumped(memory) == frozen


TORN = {
    "prompts": 9, "blocks": ["other"], "widths": [2], "record_weight": float("nan"), "loss_E": np.zeros(3),
    "missed_2": [0.0, 0.0], "paid": -1, "fitted_at": "x", "fit_at": None, "fits": 0.5, "counted": -1, "seen": "x",
    "mean_2": np.array([np.nan, 1.0]), "spread_2": np.zeros(2), "least_2": np.zeros(1), "most_2": None,
    "theta/length": np.zeros((1, 3, 2)), "centre/length": np.full(1, np.inf, np.float32), "scale/length": np.ones(1),
    "event_prompt": np.full(16, 8), "event_paid": np.zeros(3, np.int64), "event_first": np.zeros(16),
}  # fmt: skip


def test_every_entry_of_a_memory_is_looked_at():
    assert TORN.keys() == QUICK.init(8, {"length": 1}).keys()


@pytest.mark.parametrize("name", TORN)
def test_a_memory_that_it_cannot_have_written_is_refused(name):
    memory = after()
    QUICK.check(memory, 8, {"length": 1})
    for torn in (memory | {name: TORN[name]}, {key: value for key, value in memory.items() if key != name}):
        with pytest.raises(ValueError):
            QUICK.check(torn, 8, {"length": 1})


@pytest.mark.parametrize(
    ("name", "change"),
    [("fitted_at", 10**9), ("counted", 10**9), ("event_paid", 10**9), ("event_paid", -(10**9)), ("paid", -1),
     ("least_2", 99.0), ("least_2", -99.0), ("most_2", -99.0), ("scale/length", -99.0)],
)  # fmt: skip
def test_a_memory_whose_entries_contradict_each_other_is_refused(name, change):
    """Each by itself could be: a fit after the last rollout would weigh what was missed beyond all bounds."""
    memory = after()
    QUICK.check(memory, 8, {"length": 1})
    torn = memory[name] + (change if isinstance(memory[name], int) else memory[name].dtype.type(change))
    with pytest.raises(ValueError, match="contradict each other"):
        QUICK.check(memory | {name: torn}, 8, {"length": 1})


@pytest.mark.parametrize(
    ("field", "wrong"),
    [("ridges", ()), ("ridges", (1e-5,)), ("half_life", 0.0), ("loss_half_life", np.inf), ("record_weight", -1.0),
     ("events", 0), ("fit_every", 0.5), ("first_fits", (8, 4))],
)  # fmt: skip
def test_hyper_parameters_out_of_range_are_refused_by_name(field, wrong):
    with pytest.raises(ValueError, match=field):
        LengthPredictor(**{field: wrong})
