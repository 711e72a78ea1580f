"""Reward functions in TRL's signature."""

from __future__ import annotations

import asyncio
import itertools
import re
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tiny_trl
import torch
from trl import GRPOTrainer

from rollalloc.core.events import NoScores
from rollalloc.drivers.trl.rewards import RESERVED, RewardFunctions

EXAMPLES = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}, {"prompt": "c", "answer": 3}]
TEXTS, IDS = ["x", "yy", "zzz"], [[1], [2, 2], [3, 3, 3]]
STATE = SimpleNamespace(global_step=7)


def of_functions(*functions: Any, weights: Any = None, metric: str | None = None) -> RewardFunctions:
    names = [getattr(function, "__name__", "judge") for function in functions]
    nothing = [None] * len(functions)
    return RewardFunctions(functions, names, weights or [1.0] * len(functions), nothing, metric)


def scored(*functions: Any, **given: Any) -> Any:
    rewards = of_functions(*functions, **given)
    return rewards, rewards(EXAMPLES, TEXTS, IDS, STATE)


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def test_a_completion_without_any_score_is_said_once_in_trls_words(caplog):
    scored(lambda completions, **_: [None, 1.0, None], lambda completions, **_: [2.0, None, 1.0])
    assert not caplog.text
    rewards, _ = scored(lambda completions, **_: [1.0, None, None])
    rewards(EXAMPLES, TEXTS, IDS, STATE)
    assert caplog.text.count("All reward functions returned None for the following kwargs") == 1
    assert "'answer': 2, 'completion': 'yy'" in caplog.text


def startswith(completions: Any, **_: Any) -> Any:
    """Wrong for conversations, whose completions are lists of messages."""
    return [float(message.startswith("a")) for message in completions]


async def startswith_async(completions: Any, **_: Any) -> Any:
    return startswith(completions)


@pytest.mark.parametrize("function", [startswith, startswith_async])
def test_a_function_that_raises_is_named_with_what_it_gets(function):
    chats = [[{"role": "assistant", "content": text}] for text in TEXTS]
    nothing = "no columns of the data set (an evaluation passes the columns of eval_dataset)"
    without = [{"prompt": row["prompt"]} for row in EXAMPLES]
    for rows, columns in ((EXAMPLES, "answer of the data set"), (without, nothing)):
        with pytest.raises(AttributeError) as raised:
            of_functions(function)(rows, chats, IDS, STATE)
        [note] = raised.value.__notes__
        assert note.startswith(f"raised by the reward function {function.__name__}. It gets {columns} and prompts, ")
        assert "Each completion is a list of messages, whose text is completion[0]['content']" in note


def test_a_reward_of_none_is_left_out_of_the_sum_and_all_none_is_unscored():
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
    ("scores", "got"),
    [
        ([1.0], "1 of them"),
        ([], "0 of them"),
        (None, "None of type NoneType"),
        (1.0, "1.0 of type float"),
        ("101", "'101' of type str"),
        ({0: 0.5, 1: 0.5, 2: 0.5}, "of type dict; return the number that is trained on"),
        ({1.0, 2.0, 3.0}, "of type set"),
        ([{"score": 1.0}] * 3, "among them; return the number that is trained on"),
        ([1.0, float("inf"), 0.0], "inf among them; numbers must be finite"),
        ([1.0, 1e31, 0.0], "1e+31 among them; numbers must be finite and within ±1e+30"),
        ([1.0, 10**400, 0.0], "among them"),
        ([1.0, "1", 0.0], "'1' among them"),
        ([1.0, 1j, 0.0], "1j among them"),
        ([[1.0], [0.0], [0.0]], "[1.0] among them"),
        (np.ones((3, 1)), "among them"),
        (np.array(1.0), "which is a single number"),
        (torch.tensor(1.0), "which is a single number"),
        (torch.ones(3, 1), "among them"),
        (itertools.repeat(1.0), "4 or more of them"),
    ],
)
def test_a_reward_function_that_returns_nonsense_is_refused(scores, got):
    def wrong(**_: Any) -> Any:
        return scores

    expected = "the reward function wrong must return a list of 3 numbers or None, one for each completion, got "
    with pytest.raises(ValueError, match=re.escape(expected) + ".*" + re.escape(got)):
        scored(wrong)


