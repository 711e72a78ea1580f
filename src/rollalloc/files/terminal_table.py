"""A table that leaves out columns if the terminal is too narrow, and small curves for table cells."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

Row = Mapping[str, str | Text]
_BLOCKS = "▁▂▃▄▅▆▇█"


class FittingTable:
    """A table that fits the terminal. If there is too little room, it leaves out optional columns, and then cuts text off.

    Args:
        rows: values by heading; all rows have the same headings.
        prose: headings of left-aligned columns. All other columns are right-aligned.
        optional: headings of columns that may be left out; the first is left out first.
        title: text above the table.
    """

    def __init__(
        self, rows: Sequence[Row], *, prose: Collection[str], optional: Sequence[str], title: str = ""
    ) -> None:
        self._rows, self._prose, self._optional, self._title = rows, prose, optional, title

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield first_fitting([self._table(self._optional[:count]) for count in range(len(self._optional) + 1)], console)

    def _table(self, left_out: Collection[str]) -> Table:
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=Text(self._title) or None)
        table.title_justify = "left"
        headings = [name for name in (self._rows[0] if self._rows else ()) if name not in left_out]
        for heading in headings:
            table.add_column(heading, justify="left" if heading in self._prose else "right", no_wrap=True)
        for row in self._rows:
            table.add_row(*(Text(cell) if isinstance(cell := row[heading], str) else cell for heading in headings))
        return table


def first_fitting(tables: Sequence[Table], console: Console) -> Table:
    """The first table for which the console has room; the last if there is none."""
    unbounded = console.options.update(width=1000)
    fitting = (table for table in tables if Measurement.get(console, unbounded, table).maximum <= console.width)
    return next(fitting, tables[-1])


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values in [0, 1] as block characters, the newest last. Some are left out if there are more than `width`."""
    if len(values) > width:
        values = [values[round(at * (len(values) - 1) / (width - 1))] for at in range(width)]
    return "".join(_BLOCKS[min(len(_BLOCKS) - 1, int(max(0.0, value) * len(_BLOCKS)))] for value in values)
