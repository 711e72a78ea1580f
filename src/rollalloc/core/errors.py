"""The errors of the core."""

from __future__ import annotations


class EventError(ValueError):
    """An event is not possible. Earlier events of the same `tell` were taken; this one and later ones were not."""


class MetricError(EventError):
    """A metric is outside [0, 1], and a rule of the recipe reads it as a success rate."""


class RuleError(ValueError):
    """A rule of the recipe returned something that its contract does not allow."""


class NoScores(RuntimeError):
    """The run is over because scores are missing (`Allocator.scoreless`): the reward function or the generation fails.

    A trainer that raises it saves nothing, so that the last checkpoint can be continued after the cause is fixed.
    """


class NoProgress(RuntimeError):
    """There is nothing to do and nothing is running. The recipe or the driver must change before the run can go on."""
