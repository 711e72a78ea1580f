"""Tests of recipes that read success rates, under rewards that are none."""

from typing import Any

import pytest
import tiny_trl

from rollalloc import MetricError


def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(text.startswith(wanted)) for text, wanted in zip(completions, answer, strict=True)]


def shaped(completions: list[str], **columns: Any) -> list[float]:
    """From -1 to 2.5."""
    return [
        2.0 * score - 1 + 0.5 * ("a" in text) * (len(text) % 4)
        for text, score in zip(completions, right(completions, **columns), strict=True)
    ]


def ones(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text) % 2) for text in completions]


def minus_ones(completions: list[str], **_: Any) -> list[float]:
    return [-score for score in ones(completions)]


@pytest.mark.parametrize("single", [False, True])
def test_a_sum_of_functions_that_cancel_each_other_out_is_said_to_be_one(tmp_path, caplog, single):
    """TRL #3857: each function varies, and the reward does not."""
    reward = (lambda completions, **_: [0.0] * len(completions)) if single else [ones, minus_ones]
    tiny_trl.trainer(tmp_path, "grpo", reward=reward, max_steps=4).train()
    [said] = [message for message in caplog.messages if "check the reward function" in message]
    assert ("weighted sum of ones, minus_ones" in said) is not single


def plus_or_minus(completions: list[str], **columns: Any) -> list[float]:
    return [2 * score - 1 for score in right(completions, **columns)]


def test_a_reward_that_is_no_success_rate_ends_the_run_at_its_first_batch_with_the_way_out(tmp_path):
    trainer = tiny_trl.trainer(tmp_path, "pilot_commit", reward=plus_or_minus)
    for _ in range(2):  # and again, without hanging
        with pytest.raises(
            MetricError,
            match=r"event \d+, rollout \d+: Band\(.*got -1.0;.*The metric is the whole reward; set metric to the name "
            r"of the reward function \(plus_or_minus\) that returns 1 for right and 0 for wrong. If there is no such "
            "function, add one with the reward weight 0",
        ):
            trainer.train()
        assert trainer.state.global_step == 0


@pytest.mark.parametrize("reward", [plus_or_minus, shaped])
def test_with_a_function_of_weight_0_as_the_metric_any_reward_trains(reward, tmp_path):
    """It selects as under `right` alone, and trains on the other: Pilot-Commit's windows are those of the metric."""
    given = {"driver": {"metric": "right"}, "reward_weights": [1.0, 0.0]}
    trainer = tiny_trl.trainer(tmp_path, "pilot_commit", reward=[reward, right], max_steps=6, **given)
    trainer.train()
    allocation, core = trainer.allocation, trainer.allocation.allocator
    assert core.version == 6
    assert core.accounts()["trained"] > 0
    assert (core.statistics.successes_N % 1 == 0).all()
    assert (core.statistics.successes_N >= 0).all()
    assert (core.statistics.successes_N <= core.statistics.attempts_N).all()
    scores = [rollout.scores_F for rollout in allocation.generated]
    assert {allocation.rewards.selected_by(scores_F) for scores_F in scores} == {0.0, 1.0}
    assert {allocation.rewards.reward(scores_F) for scores_F in scores} - {0.0, 1.0}


def test_a_metric_function_must_return_a_success_rate(tmp_path):
    trainer = tiny_trl.trainer(
        tmp_path, "pilot_commit", reward=[shaped, right], driver={"metric": "shaped"}, reward_weights=[0.0, 1.0]
    )
    with pytest.raises(MetricError, match=r"got -1.0; .*The metric is the score of shaped: let it return 1 for right"):
        trainer.train()
