"""What a task is on disk: a model, two prompt files in verl's schema, and the reward that they share."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rollalloc.data.prompts import write_prompts
from rollalloc.files.claims import refuse
from rollalloc.files.opening import opened

SETTINGS = "settings.json"  # of a task's folder: how it was made
Shown = Callable[[str, int, int], None]  # what is being made, how much of it is done, of how much


def unseen(what: str, done: int, of: int) -> None:
    """Shows nothing of how far it is."""


@dataclass(frozen=True)
class TaskFiles:
    """A task in the form a user would bring one.

    Attributes:
        model: folder with a model and its tokenizer, for `from_pretrained`.
        train: parquet of training prompts in verl's schema.
        heldout: parquet of held-out prompts; no prompt is in both.
        reward: `package.module:function` with verl's `compute_score` signature.
        max_new_tokens: tokens of the longest right answer, EOS included.
        single_answer: each prompt has exactly one right answer, so that `exact_answers` applies.
        can_hang: the reward may never return, so that it needs a process of its own.
        device: that it is trained on; None: a GPU where there is one.
    """

    model: Path
    train: Path
    heldout: Path
    reward: str
    max_new_tokens: int
    single_answer: bool
    can_hang: bool = False
    device: str | None = "cpu"


@dataclass(frozen=True, slots=True)
class Problem:
    """One prompt with its right answer, both as space-separated tokens, and what else is known of it."""

    prompt: str
    answer: str
    extra: dict[str, Any] = field(default_factory=dict)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """1.0 where the answer's tokens are exactly the right ones, else 0.0; white space does not count."""
    return float(solution_str.split() == ground_truth.split())


def graded_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """The share of places that are right: #{i: answer_i = truth_i} / max(|answer|, |truth|), in [0, 1].

    It is 1 for the right answer alone: what is left out, and what is one too many, is a place that is wrong.
    """
    answer, truth = solution_str.split(), ground_truth.split()
    return sum(map(str.__eq__, answer, truth)) / max(len(answer), len(truth))


def write_splits(
    folder: Path,
    sizes: dict[str, int],
    draw: Callable[[np.random.Generator, int, set[str]], Sequence[Problem]],
    *,
    data_source: str,
    seed: int,
    chat: Callable[[str], list[dict[str, str]]] | None = None,
) -> None:
    """Write `<split>.parquet` for each split, in verl's schema; no prompt occurs twice, in one split or in two.

    Args:
        sizes: split → number of prompts.
        draw: (random generator, number of problems, prompts that are taken) → that many problems of untaken prompts;
            it adds their prompts to the taken ones.
        data_source: e.g. "skills/late"; what stands before its first slash is the ability.
        seed: each split draws from a generator of its own under this seed.
        chat: prompt → its messages; None: prompts are text.
    """
    taken: set[str] = set()
    for stream, (split, size) in enumerate(sizes.items(), start=1):
        rows = [
            {
                "data_source": data_source,
                "prompt": chat(problem.prompt) if chat else problem.prompt,
                "ability": data_source.partition("/")[0],
                "reward_model": {"style": "rule", "ground_truth": problem.answer},
                "extra_info": {"split": split, "index": index, **problem.extra},
            }
            for index, problem in enumerate(draw(np.random.default_rng([seed, stream]), size, taken))
        ]
        write_prompts(folder / f"{split}.parquet", rows)


def prompt_files(
    folder: Path, config: Any, draw: Callable[[np.random.Generator, int, set[str]], Sequence[Problem]], data_source: str
) -> Path:
    """The folder of a task's prompts, made unless it is there; `config` has how many there are, and the seed."""
    sizes = {"train": config.train, "heldout": config.heldout}
    return make_once(
        folder, config, lambda to: write_splits(to, sizes, draw, data_source=data_source, seed=config.seed)
    )


def make_once(target: Path, settings: Any, make: Callable[[Path], None]) -> Path:
    """The folder `target`, made by `make` unless it is there already; whole or not at all.

    `make` fills a folder beside the target that is moved into place when complete, so a killed run leaves no half
    folder. Of several processes one makes it and the others wait.

    Args:
        settings: a dataclass of all that decides the contents; kept in the folder.
        make: writes the contents into the folder it is given.

    Raises:
        ValueError: the folder is there, but was made with other settings.
    """
    wanted = json.dumps(asdict(settings), indent=2)
    if not os.path.lexists(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        # A lock dies with its process, so what lies in `partial` under the lock is from a run that was killed.
        with opened(target.with_name(f".{target.name}.lock"), os.O_RDWR | os.O_CREAT) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.path.lexists(target):
                partial = _emptied(target.with_name(f".{target.name}.partial"))
                (partial / SETTINGS).write_text(wanted)  # first: it says whose the folder is
                try:
                    make(partial)
                except BaseException:  # Ctrl-C as well
                    shutil.rmtree(partial, ignore_errors=True)
                    raise
                partial.rename(target)
    if not (target / SETTINGS).is_file():
        raise ValueError(f"{target} is no task of rollalloc, there is no {SETTINGS} in it; choose another folder")
    found = (target / SETTINGS).read_text()
    if found != wanted:
        raise ValueError(f"expected {target} made with {wanted}, found {found}; delete it or choose another folder")
    return target


def _emptied(partial: Path) -> Path:
    """An empty folder in which a target is made, without what a call that was killed left.

    Raises:
        FileExistsError: somebody else has a folder of that name.
    """
    if os.path.lexists(partial):
        if not (partial / SETTINGS).is_file() and any(partial.iterdir()):
            refuse(partial.parent, [partial.name], "move it away, or choose another folder")
        shutil.rmtree(partial)
    partial.mkdir()
    return partial
