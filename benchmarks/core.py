"""Speed of the core, against the bars of docs/benchmark.md: `make bench`.

Machines differ, and one machine differs from minute to minute. So what the core spends on an event is stated as a
multiple of the time that the same run takes to create that event, and each figure is the median over repeats, each beside
a yardstick of its own.
"""

from __future__ import annotations

import json
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from rollalloc import Allocator, Recipe, recipes
from rollalloc.core.events import Actions, Done, Event, Updated
from rollalloc.recipes.mopps import Posterior
from rollalloc.rules.rows import max_variance_subset

PROMPTS = 1_000_000
REPEATS = 7
clock = time.perf_counter


def results(actions: Actions, version: int, rng: np.random.Generator) -> list[Event]:
    """Every ordered rollout done, with rewards of a success rate fixed per prompt."""
    events: list[Event] = []
    for order in actions.generate:
        rate = (order.prompt * 0.6180339887) % 1.0
        win = (rng.random(len(order.rollouts)) < rate).astype(float).tolist()
        tokens = rng.integers(1, 1000, len(order.rollouts)).tolist()
        events += [Done(rollout, r, r, t, version) for rollout, r, t in zip(order.rollouts, win, tokens, strict=True)]
    return events


def yardstick(events: int = 20_000) -> float:
    """Seconds that it takes to create one event, many at once."""
    numbers, ones, tokens = list(range(events)), [1.0] * events, [7] * events
    start = clock()
    made = [Done(rollout, r, r, t, 3) for rollout, r, t in zip(numbers, ones, tokens, strict=True)]
    return (clock() - start) / len(made)


def waves(recipe: Recipe, batches: int, seed: int = 0) -> list[tuple[float, int]]:
    """Seconds spent in tell and ask, and events told, for each batch of a synchronous run."""
    allocator, rng, spent, told, out = Allocator(recipe, PROMPTS, seed), np.random.default_rng(seed), 0.0, 0, []
    while len(out) < batches:
        start = clock()
        actions = allocator.ask()
        spent += clock() - start
        if actions.batch:
            out.append((spent, told))
            spent, told = 0.0, 0
            events: list[Event] = [Updated(allocator.version + 1)]
        else:
            events = results(actions, allocator.version, rng)
        start = clock()
        allocator.tell(events)
        spent += clock() - start
        told += len(events)
    return out


def one_by_one(recipe: Recipe, events: int = 20_000, slots: int = 4096) -> float:
    """Seconds an event where each completion is told alone and its slot asked for again, less the clock's own.

    The first ask, which shuffles the data set, is not in it: that is paid once an epoch, whatever ends.
    """
    allocator, rng = Allocator(recipe, PROMPTS, 0), np.random.default_rng(0)
    running = results(allocator.ask(slots), 0, rng)
    told, spent = 0, 0.0
    while told < events:
        start = clock()
        actions = allocator.ask(slots - len(running))
        spent += clock() - start
        running += results(actions, allocator.version, rng)
        if actions.batch:
            now: list[Event] = [Updated(allocator.version + 1)]
        else:
            at = int(rng.integers(len(running)))
            running[at], running[-1] = running[-1], running[at]
            now = [running.pop()]
        start = clock()
        allocator.tell(now)
        spent += clock() - start
        told += 1
    start = clock()
    for _ in range(events):
        clock()
    return (spent - 2 * (clock() - start)) / events


def multiples(measure: Callable[[], Iterable[float]]) -> str:
    """What an event costs as a multiple of creating it, with its spread, and both in seconds."""
    ratios, costs, yards = [], [], []
    for _ in range(REPEATS):
        before = yardstick()
        cost = statistics.median(measure())
        yard = min(before, yardstick())
        ratios.append(cost / yard)
        costs.append(cost)
        yards.append(yard)
    return (
        f"{statistics.median(ratios):.1f} times creating it [{min(ratios):.1f}-{max(ratios):.1f}]"
        f" ({statistics.median(costs) * 1e6:.1f} µs, creating it {statistics.median(yards) * 1e6:.1f} µs)"
    )


def seconds(action: Callable[[], object], repeats: int = 5) -> float:
    """Median time of an action."""
    times = []
    for _ in range(repeats):
        start = clock()
        action()
        times.append(clock() - start)
    return statistics.median(times)


def memory() -> dict[str, float]:
    """Bytes a prompt: allocated at 1,000,000 prompts, and of the saved state without base64."""
    out = {}
    for name, prompts in (("shuffled", None), ("posterior", Posterior())):
        recipe = recipes.pilot_commit(384, 32, 96, 384)
        recipe = recipe if prompts is None else replace(recipe, prompts=prompts)
        tracemalloc.start()
        allocator = Allocator(recipe, PROMPTS, 0)
        allocator.ask()
        out[name] = tracemalloc.get_traced_memory()[0] / PROMPTS
        tracemalloc.stop()
        out[f"{name} saved"] = len(json.dumps(allocator.state_dict())) / PROMPTS
    return out


def main() -> None:
    paper = recipes.pilot_commit(128, 32, 96, 384)
    # Back-pressure opens pilots only as they are needed, so a step has between 128x96 and 384x32 + 128x96 rollouts.
    largest = max(waves(paper, 12)[2:], key=lambda step: step[1])
    print(f"step of 384x32 + 128x96: {largest[0]:.3f} s for {largest[1]:,} events")
    told = multiples(lambda: [spent / count for spent, count in waves(paper, 5)[1:]])
    print(f"an event told in waves: {told}, bar 2.5")
    for name, recipe in {
        "grpo": recipes.grpo(128, 64),
        "pilot_commit": paper,
        "darts": recipes.darts(128, 7, 1, tail="sampled"),
    }.items():
        carried = replace(recipe, max_staleness=max(4, recipe.max_staleness))
        cost = multiples(lambda recipe=carried: [one_by_one(recipe)])
        print(f"an event told by itself, {name}: {cost}, bar 6")
    allocator = Allocator(paper, PROMPTS, 0)
    allocator.tell(results(allocator.ask(), 0, np.random.default_rng(0)))
    allocator.ask()
    state = allocator.state_dict()
    save, load = seconds(allocator.state_dict), seconds(lambda: allocator.load_state_dict(state))
    text = seconds(lambda: json.dumps(state))
    print(
        f"state_dict {save / text:.1f}, load {load / text:.1f} times json.dumps of it ({save:.3f} s, {load:.3f} s), "
        "bars 1 and 3"
    )
    rewards = np.random.default_rng(0).standard_normal(1_000_000)
    subset, sort = seconds(lambda: max_variance_subset(rewards, 250_000)), seconds(lambda: np.sort(rewards))
    print(f"max_variance_subset of 1,000,000: {subset / sort:.1f} times sorting them ({subset:.3f} s), bar 20")
    print("bytes per prompt: " + ", ".join(f"{name} {value:.1f}" for name, value in memory().items()) + "; bar 64")


if __name__ == "__main__":
    main()
