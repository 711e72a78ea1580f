"""The conformance kit: it tests a recipe, or an allocator, against the laws of docs/protocol.md.

    from rollalloc.testing import check_recipe

    check_recipe(my_recipe)   # raises a ConformanceError that names the law, the seed and the mode

A simulated world answers every order (`world`, `feeder`). Its prompts range from easy to hard, and its rewards differ
from the metrics. Rollouts fail, are cancelled, end in random order, and end after their cancellation. The trainer is
slow, the data loader has its own epochs, and the capacity may be a single rollout. An auditor records and checks all
events and answers, and shares no code with the core (`audit`). Every decision of every rule is checked against the
rule's promises (`promises`). The work per decision is measured on data sets of two sizes (`scale`).
"""

from rollalloc.testing.audit import ConformanceError
from rollalloc.testing.check import check_recipe, trace

__all__ = ["ConformanceError", "check_recipe", "trace"]
