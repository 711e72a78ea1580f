"""Golden traces: what every recipe decides under fixed events, as digests that a change of the code must not change.

    python tests/conformance/golden.py --write    # writes golden.json anew, for a change that is meant
    python tests/conformance/golden.py            # says which traces differ, and ends with an error then

A trace is the recipe's actions as whole numbers, and of the state what it means: accounts, figures, records of prompts, what
is in flight. How a state is written down is not in it, nor how anything is worded. Advantages and weights count in steps, so
that the last bits of another processor's arithmetic do not show; what is drawn by a predicted rate would change only where
a draw falls within those last bits of a bound.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from math import floor, isnan
from pathlib import Path
from random import Random
from typing import Any

from cases import RECIPES, TABLES

from rollalloc import Allocator, Budget, NoProgress, PromptTable
from rollalloc.core.events import Actions, Cancelled, Event, Failed, Moved, Offered, Row, Updated
from rollalloc.core.recipe import Recipe
from rollalloc.core.rule import OfferedPromptRule
from rollalloc.named import RECIPES as NAMES
from rollalloc.named import make_recipe, sizes_of
from rollalloc.testing.world import World

FILE = Path(__file__).with_name("golden.json")
PROMPTS = 20  # so few that prompts come back, with what was learned of them

# Sizes of recipes with a name, and some joined. All other parameters are at their defaults.
NAMED: dict[str, dict[str, Any]] = {
    "grpo": {"groups": 4, "n": 4},
    "dr_grpo": {"groups": 4, "n": 4},
    "reinforce": {"groups": 8},
    "rloo": {"groups": 4, "n": 4},
    "raft": {"groups": 8},
    "spo": {"groups": 8},
    "mopps": {"groups": 4, "n": 4},
    "foresight": {"groups": 8},
    "dapo": {"groups": 4, "n": 4, "gen_groups": 8},
    "dapo_carry": {"groups": 4, "n": 4, "gen_groups": 8},
    "greso": {"groups": 4, "n": 4, "gen_groups": 8},
    "knapsack": {"groups": 4, "n": 4},
    "reinforce_ada": {"groups": 4, "n": 4},
    "vcrl": {"groups": 4, "n": 4},
    "cgrpo": {"groups": 4, "sizes_S": [2, 4, 8]},
    "pilot_commit": {"groups": 4, "n_pilot": 4, "n_commit": 4, "gen_groups": 12},
    "pods": {"groups": 4, "n": 8, "m": 4},
    "darts": {"groups": 4, "shortest": 3, "longest": 1},
    "racing": {"groups": 4, "sizes_S": [4, 8], "gen_groups": 8},
    "pilot_commit+pods": {"groups": 4, "n_pilot": 4, "n_commit": 4, "gen_groups": 12, "m": 4},
    "dapo+pods": {"groups": 4, "n": 8, "gen_groups": 8, "m": 4},
    "mopps+rloo": {"groups": 4, "n": 4},
    "foresight+knapsack": {"groups": 4, "n": 4},
    "dapo+darts": {"groups": 4, "n": 4, "gen_groups": 8, "shortest": 3, "longest": 1, "tail": "sampled"},
}
BUDGET = Budget(run_rollouts=150)
MODES: dict[str, dict[str, Any]] = {
    "waves": {"batches": 6, "slots": None},
    "one by one": {"batches": 6, "slots": 24, "trouble": 0.05, "reload": 0.1},
    "one slot, failing prompts": {"batches": 2, "slots": 1, "trouble": 0.02, "reload": 0.02},
    "to the end of a budget": {"batches": 99, "slots": 16},
}


def cases() -> dict[str, tuple[Recipe, PromptTable]]:
    """Recipes with their data, by name."""
    by_name = {name: sizes_of(name, {}, rows=16, group_rows=4) for name in NAMES} | NAMED
    named = {name: make_recipe(name, given) for name, given in by_name.items()}
    ours = {
        f"{name}, as in the kit": (recipe, TABLES.get(name, PromptTable)(PROMPTS))
        for name, recipe in RECIPES.items()
        if name in TABLES or recipe not in named.values()
    }
    return {name: (recipe, PromptTable(PROMPTS)) for name, recipe in named.items()} | ours


def digests(recipe: Recipe, table: PromptTable) -> dict[str, str]:
    """Of a recipe's traces, by mode."""
    made = {}
    for mode, how in MODES.items():
        under = replace(recipe, budget=BUDGET) if "budget" in mode else recipe
        driver = _Driver(under, table, mode, failing=5 if "failing" in mode else 0)
        text = json.dumps(list(driver.trace(**how)), separators=(",", ":"), sort_keys=True, allow_nan=False)
        made[mode] = sha256(text.encode()).hexdigest()[:16]
    return made


