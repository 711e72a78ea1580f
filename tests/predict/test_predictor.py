"""The predictor: by hand, its schedule, what it refuses, and what survives a save or a change of the data."""

import json

import numpy as np
import pytest

from rollalloc.core.packing import pack_tree
from rollalloc.predict.predictor import Predictor, mixture

LINE = {"length": np.linspace(-1.5, 1.5, 8, dtype=np.float32)[:, None]}


def feed(predictor, memory, features, visits):
    """Observe (prompt, hits, count), each with the predicted rate of its time; refit where it is due."""
    for prompt, hits, count in visits:
        predictor.observe(memory, prompt, float(predictor(memory, features, [prompt])[0]), hits, count)
        if predictor.due(memory):
            predictor.refit(memory, features)


def some_visits(seed=0, count=120, prompts=8):
    rng = np.random.default_rng(seed)
    return [(int(i), float(rng.random() < (i + 1) / 9), 1) for i in rng.integers(prompts, size=count)]


def after(predictor=None, visits=None, features=LINE):
    predictor = predictor or Predictor(first_fits=(16, 32), fit_every=32, track_every=8, events=64)
    memory = predictor.init(8, {name: block.shape[1] for name, block in features.items()})
    feed(predictor, memory, features, visits or some_visits())
    return predictor, memory


def test_features_too_wide_for_a_fit_are_refused_with_how_to_project_them():
    with pytest.raises(
        ValueError, match=r"'mine': expected at most 1,024 columns, got 2,048.*own_features\(\{'mine': array"
    ):
        Predictor().init(3, {"narrow": 1024, "mine": 2048})


def test_the_weight_of_an_expert_by_hand():
    np.testing.assert_allclose(mixture(np.log([7.0, 14.0, 28.0]) + 5000), [4 / 7, 2 / 7, 1 / 7])


def test_an_unknown_prompt_is_predicted_at_a_half_or_towards_its_prior():
    predictor = Predictor(prior_weight=8.0, record_weight=2.0)
    assert predictor(predictor.init(3, {"length": 1}), {"length": np.zeros((3, 1))}, [2, 0]).tolist() == [0.5, 0.5]
    memory = predictor.init(3, {}, prior_N=[1.0, float("nan"), 0.0])
    # the record says (8 · prior + 2 · .5) / 10, the mean .5, and nothing tells them apart yet
    np.testing.assert_allclose(predictor(memory, {}, [0, 1, 2]), [0.7, 0.5, 0.3])


def test_the_mean_and_a_record_by_hand():
    """Half-lives of 2 rollouts for the mean and 4 for a record; 2 of 2 for prompt 0, then 0 of 4 for prompt 1."""
    predictor = Predictor(mean_half_life=2.0, half_life=4.0, record_weight=2.0)
    memory = predictor.init(3, {})
    predictor.observe(memory, 0, None, 2.0, 2)
    predictor.observe(memory, 1, None, 0.0, 4)
    # the mean's hits are (.5 / 2 + 2) / 4 = .5625, its rollouts (1 / 2 + 2) / 4 + 4 = 4.625
    mean = 0.5625 / 4.625
    assert memory["mean_hits"] / memory["mean_count"] == pytest.approx(mean)
    # prompt 0's 2 of 2 faded over the 6 rollouts from before its visit, prompt 1's 0 of 4 over 4
    faded = 2 * 0.5**1.0  # a visit's rollouts weigh 1 when it ends; 4 came since
    record_N = np.array([(faded + 2 * mean) / (faded + 2), 2 * mean / (4 + 2), mean])
    np.testing.assert_allclose(predictor(memory, {}, [0, 1, 2]), (record_N + mean) / 2, rtol=1e-6)


def test_the_drift_moves_the_fitted_experts_and_a_fit_takes_it_in():
    """At first all fail, then all succeed: the offset rises, and after the next fit it is 0 with nothing lost by it."""
    predictor = Predictor(first_fits=(64,), fit_every=64, track_every=8, drift_rate=0.01, loss_half_life=1e6)
    memory = predictor.init(8, {"length": 1})
    feed(predictor, memory, LINE, [(i % 8, 0.0, 1) for i in range(64)])
    assert predictor.figures(memory)["drift_offset"] == 0
    base = predictor(memory, LINE, range(8))
    feed(predictor, memory, LINE, [(i % 8, 1.0, 1) for i in range(56)])
    offset = predictor.figures(memory)["drift_offset"]
    assert offset > 1
    risen = predictor(memory, LINE, range(8))
    assert (risen > base + 0.1).all()
    assert set(memory["event_drift"][:64]) == {0.0}
    rises_T = memory["event_drift"][64:120:8]  # one for each track, of the very events that it was estimated from
    assert (np.diff(rises_T, prepend=0.0) > 0).all()
    assert rises_T[-1] == pytest.approx(offset)
    feed(predictor, memory, LINE, [(i % 8, 1.0, 1) for i in range(8)])
    figures = predictor.figures(memory)
    assert figures["drift_offset"] == 0
    assert figures["drift"] >= offset
    assert (predictor(memory, LINE, range(8)) > risen - 0.1).all()


