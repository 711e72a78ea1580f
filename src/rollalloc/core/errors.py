"""What the core refuses, and whose fault it is."""

from __future__ import annotations


class EventError(ValueError):
    """An event that cannot be. The events before it in the same `tell` were taken; it and those after it were not."""


class MetricError(EventError):
    """A metric outside [0, 1] under a recipe whose rules take it for a success rate."""


class RuleError(ValueError):
    """A rule of the recipe returned something it may not."""


class Starved(RuntimeError):
    """There is nothing to do, nothing is running, and the recipe or the driver must change for that to change."""
