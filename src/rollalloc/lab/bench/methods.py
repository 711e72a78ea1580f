"""Parameters of recipes in the benchmark: those of the ladder's methods, and those that a search tries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollalloc.train.defaults import DEFAULT_ALONE, DEFAULT_SHAPE

# The ladder's: label → recipe and parameters. Those of groups have 64 rollouts in a batch, as `reinforce_replay`; what they
# do not say is their default.
LADDER_METHODS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "grpo": ("grpo", {"groups": 4, "n": 16}),  # the usual shape in practice
    "grpo_4": ("grpo", DEFAULT_SHAPE),
    "grpo_4_replay": ("grpo", {**DEFAULT_SHAPE, "replay": 64}),
    "rloo_2": ("rloo", {"groups": 32, "n": 2}),
    "dapo_carry": ("dapo_carry", {**DEFAULT_SHAPE, "gen_groups": 48}),
    "pilot_commit_4": ("pilot_commit", {"groups": 8, "n_pilot": 4, "n_commit": 4, "gen_groups": 24}),
    "pilot_commit_8": ("pilot_commit", {"groups": 2, "n_pilot": 8, "n_commit": 24, "gen_groups": 6}),
    "reinforce": ("reinforce", DEFAULT_ALONE),
    # REINFORCE with its former defaults.
    "reinforce_replay": ("reinforce", {"groups": 64, "n": 1, "neg": 0.1, "replay": 64}),
    "raft": ("raft", DEFAULT_ALONE),
    "foresight": ("foresight", DEFAULT_ALONE),
}


def _shapes(names: str, rows: Sequence[tuple[Any, ...]], **changes: Any) -> list[dict[str, Any]]:
    return [dict(zip(names.split(), row, strict=True)) | changes for row in rows]


def _ahead(shapes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Shapes that generate prompts for three batches at a time."""
    return [shape | {"gen_groups": 3 * shape["groups"]} for shape in shapes]


_GROUPS = _shapes("groups n", ((8, 4), (16, 4), (8, 8), (16, 8), (32, 4), (8, 16)))
_DAPO = _ahead(_shapes("groups n", ((8, 4), (16, 4), (8, 8), (4, 8), (4, 16), (16, 8))))
_PILOTS = ((4, 4, 4), (8, 4, 4), (8, 2, 2), (16, 2, 2), (4, 4, 12), (16, 4, 4))
_MIXED = ((4, 4, 4, 4), (8, 4, 4, 4), (8, 2, 4, 4), (4, 4, 8, 8), (8, 4, 4, 6), (4, 4, 12, 8))
# Recipe -> shapes to try, the small ones first; the same number for each recipe.
GRID: Mapping[str, list[dict[str, Any]]] = {
    "grpo": _GROUPS,
    "dr_grpo": _GROUPS,
    "dapo": _DAPO,
    "dapo_carry": _DAPO,
    "greso": _DAPO,
    "pilot_commit": _ahead(_shapes("groups n_pilot n_commit", _PILOTS)),
    "knapsack": _shapes("groups n most", ((16, 4, 16), (16, 4, 32), (8, 8, 32), (16, 8, 32), (32, 4, 16), (16, 4, 8))),
    "vcrl": _shapes(
        "groups n kappa", ((16, 4, 0.7), (8, 8, 0.7), (16, 4, 0.3), (16, 8, 0.7), (8, 16, 0.8), (8, 8, 0.3))
    ),
    "cgrpo": _shapes(
        "groups sizes_S",
        ((16, (2, 4, 8)), (16, (2, 4)), (8, (2, 4, 8, 16)), (8, (4, 8, 16)), (32, (2, 4)), (16, (4, 8))),
    ),
    "reinforce_ada": _shapes(
        "groups n round_n rounds",
        ((16, 4, 4, 4), (8, 4, 8, 4), (16, 4, 4, 2), (32, 4, 4, 4), (8, 8, 8, 4), (16, 2, 2, 4)),
    ),
    "pods": _shapes("groups n m", ((16, 6, 4), (8, 8, 4), (16, 8, 4), (16, 4, 2), (8, 16, 8), (8, 16, 4))),
    "darts": _shapes("groups shortest longest", ((8, 3, 1), (16, 2, 1), (16, 3, 1), (32, 3, 1), (8, 7, 1), (16, 7, 1))),
    "racing": _ahead(
        _shapes("groups sizes_S", ((8, (2, 4)), (16, (2, 4)), (8, (2, 8)), (4, (4, 8)), (8, (4, 8)), (16, (4, 8))))
    ),
    "reinforce": _shapes(
        "groups baseline neg replay",
        (
            (32, "batch", None, 0),
            (64, "batch", None, 0),
            (32, "batch", None, 32),
            (64, "batch", None, 64),
            (32, "batch", 0.1, 0),
            (64, "running", 0.1, 0),
        ),
    ),
    "rloo": _shapes("groups n", ((16, 4), (32, 2), (8, 8), (64, 2), (16, 8), (32, 4))),
    "raft": _shapes("groups n", ((32, 1), (64, 1), (128, 1), (16, 4), (32, 2), (16, 8))),
    "mopps": _shapes(
        "groups n decay", ((16, 4, 0.5), (16, 4, 1.0), (8, 8, 0.5), (16, 8, 0.5), (32, 4, 0.5), (32, 2, 0.5))
    ),
    "spo": _shapes("groups half_way", ((64, 0.06), (64, 0.02), (32, 0.06), (128, 0.06), (64, 0.006), (32, 0.02))),
    "foresight": _shapes(
        "groups exponent neg replay",
        (
            (32, 3.0, None, 0),
            (64, 3.0, None, 0),
            (32, 3.0, None, 32),
            (16, 3.0, None, 0),
            (32, None, None, 0),
            (64, 3.0, None, 64),
        ),
    ),
    "pilot_commit+pods": _ahead(_shapes("groups n_pilot n_commit m", _MIXED)),
}
