"""How the help of a command looks, and what a flag is given by mistake."""

from __future__ import annotations

import inspect
import re
from itertools import pairwise
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

_TRUTHS = ("true", "false", "yes", "no", "on", "off")  # what a user may write behind a flag


_APART = re.compile(r"\s{4,}|[-*] |\d+\. ")  # how an equation or a point of a list begins


def reflowed(docstring: str) -> str:
    """A docstring with one line for each paragraph and point of a list, which the terminal then wraps to its width."""
    lines = [""]
    for line in inspect.cleandoc(docstring).splitlines():
        if not line or not lines[-1] or _APART.match(line) or re.match(r"\s{4,}", lines[-1]):
            lines.append(line)
        else:
            lines[-1] += f" {line.strip()}"
    return "\n".join(lines[1:])


def _is_flag(parameter: Any) -> bool:
    return bool(getattr(parameter, "is_flag", False))


def _untyped(parameters: list[Any]) -> list[Any]:
    """Leave out the type that newer releases of typer show beside a flag, which takes no value."""
    for each in filter(_is_flag, parameters):
        each.metavar = ""
    return parameters


class Command(TyperCommand):
    """A command of `rollalloc`. A flag with a value, such as `--resume true`, is refused in the flag's name."""

    def __init__(self, *given: Any, help: str | None = None, **others: Any) -> None:
        super().__init__(*given, help=reflowed(help or ""), **others)

    def get_params(self, ctx: Any) -> list[Any]:
        return _untyped(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flags = {name for each in filter(_is_flag, self.params) for name in each.opts}
        for name, value in pairwise(args):
            if name in flags and value.lower() in _TRUTHS:
                raise typer.BadParameter(f"it takes no value; leave {value!r} out", ctx=ctx, param_hint=f"'{name}'")
        return super().parse_args(ctx, args)


class CommandGroup(TyperGroup):
    """`rollalloc` itself, or a command that has commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _untyped(super().get_params(ctx))
