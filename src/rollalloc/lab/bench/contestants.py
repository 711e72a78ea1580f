"""The methods of a leaderboard: each a recipe with its parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollalloc.lab.bench.tiers import Tier
from rollalloc.named import RECIPES, make_recipe
from rollalloc.train.defaults import default_parameters

BASELINE = "grpo"


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A method of the leaderboard.

    Attributes:
        recipe: name of the recipe, for `rollalloc.named.make_recipe`.
        label: its name in tables and folders.
        parameters: parameters of the recipe, as plain data.
    """

    recipe: str
    label: str
    parameters: Mapping[str, Any]


def contestants(names: Sequence[str], tier: Tier) -> tuple[Contestant, ...]:
    """The methods of a leaderboard: those in `names` or, if `names` is empty, those of the tier.

    A recipe has its default parameters. If the tier defines its own methods, `names` are their labels.

    Raises:
        ValueError: a recipe is unknown, a name occurs twice, or the baseline is missing.
    """
    for name in names:
        if ":" in name:
            raise ValueError(
                f"--recipes {name!r}: a leaderboard has recipes of this package; compare your own with `rollalloc compare`"
            )
    all_names = [*(names or tier.methods or tier.recipes)]
    if twice := {name for name in all_names if all_names.count(name) > 1}:
        raise ValueError(f"named twice: {', '.join(sorted(twice))}; each method is compared once")
    if BASELINE not in all_names:
        raise ValueError(f"{BASELINE} is the baseline of every ratio; add it: --recipes {','.join((BASELINE, *names))}")
    return tuple(_contestant(name, tier) for name in all_names)


def _contestant(label: str, tier: Tier) -> Contestant:
    if label in tier.methods:
        recipe, parameters = tier.methods[label]
    else:
        for unknown in set(label.split("+")) - set(RECIPES):
            make_recipe(unknown, {})  # raises an error that lists the known ones
        recipe, parameters = label, default_parameters(label)
    make_recipe(recipe, parameters)
    return Contestant(recipe=recipe, label=label, parameters=json.loads(json.dumps(dict(parameters))))
