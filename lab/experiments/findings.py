"""What is true of Pilot-Commit: the runs, tables and figures of lab/docs/released.md.

`python lab/experiments/findings.py QUESTION --tasks FOLDER --out FOLDER [--seeds K]` answers one question, prints tables and
draws its figure into the folder; what is there is not repeated, and what was begun goes on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from findings_decay import LAGS, Decay, decay, rates
from findings_figures import draw_map, draw_pilots, draw_runs, lines
from findings_map import (
    LATE_SHARES,
    POOLS,
    SIZES,
    WINDOW,
    Map,
    measure,
    plain_rates,
    pool_of,
    quarter,
    sampled_pool,
    simulated,
    worth,
)
from findings_runs import (
    BUDGET,
    CELL_SEEDS,
    CELLS,
    LARGE_SEEDS,
    QUESTIONS,
    SEEDS,
    TUNING_BUDGET,
    Variant,
    answers,
    cell,
    large_groups,
    methods,
    more_than,
    pilots,
    tuned_rates,
)
from rollalloc.train.loading import one_thread

# What trains while its rates are looked at, and when, in updates of the weights.
DECAYING: dict[str, tuple[Variant, tuple[int, ...]]] = {
    "batches of 32 rows, 1 step": (Variant("pilot_commit", pilots()), (0, 8, 16, 24)),
    "batches of 128 rows, 4 steps": (
        Variant("pilot_commit", pilots(groups=16), changes={"optimizer_steps_per_batch": 4}),
        (0, 4, 8),
    ),
}
# GRPO's rollouts over the method's on skills/late, n = 4, 8, 16, each at its best learning rate and shape of the sweep of
# lab/log, "Sweep for those settings": medians of three tuning seeds.
SWEPT = {"DAPO": (0.73, 0.69, 0.58), "DAPO, carried": (0.96, 0.98, 0.84), "Pilot-Commit": (0.81, 1.16, 1.16)}
PLAIN = 2.26  # over REINFORCE, running mean, neg 0.1, of GRPO 16 x 4: docs/foresight.md, eight seeds
SIMULATED = 20_000  # rollouts of a run of the allocator


def decaying(tasks: Path, out: Path, seeds: int) -> dict[str, NDArray[np.float64]]:
    """The exact rates of two kinds of runs: moments of all seeds, lags, prompts."""
    return {
        name: np.concatenate([rates(*one, tasks, out / "decay" / f"{name}-{seed}.npy", seed) for seed in SEEDS[:seeds]])
        for name, one in DECAYING.items()
    }


def show_decay(tasks: Path, out: Path, seeds: int) -> None:
    """How long a pilot estimate stays true."""
    for name, p_TSN in decaying(tasks, out, seeds).items():
        print(f"\n{name}\n| pilots + commits | updates | {' | '.join(Decay.__annotations__)} |\n|{'---|' * 8}")
        for k, m in ((4, 4), (16, 48)):
            for lag, updates in enumerate(LAGS):
                found = vars_of(decay(p_TSN, lag, k, m, WINDOW))
                print(f"| {k} + {m} | {updates} | {' | '.join(found)} |")


def vars_of(found: Decay) -> list[str]:
    return ["{:.3f} [{:.3f}–{:.3f}]".format(*getattr(found, name)) for name in Decay.__annotations__]


def the_map(tasks: Path, out: Path) -> Map:
    """Measured once."""
    return Map(plain_rates(tasks), measure(tasks, out / "gradients.npz"))


def show_map(of: Map, out: Path) -> None:
    """Where Pilot-Commit is cheaper than what, and what windows, metrics and eviction do."""
    draw_map(of, out / "findings-map.png")
    print(f"\n| hopeless / solved, % | n | {' | '.join(_OTHERS)} |\n|{'---|' * (2 + len(_OTHERS))}")
    for name, shares in POOLS.items():
        for n in (4, 16, 64):
            found = [of.ratio(shares, lambda _, n=n: of.groups(quarter(n), n), one(of, n)) for one in _OTHERS.values()]
            print(f"| {name} | {n} | {' | '.join('{:.2f} [{:.2f}–{:.2f}]'.format(*each) for each in found)} |")
    late_B = pool_of(of.rate_N, *LATE_SHARES)
    print("\nwhat discarding leaves of DAPO, 16 groups:", {n: round(of.keeps(late_B, n, 16), 2) for n in SIZES})
    print("\n| window of the pilots' mean | 4 + 4 | 16 + 48 |\n|---|---|---|")
    for window in ((0.125, 0.75), (0.0, 0.75), (0.125, 1.0), (0.5, 0.5), (0.0, 1.0), (1 / 6, 1.0), (0.25, 1.0)):
        found = [
            of.ratio(LATE_SHARES, lambda _, k=k, n=n, at=window: of.groups(k, n, at), lambda _, n=n: of.groups(0, n))
            for k, n in ((4, 8), (16, 64))
        ]
        print(
            f"| {window[0]:.3f} to {window[1]} | {' | '.join('{:.2f} [{:.2f}–{:.2f}]'.format(*one) for one in found)} |"
        )
    print(
        "\n| pilots all right | mean rate | below 0.9 | below 0.5 | of visits | worth without |\n|---|---|---|---|---|---|"
    )
    for k, n in ((4, 8), (8, 32), (16, 64)):
        print(f"| {k} of {k} | {' | '.join(f'{each:.3f}' for each in of.evicted(LATE_SHARES, k, n))} |")


_OTHERS = {
    "over GRPO, same n": lambda of, n: lambda _: of.groups(0, n),
    "over GRPO, n = 4": lambda of, n: lambda _: of.groups(0, 4),
    "over REINFORCE": lambda of, n: lambda pool_B: of.plain(pool_B),
    "over RAFT": lambda of, n: lambda pool_B: of.plain(pool_B, 0.0, False),
}


def show_allocator(of: Map, out: Path) -> None:
    """The closed forms of the map beside runs of the real allocator; kept in a file."""
    to = out / "allocator.json"
    known = json.loads(to.read_text()) if to.exists() else {}
    print(
        "\n| hopeless / solved, % | n | method | paid a trained row | a teaching row | worth, allocator over closed form |"
    )
    print("|---|---|---|---|---|---|")
    for pool in ("10 / 10", "40 / 40"):
        rate_N, pool_B = sampled_pool(of.rate_N, *POOLS[pool]), pool_of(of.rate_N, *POOLS[pool])
        for n in (4, 16):
            for name, variant in methods(n, rows=16 * n).items():
                key = f"{pool}, {n}, {name}"
                if key not in known:
                    run = simulated(variant.recipe, variant.parameters, rate_N, of.measured, 0, SIMULATED)
                    known[key] = [run.row, run.teaching, run.worth]
                    to.write_text(json.dumps(known))
                row, teaching, gained = known[key]
                share = gained / (worth(of.method(name, n, pool_B), pool_B, of.measured) * of.kept(name, n, pool_B))
                print(f"| {pool} | {n} | {name} | {row:.2f} | {teaching:.2f} | {share:.2f} |")


def show_runs(of: Map, tasks: Path, out: Path, seeds: int) -> None:
    """What the map says beside the sweep of skills/late; every question that was trained."""
    predicted = {
        f"{name}, n = {n}": (of.over_grpo(name, n, LATE_SHARES, 4 if n > 8 else 8), found)
        for name, each in SWEPT.items()
        for n, found in zip((4, 8, 16), each, strict=True)
    }
    predicted["REINFORCE, n = 4"] = (of.over_grpo("REINFORCE", 4, LATE_SHARES, 64), PLAIN)
    for name, (said, found) in predicted.items():
        print("{}: map {:.2f} [{:.2f}–{:.2f}], trained {:.2f}".format(name, *said, found))
    trained = {}
    chosen = tuned_rates(tasks, out, TUNING_BUDGET)
    questions = {at: cell(at, chosen, tasks, out, CELL_SEEDS[:seeds], BUDGET) for at in CELLS}
    questions |= {question: answers(question, tasks, out, SEEDS[:seeds], BUDGET) for question in QUESTIONS}
    for question, found in questions.items():
        print(f"\n{question}", *lines(found), sep="\n")
        first, *others = found
        trained |= {f"{title(question)}{label} (to {first})": more_than(found[first], found[label]) for label in others}
    draw_runs(predicted, trained, out / "findings-runs.png")


def title(question: str | tuple[str, int]) -> str:
    """What stands before a label: the pool's shares, or nothing."""
    return "" if isinstance(question, str) else f"{' / '.join(question[0].removeprefix('pool/').split('-')[:2])}: "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "question", choices=[*QUESTIONS, "cells", "large", "decay", "map", "allocator", "pilots", "runs"]
    )
    parser.add_argument("--tasks", type=Path, required=True, help="folder of tasks; made where they are not there")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3, help=f"of {SEEDS}, the first so many; cells have {CELL_SEEDS}")
    given = parser.parse_args()
    tasks, out, seeds = given.tasks, given.out, given.seeds
    if not 1 <= seeds <= len(SEEDS):
        parser.error(f"--seeds must be from 1 to {len(SEEDS)}, got {seeds}")
    out.mkdir(parents=True, exist_ok=True)
    one_thread()
    match given.question:
        case "decay":
            show_decay(tasks, out, seeds)
        case "map":
            show_map(the_map(tasks, out), out)
        case "allocator":
            show_allocator(the_map(tasks, out), out)
        case "pilots":
            draw_pilots(the_map(tasks, out), decaying(tasks, out, seeds), out / "findings-pilots.png")
        case "runs":
            show_runs(the_map(tasks, out), tasks, out, seeds)
        case "cells":
            chosen = tuned_rates(tasks, out, TUNING_BUDGET)
            for at in CELLS:
                print(*lines(cell(at, chosen, tasks, out, CELL_SEEDS[:seeds], BUDGET)), sep="\n")
        case "large":
            print(*lines(large_groups(tasks, out, LARGE_SEEDS[:seeds])), sep="\n")
        case question:
            print(*lines(answers(question, tasks, out, SEEDS[:seeds], BUDGET)), sep="\n")


if __name__ == "__main__":
    main()
