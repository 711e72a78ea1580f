"""What every driver logs of a recipe that predicts."""

from __future__ import annotations

from rollalloc.core.allocator import Allocator


def prediction_figures(core: Allocator) -> dict[str, float]:
    """How good the predictions were, under `rollalloc/prediction/`; the experts' weights, which are many, are left out."""
    figures = core.prompt_figures().items()
    return {f"rollalloc/prediction/{name}": value for name, value in figures if not name.startswith("weight/")}
