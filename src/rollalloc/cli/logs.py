"""What the commands that read logs of rollouts share: their options, and JSON without infinities."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

LogPath = Annotated[str, typer.Argument(help="A file, a folder or a glob of rollout logs.", metavar="LOG")]
Format = Annotated[str | None, typer.Option(help="trl, verl, prime-rl or rollalloc; by default told from the files.")]
Threshold = Annotated[
    float | None, typer.Option(help="Rewards of at least this are right, all others wrong; for graded rewards.")
]
RewardField = Annotated[str | None, typer.Option(help="The field or column that holds the reward.")]
Weights = Annotated[
    str | None, typer.Option(help="TRL's reward_weights, comma-separated, in the order of its columns.")
]
GroupSize = Annotated[int | None, typer.Option(help="TRL's num_generations, where rows do not tell it.")]


def numbers(text: str | None) -> tuple[float, ...] | None:
    """The weights of TRL's rewards, as an option gives them.

    Raises:
        ValueError: they are no numbers.
    """
    try:
        return None if text is None else tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--weights: expected numbers separated by commas, got {text!r}; e.g. 1,0.2") from None


def plain(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, dict):
        return {key: plain(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(held) for held in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
