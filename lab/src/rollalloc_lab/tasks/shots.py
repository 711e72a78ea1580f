"""Few-shot questions for a pretrained model that was not trained for chat: solved questions, one a line, then an open one.

There are two families with short answers: the sum of two numbers, and three letters in reverse. Each
question has one right answer, so accuracy is computed exactly by teacher forcing. An answer ends with its line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rollalloc.tasks.files import Problem, TaskFiles, compute_score, make_once, prompt_files
from rollalloc_lab.tasks.ladder import pretrained_in

__all__ = ["FAMILIES", "Shots", "compute_score", "prepare"]

BASE = "gemma3"  # in `rollalloc.models.pretrained.MODELS`
_LINE = "\n"
_LETTERS = "abcdefghij"
_DRAWS = 50  # questions drawn for each prompt that is needed
LONGEST = 6  # tokens of the longest answer: three letters, two commas, and the end of the line


def _add(rng: np.random.Generator) -> tuple[str, str]:
    a, b = int(rng.integers(10, 100)), int(rng.integers(2, 10))
    return f"{a}+{b}=", str(a + b)


def _reverse(rng: np.random.Generator) -> tuple[str, str]:
    letters = [_LETTERS[at] for at in rng.integers(len(_LETTERS), size=3)]
    return f"reverse({','.join(letters)})=", ",".join(reversed(letters))


FAMILIES = {"add": _add, "reverse": _reverse}


@dataclass(frozen=True)
class Shots:
    """The questions' settings.

    Attributes:
        shown: number of solved questions before each question. They are the same in all prompts of a family.
        train: number of training prompts.
        heldout: number of held-out prompts, none of which is a training prompt.
        seed: seed of the questions.
    """

    shown: int = 3
    train: int = 1024
    heldout: int = 96
    seed: int = 59

    def problems(self, rng: np.random.Generator, count: int, taken: set[str]) -> Sequence[Problem]:
        """Draw this number of questions that are not in `taken`, families in turn, and add them to `taken`.

        Raises:
            ValueError: there are too few different questions.
        """
        names, found = list(FAMILIES), list[Problem]()
        shown = {name: self._shown(name) for name in names}
        for draw in range(_DRAWS * count):
            name = names[draw % len(names)]
            asked, answer = FAMILIES[name](rng)
            prompt = f"{shown[name]}{asked}"
            if prompt in taken or asked in shown[name]:
                continue
            taken.add(prompt)
            found.append(Problem(prompt, answer, {"family": name}))
            if len(found) == count:
                return found
        raise ValueError(f"expected {count} more different questions, found {len(found)}; ask for fewer")

    def _shown(self, family: str) -> str:
        rng = np.random.default_rng([self.seed, 0, *family.encode()])
        return "".join(
            f"{asked}{answer}{_LINE}" for asked, answer in (FAMILIES[family](rng) for _ in range(self.shown))
        )


@dataclass(frozen=True)
class _Lines:
    """The settings that the model's folder was created with."""

    base: str
    end: str


def prepare(folder: Path, shots: Shots = Shots()) -> TaskFiles:
    """Create the questions, and the model with the end of a line as its end of an answer, unless they exist.

    Raises:
        FileNotFoundError: the model is missing. The message names the command that creates it.
        ValueError: a folder does not belong to this task.
    """
    base = pretrained_in(folder, BASE, "the questions need")
    made = prompt_files(folder / "questions", shots, shots.problems, "shots")
    return TaskFiles(
        model=make_once(folder / f"{BASE}-lines", _Lines(BASE, _LINE), lambda to: _end_at_lines(base, to)),
        train=made / "train.parquet",
        heldout=made / "heldout.parquet",
        reward=f"{__name__}:compute_score",
        max_new_tokens=LONGEST,
        single_answer=True,
    )


def _end_at_lines(base: Path, to: Path) -> None:
    """Save the model with the end of a line as its token for the end of a sequence."""
    tokenizer: Any = AutoTokenizer.from_pretrained(str(base))
    tokenizer.eos_token = _LINE
    model = cast("PreTrainedModel", AutoModelForCausalLM.from_pretrained(str(base), use_safetensors=True))
    for settings in (model.config, model.generation_config):
        cast("Any", settings).eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(to)
    tokenizer.save_pretrained(to)
