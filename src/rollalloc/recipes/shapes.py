"""Sizes that a call of a recipe function left out: what they were called with is kept, so that a driver can fill them in."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec

from rollalloc.core.recipe import Recipe

_P = ParamSpec("_P")
_CALL = (
    "_call"  # no field of a recipe: `dataclasses.replace` leaves it out, as the sizes of its outcome are as they stand
)


@dataclass(frozen=True, slots=True)
class Call:
    """How a recipe was made.

    Attributes:
        function: of `rollalloc.recipes`.
        given: its arguments by name, without those that were left to their defaults.
    """

    function: Callable[..., Recipe]
    given: Mapping[str, Any]


def sized(function: Callable[_P, Recipe]) -> Callable[_P, Recipe]:
    """Decorate a recipe function, so that `call_of` knows what a recipe of it was made with."""
    signature = inspect.signature(function)

    @wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> Recipe:
        recipe = function(*args, **kwargs)
        given = dict(signature.bind(*args, **kwargs).arguments)
        object.__setattr__(recipe, _CALL, Call(called, given))
        return recipe

    return called


def call_of(recipe: Recipe) -> Call | None:
    """The call that made the recipe just as it is; None for one that was composed or changed afterwards."""
    return vars(recipe).get(_CALL)


def sizes_for(
    parameters: Collection[str], given: Mapping[str, Any], groups: int, n: int, *, trained: bool = True
) -> dict[str, Any]:
    """Values for those parameters of a recipe that say its shape and were not given.

    A quarter of a group are pilots; the longest rollout is one of DARTS's rows; stages of growing size end at n, each twice
    as large as the one before; PODS generates four rollouts for each one trained on.

    Args:
        parameters: the names that the recipe takes.
        given: those that are said, with their values.
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 1.
        trained: n counts the rollouts that are trained on, as TRL's `num_generations`, not all of them, as verl's
            `rollout.n`.
    """
    fits: dict[str, Any] = {"groups": groups}
    if "m" in parameters and trained:
        fits["m"] = n
        n = 4 * given.get("m", n)
    if "n_pilot" in parameters:
        pilots = given.get("n_pilot", n - given["n_commit"] if "n_commit" in given else max(1, n // 4))
        fits |= {"n_pilot": pilots, "n_commit": n - pilots}
    elif "shortest" in parameters:
        longest = given.get("longest", n - given["shortest"] if "shortest" in given else min(1, n - 1))
        fits |= {"shortest": n - longest, "longest": longest}
    elif "sizes_S" in parameters:
        fits["sizes_S"] = tuple(dict.fromkeys(max(1, n // share) for share in (4, 2, 1)))
    elif "n" in parameters:
        fits["n"] = n
    return {name: value for name, value in fits.items() if name in parameters and name not in given}
