"""`rollalloc ledger`: what each prompt did under which model, over runs and frameworks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollalloc.cli.logs import Reading
from rollalloc.cli.options import with_fields
from rollalloc.cli.progress import staged
from rollalloc.cli.saying import say

if TYPE_CHECKING:
    from rollalloc.ledger.adding import Added
    from rollalloc.ledger.sources import Source
    from rollalloc.waste.groups import Log

ledger = typer.Typer(
    help="Keep what each prompt did under which model.", no_args_is_help=True, pretty_exceptions_enable=False
)


@ledger.command()
@with_fields(Reading)
def add(
    reading: Reading,
    path: Annotated[Path, typer.Argument(help="The ledger; made where nothing is.", metavar="LEDGER")],
    runs: Annotated[list[str], typer.Argument(help="Folders of runs, or logs as `rollalloc waste` reads them.")],
    model: Annotated[
        str | None, typer.Option(help="Name or folder of the model that they began with, where logs do not say it.")
    ] = None,
) -> None:
    """Add runs, each rollout once, however often its run is added."""
    from rollalloc.ledger.adding import add as add_run
    from rollalloc.ledger.sources import sources_of
    from rollalloc.ledger.store import check

    console = Console(stderr=True)
    if not all(run.strip() for run in runs):  # a variable of the shell that is not set must not mean the current folder
        raise ValueError("expected folders of runs, or logs, got an empty name; give . for the current folder")
    reading.check()
    if path.exists() or path.is_symlink():
        check(path)  # before a minute of reading
    judged = _judged(reading)
    left_out = 0
    for source in (source for run in runs for source in sources_of(run, reading.format, model)):
        if source.missing:
            left_out += 1
            say(console, f"{source.log.parent}: left out, {source.missing}", "yellow")
            continue
        with staged() as shown:
            log = reading.read(source.log, shown, source.format)
        _say_added(console, source, log, add_run(path, source, log, judged, reading.threshold))
    if left_out:
        raise ValueError(f"{left_out} runs were left out, as said above; the others are in {path}")


@ledger.command()
def show(
    path: Annotated[Path, typer.Argument(help="The ledger.", metavar="LEDGER")],
    prompt: Annotated[str | None, typer.Option(help="Key of a prompt: what it did in each run.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the runs of a ledger, or what one prompt did in each."""
    from rollalloc.ledger.contents import contents_of, prompt_in

    if prompt is not None:
        try:
            rows = prompt_in(path, prompt)
        except KeyError:
            raise ValueError(
                f"{path} has no prompt {prompt!r}; keys are as in rollouts.jsonl, or digests of texts"
            ) from None
        found: dict[str, Any] = {"prompt": prompt, "runs": rows}
    else:
        contents = contents_of(path)
        rows = contents.runs
        found = {"prompts": contents.prompts, "rollouts": contents.rollouts, "runs": rows}
    if json_:
        typer.echo(json.dumps(found, indent=2, allow_nan=False))
        return
    console = Console()
    if prompt is None:
        said = f"{found['rollouts']:,} rollouts of {found['prompts']:,} prompts in {len(rows):,} runs"
        console.print(Text(said, style="bold"))
    console.print(_table(rows))


def _table(rows: list[Any]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for number, heading in enumerate(("run", "rollouts", "success", "reward", "tokens", "steps", "model", "log")):
        table.add_column(heading, justify="right" if number in (1, 2, 3, 4) else "left", overflow="fold")
    for row in rows:
        scored = row["scored"] or 0
        rate = "?" if row["successes"] is None or not scored else f"{row['successes'] / scored:.1%}"
        reward = f"{row['reward_sum'] / scored:.3g}" if scored else "?"
        tokens = "?" if row["tokens"] is None else f"{row['tokens']:,}"
        steps = "?" if row["first_step"] is None else f"{row['first_step']}–{row['last_step']}"
        number = str(row["run"] if "run" in row else row["id"])
        cells = (number, f"{row['attempts'] or 0:,}", rate, reward, tokens, steps, row["model"] or "?", row["source"])
        table.add_row(*(Text("".join(c if c.isprintable() else "?" for c in cell)) for cell in cells))
    return table


def _say_added(console: Console, source: Source, log: Log, added: Added) -> None:
    again = f"; {added.known:,} rollouts were there and are not counted again" if added.known else ""
    part = "more of " if added.went_on else ""
    say(
        console, f"{source.log}: {part}run {added.run}, {added.rollouts:,} rollouts of {added.prompts:,} prompts{again}"
    )
    if not added.rates:
        say(
            console,
            "its rewards are not all in [0, 1], so that no priors come of it: say what is right (--threshold)",
            "yellow",
        )
    if source.model is None:
        say(console, "its model is not known, so that it counts as another (--model names it)", "yellow")
    for count, first, what in (
        (log.bad, log.first_bad, "lines cannot be used"),
        (log.odd, log.first_odd, "fields are odd"),
    ):
        if count:
            say(console, f"{count:,} {what}; the first is {first}", "yellow")


def _judged(reading: Reading) -> str:
    """What counts as success, in words."""
    field = reading.reward or "the metric"
    weighted = "" if reading.weights is None else f" weighted {reading.weights}"
    at_least = "" if reading.threshold is None else f" of at least {reading.threshold:g}"
    return f"{field}{weighted}{at_least}"
