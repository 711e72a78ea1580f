"""Sort: a prompt is two to fourteen symbols, duplicates allowed; the only right answer is the same symbols, sorted.

The warm-up is plain supervised training that stops early: short prompts are mostly solved, long prompts rarely.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from rollalloc.tasks.files import Problem, Shown, TaskFiles, compute_score, make_once, prompt_files, unseen
from rollalloc.tasks.tiny import SEPARATOR, Examples, WarmUp, save_warm_model, spell, word_tokenizer

__all__ = ["SortConfig", "compute_score", "prepare"]

SHORTEST, LONGEST = 2, 14


@dataclass(frozen=True)
class SortConfig:
    """Sizes and seeds of the task. The defaults define the task; other values are for tests."""

    symbols: int = 32
    train: int = 8192
    heldout: int = 1024
    warm_up: WarmUp = field(default_factory=lambda: WarmUp(steps=150))
    seed: int = 12


def prepare(folder: Path, config: SortConfig = SortConfig(), *, progress: Shown = unseen) -> TaskFiles:
    """Create the task's files unless they exist.

    Raises:
        ValueError: the folder was created with another configuration.
    """

    def make_model(to: Path) -> None:
        rng = np.random.default_rng([config.seed, 0])
        words = spell("s", np.arange(config.symbols)).split()
        save_warm_model(
            to, word_tokenizer(words), config.warm_up, partial(_examples, config.symbols, rng), shown=progress
        )

    model = make_once(folder / "model", config, make_model)
    prompts = prompt_files(folder / "prompts", config, partial(_problems, config.symbols), "sort")
    return TaskFiles(
        model=model,
        train=prompts / "train.parquet",
        heldout=prompts / "heldout.parquet",
        reward=f"{__name__}:compute_score",
        max_new_tokens=LONGEST + 1,
        single_answer=True,
    )


def _problems(symbols: int, rng: np.random.Generator, count: int, taken: set[str]) -> list[Problem]:
    """Draw problems whose prompts are not in `taken`, and add these prompts to it."""
    found: list[Problem] = []
    while len(found) < count:
        for prompt, answer in zip(*_examples(symbols, rng, count), strict=True):
            if prompt not in taken and len(found) < count:
                taken.add(prompt)
                found.append(Problem(prompt, answer))
    return found


def _examples(symbols: int, rng: np.random.Generator, examples: int) -> Examples:
    """Draw prompts, of uniformly distributed length, and their answers."""
    drawn = [rng.integers(symbols, size=length) for length in rng.integers(SHORTEST, LONGEST + 1, size=examples)]
    prompts = [f"{spell('s', symbols_L)} {SEPARATOR}" for symbols_L in drawn]
    return prompts, [spell("s", np.sort(symbols_L)) for symbols_L in drawn]
