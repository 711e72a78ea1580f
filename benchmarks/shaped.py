"""Rewards for walks that pay less for a long way: what is trained on and what is selected by need not be the same."""

from __future__ import annotations

from typing import Any

from rollalloc.bench.tasks import walks


def selected_by_metric(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> dict[str, float]:
    """A right walk is worth 1 less half of its length over the limit; selection looks at whether it is right."""
    right = walks.compute_score(data_source, solution_str, ground_truth)
    return {"score": right * _worth(solution_str), "acc": right}


def selected_by_reward(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> dict[str, float]:
    """The same reward, which selection looks at too."""
    worth = selected_by_metric(data_source, solution_str, ground_truth)["score"]
    return {"score": worth, "acc": worth}


def _worth(solution_str: str) -> float:
    return 1 - 0.5 * min(len(solution_str.split()), walks.LIMIT) / walks.LIMIT