def test_a_fit_is_due_after_the_first_rollouts_named_and_then_regularly():
    predictor = Predictor(first_fits=(10, 25), fit_every=40, track_every=1000)
    memory, at = predictor.init(2, {}), []
    for paid in range(1, 151):
        predictor.observe(memory, 0, None, 1.0, 1)
        if predictor.due(memory):
            predictor.refit(memory, {})
            at.append(paid)
            assert not predictor.due(memory)
    assert at == [10, 25, 65, 105, 145]
    assert memory["fits"] == 5


def test_metrics_of_the_last_interval_by_hand():
    predictor = Predictor(first_fits=(3, 7), track_every=1000, ridges=(1.0,))
    memory = predictor.init(8, {"length": 1})
    for visit in [(0, 0.9, 0.0, 3), (1, 0.8, 1.0, 1), (2, 0.4, 0.0, 1), (3, None, 1.0, 1), (4, 0.4, 1.0, 1)]:
        predictor.observe(memory, *visit)
        if predictor.due(memory):
            predictor.refit(memory, LINE)
    figures = predictor.figures(memory)
    constant_K = memory["event_constant"][[1, 2, 4]]
    assert figures["rollouts"] == 3
    assert figures["auc"] == pytest.approx(0.75)  # .8 above .4, and a tie
    assert figures["log_loss"] == pytest.approx(-np.log([0.8, 0.6, 0.4]).mean())
    assert figures["constant_log_loss"] == pytest.approx(
        -np.log([constant_K[0], 1 - constant_K[1], constant_K[2]]).mean()
    )
    assert figures["calibration_error"] == pytest.approx((0.2 + 0.4 + 0.6) / 3)
    weights = {name: value for name, value in figures.items() if name.startswith("weight/")}
    assert list(weights) == ["weight/length/1", "weight/mean", "weight/record"]
    assert sum(weights.values()) == pytest.approx(1)


def test_records_and_events_follow_their_prompts_into_another_data_set():
    predictor, memory = after()
    before = predictor(memory, LINE, range(8))
    frozen = json.dumps(pack_tree(memory))
    source_N = np.array([-1, 7, 3, -1, 0])
    here = predictor.remap(memory, source_N)
    assert json.dumps(pack_tree(memory)) == frozen
    features = {"length": np.array([0, LINE["length"][7, 0], LINE["length"][3, 0], 0, LINE["length"][0, 0]])[:, None]}
    np.testing.assert_allclose(predictor(here, features, [1, 2, 4]), before[[7, 3, 0]], rtol=1e-9)
    assert (here["count_N"] > 0).tolist() == [False, True, True, False, True]
    old, new = memory["event_prompt"], here["event_prompt"]
    for was, now in ((7, 1), (3, 2), (0, 4), (1, -1), (2, -1), (4, -1), (5, -1), (6, -1)):
        assert (new[old == was] == now).all()
    assert (old == 1).any()
    feed(predictor, here, features, some_visits(prompts=5))  # events of prompts that left are in the ring: no error
    again = predictor.remap(here, np.array([4]))
    assert set(again["event_prompt"]) <= {-1, 0}


def test_features_of_other_widths_are_fitted_to_without_the_drift_that_the_old_ones_showed():
    predictor, memory = after()
    wide = {"length": np.hstack([LINE["length"], LINE["length"] ** 2])}
    said = []
    for drift in (0.0, 0.7):
        drifted = memory | {"event_drift": np.full_like(memory["event_drift"], drift)}
        here = predictor.remap(drifted, range(8), widths={"length": 2})
        assert predictor.due(here)
        predictor.refit(here, wide)
        said.append(predictor(here, wide, range(8)))
    np.testing.assert_array_equal(*said)


def test_a_new_prompts_prior_is_as_fresh_as_its_data():
    predictor, memory = after()
    here = predictor.remap(memory, [-1, 2], prior_N=[0.25, 0.9])
    assert (here["hits_N"][0], here["count_N"][0]) == (0.25 * predictor.prior_weight, predictor.prior_weight)
    assert here["last_N"].tolist() == [memory["paid"], memory["last_N"][2]]
    assert here["count_N"][1] == memory["count_N"][2]


def test_moving_to_the_same_data_changes_nothing():
    predictor, memory = after()
    same = predictor.remap(memory, np.arange(8))
    assert json.dumps(pack_tree(same)) == json.dumps(pack_tree(memory))


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("ridges", (1.0, 0.0)), ("ridges", ()), ("ridges", (9e-5,)),
        ("ridges", (float("inf"),)), ("half_life", 0.0), ("loss_half_life", -1.0),
        ("mean_half_life", float("nan")), ("record_weight", 0.0), ("prior_weight", 0.0), ("drift_rate", -1e-9),
        ("drift_rate", float("nan")), ("events", 0), ("fit_every", 1.5), ("track_every", 0), ("first_fits", (64, 64)),
        ("first_fits", (0, 64)), ("first_fits", (128, 64)), ("first_fits", (-1, 64)),
    ],
)  # fmt: skip
def test_hyper_parameters_out_of_range_are_refused_by_name(field, wrong):
    with pytest.raises(ValueError, match=f"{field} must"):
        Predictor(**{field: wrong})
