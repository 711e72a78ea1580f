"""`rollalloc waste`: what it writes, and that a mistake is one message and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

SAMPLES = Path(__file__).parent / "samples"


@pytest.fixture
def call(rollalloc):
    """Call `rollalloc waste` with these arguments: (exit code, standard output, standard error)."""
    return lambda *arguments: rollalloc("waste", *arguments, columns=80)


@pytest.fixture
def log(tmp_path):
    """verl's dumps of 4 steps, 24 prompts each, 8 rollouts per group; the prompts' texts want to be markup."""
    random = np.random.default_rng(0)
    for step in range(1, 5):
        rows = [
            {
                "input": f"[red]{prompt}[/]",
                "output": "x",
                "score": float(random.random() < prompt % 4 / 3),
                "step": step,
            }
            for prompt in range(24)
            for _ in range(8)
        ]
        (tmp_path / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def said(output):
    return " ".join(output.split())


def test_the_finding_comes_first_then_causes_forecast_and_what_they_do_not_mean(call, log):
    code, out, _ = call(log, "--resamples", 2)
    assert code == 0
    first = said(out).split(" groups of ")[0]
    assert "of 768 rollouts taught nothing: 96" in first
    assert first[0].isdigit()
    for words in ("rewards differ", "all right", "all wrong", "pilot_commit", "Groups of 8, 2 of them pilots"):
        assert words in said(out)
    assert "are not rollouts to a target accuracy" in said(out)
    assert "…" not in out  # nothing is cut at 80 columns


def test_json_is_the_same_finding(call, log):
    code, out, _ = call(log, "--resamples", 2, "--json")
    found = json.loads(out)
    assert code == 0
    assert sum(found["shares"]["rollouts"].values()) == found["rollouts"] == 768
    assert found["wasted"] == pytest.approx(1 - found["shares"]["rollouts"]["taught"] / 768)
    assert found["finding"].startswith(f"{found['wasted']:.1%}")
    assert set(found["forecast"]["prices"]) == {"grpo", "dapo", "dapo (carried)", "pilot_commit"}
    low, high = found["forecast"]["prices"]["pilot_commit"]["times_rollouts"]["interval"]
    assert 0 < low < high


def test_a_refused_forecast_says_why_and_the_shares_stand(call, log):
    code, out, _ = call(log, "--n", 32)
    assert code == 0
    assert "No forecast: needs groups of 32 rollouts" in said(out)
    assert "rewards differ" in out
    assert json.loads(call(log, "--n", 32, "--json")[1])["forecast"] is None


def test_from_step_and_threshold(call, log):
    found = json.loads(call(log, "--from-step", 3, "--threshold", 2, "--json")[1])
    assert found["rollouts"] == 384
    assert found["wasted"] == 1
    assert found["shares"]["rollouts"]["all_wrong"] == 384


def test_a_run_that_booked_its_rollouts_is_believed(call, tmp_path):
    accounts = {"trained": 30, "zero_variance": 60, "surplus": 10, "open": 5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "end", "accounts": accounts}))
    code, out, _ = call(tmp_path)
    assert code == 0
    assert said(out).startswith("70.0% of 100 rollouts taught nothing, by the run's own accounts.")
    assert "zero variance" in out
    assert "No forecast: there are no rollouts in this log, only sums" in said(out)
    assert "--log-rollouts" in out
    found = json.loads(call(tmp_path, "--json")[1])
    assert (found["wasted"], found["shares"], found["forecast"]) == (pytest.approx(0.7), None, None)


def test_graded_rewards_and_lines_that_cannot_be_used_are_told_of(call, tmp_path):
    rows = [json.dumps({"input": "a", "output": "[bold]", "score": score}) for score in (0.01, 0.05, 0.02)]
    (tmp_path / "1.jsonl").write_text("\n".join([*rows, "corrupt [/]"]))
    out = said(call(tmp_path)[1])
    assert "rewards take 3 values from 0.01 to 0.05" in out
    assert "1 lines could not be used; the first is" in out


def test_a_recipe_of_ones_own_is_compared_with_grpo(call, log):
    asked = (
        log,
        "--recipe",
        "grpo",
        "--recipe",
        "racing",
        "--set",
        "groups=4",
        "--set",
        "sizes_S=[2,8]",
        "--resamples",
        2,
    )
    found = json.loads(call(*asked, "--json")[1])
    assert set(found["forecast"]["prices"]) == {"grpo", "grpo (yours)", "racing"}
    assert found["forecast"]["plan"]["n_pilot"] is None
    assert json.loads(call(*asked, "--json", "--reward", "score")[1]) == found
    out = said(call(*asked)[1])
    assert "racing" in out
    assert "pilot_commit" not in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--weights", "1,2"), "weights: means nothing for a log of verl"),
        (("--weights", "a"), "--weights: expected numbers separated by commas, got 'a'"),
        (("--group-size", "4"), "group_size: means nothing for a log of verl"),
        (("--group-size", "0"), "--group-size: expected a whole number of at least 1, got 0"),
        (("--reward", " "), "--reward: expected the name of a field or column"),
        (("--set", "groups=4"), "--set: parameters of a recipe; say which with --recipe"),
        (("--recipe", "grpo", "--n-pilot", "2"), "--n-pilot: for the comparison with Pilot-Commit"),
        (("--recipe", "grpo", "--set", "groop=4"), "grpo has no parameter 'groop' (did you mean 'groups'?)"),
        (("--recipe", "grpoo"), "unknown recipe 'grpoo'"),
        (("--weights", "nan"), "--weights: expected finite numbers that are not all 0, got nan"),
        (("--threshold", "inf"), "--threshold: expected a finite number, got inf"),
        (("--n", "0"), "--n: expected a whole number of at least 1, got 0"),
        (("--resamples", "1"), "--resamples: expected a whole number of at least 2, got 1"),
        (("--from-step", "99"), "--from-step 99: no group was logged at or after it"),
        (("--format", "csv"), "--format must be one of trl, verl, prime-rl, rollalloc, got 'csv'"),
    ],
)
def test_options_that_mean_nothing_are_refused(call, log, options, message):
    code, _, error = call(log, *options)
    assert (code, message in said(error)) == (2, True), error