@pytest.mark.parametrize(
    "scores",
    [
        (1, 0, 1),
        [True, False, np.True_],
        np.array([1.0, 0.0, 1.0], np.float16),
        torch.tensor([1.0, 0.0, 1.0]),
        [torch.tensor(1), Fraction(0), Decimal(1)],
        (score for score in (1.0, 0.0, 1.0)),
        {"a": 1, "b": 0, "c": 1}.values(),
    ],
)
def test_a_reward_function_may_return_numbers_of_any_library(scores):
    _, found = scored(lambda completions, **_: scores)
    assert found.scores_BF == [[1.0], [0.0], [1.0]]
    assert {type(score) for scores_F in found.scores_BF for score in scores_F} == {float}


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (lambda log_extra, **_: log_extra("size", [1, 2]), "one value for each completion, 3, got 2"),
        (lambda log_extra, **_: log_extra("prompt", [1, 2, 3]), "has a column of that name already"),
        (lambda log_extra, **_: log_extra("logs", [1, 2, 3]), "has a column of that name already"),
        (lambda log_extra, **_: [log_extra("size", [1, 2, 3]), log_extra("size", [1, 2, 3])], "called twice"),
        (lambda log_metric, **_: log_metric("reward", 1), "the trainer logs reward itself"),
        (lambda log_metric, **_: log_metric("rollalloc/entropy", 1), "the trainer logs rollalloc/entropy itself"),
    ],
)
def test_a_reward_function_that_logs_nonsense_is_refused(log, said):
    def logs(**given: Any) -> list[float]:
        log(**given)
        return [1.0] * 3

    with pytest.raises(ValueError, match=said):
        scored(logs)


@pytest.mark.parametrize("column", RESERVED)
def test_a_column_that_would_hide_what_a_function_gets_is_refused_when_the_trainer_is_made(column, tmp_path):
    clashing = tiny_trl.prompts().add_column(column, [0] * 40)
    said = f"has a column '{column}', but reward functions get arguments of this name"
    with pytest.raises(ValueError, match="the training data set " + said):
        tiny_trl.trainer(tmp_path, "grpo", dataset=clashing)
    with pytest.raises(ValueError, match="eval_dataset " + said):
        tiny_trl.trainer(tmp_path, "grpo", more={"eval_dataset": clashing})
    with pytest.raises(ValueError, match=re.escape("eval_dataset['hard'] ") + said):
        tiny_trl.trainer(tmp_path, "grpo", more={"eval_dataset": {"easy": tiny_trl.prompts(), "hard": clashing}})
    trainer = tiny_trl.trainer(tmp_path, "grpo")
    with pytest.raises(ValueError, match=said):
        trainer.evaluate(clashing)


def test_every_argument_that_trl_gives_a_reward_function_is_reserved(tmp_path):
    """Read off TRL itself: a name that a later release adds must be added here."""
    given: set[str] = set()

    def reward(completions: list[str], **arguments: Any) -> list[float]:
        given.update(arguments)
        return [0.0] * len(completions)

    trainer = tiny_trl.trainer(tmp_path, "grpo", reward=reward)
    trainer.environments = [object()] * 2
    rows = [tiny_trl.prompts()[0]] * 2
    GRPOTrainer._calculate_rewards(trainer, rows, ["a"] * 2, ["b"] * 2, [[1]] * 2)
    assert given - set(rows[0]) | {"completions"} == set(RESERVED)


def test_completions_without_a_score_of_one_function_are_shown(tmp_path, capsys):
    def half(completions: list[str], **_: Any) -> list[float | None]:
        return [float(at % 2) if at % 4 < 2 else None for at in range(len(completions))]

    more = {"logging_steps": 1, "log_completions": True, "num_completions_to_print": 16}
    trainer = tiny_trl.trainer(tmp_path, "grpo", reward=[tiny_trl.starts_right, half], max_steps=1, **more)
    trainer.train()
    table = pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert table["half"].isna().sum() == 8


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


def test_groups_of_equal_sums_teach_nothing_however_the_sums_are_made_up(tmp_path):
    """As rewards are floats, 0.1 + 0.2 + 0.3 and 0.3 + 0.2 + 0.1 differ, and dynamic sampling would keep such groups."""

    def of(name: str, *scores: float) -> Any:
        def reward(completions: list[str], **_: Any) -> list[float]:
            return [scores[at % 3] for at in range(len(completions))]

        reward.__name__ = name
        return reward

    parts = [of("a", 0.1, 0.3, 0.2), of("b", 0.2, 0.1, 0.3), of("c", 0.3, 0.2, 0.1)]
    trainer = tiny_trl.trainer(tmp_path, "dapo", reward=parts, max_steps=2)
    added = [trainer.allocation.rewards.reward(each) for each in ([0.1, 0.2, 0.3], [0.3, 0.2, 0.1])]
    assert added == [0.6, 0.6]
    trainer.train()
    assert "barren" in str(trainer.allocation.finished)
    accounts = trainer.allocation.allocator.accounts()
    assert accounts["zero_variance"] == sum(accounts.values()) > 0


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
