"""The methods of a leaderboard: each a recipe, its default parameters, and the grid over which it is tuned.

For this package's recipes these come from `rollalloc.lab.bench.methods.GRID` and `rollalloc.train.defaults.matched`.
A user's recipe, `module:function`, defines `GRID` and `matched` in its own file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

from rollalloc.lab.bench.methods import GRID
from rollalloc.lab.bench.search import settings_of
from rollalloc.lab.bench.tiers import Tier
from rollalloc.named import RECIPES, make_recipe, parameters_of
from rollalloc.train.defaults import DEFAULT_SHAPE, default_parameters, matched

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
        contents: SHA-256 of the file that defines it; "" for built-in recipes.
    """

    recipe: str
    label: str
    defaults: Mapping[str, Any] | None = None
    grid: tuple[Mapping[str, Any], ...] = field(default=())
    contents: str = ""


def contestant(recipe: str, tier: Tier, tracks: Sequence[str]) -> Contestant:
    """The method of a recipe, after checking that each of its settings makes a valid recipe.

    Raises:
        ValueError: an unknown recipe; for the tuned track, no grid, a grid smaller than the tier's search, or an invalid
            setting; for the defaults track, no shape.
        ImportError: its module cannot be imported.
    """
    is_own = ":" in recipe
    for unknown in set() if is_own else set(recipe.split("+")) - set(RECIPES):
        make_recipe(unknown, {})  # raises an error that lists the known ones
    grids, shape, contents = _of_module(recipe) if is_own else (GRID, matched, "")
    shapes: Any = grids.get(recipe.rpartition(":")[2])
    if "tuned" in tracks and (not isinstance(shapes, (list, tuple)) or not shapes):
        raise ValueError(_lacks(recipe, "GRID", "tuned", is_own))
    if "defaults" in tracks and shape is None:
        raise ValueError(_lacks(recipe, "matched", "defaults", is_own))
    first = tier.search[0].settings
    tuned = settings_of(recipe, shapes, tier.rates, first) if "tuned" in tracks else ()
    for setting in tuned:
        make_recipe(recipe, setting.parameters)
    plain = None
    if "defaults" in tracks:
        plain = _plain(recipe, shape(recipe, **DEFAULT_SHAPE) if is_own else default_parameters(recipe))
        make_recipe(recipe, plain)
    return Contestant(
        recipe=recipe,
        label=recipe.replace(":", "."),
        defaults=plain,
        grid=tuple(
            {"parameters": _plain(recipe, setting.parameters), "learning_rate": setting.learning_rate}
            for setting in tuned
        ),
        contents=contents,
    )


def contestants(names: Sequence[str], own: Sequence[str], tier: Tier, tracks: Sequence[str]) -> tuple[Contestant, ...]:
    """The methods of a leaderboard: built-in ones in `names` (empty: the tier's), and the user's `own`, `module:function`.

    If the tier defines its own methods, `names` are their labels.

    Raises:
        ValueError: as `contestant`; a name given twice; no baseline among them; an invalid user recipe.
    """
    for name in own:
        if ":" not in name:
            raise ValueError(f"--recipe {name!r}: expected module:function; recipes of this package go into --recipes")
    for name in names:
        if ":" in name:
            raise ValueError(f"--recipes {name!r}: give a recipe of your own as --recipe {name}")
    all_names = [*(names or tier.methods or tier.recipes or GRID), *own]
    if twice := {name for name in all_names if all_names.count(name) > 1}:
        raise ValueError(f"named twice: {', '.join(sorted(twice))}; each method is compared once")
    if BASELINE not in all_names:
        raise ValueError(f"{BASELINE} is the baseline of every ratio; add it: --recipes {','.join((BASELINE, *names))}")
    chosen = tuple(
        _labelled(name, *tier.methods[name]) if name in tier.methods else contestant(name, tier, tracks)
        for name in all_names
    )
    for entry in chosen:
        if "/" in entry.label:
            raise ValueError(f"recipe {entry.recipe!r} gets a folder of its name, so the name cannot have a '/'")
    return chosen


def _labelled(label: str, recipe: str, parameters: Mapping[str, Any]) -> Contestant:
    """A method with the parameters that its tier defines."""
    make_recipe(recipe, parameters)
    return Contestant(recipe=recipe, label=label, defaults=_plain(recipe, parameters))


def _of_module(recipe: str) -> tuple[Mapping[str, Any], Any, str]:
    """What a user recipe's module defines: `GRID`, `matched`, and its file's digest.

    Raises:
        ValueError: one of them is invalid.
    """
    name, _, function = recipe.partition(":")
    if function in RECIPES:
        raise ValueError(f"{recipe}: {function} is a recipe of this package; give yours another name")
    parameters_of(recipe)  # raises if it is missing or not callable
    module = sys.modules.get(name) or import_module(name)
    grid, shape = getattr(module, "GRID", {}), getattr(module, "matched", None)
    if not isinstance(grid, Mapping):
        raise ValueError(f"{recipe}: GRID of {name} must map {function!r} to a list of parameters, got {grid!r}")
    if shape is not None and not callable(shape):
        raise ValueError(f"{recipe}: matched of {name} must be a function (recipe, groups, n), got {shape!r}")
    file = getattr(module, "__file__", None)
    return grid, shape, sha256(Path(file).read_bytes()).hexdigest() if file else ""


def _plain(recipe: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as plain data for a file."""
    try:
        return json.loads(json.dumps(dict(parameters)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{recipe}: the parameters {parameters!r} are no plain data ({error})") from None


def _lacks(recipe: str, name: str, track: str, is_own: bool) -> str:
    where = f"in the file of {recipe.partition(':')[0]}" if is_own else "in rollalloc.lab.bench.methods"
    meaning = "parameters to tune over" if name == "GRID" else "parameters for the same groups and rollouts per group"
    other_track = "tuned" if name == "matched" else "defaults"
    return (
        f"{recipe} has no {name}, {meaning}, {where}, which the {track} track needs; see 'Add a recipe to the leaderboard' "
        f"in docs/benchmark.md, or give --track {other_track}"
    )
