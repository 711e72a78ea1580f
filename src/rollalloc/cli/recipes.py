"""`rollalloc recipes`: list the recipes, or explain a recipe and its parameters."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from rollalloc.cli.options import reflowed


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(help="Recipe to explain, or NAME+NAME for a mixture of two.", metavar="NAME"),
    ] = None,
) -> None:
    """List all recipes, or explain one recipe with its parameters and their defaults."""
    if name is None:
        _list_all()
    else:
        _explain(name)


def _list_all() -> None:
    from rollalloc.named import COMMON, RECIPES, REQUIRED, defaults_of

    table = Table(show_lines=True)
    for heading in ("recipe", "what it does", "parameters"):
        table.add_column(heading)
    for name, function in RECIPES.items():
        parameters = [
            key if default is REQUIRED else f"{key}={default}"
            for key, default in defaults_of(name).items()
            if key not in COMMON
        ]
        summary, _, _ = (inspect.getdoc(function) or "").partition("\n")
        table.add_row(name, summary, ", ".join(parameters))
    console = Console()
    console.print(table)
    console.print(
        f"rollalloc recipes NAME explains a recipe's parameters. Every recipe also takes {', '.join(COMMON)}.",
        markup=False,
    )


def _explain(name: str) -> None:
    from rollalloc.named import REQUIRED, defaults_of, functions_of

    defaults, explained = defaults_of(name), explained_parameters(name)
    console = Console()
    for part, function in functions_of(name).items():
        console.print(f"{part}: {_before_arguments(function)}\n", markup=False, highlight=False)
    table = Table(show_lines=True)
    for heading in ("parameter", "default", "what it is"):
        table.add_column(heading, no_wrap=heading == "parameter")
    for key, default in defaults.items():
        table.add_row(key, "(required)" if default is REQUIRED else str(default), explained.get(key, ""))
    console.print(table, markup=False)
    console.print("On the command line: --set PARAMETER=VALUE; repeatable.", markup=False, highlight=False)


def explained_parameters(name: str) -> Mapping[str, str]:
    """One line for each parameter of a recipe or a mixture; of one that several parts have, the first part's."""
    from rollalloc.named import COMMON, functions_of

    explained = dict(COMMON)
    for function in functions_of(name).values():
        for key, text in _parameters_of(function).items():
            explained.setdefault(key, text)
    return explained


def _parameters_of(function: Any) -> Mapping[str, str]:
    """One line for each parameter, from `Args:` in a recipe function's docstring; empty without that section.

    If an explanation ends with a reference to another recipe ("see `other`"), that recipe's explanation is returned.
    """
    from rollalloc.named import RECIPES

    explained = dict(_arguments(function))
    for key, text in explained.items():
        other = re.search(r"\bsee (?:recipes\.)?(\w+)\.?$", text)
        if other and other[1] in RECIPES:
            explained[key] = _arguments(RECIPES[other[1]]).get(key, text)
    return explained


def _arguments(function: Any) -> Mapping[str, str]:
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)+)", inspect.getdoc(function) or "", re.MULTILINE)
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section[1] if section else "", re.MULTILINE)
    return {key: re.sub(r"\s+", " ", text).replace("`", "") for key, text in entries}


def _before_arguments(function: Any) -> str:
    """The part of a docstring before its sections."""
    text = re.split(r"^(?:Args|Raises|Returns):$", inspect.getdoc(function) or "", flags=re.MULTILINE)[0]
    return reflowed(text).strip()
