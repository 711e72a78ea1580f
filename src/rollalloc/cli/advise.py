"""`rollalloc advise`: recommend a recipe and a number of rollouts per prompt for a model and its prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
from rollalloc.cli.progress import say, staged
from rollalloc.cli.reading import plain, points
from rollalloc.cli.sampled import Asked
from rollalloc.core.recipe import at_least

if TYPE_CHECKING:
    from rollalloc.advise.verdict import Advice, Choice
    from rollalloc.runs.own import OwnRun
    from rollalloc.waste.groups import Log

_MOST = 1_000_000  # maximum number of rollouts per batch, to catch a mistyped number


@with_fields(Asked)
def advise(
    asked: Asked,
    path: Annotated[
        str | None,
        typer.Argument(
            help="Rollout logs: a file, a folder or a glob. Without LOG, a model is sampled first.", metavar="LOG"
        ),
    ] = None,
    present: Annotated[
        str | None,
        typer.Option(
            help="Your present settings, e.g. grpo:n=8,groups=16 (default: the log's; without a log, TRL's grpo:n=8)."
        ),
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option(help="Framework of the settings to paste: rollalloc, trl or verl (default: the log's)."),
    ] = None,
    from_step: Annotated[int | None, typer.Option(help="Ignore rollouts logged before this step.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Recommend a recipe and the number of rollouts per prompt, from logged rollouts or from new rollouts of a model."""
    from rollalloc.advise.curriculum import curriculum_of, write_curriculum
    from rollalloc.advise.pasting import FRAMEWORKS, check_framework
    from rollalloc.advise.profile import profile_of
    from rollalloc.advise.profile_folder import prompts_beside, refuse_changed, settings_beside
    from rollalloc.advise.recorded_profile import with_all_rollouts
    from rollalloc.advise.verdict import present_of, verdict_of
    from rollalloc.waste.finding import chosen

    console = Console()
    asked.check(from_step=from_step)
    at_least("--seed", seed, 0)
    check_framework(framework)
    now = None if present is None else _choice(present)
    _check_export(asked, asked.out if path is None else Path(path))
    at, reading = asked.log(path, seed)
    sampled = settings_beside(Path(at))
    if sampled:
        refuse_changed(Path(at))
    with staged() as shown:
        log = with_all_rollouts(reading.read(at, shown), from_step=from_step, threshold=reading.threshold)
        features_PD = _features(at, log)
        profile = profile_of(log, threshold=reading.threshold, from_step=from_step, features_PD=features_PD, seed=seed)
    taken, assumed = present_of(profile, sampled=bool(sampled), runs=log.runs)
    own = _own_config(sampled, log.runs)
    verdict = verdict_of(profile, now or taken, own.get("prompts"))
    assumed = "" if now else assumed
    pastes = _pastes(verdict, framework or (log.format if log.format in FRAMEWORKS else "rollalloc"), own)
    if asked.export is not None:
        groups, _ = chosen(log, from_step)
        assert groups is not None  # `profile_of` refuses a log without groups
        judged, prompts = groups.judged(profile.reward.threshold), prompts_beside(Path(at))
        rows = curriculum_of(judged, profile.rates, asked.mix, features_PD=features_PD, prompts=prompts, seed=seed)
        write_curriculum(asked.export, rows)
        say(Console(stderr=True), f"{len(rows):,} prompts with their sampling weights are in {asked.export}")
    if json_:
        said = {"verdict": asdict(verdict), "assumed": assumed, "paste": pastes, "profile": profile.described()}
        typer.echo(json.dumps(plain(said), indent=2, allow_nan=False))
        return
    console.print(Text(verdict.sentence, style="bold"))
    console.print(points([*verdict.because, *filter(None, [assumed]), *verdict.notes]))
    console.print()
    show_profile(console, profile)
    for text in pastes or _nothing_to_paste(verdict, framework):
        console.print(Text(text), soft_wrap=True)


def _check_export(asked: Asked, log: Path | None) -> None:
    """Check --export and --mix before anything is read or sampled."""
    from rollalloc.advise.curriculum import check_export

    if asked.export is not None:
        check_export(asked.export, asked.mix, log)
    elif asked.mix != Asked.mix:
        raise ValueError(
            "--mix sets the sampling weights that --export writes, so it needs --export FILE; give both, or leave --mix "
            "out"
        )


