"""Lines of a log that could not be used: how many, and where the first of them is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class Unusable:
    """What of a log could not be used. Readers of logs derive from it.

    Attributes:
        bad: number of lines, rows or files that could not be used.
        first_bad: place and problem of the first of them.
    """

    bad: int = 0
    first_bad: str = ""

    def reject(self, where: str, why: str) -> None:
        """Count an unusable line, row or file, and store the first one."""
        self.bad += 1
        self.first_bad = self.first_bad or f"{where}: {why}"
