"""`rollalloc advise`: which recipe and how many rollouts a prompt for a model and its prompts, from a log of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console

from rollalloc.cli.options import with_fields
from rollalloc.cli.profiled import show_profile
from rollalloc.cli.progress import staged
from rollalloc.cli.reading import plain
from rollalloc.cli.sampled import Asked

if TYPE_CHECKING:
    from rollalloc.lab.waste.groups import Log


@with_fields(Asked)
def advise(
    asked: Asked,
    path: Annotated[
        str | None,
        typer.Argument(
            help="A file, a folder or a glob of rollout logs; without one a profile is sampled.", metavar="LOG"
        ),
    ] = None,
    from_step: Annotated[int | None, typer.Option(help="Leave out what was logged before this step.")] = None,
    gpus: Annotated[
        int, typer.Option(help="Of the cluster on which stopping and running ahead are simulated.", min=2, max=10_000)
    ] = 8,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say how the success rates of prompts are spread, by a log, or by a profile of a model that is sampled first."""
    from rollalloc.lab.advise.profile import profile_of

    console = Console()
    asked.check(seed=seed, from_step=from_step)
    at, reading = asked.log(path, seed)
    with staged() as shown:
        log = reading.read(at, shown)
        profile = profile_of(
            log, threshold=reading.threshold, from_step=from_step, features_PD=_features(at, log), gpus=gpus, seed=seed,
            watcher=lambda done, of: shown("simulating", done, of),
        )  # fmt: skip
    if json_:
        typer.echo(json.dumps(plain({"profile": profile.described()}), indent=2, allow_nan=False))
        return
    show_profile(console, profile)


def _features(at: str, log: Log) -> NDArray[np.float32] | None:
    """Features that lie beside the log, as a profile that was sampled has them; None where there are none.

    Raises:
        ValueError: a file of them that is corrupt, or without some of the log's prompts.
    """
    from rollalloc.data.feature_file import read_features
    from rollalloc.files.names import FEATURES

    file = (Path(at) if Path(at).is_dir() else Path(at).parent) / FEATURES
    if log.groups is None or not file.is_file():
        return None
    return np.concatenate([*read_features(file, log.groups.keys).blocks.values()], 1)
