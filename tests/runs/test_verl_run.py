"""Logs of verl's `file` logger as the views draw them. Keys and layout are those of verl 0.9.1's trainer and logger."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from rollalloc.cli.app import app
from rollalloc.report.page import sections
from rollalloc.report.wording import caveats, story
from rollalloc.runs.discovery import comparisons
from rollalloc.runs.reader import read_run

GSM8K, MATH = "val-core/openai/gsm8k/reward/mean@1", "val-core/lighteval/MATH/acc/mean@4"


def step_of(step, *, accuracy=None, ours=False):
    """A training step; verl writes NaN, which its JSON has no word for, as null."""
    data = {
        "training/global_step": step,
        "training/epoch": 0,
        "critic/score/mean": 0.1 * step,
        "critic/rewards/mean": 0.1 * step - 0.5,
        "critic/vf_explained_var": None,
        "actor/entropy": 2.0 - 0.1 * step,
        "actor/grad_norm": 1.5,
        "actor/pg_loss": -0.02,
        "response_length/mean": 30.0 + step,
        "response_length/max": 64.0,
        "response_length/min": 3.0,
        "perf/total_num_tokens": 1000,
        "timing_s/step": 12.0,
        "timing_s/save_checkpoint": 2.0,
        "timing_s/testing": 40.0,
    }
    if accuracy is not None:
        data |= {GSM8K: accuracy, "val-aux/openai/gsm8k/reward/std@1": 0.0, "val-aux/num_turns/mean": 2.0}
    if ours:
        data |= {
            "rollalloc/rollouts_paid": 24.0 * step,
            "rollalloc/tokens_paid": 700.0 * step,
            "rollalloc/accounts/trained": 16.0 * step,
            "rollalloc/accounts/out_of_band": 8.0 * step,
            "rollalloc/prompts/new": 20.0 - step,
            "rollalloc/staleness_mean": 0.5,
            "rollalloc/rows": 16.0,
        }
    return {"step": step, "data": data}


def verl(path, lines, rest=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + rest)
    return path


BEFORE = {"step": 0, "data": {GSM8K: 0.125, "val-aux/num_turns/mean": 2.0}}
STOCK = [BEFORE, *(step_of(step, accuracy=0.25 if step == 4 else None) for step in (1, 2, 3, 4))]
OURS = [BEFORE, *(step_of(step, accuracy=0.5 if step == 4 else None, ours=True) for step in (1, 2, 3, 4))]


def test_a_run_of_verl_s_own_trainer_is_read_over_training_steps(tmp_path):
    run = read_run(verl(tmp_path / "grpo.jsonl", STOCK))
    assert (run.problem, run.label, run.unit, run.paid) == (None, "grpo", "training steps", 4)
    assert [line["reward_mean"] for line in run.batches] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert [line["entropy"] for line in run.batches] == pytest.approx([1.9, 1.8, 1.7, 1.6])
    last = run.batches[-1]
    assert last | {"loss": -0.02, "grad_norm": 1.5, "mean_lengths": [3.0, 34.0, 64.0]} == last
    assert (run.curve.rollouts, run.curve.accuracy) == ((0, 4), (0.125, 0.25))
    assert (last["seconds"], last["tokens_paid"]) == (4 * 10, 0)  # verl's own count has prompts, too
    assert "so training steps are shown instead" in caveats([run])[0]
    assert f"accuracy is {GSM8K}" in caveats([run])[0]
    assert story([run], run.label)[0] == "grpo has so far made 4 training steps"


def test_under_our_trainer_rollouts_accounts_and_prompts_are_read(tmp_path):
    run = read_run(verl(tmp_path / "pilot.jsonl", OURS))
    assert (run.unit, run.paid, run.last["tokens_paid"]) == ("rollouts paid", 96, 2800)
    assert run.accounts == {"trained": 64, "out_of_band": 32}
    assert run.batches[-1]["prompts"] == {"new": 16}
    assert run.curve.rollouts == (0, 96)


def test_the_report_draws_what_is_there(tmp_path):
    verl(tmp_path / "stock.jsonl", STOCK)
    verl(tmp_path / "ours.jsonl", OURS)
    made = sections(comparisons(tmp_path), tmp_path)
    assert [[run.label for run in section.runs] for section in made] == [["ours"], ["stock"]]
    charts = [{chart.title for chart in section.charts} for section in made]
    assert {"Where every rollout went", "Training"} <= charts[0]
    assert {"Training", "Length of rollouts"} <= charts[1]
    assert not [problem for section in made for problem in section.problems]
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 0, result.output
    page = (tmp_path / "report.html").read_text()
    assert "training steps" in page
    assert GSM8K in page


def test_a_resumed_log_says_what_it_lacks_and_forgets_what_was_rolled_back(tmp_path):
    anew = [{"step": 2, "data": {GSM8K: 0.2}}, *STOCK[3:]]
    run = read_run(verl(tmp_path / "anew.jsonl", anew))
    assert (run.curve.rollouts, run.last["seconds"]) == ((2, 4), 20)
    assert "the log lacks steps before step 3" in caveats([run])[0]
    first = [BEFORE, *(step_of(step, accuracy=0.9) for step in (1, 2, 3, 4))]
    both = read_run(verl(tmp_path / "both.jsonl", [*first, *anew, step_of(5)]))
    assert [line["version"] for line in both.batches] == [1, 2, 3, 4, 5]
    assert (both.last["seconds"], both.curve.rollouts) == (50, (0, 1, 2, 4))
    assert both.curve.accuracy == (0.125, 0.9, 0.2, 0.25)
    assert "2 steps were rolled back by a resume" in caveats([both])[0]


def test_accuracy_is_the_mean_over_data_sources_where_all_were_validated(tmp_path):
    values = [{GSM8K: 0.5, MATH: 0.25}, {GSM8K: 0.5}, {GSM8K: 0.5, MATH: None}, {GSM8K: 0.5, MATH: float("nan")}]
    lines = [step_of(step) for step in (1, 2, 3, 4)]
    for line, value in zip(lines, values, strict=True):
        line["data"] |= value
    run = read_run(verl(tmp_path / "grpo.jsonl", lines))
    assert (run.curve.rollouts, run.curve.accuracy) == ((1,), (0.375,))
    assert f"accuracy is the mean of {GSM8K}, {MATH}" in caveats([run])[0]


def test_what_cannot_be_read_is_named_and_costs_no_view(tmp_path):
    wrong = ["{", "[]", '{"step": -1, "data": {}}', '{"step": true, "data": {}}', '{"step": 3}', "\x1b[31m", "[" * 9999]
    log = verl(tmp_path / "grpo.jsonl", STOCK[:3], rest="\n".join(wrong) + "\n" + json.dumps(STOCK[3]) + "\n")
    run = read_run(log)
    assert run.paid == 3
    assert run.problem is not None
    assert run.problem.startswith("grpo.jsonl:4 cannot be read (")
    assert run.problem.endswith("and 6 more; left out")
    numbers = {"critic/score/mean": 10**400, "actor/entropy": "2", "timing_s/step": None, "rollalloc/rollouts_paid": []}
    hostile = step_of(1)
    hostile["data"] |= numbers
    assert read_run(verl(tmp_path / "numbers.jsonl", [hostile, step_of(2)])).problem is None
    assert CliRunner().invoke(app, ["report", str(tmp_path)]).exit_code == 1
