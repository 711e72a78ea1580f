"""Reward functions in TRL's signature."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_trl

from rollalloc.core.errors import NoScores
from rollalloc.drivers.trl.rewards import RewardFunctions

EXAMPLES = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}, {"prompt": "c", "answer": 3}]
TEXTS, IDS = ["x", "yy", "zzz"], [[1], [2, 2], [3, 3, 3]]
STATE = SimpleNamespace(global_step=7)


def the_answer(answer: list[int], **_: Any) -> list[float]:
    return [float(number) for number in answer]


def of_functions(*functions: Any, weights: Any = None, metric: str | None = None) -> RewardFunctions:
    names = [getattr(function, "__name__", "judge") for function in functions]
    nothing = [None] * len(functions)
    return RewardFunctions(functions, names, weights or [1.0] * len(functions), nothing, metric)


def scored(*functions: Any, **given: Any) -> Any:
    rewards = of_functions(*functions, **given)
    return rewards, rewards(EXAMPLES, TEXTS, IDS, STATE)


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def test_a_completion_without_any_score_is_said_in_trls_words(caplog):
    scored(lambda completions, **_: [None, 1.0, None], lambda completions, **_: [2.0, None, 1.0])
    assert not caplog.text
    scored(lambda completions, **_: [1.0, None, None])
    assert caplog.text.count("All reward functions returned None for the following kwargs") == 1
    assert "'answer': 2, 'completion': 'yy'" in caplog.text


def test_each_function_gets_the_columns_of_the_rows_that_were_rolled_out():
    seen = {}

    def keep(**given: Any) -> list[float]:
        seen.update(given)
        return [0.0] * 3

    scored(keep)
    assert seen["prompts"] == ["a", "b", "c"]
    assert seen["completions"] == TEXTS
    assert seen["completion_ids"] == IDS
    assert seen["answer"] == [1, 2, 3]
    assert seen["trainer_state"] is STATE


def test_none_has_no_part_in_the_sum_and_all_none_is_unscored():
    rewards, found = scored(
        lambda completions, **_: [None, 1.0, float("nan")], lambda completions, **_: [2.0, None, None], weights=[1, 3]
    )
    assert found.scores_BF == [[None, 2.0], [1.0, None], [None, None]]
    assert [rewards.reward(scores_F) for scores_F in found.scores_BF] == [6.0, 1.0, None]


def test_async_functions_run_side_by_side_and_in_one_loop():
    loops, running, most = set(), 0, 0

    async def slow(completions: list[str], **_: Any) -> list[float]:
        nonlocal running, most
        loops.add(id(asyncio.get_running_loop()))
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        return [1.0] * len(completions)

    class Judge:
        async def __call__(self, completions: list[str], **given: Any) -> list[float]:
            return [2 * score for score in await slow(completions, **given)]

    rewards = of_functions(slow, Judge(), length)
    for _ in range(2):
        assert rewards(EXAMPLES, TEXTS, IDS, STATE).scores_BF == [[1, 2, 1], [1, 2, 2], [1, 2, 3]]
    assert most == 2
    assert len(loops) == 1


def test_what_functions_log_is_kept():
    def logging(completions: list[str], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
        log_extra("size", [len(text) for text in completions])
        log_metric("seen", len(completions))
        return [0.0] * 3

    _, found = scored(logging)
    assert found.columns == {"size": [1, 2, 3]}
    assert found.figures == {"seen": [3.0]}


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([1.0], "one score a completion, 3, got 1"),
        (None, "one score a completion, 3, got None"),
        ([1.0, float("inf"), 0.0], "finite numbers or None, got inf"),
        ([1.0, "right", 0.0], "numbers or None, got"),
    ],
)
def test_what_a_function_may_not_return(scores, message):
    def wrong(**_: Any) -> list[float]:
        return scores

    with pytest.raises(ValueError, match=f"the reward function wrong must return {message}"):
        scored(wrong)


def test_unscored_rollouts_are_booked_as_failed_and_selection_uses_the_named_function(tmp_path):
    def correct(completions: list[str], **_: Any) -> list[float | None]:
        return [None if text.endswith("k1") else float(text.startswith("a")) for text in completions]

    def style(completions: list[str], **_: Any) -> list[float]:
        return [0.1 * len(text) for text in completions]

    trainer = tiny_trl.trainer(
        tmp_path, "dapo", reward=[correct, style], driver={"metric": "correct"}, reward_weights=[1.0, 0.5], max_steps=1
    )
    trainer.train()
    made, accounts = trainer.allocation.generated, trainer.allocation.allocator.accounts()
    unscored = [rollout for rollout in made if rollout.scores_F[0] is None]
    assert accounts["failed"] == len(unscored) > 0
    line = trainer.state.log_history[0]
    assert line["rollalloc/failed"] == len(unscored)
    for rollout in trainer.allocation.rollouts.values():
        assert rollout.scores_F[0] is not None
    assert accounts["zero_variance"] > 0  # `style` differs within every group; by `correct` some are equal


@pytest.mark.parametrize("scored", [16, 0])
def test_a_run_whose_rewards_all_fail_does_not_pass_for_one_that_ended(tmp_path, scored):
    calls = 0

    def reward(completions: list[str], **_: Any) -> list[float | None]:
        nonlocal calls
        calls += len(completions)
        return [float(at % 2) if calls <= scored else None for at in range(len(completions))]

    trainer = tiny_trl.trainer(tmp_path, "grpo", reward=reward, dataset=tiny_trl.prompts(80), max_steps=40)
    for _ in range(2):  # nor at the second try
        with pytest.raises(NoScores, match=r"^failed: .*\(reward\).*repair the reward, then resume"):
            trainer.train()
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_an_async_function_is_the_users():
    async def broken(**_: Any) -> list[float]:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        scored(broken)


def test_the_reward_is_the_weighted_sum_and_selection_may_look_at_one_function():
    rewards, found = scored(length, the_answer, weights=[0.5, 10], metric="the_answer")
    assert [rewards.selected_by(scores_F) for scores_F in found.scores_BF] == [1, 2, 3]
    assert [rewards.reward(scores_F) for scores_F in found.scores_BF] == [10.5, 21, 31.5]


def test_columns_belong_to_the_prompt_that_was_rolled_out(tmp_path):
    table = {row["number"]: row for row in tiny_trl.prompts()}
    seen = set()

    def reward(prompts: list[str], number: list[int], answer: list[str], **_: Any) -> list[float]:
        for prompt, which, right in zip(prompts, number, answer, strict=True):
            assert table[which]["prompt"] == prompt
            assert table[which]["answer"] == right
        seen.update(number)
        return [float(which % 3 == at % 2) for at, which in enumerate(number)]

    tiny_trl.trainer(tmp_path, "pilot_commit", reward=reward).train()
    assert len(seen) > 8
