"""Set the sizes of a recipe, such as `n`, from a framework's settings, if the user did not give them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import wraps
from numbers import Integral, Real
from typing import Any, ParamSpec, get_type_hints

from rollalloc.core.recipe import Recipe

_P = ParamSpec("_P")
# This attribute is not a dataclass field, so `dataclasses.replace` drops it. A changed recipe therefore keeps its sizes.
_CALL = "_call"


@dataclass(frozen=True, slots=True)
class Call:
    """The call of a recipe function.

    Attributes:
        function: a recipe function of `rollalloc.recipes`.
        given: the arguments that were passed, by name.
    """

    function: Callable[..., Recipe]
    given: Mapping[str, Any]


def sized(function: Callable[_P, Recipe]) -> Callable[_P, Recipe]:
    """Decorate a recipe function, so that it checks the kinds of its arguments, and `call_of` can return the call."""
    signature = inspect.signature(function)

    @wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> Recipe:
        given = of_kinds(called, signature.bind(*args, **kwargs).arguments)
        recipe = function(**given)  # pyright: ignore[reportCallIssue]
        object.__setattr__(recipe, _CALL, Call(called, given))
        return recipe

    return called


def of_kinds(function: Callable[..., Recipe], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a recipe function, of which lists became tuples.

    Words and nested values are not checked here, but by the function, and ranges too.

    Raises:
        ValueError: an argument has another kind than the function's annotation says. The message names the parameter.
    """
    kinds = get_type_hints(function)
    return {name: _of_kind(f"{function.__name__}: {name}", value, kinds.get(name)) for name, value in given.items()}


def _of_kind(name: str, value: Any, kind: Any) -> Any:
    optional = kind in (int | None, float | None)
    if value is None and optional:
        return value
    if kind == tuple[int, ...]:
        if isinstance(value, (list, tuple)) and all(type(each) is int for each in value):
            return tuple(value)
        example = f"{name.rpartition(' ')[2]}=[4,8]"
        raise ValueError(f"{name} must be a list of whole numbers, e.g. {example}, got {value!r}")
    or_null = ", or null" if optional else ""
    if kind in (int, int | None) and (isinstance(value, bool) or not isinstance(value, Integral)):
        raise ValueError(f"{name} must be a whole number{or_null}, got {value!r}")
    if kind in (float, float | None) and (isinstance(value, bool) or not isinstance(value, Real)):
        raise ValueError(f"{name} must be a number{or_null}, got {value!r}")
    if kind is bool and not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return value


def call_of(recipe: Recipe) -> Call | None:
    """Return the call that made this recipe; None if the recipe was not made by a single call, or changed afterwards."""
    return vars(recipe).get(_CALL)


def sizes_for(
    parameters: Collection[str], given: Mapping[str, Any], groups: int, n: int, *, trained: bool = True
) -> dict[str, Any]:
    """Return values for the size parameters of a recipe function that were not given.

    - Pilot-Commit: a quarter of a group's rollouts are pilots, but at least two. With a single pilot and rewards of 0 and
      1, the mean would never be in the window.
    - DARTS: `shortest` + `longest` is n. If neither is given, `longest` is 1, or 0 if n is 1.
    - Stages of growing size: `sizes_S` is (n // 4, n // 2, n). 0 becomes 1, and a repeated size is left out.
    - PODS: if n counts the trained rollouts, four times as many are generated.

    Args:
        parameters: names of the recipe function's parameters.
        given: the parameters that were set, with their values.
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 1.
        trained: True: n counts the rollouts that are trained on, as TRL's `num_generations` does. False: n counts
            all rollouts, as verl's `rollout.n` does.

    Raises:
        ValueError: a group of Pilot-Commit has fewer than three rollouts: two pilots and one more.
    """
    fits: dict[str, Any] = {"groups": groups}
    if "m" in parameters and trained:
        fits["m"] = n
        n = 4 * given.get("m", n)
    if "n_pilot" in parameters:
        if n < 3 and not {"n_pilot", "n_commit"} & given.keys():
            raise ValueError(f"pilot_commit: expected at least 3 rollouts in a group, two pilots and one more, got {n}")
        pilots = given.get("n_pilot", n - given["n_commit"] if "n_commit" in given else max(2, n // 4))
        fits |= {"n_pilot": pilots, "n_commit": n - pilots}
    elif "shortest" in parameters:
        longest = given.get("longest", n - given["shortest"] if "shortest" in given else min(1, n - 1))
        fits |= {"shortest": n - longest, "longest": longest}
    elif "sizes_S" in parameters:
        fits["sizes_S"] = tuple(dict.fromkeys(max(1, n // share) for share in (4, 2, 1)))
    elif "n" in parameters:
        fits["n"] = n
    return {name: value for name, value in fits.items() if name in parameters and name not in given}
