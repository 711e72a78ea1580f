"""Find the evaluation rows of TRL's log; an evaluation overwrites the file of its step and marks nothing.

If a checkpoint lies beside the log, its trainer state lists the steps of evaluations. Otherwise evaluations are recognized
by their prompts, which always have the same order, while training prompts are shuffled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import comb, exp, log, perm
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollalloc.lab.waste.groups import Groups

_TAIL = 3  # number of last prompts by which files are compared
_BY_CHANCE = 1e-3  # files end alike for a reason if fewer such sets than this are expected by chance
_STATE = "trainer_state.json"


@dataclass(frozen=True, slots=True)
class TrainerState:
    """TRL's saved trainer state: the steps with an evaluation, and the step at which it was saved."""

    evaluated: frozenset[int]
    until: int


def states_of(files: Sequence[Path]) -> dict[Path, TrainerState]:
    """The latest trainer state for each log folder that has one."""
    states: dict[Path, TrainerState] = {}
    for folder in {file.parent for file in files}:
        states_here = [state for output in (folder, folder.parent) for state in _states_in(output)]
        if states_here:
            states[folder] = max(states_here, key=lambda state: state.until)
    return states


def _states_in(output: Path) -> Iterator[TrainerState]:
    for path in (output / _STATE, *output.glob(f"checkpoint-*/{_STATE}")):
        try:
            state: Any = json.loads(path.read_text(encoding="utf-8"))
            history = [line for line in state["log_history"] if any(name.startswith("eval_") for name in line)]
            yield TrainerState(frozenset(int(line["step"]) for line in history), int(state["global_step"]))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue  # no state, or a half-written one


def evaluated(
    groups: Groups, file_V: NDArray[np.int64], files: Sequence[Path], states: Mapping[Path, TrainerState]
) -> NDArray[np.bool_]:
    """Which groups belong to evaluations, shape (V,).

    A file holds the last generation batch. If an evaluation has fewer rows than that, the file ends with them and begins
    with training rows.

    Args:
        groups: all that was read.
        file_V: index of each group's file, in the order of reading.
        files: paths by that index.
        states: from `states_of`.
    """
    found_V = np.zeros(len(groups), np.bool_)
    begins = np.searchsorted(file_V, np.arange(len(files) + 1))
    spans = {at: slice(begins[at], begins[at + 1]) for at in range(len(files)) if begins[at] < begins[at + 1]}
    for folder in {file.parent for file in files}:
        in_folder = [at for at in spans if files[at].parent == folder]
        state = states.get(folder)
        sure = [at for at in in_folder if state is not None and int(groups.step_V[spans[at].start]) in state.evaluated]
        open_ = [at for at in in_folder if state is None or int(groups.step_V[spans[at].start]) > state.until]
        prompts = {at: groups.prompt_V[spans[at]].tolist() for at in in_folder}
        for shared in _ends_alike({at: prompts[at] for at in sure}):
            for at, visits in shared.items():
                found_V[_end(spans[at], visits or len(prompts[at]))] = True
        different = len({prompt for at in open_ for prompt in prompts[at]})
        for shared in _ends_alike({at: prompts[at] for at in open_}):
            expected = {
                visits: _expected(len(open_), sum(more >= visits for more in shared.values()), different, visits)
                for visits in shared.values()
                if visits
            }
            for at, most in shared.items():
                visits = min(
                    (candidate for candidate in expected if candidate <= most), key=expected.__getitem__, default=0
                )
                if visits and expected[visits] < _BY_CHANCE:
                    found_V[_end(spans[at], visits)] = True
    return found_V


def _expected(files: int, alike: int, prompts: int, visits: int) -> float:
    """Expected number of sets of `alike` files that end with the same visits by chance.

    If prompts are drawn without replacement, it is C(files, alike) / (prompts · (prompts − 1) ⋯)^(alike − 1).
    """
    orders = perm(prompts, min(visits, prompts))
    return exp(log(comb(files, alike)) - (alike - 1) * log(orders))


def _end(span: slice, visits: int) -> slice:
    return slice(span.stop - visits, span.stop)


def _ends_alike(prompts: Mapping[int, list[int]]) -> list[dict[int, int]]:
    """Sets of files that end with the same prompts; for each file, how many of its last visits another file shares."""
    by_tail: dict[tuple[int, ...], dict[int, int]] = {}
    for at, visits in prompts.items():
        by_tail.setdefault(tuple([*dict.fromkeys(reversed(visits))][:_TAIL]), {})[at] = 0
    for shared in by_tail.values():
        for first, second in pairwise(shared):
            common = _common_end(prompts[first], prompts[second])
            shared |= {at: max(shared[at], common) for at in (first, second)}
    return [*by_tail.values()]


def _common_end(first: list[int], second: list[int]) -> int:
    """Number of visits at the end with the same prompts in the same order."""
    most = min(len(first), len(second))
    return next((at for at in range(most) if first[-1 - at] != second[-1 - at]), most)
