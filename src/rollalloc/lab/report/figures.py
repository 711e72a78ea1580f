"""Figures of a run or a comparison. A PNG has a light background; an SVG uses the page's colours."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

import rollalloc
from rollalloc.files.atomic import written
from rollalloc.files.text import one_line
from rollalloc.lab.report import series
from rollalloc.lab.report.style import COLOURS, GROUND, INK, METHODS, MUTED, RULE, by_cause
from rollalloc.runs.recorded import RecordedRun

Methods = Mapping[str, Sequence[RecordedRun]]  # the runs of each label, one per seed; the first label is the baseline
_WIDTH = 4.5  # inches; small, so that the text stays readable on a phone
_NARROW = 0.085  # share of the width; narrower parts of a bar get no number
_POINTS = 60  # a run's evaluations are drawn as points if there are at most this many
_LINES = ("-", "--", ":")  # line styles, for more methods than there are colours
_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"
_VARIABLES: Mapping[str, str] = {colour.light: f"var(--{colour.name})" for colour in COLOURS}
_HEX = re.compile(r"#[0-9a-f]{6}\b")
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
    "svg.fonttype": "none",
}


@contextmanager
def look() -> Iterator[None]:
    """The matplotlib style for drawing and saving a figure."""
    with mpl.rc_context(_LOOK):  # pyright: ignore[reportArgumentType]
        yield


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG."""
    with look():
        software = {"Software": f"rollalloc report {rollalloc.__version__}, by Matplotlib {mpl.__version__}"}
        with written(path) as beside:
            figure.savefig(beside, format="png", dpi=200, metadata=software)


def inline_svg(figure: Figure, name: str, description: str) -> str:
    """The figure as an `<svg>` element.

    Args:
        figure: drawn under `look`.
        name: distinct for each figure on a page, so that ids of clip paths do not collide.
        description: for screen readers.
    """
    drawn = io.BytesIO()
    with look(), mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(drawn, format="svg", transparent=True)
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    root = ElementTree.fromstring(drawn.getvalue())
    for parent in root.iter():
        for child in [child for child in parent if child.tag.endswith(("}metadata", "}style"))]:
            parent.remove(child)
    used = set(re.findall(rb"#(\w+)[\")]", drawn.getvalue()))
    for element in root.iter():
        if (element_id := element.get("id")) and element_id.encode() not in used:
            del element.attrib["id"]
        if style := element.get("style"):
            element.set("style", _HEX.sub(lambda match: _VARIABLES.get(match[0], match[0]), style))
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.set("role", "img")
    root.set("aria-label", description)
    return ElementTree.tostring(root, encoding="unicode")


