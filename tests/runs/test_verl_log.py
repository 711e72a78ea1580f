"""Costs of verl's runs, from files as verl's `file` logger writes them."""

import json
from math import isnan

import pytest
from typer.testing import CliRunner

from rollalloc.cli.app import app
from rollalloc.runs.verl_log import baseline_of, costs, logs_in, peak, read_verl

METRIC = "val-core/openai/gsm8k/acc/mean@1"


def logged(path, accuracies, rollouts=100, seconds=10.0):
    """A validation before training and after each step; the second step writes a checkpoint, which costs nothing here."""
    lines = [{"step": 0, "data": {METRIC: accuracies[0]}}]
    for step, accuracy in enumerate(accuracies[1:], start=1):
        data = {METRIC: accuracy, "timing_s/step": seconds, "timing_s/testing": 1000.0}
        if rollouts:
            data |= {"rollalloc/rollouts_paid": step * rollouts, "rollalloc/tokens_paid": step * rollouts * 5}
        if step == 2:
            data |= {"timing_s/step": seconds + 50.0, "timing_s/save_checkpoint": 50.0}
        lines.append({"step": step, "data": data})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9, "da')
    return path


@pytest.fixture
def folder(tmp_path):
    logged(tmp_path / "pods.jsonl", [0.1, 0.6, 0.8, 0.8, 0.8], rollouts=400, seconds=4.0)
    logged(tmp_path / "plain-grpo.jsonl", [0.1, 0.5, 0.75, 0.8, 0.8])
    logged(tmp_path / "never.jsonl", [0.1, 0.2, 0.7, 0.1])
    (tmp_path / "other.jsonl").write_text('{"kind": "batch"}\n')
    return tmp_path


def test_what_each_run_had_paid_when_it_reached_the_target(folder):
    runs = [read_verl(path, [METRIC]) for path in logs_in(folder)]
    assert [run.name for run in runs] == ["never", "plain-grpo", "pods"]
    assert baseline_of(runs).name == "plain-grpo"
    assert peak(baseline_of(runs), 0.5) == 0.4
    found = costs(runs, 0.7)
    # Between the step before and the step at it, linearly: 0.2 of 0.25 for GRPO, 0.1 of 0.2 for PODS.
    assert found["plain-grpo"].paid == pytest.approx({"rollouts": 180, "tokens": 900, "seconds": 18, "steps": 1.8})
    assert found["pods"].paid == pytest.approx({"rollouts": 600, "tokens": 3000, "seconds": 6, "steps": 1.5})
    assert found["never"].censored  # 0.7 once, and not again


def test_a_line_that_cannot_be_read_is_named_and_the_command_fails(folder):
    with (folder / "pods.jsonl").open("a") as file:
        file.write("\n{\n\x1b[31m\n" + json.dumps({"step": 10**400, "data": {METRIC: 1.0}}) + "\n")
    result = CliRunner().invoke(
        app, ["report", str(folder), "--verl", METRIC, "--target", "0.7"], env={"COLUMNS": "300"}
    )
    assert result.exit_code == 1
    assert "pods.jsonl: line 6 cannot be read (" in result.output
    assert "nor can 2 more; left out" in result.output
    assert "never.jsonl" not in result.output
    assert "0.30" in result.output


def test_a_share_of_nothing_is_no_target(tmp_path):
    with pytest.raises(ValueError, match=r"expected a best accuracy above 0 to take a share of, got -0\.1"):
        peak(read_verl(logged(tmp_path / "grpo.jsonl", [-0.1, -0.5]), [METRIC]), 0.9)


def test_what_stock_verl_does_not_log_is_not_known_and_its_seconds_are(tmp_path):
    run = read_verl(logged(tmp_path / "stock.jsonl", [0.1, 0.9, 0.9], rollouts=None), [METRIC])
    paid = costs([run], 0.9)["stock"].paid
    assert isnan(paid["rollouts"])
    assert paid["seconds"] == pytest.approx(10)


def test_the_command_says_it_in_a_table(folder):
    result = CliRunner().invoke(app, ["report", str(folder), "--verl", METRIC, "--target", "0.7"])
    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: line.split()[1:] for line in result.output.splitlines() if line.strip()}
    assert rows["plain-grpo"] == ["180", "1.00", "900", "1.00", "18", "1.00"]
    assert rows["pods"] == ["600", "0.30", "3,000", "0.30", "6", "3.00"]
    assert rows["never"][:2] == [">", "300"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--verl", METRIC], "one of them"),
        (["--verl", METRIC, "--target", "0.5", "--peak", "0.9"], "one of them"),
        (["--target", "0.5"], "name a key"),
        (["--verl", " , ", "--target", "0.5"], "name a key"),
        (["--verl", METRIC, "--target", "nan"], "expected a number in (0, 1], got nan"),
        (["--verl", METRIC, "--peak", "2"], "--peak: expected a number in (0, 1], got 2"),
        (["--verl", "accuracy", "--peak", "0.9"], f"no validation with accuracy; it has {METRIC}"),
    ],
)
def test_nonsense_is_refused_by_name(folder, options, says):
    result = CliRunner().invoke(app, ["report", str(folder), *options])
    assert result.exit_code != 0
    assert says in " ".join(result.output.split()) or says in str(result.exception)


def test_a_folder_without_logs_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--verl", METRIC, "--target", "0.5"])
    assert result.exit_code != 0
    assert "no log of verl" in str(result.exception)


def test_a_point_has_all_metrics_and_their_mean_and_a_step_is_a_number(tmp_path):
    other = METRIC.replace("gsm8k", "math")
    lines = [
        {"step": True, "data": {METRIC: 0.9, other: 0.9}},
        {"step": 1, "data": {METRIC: 0.2}},
        {"step": 2, "data": {METRIC: 0.2, other: float("nan")}},
        {"step": 3, "data": {METRIC: 0.2, other: 0.4}},
    ]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    curve = read_verl(path, [METRIC, other]).curve
    assert [curve.steps, curve.accuracy] == [(3,), (pytest.approx(0.3),)]


def test_names_that_act_on_a_terminal_and_numbers_that_are_none_are_only_shown(tmp_path):
    lines = [{"step": step, "data": {METRIC: 0.9, "rollalloc/rollouts_paid": 10**400}} for step in range(3)]
    path = tmp_path / "a\x1b[31m\u202eb.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--verl", METRIC, "--target", "0.5"])
    assert (result.exit_code, result.exception) == (0, None), result.output
    assert "a␛[31m⟨U+202E⟩b" in result.output
    assert not {"\x1b", "\u202e"} & set(result.output)
