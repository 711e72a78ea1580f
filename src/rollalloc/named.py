"""Recipes by name, as configurations and command lines give them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from rollalloc import recipes
from rollalloc.core.recipe import Recipe

RECIPES = {
    function.__name__: function
    for function in (recipes.grpo, recipes.dapo, recipes.pilot_commit, recipes.pods, recipes.darts, recipes.racing)
}


def make_recipe(name: str, parameters: Mapping[str, Any]) -> Recipe:
    """The recipe of that name with those parameters.

    Args:
        name: a function of `rollalloc.recipes`, or `module:object`, which is imported, so it runs that module's code.
        parameters: the function's arguments.

    Raises:
        ValueError: an unknown name or parameter, naming the nearest right one; a missing parameter.
    """
    made = _find(name)
    if isinstance(made, Recipe):
        if parameters:
            raise ValueError(f"{name} is a recipe, which takes no parameters, got {dict(parameters)}")
        return made
    known = inspect.signature(made).parameters
    refuse_unknown(name, parameters, known)
    missing = [key for key, p in known.items() if p.default is p.empty and key not in parameters]
    if missing:
        raise ValueError(f"{name} needs {', '.join(missing)}; it takes {', '.join(known)}")
    recipe = made(**parameters)
    if not isinstance(recipe, Recipe):
        raise ValueError(f"{name} must return a Recipe, got {recipe!r}")
    return recipe


def parameters_of(name: str) -> tuple[str, ...]:
    """What the recipe of that name takes; nothing where it is a value.

    Raises:
        ValueError: an unknown name, naming the nearest right one.
    """
    made = _find(name)
    return () if isinstance(made, Recipe) else tuple(inspect.signature(made).parameters)


def refuse_unknown(name: str, parameters: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a parameter that is not known.

    Raises:
        ValueError: names it and the nearest right one.
    """
    known = list(known)
    for parameter in parameters:
        if parameter not in known:
            raise ValueError(
                f"{name} has no parameter {parameter!r}{_near(parameter, known)}; it takes {', '.join(known)}"
            )


def _find(name: str) -> Any:
    if ":" not in name:
        if name not in RECIPES:
            raise ValueError(
                f"unknown recipe {name!r}{_near(name, RECIPES)}; there are {', '.join(RECIPES)}, or module:object"
            )
        return RECIPES[name]
    module, _, attribute = name.partition(":")
    made = getattr(import_module(module), attribute)
    if not isinstance(made, Recipe) and not callable(made):
        raise ValueError(f"{name} must be a Recipe or a function that returns one, got {made!r}")
    return made


def _near(word: str, known: Iterable[str]) -> str:
    close = get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