class _Driver:
    """One run: what it is told hangs on the mode and on what was decided, on nothing else."""

    def __init__(self, recipe: Recipe, table: PromptTable, mode: str, failing: int = 0) -> None:
        self.recipe, self.table, self.random = recipe, table, Random(mode)
        self.world = World(2, failing=failing)
        self.allocator = Allocator(recipe, table, 1)
        self.running: dict[int, tuple[int, int]] = {}  # rollout -> prompt, version at its first token
        self.stopped: set[int] = set()
        self.training = False
        self.offered = 0

    def trace(self, batches: int, slots: int | None, trouble: float = 0.0, reload: float = 0.0) -> Iterator[Any]:
        """What was decided at each ask, and what the state means when a batch was made and at the end."""
        trained = 0
        while trained < batches:
            if self.random.random() < reload:
                yield self._reload()
            self._offer()
            try:
                actions = self.allocator.ask(self._capacity(slots))
            except NoProgress:
                yield "no_progress"
                break
            yield _plain(actions)
            self._take(actions)
            if actions.batch is not None:
                yield self._meaning()
            elif actions.finished is not None and not self.training:
                break
            events = list(self._events(slots is None, trouble))
            trained += any(isinstance(event, Updated) for event in events)
            self.allocator.tell(events)
        yield self._meaning()

    def _reload(self) -> Any:
        saved = json.loads(json.dumps(self.allocator.state_dict()))
        self.allocator = Allocator(self.recipe, self.table, 1)
        self.allocator.load_state_dict(saved)
        return _plain(self.allocator.outstanding())

    def _offer(self) -> None:
        if isinstance(self.recipe.prompts, OfferedPromptRule) and (wanted := self.allocator.wanted()):
            epoch, at = divmod(self.offered, PROMPTS // 2)
            prompts = range(self.offered, self.offered + min(wanted, PROMPTS // 2 - at))
            self.offered = prompts.stop
            self.allocator.tell([Offered(tuple(prompt % PROMPTS for prompt in prompts), epoch)])

    def _capacity(self, slots: int | None) -> int | None:
        if slots is None:
            return None
        room = max(0, slots - len(self.running))
        return self.random.randint(0, room) if self.running else room

    def _take(self, actions: Actions) -> None:
        for order in actions.generate:
            self.running |= dict.fromkeys(order.rollouts, (order.prompt, self.allocator.version, order.limit))
        self.stopped.update(actions.cancel)
        self.training |= actions.batch is not None

    def _events(self, wave: bool, trouble: float) -> Iterator[Event]:
        ending = len(self.running) if wave else min(len(self.running), self.random.randint(1, 4))
        for _ in range(ending):
            at = 0 if wave else self.random.randrange(len(self.running))
            rollout = list(self.running)[at]
            prompt, version, limit = self.running.pop(rollout)
            if self.random.random() < (0.7 if rollout in self.stopped else trouble):
                yield Cancelled(rollout, 5) if self.random.random() < 0.5 else Failed(rollout, "simulated", 3)
            else:
                yield self.world.end(rollout, prompt, version, self.allocator.version, limit)
        if self.training and (wave or not ending or self.random.random() < 0.2):
            self.training = False
            version, batch = self.allocator.version + 1, self.allocator.batch
            if self.recipe.gate is not None and batch is not None and any(row.replays for row in batch.rows):
                yield Moved(version * 0.37 % 1)
            yield Updated(version, 0.02 * (version % 5) if version % 3 else None)

    def _meaning(self) -> Any:
        """What the state says, in words that do not hang on how it is kept."""
        now = self.allocator
        records = [now.statistics.record(prompt) for prompt in range(PROMPTS)]
        return {
            "accounts": list(now.accounts().values()),
            "figures": [now.paid, now.tokens_paid, now.epoch, now.version, now.replayed, now.wanted()],
            "away": [*now.prompt_counts().values(), *now.quarantined()],
            "outstanding": _plain(now.outstanding()),
            "records": [
                [
                    r.attempts,
                    _whole(r.successes),
                    r.tokens,
                    r.version,
                    r.fate.partition("/")[0],
                    r.failures,
                ]
                for r in records
            ],
        }


def _plain(actions: Actions) -> Any:
    batch = actions.batch
    return [
        [
            [order.group, order.prompt, order.stage, *order.rollouts, *([order.limit] if order.limit else [])]
            for order in actions.generate
        ],
        actions.cancel,
        actions.release,
        None if batch is None else [batch.version, batch.short_because is not None, *map(_row, batch.rows)],
        actions.finished is not None,
    ]


def _row(row: Row) -> list[int]:
    rollout, prompt, group, advantage, weight, version, replays = row
    return [rollout, prompt, group, _whole(advantage), _whole(weight), version, replays]


def _whole(number: float) -> int | None:
    """In steps, whose bounds are no number that occurs: the last bits of a float do not show."""
    return None if isnan(number) else floor(number * 4099 + 0.3179)


def changed() -> list[str]:
    """Traces that are not those of the file."""
    kept, now = json.loads(FILE.read_text("utf-8")), all_digests()
    return [name for name in sorted(kept | now) if kept.get(name) != now.get(name)]


def all_digests() -> dict[str, dict[str, str]]:
    """Of every case."""
    return {name: digests(*case) for name, case in cases().items()}


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        FILE.write_text(json.dumps(all_digests(), indent=1) + "\n", "utf-8")
    elif found := changed():
        sys.exit(f"not as in {FILE.name}: {', '.join(found)}; where that is meant, --write")
