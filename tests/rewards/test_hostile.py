"""Answers that hang, kill, flood or confuse, and functions that do, among ordinary ones, all of which are scored right."""

import random
from pathlib import Path

import pytest

from rollalloc.rewards.function import Sample, Scored, Unscored, load_reward
from rollalloc.rewards.scorers import WorkerScorer

pytestmark = pytest.mark.e2e

REWARD = Path(__file__).with_name("reward_math.py")
RIGHT, WRONG = Scored(1.0, 1.0), Scored(0.0, 0.0)
HOSTILE = {  # and why each is unscored; None: how far math-verify gets with it depends on the machine
    r"\boxed{9^{9^{9^{9}}}}": "TimeoutError: math-verify took more than 1 s",
    r"\boxed{" + "{" * 5_000 + "1" + "}" * 5_000 + "}": None,
    "x" * 2**24: "completion has 16777216 characters, more than the limit of 1000000",
    "kill": "worker died (exit code -9)",
    r"\boxed{" * 20_000: None,
    "\0" * 1000: None,
    "\ud800\udfff\x07": None,
}


def test_every_ordinary_answer_is_scored_right():
    pytest.importorskip("math_verify")
    samples = [
        Sample("math", f"so \\boxed{{{number + error}}}", str(number), {}, name=name)
        for number in range(100)
        for name, error in (("right", 0), ("wrong", 1))
    ]
    samples += [Sample("math", text, "4", {}, name="hostile") for text in HOSTILE]
    random.Random(0).shuffle(samples)
    with WorkerScorer(f"{REWARD}:compute_score", workers=2, limit_s=8.0) as scorer:
        outcomes = scorer.score(samples)
    for sample, outcome in zip(samples, outcomes, strict=True):
        if sample.name == "hostile":
            reason = HOSTILE[sample.completion]
            assert outcome == Unscored(reason) if reason else outcome != RIGHT, sample.completion[:20]
        else:
            assert outcome == (RIGHT if sample.name == "right" else WRONG)


FUNCTIONS = f"{Path(__file__).parents[2] / 'lab/benchmarks/hostile_functions.py'}:reward"
FATES = {  # a few of each kind, and what becomes of them
    "fork_return": 0.75,
    "fork_raise": 0.75,
    "fork_sys_exit": 0.75,
    "fork_keyboard_interrupt": 0.75,
    "fork_return_late": 0.75,
    "fork_in_c": 0.75,
    "fork_in_coroutine": 0.75,
    "fork_in_float": 0.75,
    "fork_parent_exits": "worker died (exit code 0)",
    "fork_kills_parent": 0.75,
    "fork_double": 0.75,
    "pool_left_open": 0.75,
    "program_with_all_descriptors": 0.75,
    "replaced_by_program": "worker died (exit code 0)",
    "replaced_by_program_that_stays": "worker closed its channel",
    "kill_group": "worker died (exit code -9)",
    "keyboard_interrupt": "KeyboardInterrupt: ",
    "alarm_left": 0.75,
    "raising_alarm_left": 0.75,
    "signals_blocked": 0.75,
    "thread_exits_later": 0.75,
    "close_some": 0.75,
    "close_all": "worker closed its channel",
    "close_streams": 0.75,
    "close_standard_descriptors": 0.75,
    "scribble_on_all": "worker sent an invalid answer, or another process answered for it",
    "child_scribbles_on_all": "worker sent an invalid answer, or another process answered for it",
    "nowhere": 0.75,
    "environment_changed": 0.75,
    "arithmetic_changed": 0.75,
    "shallow": 0.75,
    "guarded_against_itself": 0.75,
    "modules_cleared": 0.75,
    "hook_left": 0.75,
    "exits_replaced": 0.75,
    "loops_replaced": 0.75,
    "numbers_replaced": 0.75,
    "unpickling_replaced": 0.75,
    "existence_replaced": 0.75,
    "search_path_changed": 0.75,
    "finders_changed": 0.75,
    "finders_replaced": 0.75,
    "time_zone_changed": 0.75,
    "audit_hook_left": 0.75,
    "scorer_replaced": None,  # the sample that replaces the scorer decides its own outcome
    "file_size_limited_for_good": 0.75,
    "odd_error": "Odd",
}


@pytest.fixture(scope="module")
def functions():
    """The module of the hostile functions and of the ordinary ones."""
    return load_reward(FUNCTIONS).__globals__


def expected(sample):
    number = float(sample.ground_truth)
    return Scored(number, 1.0 if sample.completion == "relative" else number)


def check_others(functions, kinds):
    """Scores each kind among ordinary samples of all sorts, which have to come out right; the outcome by kind."""
    samples = []
    for kind in kinds:
        samples += [
            Sample("ordinary", name, str(len(samples) + i / 8), {}) for i, name in enumerate(functions["ORDINARY"])
        ]
        samples.insert(-5, Sample("hostile", kind, "", {}))
    with WorkerScorer(FUNCTIONS, workers=2, limit_s=5.0, memory_gb=0.5) as scorer:
        outcomes = list(zip(samples, scorer.score(samples), strict=True))
    assert [
        (sample, outcome) for sample, outcome in outcomes if sample.ground_truth and outcome != expected(sample)
    ] == []
    return {sample.completion: outcome for sample, outcome in outcomes if not sample.ground_truth}


def test_what_a_sample_does_to_its_process_costs_the_others_nothing(functions):
    for kind, outcome in check_others(functions, FATES).items():
        fate = FATES[kind]
        if fate is not None:
            assert outcome == (Unscored(fate) if isinstance(fate, str) else Scored(fate, fate)), kind


@pytest.mark.slow
def test_no_hostile_function_costs_the_others_anything(functions):
    assert len(functions["HOSTILE"]) >= 60
    check_others(functions, [kind for kind in functions["HOSTILE"] if kind not in functions["OVERDUE"]])
