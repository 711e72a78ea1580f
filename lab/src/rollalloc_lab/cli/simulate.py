"""`rollalloc-lab simulate`: estimate what recipes would cost on a cluster, in seconds and GPU-seconds."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from inspect import Parameter
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.markup import escape
from rich.table import Table

from rollalloc.cli.options import (
    LabelledParameters,
    file_path,
    listed,
    named_recipes,
    option,
    parameters_by_label,
    titled,
    with_options,
)
from rollalloc.cli.progress import result_console, say, staged
from rollalloc.cli.reading import bare_table
from rollalloc.compare.summary import in_words
from rollalloc.core.allocator import Allocator
from rollalloc.files.terminal_table import first_fitting
from rollalloc.named import make_recipe
from rollalloc.recipes.streaming import streaming_notes
from rollalloc_lab.simulate.cluster import SCHEDULES, Cluster, Scenario, Schedule
from rollalloc_lab.simulate.cost import Costs
from rollalloc_lab.simulate.hardware import Hardware
from rollalloc_lab.simulate.workload import Lengths, Success

if TYPE_CHECKING:
    from rollalloc.core.recipe import Recipe
    from rollalloc_lab.simulate.result import PricedRecipe
    from rollalloc_lab.simulate.workload import Workload

# Classes whose fields become options of the same name, and the help panel for each.
_PANELS: Mapping[type, str] = {
    Cluster: "Cluster",
    Hardware: "Cluster",
    Costs: "Costs",
    Lengths: "Lengths of rollouts",
    Success: "Success rates",
    Scenario: "Simulation",
}
_COLUMNS: Mapping[str, tuple[str, str]] = {
    "seconds": ("s/batch", ",.1f"),
    "gpu_seconds": ("GPU-s/batch", ",.0f"),
    "busy_slots": ("slots", ".1%"),
    "decoding_share": ("decoding", ".0%"),
    "training_share": ("training", ".0%"),
    "idle_share": ("idle", ".0%"),
    "tail": ("tail", ".0%"),
    "paid": ("paid", ",.0f"),
    "rows": ("trained", ",.0f"),
    "stopped": ("stopped", ",.0f"),
    "tokens": ("tokens", ",.0f"),
}
# Columns that a narrow terminal leaves out, in this order.
_OPTIONAL = (
    ("tokens",),
    ("rows", "stopped"),
    ("decoding_share", "training_share", "idle_share"),
    ("busy_slots",),
    ("paid",),
    ("tail",),
)
_MEANINGS: Mapping[str, str] = {
    "busy_slots": "slots: share that had a rollout.",
    "decoding_share": "decoding, training, idle: shares of GPU-seconds.",
    "tail": "tail: share of the time in which fewer than a tenth of the batch's rollouts ran and none waited.",
}

Given = Mapping[type, Mapping[str, Any]]


def _with_values(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command whose first parameter is a `Given`. Each documented field of the `_PANELS` classes is an option."""
    names: dict[type, list[str]] = {}
    shared: list[Parameter] = []
    for kind, panel in _PANELS.items():
        documented = [each for each in fields(kind) if "says" in each.metadata]
        names[kind] = [each.name for each in documented]
        for each in documented:
            hint, default = get_type_hints(kind)[each.name], each.default
            if hint == Schedule:
                hint = str
            if default is MISSING:  # a cost; it is estimated if the user does not give it
                hint, default = hint | None, None
            shared.append(option(each.name, default, Annotated[hint, titled(each.metadata["says"], panel)]))
    return with_options(
        command, shared, lambda values: {kind: {name: values[name] for name in names[kind]} for kind in names}
    )


