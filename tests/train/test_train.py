"""Tests of the native trainer's loop, with a model of two thousand parameters: rows, costs, metrics, targets and ends."""

import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from rollalloc import Limit, MetricError, recipes
from rollalloc.generate.engine import SyncEngine
from rollalloc.generate.outcomes import tell
from rollalloc.models.likelihood import completion_logprobs
from rollalloc.models.settings import Sampling
from rollalloc.rewards.scorers import WorkerScorer
from rollalloc.tasks.tiny import EOS_ID, PAD_ID
from rollalloc.train.evaluation import Evaluation, HeldOut
from tiny_policy import RECIPES, lines_of, resumed_is_unbroken, untimed, weights

# One of each way that a batch comes about; the tier `e2e` has the others.
KINDS = ("dapo_carry", "pilot_commit", "pods", "darts_stopped")
every_recipe = pytest.mark.parametrize(
    "name", [name if name in KINDS else pytest.param(name, marks=pytest.mark.e2e) for name in RECIPES]
)
FIRST_IMAGE = 9  # token id of "a0" in the fixtures' vocabulary


def spied(trainer):
    """The rows of each optimizer step, as lists of a batch, filled while the trainer runs."""
    batches, update, step = [], trainer.updater.update, trainer.updater._step

    def updating(batch, generations, **how):
        batches.append((batch, []))
        return update(batch, generations, **how)

    def stepping(examples, spent):
        batches[-1][1].append([example.row for example in examples])
        return step(examples, spent)

    trainer.updater.update, trainer.updater._step = updating, stepping
    return batches


# Optimizer steps and what they train on


@every_recipe
@pytest.mark.parametrize("steps", [1, 3])
def test_every_row_of_a_batch_is_trained_once(trainer_of, name, steps):
    trainer = trainer_of(RECIPES[name], 300, optimizer_steps_per_batch=steps)
    batches = spied(trainer)
    trainer.run()
    assert len(batches) > 2
    seen = Counter()
    for batch, parts in batches:
        trained = Counter(row for rows in parts for row in rows)
        assert trained == Counter(batch.rows)
        seen.update(row.rollout for row in batch.rows)
        if len({row.group for row in batch.rows}) >= steps:  # groups stay whole, and parts are even
            assert max(Counter(group for rows in parts for group in {row.group for row in rows}).values()) == 1
            sizes = [len({row.group for row in rows}) for rows in parts]
            assert max(sizes) - min(sizes) <= 1
    assert set(seen.values()) == {1}
    accounts = trainer.allocator.accounts()
    with_signal = sum(row.advantage != 0 for batch, _ in batches for row in batch.rows)
    assert 0 < with_signal <= accounts["trained"] <= len(seen) <= accounts["trained"] + accounts["zero_variance"]


def test_behaviour_log_probs_are_kept_and_are_the_models(trainer_of):
    trainer = trainer_of(RECIPES["grpo"], sampling=Sampling(3, temperature=0.6))
    while (batch := (actions := trainer.allocator.ask()).batch) is None:
        trainer.engine.submit(actions.generate)
        tell(trainer.allocator, trainer.engine.poll())
    assert {row.rollout for row in batch.rows} == set(trainer.engine.generations)
    made = [trainer.engine.generations[row.rollout] for row in batch.rows]
    with torch.no_grad():
        logprobs_BT, mask_BT = completion_logprobs(
            trainer.policy.model,
            [trainer.train.tokens[row.prompt] for row in batch.rows],
            [each.tokens for each in made],
            pad_id=PAD_ID,
            temperature=0.6,
        )
    kept = np.concatenate([each.logprobs for each in made])
    np.testing.assert_allclose(kept, logprobs_BT[mask_BT].numpy(), atol=1e-4)


# Rollouts stopped while the others run


@pytest.mark.parametrize("tail", ["sampled", "none"])
def test_stopped_rollouts_save_tokens_and_training_goes_on(trainer_of, tail):
    ended = {}
    for name in ("exact", tail):
        lines = []
        recipe = recipes.darts(4, 2, 2, tail=name)
        trainer = trainer_of(recipe, 240, sampling=Sampling(20), listener=lines.append)
        before = weights(trainer)
        assert trainer.run().startswith("the budget of ")
        assert not torch.equal(weights(trainer), before)
        assert trainer.engine.generations == {}
        assert lines[-1]["version"] > 5
        ended[name] = [line for line in lines if line["kind"] != "eval"]
    for name, lines in ended.items():
        for line in lines:
            assert sum(line["accounts"].values()) == line["rollouts_paid"] <= 240
        assert lines[-1]["accounts"]["open"] == 0
        assert (lines[-1]["accounts"]["cancelled"] > 0) == (name == tail)
    # The first batch has the same rollouts under both, so that whatever is not paid for was saved.
    first = {name: lines[0] for name, lines in ended.items()}
    assert first[tail]["rollouts_paid"] == first["exact"]["rollouts_paid"]
    assert first[tail]["tokens_paid"] < first["exact"]["tokens_paid"]
    assert ended[tail][-1]["tokens_paid"] < ended["exact"][-1]["tokens_paid"]


