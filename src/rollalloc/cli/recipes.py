"""`rollalloc recipes`: what there is to choose from."""

from __future__ import annotations

import inspect

from rich.console import Console
from rich.table import Table


def recipes() -> None:
    """List the recipes, what each does and its parameters."""
    from rollalloc.named import RECIPES, signature_of

    table = Table(show_lines=True)
    for heading in ("recipe", "what it does", "parameters"):
        table.add_column(heading)
    for name, function in RECIPES.items():
        summary = (inspect.getdoc(function) or "").partition("\n")[0]
        parameters = [key if p.default is p.empty else f"{key}={p.default}" for key, p in signature_of(name).items()]
        table.add_row(name, summary, ", ".join(parameters))
    Console().print(table)
