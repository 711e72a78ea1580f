"""Figures for plotly.js, and the library itself, packed so that a page needs nothing else.

The library is that of the package `plotly`, whole, compressed. The browser unpacks it (`page.js`).
Colours are named `var(--NAME)` or `var(--NAME)/OPACITY`; the page replaces them by those of its theme.
plotly.js reads some HTML in texts, so every text is escaped here.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Sequence
from functools import cache, singledispatch
from html import escape
from importlib.resources import files
from itertools import count
from math import isfinite
from typing import Any

import numpy as np

from rollalloc.files.text import visible
from rollalloc.report.charts import Area, Bars, Between, Cells, Chart, Line, Mark, Numbers, Panel
from rollalloc.report.style import SCALE, Colour

Trace = dict[str, Any]
_GAP = 62  # pixels between two panels, for the title of the lower one
_TITLE = 24  # pixels above the first panel, for its title
_BOTTOM = 52  # pixels below the last panel, for the axis


@cache
def library() -> tuple[str, str]:
    """plotly.js: compressed, as base64; and its digest for the page's content security policy."""
    script = (files("plotly") / "package_data" / "plotly.min.js").read_bytes()
    return packed(script), script_hash(script)


def packed(content: bytes) -> str:
    """Content compressed by gzip, as base64. Equal contents give equal texts."""
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode("ascii")


