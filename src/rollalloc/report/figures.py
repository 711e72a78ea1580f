"""Figures of a comparison, from the runs' curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from rollalloc.bench.cost import Curve

# Okabe and Ito's palette, told apart by colour-blind readers and in grey.
_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def accuracy_against_rollouts(
    curves: Mapping[str, Sequence[Curve]], path: Path, *, target: float | None = None, title: str = ""
) -> None:
    """Draw held-out accuracy against rollouts paid: each run thin, the median over seeds thick.

    The median is drawn as far as every run of a recipe goes: beyond the first run that ended, those left would mislead.

    Args:
        curves: recipe → a curve for each seed.
        path: of the PNG.
        target: drawn as a line.
        title: above the figure.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for colour, (recipe, runs) in zip(_COLOURS * 4, curves.items(), strict=False):
        for run in runs:
            axes.plot(run.rollouts, run.accuracy, color=colour, alpha=0.25, linewidth=0.8)
        rollouts_X, median_X = median_curve(runs)
        seeds = f"{len(runs)} seed{'s' if len(runs) > 1 else ''}"
        axes.plot(rollouts_X, median_X, color=colour, linewidth=2.2, label=f"{recipe} (median of {seeds})")
    if target is not None:
        axes.axhline(target, color="#888888", linestyle="--", linewidth=1)
        axes.annotate(f"target {target:g}", (0, target), xytext=(4, 4), textcoords="offset points", color="#555555")
    axes.set_xlabel("rollouts paid")
    axes.set_ylabel("held-out accuracy")
    axes.set_title(title)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)


def median_curve(runs: Sequence[Curve], points: int = 200) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Rollouts and the median accuracy over runs, interpolated linearly on a grid that every run covers."""
    grid_X = np.linspace(max(run.rollouts[0] for run in runs), min(run.rollouts[-1] for run in runs), points)
    return grid_X, np.median([np.interp(grid_X, run.rollouts, run.accuracy) for run in runs], axis=0)
