"""Methods as values: each function returns a `Recipe`, `mix` composes two of them, and
`streamed` makes of one what suits rollouts that stream.

Every field of a recipe is filled here; change one with `dataclasses.replace`. A recipe is closed: no field copies another,
so that `replace(pilot_commit(...), max_staleness=0)` is `pilot_commit(..., max_staleness=0)`. Each function raises a
`ValueError` for a number out of its range and for a word that is none of those it names.
"""

from rollalloc.recipes.cgrpo import cgrpo
from rollalloc.recipes.dapo import dapo
from rollalloc.recipes.darts import darts
from rollalloc.recipes.foresight import foresight
from rollalloc.recipes.greso import greso
from rollalloc.recipes.grpo import dr_grpo, grpo, rloo
from rollalloc.recipes.knapsack import knapsack
from rollalloc.recipes.mixing import SLOTS, Side, mix
from rollalloc.recipes.mopps import mopps
from rollalloc.recipes.pilot_commit import pilot_commit
from rollalloc.recipes.pods import pods
from rollalloc.recipes.racing import racing
from rollalloc.recipes.reinforce import raft, reinforce
from rollalloc.recipes.reinforce_ada import reinforce_ada
from rollalloc.recipes.spo import spo
from rollalloc.recipes.streaming import streamed
from rollalloc.recipes.vcrl import vcrl

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
