"""Speed of the core, against the bars of lab/docs/speed.md: `make bench`.

Machines differ, and one machine differs from minute to minute. So what the core spends on an event is stated as a multiple
of the time that the same run takes to create that event, and each figure is the median over repeats, each beside a
yardstick of its own. All times are the processor's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from bars import Bars, with_smallest
from rollalloc import Allocator, Recipe, recipes
from rollalloc.core.events import Actions, Done, Event, Updated
from rollalloc.recipes.mopps import Posterior
from rollalloc.rules.rows import max_variance_subset

clock = time.process_time  # of one thread: other work on the machine is not ours


@dataclass(frozen=True)
class Size:
    """What is measured: prompts of the data set, repeats of a figure, events told one by one, and batches told in waves."""

    prompts: int = 1_000_000
    repeats: int = 7
    events: int = 20_000
    batches: int = 12


BYTES, BYTES_OF_EVIDENCE = 69, 6  # largest size of a state per prompt; what a recipe that evicts by evidence adds
SMALLEST = Size(prompts=2_000, repeats=1, events=200, batches=3)


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


def waves(recipe: Recipe, prompts: int, batches: int, seed: int = 0) -> list[tuple[float, int]]:
    """Seconds spent in tell and ask, and events told, for each batch of a synchronous run."""
    allocator, rng = Allocator(recipe, prompts, seed), np.random.default_rng(seed)
    spent, told = 0.0, 0
    out: list[tuple[float, int]] = []
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


def one_by_one(recipe: Recipe, prompts: int, events: int, slots: int = 4096) -> float:
    """Seconds an event where each completion is told alone and its slot asked for again.

    The first ask, which shuffles the data set, is not in it: that is paid once an epoch, whatever ends.
    """
    script = asked_and_told(Allocator(recipe, prompts, 0), events, slots)
    allocator = Allocator(recipe, prompts, 0)
    allocator.ask(slots)
    start = clock()  # reading the processor's clock around each call would take longer than the calls
    for capacity, told in script:
        allocator.ask(capacity)
        allocator.tell(told)
    return (clock() - start) / events


def asked_and_told(allocator: Allocator, events: int, slots: int) -> list[tuple[int, list[Event]]]:
    """The calls of a driver that tells each completion alone: the capacities that it asks with, and what it tells then."""
    rng = np.random.default_rng(0)
    running = results(allocator.ask(slots), 0, rng)
    script: list[tuple[int, list[Event]]] = []
    for _ in range(events):
        capacity = slots - len(running)
        actions = allocator.ask(capacity)
        running += results(actions, allocator.version, rng)
        if actions.batch:
            told: list[Event] = [Updated(allocator.version + 1)]
        else:
            at = int(rng.integers(len(running)))
            running[at], running[-1] = running[-1], running[at]
            told = [running.pop()]
        allocator.tell(told)
        script.append((capacity, told))
    return script


def multiples(measure: Callable[[], Iterable[float]], repeats: int) -> tuple[float, str]:
    """What an event costs as a multiple of creating it; and the same in words, with its spread and both in seconds."""
    ratios: list[float] = []
    costs: list[float] = []
    yards: list[float] = []
    for _ in range(repeats):
        before = yardstick()
        cost = statistics.median(measure())
        yard = min(before, yardstick())
        ratios.append(cost / yard)
        costs.append(cost)
        yards.append(yard)
    return statistics.median(ratios), (
        f"{statistics.median(ratios):.1f} times creating it [{min(ratios):.1f}-{max(ratios):.1f}]"
        f" ({statistics.median(costs) * 1e6:.1f} µs, creating it {statistics.median(yards) * 1e6:.1f} µs)"
    )


def seconds(action: Callable[[], object], repeats: int = 5) -> float:
    """Median time of an action."""
    times: list[float] = []
    for _ in range(repeats):
        start = clock()
        action()
        times.append(clock() - start)
    return statistics.median(times)


def memory(prompts: int) -> dict[str, float]:
    """Bytes a prompt: allocated, and of the saved state as JSON, of recipes that shuffle and that keep a posterior."""
    out: dict[str, float] = {}
    for name, rule in (("shuffled", None), ("posterior", Posterior())):
        recipe = recipes.pilot_commit(384, 32, 96, 384)
        recipe = recipe if rule is None else replace(recipe, prompts=rule)
        tracemalloc.start()
        allocator = Allocator(recipe, prompts, 0)
        allocator.ask()
        out[name] = tracemalloc.get_traced_memory()[0] / prompts
        tracemalloc.stop()
        out[f"{name} saved"] = len(json.dumps(allocator.state_dict())) / prompts
    return out


def measure_events(size: Size, paper: Recipe, bars: Bars) -> None:
    """What `tell` and `ask` spend on an event, told in waves and by itself."""
    # Back-pressure opens pilots only as they are needed, so a step has between 128x96 and 384x32 + 128x96 rollouts.
    largest = max(waves(paper, size.prompts, size.batches)[2:], key=lambda step: step[1])
    print(f"step of 384x32 + 128x96: {largest[0]:.3f} s for {largest[1]:,} events")
    ratio, said = multiples(
        lambda: [spent / count for spent, count in waves(paper, size.prompts, min(5, size.batches))[1:]], size.repeats
    )
    print(f"an event told in waves: {said}, {bars.at_most('an event told in waves', ratio, 7)}")
    ratio, said = multiples(
        lambda: [spent / count for spent, count in waves(recipes.reinforce(1024), size.prompts, 4)[1:]], size.repeats
    )
    alone = "an event told in waves, one rollout per prompt"
    print(f"{alone}: {said}, {bars.at_most(alone, ratio, 65)}")
    for name, recipe, bar in (
        ("grpo", recipes.grpo(128, 64), 10),
        ("pilot_commit", paper, 10),
        ("darts", recipes.darts(128, 7, 1, tail="sampled"), 28),
    ):
        carried = replace(recipe, max_staleness=max(4, recipe.max_staleness))
        ratio, said = multiples(lambda recipe=carried: [one_by_one(recipe, size.prompts, size.events)], size.repeats)
        print(
            f"an event told by itself, {name}: {said}, {bars.at_most(f'an event told by itself, {name}', ratio, bar)}"
        )


def measure_state(size: Size, paper: Recipe, bars: Bars) -> None:
    """What saving, loading and PODS's subset take, and how large the state is."""
    allocator = Allocator(paper, size.prompts, 0)
    allocator.tell(results(allocator.ask(), 0, np.random.default_rng(0)))
    allocator.ask()
    state = allocator.state_dict()
    save, load = seconds(allocator.state_dict), seconds(lambda: allocator.load_state_dict(state))
    text = seconds(lambda: json.dumps(state))
    for name, taken, bar in (("state_dict", save, 1.5), ("loading it", load, 3)):
        print(
            f"{name}: {taken / text:.1f} times json.dumps of it ({taken:.3f} s), {bars.at_most(name, taken / text, bar)}"
        )
    rewards = np.random.default_rng(0).standard_normal(size.prompts)
    subset, sort = seconds(lambda: max_variance_subset(rewards, size.prompts // 4)), seconds(lambda: np.sort(rewards))
    print(
        f"max_variance_subset of {size.prompts:,}: {subset / sort:.1f} times sorting them ({subset:.3f} s), "
        f"{bars.at_most('max_variance_subset', subset / sort, 45)}"
    )
    for name, taken in memory(size.prompts).items():
        bar = BYTES + (BYTES_OF_EVIDENCE if name.startswith("posterior") else 0)
        print(f"bytes per prompt, {name}: {taken:.1f}, {bars.at_most(f'bytes per prompt, {name}', taken, bar)}")


def main() -> None:
    given = with_smallest(argparse.ArgumentParser(description=__doc__)).parse_args()
    size, bars = SMALLEST if given.smallest else Size(), Bars(judged=not given.smallest)
    paper = recipes.pilot_commit(128, 32, 96, 384)
    measure_events(size, paper, bars)
    measure_state(size, paper, bars)
    bars.end()


if __name__ == "__main__":
    main()
