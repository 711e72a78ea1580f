"""`rollalloc compare`: several recipes and seeds, a process a run, a table and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from rollalloc.cli.options import Given, parameters_of, with_given

if TYPE_CHECKING:
    from rollalloc.bench.runs import Run


@with_given
def compare(
    given: Given,
    recipes: Annotated[
        str, typer.Option(help="Comma-separated recipes, each NAME or LABEL=NAME.")
    ] = "grpo,dapo,pilot_commit",
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds, each run by every recipe.")] = "0,1,2",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A parameter of one of them, LABEL.key=value; repeatable."),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(help="Folder of the comparison; finished runs in it are used again.", rich_help_panel="Output"),
    ] = Path("runs/compare"),
    processes: Annotated[int | None, typer.Option(help="Runs at a time; one a core by default.")] = None,
) -> None:
    """Train under several recipes, and show what each paid for the same accuracy."""
    from rollalloc.bench.compare import compare as carry_out  # torch takes seconds to import, `--help` should not
    from rollalloc.bench.cost import curve_of, read_metrics
    from rollalloc.bench.runs import folder_of
    from rollalloc.report.figures import accuracy_against_rollouts

    console = Console(stderr=True)
    named = _named(recipes.split(","))
    changes = _by_label(parameters_of(set_), named)
    with console.status("preparing"):
        runs = _runs(given, named, changes, [int(seed) for seed in seeds.split(",")])
    with _Board(console, runs) as board:
        results = carry_out(runs, out, processes=processes, watcher=board.show)
    curves = {
        label: [curve_of(read_metrics(folder_of(run, out) / "metrics.jsonl")) for run in runs if run.name == label]
        for label in named
    }
    if all(curve.rollouts for of_label in curves.values() for curve in of_label):
        what = f"{given.task}/{given.pool}" if given.task == "skills" else given.task or given.model or ""
        accuracy_against_rollouts(curves, out / "accuracy.png", target=runs[0].settings.target, title=what)
    console.print(cost_table(results))
    console.print(f"results and picture are in {out}", markup=False)


def _runs(
    given: Given, named: Mapping[str, str], changes: Mapping[str, dict[str, Any]], seeds: Sequence[int]
) -> list[Run]:
    from rollalloc.cli.sources import run_of

    return [
        replace(run_of(given, name, changes[label], seed), label=label)
        for seed in seeds
        for label, name in named.items()
    ]


def _named(recipes: Sequence[str]) -> dict[str, str]:
    """`LABEL=NAME` or `NAME`, as label → name.

    Raises:
        ValueError: a label that occurs twice.
    """
    named: dict[str, str] = {}
    for recipe in recipes:
        label, equals, name = recipe.strip().partition("=")
        if not equals:
            label, name = label.replace(":", "."), label
        if label in named:
            raise ValueError(f"--recipes names {label!r} twice; give one of them a label of its own, LABEL={name}")
        named[label] = name
    return named


def _by_label(parameters: Mapping[str, Any], labels: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """`label.key` → value, as label → {key: value}.

    Raises:
        ValueError: no such label.
    """
    found: dict[str, dict[str, Any]] = {label: {} for label in labels}
    for path, value in parameters.items():
        label, _, key = path.rpartition(".")
        if label not in found:
            raise ValueError(
                f"--set {path}: expected LABEL.key with one of {', '.join(labels)}; e.g. {next(iter(labels))}.groups=8"
            )
        found[label][key] = value
    return found


class _Board:
    """A progress bar for each recipe, over the rollouts its runs may still pay."""

    def __init__(self, console: Console, runs: Sequence[Run]) -> None:
        columns = (
            TextColumn("{task.fields[label]:>14}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=console)
        self._bars: dict[str, TaskID] = {}
        for label in dict.fromkeys(run.name for run in runs):
            seeds = sum(run.name == label for run in runs)
            self._bars[label] = self._progress.add_task("waiting", total=seeds, label=label)

    def __enter__(self) -> _Board:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def show(self, latest: Sequence[tuple[Run, dict[str, Any] | None]]) -> None:
        """Take the latest line of each run's metrics."""
        for label, bar in self._bars.items():
            lines = [line for run, line in latest if run.name == label and line is not None]
            ended = sum(line["kind"] == "end" for line in lines)
            paid = sum(line["rollouts_paid"] for line in lines)
            taught = sum(line["accounts"]["trained"] for line in lines)
            share = f", {taught / paid:.0%} taught" if paid else ""
            self._progress.update(bar, completed=ended, description=f"{ended} runs done · {paid:,} rollouts{share}")


def cost_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """What each recipe paid until the target: the median over seeds with its range, and the causes of waste."""
    target = results[0]["target"]
    labels = list(dict.fromkeys(result["recipe"] for result in results))
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title="what was paid" + ("" if target is None else f" until held-out accuracy {target:g}"),
        title_justify="left",
        caption=f"rollouts: median of the seeds, with their range. ratio: {escape(labels[0])}'s over this one's, median "
        "of the seeds, above 1 is cheaper. taught: share of all rollouts that were trained on with an advantage.",
        caption_justify="left",
    )
    for heading in ("recipe", "reached", "rollouts", "range", "ratio", "taught", "wasted on"):
        prose = heading in ("recipe", "wasted on")
        table.add_column(heading, justify="left" if prose else "right", no_wrap=heading != "wasted on")
    first: list[float] = []  # the first recipe's costs by seed; stays empty where it did not always get there
    for label in labels:
        rows = [result for result in results if result["recipe"] == label]
        costs = [row["rollouts_to_target"] for row in rows if row["reached"]]
        middle = median(costs) if len(costs) == len(rows) else None
        if label == labels[0] and middle is not None:
            first = costs
        paired = [one / other for one, other in zip(first, costs, strict=False) if other] if middle is not None else []
        paid = sum(row["rollouts_paid"] for row in rows)
        accounts = {cause: sum(row["accounts"][cause] for row in rows) for cause in rows[0]["accounts"]}
        waste = sorted(
            ((n, cause) for cause, n in accounts.items() if n >= paid / 100 and cause != "trained"), reverse=True
        )
        table.add_row(
            escape(label),
            f"{len(costs)}/{len(rows)}",
            "not by all" if middle is None else f"{middle:,.0f}",
            f"{min(costs):,}–{max(costs):,}" if costs else "",
            f"{median(paired):.2f}" if paired else "",
            f"{accounts['trained'] / max(1, paid):.0%}",
            ", ".join(f"{cause.replace('_', ' ')} {n / paid:.0%}" for n, cause in waste[:2]),
        )
    return table