def _choice(text: str) -> Choice:
    """Parse --present, the user's present settings.

    Raises:
        ValueError: the text is not of the form RECIPE:n=N,groups=G (both numbers are optional), a number is out of range, or
            the recipe is unknown.
    """
    from rollalloc.advise.verdict import BATCH, Choice
    from rollalloc.named import RECIPES, near

    recipe, _, rest = text.partition(":")
    pairs = rest.split(",") if rest else []
    given = parameters_of(pairs)
    counts = [given.get("n", 1), given.get("groups", 1)]
    least_one = all(type(each) is int and each >= 1 for each in counts)
    once = len(given) == len(pairs)
    if given.keys() - {"n", "groups"} or not once or not least_one or counts[0] * counts[1] > _MOST:
        raise ValueError(
            f"--present: expected RECIPE:n=N,groups=G, such as grpo:n=8,groups=16, with n × groups at most {_MOST:,}, "
            f"got {text!r}"
        )
    if recipe not in RECIPES:
        raise ValueError(f"--present: expected one of {', '.join(RECIPES)}, got {recipe!r}{near(recipe, RECIPES)}")
    n = counts[0]
    if recipe == "grpo" and n < 2:
        raise ValueError(f"--present: GRPO needs at least 2 rollouts per group, got n = {n}; e.g. grpo:n=8")
    return Choice(recipe, counts[1] if "groups" in given else max(1, round(BATCH / n)), n)


def _pastes(verdict: Advice, framework: str, own: Mapping[str, Any]) -> list[str]:
    """The settings to paste, and sentences on the changes; empty if the advice equals the present settings.

    Args:
        verdict: the advice.
        framework: a key of `FRAMEWORKS`.
        own: the result of `_own_config`.
    """
    from rollalloc.advise.pasting import changes, pasted

    choice = verdict.choice
    if choice is None or choice == verdict.present:
        return []
    settings = {name: own[name] for name in ("config", "task") if name in own}
    return [pasted(choice, framework, **settings), *changes(choice, verdict.present)]


def _own_config(sampled: Mapping[str, Any], runs: Sequence[OwnRun]) -> dict[str, Any]:
    """The model, prompts and reward of a log, as far as its run or its profile recorded them.

    Returns:
        "config": the configuration, and "task": the name of the built-in task; both for `pasted`. "prompts": the number of
        prompts to train on. Unknown values are left out.
    """
    from rollalloc.models.settings import Sampling
    from rollalloc.train.config import Config, read_config

    if sampled:
        source = sampled["source"]
        config = Config(
            **{name: value for name, value in source.items() if name != "prompts"},
            prompts=tuple(source["prompts"]),
            sampling=Sampling(**{name: sampled["sampling"][name] for name in ("max_new_tokens", "temperature")}),
        )
        return {"config": config, "task": sampled.get("task", ""), "prompts": sampled.get("of")}
    if len(runs) != 1:
        return {}
    [run] = runs
    known: dict[str, Any] = {} if run.attempts_N is None else {"prompts": len(run.attempts_N)}
    try:
        config = read_config(run.folder)
    except (OSError, ValueError):  # another driver's run, or one of another version
        return known
    return known | {"config": config, "task": config.task}


def _nothing_to_paste(verdict: Advice, framework: str | None) -> list[str]:
    """Why there are no settings for a framework that the user named."""
    if framework is None:
        return []
    why = "there is no advice" if verdict.choice is None else "the advice is your present setting"
    return [f"Nothing to paste for --framework {framework}: {why}."]


def _features(at: str, log: Log) -> NDArray[np.float32] | None:
    """Features of the prompts, shape (P, D).

    They are read from the file of features or, if there is no such file, computed from the texts beside the log. None if
    there is neither.

    Raises:
        ValueError: the file is corrupt, or lacks some of the log's prompts.
    """
    from rollalloc.advise.profile_folder import prompts_beside
    from rollalloc.data.feature_file import read_features
    from rollalloc.files.names import FEATURES
    from rollalloc.waste.readers.shared import message_text
    from rollalloc.waste.texts import features_of

    file = (Path(at) if Path(at).is_dir() else Path(at).parent) / FEATURES
    if log.groups is None:
        return None
    if file.is_file():
        return np.concatenate([*read_features(file, log.groups.keys).blocks.values()], 1)
    rows = prompts_beside(Path(at))
    if not rows.keys() >= set(log.groups.keys):
        return None
    return np.array([features_of(message_text(rows[key]["prompt"])) for key in log.groups.keys], np.float32)
