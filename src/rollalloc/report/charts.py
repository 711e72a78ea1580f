"""What a figure shows, as plain data: the page, the PNG and the CSV of a figure are all made from it."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from rollalloc.report.style import Colour

Numbers = Sequence[float] | NDArray[np.float64]
_POINTS = 600  # a longer line is thinned: a screen has no more columns for it
Row = tuple[str | float, ...]


@dataclass(frozen=True)
class Line:
    """A line through points.

    Attributes:
        name: name in the legend.
        colour: its colour.
        x, y: the points, in order.
        dash: "solid", "dash" or "dot".
        faint: draw it thin and pale, without a name, as one seed of several.
        points: also mark each point.
        error: half the length of each point's error bar. None: no bars.
    """

    name: str
    colour: Colour
    x: Numbers
    y: Numbers
    dash: str = "solid"
    faint: bool = False
    points: bool = False
    error: Numbers | None = None

    def rows(self) -> Iterator[Row]:
        for x, y in zip(self.x, self.y, strict=True):
            yield self.name, float(x), float(y)


@dataclass(frozen=True)
class Between:
    """The area between two lines.

    Attributes:
        name: name in the legend.
        colour: its colour.
        x, low, high: the two lines.
        strong: draw it darker.
        named: whether it is in the legend. If not, it belongs to the line of the same name.
    """

    name: str
    colour: Colour
    x: Numbers
    low: Numbers
    high: Numbers
    strong: bool = False
    named: bool = True

    def rows(self) -> Iterator[Row]:
        for x, low, high in zip(self.x, self.low, self.high, strict=True):
            yield f"{self.name}, low", float(x), float(low)
            yield f"{self.name}, high", float(x), float(high)


@dataclass(frozen=True)
class Area:
    """An area that is stacked on the areas before it."""

    name: str
    colour: Colour
    x: Numbers
    y: Numbers

    def rows(self) -> Iterator[Row]:
        for x, y in zip(self.x, self.y, strict=True):
            yield self.name, float(x), float(y)


@dataclass(frozen=True)
class Bars:
    """Parts of horizontal bars, one part for each label, stacked on the parts before them."""

    name: str
    colour: Colour
    labels: Sequence[str]
    values: Sequence[float]

    def rows(self) -> Iterator[Row]:
        for label, value in zip(self.labels, self.values, strict=True):
            yield self.name, label, float(value)


@dataclass(frozen=True)
class Cells:
    """A grid of coloured cells.

    Attributes:
        name: what a value is, with its unit.
        labels: name of each row of the grid, from the top.
        edges: edges of the columns on the x axis, one more than columns.
        values: a value for each row and column; NaN: no cell.
        most: the value of the darkest colour. None: the largest value.
    """

    name: str
    labels: Sequence[str]
    edges: Numbers
    values: NDArray[np.float64]
    most: float | None = None

    def rows(self) -> Iterator[Row]:
        for label, of_row in zip(self.labels, self.values, strict=True):
            for x, value in zip(self.edges, of_row, strict=False):
                if isfinite(value):
                    yield label, float(x), float(value)


Mark = Line | Between | Area | Bars | Cells


@dataclass(frozen=True)
class Panel:
    """A pair of axes.

    Attributes:
        x, y: what the axes show, with the unit; empty: the axis has no title.
        marks: what is drawn, from back to front.
        title: heading of the panel; empty if the figure has only one.
        level: a value of y with a name, drawn as a dashed line; None: no such line.
        from_zero: whether the y axis begins at 0.
        share: whether y are shares from 0 to 1.
    """

    x: str
    y: str
    marks: Sequence[Mark]
    title: str = ""
    level: tuple[float, str] | None = None
    from_zero: bool = False
    share: bool = False

    @property
    def first(self) -> Mark:
        """The mark that tells what kind of panel this is."""
        return self.marks[0]


@dataclass(frozen=True)
class Chart:
    """A figure of the page.

    Attributes:
        name: name of its files without the suffix, and of its element; unique on a page.
        title: its heading.
        caption: a sentence that says how to read it.
        panels: its panels, from top to bottom. They share the x axis.
        wide: whether it needs the whole width of the page.
    """

    name: str
    title: str
    caption: str
    panels: Sequence[Panel]
    wide: bool = False

    @property
    def columns(self) -> tuple[str, str, str, str]:
        """Headings of the columns of `rows`."""
        first = self.panels[0]
        return "panel", "series", first.x or "x", first.y or "value"

    def rows(self) -> Iterator[Row]:
        """Every value of the figure: its panel, series, x and y."""
        for panel in self.panels:
            for mark in panel.marks:
                for row in mark.rows():
                    yield panel.title, *row


def as_csv(chart: Chart) -> str:
    """The values of a figure as CSV.

    A text that a spreadsheet would take for a formula begins with an apostrophe, because a model or a file may have
    written it.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_cell, chart.columns))
    writer.writerows(map(_cell, row) for row in chart.rows())
    return text.getvalue()


def _cell(value: str | float) -> str | float:
    if isinstance(value, str):
        return f"'{value}" if value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
    return f"{value:.6g}"


def thinned(*columns: Numbers) -> tuple[NDArray[np.float64], ...]:
    """Columns of equal length, cut to `_POINTS` entries that are spread evenly, with the first and the last."""
    arrays = tuple(np.asarray(column, np.float64) for column in columns)
    count = len(arrays[0])
    if count <= _POINTS:
        return arrays
    at = np.unique(np.linspace(0, count - 1, _POINTS).round().astype(int))
    return tuple(array[at] for array in arrays)
