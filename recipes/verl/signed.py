"""+1 for a right answer and -1 for a wrong one, beside which DAPO's overlong penalty of at most 1 is to be seen."""

from typing import Any

from rollalloc.rewards import math


def compute_score(**sample: Any) -> dict[str, float]:
    """The reward, and as `acc` the success rate that selection looks at."""
    right = math.compute_score(**sample)
    return {"score": 2 * right - 1, "acc": right}
