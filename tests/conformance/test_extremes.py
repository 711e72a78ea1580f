"""Numbers at the ends of what a driver may tell, and beyond: taken or refused where they are told, never a failure later."""

import json
from math import inf, nan
from random import Random

import numpy as np
import pytest
from cases import RECIPES, TABLES

from rollalloc import Allocator, EventError, PromptTable
from rollalloc.core.events import FARTHEST, LARGEST, LARGEST_WHOLE, Cancelled, Done, Failed, Moved, Offered, Updated

PROMPTS = 20
REWARDS = (5e-324, 1e-300, 1e-30, -1.0, 1e10, LARGEST, -LARGEST, 1e38, -1e308, 10**400, inf, nan)
RATES = (5e-324, 1e-300, 0.5, 1 - 1e-16)
TOKENS = (0, 10**6, LARGEST_WHOLE, 2**31, 2**53, 2**62, 2**64)
MOVED = (None, 5e-324, 1.0, 100.0, FARTHEST, 1e10, 1e38, 4e38, 1.7e308, inf, nan)
SHARES = (0, 5e-324, 1, 1 + 1e-15, -5e-324, 10**400, inf, nan, None)
VERSIONS = (1000, 2**31, 2**40, 2**64)


def told(allocator, event):
    """Whether it was taken."""
    try:
        allocator.tell([event])
    except EventError:
        return False
    return True


def drive(name, draw, steps=20):
    """Some batches of a driver that tells such numbers among others; what is refused, it tells in another way."""
    recipe, table = RECIPES[name], TABLES.get(name, PromptTable.of)(PROMPTS)
    allocator, running, rare = Allocator(recipe, table, draw.randint(0, 9)), [], draw.choice((0.03, 0.3))

    def some(odd, usual):
        return draw.choice(odd) if draw.random() < rare else usual

    for step in range(steps):
        if allocator.wanted():
            allocator.tell([Offered(tuple(range(PROMPTS)), step)])
        actions = allocator.ask(draw.choice((None, 5)))
        if actions.finished:
            return
        running += [rollout for order in actions.generate for rollout in order.rollouts]
        if actions.batch:
            figures = np.array([(row.advantage, row.weight) for row in actions.batch.rows])
            assert np.isfinite(figures.astype(np.float32)).all()
            asks = recipe.gate is not None and any(row.replays for row in actions.batch.rows)
            if asks and not told(allocator, Moved(some(SHARES, 0.4))):
                allocator.tell([Moved(1.0)])
            if not told(allocator, Updated(allocator.version + some(VERSIONS, 1), some(MOVED, 0.01))):
                allocator.tell([Updated(allocator.version + 1)])
        draw.shuffle(running)
        for rollout in [running.pop() for _ in range(draw.randint(len(running) // 2, len(running)))]:
            tokens, won = some(TOKENS, draw.randint(1, 30)), float(draw.random() < 0.5)
            metric = some(RATES if recipe.rate_readers else REWARDS, won)
            done = Done(rollout, some(REWARDS, won), metric, tokens, allocator.version)
            if not told(allocator, draw.choice((done, done, done, Cancelled(rollout, tokens)))):
                allocator.tell([Failed(rollout, "no score")])
    state = json.loads(json.dumps(allocator.state_dict(), allow_nan=False))
    Allocator(recipe, table, allocator.seed).load_state_dict(state)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_works_with_every_number_that_an_event_may_have(name):
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        for seed in range(2):
            drive(name, Random(seed))
