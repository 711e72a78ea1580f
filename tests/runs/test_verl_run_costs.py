"""Costs of verl's runs, from files as verl's `file` logger writes them."""

import json
import re
from math import isnan

import pytest
from typer.testing import CliRunner

from rollalloc.cli.app import app
from rollalloc.runs.cost import cost_to_target
from rollalloc.runs.verl_run import costs_known, read_verl_run

METRIC = "val-core/openai/gsm8k/acc/mean@1"


def written(path, lines, rest=""):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + rest)
    return path


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
    return written(path, lines, rest='{"step": 9, "da')


@pytest.fixture
def folder(tmp_path):
    logged(tmp_path / "pods.jsonl", [0.1, 0.6, 0.8, 0.8, 0.8], rollouts=400, seconds=4.0)
    logged(tmp_path / "plain-grpo.jsonl", [0.1, 0.5, 0.75, 0.8, 0.8])
    logged(tmp_path / "never.jsonl", [0.1, 0.2, 0.7, 0.1])
    (tmp_path / "other.jsonl").write_text('{"kind": "batch"}\n')
    return tmp_path


def curve_of(path, *metrics):
    return costs_known(read_verl_run(path, metrics or [METRIC]))


def test_the_cost_of_each_run_to_the_target_by_hand(folder):
    found = {name: cost_to_target(curve_of(folder / f"{name}.jsonl"), 0.7) for name in ("never", "plain-grpo", "pods")}
    # Between the step before and the step at it, linearly: 0.2 of 0.25 for GRPO, 0.1 of 0.2 for PODS.
    assert found["plain-grpo"].paid == pytest.approx({"rollouts": 180, "tokens": 900, "seconds": 18, "steps": 1.8})
    assert found["pods"].paid == pytest.approx({"rollouts": 600, "tokens": 3000, "seconds": 6, "steps": 1.5})
    assert found["never"].censored  # 0.7 once, and not again


def test_a_share_of_the_best_of_the_run_with_grpo_in_its_name_is_a_target(folder):
    result = CliRunner().invoke(app, ["report", str(folder), "--verl", METRIC, "--peak", "0.5"])
    assert result.exit_code == 0, result.output
    assert "to 0.4 " in result.output
    assert "the cost of plain-grpo divided by this run's" in " ".join(result.output.split())


def test_a_line_that_cannot_be_read_is_named_and_the_command_fails(folder):
    with (folder / "pods.jsonl").open("a") as file:
        file.write("\n{\n\x1b[31m\n" + json.dumps({"step": 10**400, "data": {METRIC: 1.0}}) + "\n")
    result = CliRunner().invoke(
        app, ["report", str(folder), "--verl", METRIC, "--target", "0.7"], env={"COLUMNS": "300"}
    )
    assert result.exit_code == 1
    assert "pods.jsonl:6 cannot be read (" in result.output
    assert "and 3 more; left out" in result.output
    assert "never.jsonl:" not in result.output
    assert "0.30" in result.output


def test_a_share_of_nothing_is_no_target(tmp_path):
    logged(tmp_path / "grpo.jsonl", [-0.1, -0.5])
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--verl", METRIC, "--peak", "0.9"])
    assert "the best accuracy of grpo is not above 0; give --target" in str(result.exception)


def test_what_stock_verl_does_not_log_is_not_known_and_its_seconds_are(tmp_path):
    curve = curve_of(logged(tmp_path / "stock.jsonl", [0.1, 0.9, 0.9], rollouts=None))
    paid = cost_to_target(curve, 0.9).paid
    assert isnan(paid["rollouts"])
    assert isnan(paid["tokens"])
    assert paid["seconds"] == pytest.approx(10)


