"""Evidence of a world that is known: what methods pay is drawn from the model itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollalloc.lab.advise.choices import METHODS
from rollalloc.lab.advise.evidence import Evidence, evidence_of

LEVELS = dict(zip(METHODS, (-0.1, 0.0, 0.3, -1.0, -0.9, -1.1), strict=True))  # log rollouts, over those of GRPO n = 4
SLOPES = dict(zip(METHODS, (0.0, 0.0, 0.0, 1.5, 1.2, 1.6), strict=True))  # of many_answers, from 0 to 1


def signals(many_answers: float = 0.0, **others: float) -> dict[str, float]:
    known = {"zero_variance_4": 0.5, "mean_rate": 0.4, "spread": 0.3, "auc": 0.7, "graded": 0.0}
    return known | {"many_answers": many_answers} | others


def planted(
    seed: int = 0, *, tasks: int = 12, runs: int = 2, tau: float = 0.1, sigma: float = 0.1, most: float = 1e9
) -> Evidence:
    """Tasks whose right answers differ more and more; a run is censored at `most` rollouts."""
    random = np.random.default_rng(seed)
    found: dict[str, Any] = {}
    for task in range(tasks):
        many, difficulty = task / (tasks - 1), random.normal(8, 0.5)
        paid: dict[str, Any] = {}
        for method in METHODS:
            mean = difficulty + LEVELS[method] + SLOPES[method] * many + random.normal(0, tau)
            costs = np.exp(mean + random.normal(0, sigma, runs))
            paid[method] = [(float(min(cost, most)), bool(cost > most), 1) for cost in costs]
        profile = signals(many, zero_variance_4=float(random.uniform(0.3, 0.7)))
        found[f"family{task % 3}/{task}"] = {"profiles": [profile], "target": 0.8, "milestone": False, "paid": paid}
    return evidence_of({"origin": {}, "tasks": found})


def scaled(evidence: Evidence, factor: float) -> Evidence:
    """The same with all costs times a factor."""
    described = evidence.described()
    for task in described["tasks"].values():
        task["paid"] = {
            method: [(rollouts * factor, *rest) for rollouts, *rest in found] for method, found in task["paid"].items()
        }
    return evidence_of(described)
