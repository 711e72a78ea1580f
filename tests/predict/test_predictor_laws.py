"""Laws of the predictor under any features and any history."""

import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rollalloc.core.packing import pack_tree, unpack_tree
from rollalloc.predict.predictor import Predictor

PROMPTS = 6
SMALL = {"first_fits": (4, 8), "fit_every": 12, "track_every": 4, "events": 32}
HARD = st.sampled_from([0.0, 1.0, -1.0, 1e-30, 1e30, -1e30, 3.4e38, -3.4e38, 1e-45])
ENTRY = st.one_of(HARD, st.floats(-5, 5, width=32))
RATES = st.one_of(st.just(0.0), st.just(1.0), st.floats(0, 1))


def block(width):
    return arrays.arrays(np.float32, (PROMPTS, width), elements=ENTRY)


@st.composite
def histories(draw):
    """Blocks of features, some of them constant or twice the same column, and visits."""
    features = {}
    for name, width in draw(
        st.dictionaries(st.sampled_from(["hidden", "tokens", "length"]), st.integers(1, 4))
    ).items():
        features[name] = draw(block(width))
        if draw(st.booleans()):
            features[name][:, -1] = features[name][:, 0]
        if draw(st.booleans()):
            features[name][:, 0] = draw(ENTRY)
    visit = st.tuples(st.integers(0, PROMPTS - 1), RATES, st.integers(1, 4))
    return features, [(prompt, rate * count, count) for prompt, rate, count in draw(st.lists(visit, max_size=30))]


def run(features, visits, predictor=None):
    predictor = predictor or Predictor(**SMALL)
    memory = predictor.init(PROMPTS, {name: each.shape[1] for name, each in features.items()})
    for prompt, hits, count in visits:
        predictor.observe(memory, prompt, float(predictor(memory, features, [prompt])[0]), hits, count)
        if predictor.due(memory):
            predictor.refit(memory, features)
    return predictor, memory


@settings(max_examples=80)
@given(histories())
def test_a_rate_is_within_0_and_1_and_figures_are_finite(history):
    features, visits = history
    with np.errstate(invalid="raise", divide="raise"):
        predictor, memory = run(features, visits)
        said_N = predictor(memory, features, range(PROMPTS))
        figures = predictor.figures(memory)
    assert ((said_N > 0) & (said_N < 1)).all()
    assert all(np.isfinite(value) for value in figures.values())
    weights = [value for name, value in figures.items() if name.startswith("weight/")]
    assert min(weights) >= 0
    np.testing.assert_allclose(sum(weights), 1)
    for name, value in memory.items():
        if isinstance(value, np.ndarray) and name != "event_belief":
            assert np.isfinite(value).all(), name


@given(histories(), st.permutations(range(PROMPTS)))
def test_a_prediction_does_not_depend_on_the_other_prompts_asked_for(history, order):
    """But for the last digits of float32, in which a product of matrices depends on its shape."""
    features, visits = history
    predictor, memory = run(features, visits)
    said_N = predictor(memory, features, range(PROMPTS))
    np.testing.assert_allclose(predictor(memory, features, order), said_N[list(order)], atol=1e-3)
    for prompt in range(PROMPTS):
        np.testing.assert_allclose(predictor(memory, features, [prompt]), said_N[[prompt]], atol=1e-3)


@given(histories(), st.integers(0, 30))
def test_the_same_history_gives_the_same_bytes_across_any_save(history, at):
    features, visits = history
    predictor, memory = run(features, visits)
    again, part = run(features, visits[:at])
    part = unpack_tree(json.loads(json.dumps(pack_tree(part))))
    for prompt, hits, count in visits[at:]:
        again.observe(part, prompt, float(again(part, features, [prompt])[0]), hits, count)
        if again.due(part):
            again.refit(part, features)
    assert json.dumps(pack_tree(memory)) == json.dumps(pack_tree(part))
    assert predictor(memory, features, range(PROMPTS)).tolist() == again(part, features, range(PROMPTS)).tolist()


@given(histories())
def test_predicting_does_not_change_the_memory(history):
    features, visits = history
    predictor, memory = run(features, visits)
    frozen = json.dumps(pack_tree(memory))
    predictor(memory, features, range(PROMPTS))
    predictor.figures(memory)
    predictor.due(memory)
    assert json.dumps(pack_tree(memory)) == frozen


@given(histories(), st.integers(40, 80), st.booleans())
def test_all_successes_or_all_failures_are_believed(history, count, success):
    features, _ = history
    visits = [(at % PROMPTS, float(success), 1) for at in range(count)]
    predictor, memory = run(features, visits)
    wrong_N = np.abs(predictor(memory, features, range(PROMPTS)) - success)
    assert (wrong_N < 0.2).all()


@given(histories(), st.lists(st.integers(-1, PROMPTS - 1), min_size=1, max_size=8))
def test_a_change_of_the_data_keeps_what_was_known_of_a_prompt(history, wanted):
    source_N = [each if each not in wanted[:at] else -1 for at, each in enumerate(wanted)]
    features, visits = history
    predictor, memory = run(features, visits)
    here = predictor.remap(memory, source_N)
    moved = {name: each[np.maximum(source_N, 0)] for name, each in features.items()}
    kept = [at for at, each in enumerate(source_N) if each >= 0]
    np.testing.assert_allclose(
        predictor(here, moved, kept), predictor(memory, features, [source_N[at] for at in kept]), atol=1e-3
    )
    new = [at for at, each in enumerate(source_N) if each < 0]
    assert not here["count_N"][new].any()
    here["track_at"] = here["fit_at"] = here["paid"]
    predictor.refit(here, moved)  # events of prompts that left are no obstacle
    assert np.isfinite(predictor(here, moved, range(len(source_N)))).all()
