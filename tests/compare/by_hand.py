"""Runs that are written down instead of trained."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollalloc.train.config import Config


def write_run(
    place: Path,
    run: Config,
    reaches: int | None,
    *,
    every: int,
    ends: bool = True,
    breadth: Callable[[int], Any] | None = None,
    **waste: int,
) -> Path:
    """Write a run that spends its budget. Its accuracy is 0 before and 1 from `reaches` on; None: it stays 0.

    Args:
        every: rollouts between two evaluations.
        breadth: what an evaluation after so many rollouts says beside its accuracy.
        waste: rollouts that taught nothing, by cause.
    """

    def spent(paid: int) -> dict[str, Any]:
        return {"rollouts_paid": paid, "tokens_paid": 3 * paid, "seconds": paid / 10, "optimizer_steps": paid // 50}

    budget = run.max_rollouts
    assert budget is not None
    lines = [
        {"kind": "eval", "at": at, "version": at, **spent(at), "accounts": {"trained": at}, "standard_error": 0.0}
        | {"accuracy": float(reaches is not None and at >= reaches)}
        | ({} if breadth is None else {"breadth": breadth(at)})
        for at in range(0, budget + 1, every)
    ]
    if ends:
        accounts = {"trained": budget - sum(waste.values()), **waste}
        lines.append({"kind": "end", "why": "budget", **spent(budget), "accounts": accounts})
    place.mkdir(parents=True)
    (place / "run.json").write_text(json.dumps(run.description()))
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place
