"""Sizes that are held: the front page, the guides, lines of prose, functions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "rollalloc"
RESULTS = ("leaderboard.md", "scale.md")
GUIDES = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in RESULTS]
GUIDES_WORDS = 25_000
LONGEST = 60  # lines of a function's body, its docstring not counted
LONGER = {"cli/train.py: train": 71}  # a table of options
WRAPPED = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *GUIDES]


def words(page: Path) -> int:
    """Tables between marks are made by a command, and nobody reads them from end to end."""
    made = r"(?s)<!-- [^>]*: begin -->.*?<!-- [^>]*: end -->"
    return len(re.sub(made, "", page.read_text("utf-8")).split())


def prose(text: str) -> Iterator[str]:
    """Lines outside of fences and tables, of links only what is read."""
    fenced = False
    for line in text.splitlines():
        if re.match(r" *(```|~~~)", line):
            fenced = not fenced
        elif not fenced and not line.lstrip().startswith("|"):
            yield re.sub(r"\]\([^)]*\)", "]", line)


def bodies(source: str) -> Iterator[tuple[str, int]]:
    """(name, lines) of each function, from its first statement that is no docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
            yield node.name, (node.end_lineno or first.lineno) - first.lineno + 1


def test_the_front_page_is_one():
    page = ROOT / "README.md"
    lines = page.read_text("utf-8").splitlines()
    assert len(lines) <= 150
    assert words(page) <= 1000
    assert lines.index("## Install") < 40


def test_the_guides_together():
    assert sum(map(words, GUIDES)) <= GUIDES_WORDS


@pytest.mark.parametrize("page", WRAPPED, ids=lambda page: page.name)
def test_no_line_of_prose_is_wide(page):
    assert [line for line in prose(page.read_text("utf-8")) if len(line) > 120] == []


def test_no_function_is_longer_than_a_screen():
    long = {
        f"{path.relative_to(SOURCES)}: {name}": lines
        for path in sorted(SOURCES.rglob("*.py"))
        for name, lines in bodies(path.read_text("utf-8"))
        if lines > LONGEST
    }
    assert long == LONGER


def test_what_is_counted():
    page = "a [link](there)\n| a table |\n```\ncode\n```\n"
    assert list(prose(page)) == ["a [link]"]
    function = 'def f(\n    x,\n):\n    """Says.\n\n    More.\n    """\n    y = x\n    return y\n'
    assert list(bodies(function)) == [("f", 2)]
