"""The core in a synchronous loop of your own: ask, generate, tell, train.

Everything outside the core is faked here: a prompt is a coin with a bias, training does nothing. Run it:

    python examples/sync_loop.py
"""

import numpy as np

from rollalloc import Allocator, Budget, Recipe, recipes
from rollalloc.core.events import Done, Order, Updated

PROMPTS = 500
success_rate = np.random.default_rng(0).beta(0.6, 0.6, PROMPTS)
coin = np.random.default_rng(1)


def roll_out(order: Order, version: int) -> list[Done]:
    """Stands for your engine and your verifier."""
    wins = (coin.random(len(order.rollouts)) < success_rate[order.prompt]).astype(float).tolist()
    return [
        Done(rollout, reward=win, metric=win, tokens=100, version=version)
        for rollout, win in zip(order.rollouts, wins, strict=True)
    ]


def train_under(recipe: Recipe) -> Allocator:
    allocator = Allocator(recipe, PROMPTS, seed=0)
    while not (actions := allocator.ask()).finished:
        if actions.batch:
            # Here you would train: each row has a rollout id, an advantage and a weight.
            allocator.tell([Updated(allocator.version + 1)])
        else:
            allocator.tell([done for order in actions.generate for done in roll_out(order, allocator.version)])
    return allocator


if __name__ == "__main__":
    from dataclasses import replace

    budget = Budget(run_rollouts=20_000)
    for recipe in (
        recipes.grpo(groups=16, n=16),
        recipes.dapo(groups=16, n=16, gen_groups=48),
        recipes.pilot_commit(groups=16, n_pilot=4, n_commit=12, gen_groups=48),
    ):
        accounts = train_under(replace(recipe, budget=budget)).accounts()
        print({cause: count for cause, count in accounts.items() if count})
