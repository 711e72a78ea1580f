"""Columns that a run will read are checked in all rows, before a model generates anything."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import tiny_trl
from datasets import Dataset

from rollalloc.drivers.trl.dataset import check_conversations, check_environments, check_read_by_rewards, data_sets
from rollalloc.drivers.trl.rewards import RewardFunctions

GAMES = {"chess": object, "go": object}


def rows(count: int = 30, **other: Any) -> Dataset:
    """Rows that name an environment in turn; `other` values by row."""
    names = [tuple(GAMES)[row % 2] for row in range(count)]
    for row, name in other.pop("named", {}).items():
        names[row] = name
    return Dataset.from_dict({"environment": names, **other})


class OnlyByNumber:
    """A data set without the names of its columns."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {name: value for name, value in self.dataset[row].items() if value is not None}


@pytest.mark.parametrize("kind", [lambda dataset: dataset, OnlyByNumber])
def test_rows_that_name_no_known_environment_are_named(kind):
    check_environments(kind(rows()), "train_dataset", GAMES)
    wrong = kind(rows(named={17: "chessboard", 23: None}))
    with pytest.raises(
        ValueError,
        match=r"^train_dataset: row 17 has environment='chessboard'; row 23 has environment=None; .* 'chess', 'go'$",
    ):
        check_environments(wrong, "train_dataset", GAMES)
    with pytest.raises(ValueError, match=r"row 6 has .*; and so on, 7 rows in all; expected"):
        check_environments(kind(rows(named=dict.fromkeys(range(2, 9), "poker"))), "train_dataset", GAMES)
    with pytest.raises(ValueError, match=r"has no column `environment`; expected one of .* in each row"):
        check_environments(kind(tiny_trl.prompts(3)), "train_dataset", GAMES)


def test_a_trainer_with_several_environments_checks_all_data_that_it_reads(tmp_path):
    """By hand: the oldest TRL has no environments by name."""
    train = tiny_trl.prompts(30).add_column("environment", rows()["environment"])
    held_out = tiny_trl.prompts(4).add_column("environment", rows(4, named={3: "checkers"})["environment"])
    trainer = tiny_trl.trainer(tmp_path, "grpo", dataset=train, more={"eval_dataset": held_out})
    trainer._check_columns(trainer.allocation.rewards, GAMES)
    trainer.args.eval_strategy = "steps"
    trainer._check_columns(trainer.allocation.rewards, object)  # one environment for all rows
    with pytest.raises(ValueError, match="eval_dataset: row 3 has environment='checkers'"):
        trainer._check_columns(trainer.allocation.rewards, GAMES)


@pytest.mark.parametrize("prompt", ["text", None, [], ["text"]])
def test_a_prompt_that_is_no_conversation_is_refused_where_there_are_tools(prompt):
    talk = [{"role": "user", "content": "Look!"}]
    check_conversations([{"prompt": talk}] * 5, "train_dataset", ["tools"])
    check_conversations([{"environment": "go"}], "train_dataset", ["environment_factory"])  # which makes the prompt
    with pytest.raises(
        ValueError, match=r"environment_factory and tools need conversations, but row 4 of train_dataset"
    ):
        check_conversations(
            [{"prompt": talk}] * 4 + [{"prompt": prompt}], "train_dataset", ["tools", "environment_factory"]
        )


def checked(function: Any, dataset: Any, **how: Any) -> None:
    rewards = RewardFunctions([function], ["graded"], [1.0], [None])
    check_read_by_rewards(rewards, dataset, "train_dataset", **({"environments": False} | how))


def test_a_column_that_a_reward_function_needs_is_missed_at_the_start(tmp_path):
    def graded(prompts, completions, solution, *, answer, hint=None, log_metric, **_):
        return [0.0] * len(completions)

    with pytest.raises(
        ValueError, match=r"graded needs 'solution', but train_dataset has only the columns prompt, answer"
    ):
        tiny_trl.trainer(tmp_path, "grpo", reward=graded)
    solved = tiny_trl.prompts().add_column("solution", ["a"] * 40)
    held_out = {"eval_dataset": {"easy": solved, "hard": tiny_trl.prompts()}}
    tiny_trl.trainer(tmp_path, "grpo", reward=graded, dataset=solved, more=held_out)  # without evaluations
    with pytest.raises(ValueError, match=r"needs 'solution', but eval_dataset\['hard'\] has only"):
        tiny_trl.trainer(
            tmp_path, "grpo", reward=graded, dataset=solved, more=held_out, eval_strategy="steps", eval_steps=2
        )


def test_only_what_trl_passes_counts_as_given():
    dataset = tiny_trl.prompts(3)
    with pytest.raises(ValueError, match="needs 'prompt'"):
        checked(lambda prompt, **_: None, dataset)  # a column, but TRL passes `prompts`
    with pytest.raises(ValueError, match="needs 'environments'"):
        checked(lambda environments, **_: None, dataset)
    checked(lambda environments, **_: None, dataset, environments=True)


def test_what_is_bound_or_wrapped_is_not_asked_of_the_data():
    def graded(completions, solution, **_):
        return [0.0] * len(completions)

    @functools.wraps(graded)
    def wrapped(completions, **columns):
        return graded(completions, "a", **columns)

    for function in (functools.partial(graded, solution="a"), wrapped, print):
        checked(function, tiny_trl.prompts(3))
    with pytest.raises(ValueError, match="needs 'solution'"):
        checked(graded, tiny_trl.prompts(3))


def test_empty_rows_of_a_column_that_a_reward_function_names_are_said(caplog):
    dataset = (
        tiny_trl.prompts(12).remove_columns("answer").add_column("answer", ["a1"] * 7 + [None, "a2", None, None, "a3"])
    )
    checked(lambda completions, answer, **_: None, dataset)
    assert (
        "the column 'answer', which the reward function graded reads, is None in 3 of 12 rows, the first of them 7"
        in (caplog.text)
    )
    caplog.clear()
    checked(lambda completions, number, **_: None, dataset)
    assert not caplog.text


def test_held_out_data_that_stream_are_passed_over():
    train, held_out = tiny_trl.prompts(3), tiny_trl.prompts(2)
    sets = data_sets(train, {"kept": held_out, "stream": held_out.to_iterable_dataset()})
    assert [where for where, _ in sets] == ["train_dataset", "eval_dataset['kept']"]
    assert [where for where, _ in data_sets(train, held_out)] == ["train_dataset", "eval_dataset"]
    assert [where for where, _ in data_sets(train, None)] == ["train_dataset"]
