"""The `rollalloc` command.

After a user's mistake, it prints one message and exits with code 2, or shows the traceback if `ROLLALLOC_DEBUG=1` is set.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable
from typing import IO, Annotated, Any, cast

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text

import rollalloc
from rollalloc.cli.advise import advise
from rollalloc.cli.compare import compare
from rollalloc.cli.data import data
from rollalloc.cli.features import features
from rollalloc.cli.model import model
from rollalloc.cli.options import Command, CommandGroup, with_numbers_checked
from rollalloc.cli.recipes import recipes
from rollalloc.cli.report import report
from rollalloc.cli.train import train
from rollalloc.cli.waste import waste
from rollalloc.files.text import told, visible

_MISTAKES = (
    *(ValueError, TypeError, OSError, RuntimeError),
    *(ArithmeticError, ImportError, AttributeError, MemoryError),
)
# The base of click's errors, which are about the command line itself; typer may have a copy of click of its own.
_UsageError: Any = typer.BadParameter.__base__


def show_version(wanted: bool) -> None:
    """Print the version and end the command."""
    if wanted:
        typer.echo(f"rollalloc {rollalloc.__version__}")
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=show_version)
    ] = False,
) -> None:
    """The options of `rollalloc` itself, before a command."""


def command_line(about: str, *commands: Callable[..., None]) -> typer.Typer:
    """A command line of these commands, whose options of numbers are checked.

    Args:
        about: the first line of its help.
    """
    made = typer.Typer(
        cls=CommandGroup, help=about, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
    )
    made.callback()(options)
    for command in commands:
        made.command(cls=Command)(with_numbers_checked(command))
    return made


app = command_line(
    "Decide which prompts get how many rollouts, which are stopped, and which are trained on.",
    *(train, compare, features, model, report, advise, waste, recipes),
)
app.add_typer(data, name="data")


class _Stderr(io.TextIOBase):
    """Writes to the present value of `sys.stderr`. While a live table is shown, Rich replaces `sys.stderr`, so that text
    appears above the table. A console that keeps the original stream would write into the table.
    """

    def write(self, s: str, /) -> int:
        return sys.stderr.write(s)

    def flush(self) -> None:
        sys.stderr.flush()

    def isatty(self) -> bool:
        return sys.stderr.isatty()


def log_handler() -> RichHandler:
    """Return a handler that prints warnings to standard error, above the live table if there is a live table."""
    handler = RichHandler(console=Console(file=cast("IO[str]", _Stderr())), show_path=False)
    # rollalloc reports the errors of the hub itself.
    handler.addFilter(lambda record: not record.name.startswith("huggingface_hub"))
    return handler


def main() -> None:
    """Entry point of `rollalloc`."""
    run(app)


def run(line: typer.Typer) -> None:
    """Call a command line with the arguments of this process, which then ends.

    After a user's mistake, it ends with code 2 and one message.
    """
    console = Console(stderr=True)
    logging.basicConfig(level=logging.WARNING, handlers=[log_handler()], format="%(message)s")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # A user's module:function may be in the working folder, which console scripts do not search.
    sys.path.append(os.getcwd())
    if os.environ.get("ROLLALLOC_DEBUG"):
        line()
    try:
        ended = line(standalone_mode=False)
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # typer has shown the help
            sys.exit(error.exit_code)
        _show_error(console, f"{error.format_message()}{_where_to_read(error)}")
        sys.exit(error.exit_code)
    except _MISTAKES as error:
        _show_error(console, told(error))
        sys.exit(2)
    sys.exit(ended if isinstance(ended, int) else 0)


def _show_error(console: Console, message: str) -> None:
    said = Text("error: ", "bold red")  # one Text object, so that lines wrap correctly
    console.print(said.append(visible(message), "not bold default"))


def _where_to_read(error: Any) -> str:
    return "" if error.ctx is None else f" ({error.ctx.command_path} --help lists what it takes)"


if __name__ == "__main__":
    main()
