"""What the core refuses, and whose fault it is."""

from __future__ import annotations


class EventError(ValueError):
    """An event that cannot be. The events before it in the same `tell` were taken; it and those after it were not."""


class MetricError(EventError):
    """A metric outside [0, 1] under a recipe whose rules take it for a success rate."""


class RuleError(ValueError):
    """A rule of the recipe returned something it may not."""


class NoScores(RuntimeError):
    """The run is over for want of scores (`Allocator.scoreless`): the reward function, or what generates, fails.

    Every trainer raises it and saves nothing then, so that the checkpoint before goes on once that is mended.
    """


class NoProgress(RuntimeError):
    """There is nothing to do, nothing is running, and the recipe or the driver must change for that to change."""
