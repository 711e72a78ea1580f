"""What every recipe function has beside its parameters: a shape, and a check of the kinds of its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from numbers import Integral, Real
from typing import Any, ParamSpec, Protocol, get_type_hints

from rollalloc.core.recipe import Recipe, at_least

_P = ParamSpec("_P")
# The sizes of a method: its parameters that say how many prompts and rollouts a batch has, with their values.
Sizes = dict[str, Any]
Shape = Callable[..., Sizes]  # called as shape(rows, group_rows, and sizes that the user set), all optional


class RecipeFunction(Protocol[_P]):
    """A function that returns a recipe. `shape` gives values for its sizes."""

    __name__: str
    shape: Shape

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> Recipe: ...


def sized(shape: Shape) -> Callable[[Callable[_P, Recipe]], RecipeFunction[_P]]:
    """Decorate a recipe function: it gets its shape, and checks the kinds of its arguments.

    Args:
        shape: returns the sizes of the method for `rows`, the rows of a batch, and `group_rows`, the rows of a group. Its
            other parameters are sizes that the user set. The defaults of the recipe function are those of `shape()`.
    """

    def decorated(function: Callable[_P, Recipe]) -> RecipeFunction[_P]:
        signature = inspect.signature(function)

        @wraps(function)
        def called(*args: _P.args, **kwargs: _P.kwargs) -> Recipe:
            given = of_kinds(called, signature.bind(*args, **kwargs).arguments)
            return function(**given)  # pyright: ignore[reportCallIssue]

        recipe_function: Any = called
        recipe_function.shape = shape
        return recipe_function

    return decorated


def groups_of(rows: int, group_rows: int) -> int:
    """The number of groups in a batch of about this many rows, at least 1.

    Raises:
        ValueError: a number is below 1.
    """
    at_least("rows", rows, 1)
    at_least("group_rows", group_rows, 1)
    return max(1, rows // group_rows)


def plain(rows: int, group_rows: int) -> Sizes:
    """The shape of GRPO, and of a recipe function that has no shape of its own: n rollouts of each prompt."""
    return {"groups": groups_of(rows, group_rows), "n": group_rows}


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
