"""Draws a figure as a PNG, on a light ground, for where no page can be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import singledispatch
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

import rollalloc
from rollalloc.files.regular import written
from rollalloc.report.charts import Area, Bars, Between, Cells, Chart, Line, Mark, Panel
from rollalloc.report.style import GROUND, INK, MUTED, RULE, SCALE

_WIDTH = 4.5  # inches; small, so that the text stays readable on a phone
_DASHES = {"solid": "-", "dash": "--", "dot": ":"}
_LOOK = {
    "font.size": 10,
    "font.family": "sans-serif",
    "text.color": INK.light,
    "text.parse_math": False,  # so that dollar signs in labels are shown
    "axes.edgecolor": RULE.light,
    "axes.labelcolor": MUTED.light,
    "axes.titlecolor": INK.light,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": GROUND.light,
    "grid.color": RULE.light,
    "grid.linewidth": 0.6,
    "xtick.color": RULE.light,
    "ytick.color": RULE.light,
    "xtick.labelcolor": MUTED.light,
    "ytick.labelcolor": MUTED.light,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "legend.columnspacing": 1.2,
}


@contextmanager
def _look() -> Iterator[None]:
    with mpl.rc_context(_LOOK):  # pyright: ignore[reportArgumentType]
        yield


def save(chart: Chart, path: Path) -> None:
    """Write a figure as PNG."""
    with _look():
        software = {"Software": f"rollalloc report {rollalloc.__version__}, by Matplotlib {mpl.__version__}"}
        with written(path) as beside:
            _drawn(chart).savefig(beside, format="png", dpi=200, metadata=software)


def _drawn(chart: Chart) -> Figure:
    heights = [_height(panel) for panel in chart.panels]
    figure = Figure(figsize=(_WIDTH, 1.0 + sum(heights)), layout="constrained")
    rows = np.atleast_1d(figure.subplots(len(heights), sharex=True, gridspec_kw={"height_ratios": heights}))
    for axes, panel in zip(rows, chart.panels, strict=True):
        _draw_panel(axes, panel)
    rows[-1].set_xlabel(chart.panels[-1].x)
    rows[-1].xaxis.set_major_formatter(lambda value, _: short(value))
    named = {handle.get_label(): handle for axes in rows for handle in axes.get_legend_handles_labels()[0]}
    if len(named) > 1:
        figure.legend(handles=list(named.values()), loc="outside upper left", ncols=3)
    return figure


def _height(panel: Panel) -> float:
    """The height of a panel in inches."""
    if isinstance(panel.first, Bars):
        return 0.3 + 0.44 * len(panel.first.labels)
    if isinstance(panel.first, Cells):
        return 3.0
    return 1.3 if panel.title else 2.5


def _draw_panel(axes: Axes, panel: Panel) -> None:
    if panel.title:
        axes.set_title(panel.title)
    if not isinstance(panel.first, Bars | Cells):
        axes.grid(axis="y")
        axes.margins(x=0 if panel.title else 0.02)
    foot: dict[int, np.ndarray] = {}  # the height of the areas, or the length of the bars, that were drawn before
    for mark in panel.marks:
        _draw(mark, axes, foot)
    if panel.level is not None:
        value, words = panel.level
        # Named in the legend, because beside the line, wherever that is, a curve may pass through the name.
        axes.axhline(value, color=MUTED.light, linestyle=(0, (4, 3)), linewidth=1, label=words)
    if panel.share:
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    elif panel.from_zero:
        axes.set_ylim(bottom=0)
    if panel.y not in ("share", panel.title):
        axes.set_ylabel(panel.y)


@singledispatch
def _draw(mark: Mark, axes: Axes, foot: dict[int, np.ndarray]) -> None:
    raise TypeError(f"expected a mark of a chart, got {mark!r}")


@_draw.register
def _(mark: Line, axes: Axes, foot: dict[int, np.ndarray]) -> None:
    colour, dash = mark.colour.light, _DASHES[mark.dash]
    if mark.faint:
        axes.plot(mark.x, mark.y, color=colour, alpha=0.3, linewidth=0.7)
        return
    width = 1 if mark.dash == "dot" else 2
    axes.plot(mark.x, mark.y, dash, color=colour, linewidth=width, label=mark.name)
    if mark.points:
        axes.errorbar(mark.x, mark.y, yerr=mark.error, fmt="o", color=colour, markersize=3.5, elinewidth=1, capsize=2)


@_draw.register
def _(mark: Between, axes: Axes, foot: dict[int, np.ndarray]) -> None:
    alpha = 0.32 if mark.strong else 0.16
    axes.fill_between(mark.x, mark.low, mark.high, color=mark.colour.light, alpha=alpha, linewidth=0)


@_draw.register
def _(mark: Area, axes: Axes, foot: dict[int, np.ndarray]) -> None:
    low = foot.get(0, np.zeros(len(mark.x)))
    foot[0] = low + np.asarray(mark.y)
    axes.fill_between(mark.x, low, foot[0], color=mark.colour.light, linewidth=0, label=mark.name)


@_draw.register
def _(mark: Bars, axes: Axes, foot: dict[int, np.ndarray]) -> None:
    rows, values = np.arange(len(mark.labels)), np.asarray(mark.values)
    left = foot.get(0, np.zeros(len(rows)))
    foot[0] = left + values
    axes.barh(rows, values, left=left, height=0.66, color=mark.colour.light)
    axes.add_artist(Patch(color=mark.colour.light, label=mark.name, visible=False))
    axes.set_yticks(rows, list(mark.labels), color=INK.light)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)


@_draw.register
def _(mark: Cells, axes: Axes, foot: dict[int, np.ndarray]) -> None:
    colours = LinearSegmentedColormap.from_list("scale", [colour.light for colour in SCALE])
    rows = np.arange(len(mark.labels) + 1)
    drawn = axes.pcolormesh(mark.edges, rows, np.ma.masked_invalid(mark.values), cmap=colours, vmin=0, vmax=mark.most)
    axes.invert_yaxis()
    axes.set_yticks([])
    figure = axes.get_figure()
    assert figure is not None
    figure.colorbar(drawn, ax=axes, label=mark.name)


def short(value: float) -> str:
    """A short form of a number, such as 12k for 12,000, because there is little room on a phone."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:g}"
