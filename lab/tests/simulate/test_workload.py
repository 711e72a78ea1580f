"""What rollouts come to: distributions, logs, and files that are no logs."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollalloc_lab.simulate.workload import Fitted, Lengths, Logged, SimulatedOutcome, Success, read_rollouts

CERTAIN = Success(hopeless=0.0, solved=0.0)


def drawn(world, visits):
    """Outcomes of so many rollouts of each prompt, shape (N, visits, 3)."""
    made = [world.outcome(at % world.prompts, at) for at in range(visits * world.prompts)]
    return np.array(made).reshape(visits, world.prompts, 3).swapaxes(0, 1)


def test_lengths_have_the_medians_and_deviations_that_they_are_said_to_have():
    lengths = Lengths(median=300.0, between=0.6, within=0.4, runaway=0.05, limit=100_000)
    made = drawn(Fitted(prompts=2000, lengths=lengths, success=CERTAIN).world(1), 20)
    logs = np.where(made[..., 1] == 1, np.nan, np.log(made[..., 0]))
    # Standard errors: 0.013 of the median's logarithm, 0.010 of `between`, 0.0015 of `within`, 0.0011 of the share.
    assert np.nanmean(logs) == pytest.approx(np.log(300), abs=0.06)
    assert np.nanstd(logs, axis=1, ddof=1).mean() == pytest.approx(0.4, abs=0.02)
    assert np.nanmean(logs, axis=1).std() == pytest.approx(np.hypot(0.6, 0.4 / np.sqrt(19)), abs=0.04)
    assert np.mean(made[..., 1]) == pytest.approx(0.05, abs=0.005)
    assert set(made[made[..., 1] == 1][:, 0]) == {100_000}


def test_the_limit_cuts_and_says_so_and_nothing_is_shorter_than_a_token():
    made = drawn(
        Fitted(prompts=200, lengths=Lengths(median=1.0, between=0.0, within=2.0, runaway=0.0, limit=3)).world(0), 50
    )
    assert set(made[..., 0].ravel()) == {1, 2, 3}
    assert set(made[made[..., 1] == 1][:, 0]) == {3}
    # The share beyond 3 of log-normal 2 about 1: 0.291; standard error 0.005.
    assert made[..., 1].mean() == pytest.approx(0.291, abs=0.025)


def test_success_is_by_prompt():
    success = Success(hopeless=0.3, solved=0.2, alpha=2.0, beta=6.0)
    rates = drawn(Fitted(prompts=1000, success=success).world(2), 100)[..., 2].mean(axis=1)
    between = rates[(rates > 0) & (rates < 1)]
    # Standard errors 0.014, 0.013 and 0.007; a few rates of the Beta are so near 0 that they look hopeless.
    assert np.mean(rates == 0) == pytest.approx(0.3, abs=0.06)
    assert np.mean(rates == 1) == pytest.approx(0.2, abs=0.055)
    assert between.mean() == pytest.approx(0.25, abs=0.035)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 19), st.integers(0, 90_000)), max_size=30), st.integers(0, 3))
def test_an_outcome_depends_on_nothing_that_was_asked_before(asked, seed):
    fresh, used = (Fitted(prompts=20).world(seed) for _ in range(2))
    for prompt, rollout in asked:
        used.outcome(prompt, rollout)
    for prompt, rollout in asked[::-1]:
        assert used.outcome(prompt, rollout) == fresh.outcome(prompt, rollout)


def test_a_logged_prompt_has_its_own_rollouts_lengths_and_successes_together():
    log = Logged(
        rollouts=[
            [SimulatedOutcome(5, False, True), SimulatedOutcome(9, True, False)],
            [SimulatedOutcome(3, False, True)],
        ]
    )
    made = drawn(log.world(0), 400)
    assert {tuple(each) for each in made[0]} == {(5, 0, 1), (9, 1, 0)}
    assert made[0, :, 2].mean() == pytest.approx(0.5, abs=0.1)  # four standard errors of 0.025
    assert {tuple(each) for each in made[1]} == {(3, 0, 1)}


# ------------------------------------------------------------------------------------------------------------------ files


def line(**changes):
    plain = {"key": "a", "metric": 1.0, "tokens": 7, "truncated": False, "reward": 1.0, "unscored": None, "text": "x"}
    return json.dumps(plain | changes)


def test_a_log_is_read_by_prompt_and_what_was_stopped_is_counted(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(
        "\n".join(
            [line(), line(metric=0.4, tokens=0), line(key="b", truncated=True), line(metric=None, unscored="stopped")]
        )
    )
    log = read_rollouts(path)
    assert log.rollouts == [
        [SimulatedOutcome(7, False, True), SimulatedOutcome(1, False, False)],
        [SimulatedOutcome(7, True, True)],
    ]
    assert log.describe() == {"source": str(path), "prompts": 2, "logged_rollouts": 3, "left_out": 1}


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ("{", r"line 2: expected an object, got b'\{' \("),
        ("[1]", r"line 2: expected an object, got \[1\]; give a log of `train --log-rollouts`"),
        (line(key=7), "line 2: key: expected text"),
        (line(key=None), "line 2: expected an object with key; key is missing"),
        (line(tokens=-1), "line 2: tokens: expected a whole number from 0, got -1"),
        (line(truncated=None), "line 2: truncated: expected true or false, got null"),
        (line(metric="1"), "line 2: metric: expected "),
        (json.dumps({"key": "a", "tokens": 1}), "line 2: .* truncated is missing"),
    ],
)
def test_what_is_no_rollout_is_named_by_line_and_field(tmp_path, second, says):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(line() + "\n" + second)
    with pytest.raises(ValueError, match=says):
        read_rollouts(path)


def test_a_log_without_a_score_is_refused(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(line(metric=None))
    with pytest.raises(ValueError, match="expected rollouts with a score, found none; 1 lines have no score"):
        read_rollouts(path)


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        (Lengths, {"median": 0}, "median must be a finite number above 0, got 0"),
        (Lengths, {"between": float("nan")}, "between"),
        (Lengths, {"within": 200.0}, "within must be at most 10, got 200.0"),
        (Lengths, {"runaway": 1.5}, "runaway must be at most 1, got 1.5"),
        (Lengths, {"limit": 0}, "limit must be a whole number of at least 1"),
        (Success, {"hopeless": 0.7, "solved": 0.6}, "hopeless [+] solved must be at most 1"),
        (Fitted, {"prompts": 0}, "prompts must be a whole number of at least 1"),
    ],
)
def test_numbers_out_of_their_range_are_refused(kind, changes, says):
    with pytest.raises(ValueError, match=says):
        kind(**changes)
