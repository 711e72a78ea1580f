"""`rollalloc waste`: what the rollouts of a run taught, and what another recipe would have paid, from its logs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from rollalloc.cli.options import parameters_of, with_fields
from rollalloc.cli.progress import staged
from rollalloc.cli.reading import LogPath, Reading, interval, plain, points, table

if TYPE_CHECKING:
    from rollalloc.core.recipe import Recipe
    from rollalloc.lab.waste.finding import Finding
    from rollalloc.lab.waste.forecast import Forecast

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
    "A row teaches where it is trained on with an advantage that is not 0. × GRPO: this price over GRPO's and its 95% "
    "interval, below 1 is cheaper.\n"
)
_OWN_SURPLUS = "dapo discards its surplus, as published; dapo (carried) keeps it for the next batch.\n"


@with_fields(Reading)
def waste(
    reading: Reading,
    path: LogPath,
    recipe: Annotated[
        list[str] | None,
        typer.Option(help="Compare GRPO with this one, as `rollalloc train` takes it, instead; repeatable."),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A parameter of each --recipe that has it, key=value; repeatable.")
    ] = None,
    from_step: Annotated[int | None, typer.Option(help="Leave out what was logged before this step.")] = None,
    n: Annotated[
        int | None, typer.Option(help="Forecast: rollouts of a trained group; by default what groups have.")
    ] = None,
    n_pilot: Annotated[int | None, typer.Option(help="Forecast: pilots among them; a quarter by default.")] = None,
    resamples: Annotated[int, typer.Option(help="Forecast: resamples for its interval.")] = 60,
    seed: Annotated[int, typer.Option(help="Of the resampling and of the simulation.")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say which rollouts taught nothing, and why, and forecast what DAPO and Pilot-Commit, or others, would have paid."""
    from rollalloc.lab.waste.finding import find, forecast_sentence, sentence

    console = Console()
    asked = {"from_step": from_step, "n": n, "n_pilot": n_pilot, "resamples": resamples, "seed": seed}
    reading.check(**asked)
    own = _own(recipe, parameters_of(set_), n_pilot)
    with staged() as shown:
        finding = find(
            reading.read(path, shown), threshold=reading.threshold, own=own, **asked,
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
    console.print(points(finding.notes))


def _show_waste(console: Console, finding: Finding) -> None:
    if finding.booked:
        paid = sum(finding.booked.values())
        shown = table(("as the run booked them", "rollouts", "share"))
        for cause, rollouts in finding.booked.items():
            if rollouts:
                shown.add_row(Text(cause.replace("_", " ")), f"{rollouts:,}", f"{rollouts / paid:.1%}")
        console.print(shown)
    if finding.shares is not None:
        shown = table(("by the rewards of their group", "rollouts", "share", "95% interval"))
        for cause, share in finding.shares.shares.items():
            if rollouts := finding.shares.rollouts[cause]:
                shown.add_row(_CAUSES[cause], f"{rollouts:,}", f"{share.value:.1%}", interval(share))
        console.print(shown)


def _own(names: list[str] | None, parameters: Mapping[str, Any], n_pilot: int | None) -> dict[str, Recipe] | None:
    """The recipes that are asked for, by name.

    Raises:
        ValueError: an option that means nothing with them, or without; or a recipe that cannot be made.
    """
    from rollalloc.cli.sources import USUAL
    from rollalloc.lab.waste.forecast import BASELINE
    from rollalloc.named import make_recipe, parameters_of, refuse_unknown

    if not names:
        if parameters:
            raise ValueError("--set: parameters of a recipe; say which with --recipe")
        return None
    if n_pilot is not None:
        raise ValueError("--n-pilot: for the comparison with Pilot-Commit; with --recipe give --set n_pilot=…")
    takes = {name: parameters_of(name) for name in names}
    refuse_unknown(" and ".join(names), parameters, {key for each in takes.values() for key in each})
    return {
        "grpo (yours)" if name == BASELINE else name: make_recipe(
            name, USUAL.get(name, {}) | {key: parameters[key] for key in parameters if key in takes[name]}
        )
        for name in names
    }


def _show_forecast(console: Console, forecast: Forecast) -> None:
    from rollalloc.lab.waste.finding import times

    plan = forecast.plan
    pilots = "" if plan.n_pilot is None else f", {plan.n_pilot} of them pilots"
    some = "" if forecast.simulated >= forecast.visits else f"{forecast.simulated:,} of "
    source = f"from {some}{forecast.visits:,} groups of {forecast.prompts:,} prompts"
    shape = f"{'Groups' if pilots else 'GRPO: groups'} of {plan.n}{pilots}; {plan.groups} groups per batch; {source}."
    console.print(Text(f"Forecast: what is paid for a row that teaches. {shape}"))
    tokens = any(price.tokens is not None for price in forecast.prices.values())
    shown = table(("recipe", "rollouts", "× GRPO", *(("tokens", "× GRPO") if tokens else ())))
    for number, (name, price) in enumerate(forecast.prices.items()):
        cells = [f"{price.rollouts:,.2f}", times(price.times_rollouts) if number else "1"]
        if price.tokens is not None and price.times_tokens is not None:
            cells += [f"{price.tokens:,.0f}", times(price.times_tokens) if number else "1"]
        shown.add_row(Text(name), *cells)
    console.print(shown)
    console.print(Text(_LEGEND + (_OWN_SURPLUS if plan.n_pilot is not None else "")))
