"""What `Allocator.preview` says of a batch before it comes: of every recipe, in runs whose rollouts end one by one."""

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
from cases import RECIPES, TABLES, TRACED

from rollalloc import Allocator, PromptTable, recipes
from rollalloc.core.events import Done, Updated
from rollalloc.core.rule import RowRule, RowTraits
from rollalloc.testing.feeder import Run
from rollalloc.testing.world import World

FRESH = {name: recipe for name, recipe in RECIPES.items() if recipe.max_staleness == 0}
# Of the others nothing is known before the batch: the whole batch says what a row is credited with, or more groups are in
# flight than it takes.
SEEN = {
    *("grpo", "pods", "darts_exact", "darts_sampled", "darts_none", "rloo", "raft", "mopps", "knapsack", "vcrl"),
    *("reinforce_ada", "foresight", "offered", "reinforce_running"),
}


def previewed(recipe, trouble, *, table=PromptTable.of, batches=6):
    """(rows previewed since the last update, rows of the batch) of each batch; asking changes nothing."""
    run = Run(recipe, table(40 * recipe.groups), World(3), seed=1)
    seen, version = {}, 0
    for actions in run.asynchronous(batches, trouble):
        if run.allocator.version != version:
            seen, version = {}, run.allocator.version
        if actions.batch is not None:
            yield [*seen.values()], actions.batch.rows
        before = json.dumps(run.allocator.state_dict())
        rows = run.allocator.preview({row.group for row in seen.values()})
        assert json.dumps(run.allocator.state_dict()) == before
        assert not (rows and run.allocator.batch)
        assert not {row.rollout for row in rows} & seen.keys()
        seen |= {row.rollout: row for row in rows}
        assert {*run.allocator.preview()} <= {*seen.values()}


# With trouble one of each kind; the tier `e2e` has the others, and all of them without.
KINDS = [name if name in TRACED else pytest.param(name, marks=pytest.mark.e2e) for name in FRESH]


@pytest.mark.parametrize("trouble", [0.06, pytest.param(0.0, marks=pytest.mark.e2e)])
@pytest.mark.parametrize("name", KINDS)
def test_the_batch_has_what_was_previewed(name, trouble):
    found = list(previewed(FRESH[name], trouble, table=TABLES.get(name, PromptTable.of)))
    for early, rows in found:
        assert set(early) <= set(rows)
    assert name not in SEEN or any(early for early, _ in found)


def test_with_staleness_nothing_is_seen_ahead():
    found = list(previewed(recipes.pilot_commit(4, 4, 4, 12), 0.0)) + list(previewed(RECIPES["grpo_ahead"], 0.0))
    assert found
    assert not any(early for early, _ in found)


def test_a_group_that_is_ready_and_the_replayed_rows_which_the_version_draws():
    """Two prompts of one rollout each: the first that ends is known, and from the first batch on what is replayed."""
    allocator = Allocator(replace(recipes.raft(2), replay=recipes.foresight(2, replay=9).replay), 8, seed=0)
    (first,), (second,) = (order.rollouts for order in allocator.ask().generate)
    assert allocator.preview() == ()
    allocator.tell([Done(second, 1.0, 1.0, 5, 0)])
    (row,) = allocator.preview()
    assert (row.rollout, row.advantage, row.weight, row.version, row.replays) == (second, 1.0, 1.0, 0, 0)
    assert allocator.preview({row.group}) == ()
    allocator.tell([Done(first, 0.0, 0.0, 5, 0)])
    batch = allocator.ask().batch
    assert batch.rows[1] == row
    assert allocator.preview() == ()
    allocator.tell([Updated(1)])
    assert allocator.preview() == (row._replace(replays=1),)
    assert allocator.preview({row.group}) == ()


@dataclass(frozen=True)
class FewerAsMoreWait(RowRule):
    """Rows of a group by how many groups wait for the batch: what is previewed is not what comes."""

    @property
    def traits(self):
        return RowTraits(rows=4)

    def __call__(self, group, view, rng):
        count = 4 - view.held_S[-1]
        return np.arange(count), np.ones(count)


def test_a_rule_that_looks_at_the_run_may_decide_otherwise_by_then():
    recipe = replace(recipes.grpo(3, 4), rows=FewerAsMoreWait())
    allocator = Allocator(recipe, 9, seed=0)
    groups = [order.rollouts for order in allocator.ask().generate]
    allocator.tell([Done(rollout, rollout % 2, rollout % 2, 5, 0) for rollout in groups[0]])
    early = allocator.preview()
    allocator.tell([Done(rollout, rollout % 2, rollout % 2, 5, 0) for group in groups[1:] for rollout in group])
    rows = allocator.ask().batch.rows
    assert len(early) == 3
    assert len(rows) == 3
    assert not set(early) <= set(rows)
