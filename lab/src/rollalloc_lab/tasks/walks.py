"""Walks: a prompt names two cells of a maze, and any walk along open passages from one to the other is right.

So a prompt has many right answers of very different lengths, and the task shows how a method changes the diversity of
answers. The warm-up data are walks of a lost walker. The walker heads for some goals more often than for others, mistakes
each wall for a passage at that wall's own rate, and sometimes gives up. Some walks are very long or take detours. The
walker's success rate is computed exactly for every prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollalloc.tasks.files import Problem, Shown, TaskFiles, make_once, prompt_files, unseen
from rollalloc.tasks.skills import Pool
from rollalloc.tasks.tiny import SEPARATOR, Examples, Shape, WarmUp, save_warm_model, spell, word_tokenizer
from rollalloc_lab.tasks.bands import chosen_by_rate

LIMIT = 24  # maximum tokens of a walk, EOS included
PROMPT = 3  # tokens of a prompt
# Limit of the pools with long walks: half of the lost walker's walks end within 12 tokens, and one in twenty exceeds
# 128.
LONG = 128
VERBOSE = 0.6  # share of aimless walks in the pool "brief", where right answers are short

POOLS = {
    "mixed": Pool(edges=(0.1, 0.4), shares=(0.3, 0.3, 0.4)),
    "late": Pool(edges=(0.1, 0.9), shares=(0.2, 0.3, 0.5)),
    "long": Pool(edges=(0.1, 0.4), shares=(0.25, 0.3, 0.45)),
    "brief": Pool(edges=(0.3, 0.4), shares=(0.25, 0.5, 0.25)),
}


@dataclass(frozen=True)
class WalksConfig:
    """Sizes and seeds of the task. The defaults define the task; other values are for tests.

    A share `walls` of the passages between neighbours is closed, but every cell can be reached from every other. Half
    of the warm-up uses walks that cross no wall, the other half uses the lost walker's walks.
    """

    side: int = 9
    walls: float = 0.22
    train: int = 3072
    heldout: int = 256
    warm_up: WarmUp = field(default_factory=lambda: WarmUp(steps=1500))
    seed: int = 13


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """1.0 for a walk of at least one step that uses only open passages and ends at the goal; else 0.0.

    Args:
        solution_str: cells as words, "c12 c13 c22", without the start.
        ground_truth: JSON with `side`, `start`, `goal` and `walls`; each wall is a pair of neighbours without a passage.
    """
    side, start, goal, walls = _maze(ground_truth)
    at = start
    for word in solution_str.split():
        to = int(word[1:]) if word[:1] == "c" and word[1:].isdecimal() and len(word) < 6 else -1
        if not _are_neighbours(at, to, side) or (min(at, to), max(at, to)) in walls:
            return 0.0
        at = to
    return float(at == goal and bool(solution_str.split()))


@lru_cache(maxsize=8192)
def _maze(text: str) -> tuple[int, int, int, frozenset[tuple[int, int]]]:
    told = json.loads(text)
    return told["side"], told["start"], told["goal"], frozenset((one, other) for one, other in told["walls"])


def _are_neighbours(one: int, other: int, side: int) -> bool:
    if not 0 <= other < side * side:
        return False
    (row, column), (other_row, other_column) = divmod(one, side), divmod(other, side)
    return abs(row - other_row) + abs(column - other_column) == 1


class Walks:
    """The maze, its lost walker, and prompts drawn from them. A walk has at most `limit` tokens, EOS included.

    A share `verbose` of the lost walker's walks has no aim. These walks are long, and they are right only by chance.
    """

    def __init__(self, config: WalksConfig, limit: int = LIMIT, verbose: float = 0.0) -> None:
        rng = np.random.default_rng(config.seed)
        self.limit, self.verbose = limit, verbose
        self.side, self.cells = config.side, config.side**2
        self.near_CC = _neighbours(config.side)
        self.open_CC = _with_walls(self.near_CC, config.walls, rng)
        self.steps_CC = _distances(self.open_CC)
        closed_CC = np.triu(self.near_CC & ~self.open_CC)
        # Probability of mistaking a wall for a passage.
        crossed_CC = rng.beta(0.5, 0.8, size=closed_CC.shape) * closed_CC
        self.heading_C = 0.98 * rng.beta(0.6, 0.5, size=self.cells)  # probability of heading for the goal, by goal
        # The probability that a walk ends when it visits the goal, and when it visits another cell.
        self.stay, self.give_up = 0.98, 0.003
        weight_CC = self.open_CC + crossed_CC + crossed_CC.T
        self.lost_GCC = self._moves(self.heading_C, weight_CC)
        self.verbose_GCC = self._moves(np.zeros(self.cells), weight_CC)
        self.clean_GCC = self._moves(np.full(self.cells, 0.5), self.open_CC.astype(float))
        self.words = spell("c", np.arange(self.cells)).split()

    def _moves(self, heading_C: NDArray[np.float64], weight_CC: NDArray[np.float64]) -> NDArray[np.float64]:
        """Probability of each move, by goal and cell.

        With the goal's probability in `heading_C`, the move is towards the goal. Otherwise, a neighbour is drawn by weight.
        """
        anywhere_CC = weight_CC / weight_CC.sum(axis=1, keepdims=True)
        nearer_GCC = self.open_CC & (self.steps_CC[:, None, :] < self.steps_CC[:, :, None])
        towards_GCC = nearer_GCC / np.maximum(nearer_GCC.sum(axis=2, keepdims=True), 1)
        heading_GC = np.where(np.eye(self.cells, dtype=bool), 0.0, heading_C[:, None])
        return heading_GC[..., None] * towards_GCC + (1 - heading_GC[..., None]) * anywhere_CC

    def initial_p(self) -> NDArray[np.float64]:
        """The lost walker's success rate p_GC within `limit` tokens, by goal and start."""
        p_GC = (1 - self.verbose) * self._success(self.lost_GCC)
        return p_GC + self.verbose * self._success(self.verbose_GCC) if self.verbose else p_GC

    def _success(self, moves_GCC: NDArray[np.float64]) -> NDArray[np.float64]:
        p_GC = np.zeros((self.cells, self.cells))
        for goal in range(self.cells):
            step_CC = moves_GCC[goal] * self.open_CC
            ends_C = np.full(self.cells, self.give_up)
            ends_C[goal] = self.stay
            # For each cell, the probability that a walk from there ends at the goal.
            ahead_C = np.where(np.arange(self.cells) == goal, self.stay, 0.0)
            for _ in range(self.limit - 1):
                arrived_C = step_CC @ ahead_C
                p_GC[goal] += arrived_C
                ahead_C = (1 - ends_C) * arrived_C
        return p_GC

    def examples(
        self, rng: np.random.Generator, moves_GCC: NDArray[np.float64], count: int, verbose: float = 0.0
    ) -> Examples:
        """Draw prompts with random starts and goals, and for each a walk that is cut at `limit` cells."""
        start_B, goal_B = rng.integers(self.cells, size=count), rng.integers(self.cells - 1, size=count)
        goal_B += goal_B >= start_B
        up_to_HGCC = np.stack([moves_GCC, self.verbose_GCC]).cumsum(axis=3)
        habit_B = (rng.random(count) < verbose).astype(int) if verbose else np.zeros(count, int)
        at_B, length_B = start_B, np.full(count, self.limit)
        cells_BL = np.empty((count, self.limit), np.int64)
        for step in range(self.limit):
            below_BC = up_to_HGCC[habit_B, goal_B, at_B] <= rng.random((count, 1))
            at_B = cells_BL[:, step] = np.minimum(below_BC.sum(axis=1), self.cells - 1)
            ends_B = rng.random(count) < np.where(at_B == goal_B, self.stay, self.give_up)
            length_B = np.where(ends_B, np.minimum(length_B, step + 1), length_B)
        prompts = [_prompt(start, goal) for start, goal in zip(start_B.tolist(), goal_B.tolist(), strict=True)]
        return prompts, [spell("c", walk_L[:length]) for walk_L, length in zip(cells_BL, length_B, strict=True)]

    def phases(self, rng: np.random.Generator, steps: int) -> Iterator[Callable[[int], Examples]]:
        """The warm-up's examples for each step: first walks that cross no wall, then the lost walker's."""
        for step in range(steps):
            lost = step >= steps // 2
            moves_GCC = self.lost_GCC if lost else self.clean_GCC
            yield partial(self.examples, rng, moves_GCC, verbose=self.verbose * lost)

    def problems(self, pool: Pool, rng: np.random.Generator, count: int, taken: set[str]) -> list[Problem]:
        """Draw the prompts of a pool by their initial success rates, and add them to `taken`.

        Returns:
            The problems in random order; `extra` holds `initial_p` and `shortest`, the steps of the shortest walk.

        Raises:
            ValueError: the maze has too few such prompts.
        """
        p_GC = self.initial_p()
        goals_P, starts_P = np.nonzero(~np.eye(self.cells, dtype=bool))
        free_P = np.array(
            [_prompt(s, g) not in taken for g, s in zip(goals_P.tolist(), starts_P.tolist(), strict=True)]
        )
        goals_P, starts_P = goals_P[free_P], starts_P[free_P]
        chosen = chosen_by_rate(p_GC[goals_P, starts_P], count, pool, rng)
        found = [self._problem(int(starts_P[at]), int(goals_P[at]), p_GC) for at in chosen]
        taken.update(problem.prompt for problem in found)
        return found

    def _problem(self, start: int, goal: int, p_GC: NDArray[np.float64]) -> Problem:
        walls = np.argwhere(np.triu(self.near_CC & ~self.open_CC)).tolist()
        answer = json.dumps({"side": self.side, "start": start, "goal": goal, "walls": walls})
        extra = {"initial_p": float(p_GC[goal, start]), "shortest": int(self.steps_CC[start, goal])}
        return Problem(_prompt(start, goal), answer, extra)


