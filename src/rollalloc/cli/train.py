"""`rollalloc train`: one run, with progress."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rollalloc.cli.options import (
    CheckpointMinutes,
    Parameters,
    RunOptions,
    described,
    folder,
    output,
    parameters_of,
    with_fields,
)
from rollalloc.cli.progress import RunProgress, leave, paid_for, result_console, say, staged, took

if TYPE_CHECKING:
    from rollalloc.train.config import Config


@with_fields(RunOptions)
def train(
    options: RunOptions,
    recipe: Annotated[
        str,
        typer.Option(
            help="Recipe: a name from `rollalloc recipes`, a mixture NAME+NAME, or module:object for your own recipe."
        ),
    ] = "reinforce",
    set_: Parameters = None,
    seed: Annotated[int, typer.Option(help="Seed of prompts, sampling and mini-batches.")] = 0,
    out: Annotated[
        Path | None,
        output(
            "Folder of the run; must be new, unless you resume or overwrite (default: a folder in runs/).",
            parser=folder,
        ),
    ] = None,
    checkpoint_every: Annotated[int | None, output(described("checkpoint_every"))] = None,
    checkpoint_minutes: CheckpointMinutes = 10.0,
    keep_checkpoints: Annotated[int, output(described("keep_checkpoints"))] = 2,
    resume: Annotated[
        bool,
        output("Resume from the newest checkpoint in the run's folder, or start the run if there is none.", "--resume"),
    ] = False,
    overwrite: Annotated[
        bool, output("First remove the files that another run wrote in the folder.", "--overwrite")
    ] = False,
    accept_recipe: Annotated[
        bool,
        output("Resume although the recipe or --max-rollouts differs from the checkpoint's.", "--accept-recipe"),
    ] = False,
    accept_data: Annotated[
        bool,
        output(
            "Resume although prompts, held-out prompts or the chat template have changed; prompts are matched by key.",
            "--accept-data",
        ),
    ] = False,
    log_rollouts: Annotated[bool, output(described("log_rollouts"), "--log-rollouts")] = False,
    no_notices: Annotated[
        bool,
        output(
            "Do not warn of rewards that fail, are slow or are all equal, or of too little learning signal.",
            "--no-notices",
        ),
    ] = False,
) -> None:
    """Train one model under one recipe."""
    from rollalloc.cli.sources import end_said, run_of
    from rollalloc.core.events import NoScores
    from rollalloc.models.checkpoint import newest
    from rollalloc.named import make_recipe
    from rollalloc.processes.stopping import Stopped
    from rollalloc.recipes.streaming import streaming_notes
    from rollalloc.runs.reader import read_run
    from rollalloc.runs.recorded import held_out
    from rollalloc.train.config import read_config
    from rollalloc.train.loading import one_thread  # imported here, so that `--help` does not import torch
    from rollalloc.train.store import RunFolder
    from rollalloc.train.train import train as carry_out

    console, results = Console(stderr=True), result_console()
    if resume and overwrite:
        raise ValueError("--resume continues a run and --overwrite replaces it; give only one of them")
    run = run_of(options, recipe, parameters_of(set_), seed)
    saving = {"checkpoint_every": checkpoint_every, "checkpoint_minutes": checkpoint_minutes or None}
    saving |= {"keep_checkpoints": keep_checkpoints, "log_rollouts": log_rollouts, "notices": not no_notices}
    run = replace(run, **saving)
    if options.task:
        one_thread()
    out = out or Path("runs") / f"{(options.task or 'train').replace('/', '-')}-{run.name.replace(':', '.')}-{seed}"
    at, begun = newest(out) if resume else None, options
    if at is not None:
        run = _as_begun(run, options, read_config(out))
        begun = replace(options, max_rollouts=run.max_rollouts)  # no default is taken again
    if options.task:
        from rollalloc.cli.tasks import with_task_files

        if at is None:
            with RunFolder(out) as place:  # checked now, because creating the task may take minutes
                place.check(overwrite=overwrite or resume)
        with staged() as shown:
            run = with_task_files(run, options.tasks, shown)
    say(
        console,
        f"{run.recipe} {dict(run.parameters)}, learning rate {run.learning_rate:g}, {end_said(begun, run)}",
    )
    if resume and at is None:
        say(console, f"no checkpoint in {out}: the run starts afresh", "yellow")
    elif resume:
        say(console, f"resuming from the checkpoint after batch {at}")
    if options.engine == "async":
        for note in streaming_notes(make_recipe(run.recipe, run.parameters), run.make_recipe()):
            say(console, note, "yellow")
    if run.heldout is None:
        say(console, "no --heldout prompts: the accuracy will not be known", "yellow")
    progress = RunProgress(console, run.max_rollouts)
    try:
        with progress:
            why = carry_out(
                run,
                out,
                progress.show,
                resume=resume,
                accept_recipe=accept_recipe,
                accept_data=accept_data,
                overwrite=overwrite,
            )
    except Stopped as stopped:
        learned = held_out(read_run(out))
        leave(console, f"{stopped} (--resume){learned and f'; {learned} so far'}", stopped.by)
    except KeyboardInterrupt:
        leave(console, f"stopped; --resume continues from the newest checkpoint in {out}, if there is one", SIGINT)
    except NoScores:
        results.print(paid_for(read_run(out)))
        raise
    run_made = read_run(out)  # from the files, because a resumed run also has metrics from before the stop
    say(console, f"finished: {why}")
    results.print(paid_for(run_made))
    if learned := held_out(run_made):
        say(results, learned)
    if run_made.silence:
        say(console, run_made.silence, "yellow")
    say(console, f"model and metrics are in {out}; {took()}")


def _as_begun(run: Config, options: RunOptions, begun: Config) -> Config:
    """Let a resumed run keep its original budget and times of evaluation, unless the options set them."""
    if options.max_rollouts is None:
        run = replace(run, max_rollouts=begun.max_rollouts)
    if options.eval_every is None:
        run = replace(run, eval_every=begun.eval_every)
    return run