# Metrics


@every_recipe
def test_every_line_accounts_for_every_rollout_paid(trainer_of, prompts_of, tmp_path, name):
    heldout = HeldOut(prompts_of(8), ((FIRST_IMAGE, EOS_ID),) * 8)
    listened = []
    trainer = trainer_of(RECIPES[name], 300, folder=tmp_path, heldout=heldout, listener=listened.append)
    why = trainer.run()
    lines = lines_of(tmp_path)
    heard = json.loads(json.dumps([{key: line[key] for key in line if key != "examples"} for line in listened]))
    assert lines == heard
    for line in lines:
        assert sum(line["accounts"].values()) == line["rollouts_paid"] <= 300
    for column in ("rollouts_paid", "tokens_paid", "version", "optimizer_steps", "seconds", "epoch"):
        values = [line[column] for line in lines]
        assert values == sorted(values)
    assert {line["kind"] for line in lines} == {"eval", "batch", "end"}
    assert [line["kind"] for line in lines].index("eval") == 0
    assert [line["kind"] for line in lines[-2:]] == ["eval", "end"]
    assert lines[-1]["why"] == why
    assert lines[-1]["accounts"]["open"] == 0
    evaluated = [line["at"] for line in lines if line["kind"] == "eval"]
    assert evaluated == [*range(0, lines[-1]["rollouts_paid"] + 1, 100), None]


@every_recipe
def test_an_evaluation_is_of_the_newest_weights_within_its_grid_point(trainer_of, prompts_of, name):
    lines, weights_of = [], {}

    def listen(line):
        lines.append(line)
        if line["kind"] != "end":
            weights_of.setdefault(line["version"], []).append(weights(trainer))

    trainer = trainer_of(RECIPES[name], 400, heldout=HeldOut(prompts_of(4)), eval_every=30, listener=listen)
    trainer.run()
    made = [lines[0], *(line for line in lines if line["kind"] == "batch")]  # a line for each version
    evaluations = [line for line in lines if line["kind"] == "eval"]
    assert [line["at"] for line in evaluations] == [*range(0, lines[-1]["rollouts_paid"] + 1, 30), None]
    for line in evaluations:
        at = math.inf if line["at"] is None else line["at"]
        newest = [one for one in made if one["rollouts_paid"] <= at][-1]
        for column in ("version", "rollouts_paid", "tokens_paid", "optimizer_steps", "seconds", "accounts"):
            assert line[column] == newest[column]
    for same in weights_of.values():  # nothing was trained between the line of a version and its evaluations
        assert all(torch.equal(one, same[0]) for one in same)
    by_version = {}
    for line in evaluations:
        by_version.setdefault(line["version"], set()).add(line["accuracy"])
    assert len(by_version) > 3
    assert {len(found) for found in by_version.values()} == {1}


def test_metrics_are_means_over_all_generated_rollouts(trainer_of):
    """Those of the dropped groups included: DAPO's batches alone would look as if half were solved."""
    rewards, lines, waves = [], [], []

    def reward(*, solution_str, **_):
        rewards.append(float(solution_str.startswith("a")))
        return {"score": rewards[-1] - 0.5, "acc": rewards[-1]}

    def listen(line):
        if line["kind"] == "batch":
            lines.append(line)
            waves.append(rewards.copy())
            rewards.clear()

    trainer_of(RECIPES["dapo"], max_batches=4, reward=reward, listener=listen).run()
    assert [line["metric_mean"] for line in lines] == pytest.approx([np.mean(wave) for wave in waves])
    assert [line["reward_mean"] for line in lines] == pytest.approx([np.mean(wave) - 0.5 for wave in waves])
    assert any(len(wave) > line["rows"] for line, wave in zip(lines, waves, strict=True))


# Rewards that give no score


def unscored_for_some(*, extra_info, solution_str, **_):
    match extra_info["index"] % 5:
        case 0:
            return None
        case 1:
            return math.nan
        case 2:
            raise KeyError("no such answer")
    return float(solution_str.startswith("a"))


@every_recipe
def test_rollouts_without_a_score_are_counted_and_never_trained(trainer_of, name):
    lines = []
    trainer = trainer_of(RECIPES[name], 400, reward=unscored_for_some, listener=lines.append)
    batches = spied(trainer)
    trainer.run()
    reasons = {"None": 0, "nan": 0, "KeyError": 0}
    for reason, count in lines[-1]["unscored"].items():
        [kind] = [kind for kind in reasons if kind in reason]
        reasons[kind] += count
    assert min(reasons.values()) > 0
    assert sum(reasons.values()) == lines[-1]["accounts"]["failed"]
    trained = {row.prompt % 5 for batch, _ in batches for row in batch.rows}
    assert trained == {3, 4}
    assert trainer.engine.generations == {}


