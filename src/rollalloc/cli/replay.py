"""`rollalloc replay`: what another recipe would have paid on the outcomes of a log."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from rollalloc.cli.logs import LogPath, Reading, plain
from rollalloc.cli.options import parameters_of, with_fields
from rollalloc.cli.progress import staged

_SAID = {
    "rollouts_per_batch": "rollouts a trained batch",
    "tokens_per_batch": "tokens a trained batch",
    "rollouts_per_row": "rollouts a row that teaches",
    "tokens_per_row": "tokens a row that teaches",
}
_NOT_LEARNING = (
    "The outcomes are those of the policy that was logged: another recipe would have moved it otherwise. What is paid for a "
    "row is not what is paid for accuracy."
)


@with_fields(Reading)
def replay(
    reading: Reading,
    path: LogPath,
    recipe: Annotated[str, typer.Option(help="As `rollalloc train` takes it.")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="A parameter of the recipe, key=value.")] = None,
    batches: Annotated[int, typer.Option(help="Batches to train at most.")] = 30,
    resamples: Annotated[int, typer.Option(help="Of the prompts, for the interval.")] = 40,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Say what a recipe would have paid on logged outcomes, and how much of that the log can answer."""
    from rollalloc.cli.sources import USUAL
    from rollalloc.named import make_recipe
    from rollalloc.waste.groups import outcomes
    from rollalloc.waste.replay import replay as replayed

    reading.check(resamples=resamples, seed=seed)
    made = make_recipe(recipe, {**USUAL.get(recipe, {}), **parameters_of(set_)})
    with staged() as shown:
        log = reading.read(path, shown)
        found = replayed(
            outcomes(log.groups, reading.threshold), made, batches=batches, seed=seed, resamples=resamples,
            watcher=lambda done, of: shown("replaying", done, of),
        )  # fmt: skip
    if json_:
        said: dict[str, Any] = asdict(found) | {"recipe": recipe, "notes": [_NOT_LEARNING, *log.notes]}
        typer.echo(json.dumps(plain(said), indent=2, allow_nan=False))
        return
    console = Console()
    console.print(Text(f"{recipe}: {found.batches} batches on outcomes of {found.prompts:,} prompts", style="bold"))
    for name, share in found.measures.items():
        if share is not None and share.interval is not None:
            low, high = share.interval
            console.print(Text(f"  {_SAID[name]}: {share.value:,.1f} ({low:,.1f} – {high:,.1f})"))
    console.print(
        Text(
            f"Support: the log answers {found.support:.1%} of the rollouts ordered, and {found.orders:.1%} of the orders "
            "wholly; the others were drawn from each prompt's posterior."
        )
    )
    for note in [_NOT_LEARNING, *log.notes]:
        console.print(Text(f"- {note}"))