def prepare(
    folder: Path, pool: str = "mixed", config: WalksConfig = WalksConfig(), *, progress: Shown = unseen
) -> TaskFiles:
    """Create the task's files unless they exist: one folder per pool, and the models. "mixed" and "late" share a model.

    In the pools "mixed" and "late", a walk has at most 24 tokens. In "long" and "brief" it has at most 128; in "brief",
    aimless walks occur too, and the right answers are short.

    Raises:
        ValueError: the pool is unknown, or a folder was created with another configuration.
    """
    if pool not in POOLS:
        raise ValueError(f"expected one of the pools {', '.join(POOLS)}, got {pool!r}")
    # Pools with long walks have their own model. Its examples are batched by length, because most are short.
    tail = pool in ("long", "brief")
    model_name, limit, parts = (f"model-{pool}", LONG, 4) if tail else ("model", LIMIT, 1)
    walks = Walks(config, limit, VERBOSE if pool == "brief" else 0.0)

    def make_model(to: Path) -> None:
        shown = walks.phases(np.random.default_rng([config.seed, 0]), config.warm_up.steps)
        tokenizer = word_tokenizer(walks.words)
        shape = Shape(context=max(Shape().context, limit + PROMPT))
        save_warm_model(
            to,
            tokenizer,
            config.warm_up,
            lambda count: next(shown)(count),
            shape,
            longest=limit,
            parts=parts,
            shown=progress,
        )

    model = make_once(folder / model_name, config, make_model)
    prompts = prompt_files(folder / pool, config, partial(walks.problems, POOLS[pool]), f"walks/{pool}")
    return TaskFiles(
        model=model,
        train=prompts / "train.parquet",
        heldout=prompts / "heldout.parquet",
        reward=f"{__name__}:compute_score",
        max_new_tokens=limit,
        single_answer=False,
    )


