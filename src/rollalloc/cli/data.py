"""`rollalloc data`: write public data sets and built-in tasks as files to train and evaluate on."""

from __future__ import annotations

from pathlib import Path
from reprlib import repr as short
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console
from rich.table import Table

from rollalloc.cli.options import Command, CommandGroup, folder, parameters_of, place, with_numbers_checked
from rollalloc.cli.progress import say

if TYPE_CHECKING:
    from rollalloc.data.prepare import Prepared
    from rollalloc.data.public import Ask

_FILES_SHOWN = 3

data = typer.Typer(cls=CommandGroup, help="Prepare data sets.", no_args_is_help=True, pretty_exceptions_enable=False)


@data.command(cls=Command)
@with_numbers_checked
def prepare(
    sets: Annotated[
        list[str],
        typer.Argument(
            help="deepmath, deepscaler, polaris, dapo17k, gsm8k, math, math500, aime24, aime25, amc23, minerva, "
            "olympiadbench; aime24x32, aime25x32, amc23x32: verl samples each of their questions 32 times."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write to.", parser=folder)] = Path("data"),
    from_local: Annotated[
        Path | None,
        typer.Option(help="Read the data sets' original files from this folder instead of the hub.", parser=place),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that an earlier call wrote.")] = False,
    no_system: Annotated[
        bool,
        typer.Option("--no-system", help="Leave out system messages, for models whose chat template refuses them."),
    ] = False,
    leave_out: Annotated[
        str | None,
        typer.Option(
            "--filter",
            help="guessable: leave out training questions whose answer can be guessed, such as yes, false or (B).",
        ),
    ] = None,
    ask: Annotated[
        str,
        typer.Option(help="What prompts ask for: box, or tags (<think>, <answer>), for rollalloc.rewards.pods."),
    ] = "box",
) -> None:
    """Write public data sets as Parquet in verl's schema."""
    from rollalloc.data.prepare import prepare as carry_out

    console = Console(stderr=True)
    with console.status("preparing") as status:
        files = carry_out(
            sets,
            out,
            local=from_local,
            overwrite=overwrite,
            system=not no_system,
            leave_out=leave_out,
            ask=cast("Ask", ask),  # checked there
            progress=lambda part, rows: status.update(f"{part}: {rows:,} rows"),
        )
    console.print(_table(files))
    say(console, f"the files are in {out}")


@data.command(cls=Command)
def chat(
    tasks: Annotated[
        list[str],
        typer.Argument(help="sums, products, gcd, letters, filter, stories, or all."),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write to; each task gets a subfolder.", parser=folder)] = Path(
        "data/chat"
    ),
) -> None:
    """Write small tasks that a small chat model can learn, from reasoning-gym and from templates of word problems."""
    from rollalloc.named import near
    from rollalloc.tasks.chat import CHAT_TASKS, REWARD
    from rollalloc.tasks.chat import prepare as make

    names = list(CHAT_TASKS) if tasks == ["all"] else list(dict.fromkeys(tasks))
    for name in names:
        if name not in CHAT_TASKS:
            known = ", ".join(CHAT_TASKS)
            raise ValueError(f"unknown task {name!r}{near(name, CHAT_TASKS)}; choose from {known}, or all")
    table = Table(caption=f"--reward {REWARD}", caption_justify="left")
    for heading in ("folder", "what is asked", "train", "heldout", "--max-new-tokens"):
        table.add_column(heading)
    for name in names:
        task = CHAT_TASKS[name]
        made = make(out / name, task)
        numbers = (task.train, task.heldout, made.max_new_tokens)
        table.add_row(str(made.train.parent), task.about, *map(str, numbers))
    Console(stderr=True).print(table)


@data.command(cls=Command)
def convert(
    file: Annotated[
        Path,
        typer.Argument(
            help="Parquet, JSON, JSONL, CSV or TSV file with one question and answer per row.", parser=place
        ),
    ],
    question: Annotated[str, typer.Option(help="Column of the question, text or chat messages.")],
    answer: Annotated[
        str,
        typer.Option(
            help="Column of the answer: its last \\boxed{...} or \\fbox{...}, else the text after ####, else all of it. The "
            "same column as --question: the answer is the assistant's last message."
        ),
    ],
    out: Annotated[Path, typer.Option(help="New file to write, .parquet or .jsonl.", parser=place)],
    system: Annotated[str | None, typer.Option(help="System message to put before each question.")] = None,
    source: Annotated[
        str | None, typer.Option(help="data_source passed to the reward function (default: FILE's name).")
    ] = None,
    prefill: Annotated[
        bool, typer.Option("--prefill", help="If the last message is the assistant's, let the model continue it.")
    ] = False,
) -> None:
    """Convert a file with any question and answer columns, such as TRL's or GSM8K's, to verl's schema."""
    from rollalloc.data.convert import convert as carry_out

    made = carry_out(file, out, question=question, answer=answer, system=system, source=source, prefill=prefill)
    listed = ", ".join(f"{short(text)}: {count:,}" for text, count in made.placeholders.items())
    reasons = {
        "without an answer": made.unanswered,
        "that repeat another": made.repeated,
        "of questions with different answers": made.contradicted,
        f"with a placeholder as their answer ({listed})": sum(made.placeholders.values()),
    }
    left_out = "".join(f"; {count:,} rows {reason} are left out" for reason, count in reasons.items() if count)
    say(Console(stderr=True), f"{made.prompts:,} prompts are in {out}{left_out}")


@data.command(cls=Command)
def environment(
    name: Annotated[str, typer.Argument(help="An environment of verifiers 0.4: the name of its package or module.")],
    out: Annotated[Path, typer.Option(help="New file to write, .parquet or .jsonl.", parser=place)],
    tasks: Annotated[int | None, typer.Option(help="Number of tasks (default: all).")] = None,
    skip: Annotated[
        int, typer.Option(help="Number of tasks to skip at the start, e.g. because another file has them.")
    ] = 0,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of the environment's taskset, key=value; repeatable.")
    ] = None,
) -> None:
    """Write the prompts of a single-turn environment of verifiers. The environment's own rubric scores their rollouts."""
    from rollalloc.data.environment import write_environment
    from rollalloc.rewards.environment import REWARD

    made = write_environment(name, out, tasks=tasks, skip=skip, config=parameters_of(settings))
    say(Console(stderr=True), f"{made:,} prompts are in {out}; score them with --reward {REWARD}")


def _table(files: list[Prepared]) -> Table:
    local = any(file.read for file in files)
    table = Table()
    for heading in ("file", "rows", "left out", *(("read from",) if local else ())):
        table.add_column(heading, justify="right" if heading == "rows" else "left")
    for file in files:
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in file.dropped.items())
        read = "\n".join(file.read[:_FILES_SHOWN]) + (
            f"\nand {more} more" if (more := len(file.read) - _FILES_SHOWN) > 0 else ""
        )
        table.add_row(file.path.name, f"{file.rows:,}", left_out, *((read,) if local else ()))
    return table
