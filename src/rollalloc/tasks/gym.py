"""Tasks of reasoning-gym, for a model of some hundred thousand parameters.

A task's questions and answers are written to prompt files once. Each question has exactly one right answer. So no verifier
is needed, and accuracy is exact.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rollalloc.data.prompts import load_prompts
from rollalloc.tasks.files import Problem, Shown, TaskFiles, make_once, unseen, write_splits
from rollalloc.tasks.tiny import Examples, Shape, WarmUp, character_tokenizer, save_warm_model

__all__ = ["LADDER", "GymConfig", "compute_score", "prepare"]

PREFIX = "rg/"
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_QUOTED = re.compile(r"'([^']*)'")  # an item of a list as Python prints it
WARM_UP_POOL = 16_384  # number of questions for the warm-up
_DRAWS = 50  # questions drawn for each prompt that is needed; if too few differ, the task is too small


@dataclass(frozen=True)
class GymConfig:
    """A task of reasoning-gym with one right answer per question, and the tiny model that is warmed up for it.

    Attributes:
        settings: settings of the question generator that differ from its defaults.
        heldout: number of held-out prompts. The warm-up does not see them.
        wrong: share of warm-up examples that have another question's answer. These examples make the model sample wrong
            answers to questions that it could answer, and reinforcement learning can correct this.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    train: int = 2048
    heldout: int = 256
    warm_up: WarmUp = field(default_factory=lambda: WarmUp(steps=1000))
    wrong: float = 0.0
    hidden: int = 64
    layers: int = 2
    seed: int = 13

    def draw(self, rng: np.random.Generator, prompts: list[str], answers: list[str], count: int) -> Examples:
        """Draw warm-up examples from these questions and answers."""
        asked, other = rng.integers(len(prompts), size=(2, count))
        answered = np.where(rng.random(count) < self.wrong, other, asked)
        return [prompts[index] for index in asked], [answers[index] for index in answered]


@dataclass(frozen=True)
class Misled(GymConfig):
    """A task of filtering lists. The warm-up shows one kind of mistake: an answer with the items that should be left out.

    Each condition has its own rate of mistakes, uniform in [0, most]. With a rate above 1/2, the initial greedy answer is
    wrong. So to exceed the initial greedy accuracy, a method must learn from right answers that are only found by sampling.

    Attributes:
        most: maximum rate of mistakes, in [0, 1].
    """

    most: float = 0.95

    def condition(self, question: str) -> str:
        """The part of the question that determines the rate of mistakes."""
        return question.partition(" in this list")[0]

    def mistake(self, question: str, answer: str) -> str:
        """The mistaken answer."""
        right = set(_QUOTED.findall(answer))
        return str([number for number in _QUOTED.findall(question) if number not in right])

    def draw(self, rng: np.random.Generator, prompts: list[str], answers: list[str], count: int) -> Examples:
        rates = self.rates(prompts)
        asked, drawn = rng.integers(len(prompts), size=count).tolist(), rng.random(count).tolist()
        examples = [(prompts[at], answers[at]) for at in asked]
        shown = [
            answer if u >= rates[self.condition(question)] else self.mistake(question, answer)
            for (question, answer), u in zip(examples, drawn, strict=True)
        ]
        return [question for question, _ in examples], shown

    def rates(self, prompts: Sequence[str]) -> dict[str, float]:
        """The rate of mistakes of each condition."""
        conditions = sorted(set(map(self.condition, prompts)))
        drawn = np.random.default_rng([self.seed, 4]).uniform(0, self.most, len(conditions))
        return dict(zip(conditions, drawn.tolist(), strict=True))


