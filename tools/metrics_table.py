"""Writes the table of metrics into docs/metrics.md, from `rollalloc.runs.metrics`.

python tools/metrics_table.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rollalloc.runs.metrics import TABLE

GUIDE = Path(__file__).parents[1] / "docs" / "metrics.md"
BEGIN, END = "<!-- by tools/metrics_table.py -->", "<!-- end -->"


def lines() -> Iterator[str]:
    """The table in Markdown, a part under a heading of its own."""
    for title, metrics in TABLE.items():
        yield from ("", f"### {title}", "", "| name | unit | meaning | where |", "|---|---|---|---|")
        for metric in metrics:
            yield f"| `{metric.name}` | {metric.unit} | {metric.meaning} | {', '.join(metric.where)} |"
    yield ""


def with_table(guide: str) -> str:
    """The guide with the table as it is now between its two marks.

    Raises:
        ValueError: a mark is missing.
    """
    before, begin, rest = guide.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{GUIDE} must hold {BEGIN} and, after it, {END}")
    return "\n".join((before + BEGIN, *lines(), END + after))


if __name__ == "__main__":
    GUIDE.write_text(with_table(GUIDE.read_text("utf-8")), "utf-8")