def test_the_command_prints_costs_in_a_table(folder):
    result = CliRunner().invoke(app, ["report", str(folder), "--verl", METRIC, "--target", "0.7"])
    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: line.split()[1:] for line in result.output.splitlines() if line.strip()}
    assert rows["plain-grpo"] == ["180", "1.00", "900", "1.00", "18", "1.00"]
    assert rows["pods"] == ["600", "0.30", "3,000", "0.30", "6", "3.00"]
    assert rows["never"][:2] == [">", "300"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--verl", METRIC], "give either --target"),
        (["--verl", METRIC, "--target", "0.5", "--peak", "0.9"], "give either --target"),
        (["--target", "0.5"], "apply only to runs of verl"),
        (["--verl", " , ", "--target", "0.5"], "apply only to runs of verl"),
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


def test_names_that_act_on_a_terminal_and_numbers_that_are_none_are_only_shown(tmp_path):
    lines = [{"step": step, "data": {METRIC: 0.9, "rollalloc/rollouts_paid": 10**400}} for step in range(3)]
    written(tmp_path / "a\x1b[31m\u202eb.jsonl", lines)
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--verl", METRIC, "--target", "0.5"])
    assert (result.exit_code, result.exception) == (0, None), result.output
    assert "a␛[31m⟨U+202E⟩b" in result.output
    assert not {"\x1b", "\u202e"} & set(result.output)


def test_after_a_resume_the_seconds_before_it_are_not_known_and_are_not_left_out_of_a_ratio(tmp_path):
    """verl opens its log anew on a resume: rollouts are totals of the run, the seconds of steps 1 to 6 are gone."""
    whole = logged(tmp_path / "grpo.jsonl", [0.1] * 9 + [0.9] * 2).read_text().splitlines(keepends=True)
    validation = json.dumps({"step": 6, "data": {METRIC: 0.1}}) + "\n"
    (tmp_path / "resumed.jsonl").write_text("".join([validation, *whole[7:]]))
    unbroken, resumed = (cost_to_target(curve_of(tmp_path / f"{name}.jsonl"), 0.9) for name in ("grpo", "resumed"))
    assert (unbroken.paid["rollouts"], unbroken.paid["seconds"]) == (900, 90)
    assert resumed.paid["rollouts"] == 900
    assert isnan(resumed.paid["seconds"])
    words = ["report", str(tmp_path), "--verl", METRIC, "--target", "0.9"]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "120"})
    [row] = [line.split() for line in result.output.splitlines() if "not logged" in line]
    assert row == ["resumed", "900", "1.00", "4,500", "1.00", "not", "logged"]
    assert "the log lacks steps before step 7" in " ".join(result.output.split())


OTHER = "val-core/lighteval/MATH/acc/mean@4"


def test_each_run_is_compared_with_grpo_of_its_own_row_to_a_share_of_its_own_peak(tmp_path):
    """The first by name is of another row: to .9 of its peak, half of PODS's rollouts would look like a saving."""
    logged(tmp_path / "a-grpo.jsonl", [0.1, 0.2, 0.2])
    logged(tmp_path / "b-grpo.jsonl", [0.1, 0.4, 0.8, 0.8])
    logged(tmp_path / "b-pods.jsonl", [0.1, 0.8, 0.8], rollouts=50)
    logged(tmp_path / "c-pods.jsonl", [0.1, 0.8, 0.8])
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--verl", METRIC, "--peak", "1"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert re.findall(r"^ *to ([\d.]+)", result.output, re.MULTILINE) == ["0.2", "0.8"]
    rows = {line.split()[0]: line.split()[1:3] for line in result.output.splitlines() if line.strip()}
    assert (rows["b-grpo"], rows["b-pods"]) == (["200", "1.00"], ["50", "4.00"])
    assert "c-pods is left out, because no log ROW-grpo" in result.output
    alone = CliRunner().invoke(app, ["report", str(tmp_path), "--verl", METRIC, "--peak", "1", "--baseline", "c-pods"])
    assert "cost of c-pods divided" in alone.output


def test_all_benchmarks_of_a_paper_are_averaged_and_a_run_of_other_data_is_compared_with_its_own(tmp_path):
    for name, accuracies in {"a-grpo": (0.2, 0.4), "a-pods": (0.4, 0.6)}.items():
        lines = [{"step": step, "data": {METRIC: value, OTHER: value + 0.4}} for step, value in enumerate(accuracies)]
        written(tmp_path / f"{name}.jsonl", lines)
    logged(tmp_path / "b-grpo.jsonl", [0.1, 0.8, 0.8])
    written(tmp_path / "c-grpo.jsonl", [{"step": 0, "data": {"val-aux/num_turns/mean": 2.0}}])
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--verl", "all", "--peak", "1"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert re.findall(r"^ *to ([\d.]+)", result.output, re.MULTILINE) == ["0.6", "0.8"]  # .4 and .8 of two benchmarks
    assert "c-grpo.jsonl: no validation with val-core/…/mean@N; it has val-aux/num_turns/mean" in result.output
    named = CliRunner().invoke(
        app, ["report", str(tmp_path), "--verl", OTHER, "--target", "0.7"], env={"COLUMNS": "200"}
    )
    assert f"left out: {tmp_path / 'b-grpo.jsonl'}: no validation with {OTHER}" in named.output


def test_a_run_alone_that_is_not_grpo_is_its_own_baseline_only_if_it_is_named_so(tmp_path):
    logged(tmp_path / "x-pods.jsonl", [0.1, 0.8, 0.8])
    words = ["report", str(tmp_path), "--verl", METRIC]
    refused = CliRunner().invoke(app, [*words, "--peak", "0.9"])
    assert "--peak: x-pods is left out, because no log ROW-grpo" in str(refused.exception)
    shown = CliRunner().invoke(app, [*words, "--target", "0.5"])
    assert "Nothing is compared, because no log ROW-grpo" in " ".join(shown.output.split())