@_with_values
def simulate(
    given: Given,
    recipes: Annotated[
        str, typer.Option(help="Comma-separated recipes, each NAME or LABEL=NAME; the first is the baseline.")
    ] = "grpo,darts,pilot_commit",
    set_: LabelledParameters = None,
    matched: Annotated[
        str,
        typer.Option(
            help="groups=G,n=N: G·N rows per batch, in groups of N if the method has groups, unless --set changes them."
        ),
    ] = "groups=128,n=8",
    gpus: Annotated[str, typer.Option(help="Comma-separated numbers of GPUs.")] = "8,64,512",
    seeds: Annotated[
        str, typer.Option(help="Comma-separated seeds; with five or more, the table has 95% intervals.")
    ] = "0,1,2,3,4",
    staleness: Annotated[
        int | None,
        typer.Option(
            help="max_staleness of every recipe, in updates (default: its own, and at least 1 if asynchronous).",
            max=1_000_000,
        ),
    ] = None,
    latency: Annotated[
        Path | None,
        typer.Option(
            help="CSV of seconds per token by concurrency (default: estimated for --model on --gpu).",
            parser=file_path,
        ),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            help="Use the lengths and successes of each prompt in this rollouts.jsonl of a run.", parser=file_path
        ),
    ] = None,
    prompts: Annotated[
        int | None, typer.Option(help="Prompts in the data set (default: 8192, or those in --log).")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Simulate recipes on a cluster with the real allocator, and estimate their costs. Limits: lab/docs/simulate.md."""
    named = named_recipes(recipes.split(","))
    workload = _workload(given, log, prompts)
    scenarios = _scenarios(given, _different("--gpus", gpus, 1), latency, workload)
    numbers = _different("--seeds", seeds, 0)
    parameters = parameters_by_label(set_, matched, named)
    made = {label: make_recipe(name, parameters[label]) for label, name in named.items()}
    for scenario in scenarios:
        for recipe in made.values():
            Allocator(scenario.fitting(recipe, staleness), scenario.workload.world(numbers[0]).prompts, numbers[0])
    priced = _priced(made, scenarios, numbers, staleness)
    if json_:
        described = {label: {"recipe": name, **parameters[label]} for label, name in named.items()}
        said_of = {"recipes": described, "staleness": staleness, **_described(scenarios[0])}
        typer.echo(json.dumps({**said_of, "priced": [each.described() for each in priced]}, indent=2, allow_nan=False))
        return
    console = result_console()
    tables = [_table(priced, sum(_OPTIONAL[:count], ())) for count in range(len(_OPTIONAL) + 1)]
    console.print(first_fitting(tables, console))
    for line in [*_streaming_notes(scenarios[0], made, staleness), *_notes(scenarios[0], priced)]:
        say(console, line)


def _different(option: str, text: str, least: int) -> list[int]:
    numbers = listed(option, text)
    if min(numbers) < least or len(set(numbers)) < len(numbers):
        raise ValueError(f"{option}: expected distinct numbers, each at least {least}, got {text!r}")
    return numbers


def _workload(given: Given, log: Path | None, prompts: int | None) -> Workload:
    from rollalloc_lab.simulate.workload import Fitted, read_rollouts

    lengths, success = Lengths(**given[Lengths]), Success(**given[Success])
    if log is None:
        return Fitted(prompts=8192 if prompts is None else prompts, lengths=lengths, success=success)
    said = {**asdict(lengths), **asdict(success)}
    plain = {**asdict(Lengths()), **asdict(Success())}
    beside = [f"--{name}" for name, value in said.items() if value != plain[name]]
    beside += [] if prompts is None else ["--prompts"]
    if beside:
        raise ValueError(f"{', '.join(beside)}: --log already sets these; leave out either these options or --log")
    return read_rollouts(log)


def _scenarios(given: Given, gpus: Sequence[int], latency: Path | None, workload: Workload) -> list[Scenario]:
    from rollalloc_lab.simulate.cost import read_latency

    cluster = dict(given[Cluster])
    if cluster["schedule"] not in SCHEDULES:
        raise ValueError(f"--schedule must be one of {', '.join(SCHEDULES)}, got {cluster['schedule']!r}")
    hardware, curve = Hardware(**given[Hardware]), latency and read_latency(latency)
    costs = hardware.costs(**{name: value for name, value in given[Costs].items() if value is not None})
    said = {"hardware": hardware, "costs": costs, "latency": curve, "workload": workload, **given[Scenario]}
    return [Scenario(cluster=Cluster(gpus=number, **cluster), **said) for number in gpus]


def _priced(
    recipes: Mapping[str, Recipe], scenarios: Sequence[Scenario], seeds: Sequence[int], staleness: int | None
) -> list[PricedRecipe]:
    from rollalloc_lab.simulate.result import PricedRecipe
    from rollalloc_lab.simulate.simulation import simulate as carry_out

    priced: list[PricedRecipe] = []
    todo, done = len(scenarios) * len(recipes) * len(seeds), 0
    with staged() as shown:
        for scenario in scenarios:
            baseline = None
            for label, recipe in recipes.items():
                results = []
                for seed in seeds:
                    shown("simulating", done, todo)
                    results.append(carry_out(recipe, scenario, seed, max_staleness=staleness))
                    done += 1
                baseline = baseline or results
                priced.append(PricedRecipe.of(label, results, baseline))
    return priced


def _described(scenario: Scenario) -> dict[str, Any]:
    cluster = asdict(scenario.cluster)
    del cluster["gpus"]
    return {
        "cluster": cluster,
        "hardware": scenario.hardware.describe(),
        "kv_tokens": scenario.room if isfinite(scenario.room) else None,
        "costs": asdict(scenario.charges),
        "latency": asdict(scenario.curve),
        "workload": scenario.workload.describe(),
        **{name: getattr(scenario, name) for name in ("prompt_tokens", "batches", "warmup")},
    }


def _table(priced: Sequence[PricedRecipe], left_out: Collection[str]) -> Table:
    shown = {name: column for name, column in _COLUMNS.items() if name not in left_out}
    meanings = " ".join(meaning for name, meaning in _MEANINGS.items() if name in shown)
    table = bare_table(
        caption="Per trained batch: interquartile means over seeds, with bootstrapped 95% intervals from five seeds on. "
        f"faster: seconds of {escape(priced[0].label)} divided by the recipe's, paired by seed. {meanings}",
    )
    for heading in ("GPUs", "recipe", "faster", *(heading for heading, _ in shown.values())):
        table.add_column(heading, justify="left" if heading == "recipe" else "right", no_wrap=True)
    for number, each in enumerate(priced):
        figures = (
            in_words(each.figures[name], form, point_only=name != "seconds") for name, (_, form) in shown.items()
        )
        first_of_size = not number or priced[number - 1].gpus != each.gpus
        faster = "1" if first_of_size else in_words(each.faster, ".2f")
        table.add_row(f"{each.gpus}" if first_of_size else "", escape(each.label), faster, *figures)
        if number + 1 < len(priced) and priced[number + 1].gpus != each.gpus:
            table.add_section()
    return table


def _streaming_notes(scenario: Scenario, recipes: Mapping[str, Recipe], staleness: int | None) -> list[str]:
    if scenario.cluster.schedule == "sync":
        return []
    made = {label: (recipe, scenario.fitting(recipe, staleness)) for label, recipe in recipes.items()}
    return [f"{label}: {note}." for label, both in made.items() for note in streaming_notes(*both)]


def _notes(scenario: Scenario, priced: Sequence[PricedRecipe]) -> list[str]:
    """Notes about the assumptions, and about problems."""
    workload = scenario.workload.describe()
    holds = (
        f"{scenario.room:,.0f} tokens fit into"
        if isfinite(scenario.room)
        else "without --kv-tokens, there is no limit on"
    )
    notes = [
        f"Latency: {scenario.curve.source}; {holds} the key-value cache of a replica.",
        f"Rollouts: {workload['source']}, {workload['prompts']:,} prompts.",
    ]
    if workload.get("left_out"):
        notes.append(
            f"{workload['left_out']:,} logged rollouts were stopped or have no score and were left out. If many were "
            "stopped, the simulated lengths are too short."
        )
    for each in priced:
        if preempted := each.figures["preempted"].point:
            notes.append(
                f"{each.label}, {each.gpus} GPUs: {preempted:,.0f} preemptions per batch, because the key-value cache of a "
                f"replica, {scenario.room:,.0f} tokens, was full: use fewer --slots, or more GPUs per replica."
            )
        short = [result for result in each.results if result.why is not None]
        if short:
            batches = min(result.batches for result in short)
            notes.append(f"{each.label}, {each.gpus} GPUs: ended after {batches} measured batches: {short[0].why}.")
    return notes
