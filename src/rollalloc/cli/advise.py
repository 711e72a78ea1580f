"""`rollalloc advise`: which recipe and how many rollouts a prompt for a model and its prompts, from a log of both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from rollalloc.cli.options import with_fields
from rollalloc.cli.progress import staged
from rollalloc.cli.reading import interval, table
from rollalloc.cli.sampled import Asked

if TYPE_CHECKING:
    from rollalloc.lab.advise.profile import Profile


@with_fields(Asked)
def advise(
    asked: Asked,
    path: Annotated[
        str | None,
        typer.Argument(
            help="A file, a folder or a glob of rollout logs; without one a profile is sampled.", metavar="LOG"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
) -> None:
    """Say how the success rates of prompts are spread, by a log, or by a profile of a model that is sampled first."""
    from rollalloc.lab.advise.profile import profile_of

    console = Console()
    asked.check(seed=seed)
    at, reading = asked.log(path, seed)
    with staged() as shown:
        profile = profile_of(reading.read(at, shown), threshold=reading.threshold, seed=seed)
    _show_rates(console, profile)
    for note in profile.notes:
        console.print(Text(f"- {note}"))


def _show_rates(console: Console, profile: Profile) -> None:
    shown = table((f"{profile.rollouts:,} rollouts of {profile.prompts:,} prompts", "estimate", "95% interval"))
    shares = {
        "mean success rate": profile.mean,
        "hopeless prompts": profile.hopeless,
        "solved prompts": profile.solved,
        **{f"groups of {n} without variance": share for n, share in profile.zero_variance.items()},
    }
    for name, share in shares.items():
        shown.add_row(name, f"{share.value:.1%}", interval(share))
    console.print(shown)
