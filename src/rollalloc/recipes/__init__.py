"""Each method is a function that returns a `Recipe`. Each file has one method and the rules that only it uses.

`mix` composes two methods. `streamed` adapts a recipe to training that goes on while rollouts are running.

A recipe function fills every field of the recipe. To change a field afterwards, use `dataclasses.replace`: for example,
`replace(pilot_commit(...), max_staleness=0)` equals `pilot_commit(..., max_staleness=0)`. Every function raises a
`ValueError` for a number out of its range and for an unknown word.
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
