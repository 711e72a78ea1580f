"""Methods as values: each function returns a `Recipe`, `mix` composes two of them, and
`streamed` makes of one what suits rollouts that stream.

Every field of a recipe is filled here; change one with `dataclasses.replace`. A recipe is closed: no field copies another,
so that `replace(pilot_commit(...), max_staleness=0)` is `pilot_commit(..., max_staleness=0)`. Each function raises a
`ValueError` for a number out of its range and for a word that is none of those it names.
"""

from rollalloc.recipes.filters import dapo, greso, mopps, vcrl
from rollalloc.recipes.groups import dr_grpo, grpo, rloo
from rollalloc.recipes.mixing import SLOTS, Side, mix
from rollalloc.recipes.pilots import cgrpo, pilot_commit, racing, reinforce_ada
from rollalloc.recipes.single import foresight, raft, reinforce, spo
from rollalloc.recipes.sizes import darts, knapsack, pods
from rollalloc.recipes.streaming import streamed

__all__ = [
    "SLOTS",
    "Side",
    "cgrpo",
    "dapo",
    "darts",
    "dr_grpo",
    "foresight",
    "greso",
    "grpo",
    "knapsack",
    "mix",
    "mopps",
    "pilot_commit",
    "pods",
    "racing",
    "raft",
    "reinforce",
    "reinforce_ada",
    "rloo",
    "spo",
    "streamed",
    "vcrl",
]
