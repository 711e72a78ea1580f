"""The conformance kit: puts a recipe, or an allocator, through the laws of docs/design.md.

    from rollalloc.testing import check_recipe

    check_recipe(my_recipe)   # returns quietly, or raises ConformanceError naming the law, the seed and the mode

A simulated world (`world`) answers every order: prompts of all difficulties, rewards that are not the metric, failures,
spontaneous cancellations, results that come after their cancellation, a trainer that takes its time, a loader with epochs of
its own, completion in random order, capacities down to one rollout (`feeder`). An auditor that shares no code with the core
keeps its own books of what was told and answered (`audit`). Every decision of every rule is held against what that rule
promises (`promises`), and the work of a decision is counted on data sets of two sizes (`scale`).
"""

from rollalloc.testing.audit import ConformanceError
from rollalloc.testing.check import check_recipe, trace

__all__ = ["ConformanceError", "check_recipe", "trace"]
