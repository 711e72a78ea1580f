"""`rollalloc forecast`: what a run will have paid when it reaches an accuracy."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from rollalloc.cli.options import place

_MILLION = 1e6


def forecast(
    folder: Annotated[
        Path, typer.Argument(help="Folder of a run that goes on, or went on.", parser=place, metavar="RUN")
    ],
    target: Annotated[float, typer.Option(help="Held-out accuracy to reach.")],
    price: Annotated[float | None, typer.Option(help="Of a million generated tokens, in any money.")] = None,
    upto: Annotated[float | None, typer.Option(help="Look at evaluations up to so many rollouts only.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Forecast rollouts, tokens and money to a held-out accuracy, from the evaluations so far."""
    from rollalloc.bench.budget import forecast_to
    from rollalloc.runs.cost import curve_of, read_metrics
    from rollalloc.runs.names import METRICS

    if price is not None and not (isfinite(price) and price >= 0):
        raise ValueError(f"--price: expected money for a million tokens, 0 or more, got {price}")
    curve = curve_of(read_metrics(folder / METRICS))
    found = forecast_to(curve, target, **({} if upto is None else {"upto": upto}))
    amounts = {"rollouts": found.rollouts, "tokens": found.tokens}
    said = {name: asdict(budget) for name, budget in amounts.items()}
    if price is not None:
        scale = price / _MILLION
        low, high = found.tokens.interval
        said["money"] = {"value": found.tokens.value * scale, "interval": (low * scale, high * scale)}
    if json_:
        whole = said | {"evaluations": found.evaluations, "reached": found.reached, "target": target}
        typer.echo(json.dumps(whole, indent=2, allow_nan=False))
        return
    console = Console()
    what = "reached" if found.reached else f"forecast from {found.evaluations} evaluations, with an 80% interval"
    console.print(Text(f"Held-out accuracy {target:g}: {what}", style="bold"))
    for name, budget in said.items():
        shown = "{:,.2f}" if name == "money" else "{:,.0f}"
        within = "" if found.reached else " ({} – {})".format(*(shown.format(end) for end in budget["interval"]))
        console.print(Text(f"  {name}: {shown.format(budget['value'])}{within}"))
    if not found.reached:
        console.print(
            Text("- the interval is calibrated on runs of tiny models: of a task of another kind it holds fewer")
        )
