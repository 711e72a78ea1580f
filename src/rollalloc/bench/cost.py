"""Cost to target: what a run paid until it reached an accuracy, from its `metrics.jsonl` alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Curve:
    """Held-out accuracy against what was paid, one entry an evaluation, in order.

    Attributes:
        rollouts: rollouts paid.
        tokens: tokens generated.
        seconds: spent on everything but evaluation.
        accuracy: in [0, 1].
    """

    rollouts: tuple[float, ...]
    tokens: tuple[float, ...]
    seconds: tuple[float, ...]
    accuracy: tuple[float, ...]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every whole line of a metrics file; a line torn by a killed run is left out.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line before the last that is not JSON.
    """
    lines = path.read_text(encoding="utf-8").split("\n")
    parsed: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            parsed.append(json.loads(line))
        except ValueError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}:{number} is not a line of JSON ({error}); the file is damaged") from None
    return parsed


def curve_of(metrics: Sequence[dict[str, Any]]) -> Curve:
    """The evaluations of a run that have an accuracy."""
    lines = [line for line in metrics if line["kind"] == "eval" and line["accuracy"] is not None]
    columns = ("rollouts_paid", "tokens_paid", "seconds", "accuracy")
    rollouts, tokens, seconds, accuracy = (tuple(float(line[name]) for line in lines) for name in columns)
    return Curve(rollouts, tokens, seconds, accuracy)


def cost_to_target(cost: Sequence[float], accuracy: Sequence[float], target: float) -> float | None:
    """What was paid when the target was reached.

    The target is reached at the first evaluation that, like the one after it, is at or above the target: one lucky
    evaluation is not enough. Between that evaluation and the one before it the cost is interpolated linearly.

    Args:
        cost: what had been paid at each evaluation, not decreasing.
        accuracy: of each evaluation.
        target: in (0, 1].

    Returns:
        The cost, or None for a run that is censored: it never got there.
    """
    for at in range(len(accuracy) - 1):
        if accuracy[at] >= target and accuracy[at + 1] >= target:
            if at == 0:
                return cost[0]
            share = (target - accuracy[at - 1]) / (accuracy[at] - accuracy[at - 1])
            return cost[at - 1] + share * (cost[at] - cost[at - 1])
    return None
