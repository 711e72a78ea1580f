"""Sort: a prompt is two to fourteen symbols, duplicates allowed; the one right answer is the same symbols in order.

The warm-up is plain supervised training that stops early: short prompts are mostly solved, long ones hardly ever. Graded,
an answer gets marks for each place that is right, so that hardly a group's rewards are equal and none is 0 for long.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rollalloc.bench.tasks.files import Problem, TaskFiles, compute_score, make_once, write_splits
from rollalloc.bench.tasks.tiny import SEPARATOR, Examples, WarmUp, save_warm_model, spell, word_tokenizer

__all__ = ["Config", "compute_score", "graded_score", "prepare"]

SHORTEST, LONGEST = 2, 14
GRADED = "sort/graded"
_GRADED_SHARE = 4  # of the held-out prompts one in so many, since each is sampled several times


@dataclass(frozen=True)
class Config:
    """Sizes and seeds of the task; the defaults are the task itself, other values are for tests.

    Attributes:
        symbols: number of symbols.
        train: training prompts.
        heldout: held-out prompts.
        warm_up: the supervised training of the initial model.
        seed: of the warm-up data and the prompts.
    """

    symbols: int = 32
    train: int = 8192
    heldout: int = 1024
    warm_up: WarmUp = field(default_factory=lambda: WarmUp(steps=150))
    seed: int = 12


def graded_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """The share of places that are right: #{i: answer_i = truth_i} / max(|answer|, |truth|), in [0, 1].

    It is 1 for the right answer alone: what is left out, and what is one too many, is a place that is wrong.
    """
    answer, truth = solution_str.split(), ground_truth.split()
    return sum(map(str.__eq__, answer, truth)) / max(len(answer), len(truth))


def prepare(folder: Path, config: Config = Config(), *, graded: bool = False) -> TaskFiles:
    """Make the task's files, or find them made.

    Args:
        folder: holds the model, which both kinds of marks share, and the prompts of each.
        config: sizes and seeds.
        graded: marks for each place that is right; only full marks else. Its held-out prompts are a quarter as many.

    Raises:
        ValueError: a folder that was made with another configuration.
    """

    def make_model(to: Path) -> None:
        rng = np.random.default_rng([config.seed, 0])
        words = spell("s", np.arange(config.symbols)).split()
        save_warm_model(to, word_tokenizer(words), config.warm_up, partial(_examples, config.symbols, rng))

    def make_prompts(to: Path) -> None:
        sizes = {"train": sized.train, "heldout": sized.heldout}
        draw = partial(_problems, config.symbols)
        write_splits(to, sizes, draw, data_source=GRADED if graded else "sort", seed=config.seed)

    sized = replace(config, heldout=-(-config.heldout // _GRADED_SHARE)) if graded else config
    model = make_once(folder / "model", config, make_model)
    prompts = make_once(folder / ("graded" if graded else "prompts"), sized, make_prompts)
    return TaskFiles(
        model=model,
        train=prompts / "train.parquet",
        heldout=prompts / "heldout.parquet",
        reward=f"{__name__}:{'graded_score' if graded else 'compute_score'}",
        max_new_tokens=LONGEST + 1,
        single_answer=not graded,
    )


def _problems(symbols: int, rng: np.random.Generator, count: int, taken: set[str]) -> list[Problem]:
    """Problems with prompts that are not taken; the drawn ones become taken."""
    found: list[Problem] = []
    while len(found) < count:
        for prompt, answer in zip(*_examples(symbols, rng, count), strict=True):
            if prompt not in taken and len(found) < count:
                taken.add(prompt)
                found.append(Problem(prompt, answer))
    return found


def _examples(symbols: int, rng: np.random.Generator, examples: int) -> Examples:
    """Prompts of uniform length and their answers."""
    drawn = [rng.integers(symbols, size=length) for length in rng.integers(SHORTEST, LONGEST + 1, size=examples)]
    prompts = [f"{spell('s', symbols_L)} {SEPARATOR}" for symbols_L in drawn]
    return prompts, [spell("s", np.sort(symbols_L)) for symbols_L in drawn]
