"""The predictor: its speed against its bars (`speed`, in `make bench`); the time of `ask` with fits in it and outside
(`ask`); in simulation what following a drift gains (`drift`) and what drawing by it does to it (`selection`). One thread of
BLAS: OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from bars import Bars, with_smallest
from rollalloc import Allocator, PromptTable, recipes
from rollalloc.core.events import Done, Updated
from rollalloc.predict import quality
from rollalloc.predict.predictor import Predictor
from rollalloc.recipes.foresight import Foresight

clock = time.process_time  # of one thread: other work on the machine is not ours
WIDTH = 256  # features of a prompt
# Largest multiples of the time that XᵀX of the kept events takes: a fit to these events, and the rates of 8,192 prompts.
# They are 1 s and 50 ms on the machine of 2026-11-22, where XᵀX took 22.6 ms (lab/log).
FIT, RATES = 44.0, 2.2
OBSERVED = 3.3  # largest multiple of the time that an event takes to create: observing it; 10 µs on that machine
POOLS = {4: None, 8: None, 16: RATES}  # candidates of a draw of 512, by multiples, and their bar


def milliseconds(
    action: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None
) -> list[float]:
    """The times of an action; `before` is done before each, and not timed."""
    times: list[float] = []
    for _ in range(repeats):
        before()
        start = clock()
        action()
        times.append(1e3 * (clock() - start))
    return times


def said(times: list[float]) -> str:
    """The median and the range of times."""
    return f"{statistics.median(times):.1f} ms [{min(times):.1f}-{max(times):.1f}]"


def speed(prompts: int, repeats: int, bars: Bars) -> None:
    """Draws and refits, and events that are observed, each beside a yardstick of the same machine.

    Args:
        prompts: of the data set, each with 256 features.
        repeats: of a figure.
        bars: what the medians are held against.
    """
    rng = np.random.default_rng(0)
    features = {"hidden": rng.standard_normal((prompts, WIDTH), np.float32)}
    predictor = Predictor(fit_every=1)
    memory = predictor.init(prompts, {"hidden": WIDTH})
    who = rng.integers(prompts, size=20 * predictor.events)
    rates = 1 / (1 + np.exp(-features["hidden"][who] @ rng.standard_normal(WIDTH) / 8))
    visits = iter(list(zip(who.tolist(), (rng.random(who.size) < rates).astype(float).tolist(), strict=True)))

    def observe(count: int) -> tuple[float, float]:
        """Seconds an event to observe it, and to create it."""
        part = list(islice(visits, count))
        start = clock()
        made = [Done(prompt, hit, hit, 7, 3) for prompt, hit in part]
        between = clock()
        for prompt, hit in part:
            predictor.observe(memory, prompt, 0.5, hit, 1)
        return (clock() - between) / len(part), (between - start) / len(made)

    costs, yards = zip(*(observe(predictor.events) for _ in range(min(9, repeats + 2))), strict=True)
    cost, yard = statistics.median(costs), statistics.median(yards)
    held = bars.at_most("an event that the predictor observes", cost / yard, OBSERVED)
    print(f"observe: {cost / yard:.1f} times creating an event ({1 / cost:,.0f} events per second), {held}")
    square = rng.standard_normal((predictor.events, WIDTH + 1))
    beside = milliseconds(lambda: square.T @ square, repeats)
    print(f"yardstick, XᵀX of the {predictor.events} events that are kept: {said(beside)}")

    def show(what: str, times: list[float], bar: float | None) -> None:
        ratio = statistics.median(times) / statistics.median(beside)
        held = "" if bar is None else f", {bars.at_most(what, ratio, bar)}"
        print(f"{what}: {said(times)}, {ratio:.1f} times XᵀX{held}")

    show("first fit", milliseconds(lambda: predictor.refit(memory, features), 1), FIT)
    again = milliseconds(lambda: predictor.refit(memory, features), repeats, lambda: observe(640))
    show("refit after 640 more", again, FIT)
    print({name: round(value, 2) for name, value in predictor.figures(memory).items() if "weight" in name})
    for pool, bar in POOLS.items():
        asked = iter(rng.integers(prompts, size=(repeats, pool * 512)))
        times = milliseconds(lambda asked=asked: predictor(memory, features, next(asked)), repeats)
        show(f"rates of {pool} x 512", times, bar)


@dataclass(frozen=True)
class FitsInPick(Foresight):
    """Foresight as it was until 2026-11-28: it fits when it draws, so inside `ask`."""

    def pick(self, memory: Any, k: int, free_N: Any, view: Any, rng: np.random.Generator) -> Any:
        super().prepare(memory, view)
        return super().pick(memory, k, free_N, view, rng)

    def prepare(self, memory: Any, view: Any) -> None:
        """Nothing."""


def ask(prompts: int, batches: int) -> None:
    """The times of `ask`, and of `rest`, in synchronous runs of 32 rollouts a batch that draw the same prompts."""
    features = {"hidden": np.random.default_rng(0).standard_normal((prompts, WIDTH), np.float32)}
    table, drawn = PromptTable(prompts, features=features), list[list[int]]()
    rate_N = 1 / (1 + np.exp(-features["hidden"] @ np.random.default_rng(1).standard_normal(WIDTH) / 8))
    for name, rule in (("fits in ask", FitsInPick()), ("fits in rest", Foresight())):
        allocator, rng = (
            Allocator(replace(recipes.foresight(groups=32), prompts=rule), table, 0),
            np.random.default_rng(2),
        )
        times: dict[str, list[float]] = {"ask": [], "rest": []}
        drawn.append([])
        while allocator.version < batches:
            start = clock()
            actions = allocator.ask()
            between = clock()
            allocator.rest()
            times["ask"].append(1e3 * (between - start))
            times["rest"].append(1e3 * (clock() - between))
            for order in actions.generate:
                drawn[-1].append(order.prompt)
                hits = (rng.random(len(order.rollouts)) < rate_N[order.prompt]).astype(float)
                ends = zip(order.rollouts, hits.tolist(), strict=True)
                allocator.tell([Done(rollout, hit, hit, 7, allocator.version) for rollout, hit in ends])
            if actions.batch is not None:
                allocator.tell([Updated(allocator.version + 1)])
        shown = {what: np.quantile(found, [0.5, 0.99, 1.0]) for what, found in times.items()}
        print(
            f"{name}: "
            + "; ".join(f"{what} {a:.2f} ms, p99 {b:.2f}, most {c:.2f}" for what, (a, b, c) in shown.items())
        )
    if drawn[0] != drawn[1]:
        raise SystemExit("the two runs drew different prompts")


@dataclass(frozen=True)
class World:
    """8,192 prompts with logits linear in 64 features, but for noise of their own and for `bent` times a square.

    A rollout raises all logits by `common`, and those of its prompt's kind (the nearest of 64 points) by `selective` more.
    Draws of 64 are ∝ p̂(1 − p̂)³ out of 512 random prompts, a share `uniform` of them without regard to p̂.
    """

    common: float = 0.0
    selective: float = 0.0
    bent: float = 0.0
    uniform: float = 0.1


def simulate(world: World, predictor: Predictor, seed: int, batches: int, batch: int = 64) -> dict[str, float]:
    """Means over the run of what is said of 1,024 random prompts, every fifth batch from the tenth on."""
    rng = np.random.default_rng(seed)
    count, width = 8192, 64
    x = rng.standard_normal((count, width)).astype(np.float32)
    base = x @ (rng.standard_normal(width) * 1.5 / np.sqrt(width)) + rng.standard_normal(count) * 0.5
    base += world.bent * ((x @ rng.standard_normal(width)) ** 2 / width - 1)
    kind, lift = np.argmax(x @ rng.standard_normal((width, 64)), 1), np.full(64, -1.0)
    memory = predictor.init(count, {"hidden": width})
    found: list[dict[str, float]] = []
    for number in range(batches):
        p = 1 / (1 + np.exp(-(lift[kind] + base)))
        pool = rng.choice(count, 8 * batch, replace=False)
        said = predictor(memory, {"hidden": x}, pool)
        key = np.log(said * (1 - said) ** 3) + rng.gumbel(size=pool.size)
        blind = round(world.uniform * batch)
        drawn = np.unique(np.append(np.argsort(-key)[: batch - blind], rng.choice(pool.size, blind, replace=False)))
        if number >= 10 and number % 5 == 0:
            some = rng.choice(count, 1024, replace=False)
            found.append(worth(predictor(memory, {"hidden": x}, some), p[some]))
            found[-1]["p̂ − p, drawn"] = float((said[drawn] - p[pool[drawn]]).mean())
        for at in drawn:
            prompt = int(pool[at])
            predictor.observe(memory, prompt, float(said[at]), float(rng.random() < p[prompt]), 1)
            lift += world.common
            lift[kind[prompt]] += world.selective
        if predictor.due(memory):
            predictor.refit(memory, {"hidden": x})
    return {name: float(np.mean([each[name] for each in found])) for name in found[0]}


def worth(said: np.ndarray, p: np.ndarray) -> dict[str, float]:
    """How good rates are, where the true ones are known."""
    ones, tenth, order = np.ones(p.size), p.size // 10, np.argsort(said)
    return {
        "|p̂ − p|": float(np.abs(said - p).mean()),
        "log-loss": float(quality.log_losses(said[:, None], p, ones)[0] / p.size),
        "AUC": quality.auc(said, p, ones) or 0.0,
        "AUC of p": quality.auc(p, p, ones) or 0.0,
        "p": float(p.mean()),
        "p̂ − p": float((said - p).mean()),
        "p̂ − p, lowest tenth": float((said - p)[order[:tenth]].mean()),
        "p̂ − p, highest tenth": float((said - p)[order[-tenth:]].mean()),
    }


def over_seeds(world: World, predictor: Predictor, seeds: int, batches: int) -> dict[str, np.ndarray]:
    """Each figure by seed."""
    runs = [simulate(world, predictor, seed, batches) for seed in range(seeds)]
    return {name: np.array([run[name] for run in runs]) for name in runs[0]}


def shown(figures: dict[str, np.ndarray]) -> str:
    """Means over seeds with their 95% intervals, by the normal approximation."""
    halves = {name: 1.96 * values.std(ddof=1) / np.sqrt(len(values)) for name, values in figures.items()}
    return ", ".join(f"{name} {values.mean():.3f} ± {halves[name]:.3f}" for name, values in figures.items())


def drift(seeds: int, batches: int) -> None:
    """What following a drift changes, paired by seed."""
    worlds = {
        "none": World(),
        "common": World(common=7e-4),
        "selective": World(selective=0.03),
        "both": World(common=3e-4, selective=0.02),
        "common, downwards": World(common=-3e-4),
    }
    for name, world in worlds.items():
        print(f"drift: {name}")
        still = over_seeds(world, Predictor(drift_rate=0.0), seeds, batches)
        following = over_seeds(world, Predictor(), seeds, batches)
        change = {key: following[key] - still[key] for key in ("|p̂ − p|", "log-loss", "AUC")}
        print(f"  not followed: {shown(still)}\n  followed: {shown(following)}\n  difference: {shown(change)}")


def selection(seeds: int, batches: int) -> None:
    """What drawing by what is said does to what is said of the others, where the model is right and where it is not."""
    for bent in (0.0, 1.0):
        for uniform in (0.0, 0.1, 1.0):
            print(f"bent {bent}, {uniform:.0%} drawn without regard to p̂")
            print(f"  {shown(over_seeds(World(bent=bent, uniform=uniform), Predictor(), seeds, batches))}")


def main() -> None:
    parser = with_smallest(argparse.ArgumentParser(description=__doc__))
    parser.add_argument("part", choices=("speed", "ask", "drift", "selection"), nargs="?", default="speed")
    given = parser.parse_args()
    seeds, batches = (2, 12) if given.smallest else (10, 120)
    if given.part == "speed":
        bars = Bars(judged=not given.smallest)
        speed(*((20_000, 1) if given.smallest else (1_000_000, 7)), bars)
        bars.end()
    elif given.part == "ask":
        ask(*((2_000, 12) if given.smallest else (8_192, 200)))
    else:
        {"drift": drift, "selection": selection}[given.part](seeds, batches)


if __name__ == "__main__":
    main()
