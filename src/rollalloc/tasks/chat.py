"""Tasks for a small pretrained chat model: questions of reasoning-gym, and word problems from templates.

Each task is a folder with two Parquet files in verl's schema. A prompt has an instruction, a solved example and the
question. Without the example, a model of this size talks instead of answering. With these settings SmolLM2-135M-Instruct is
right some of the time (lab/log), so there is something to learn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rollalloc.rewards.answers import numeric
from rollalloc.tasks import gym, stories
from rollalloc.tasks.files import Problem, make_once, write_splits

__all__ = ["CHAT_TASKS", "ChatFiles", "ChatTask", "compute_score", "prepare"]

REWARD = f"{__name__}:compute_score"
_STORIES = "stories"


@dataclass(frozen=True)
class ChatTask:
    """A task in chat form. No prompt is in both `train` and `heldout`.

    Attributes:
        about: a description of the questions.
        gym: the task's name in reasoning-gym. None: the task has word problems from templates.
        settings: settings of the question generator that differ from its defaults.
        number: True: the answer is a number, and the last number of a completion counts. False: the whole completion is
            the answer.
        system: the message before the question.
        max_new_tokens: number of tokens that a rollout needs.
    """

    about: str
    gym: str | None
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    number: bool = True
    system: str = "Answer with a number only."
    max_new_tokens: int = 12
    train: int = 2048
    heldout: int = 128
    seed: int = 15


CHAT_TASKS = {
    "sums": ChatTask(
        "sums and differences of two or three digits",
        "chain_sum",
        {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    ),
    "products": ChatTask(
        "products of two numbers, of one or two digits",
        "products",
        {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    ),
    "gcd": ChatTask(
        "greatest common divisors of two numbers below 100",
        "gcd",
        {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 99},
    ),
    "letters": ChatTask(
        "how often a letter stands in two to six words", "letter_counting", {"min_words": 2, "max_words": 6}
    ),
    "filter": ChatTask(
        "which of two or three numbers are above or below another",
        "number_filtering",
        {"min_numbers": 2, "max_numbers": 3, "max_decimals": 0, "min_value": 0, "max_value": 20},
        number=False,
        system="Answer with the list only.",
        max_new_tokens=24,
    ),
    "stories": ChatTask("word problems of one or two steps", None, max_new_tokens=24),
}


@dataclass(frozen=True)
class ChatFiles:
    """A task on disk: Parquet files of prompts, and the number of tokens that a rollout needs."""

    train: Path
    heldout: Path
    max_new_tokens: int


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]) -> float:
    """1.0 for a right answer, otherwise 0.0. `extra_info["number"]` says whether the answer is a number."""
    if extra_info["number"]:
        return numeric(
            data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=dict(extra_info)
        )
    return gym.compute_score(data_source, solution_str, ground_truth, extra_info)


def prepare(folder: Path, task: ChatTask) -> ChatFiles:
    """Create the task's files in its own folder, unless they exist.

    Raises:
        ValueError: there are too few different questions; or the folder does not belong to a task, or was created with
            another configuration.
        ImportError: reasoning-gym is not installed.
    """

    def make(to: Path) -> None:
        sizes = {"train": task.train, "heldout": task.heldout}
        source = _STORIES if task.gym is None else f"{gym.PREFIX}{task.gym}"
        draw, taken = _drawer(task), set[str]()
        (example,) = draw(np.random.default_rng([task.seed, 0]), 1, taken)

        def rest(rng: np.random.Generator, count: int, taken_too: set[str]) -> Sequence[Problem]:
            taken_too |= taken  # the solved example must not be asked as a question
            return draw(rng, count, taken_too)

        chat = partial(_messages, task.system, example)
        write_splits(to, sizes, rest, data_source=source, seed=task.seed, chat=chat)

    made = make_once(folder, task, make)
    return ChatFiles(made / "train.parquet", made / "heldout.parquet", task.max_new_tokens)


def _messages(system: str, example: Problem, question: str) -> list[dict[str, str]]:
    said = (("system", system), ("user", example.prompt), ("assistant", example.answer), ("user", question))
    return [{"role": role, "content": content} for role, content in said]


def _drawer(task: ChatTask) -> Callable[[np.random.Generator, int, set[str]], Sequence[Problem]]:
    if task.gym is None:
        return stories.problems
    return partial(_gym_problems, gym.GymConfig(task.gym, task.settings), task.number)


def _gym_problems(
    config: gym.GymConfig, number: bool, rng: np.random.Generator, count: int, taken: set[str]
) -> list[Problem]:
    """Draw different questions. At most a quarter of them have the same answer.

    Without this limit, 70% of `letters` and 78% of `gcd` would have the answer 1, and a policy would learn only to say 1.
    """
    found: list[Problem] = []
    answered: Counter[str] = Counter()
    while len(found) < count:
        for each in gym.problems(config, rng, count, taken):
            if len(found) < count and answered[each.answer] < -(-count // 4):
                answered[each.answer] += 1
                found.append(Problem(each.prompt, each.answer, {"number": number}))
    return found
