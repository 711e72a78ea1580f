"""A task on disk: a model, two prompt files in verl's schema, and their reward."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rollalloc.data.prompts import write_prompts
from rollalloc.files.claims import refuse_foreign
from rollalloc.files.regular import opened

SETTINGS = "settings.json"  # the file that records a task's settings, in the task's folder


class Shown(Protocol):
    """Shows the progress of a stage.

    Its arguments:

    - `what`: the stage.
    - `done`: number of its parts that are done.
    - `of`: number of its parts.
    - `right`: expected share of right tokens, if the stage trains a model; None otherwise.
    """

    def __call__(self, what: str, done: int, of: int, right: float | None = None, /) -> None: ...


def unseen(what: str, done: int, of: int, right: float | None = None, /) -> None:
    """Ignores progress."""


@dataclass(frozen=True)
class TaskFiles:
    """A task as files, in the form in which a user would supply it.

    Attributes:
        model: folder with a model and its tokenizer, for `from_pretrained`.
        train: Parquet file of training prompts in verl's schema.
        heldout: Parquet file of held-out prompts, none of which is a training prompt.
        reward: `package.module:function` with the signature of verl's `compute_score`.
        max_new_tokens: number of tokens of the longest right answer, including EOS.
        single_answer: True if each prompt has exactly one right answer, so that accuracy can be computed exactly.
        device: the device to train on. None: a GPU if there is one.
    """

    model: Path
    train: Path
    heldout: Path
    reward: str
    max_new_tokens: int
    single_answer: bool
    device: str | None = "cpu"


@dataclass(frozen=True, slots=True)
class Problem:
    """One prompt with its right answer, both as space-separated tokens, and extra information."""

    prompt: str
    answer: str
    extra: dict[str, Any] = field(default_factory=dict)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """1.0 if the answer has exactly the right tokens, otherwise 0.0. White space is ignored."""
    return float(solution_str.split() == ground_truth.split())


def graded_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """The share of right positions: #{i: answer_i = truth_i} / max(|answer|, |truth|), in [0, 1].

    Only the right answer scores 1, because missing and superfluous tokens count as wrong positions.
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
    """Write `<split>.parquet` for each split, in verl's schema. Every prompt is written only once, in one split.

    Args:
        folder: folder of the files.
        sizes: number of prompts of each split.
        draw: called with a random generator, a number of problems, and the set of prompts drawn so far. It returns this
            number of new problems, and adds their prompts to the set.
        data_source: for example "skills/late". The part before the first slash is the ability.
        seed: seed. Each split has its own random generator.
        chat: converts a prompt to messages. None: prompts are text.
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
    """The folder of a task's prompts, created if it does not exist. `config` has the numbers of prompts and the seed."""
    sizes = {"train": config.train, "heldout": config.heldout}
    return make_once(
        folder, config, lambda to: write_splits(to, sizes, draw, data_source=data_source, seed=config.seed)
    )


def make_once(target: Path, settings: Any, make: Callable[[Path], None]) -> Path:
    """The folder `target`. If it does not exist, `make` creates it, completely or not at all.

    `make` fills a temporary folder beside the target. The temporary folder is renamed when it is complete. If several
    processes call this, one of them creates the folder and the others wait.

    Args:
        target: the folder.
        settings: a dataclass of everything that determines the contents. It is saved in the folder.
        make: writes the contents into the folder that it gets.

    Raises:
        ValueError: the folder exists, but was created with other settings.
    """
    wanted = json.dumps(asdict(settings), indent=2)
    if not os.path.lexists(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        # The lock is freed when its process dies. So if there are files in `partial` while this process holds the lock, the
        # process that wrote them has died.
        with opened(target.with_name(f".{target.name}.lock"), os.O_RDWR | os.O_CREAT) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.path.lexists(target):
                partial = _emptied(target.with_name(f".{target.name}.partial"))
                (partial / SETTINGS).write_text(wanted)  # first, because this file marks the folder as ours
                try:
                    make(partial)
                except BaseException:  # including Ctrl-C
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
    """An empty temporary folder in which to create a target. Files of a killed call are removed from it.

    Raises:
        FileExistsError: a folder with this name is not ours.
    """
    if os.path.lexists(partial):
        if not (partial / SETTINGS).is_file() and any(partial.iterdir()):
            refuse_foreign(partial.parent, [partial.name], "move it away, or choose another folder")
        shutil.rmtree(partial)
    partial.mkdir()
    return partial