LADDER = {
    "rg/gcd": GymConfig(
        "gcd",
        {"min_value": 1, "max_value": 99},
        warm_up=WarmUp(steps=200),
        wrong=0.3,
    ),
    "rg/number_filtering_misled": Misled(
        "number_filtering",
        {"min_numbers": 2, "max_numbers": 3, "max_decimals": 0, "min_value": 0, "max_value": 9},
        warm_up=WarmUp(steps=600),
    ),
    # Further tasks, on which no method was tuned.
    "rg/letter_counting": GymConfig(
        "letter_counting",
        {"min_words": 2, "max_words": 4},
        warm_up=WarmUp(steps=300),
    ),
    "rg/spell_backward": GymConfig(
        "spell_backward",
        {"min_word_len": 3, "max_word_len": 8},
        warm_up=WarmUp(steps=500),
    ),
    "rg/count_bits": GymConfig(
        "count_bits",
        {"min_n": 1, "max_n": 8191},
        warm_up=WarmUp(steps=300),
    ),
    "rg/simple_equations": GymConfig(
        "simple_equations",
        {"min_terms": 2, "max_terms": 2, "min_value": 1, "max_value": 9},
        warm_up=WarmUp(steps=300),
    ),
}


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """1.0 for the right answer, otherwise 0.0. If there are `<answer>` tags, the text in the last pair counts."""
    tagged = _ANSWER.findall(solution_str)
    return float((tagged[-1] if tagged else solution_str).strip() == ground_truth.strip())


def prepare(folder: Path, task: str, config: GymConfig | None = None, *, progress: Shown = unseen) -> TaskFiles:
    """Create the task's files unless they exist. For tests, `config` replaces the task's own configuration.

    Raises:
        ValueError: there are too few different questions, or the folder was created with another configuration.
        ImportError: reasoning-gym is not installed.
    """
    config = config or LADDER[task]

    def make(to: Path) -> None:
        sizes = {"train": config.train, "heldout": config.heldout}
        write_splits(to, sizes, partial(problems, config), data_source=task, seed=config.seed)
        train, heldout = load_prompts(to / "train.parquet"), load_prompts(to / "heldout.parquet")
        prompts, answers = _warm_up_examples(config, frozenset(map(str, heldout.prompts)))
        every_prompt = [*prompts, *map(str, train.prompts), *map(str, heldout.prompts)]
        every_answer = [*answers, *map(str, train.ground_truths), *map(str, heldout.ground_truths)]
        tokenizer = character_tokenizer(every_prompt, every_answer)
        longest = [max(map(len, tokenizer(texts)["input_ids"])) for texts in (every_prompt, every_answer)]
        rng = np.random.default_rng([config.seed, 0])
        shape = Shape(config.hidden, config.layers, context=sum(longest) + 1)
        draw = partial(config.draw, rng, prompts, answers)
        save_warm_model(to / "model", tokenizer, config.warm_up, draw, shape, shown=progress)
        (to / "rollout.json").write_text(json.dumps({"max_new_tokens": longest[1] + 1}))

    made = make_once(folder, config, make)
    return TaskFiles(
        model=made / "model",
        train=made / "train.parquet",
        heldout=made / "heldout.parquet",
        reward=f"{__name__}:compute_score",
        max_new_tokens=json.loads((made / "rollout.json").read_text())["max_new_tokens"],
        single_answer=True,
    )


def problems(config: GymConfig, rng: np.random.Generator, count: int, taken: set[str]) -> list[Problem]:
    """Draw different questions that are not in `taken`, and add them to it."""
    found: list[Problem] = []
    seed = int(rng.integers(2**31))
    for entry in installed().create_dataset(config.name, size=_DRAWS * count, seed=seed, **config.settings):
        if entry["question"] in taken:
            continue
        taken.add(entry["question"])
        found.append(Problem(entry["question"], entry["answer"]))
        if len(found) == count:
            return found
    raise ValueError(
        f"expected {count} more different questions of {config.name}, found {len(found)} in {_DRAWS * count}; "
        "ask for fewer, or for harder ones"
    )


def _warm_up_examples(config: GymConfig, heldout: frozenset[str]) -> Examples:
    """Questions that are not held out, with their answers."""
    rng = np.random.default_rng([config.seed, 3])
    seed = int(rng.integers(2**31))
    entries = installed().create_dataset(config.name, size=WARM_UP_POOL, seed=seed, **config.settings)
    kept = [(entry["question"], entry["answer"]) for entry in entries if entry["question"] not in heldout]
    return [question for question, _ in kept], [answer for _, answer in kept]


def installed() -> Any:
    """The package reasoning-gym.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError:
        raise ImportError("tasks of reasoning-gym need the package; pip install rollalloc[tasks]") from None