def _neighbours(side: int) -> NDArray[np.bool_]:
    """Which cells of a square grid are adjacent."""
    place_C2 = np.stack(np.divmod(np.arange(side**2), side), axis=1)
    return np.abs(place_C2[:, None] - place_C2[None]).sum(axis=-1) == 1


def _with_walls(near_CC: NDArray[np.bool_], share: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """The passages that stay open when a share of them is closed one by one. A passage stays open if closing it would
    split the maze.
    """
    open_CC = near_CC.copy()
    passages = np.argwhere(np.triu(near_CC))
    to_close = round(share * len(passages))
    for one, other in rng.permutation(passages):
        if not to_close:
            break
        open_CC[one, other] = open_CC[other, one] = False
        if np.isfinite(_distances(open_CC)[0]).all():
            to_close -= 1
        else:
            open_CC[one, other] = open_CC[other, one] = True
    return open_CC


def _distances(open_CC: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Number of steps of the shortest walk between any two cells; infinite if there is none."""
    reached_CC = np.eye(len(open_CC), dtype=bool)
    steps_CC = np.where(reached_CC, 0.0, np.inf)
    front_CC, steps = reached_CC, 0
    while front_CC.any():
        steps += 1
        front_CC = ((front_CC.astype(float) @ open_CC) > 0) & ~reached_CC
        reached_CC = reached_CC | front_CC
        steps_CC[front_CC] = steps
    return steps_CC


def _prompt(start: int, goal: int) -> str:
    return f"c{start} c{goal} {SEPARATOR}"
