"""The reference of commands and of recipes' parameters, made from the code: docs/commands.md and docs/recipes.md.

python tools/reference.py          # ends with an error if a page is not that of the code
python tools/reference.py --write  # writes both pages
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from rollalloc.cli.app import app
from rollalloc.cli.recipes import explained_parameters
from rollalloc.named import COMMON, RECIPES, REQUIRED, defaults_of

ROOT = Path(__file__).parents[1]
_MADE = "This page is made from the code by `python tools/reference.py --write`."


def commands() -> str:
    """Every command of `rollalloc` with its options and defaults."""
    root = typer.main.get_command(app)
    return "\n".join(["# Commands", "", _MADE, "", *_command(root, "rollalloc")]) + "\n"


def _command(command: Any, name: str) -> Iterator[str]:
    inside: Mapping[str, Any] = getattr(command, "commands", {})
    if inside and name != "rollalloc":
        yield from (f"## {name}", "", _line(command.help or ""), "")
    if not inside:
        yield from (f"## {name}", "", _paragraphs(command.help or ""), "")
        rows = [row for each in command.params if (row := _option(each))]
        if rows:
            yield from ("| option | default | what it does |", "|---|---|---|", *rows, "")
    for key, each in inside.items():
        yield from _command(each, f"{name} {key}")


def _option(parameter: Any) -> str | None:
    if parameter.name == "help" or getattr(parameter, "hidden", False):
        return None
    argument = parameter.param_type_name == "argument"
    names = (
        (parameter.metavar or parameter.name.upper())
        if argument
        else ", ".join([*parameter.opts, *parameter.secondary_opts])
    )
    default = parameter.default() if callable(parameter.default) else parameter.default
    if parameter.required:
        shown = "required"
    else:
        shown = "" if default in (None, (), [], False, ...) or "Sentinel" in repr(default) else f"`{default}`"
    return f"| `{_cell(names)}` | {_cell(shown)} | {_cell(_line(getattr(parameter, 'help', None) or ''))} |"


def recipes() -> str:
    """Every recipe with its parameters."""
    lines = [
        "# Recipes and their parameters", "", _MADE,
        "In Python, they are arguments of `rollalloc.recipes.NAME`; on the command line, `--recipe NAME --set KEY=VALUE`;",
        "under verl, keys such as `+trainer.v1.rollalloc.n_pilot=4`. [PAPERS.md](../PAPERS.md) names the papers.", "",
        "By name, every recipe also takes these:", "",
        "| parameter | what it is |", "|---|---|", *(f"| `{key}` | {_cell(text)} |" for key, text in COMMON.items()), "",
    ]  # fmt: skip
    for name, function in RECIPES.items():
        lines += [f"## {name}", "", _paragraphs(_before_sections(function)), ""]
        explained = explained_parameters(name)
        own = {key: default for key, default in defaults_of(name).items() if key not in COMMON}
        lines += ["| parameter | default | what it is |", "|---|---|---|"]
        for key, default in own.items():
            shown = "required" if default is REQUIRED else f"`{default}`"
            lines.append(f"| `{key}` | {_cell(shown)} | {_cell(explained[key])} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _before_sections(function: Callable[..., Any]) -> str:
    return re.split(r"^(?:Args|Raises|Returns):$", inspect.getdoc(function) or "", flags=re.MULTILINE)[0]


def _line(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"\[/?\w+\]", "", text)).strip()


def _paragraphs(text: str) -> str:
    return re.sub(r"\n{3,}", "\n\n", inspect.cleandoc(text)).strip()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


PAGES: Mapping[str, Callable[[], str]] = {"docs/commands.md": commands, "docs/recipes.md": recipes}


def differing() -> list[str]:
    """Pages that are not those of the code."""
    return [name for name, made in PAGES.items() if not _is(ROOT / name, made())]


def _is(page: Path, text: str) -> bool:
    return page.is_file() and page.read_text("utf-8") == text


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the pages")
    if parser.parse_args().write:
        for name, made in PAGES.items():
            (ROOT / name).write_text(made(), "utf-8")
    found = differing()
    print(*[f"{name} is not that of the code: python tools/reference.py --write" for name in found], sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
