"""Output folders of TRL, with and without our recipe: what the views read of them. The logs are cut from real runs."""

from __future__ import annotations

import json

import pytest

from rollalloc.report.page import sections
from rollalloc.report.wording import caveats, story
from rollalloc.runs.discovery import comparisons, run_folders
from rollalloc.runs.reader import read_run

STOCK = [
    {
        "step": step,
        "epoch": 0.1 * step,
        "loss": -0.1,
        "grad_norm": 1.5,
        "entropy": 2.0 - 0.1 * step,
        "num_tokens": 100.0 * step,
        "reward": 0.1 * step,
        "reward_std": 0.3,
        "frac_reward_zero_std": 0.25,
        "step_time": 0.5,
        "learning_rate": 0.01,
        **{f"completions/{name}_length": length for name, length in (("min", 1.0), ("mean", 3.5), ("max", 4.0))},
    }
    for step in (1, 2, 3, 4)
]
EVALUATED = {"step": 4, "eval_reward": 0.375, "eval_entropy": 1.8, "eval_loss": 0.01}
OURS = [
    logged
    | {
        "rollalloc/rollouts_paid": 24.0 * logged["step"],
        "rollalloc/tokens_paid": 80.0 * logged["step"],
        "rollalloc/accounts/trained": 16.0 * logged["step"],
        "rollalloc/accounts/out_of_band": 8.0 * logged["step"],
        "rollalloc/prompts/new": 20.0 - logged["step"],
        "rollalloc/prompts/trained": 1.0 * logged["step"],
        "rollalloc/staleness_mean": 0.5,
        "rollalloc/staleness_max": 1.0,
        "rollalloc/rows": 16.0,
    }
    for logged in STOCK
]


def trl(folder, history, *, step=4, of=4):
    """TRL's output folder with a checkpoint after that step of so many."""
    place = folder / f"checkpoint-{step}"
    place.mkdir(parents=True, exist_ok=True)
    state = {"global_step": step, "max_steps": of, "log_history": history}
    (place / "trainer_state.json").write_text(json.dumps(state))
    return folder


def test_a_run_of_trl_s_own_trainer_is_read_over_optimizer_steps(tmp_path):
    run = read_run(trl(tmp_path / "grpo", [*STOCK, EVALUATED]))
    assert (run.problem, run.unit, run.paid) == (None, "optimizer steps", 4)
    assert [line["reward_mean"] for line in run.batches] == [0.1, 0.2, pytest.approx(0.3), 0.4]
    assert [line["entropy"] for line in run.batches] == [1.9, 1.8, 1.7, 1.6]
    assert run.batches[-1] | {"loss": -0.1, "grad_norm": 1.5, "mean_lengths": [1.0, 3.5, 4.0]} == run.batches[-1]
    assert run.curve.accuracy == (0.375,)
    assert run.last["seconds"] == 2
    assert run.why == "TRL: all of 4 steps are done"
    assert run.last["tokens_paid"] == 0  # its own `num_tokens` counts prompts, too
    assert "TRL's own trainer logs neither rollouts" in caveats([run])[0]
    assert story([run], run.label)[0] == "grpo made 4 optimizer steps"


def test_under_our_recipe_rollouts_accounts_and_prompts_are_read(tmp_path):
    run = read_run(trl(tmp_path / "pilot", OURS, step=4, of=10))
    assert (run.unit, run.paid, run.last["tokens_paid"]) == ("rollouts paid", 96, 320)
    assert run.accounts == {"trained": 64, "out_of_band": 32}
    assert run.batches[-1]["prompts"] == {"new": 16, "trained": 4}
    assert run.batches[-1]["staleness_max"] == 1
    assert run.why is None  # six steps are left


def test_the_newest_checkpoint_counts_and_is_no_run_of_its_own(tmp_path):
    for step in (2, 4, 10):
        trl(tmp_path / "a", STOCK[:step], step=step, of=20)
    trl(tmp_path / "b", STOCK)
    assert run_folders(tmp_path) == [tmp_path / "a", tmp_path / "b"]
    assert [run.paid for runs in comparisons(tmp_path).values() for run in runs] == [4, 4]
    assert run_folders(tmp_path / "a" / "checkpoint-2") == [tmp_path / "a" / "checkpoint-2"]
    assert read_run(tmp_path / "a" / "checkpoint-2").paid == 2


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"log_history": 3}', '{"log_history": [3, {"step": "x"}, {"step": 1, "reward": NaN}]}']
)
def test_a_damaged_state_costs_no_view(tmp_path, content):
    trl(tmp_path / "other", STOCK)
    (trl(tmp_path / "damaged", []) / "checkpoint-4" / "trainer_state.json").write_text(content)
    runs = {run.folder.name: run for of_one in comparisons(tmp_path).values() for run in of_one}
    assert runs["damaged"].paid in (0, 1)
    assert runs["other"].paid == 4


def test_the_page_has_what_the_log_has_and_keeps_units_apart(tmp_path):
    trl(tmp_path / "stock", [*STOCK, EVALUATED, EVALUATED | {"step": 5}])
    trl(tmp_path / "ours", OURS)
    made = sections(comparisons(tmp_path), tmp_path)
    assert [[run.label for run in section.runs] for section in made] == [["ours"], ["stock"]]
    charts = [{chart.title for chart in section.charts} for section in made]
    assert {"Where every rollout went", "Training"} <= charts[0]
    assert {"Training", "Length of rollouts", "Accuracy against what was paid"} <= charts[1]
    assert "Accuracy against tokens" not in charts[1]


def test_a_run_that_was_resumed_from_an_earlier_step_is_what_it_became(tmp_path):
    """A log put together of two: steps 3 and 4 were trained, then the run went on from step 2."""
    first = [*STOCK, EVALUATED | {"eval_reward": 0.9}]
    again = [STOCK[2] | {"reward": 0.7, "step_time": 2.0}, EVALUATED | {"step": 3}]
    run = read_run(trl(tmp_path / "grpo", [*first, *again], step=3, of=10))
    assert [line["reward_mean"] for line in run.batches] == [0.1, 0.2, 0.7]
    assert (run.curve.accuracy, run.paid, run.last["seconds"]) == ((0.375,), 3, 0.5 + 0.5 + 2.0)
    assert "2 steps were rolled back by a resume and are left out" in caveats([run])[0]


def test_of_a_state_that_is_broken_off_the_one_before_is_shown_and_it_is_said(tmp_path):
    for step in (2, 4):
        trl(tmp_path, STOCK[:step], step=step, of=9)
    newest = tmp_path / "checkpoint-4" / "trainer_state.json"
    newest.write_text(newest.read_text()[:-40])
    run = read_run(tmp_path)
    assert run.paid == 2
    assert run.problem is not None
    assert run.problem.startswith("checkpoint-4/trainer_state.json: ")
    assert run.problem.endswith("; checkpoint-2/trainer_state.json is shown instead")


def test_a_long_log_is_kept_in_as_many_lines_as_the_views_can_show(tmp_path):
    history = [{"step": step, "reward": 0.5} for step in range(1, 100_001)]
    run = read_run(trl(tmp_path, history, step=100_000, of=100_000))
    assert (run.paid, run.ended) == (100_000, True)
    assert len(run.metrics) <= 2 * 1024 + 2
    assert run.batches[0]["version"] == 1
