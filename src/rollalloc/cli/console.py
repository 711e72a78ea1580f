"""Plain sentences on the console: names of folders, and what others wrote, may hold anything."""

from __future__ import annotations

from rich.console import Console

from rollalloc.files.text import visible


def say(console: Console, text: str, style: str = "") -> None:
    """Write a sentence, with what would act on the terminal made visible."""
    console.print(visible(text), style=style or None, markup=False, emoji=False, highlight=False)
