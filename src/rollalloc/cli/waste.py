"""`rollalloc waste`: count the rollouts in a training log that gave no learning signal, by cause."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from rollalloc.cli.options import with_fields
from rollalloc.cli.progress import staged
from rollalloc.cli.reading import LogPath, Reading, interval, plain, points, table

if TYPE_CHECKING:
    from rollalloc.waste.finding import Finding

_CAUSES = {
    "taught": "rewards differ",
    "all_right": "all right",
    "all_wrong": "all wrong",
    "all_truncated": "all wrong, all truncated",
    "all_limited": "all wrong, all stopped at the recipe's limit",
    "all_alike": "equal, but neither right nor wrong",
    "single": "one scored rollout",
    "unscored": "no score",
}


@with_fields(Reading)
def waste(
    reading: Reading,
    path: LogPath,
    from_step: Annotated[int | None, typer.Option(help="Ignore rollouts logged before this step.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Count the rollouts in a training log that gave no learning signal, by cause: all right, all wrong, truncated,
    unscored."""
    from rollalloc.waste.finding import find, sentence

    console = Console()
    reading.check(from_step=from_step)
    with staged() as shown:
        finding = find(reading.read(path, shown), threshold=reading.threshold, from_step=from_step)
    if json_:
        typer.echo(json.dumps(plain(finding.described()), indent=2, allow_nan=False))
        return
    console.print(Text(sentence(finding), style="bold"))
    _show_waste(console, finding)
    console.print(points(finding.notes))


def _show_waste(console: Console, finding: Finding) -> None:
    if finding.booked:
        shown = table(("as the run recorded them", "rollouts", "share"))
        for cause, rollouts in finding.booked.items():
            if rollouts:
                shown.add_row(Text(cause.replace("_", " ")), f"{rollouts:,}", f"{rollouts / finding.paid:.1%}")
        console.print(shown)
    if finding.shares is not None:
        part = finding.rollouts < finding.paid
        only_trained = "" if finding.complete or finding.booked else " (only those that were trained on)"
        which = f" ({finding.rollouts:,} of {finding.paid:,} are in the log)" if part else only_trained
        shown = table((f"by the rewards of their group{which}", "rollouts", "share", "95% interval"))
        for cause, share in finding.shares.shares.items():
            if rollouts := finding.shares.rollouts[cause]:
                shown.add_row(_CAUSES[cause], f"{rollouts:,}", f"{share.value:.1%}", interval(share))
        console.print(shown)