# Metrics that are no success rate


def test_a_metric_that_is_no_success_rate_is_refused_where_rules_read_one(trainer_of, tmp_path):
    def plus_or_minus_one(solution_str, **_):
        return 2.0 * solution_str.startswith("a") - 1.0

    trainer = trainer_of(RECIPES["pilot_commit"], 300, reward=plus_or_minus_one, folder=tmp_path)
    with pytest.raises(MetricError, match=r'Band.* success rate.*return \{"score": reward, "acc": 1.0 if right'):
        trainer.run()
    again = trainer_of(RECIPES["pilot_commit"], 96, folder=tmp_path)  # once the reward is repaired
    assert again.run(overwrite=True).startswith("the budget of ")


def test_a_target_needs_an_accuracy(trainer_of, prompts_of):
    trainer = trainer_of(
        RECIPES["grpo"], 64, reward=lambda **_: 2.0, heldout=HeldOut(prompts_of(4)), target=0.8, listener=None
    )
    with pytest.raises(MetricError, match=r"the target 0.8 is an accuracy, but the mean held-out metric is 2"):
        trainer.run()


# How a run ends


def test_the_target_must_hold_at_two_grid_points_in_a_row(trainer_of, prompts_of):
    lines = []
    heldout = HeldOut(prompts_of(4), ((FIRST_IMAGE, EOS_ID),) * 4)
    trainer = trainer_of(RECIPES["grpo"], 5000, heldout=heldout, target=0.8, eval_every=32, listener=lines.append)
    evaluations = iter([0.5, 0.9, 0.79, 0.8, 0.85, 0.2])
    trainer.evaluate = lambda: Evaluation(next(evaluations), 0.0)
    assert trainer.run() == "target: held-out accuracy 0.8500 reaches 0.8"
    found = [(line["at"], line["accuracy"]) for line in lines if line["kind"] == "eval"]
    # The batch that went beyond the last point is paid, so it is trained on; the last evaluation is of its weights.
    assert found == [(0, 0.5), (32, 0.9), (64, 0.79), (96, 0.8), (128, 0.85), (None, 0.2)]
    assert lines[-1]["rollouts_paid"] == 4 * 32 + 16
    assert lines[-1]["accounts"]["open"] == 0


def test_a_gradient_that_diverges_is_an_error(trainer_of):
    trainer = trainer_of(RECIPES["grpo"], learning_rate=1e30, optimizer_steps_per_batch=2)
    with pytest.raises(FloatingPointError, match="gradient's norm is nan in optimizer step 2"):
        trainer.run()


def test_weights_that_diverge_in_the_last_update_are_an_error(trainer_of, prompts_of):
    """Nothing is generated or saved after it, so that only the evaluation can see it; NaN is not an accuracy."""

    def poison(line):
        if line["kind"] == "batch":
            with torch.no_grad():
                trainer.policy.model.lm_head.weight.fill_(math.nan)

    answers = HeldOut(prompts_of(4), ((FIRST_IMAGE, EOS_ID),) * 4)
    trainer = trainer_of(RECIPES["grpo"], max_batches=1, heldout=answers, listener=poison)
    with pytest.raises(FloatingPointError, match="held-out accuracy is nan"):
        trainer.run()


# Held-out prompts


@pytest.mark.filterwarnings("error")
def test_an_evaluation_without_any_score_is_not_an_accuracy(trainer_of, prompts_of, caplog):
    lines = []

    def reward(*, data_source, solution_str, **_):
        return None if data_source == "held out" else float(solution_str.startswith("a"))

    prompts = prompts_of(6)
    unscorable = replace(prompts, prompt_set=replace(prompts.prompt_set, sources=("held out",) * 6))
    trainer = trainer_of(
        RECIPES["grpo"], 320, reward=reward, heldout=HeldOut(unscorable), target=0.01, listener=lines.append
    )
    assert trainer.run().startswith("the budget of ")
    evaluations = [line for line in lines if line["kind"] == "eval"]
    # An evaluation that failed is not repeated after every batch.
    assert [line["at"] for line in evaluations] == [0, 100, 200, 300, None]
    assert {line["accuracy"] for line in evaluations} == {line["standard_error"] for line in evaluations} == {None}
    assert {line["eval_unscored"] for line in evaluations} == {24}
    assert lines[-1]["unscored"] == {}  # of the rollouts paid
    assert "none of 24 held-out samples has a score: reward function returned None (24)" in caplog.text