def script_hash(script: bytes) -> str:
    """The source that allows a script of this content in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode('ascii')}'"


def as_json(value: Any) -> bytes:
    """A value as JSON that every browser reads: NaN and infinities become null."""
    return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False).encode("ascii")


def plotly(chart: Chart) -> dict[str, Any]:
    """The data and the layout of a figure, for `Plotly.newPlot`."""
    heights = [_height(panel) for panel in chart.panels]
    inner = sum(heights) + _GAP * (len(heights) - 1)
    layout: dict[str, Any] = {"height": inner + _TITLE + _BOTTOM, "annotations": [], "shapes": []}
    data: list[Trace] = []
    named: set[str] = set()
    top, axis = 1.0, "y"
    for number, panel, height in zip(count(1), chart.panels, heights, strict=False):
        axis = "y" if number == 1 else f"y{number}"
        domain = [max(0.0, top - height / inner), top]
        layout[f"yaxis{axis[1:]}"] = {**_y_axis(panel), "domain": domain}
        layout["annotations"] += [*_title(panel, top), *_level_words(panel, axis)]
        layout["shapes"] += _level_line(panel, axis)
        top = domain[0] - _GAP / inner
        for mark in panel.marks:
            for trace in _traces(mark):
                if "colorbar" in trace:
                    trace["colorbar"] |= {"y": sum(domain) / 2, "len": domain[1] - domain[0]}
                shown = trace.get("showlegend", True) and trace["name"] not in named
                named |= {trace["name"]} if shown else set()
                data.append({**trace, "yaxis": axis, "legendgroup": trace["name"], "showlegend": shown})
    layout["showlegend"] = len(named) > 1
    layout["legend"] = {"y": 1 + _TITLE / inner}
    layout["xaxis"] = {"anchor": axis, "title": {"text": _text(chart.panels[-1].x)}, "tickformat": "~s"}
    if isinstance(chart.panels[0].first, Bars):
        layout |= {"barmode": "stack", "hovermode": "closest"}
        layout["yaxis"] |= {"autorange": "reversed", "automargin": True, "showgrid": False}
    elif isinstance(chart.panels[0].first, Cells):
        layout["hovermode"] = "closest"
    return {"data": data, "layout": layout}


def _height(panel: Panel) -> int:
    """The height of a panel in pixels."""
    if isinstance(panel.first, Bars):
        return 24 + 40 * len(panel.first.labels)
    if isinstance(panel.first, Cells):
        return min(440, 80 + 6 * len(panel.first.labels))
    return 130 if panel.title else 250


def _y_axis(panel: Panel) -> dict[str, Any]:
    axis: dict[str, Any] = {"title": {"text": "" if panel.y in ("share", panel.title) else _text(panel.y)}}
    if panel.share:
        return {**axis, "range": [0, 1], "tickformat": ".0%", "hoverformat": ".1%"}
    if isinstance(panel.first, Cells):
        return {**axis, "showticklabels": False, "autorange": "reversed", "showgrid": False}
    return {**axis, "hoverformat": ".4~g", **({"rangemode": "tozero"} if panel.from_zero else {})}


def _title(panel: Panel, top: float) -> list[dict[str, Any]]:
    if not panel.title:
        return []
    place = {"xref": "paper", "yref": "paper", "x": 0, "y": top, "xanchor": "left", "yanchor": "bottom", "yshift": 2}
    return [{"text": f"<b>{_text(panel.title)}</b>", "showarrow": False, **place}]


def _level_words(panel: Panel, axis: str) -> list[dict[str, Any]]:
    if panel.level is None:
        return []
    place = {"xref": "paper", "x": 0, "xanchor": "left", "yref": axis, "y": panel.level[0], "yanchor": "bottom"}
    return [{"text": _text(panel.level[1]), "showarrow": False, **place}]


def _level_line(panel: Panel, axis: str) -> list[dict[str, Any]]:
    if panel.level is None:
        return []
    line = {"color": "var(--muted)", "width": 1, "dash": "dash"}
    y = panel.level[0]
    return [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": axis, "y0": y, "y1": y, "line": line}]


@singledispatch
def _traces(mark: Mark) -> list[Trace]:
    raise TypeError(f"expected a mark of a chart, got {mark!r}")


@_traces.register
def _(mark: Line) -> list[Trace]:
    width = 0.8 if mark.faint else 1.2 if mark.dash == "dot" else 2.4
    trace: Trace = {
        "type": "scatter",
        "name": _text(mark.name),
        "x": _numbers(mark.x),
        "y": _numbers(mark.y),
        "mode": "lines+markers" if mark.points else "lines",
        "line": {"color": _colour(mark.colour, 0.45 if mark.faint else 1), "width": width, "dash": mark.dash},
    }
    if mark.error is not None and any(mark.error):
        trace["error_y"] = {"type": "data", "array": _numbers(mark.error), "thickness": 1, "width": 3}
    return [{**trace, "showlegend": False, "hoverinfo": "skip"} if mark.faint else trace]


@_traces.register
def _(mark: Between) -> list[Trace]:
    edge = {"type": "scatter", "mode": "lines", "name": _text(mark.name), "line": {"width": 0}, "x": _numbers(mark.x)}
    fill = {"fill": "tonexty", "fillcolor": _colour(mark.colour, 0.34 if mark.strong else 0.17)}
    low = {**edge, "y": _numbers(mark.low), "showlegend": False, "hoverinfo": "skip"}
    return [low, {**edge, **fill, "y": _numbers(mark.high), "hoverinfo": "skip", "showlegend": mark.named}]


@_traces.register
def _(mark: Area) -> list[Trace]:
    colour = _colour(mark.colour)
    area = {"stackgroup": "one", "fillcolor": colour, "line": {"width": 0.5, "color": colour}}
    name = _text(mark.name)
    return [{"type": "scatter", "mode": "lines", "name": name, "x": _numbers(mark.x), "y": _numbers(mark.y), **area}]


@_traces.register
def _(mark: Bars) -> list[Trace]:
    bar = {"type": "bar", "orientation": "h", "marker": {"color": _colour(mark.colour)}, "width": 0.66}
    values = {"x": _numbers(mark.values), "y": [_text(label) for label in mark.labels]}
    return [{"name": _text(mark.name), **bar, **values, "hovertemplate": "%{x:,.0f}"}]


@_traces.register
def _(mark: Cells) -> list[Trace]:
    scale = [[at / (len(SCALE) - 1), _colour(colour)] for at, colour in enumerate(SCALE)]
    most = float(np.nanmax(mark.values)) if mark.most is None else mark.most
    bar = {"title": {"text": _text(mark.name), "side": "right"}, "thickness": 10, "outlinewidth": 0}
    grid = {"x": _numbers(mark.edges), "z": [_numbers(of_row) for of_row in mark.values], "zmin": 0, "zmax": most}
    # The page repeats each row's text for each of its cells.
    words = {"text": [_text(label) for label in mark.labels], "hovertemplate": "%{text}<br>%{z:.3~g}<extra></extra>"}
    return [{"type": "heatmap", "name": "", "colorscale": scale, "colorbar": bar, **grid, **words, "showlegend": False}]


def _text(text: str) -> str:
    return escape(visible(text), quote=False)


def _colour(colour: Colour, opacity: float = 1) -> str:
    return f"var(--{colour.name})" + ("" if opacity == 1 else f"/{opacity}")


def _numbers(values: Numbers | Sequence[float]) -> list[float]:
    """The numbers with six digits, because more would only make the page longer."""
    return [float(f"{value:.6g}") for value in np.asarray(values, np.float64)]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value
