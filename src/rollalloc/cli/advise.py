"""`rollalloc advise`: which recipe and how many rollouts a prompt for a model and its prompts, from a log of both."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from rollalloc.cli.options import parameters_of, with_fields
from rollalloc.cli.profiled import show_profile
from rollalloc.cli.progress import staged
from rollalloc.cli.reading import plain, points
from rollalloc.cli.sampled import Asked

if TYPE_CHECKING:
    from rollalloc.lab.advise.verdict import Choice, Verdict
    from rollalloc.lab.waste.groups import Log

_MOST = 1_000_000  # rollouts of a batch: a typing error must not be pasted


@with_fields(Asked)
def advise(
    asked: Asked,
    path: Annotated[
        str | None,
        typer.Argument(
            help="A file, a folder or a glob of rollout logs; without one a profile is sampled.", metavar="LOG"
        ),
    ] = None,
    present: Annotated[
        str | None,
        typer.Option(
            help="What you train with now, e.g. grpo:n=8,groups=16; by default what the log has, or TRL's grpo:n=8."
        ),
    ] = None,
    framework: Annotated[
        str | None, typer.Option(help="To paste into: rollalloc, trl or verl; by default what the log is of.")
    ] = None,
    from_step: Annotated[int | None, typer.Option(help="Leave out what was logged before this step.")] = None,
    gpus: Annotated[
        int, typer.Option(help="Of the cluster on which stopping and running ahead are simulated.", min=2, max=10_000)
    ] = 8,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say which recipe and how many rollouts a prompt, by a log, or by a profile of a model that is sampled first."""
    from rollalloc.lab.advise.pasting import FRAMEWORKS, check_framework
    from rollalloc.lab.advise.profile import profile_of
    from rollalloc.lab.advise.profile_folder import is_profile, refuse_changed, refuse_unfinished
    from rollalloc.lab.advise.verdict import present_of, verdict_of

    console = Console()
    asked.check(seed=seed, from_step=from_step)
    check_framework(framework)
    now = None if present is None else _choice(present)
    asked.check_export(asked.out if path is None else Path(path))
    at, reading = asked.log(path, seed)
    sampled = is_profile(Path(at))
    if sampled:
        refuse_changed(Path(at))
        refuse_unfinished(Path(at))
    with staged() as shown:
        log = reading.read(at, shown)
        features_PD = _features(at, log)
        profile = profile_of(
            log, threshold=reading.threshold, from_step=from_step, features_PD=features_PD, gpus=gpus, seed=seed,
            watcher=lambda done, of: shown("simulating", done, of),
        )  # fmt: skip
    taken, assumed = present_of(profile, sampled=sampled)
    verdict = verdict_of(profile, now or taken)
    assumed = "" if now else assumed
    pastes = _pastes(verdict, framework or (log.format if log.format in FRAMEWORKS else "rollalloc"), asked)
    asked.write_export(Path(at), log, profile, features_PD, from_step=from_step, seed=seed)
    if json_:
        said = {"verdict": asdict(verdict), "assumed": assumed, "paste": pastes, "profile": profile.described()}
        typer.echo(json.dumps(plain(said), indent=2, allow_nan=False))
        return
    console.print(Text(verdict.sentence, style="bold"))
    console.print(points([*verdict.because, *filter(None, [assumed]), *verdict.notes]))
    console.print()
    show_profile(console, profile)
    for text in pastes:
        console.print(Text(text), soft_wrap=True)


def _choice(text: str) -> Choice:
    """The setting that is trained with, as --present says it.

    Raises:
        ValueError: not of that form, or a recipe that there is not.
    """
    from rollalloc.lab.advise.verdict import BATCH, Choice
    from rollalloc.named import RECIPES

    recipe, _, rest = text.partition(":")
    pairs = rest.split(",") if rest else []
    given = parameters_of(pairs)
    counts = [given.get("n", 1), given.get("groups", 1)]
    least_one = all(type(each) is int and each >= 1 for each in counts)
    once = len(given) == len(pairs)
    if given.keys() - {"n", "groups"} or not once or not least_one or counts[0] * counts[1] > _MOST:
        raise ValueError(
            "--present: expected a recipe, n and groups, once each, such as grpo:n=8,groups=16, of at most "
            f"{_MOST:,} rollouts, got {text!r}"
        )
    if recipe not in RECIPES:
        raise ValueError(f"--present: expected one of {', '.join(RECIPES)}, got {recipe!r}")
    n = counts[0]
    if recipe == "grpo" and n < 2:
        raise ValueError(f"--present: expected GRPO's groups, of 2 rollouts at least, got n = {n}; e.g. grpo:n=8")
    return Choice(recipe, counts[1] if "groups" in given else max(1, round(BATCH / n)), n)


def _pastes(verdict: Verdict, framework: str, asked: Asked) -> list[str]:
    """What to paste for the choice, and what changes with it; nothing where it is what one has, or too early to tell."""
    from rollalloc.lab.advise.pasting import changes, pasted
    from rollalloc.train.description import Source

    choice = verdict.choice
    if choice is None or choice == verdict.present:
        return []
    own: dict[str, Any] = {"task": asked.task or ""}
    if asked.model and asked.prompts and asked.reward:
        own["source"] = Source(model=asked.model, prompts=tuple(map(str, asked.prompts)), reward=asked.reward)
    return [pasted(choice, framework, **own), *changes(choice, verdict.present)]


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