def test_evaluation_costs_no_budget_and_changes_nothing(trainer_of, prompts_of):
    ended, paid = [], []
    for heldout in (None, HeldOut(prompts_of(8))):
        lines = []
        trainer = trainer_of(RECIPES["dapo"], 300, heldout=heldout, listener=lines.append)
        trainer.run()
        ended.append(weights(trainer))
        paid.append((lines[-1]["rollouts_paid"], lines[-1]["tokens_paid"], lines[-1]["accounts"]))
    assert paid[0] == paid[1]
    assert torch.equal(*ended)


# Settings


def test_seconds_leave_out_evaluation(trainer_of, prompts_of, monkeypatch):
    """A clock that goes only while the model is evaluated."""
    now = [0.0]
    monkeypatch.setattr("rollalloc.train.train.time.perf_counter", lambda: now[0])
    lines = []
    heldout = HeldOut(prompts_of(4))
    trainer = trainer_of(RECIPES["grpo"], 200, heldout=heldout, eval_every=32, listener=lines.append)

    def slow():
        now[0] += 5
        return Evaluation(0.5, 0.0)

    trainer.evaluate = slow
    trainer.run()
    assert {line["seconds"] for line in lines} == {0}
    assert {line["eval_seconds"] for line in lines if line["kind"] == "eval"} == {5}


def test_one_seed_gives_the_same_run_twice(trainer_of, prompts_of, tmp_path):
    ended, metrics = [], []
    for run, seed in enumerate((3, 3, 4)):
        folder = tmp_path / str(run)
        trainer = trainer_of(
            RECIPES["pilot_commit"], 300, seed=seed, folder=folder, heldout=HeldOut(prompts_of(8)), eval_samples=2
        )
        trainer.run()
        ended.append(weights(trainer))
        metrics.append(untimed(folder))
    assert metrics[0] == metrics[1] != metrics[2]
    assert torch.equal(ended[0], ended[1])
    assert not torch.equal(ended[0], ended[2])


@pytest.mark.e2e
def test_a_hanging_reward_does_not_hang_the_run(trainer_of, tmp_path):
    """Two rollouts of one prompt hang; the limit ends them and the rest is scored and trained."""
    file = tmp_path / "hanging.py"
    file.write_text(
        "import time\n"
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if extra_info['index'] == 0:\n"
        "        time.sleep(3600)\n"
        "    return float(solution_str.startswith('a'))\n"
    )
    lines = []
    with WorkerScorer(f"{file}:score", limit_s=0.5) as scorer:
        trainer = trainer_of(recipes.grpo(2, 2), 8, prompts=4, scorer=scorer, listener=lines.append)
        batches = spied(trainer)
        assert trainer.run().startswith("the budget of ")
    assert lines[-1]["unscored"] == {"timed out after 0.5 s": 2}
    assert lines[-1]["accounts"]["failed"] == 2
    assert {row.prompt for batch, _ in batches for row in batch.rows} == {1, 2, 3}


def test_an_engine_that_does_not_stop_at_a_length_refuses_a_limit(trainer_of, monkeypatch):
    monkeypatch.setattr(SyncEngine, "limits", False)
    trainer_of(RECIPES["pods"])
    with pytest.raises(
        ValueError, match=r"at a length \(limit_at\), and SyncEngine does not stop them; leave limit_at out"
    ):
        trainer_of(RECIPES["pods"].replace(limit=Limit()))


LIMITED = recipes.reinforce(16).replace(limit=Limit(share=0.05, every=2, last=16))


def test_a_run_with_a_limit_says_it(trainer_of):
    lines, limited = [], trainer_of(LIMITED)
    limited.listener = lines.append
    limited.run()
    limits = [line["limit"] for line in lines if line["kind"] == "batch"]
    assert limits[0] is None
    assert limits[-1] in (1, 2, 3)


def test_the_log_says_which_rollouts_the_recipe_s_limit_stopped(trainer_of, tmp_path):
    """Of truncated rollouts, those whose line has a limit have as many tokens; the others as many as the sampler allows."""
    trainer = trainer_of(LIMITED, folder=tmp_path, max_batches=8, log_rollouts=True, sampling=Sampling(8))
    trainer.run()
    most = trainer.config.sampling.max_new_tokens
    rows = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    cut = [row for row in rows if row["truncated"]]
    assert {row["tokens"] == row.get("limit", most) for row in cut} == {True}
    assert {row["limit"] < most for row in rows if "limit" in row} == {True}
    assert any("limit" in row for row in cut)
    assert any("limit" not in row for row in cut)


def test_a_killed_run_with_a_limit_is_the_unbroken_one(trainer_of, tmp_path):
    def run_of(folder, **changes):
        return trainer_of(LIMITED, folder=folder, max_batches=8, checkpoint_every=1, **changes)

    unbroken, _ = resumed_is_unbroken(run_of, tmp_path, 6)
    assert unbroken.allocator.limit is not None
