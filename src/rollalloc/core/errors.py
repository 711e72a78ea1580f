"""The errors of the core."""

from __future__ import annotations


class EventError(ValueError):
    """An event is impossible. Only the events before it in the same `tell` were processed."""


class MetricError(EventError):
    """A metric is outside [0, 1], and a rule of the recipe reads metrics as success rates."""


class RuleError(ValueError):
    """A rule of the recipe returned something that its contract does not allow."""


class NoScores(RuntimeError):
    """The run is over because scores are missing (`Allocator.scoreless`): the reward function or the generation fails.

    A trainer that raises this error saves no checkpoint. Fix the cause and resume from the last checkpoint.
    """


class NoProgress(RuntimeError):
    """Nothing is running, and the core can neither order a rollout nor make a batch. The recipe or the driver is wrong."""
