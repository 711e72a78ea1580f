"""The limits of lab/docs/speed.md: each figure is told beside its bar, and a program that misses bars ends with code 1.

A bar is on a ratio of two times that the same process measures in turn, so that it holds on any machine.
"""

from __future__ import annotations

import argparse


class Bars:
    """Bars, and the figures that missed theirs.

    Args:
        judged: whether a bar that is missed counts. At the smallest shape, which shows that a program runs, none does.
    """

    def __init__(self, *, judged: bool = True) -> None:
        self._judged, self._missed = judged, list[str]()

    def at_most(self, what: str, figure: float, bar: float) -> str:
        """Hold a figure against the largest that it may be; return what is printed beside it."""
        return self._held(what, figure, f"at most {bar:g}", figure <= bar)

    def at_least(self, what: str, figure: float, bar: float) -> str:
        """Hold a figure against the least that it may be; return what is printed beside it."""
        return self._held(what, figure, f"at least {bar:g}", figure >= bar)

    def end(self) -> None:
        """End the program with code 1, and name the figures that missed their bars, if any did."""
        if self._missed:
            raise SystemExit("bars that are missed: " + "; ".join(self._missed))

    def _held(self, what: str, figure: float, bar: str, met: bool) -> str:
        if met or not self._judged:
            return f"bar: {bar}"
        self._missed.append(f"{what}: {figure:.3g}, not {bar}")
        return f"bar: {bar}, MISSED"


def with_smallest(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the option that a test in CI gives, under which a program takes seconds and holds no figure against a bar."""
    parser.add_argument("--smallest", action="store_true", help="the smallest shape, which shows that everything runs")
    return parser
