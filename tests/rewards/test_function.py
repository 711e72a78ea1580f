"""Finding a reward function, and what its results mean."""

import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from rollalloc.rewards.function import Sample, Scored, Unscored, load_reward, score_sample, summed, to_outcome

SAMPLES = Path(__file__).with_name("reward_samples.py")


def call(function, completion="4", ground_truth="4"):
    return score_sample(function, Sample("arithmetic", completion, ground_truth, {"index": 3}))


def ctrl_c():
    raise KeyboardInterrupt


def test_a_reward_loads_from_a_file_and_from_a_module(monkeypatch, tmp_path):
    (tmp_path / "rewards_by_path.py").write_text(SAMPLES.read_text())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for path in (f"{SAMPLES}:equals", "rewards_by_path.py:equals", "rewards_by_path:equals"):
        function = load_reward(path)
        assert call(function) == Scored(1.0, 1.0)
        assert call(function, "5") == Scored(0.0, 0.0)


def test_two_files_of_one_name_are_two_modules(tmp_path):
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "reward.py").write_text(f"def score(**sample): return {value}")
    first, second = (load_reward(f"{tmp_path}/{folder}/reward.py:score") for folder in "ab")
    assert (call(first), call(second)) == (Scored(1.0, 1.0), Scored(2.0, 2.0))


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("math_reward", ValueError, "must be 'package.module:function' or 'file.py:function', got 'math_reward'"),
        ("module:", ValueError, "name both parts"),
        (":function", ValueError, "name both parts"),
        ("no_such_package.reward:score", ImportError, "cannot import 'no_such_package.reward'.*No module named"),
        ("no_such_file.py:score", FileNotFoundError, "no_such_file.py: no such file, looked in /"),
        (f"{SAMPLES}:equal", AttributeError, r"has no 'equal'; did you mean equals( or equals_later)?\?"),
        (f"{SAMPLES}:zzz", AttributeError, "has no 'zzz'; check the name"),
        (f"{SAMPLES}:not_a_function", TypeError, "must be a function, got 3"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(path, error, message):
    with pytest.raises(error, match=message):
        load_reward(path)


TRLS = "def score(completions, answer, **columns): return [1.0 for _ in completions]"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (TRLS, r"missing a required argument: 'completions'.*`completions` is TRL's"),
        ("def score(solution_str, ground_truth): return 1.0", "unexpected keyword argument 'data_source'"),
        ("def score(sample, /): return 1.0", "its signature is"),
    ],
    ids=["TRL's", "two of four", "by position"],
)
def test_a_function_with_other_arguments_than_verls_is_refused_before_a_rollout_is_paid(written, message, tmp_path):
    (tmp_path / "reward.py").write_text(written)
    with pytest.raises(TypeError, match=message):
        load_reward(f"{tmp_path}/reward.py:score")


def test_a_decorator_may_give_a_function_of_trl_verls_arguments(tmp_path):
    adapted = f"""
import functools
{TRLS}
@functools.wraps(score)
def adapted(data_source, solution_str, ground_truth, extra_info):
    return score([solution_str], [ground_truth])[0]
"""
    (tmp_path / "reward.py").write_text(adapted)
    assert call(load_reward(f"{tmp_path}/reward.py:adapted")) == Scored(1.0, 1.0)
    assert load_reward("operator:itemgetter")  # what Python cannot describe is not refused


@pytest.mark.parametrize(
    ("result", "outcome"),
    [
        (True, Scored(1.0, 1.0)),
        (0, Scored(0.0, 0.0)),
        (-0.5, Scored(-0.5, -0.5)),
        (np.float32(0.5), Scored(0.5, 0.5)),
        (np.int64(2), Scored(2.0, 2.0)),
        (np.bool_(True), Scored(1.0, 1.0)),
        ({"score": -1.0}, Scored(-1.0, -1.0)),
        ({"score": -1.0, "acc": False, "pred": "7"}, Scored(-1.0, 0.0)),
        ({"score": 0.5, "acc": None}, Scored(0.5, 0.5)),
        (None, Unscored("reward function returned None")),
    ],
)
def test_a_result_that_can_be_read_becomes_a_score(result, outcome):
    read = to_outcome(result)
    assert read == outcome
    if isinstance(read, Scored):
        assert (type(read.reward), type(read.metric)) == (float, float)


@pytest.mark.parametrize(
    ("result", "named"),
    [
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (1e38, "1e+38"),
        ("1.0", "'1.0'"),
        ((1.0, "why"), "(1.0, 'why')"),
        ({}, "{}"),
        ({"acc": 1.0}, "{'acc': 1.0}"),
        ({"score": None}, "{'score': None}"),
        ({"score": 1.0, "acc": math.nan}, "nan"),
        (1j, "1j"),
    ],
)
def test_a_result_without_a_score_is_unscored_and_named(result, named):
    outcome = to_outcome(result)
    assert isinstance(outcome, Unscored)
    assert named in outcome.reason
    assert "expected a number within ±1e+30 or a dict with 'score'" in outcome.reason


def test_a_coroutine_is_awaited():
    assert call(load_reward(f"{SAMPLES}:equals_later")) == Scored(0.5, 1.0)


def test_an_exception_is_unscored_with_its_text_cut():
    assert call(load_reward(f"{SAMPLES}:echo"), "wrong unit") == Unscored("ValueError: wrong unit")
    assert call(load_reward(f"{SAMPLES}:echo"), "x" * 1000) == Unscored("ValueError: " + "x" * 188)
    assert call(load_reward(f"{SAMPLES}:obey"), "sys.exit") == Unscored("SystemExit: enough")


def test_an_exception_that_cannot_be_told_is_named():
    class Odd(Exception):
        def __str__(self):
            raise self

    def raises(**_):
        raise Odd

    assert call(raises) == Unscored("Odd")


@pytest.mark.parametrize(
    ("ends", "code"), [(lambda: 1.0, 0), (lambda: 1 / 0, 1), (lambda: sys.exit(3), 3), (ctrl_c, 1)]
)
def test_what_a_function_forks_is_no_second_caller(ends, code):
    child = None

    def forks(**_):
        nonlocal child
        child = os.fork()
        return ends() if child == 0 else 1.0

    assert call(forks) == Scored(1.0, 1.0)  # once: the child would go on with this test, and with those after it
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code


@pytest.mark.parametrize("parts", [(0.1, 0.2), (0.3,), (0.1, 0.1, 0.1), (0.7, -0.4)])
def test_a_reward_is_the_same_however_its_parts_add_up(parts):
    assert summed(parts) == 0.3


def test_a_sum_of_parts_keeps_small_differences_and_what_is_not_finite():
    assert summed([1.0, 1e-8]) > 1
    assert math.isnan(summed([1.0, math.nan]))
    assert summed([1.0, math.inf]) == math.inf
