"""`rollalloc advise`: which recipe and how many rollouts a prompt for a model and its prompts, from a log of both."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollalloc.cli.options import with_fields
from rollalloc.cli.progress import staged
from rollalloc.cli.reading import plain, table
from rollalloc.cli.sampled import Asked

if TYPE_CHECKING:
    from rollalloc.lab.advise.lengths import Lengths
    from rollalloc.lab.advise.predictability import Predictability
    from rollalloc.lab.advise.profile import Profile
    from rollalloc.lab.waste.groups import Log
    from rollalloc.lab.waste.shares import Share

_SAID = "95% interval"


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
    _show_profile(console, profile)


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


# ---------------------------------------------------------------------------------------------------------- the profile


def _show_profile(console: Console, profile: Profile) -> None:
    console.print(_rates(profile))
    if profile.predictability is not None:
        console.print(_predictability(profile.predictability))
    if profile.lengths is not None:
        console.print(_lengths(profile.lengths))
    notes = Table.grid(padding=(0, 1))
    for note in profile.notes:
        notes.add_row("-", Text(note))
    console.print(notes)


def _rates(profile: Profile) -> Table:
    of = f"{profile.rollouts:,} rollouts of {profile.prompts:,} prompts"
    shares = {
        "mean success rate": profile.mean,
        "deviation of the prompts' rates": profile.rates.sd,
        "prompts hardly ever solved (rate at most .02)": profile.hopeless,
        "prompts nearly always solved (at least .98)": profile.solved,
        **{f"groups of {n} without variance": share for n, share in profile.zero_variance.items()},
        "right answers of a prompt that differ": profile.right_pairs_differ,
        "rollouts without a score": profile.reward.unscored,
    }
    return _estimates(of, [(name, share, _percent) for name, share in shares.items()])


def _predictability(found: Predictability) -> Table:
    shown = table((f"success of {found.prompts:,} prompts, told by", "AUC", _SAID, "log-loss", _SAID))
    named = {"the prompt's text": found.features, "its other rollouts": found.record, "both": found.both}
    for name, told in named.items():
        if told is not None:
            shown.add_row(name, *_cells(told.auc, _number), *_cells(told.log_loss, _number))
    shown.add_row("nothing: the mean rate", "0.500", "", *_cells(found.blind, _number))
    return shown


def _lengths(lengths: Lengths) -> Table:
    faster = [(f"seconds of GRPO over those of {name}", share, _number) for name, share in lengths.faster.items()]
    rows = [
        ("median", lengths.p50, _count),
        ("95th percentile", lengths.p95, _count),
        ("hit the limit", lengths.truncated, _percent),
        ("rank correlation with success", lengths.correlation, _number),
        *faster,
    ]
    return _estimates(f"{lengths.unit} of a rollout, at most {lengths.longest:,}", rows)


# ------------------------------------------------------------------------------------------------------------- figures


def _estimates(title: str, rows: list[tuple[str, Share | None, Callable[[float], str]]]) -> Table:
    shown = table((title, "estimate", _SAID))
    for name, share, said in rows:
        if share is not None:
            shown.add_row(name, *_cells(share, said))
    return shown


def _cells(share: Share, said: Callable[[float], str]) -> tuple[str, str]:
    within = "too few" if share.interval is None else " – ".join(map(said, share.interval))
    return said(share.value), within


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _number(value: float) -> str:
    return f"{value:.3f}"


def _count(value: float) -> str:
    return f"{value:,.0f}"
