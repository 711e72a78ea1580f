"""Figures and tables of lab/docs/released.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import TwoSlopeNorm

from findings_decay import LAGS, decay
from findings_map import LATE_SHARES, SIZES, WINDOW, Floats, Map, Method, pool_of, quarter, worth
from findings_runs import gains, more_than
from rollalloc.compare.summary import EndedRun, Interval

STEPS = np.arange(10) / 10  # shares of hopeless and of solved prompts
INK, BLUE, RED, GREY = "#222222", "#2a6fb0", "#c0392b", "#888888"


def draw_map(of: Map, to: Path) -> None:
    """How many times fewer rollouts Pilot-Commit needs, by shares of hopeless and solved prompts and n."""
    rows: list[tuple[str, Callable[[Floats, int], Method]]] = [
        ("GRPO, same n\n(and DAPO, carried)", lambda _, n: of.groups(0, n)),
        ("GRPO, n = 4", lambda _, n: of.groups(0, 4)),
        ("REINFORCE, n = 1", lambda pool_B, _: of.plain(pool_B)),
    ]
    shown: Any = None  # the last panel, from which the bar of colours is made
    figure, panels = plt.subplots(3, len(SIZES), figsize=(9.6, 5.8), sharex=True, sharey=True, layout="constrained")
    norm = TwoSlopeNorm(0, np.log(0.25), np.log(4))
    for axes, n in zip(panels[0], SIZES, strict=True):
        axes.set_title(f"n = {n}: {quarter(n)} + {n - quarter(n)}", fontsize=9)
    for line, (name, other) in zip(panels, rows, strict=True):
        for axes, n in zip(line, SIZES, strict=True):
            grid = np.full((len(STEPS), len(STEPS)), np.nan)
            for y, solved in enumerate(STEPS):
                for x, hopeless in enumerate(STEPS):
                    if hopeless + solved < 0.95:
                        pool_B = pool_of(of.rate_N, hopeless, solved)
                        one, two = of.groups(quarter(n), n), other(pool_B, n)
                        grid[y, x] = worth(one, pool_B, of.measured) / worth(two, pool_B, of.measured)
            shown = axes.imshow(
                np.log(grid), origin="lower", cmap="RdBu", norm=norm, extent=(-5, 95, -5, 95), aspect="auto"
            )
            for x, y in ((0, 0), (40, 40), (80, 0), (0, 80), (10, 10)):
                value = grid[y // 10, x // 10]
                color = INK if 0.45 < value < 2.2 else "white"
                axes.text(max(x, 3), y, f"{value:.1f}", ha="center", va="center", fontsize=6, color=color)
            axes.set_xticks((0, 40, 80))
            axes.set_yticks((0, 40, 80))
        line[0].set_ylabel(f"over {name}\n\nsolved, %", fontsize=8)
    for axes in panels[-1]:
        axes.set_xlabel("hopeless, %", fontsize=8)
    bar = figure.colorbar(shown, ax=panels, shrink=0.6, ticks=np.log([0.25, 0.5, 1, 2, 4]))
    bar.ax.set_yticklabels(["1/4", "1/2", "1", "2", "4"])
    bar.set_label("times fewer rollouts (blue: Pilot-Commit is cheaper)", fontsize=8)
    figure.savefig(to, dpi=110)
    plt.close(figure)


def draw_pilots(of: Map, rates: Mapping[str, Floats], to: Path) -> None:
    """What a share of pilots is worth, and how long what they said stays true."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(9.6, 3.1), layout="constrained")
    pool_B = pool_of(of.rate_N, *LATE_SHARES)
    for n, shade in zip((16, 32, 64, 128), ("#9ecae1", "#6baed6", "#2a6fb0", "#08306b"), strict=True):
        counts = [n // part for part in (16, 8, 4, 2)]
        base = worth(of.groups(0, n), pool_B, of.measured)
        gained = [worth(of.groups(k, n), pool_B, of.measured) / base if k > 1 else np.nan for k in counts]
        left.plot(range(4), gained, "o-", color=shade, label=f"n = {n}", markersize=4)
    left.axhline(1, color=GREY, linewidth=0.8)
    left.set_xticks(range(4), ("1/16", "1/8", "1/4", "1/2"))
    left.set_xlabel("share of pilots")
    left.set_ylabel("worth of a rollout over GRPO's, same n")
    left.legend(fontsize=7, frameon=False)
    for (name, p_TSN), color in zip(rates.items(), (BLUE, RED), strict=True):
        for axes, what in ((middle, "accepted"), (right, "variance")):
            for (k, m), style in (((4, 4), "o-"), ((16, 48), "s--")):
                found = np.array([getattr(decay(p_TSN, lag, k, m, WINDOW), what) for lag in range(len(LAGS))])
                spread = np.abs(found[:, 1:].T - found[:, 0])
                axes.errorbar(
                    LAGS,
                    found[:, 0],
                    spread,
                    fmt=style,
                    color=color,
                    label=f"{k} + {m}, {name}",
                    markersize=3,
                    capsize=2,
                )
    for axes, what in (
        (middle, "correlation of pilots and commits,\naccepted prompts"),
        (right, "p (1 − p) that is left"),
    ):
        axes.set_xlabel("updates in between")
        axes.set_ylabel(what)
        axes.set_xticks(LAGS)
    right.set_ylim(0.8, 1.03)
    middle.set_ylim(0.4, 1)
    right.legend(fontsize=6, frameon=False, loc="lower left")
    figure.savefig(to, dpi=110)
    plt.close(figure)


def draw_runs(predicted: Mapping[str, tuple[Floats, float]], trained: Mapping[str, Interval], to: Path) -> None:
    """What the map says beside what real training paid; and what changing one thing did to the gain."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4.4), layout="constrained", width_ratios=(1, 1.1))
    for at, (said_of, found) in enumerate(reversed(list(predicted.values()))):
        left.plot(said_of[1:], [at, at], color=BLUE, linewidth=1)
        left.plot(said_of[0], at, "o", color=BLUE, markersize=5, label="the map" if not at else None)
        left.plot(found, at, "D", color=RED, markersize=5, label="trained" if not at else None)
    left.set_yticks(range(len(predicted)), list(predicted)[::-1], fontsize=7)
    left.set_xscale("log")
    left.set_xticks((0.5, 0.7, 1, 1.5, 2, 3), ("0.5", "0.7", "1", "1.5", "2", "3"))
    left.xaxis.set_minor_locator(plt.NullLocator())
    left.axvline(1, color=GREY, linewidth=0.8)
    left.set_xlabel("times fewer rollouts than GRPO with the same n", fontsize=9)
    left.legend(fontsize=7, frameon=False)
    for at, one in enumerate(reversed(list(trained.values()))):
        right.plot(100 * np.array(one.values), [at] * len(one.values), ".", color=GREY)
        right.plot(100 * one.point, at, "o", color=BLUE)
    right.axvline(0, color=GREY, linewidth=0.8)
    right.set_yticks(range(len(trained)), list(trained)[::-1], fontsize=7)
    right.set_xscale("symlog", linthresh=1)
    right.set_xticks((-10, -3, -1, 0, 1, 3, 10, 30), ("-10", "-3", "-1", "0", "1", "3", "10", "30"))
    right.xaxis.set_minor_locator(plt.NullLocator())
    right.set_xlabel("points of accuracy more (beyond ±1 logarithmic)", fontsize=9)
    figure.savefig(to, dpi=110)
    plt.close(figure)


def lines(found: Mapping[str, Sequence[EndedRun]]) -> list[str]:
    """A table of a question's runs: points of accuracy gained, and how many more than the first gained."""
    base = next(iter(found.values()))
    table = ["| | gain by seed, points | mean | more than the first, by seed | mean |", "|---|---|---|---|---|"]
    for name, runs in found.items():
        gained, more = gains(runs), more_than(base, runs)
        row = [f"{' '.join(f'{100 * each:+.1f}' for each in one.values)} | {said(one)}" for one in (gained, more)]
        table.append(f"| {name} | {' | '.join(row)} |")
    return table


def said(one: Interval) -> str:
    """An interquartile mean in points, with its interval where there is one."""
    point = f"{100 * one.point:+.1f}"
    return point if one.low is None or one.high is None else f"{point} [{100 * one.low:+.1f}, {100 * one.high:+.1f}]"
