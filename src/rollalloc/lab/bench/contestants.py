"""The methods of a leaderboard: each a recipe, its default parameters, and the grid over which it is tuned.

They come from `rollalloc.lab.bench.methods.GRID` and `rollalloc.train.defaults.matched`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollalloc.lab.bench.methods import GRID
from rollalloc.lab.bench.search import settings_of
from rollalloc.lab.bench.tiers import Tier
from rollalloc.named import RECIPES, make_recipe
from rollalloc.train.defaults import default_parameters

BASELINE = "grpo"
PLAIN = ("reinforce", "rloo", "raft")  # estimators without allocation, which every allocator must beat


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A method of the leaderboard.

    Attributes:
        recipe: its name, for `rollalloc.named.make_recipe`.
        label: its name in tables and folders.
        defaults: parameters for the defaults track; None: it does not take part in that track.
        grid: settings to tune over, each with `parameters` and `learning_rate`; empty: not in the tuned track.
    """

    recipe: str
    label: str
    defaults: Mapping[str, Any] | None = None
    grid: tuple[Mapping[str, Any], ...] = field(default=())


def contestant(recipe: str, tier: Tier, tracks: Sequence[str]) -> Contestant:
    """The method of a recipe, after checking that each of its settings makes a valid recipe.

    Raises:
        ValueError: an unknown recipe; for the tuned track, no grid, or an invalid setting.
    """
    for unknown in set(recipe.split("+")) - set(RECIPES):
        make_recipe(unknown, {})  # raises an error that lists the known ones
    tuned = ()
    if "tuned" in tracks:
        if recipe not in GRID:
            raise ValueError(
                f"{recipe} has no GRID, parameters to tune over, in rollalloc.lab.bench.methods, which the tuned track "
                "needs; add it, or give --track defaults"
            )
        tuned = settings_of(GRID[recipe], tier.rates, tier.search[0].settings)
    for setting in tuned:
        make_recipe(recipe, setting.parameters)
    defaults = None
    if "defaults" in tracks:
        defaults = _plain(default_parameters(recipe))
        make_recipe(recipe, defaults)
    grid = tuple(
        {"parameters": _plain(setting.parameters), "learning_rate": setting.learning_rate} for setting in tuned
    )
    return Contestant(recipe=recipe, label=recipe, defaults=defaults, grid=grid)


def contestants(names: Sequence[str], tier: Tier, tracks: Sequence[str]) -> tuple[Contestant, ...]:
    """The methods of a leaderboard: those in `names`; empty: the tier's.

    If the tier defines its own methods, `names` are their labels.

    Raises:
        ValueError: as `contestant`; a name given twice; no baseline among them.
    """
    for name in names:
        if ":" in name:
            raise ValueError(
                f"--recipes {name!r}: a leaderboard has recipes of this package; compare your own with `rollalloc compare`"
            )
    all_names = [*(names or tier.methods or tier.recipes or GRID)]
    if twice := {name for name in all_names if all_names.count(name) > 1}:
        raise ValueError(f"named twice: {', '.join(sorted(twice))}; each method is compared once")
    if BASELINE not in all_names:
        raise ValueError(f"{BASELINE} is the baseline of every ratio; add it: --recipes {','.join((BASELINE, *names))}")
    return tuple(
        _labelled(name, *tier.methods[name]) if name in tier.methods else contestant(name, tier, tracks)
        for name in all_names
    )


def _labelled(label: str, recipe: str, parameters: Mapping[str, Any]) -> Contestant:
    """A method with the parameters that its tier defines."""
    make_recipe(recipe, parameters)
    return Contestant(recipe=recipe, label=label, defaults=_plain(parameters))


def _plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as plain data for a file."""
    return json.loads(json.dumps(dict(parameters)))
