"""A profile of a run of rollalloc: of all rollouts that it paid, though the log has only those that it trained on."""

# pyright: reportOptionalMemberAccess=false

import json

import numpy as np
import pytest

from recorded_run import Run
from rollalloc import recipes
from rollalloc.advise.profile import profile_of
from rollalloc.advise.recorded_profile import with_all_rollouts
from rollalloc.advise.verdict import Choice, present_of, verdict_of
from rollalloc.train.config import write_config
from rollalloc.waste.readers import read_log

SELECTS = {
    "dapo": recipes.dapo(groups=3, n=4, gen_groups=5),
    "pods": recipes.pods(groups=3, n=8, m=4),
    "pilot_commit": recipes.pilot_commit(groups=3, n_pilot=2, n_commit=2, gen_groups=5),
}


def scored(log):
    """Right rollouts, scored rollouts and all rollouts of a log."""
    known_R = log.groups.rewards_R[~np.isnan(log.groups.rewards_R)]
    return (known_R == known_R.max()).sum(), len(known_R), len(log.groups.rewards_R)


@pytest.mark.parametrize("write", [Run.trl, Run.verl])
@pytest.mark.parametrize(
    ("name", "low"), [("dapo", 0.0), ("pods", 0.0), ("pilot_commit", 0.0), ("dapo", -1.0), ("pods", -1.0)]
)
def test_success_is_of_all_rollouts_that_were_scored(tmp_path, name, low, write):
    run = Run(SELECTS[name], (low, 1.0)).train()
    records = run.allocator.statistics
    logged = read_log(write(run, tmp_path / "run"))
    log = with_all_rollouts(logged)
    right, count, _ = scored(log)
    assert count == records.attempts_N.sum() > len(logged.groups.rewards_R)
    assert right == (records.successes_N.sum() - low * count) / (1.0 - low)
    assert "rollouts that the recipe did not train on" in log.notes[0]
    assert not log.selected


def test_rollouts_without_a_score_are_counted_too(tmp_path):
    run = Run(SELECTS["dapo"], fails=0.2).train()
    _, count, rollouts = scored(with_all_rollouts(read_log(run.trl(tmp_path / "run"))))
    assert (count, rollouts - count) == (len(run.reward), run.ended["failed"])


def test_groups_that_were_dropped_without_variance_are_missed(tmp_path):
    """Of DAPO with one group in generation nothing is surplus: only such groups are missing."""
    run = Run(recipes.dapo(groups=2, n=4, gen_groups=1)).train()
    assert run.ended.keys() == {"trained", "zero_variance"}
    log = with_all_rollouts(read_log(run.trl(tmp_path / "run")))
    assert scored(log)[1] == len(run.reward)


@pytest.mark.parametrize("recipe", [recipes.grpo(3, 4), recipes.reinforce(12), recipes.knapsack(groups=3, n=4)])
def test_a_log_of_all_rollouts_is_used_itself(tmp_path, recipe):
    log = read_log(Run(recipe).train().trl(tmp_path / "run"))
    assert with_all_rollouts(log) is log


@pytest.mark.parametrize(
    ("how", "asked", "remedy"),
    [
        ({"state": False}, {}, "give the run's folder with a checkpoint"),
        ({"graded": True}, {}, "sample the model"),
        ({"graded": True}, {"threshold": 3.0}, "sample the model"),
        ({}, {"from_step": 2}, "leave out --from-step, because"),
        ({}, {"threshold": 0.5}, "leave out --threshold, because"),
        ({}, {"from_step": 2, "threshold": 0.5}, "leave out --from-step and --threshold, because"),
    ],
)
def test_without_records_that_tell_what_was_right_the_remedy_is_one_that_helps(tmp_path, how, asked, remedy):
    log = with_all_rollouts(read_log(Run(SELECTS["pods"]).train().trl(tmp_path / "run", **how)), **asked)
    assert log.selected.startswith("the log lacks ")
    assert log.remedy.startswith(remedy)
    assert log.remedy.endswith("sample the model (rollalloc advise --model MODEL --prompts FILE)")
    verdict = verdict_of(profile_of(log, resamples=2), Choice("pods", 3, 4))
    assert (verdict.kind, verdict.more) == ("too few", 0)
    assert verdict.sentence == f"No verdict: {log.selected}. What helps: {log.remedy}."


def test_rollouts_that_are_in_the_log_with_another_reward_are_not_missed(tmp_path):
    """GRPO trains on groups without variance, which the run counts; in the log their rewards differ."""
    run = Run(recipes.grpo(3, 4)).train()
    assert run.ended["zero_variance"] > 0
    log = read_log(run.trl(tmp_path / "run", graded=True))
    assert log.groups.mixed_V.all()
    assert with_all_rollouts(log) is log


@pytest.mark.parametrize(
    ("recipe", "present", "said"),
    [
        (SELECTS["pods"], Choice("pods", 3, 4), "pods with batches of 3 prompts × 4 rows, as checkpoint-6 records"),
        (SELECTS["pilot_commit"], Choice("pilot_commit", 3, 4), "pilot_commit with batches of 3 prompts × 4 rows"),
        (recipes.foresight(groups=12), Choice("foresight", 12, 1), "foresight with batches of 12 prompts × 1 rows"),
    ],
)
def test_the_present_setting_is_the_run_s_own(tmp_path, recipe, present, said):
    log = read_log(Run(recipe).train().trl(tmp_path / "run"))
    found, why = present_of(profile_of(log, resamples=2), sampled=False, runs=log.runs)
    assert found == present
    assert said in why


def test_what_is_pasted_after_a_native_run_has_its_model_prompts_and_reward(rollalloc, tmp_path, run_of):
    """A Pilot-Commit run: its recipe is not taken for GRPO with the size of its pilots."""
    config = run_of("pilot_commit", {"groups": 4, "n_pilot": 2, "n_commit": 2})
    write_config(config, tmp_path)
    dice = np.random.default_rng(0)
    paid = {"rollouts_paid": 1200, "tokens_paid": 9, "seconds": 1.0, "accounts": {"trained": 400, "out_of_band": 800}}
    batch = {"kind": "batch", "batch": 1, "version": 1, "rows": 16, "groups": 4} | paid
    (tmp_path / "metrics.jsonl").write_text(json.dumps(batch) + "\n")
    rows = [
        {"key": f"k{at // 2 % 300}", "group": at // 2, "version": at // 80, "stage": 0, "rollout": at,
         "metric": float(dice.random() < 0.1 + at // 2 % 5 / 5)}
        for at in range(1200)
    ]  # fmt: skip
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, error = rollalloc("advise", tmp_path, columns=200)
    assert code == 0, error
    assert "Present setting: pilot_commit with batches of 4 prompts × 4 rows, n_pilot = 2, n_commit = 2, as" in out
    assert f"rollalloc train --model {config.model} --prompts {config.prompts[0]}" in out or "--task" in out
    assert "MODEL" not in out
    assert "prompts × 1 instead of 4 × 4" in out
