"""`rollalloc compare`: train under several recipes, one process per run, and write a table and a page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rollalloc.cli.options import (
    CheckpointMinutes,
    LabelledParameters,
    RunOptions,
    folder,
    listed,
    named_recipes,
    output,
    parameters_by_label,
    titled,
    with_fields,
)
from rollalloc.cli.progress import Standings, leave, result_console, say, staged, took, uses
from rollalloc.cli.reading import bare_table

if TYPE_CHECKING:
    from rollalloc.compare.summary import Summary

_WIDE = 110  # terminal columns that the whole table needs
_MEANS = {  # explanations of the headings in the table of last evaluations
    "right_pairs_differ": "differ: probability that two right answers to a prompt differ.",
    "distinct_right": "distinct: different right answers among the attempts of pass@k.",
    "entropy": "entropy: of the next token, in nats.",
}
_ENDS = {"rollouts": 15, "ratio": 11}  # width of an interval, e.g. [12,130–13,684]


@with_fields(RunOptions)
def compare(
    options: RunOptions,
    task: Annotated[
        list[str] | None,
        titled(
            "Built-in task: skills/POOL, walks/POOL, sort, or rg/NAME such as rg/gcd; repeatable.", "What to train on"
        ),
    ] = None,
    recipes: Annotated[
        str, typer.Option(help="Comma-separated recipes, each NAME or LABEL=NAME.")
    ] = "grpo,reinforce,foresight",
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds; every recipe runs with every seed.")] = "0,1,2",
    set_: LabelledParameters = None,
    matched: Annotated[
        str | None,
        typer.Option(
            help="groups=G,n=N: every recipe trains on G·N rows per batch, in groups of N if the method has groups."
        ),
    ] = None,
    out: Annotated[
        Path,
        output("Folder of the comparison; finished runs in it are reused, unfinished ones continue.", parser=folder),
    ] = Path("runs/compare"),
    overwrite: Annotated[
        bool, output("First delete the files of other runs in this comparison's folders.", "--overwrite")
    ] = False,
    processes: Annotated[int | None, typer.Option(help="Parallel runs (default: one per core).", min=1)] = None,
    checkpoint_every: Annotated[int, output("Batches between two checkpoints.")] = 100,
    checkpoint_minutes: CheckpointMinutes = 10.0,
) -> None:
    """Train under several recipes, and compare their costs until the same accuracy: rollouts, tokens, seconds."""
    # Imported here, so that `--help` does not import torch.
    from rollalloc.cli.sources import end_said, run_of
    from rollalloc.compare.compare import check_places, check_runs
    from rollalloc.compare.compare import compare as carry_out
    from rollalloc.processes.stopping import Stopped
    from rollalloc.tasks.presets import with_task_files

    console = Console(stderr=True)
    named = named_recipes(recipes.split(","))
    parameters = parameters_by_label(set_, matched, named)
    saving: dict[str, Any] = {"checkpoint_every": checkpoint_every, "checkpoint_minutes": checkpoint_minutes or None}
    numbers = listed("--seeds", seeds)
    try:
        runs = [
            replace(run_of(replace(options, task=name), named[label], parameters[label], seed), label=label)
            for name in task or [None]
            for seed in numbers
            for label in named
        ]
        if not all(run.task or run.heldout for run in runs):
            raise ValueError(
                "--heldout is missing: recipes are compared by held-out accuracy. Give held-out prompts, or train each "
                "recipe with rollalloc train"
            )
        runs = [replace(run, **saving) for run in runs]
        check_places(runs, out)  # now, because creating the tasks may take minutes
        with staged() as shown:
            runs = [with_task_files(run, options.tasks, shown) for run in runs]
        check_runs(runs, out)
        ends = {end_said(options if task is None else replace(options, task=run.task), run) for run in runs}
        say(console, f"{len(runs)} runs, each of {' or of '.join(sorted(ends))}")
        with Standings(console) as standings:
            carry_out(runs, out, processes=processes, watcher=standings.show, overwrite=overwrite)
    except Stopped as stopped:
        leave(console, str(stopped), stopped.by)
    except KeyboardInterrupt:
        leave(console, "stopped; run the same command again to continue from the newest checkpoint of each run", SIGINT)
    except RuntimeError:  # show what is finished, although a run failed
        _show(console, out)
        raise
    _show(console, out)
    say(console, took())


def _show(console: Console, out: Path) -> None:
    """Print the tables to standard output, and say on `console` where the results and the report are."""
    from rollalloc.compare.compare import RESULTS
    from rollalloc.compare.summary import summaries
    from rollalloc.report.page import write_page
    from rollalloc.report.wording import odd_targets
    from rollalloc.runs.discovery import comparisons

    if (out / RESULTS).exists():
        results = result_console()
        for summary in summaries(out):
            results.print(cost_table(summary, wide=results.width >= _WIDE))
            if (table := last_table(summary)).columns:
                results.print(table)
        for line in odd_targets([run for runs in comparisons(out).values() for run in runs]):
            say(console, line, "yellow")
        say(console, f"results are in {out}, the report in {write_page(out)}")


def cost_table(summary: Summary, *, wide: bool = True) -> Table:
    """Table of each recipe's cost until the target, compared with the baseline's.

    Args:
        wide: also show the ratios of tokens, seconds and steps; needs 110 columns.
    """
    from rollalloc.compare.summary import in_words

    others = ("tokens", "seconds", "steps") if wide else ()
    target, recipes = summary.target, summary.recipes
    exact = all(recipe.standard_error == 0 for recipe in recipes)
    until = "" if target is None else f" until held-out {summary.measure} {target:g}"
    reached = "" if target is None else f"reached: two evaluations in a row are at or above {target:g}. "
    table = bare_table(
        (f"{escape(summary.task)}: " if summary.task else "") + f"costs{until}",
        f"{reached}Costs are interquartile means over seeds, with bootstrapped 95% intervals from five seeds on, otherwise "
        "with the value of each seed. > and < mark bounds: a run did not reach the target. "
        f"ratio: {escape(summary.baseline)}'s cost divided by the recipe's, paired by seed; above 1, the recipe is cheaper. "
        f"{summary.measure} is {'exact' if exact else 'sampled, see standard_error in results.json'}. "
        "taught: share of rollouts that were trained on with an advantage other than 0. A recipe without groups compares "
        "each rollout with a prediction or a mean, so nearly all of its rollouts count.",
    )
    headings = ("recipe", "reached", "rollouts", "ratio", *(f"of {name}" for name in others), "taught", "wasted on")
    for heading in headings:
        prose = heading in ("recipe", "wasted on")
        table.add_column(
            heading,
            justify="left" if prose else "right",
            no_wrap=heading in ("recipe", "reached"),
            min_width=_ENDS.get(heading),
        )
    for recipe in recipes:
        table.add_row(
            escape(recipe.label),
            f"{recipe.reached}/{len(recipe.seeds)}",
            in_words(recipe.costs["rollouts"], ",.0f"),
            in_words(recipe.ratios["rollouts"], ".2f"),
            *(in_words(recipe.ratios[name], ".2f", point_only=True) for name in others),
            *uses([recipe.accounts]),
        )
    return table


def last_table(summary: Summary) -> Table:
    """Table of the last evaluations, where the recipe that was cheapest to the target may be worse than others."""
    from rollalloc.compare.summary import in_words

    shown = summary.last
    means = [meaning for name, meaning in _MEANS.items() if name in shown]
    table = bare_table("at the last evaluation", " ".join(["interquartile means over seeds.", *means]))
    for heading in ("recipe", *shown.values()) if shown else ():
        table.add_column(heading, no_wrap=heading == "recipe", justify="left" if heading == "recipe" else "right")
    for recipe in summary.recipes if shown else ():
        values = (in_words(recipe.last[name], ".1f" if name == "tokens" else ".3f", point_only=True) for name in shown)
        table.add_row(escape(recipe.label), *values)
    return table