def accuracy(methods: Methods, cost: str, target: float | None) -> Figure | None:
    """Held-out accuracy against a cost: a thin line for each run, a thick line for the interquartile mean, and its interval.

    Args:
        methods: the runs of each method.
        cost: "rollouts" or "tokens".
        target: the accuracy at which a line is drawn. None: no line.

    Returns:
        The figure; None if no run was evaluated.
    """
    with look():
        figure, axes = _figure(3.5)
        evaluated = False
        for at, (label, runs) in enumerate(methods.items()):
            colour = METHODS[at % len(METHODS)].light
            for run in runs:
                axes.plot(getattr(run.curve, cost), run.curve.accuracy, color=colour, alpha=0.3, linewidth=0.7)
            if len(runs) == 1 and len(runs[0].curve.accuracy) <= _POINTS:
                _points(axes, runs[0], cost, colour)
            middle = series.accuracy_over_seeds(runs, cost)
            if middle is None:
                continue
            evaluated = True
            line = _LINES[at // len(METHODS) % len(_LINES)]
            axes.plot(middle.x_X, middle.middle_X, line, color=colour, linewidth=2.2, label=one_line(label, 24))
            axes.fill_between(middle.x_X, middle.low_X, middle.high_X, color=colour, alpha=0.15, linewidth=0)
        if not evaluated:
            return None
        if target is not None:
            axes.axhline(target, color=MUTED.light, linestyle=(0, (4, 3)), linewidth=1)
            beside = axes.get_yaxis_transform()
            axes.text(0.01, target, f"target {target:g}", color=MUTED.light, va="bottom", transform=beside)
        axes.set_ylabel("held-out accuracy")
        _rollouts_below(axes, "tokens generated" if cost == "tokens" else _unit(methods))
        axes.grid(axis="y")
        figure.legend(loc="outside upper left", ncols=3)
    return figure


def _points(axes: Axes, run: RecordedRun, cost: str, colour: str) -> None:
    """Draw a run's evaluations as points, with a bar for the standard error where it is known."""
    errors = [error or 0.0 for error in run.curve.standard_error]
    x = getattr(run.curve, cost)
    axes.errorbar(x, run.curve.accuracy, yerr=errors, fmt="o", color=colour, markersize=3.5, elinewidth=1, capsize=2)


def _unit(methods: Methods) -> str:
    """The unit of the x axis."""
    return next((run.unit for runs in methods.values() for run in runs), "rollouts paid")


def training(methods: Methods) -> Figure | None:
    """Reward, entropy, gradient norm and loss over the run: a panel for each of them, with a line for each method."""
    over_time: dict[str, dict[str, series.OverTime]] = {}
    for label, runs in methods.items():
        for over in (series.training_over_time(runs), series.entropy_over_time(runs)):
            if over is not None:
                for name in over.values:
                    over_time.setdefault(name, {})[label] = over
    names = [name for name in ("reward", "entropy", "grad norm", "loss") if name in over_time]
    if not names:
        return None
    with look():
        figure = Figure(figsize=(_WIDTH, 1.0 + 1.15 * len(names)), layout="constrained")
        rows = np.atleast_1d(figure.subplots(len(names), sharex=True))
        for axes, name in zip(rows, names, strict=True):
            for label, over in over_time[name].items():
                at = list(methods).index(label)
                line = _LINES[at // len(METHODS) % len(_LINES)]
                colour = METHODS[at % len(METHODS)].light
                axes.plot(over.x_X, over.values[name], line, color=colour, linewidth=1.6, label=one_line(label, 24))
            axes.set_title(name)
            axes.grid(axis="y")
            axes.margins(x=0)
        _rollouts_below(rows[-1], _unit(methods))
        if len(methods) > 1:
            drawn = {handle.get_label(): handle for axes in rows for handle in axes.get_lines()}
            figure.legend(handles=list(drawn.values()), loc="outside upper left", ncols=3)
    return figure


def where_rollouts_went(methods: Methods) -> Figure | None:
    """One bar per method: its length is the number of rollouts paid, and its parts are the rollouts that were trained on,
    stale, cancelled and so on. All numbers are means over seeds.
    """
    paid = {label: series.paid_by_cause(runs) for label, runs in methods.items()}
    paid = {label: accounts for label, accounts in paid.items() if sum(accounts.values())}
    if not paid or (len(paid) == 1 and len(by_cause(*paid.values())) < 2):  # a single bar of one colour is useless
        return None
    longest = max(sum(accounts.values()) for accounts in paid.values())
    with look():
        figure, axes = _figure(1.3 + 0.44 * len(paid))
        for row, accounts in enumerate(paid.values()):
            left, total = 0.0, sum(accounts.values())
            for kind, count in by_cause(accounts):
                axes.barh(row, count, left=left, height=0.66, color=kind.colour.light)
                if count > _NARROW * longest:
                    axes.text(left + count / 2, row, f"{count / total:.0%}", ha="center", va="center", color="#000001")
                left += count
            axes.text(left + longest * 0.012, row, f"{total:,.0f}", va="center", color=MUTED.light)
        axes.set_yticks(range(len(paid)), [one_line(label, 18) for label in paid], color=INK.light)
        axes.invert_yaxis()
        axes.set_xlim(0, longest * 1.16)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.tick_params(length=0)
        seeds = max(len(runs) for runs in methods.values())
        _rollouts_below(axes, "rollouts paid" + (", mean of the seeds" if seeds > 1 else ""))
        together = sum((Counter(accounts) for accounts in paid.values()), Counter[str]())
        handles = [Patch(color=kind.colour.light, label=kind.words) for kind, _ in by_cause(together)]
        figure.legend(handles=handles, loc="outside upper left", ncols=3, handlelength=0.9)
    return figure


def lengths(methods: Methods) -> Figure | None:
    """For each method, the rollouts' median length, the ranges from 25 to 75% and from 10 to 90%, and the maximum."""
    over_time = {label: series.lengths_over_time(runs) for label, runs in methods.items()}
    if not any(over_time.values()):
        return None
    with look():
        figure = Figure(figsize=(_WIDTH, 1.1 + 1.15 * len(methods)), layout="constrained")
        rows = np.atleast_1d(figure.subplots(len(methods), sharex=True, sharey=True))
        for axes, (label, over) in zip(rows, over_time.items(), strict=True):
            axes.set_title(one_line(label, 40) + ("" if over else ": not recorded"))
            axes.margins(x=0)
            if over is not None:
                _lengths(axes, over)
        figure.supylabel("tokens", fontsize=10, color=MUTED.light)
        _rollouts_below(rows[-1], _unit(methods))
    return figure


def _lengths(axes: Axes, over: series.OverTime) -> None:
    colour, at = METHODS[1].light, over.values
    if "p50" in at:
        axes.fill_between(over.x_X, at["p10"], at["p90"], color=colour, alpha=0.18, linewidth=0)
        axes.fill_between(over.x_X, at["p25"], at["p75"], color=colour, alpha=0.32, linewidth=0)
    else:
        axes.plot(over.x_X, at["min"], color=MUTED.light, linewidth=0.8, linestyle=(0, (2, 2)))
    axes.plot(over.x_X, at["p50" if "p50" in at else "mean"], color=colour, linewidth=2)
    axes.plot(over.x_X, at["max"], color=MUTED.light, linewidth=0.8, linestyle=(0, (2, 2)))
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _rollouts_below(axes: Axes, label: str) -> None:
    axes.set_xlabel(label)
    axes.xaxis.set_major_formatter(lambda value, _: _short(value))


def _short(value: float) -> str:
    """A short form of a number, such as 12k for 12,000, because there is little room on a phone."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:g}"
