"""The predictor: its speed against its bars (`speed`), and what following a drift gains in simulation (`drift`)."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

import numpy as np

from rollalloc.core.events import Done
from rollalloc.predict import quality
from rollalloc.predict.predictor import Predictor

clock = time.process_time  # of one thread: other work on the machine is not ours
PROMPTS, WIDTH = 1_000_000, 256


def median_of(action: Callable[[], object], repeats: int = 7, before: Callable[[], object] = lambda: None) -> str:
    """Median time of an action and its range, in milliseconds; `before` is done before each, and not timed."""
    times = []
    for _ in range(repeats):
        before()
        start = clock()
        action()
        times.append(1e3 * (clock() - start))
    return f"{statistics.median(times):.1f} ms [{min(times):.1f}-{max(times):.1f}]"


def speed() -> None:
    """Draws and refits of 1,000,000 prompts with 256 features each, and events a second beside creating a `Done`."""
    rng = np.random.default_rng(0)
    features = {"hidden": rng.standard_normal((PROMPTS, WIDTH), np.float32)}
    predictor = Predictor(fit_every=1)
    memory = predictor.init(PROMPTS, {"hidden": WIDTH})
    who = rng.permutation(PROMPTS)[: 20 * predictor.events]
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

    costs, yards = zip(*(observe(predictor.events) for _ in range(9)), strict=True)
    cost, yard = statistics.median(costs), statistics.median(yards)
    print(f"observe: {1 / cost:,.0f} events a second, bar 100,000; {cost / yard:.1f} times creating one")
    square = rng.standard_normal((predictor.events, WIDTH + 1))
    print(f"yardstick, XᵀX of the {predictor.events} events that are kept: {median_of(lambda: square.T @ square)}")
    print(f"first fit: {median_of(lambda: predictor.refit(memory, features), 1)}, bar 1000 ms")
    print(
        f"refit after 640 more: {median_of(lambda: predictor.refit(memory, features), 7, lambda: observe(640))}, bar 1000 ms"
    )
    print({name: round(value, 2) for name, value in predictor.figures(memory).items() if "weight" in name})
    for pool in (4, 8, 16):
        asked = iter(rng.integers(PROMPTS, size=(50, pool * 512)))
        print(f"rates of {pool} x 512: {median_of(lambda: predictor(memory, features, next(asked)), 15)}, bar 50 ms")


def simulate(
    predictor: Predictor, seed: int, common: float, selective: float, batches: int = 120
) -> Iterator[np.ndarray]:
    """|p̂ − p|, p̂ − p, log-loss, AUC over random prompts, and p̂ − p over those drawn, from time to time.

    A world of 8,192 prompts of 64 kinds (the nearest of 64 points), with logits that are linear in 64 features, and noise
    of their own. A rollout raises all by `common`, and those of its prompt's kind by `selective` more. Draws of 64 ∝ p̂(1 − p̂)³ out of 512
    random prompts, a tenth of them uniform.
    """
    rng = np.random.default_rng(seed)
    count, width, batch = 8192, 64, 64
    x = rng.standard_normal((count, width)).astype(np.float32)
    w, own = rng.standard_normal(width) * 1.5 / np.sqrt(width), rng.standard_normal(count) * 0.5
    kind, lift = np.argmax(x @ rng.standard_normal((width, 64)), 1), np.full(64, -1.0)
    memory = predictor.init(count, {"hidden": width})
    for number in range(batches):
        p = 1 / (1 + np.exp(-(lift[kind] + x @ w + own)))
        pool = rng.choice(count, 8 * batch, replace=False)
        said = predictor(memory, {"hidden": x}, pool)
        key = np.log(said * (1 - said) ** 3) + rng.gumbel(size=pool.size)
        take = np.concatenate([np.argsort(-key)[: batch - 6], rng.choice(pool.size, 6, replace=False)])
        drawn = np.unique(take)
        if number >= 10 and number % 5 == 0:
            some = rng.choice(count, 1024, replace=False)
            phat, real = predictor(memory, {"hidden": x}, some), p[some]
            ones = np.ones(some.size)
            loss = quality.log_losses(phat[:, None], real, ones)[0] / some.size
            area = quality.auc(phat, real, ones)
            yield np.array(
                [
                    np.abs(phat - real).mean(), (phat - real).mean(), loss, area, quality.auc(real, real, ones),
                    (said[drawn] - p[pool[drawn]]).mean(), real.mean(),
                ]
            )  # fmt: skip
        for at in drawn:
            prompt = int(pool[at])
            predictor.observe(memory, prompt, float(said[at]), float(rng.random() < p[prompt]), 1)
            lift += common
            lift[kind[prompt]] += selective
        if predictor.due(memory):
            predictor.refit(memory, {"hidden": x})


def interval(values: np.ndarray) -> str:
    """Mean over seeds and its 95% interval, by the normal approximation."""
    half = 1.96 * values.std(ddof=1) / np.sqrt(len(values))
    return f"{values.mean():+.4f} ± {half:.4f}"


def drift(seeds: int = 10) -> None:
    """Paired by seed: what following the drift changes."""
    names = ("|p̂ − p|", "p̂ − p", "log-loss", "AUC", "AUC of p itself", "p̂ − p, drawn", "p")
    worlds = {"none": (0, 0), "common": (7e-4, 0), "selective": (0, 0.03), "both": (3e-4, 0.02), "down": (-3e-4, 0)}
    for world, (common, selective) in worlds.items():
        print(f"drift {world}")
        found = {}
        for q in (0.0, *(float(each) for each in sys.argv[2:] or [Predictor().drift_rate])):
            predictor = replace(Predictor(), drift_rate=q)
            runs = [np.mean(list(simulate(predictor, seed, common, selective)), 0) for seed in range(seeds)]
            found[q] = np.array(runs)
            print(f"  q = {q:g}: " + ", ".join(f"{n} {interval(v)}" for n, v in zip(names, found[q].T, strict=True)))
            if q:
                change = found[q] - found[0.0]
                print(
                    "    less without: "
                    + ", ".join(f"{n} {interval(v)}" for n, v in zip(names[:4], change.T, strict=False))
                )


if __name__ == "__main__":
    {"speed": speed, "drift": drift}[sys.argv[1] if len(sys.argv) > 1 else "speed"]()
