"""`rollalloc waste`: what the rollouts of a run taught, and what another recipe would have paid, from its logs."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollalloc.cli.logs import LogPath, Reading, plain
from rollalloc.cli.options import with_fields
from rollalloc.cli.progress import staged

if TYPE_CHECKING:
    from rollalloc.waste.finding import Finding
    from rollalloc.waste.forecast import Forecast
    from rollalloc.waste.shares import Share

_CAUSES = {
    "taught": "rewards differ",
    "all_right": "all right",
    "all_wrong": "all wrong",
    "all_truncated": "all wrong, all truncated",
    "all_alike": "all the same, in between",
    "single": "one scored rollout",
    "unscored": "no score",
}
_LEGEND = (
    "Ratio: GRPO's price over this one's and its 95% interval, above 1 is cheaper. Signal: sum of squared advantages "
    "(reward - mean of the group) of the rollouts trained on. dapo discards its surplus, as published; dapo (carried) keeps "
    "it for the next batch.\n"
)


@with_fields(Reading)
def waste(
    reading: Reading,
    path: LogPath,
    from_step: Annotated[int | None, typer.Option(help="Leave out what was logged before this step.")] = None,
    n: Annotated[
        int | None, typer.Option(help="Forecast: rollouts of a trained group; by default what groups have.")
    ] = None,
    n_pilot: Annotated[int | None, typer.Option(help="Forecast: pilots among them; a quarter by default.")] = None,
    resamples: Annotated[int, typer.Option(help="Forecast: resamples for its interval.")] = 60,
    seed: Annotated[int, typer.Option(help="Of the resampling and of the simulation.")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say which rollouts taught nothing, by cause, and forecast what DAPO and Pilot-Commit would have paid."""
    from rollalloc.waste.finding import find, forecast_sentence, sentence

    console = Console()
    asked = {"from_step": from_step, "n": n, "n_pilot": n_pilot, "resamples": resamples, "seed": seed}
    reading.check(**asked)
    with staged() as shown:
        finding = find(
            reading.read(path, shown), threshold=reading.threshold, **asked,
            watcher=lambda done, of: shown("simulating", done, of),
        )  # fmt: skip
    if json_:
        typer.echo(json.dumps(plain(finding.described()), indent=2, allow_nan=False))
        return
    console.print(Text(sentence(finding), style="bold"))
    if finding.forecast is not None:
        console.print(Text(forecast_sentence(finding.forecast), style="bold"))
    _show_waste(console, finding)
    if finding.forecast is not None:
        _show_forecast(console, finding.forecast)
    else:
        console.print(Text(f"No forecast: {finding.refused}.\n"))
    notes = Table.grid(padding=(0, 1))
    for note in finding.notes:
        notes.add_row("-", Text(note))
    console.print(notes)


def _show_waste(console: Console, finding: Finding) -> None:
    if finding.booked:
        paid = sum(finding.booked.values())
        table = _table(("as the run booked them", "rollouts", "share"))
        for cause, rollouts in finding.booked.items():
            if rollouts:
                table.add_row(Text(cause.replace("_", " ")), f"{rollouts:,}", f"{rollouts / paid:.1%}")
        console.print(table)
    if finding.shares is not None:
        table = _table(("by the rewards of their group", "rollouts", "share", "95% interval"))
        for cause, share in finding.shares.shares.items():
            if rollouts := finding.shares.rollouts[cause]:
                table.add_row(_CAUSES[cause], f"{rollouts:,}", f"{share.value:.1%}", _interval(share))
        console.print(table)


def _show_forecast(console: Console, forecast: Forecast) -> None:
    plan = forecast.plan
    shape = f"Groups of {plan.n}, {plan.n_pilot} of them pilots; {plan.groups} groups a batch"
    some = "" if forecast.simulated == forecast.visits else f"{forecast.simulated:,} of "
    source = f"from {some}{forecast.visits:,} groups of {forecast.prompts:,} prompts"
    console.print(Text(f"Forecast: rollouts paid for a mixed group, and for a unit of signal. {shape}; {source}."))
    table = _table(("recipe", "mixed group", "ratio", "signal", "ratio"))
    for number, (name, price) in enumerate(forecast.prices.items()):
        mixed, signal = (_ratio(ratio) if number else "1" for ratio in (price.ratio_mixed, price.ratio_signal))
        table.add_row(name, f"{price.per_mixed:,.1f}", mixed, f"{price.per_signal:,.1f}", signal)
    console.print(table)
    console.print(Text(_LEGEND))


def _table(headings: tuple[str, ...]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return table


def _interval(share: Share) -> str:
    return "too few prompts" if share.interval is None else "{:.1%} – {:.1%}".format(*share.interval)


def _ratio(share: Share) -> str:
    low, high = share.interval or (0.0, math.inf)
    return f"{share.value:.2f} ({low:.2f}–{high:.2f})"
