"""`rollalloc waste`: what it writes, and that a mistake is one message and exit code 2."""

import json

import numpy as np
import pytest


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


def test_the_finding_comes_first_then_the_causes(call, log):
    code, out, _ = call(log)
    assert code == 0
    first = said(out).split(" groups of ")[0]
    assert "of 768 rollouts that were trained on taught nothing: 96" in first
    assert first[0].isdigit()
    for words in ("rewards differ", "all right", "all wrong"):
        assert words in said(out)
    assert "…" not in out  # nothing is cut at 80 columns


@pytest.mark.parametrize("format", ["verl", "rollalloc"])
def test_a_table_of_a_log_that_has_only_trained_rollouts_says_so(call, tmp_path, format):
    """verl's dumps have what was trained on; our own log has every rollout."""
    rows = [
        {"input": "a", "output": "x", "score": at % 2, "step": 1}
        if format == "verl"
        else {"key": "a", "group": 1, "version": 0, "stage": 0, "rollout": at, "metric": at % 2}
        for at in range(4)
    ]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, out, _ = call(tmp_path / "rollouts.jsonl")
    table = said(out.partition("taught nothing")[2])
    assert ("by the rewards of their group (only those that were trained on)" in table) == (format == "verl")


def test_json_is_the_same_finding(call, log):
    code, out, _ = call(log, "--json")
    found = json.loads(out)
    assert code == 0
    assert sum(found["shares"]["rollouts"].values()) == found["rollouts"] == 768
    assert found["wasted"] == pytest.approx(1 - found["shares"]["rollouts"]["taught"] / 768)
    assert found["finding"].startswith(f"{found['wasted']:.1%}")


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
    assert "metrics.jsonl has sums, not rollouts: train with --log-rollouts" in said(out)
    found = json.loads(call(tmp_path, "--json")[1])
    assert (found["wasted"], found["shares"]) == (pytest.approx(0.7), None)


def test_graded_rewards_and_lines_that_cannot_be_used_are_told_of(call, tmp_path):
    rows = [json.dumps({"input": "a", "output": "[bold]", "score": score}) for score in (0.01, 0.05, 0.02)]
    (tmp_path / "1.jsonl").write_text("\n".join([*rows, "corrupt [/]"]))
    out = said(call(tmp_path)[1])
    assert "rewards take 3 values from 0.01 to 0.05" in out
    assert "1 lines could not be used; the first is" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--weights", "1,2"), "weights: does not apply to a log of verl"),
        (("--weights", "a"), "--weights: expected numbers separated by commas, got 'a'"),
        (("--group-size", "4"), "group_size: does not apply to a log of verl"),
        (("--group-size", "0"), "--group-size: expected a whole number of at least 1, got 0"),
        (("--reward", " "), "--reward: expected the name of a field or column"),
        (("--weights", "nan"), "--weights: expected finite numbers that are not all 0, got nan"),
        (
            ("--threshold", "inf"),
            "--threshold: expected a finite number, the lowest reward of a right rollout, got inf",
        ),
        (("--from-step", "99"), "--from-step 99: no group was logged at or after this step"),
        (("--format", "csv"), "--format must be one of trl, verl, verifiers, prime-rl, rollalloc, got 'csv'"),
    ],
)
def test_options_that_mean_nothing_are_refused(call, log, options, message):
    code, _, error = call(log, *options)
    assert (code, message in said(error)) == (2, True), error
