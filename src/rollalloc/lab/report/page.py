"""The report: one HTML page that needs nothing else, and its figures as PNG."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

import rollalloc
from rollalloc.files.atomic import write_text
from rollalloc.files.claims import claim_files
from rollalloc.files.text import one_line, shortened, visible
from rollalloc.lab.bench.summary import FEWEST, RecipeSummary, Summary, summaries_of
from rollalloc.lab.report import figures, style
from rollalloc.lab.report.samples import Example, samples
from rollalloc.lab.report.svg import inline_svg
from rollalloc.lab.report.wording import caveats, damage, findings, graded, name_of, silences, story
from rollalloc.runs.discovery import comparisons
from rollalloc.runs.recorded import RecordedRun, by_label, remaining, state

MADE_BY = "rollalloc report"  # the page's generator
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"  # CSP

_MOST_DRAWN = 48  # methods in a figure: an image has an end


@dataclass(frozen=True)
class Chart:
    """A figure of the page, with a heading, a sentence on how to read it, and the name of its PNG without the ending."""

    name: str
    title: str
    caption: str
    figure: Figure

    @property
    def svg(self) -> Markup:
        """The figure as an element of the page."""
        return Markup(inline_svg(self.figure, self.name, f"{self.title}. {self.caption}"))


@dataclass(frozen=True)
class Finding:
    """A sentence about a method, what matters most of it first, in the colour that its curves have."""

    lead: str
    rest: str
    colour: str


@dataclass(frozen=True)
class Section:
    """A comparison on a task, or a run by itself, which has no summary; `problems` are among the caveats too."""

    name: str
    task: str
    findings: Sequence[Finding]
    caveats: Sequence[str]
    charts: Sequence[Chart]
    summary: Summary | None
    runs: Sequence[RecordedRun]
    examples: Mapping[str, Sequence[Example]] = field(default_factory=dict[str, Sequence[Example]])
    problems: Sequence[str] = ()

    @property
    def provenance(self) -> dict[str, list[tuple[str, str]]]:
        """Label → what its runs were started with, by name."""
        return {label: list(_settings(runs)) for label, runs in by_label(self.runs).items()}

    @property
    def methods(self) -> Sequence[RecipeSummary]:
        """The rows of the cost table."""
        return () if self.summary is None else self.summary.recipes


def write_page(folder: Path, out: Path | None = None) -> Path:
    """Write the report on a comparison, on several in one folder, or on a single run; returns where the page is.

    It is `report.html` in the folder where nothing else is said; the figures stand beside it as PNG.

    Raises:
        FileNotFoundError: no run in the folder.
        FileExistsError: a file that rollalloc did not write is in the way; nothing is written.
    """
    return write_sections(sections(comparisons(folder), folder), folder / "report.html" if out is None else out)


def write_sections(made: Sequence[Section], out: Path) -> Path:
    """Write the page of some sections, and their figures beside it; returns where it is.

    Raises:
        FileExistsError: a file that rollalloc did not write is in the way; nothing is written.
    """
    charts = {out.with_name(f"{chart.name}.png"): chart.figure for section in made for chart in section.charts}
    claim_files([out, *charts])
    page = render("report.html.j2", title=title_of(made), sections=made)
    write_text(out, page)
    for path, figure in charts.items():
        figures.save(figure, path)
    return out


def sections(found: Mapping[Path, Sequence[RecordedRun]], folder: Path) -> list[Section]:
    """What the page of a folder shows: a section for each task of a comparison, or for a run by itself.

    The runs are by the folder that holds them, as `rollalloc.runs.discovery.comparisons` returns them.
    """
    runs = {run.folder: run for of_one in found.values() for run in of_one}
    if folder in runs:
        return [_section(folder.name, [runs[folder]])]
    try:
        made = _compared(runs)
    except Exception as error:  # runs that cannot be compared, of another version for one, are still runs to be shown
        why = f"No costs are given, for the runs cannot be compared: {type(error).__name__}: {error}"
        shown = [of_unit for of_one in found.values() for of_unit in _by_unit(of_one)]
        names = _file_names([_place(of_unit).name for of_unit in shown])
        return [
            _section(_place(of_unit).name, of_unit, why=why, prefix=name)
            for of_unit, name in zip(shown, names, strict=True)
        ]
    names = _file_names([each.task or folder.name for each in made])
    return [
        _section(each.task or folder.name, [runs[place] for place in _folders(each)], each, prefix=name)
        for each, name in zip(made, names, strict=True)
    ]


def _by_unit(runs: Sequence[RecordedRun]) -> list[list[RecordedRun]]:
    """Runs whose logs count the same: rollouts and optimizer steps have no common axis."""
    return [[run for run in runs if run.unit == unit] for unit in dict.fromkeys(run.unit for run in runs)]


def _place(runs: Sequence[RecordedRun]) -> Path:
    """Where runs lie that are shown together."""
    return runs[0].folder if len(runs) == 1 else runs[0].folder.parent


def _compared(runs: Mapping[Path, RecordedRun]) -> list[Summary]:
    """What the runs say together, task by task.

    Raises:
        ValueError: one is damaged: what it cost is not known. Whatever else runs of another version lead to.
    """
    if damaged := [run for run in runs.values() if run.problem]:
        raise ValueError(f"{damaged[0].folder}: {damaged[0].problem}")
    return summaries_of(list(runs))


def _folders(summary: Summary) -> list[Path]:
    """The summary's runs in its order, then those that have not ended."""
    return [*(place for recipe in summary.recipes for place in recipe.folders), *summary.unfinished]


def _file_names(names: Sequence[str]) -> list[str]:
    """What the figures of each section are called before their own name: nothing where there is one, no two the same."""
    if len(names) == 1:
        return [""]
    plain = [re.sub(r"[^\w.+-]+", "-", name)[:60].lstrip(".") for name in names]
    alike = len(set(plain)) < len(plain)
    return [f"{at}-{name}-" if alike else f"{name}-" for at, name in enumerate(plain, start=1)]


def render(template: str, *, refresh: int | None = None, **values: Any) -> str:
    """A page of this package's templates, everything escaped; with `refresh`, loaded anew after so many seconds."""
    return (
        _environment()
        .get_template(template)
        .render(
            policy=POLICY,
            colours=style.COLOURS,
            causes=style.CAUSES,
            states=style.STATES,
            version=rollalloc.__version__,
            made_by=MADE_BY,
            refresh=refresh,
            **values,
        )
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("rollalloc.lab.report"),
        autoescape=True,
        finalize=_fit_to_be_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {
        "one_line": one_line,
        "by_cause": style.by_cause,
        "state": state,
        "remaining": remaining,
        "clock": lambda seconds: time.strftime("%d %b %H:%M", time.localtime(seconds)) if seconds else "",
    }
    return environment


def _fit_to_be_shown(value: Any) -> Any:
    """Whatever a template shows, so that none can forget it; a Markup is this package's own."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _section(
    name: str,
    runs: Sequence[RecordedRun],
    summary: Summary | None = None,
    *,
    why: str | None = None,
    prefix: str = "",
) -> Section:
    """A section on some runs: why there is no summary of them, and what begins the names of its figures' files."""
    methods = by_label(runs)
    drawn = dict(list(methods.items())[:_MOST_DRAWN])
    kept = {run.folder: samples(run.folder) for run in runs}
    unread = [f"{name_of(run)}: {visible(wrong)}" for run in runs if (wrong := kept[run.folder].problem)]
    colours = dict(zip(methods, style.METHODS * len(methods), strict=False))
    said = {} if summary is None else findings(summary)
    if not said.keys() <= methods.keys():  # a run that has not ended is under other settings than those that have
        said = {}
    said = said or {label: story(of_label, label) for label, of_label in methods.items()}
    return Section(
        name=name,
        task=(summary and summary.task) or _task(runs),
        findings=[Finding(*sentence, colours[label].name) for label, sentence in said.items()],
        caveats=[
            *([why] if why else ()),
            *graded(summary),
            *caveats(runs),
            *silences(methods),
            *unread,
            *_left_out(methods),
        ],
        charts=list(_charts(drawn, runs[0].target, prefix)),
        summary=summary,
        runs=runs,
        examples={
            label: shown
            for label, of_label in methods.items()  # of the first run that kept some
            if (shown := next(filter(None, (kept[run.folder].examples for run in of_label)), None))
        },
        problems=[*damage(runs), *unread],
    )


def _left_out(methods: figures.Methods) -> list[str]:
    more = len(methods) > _MOST_DRAWN
    return [f"The figures show the first {_MOST_DRAWN} of {len(methods)} methods."] if more else []


def _charts(methods: figures.Methods, target: float | None, prefix: str) -> Iterator[Chart]:
    """The figures that the runs have the numbers for, in the order of the page."""
    seeds = max(len(runs) for runs in methods.values())
    over = "" if seeds == 1 else ", mean of the seeds and as far as every seed goes"
    for name, title, caption, draw in (
        (
            "where",
            "Where every rollout went",
            "A bar is as long as the rollouts that a method paid; green is the part that was trained on.",
            figures.where_rollouts_went,
        ),
        (
            "accuracy",
            "Accuracy against what was paid",
            _how_curves_read(seeds),
            partial(figures.accuracy, cost="rollouts", target=target),
        ),
        (
            "accuracy-tokens",
            "Accuracy against tokens",
            "The same against the tokens generated: long rollouts cost more than short ones.",
            partial(figures.accuracy, cost="tokens", target=target),
        ),
        (
            "training",
            "Training",
            f"Of the batches{over}: reward of all that was scored, gradient norm before clipping, loss; entropy in nats.",
            figures.training,
        ),
        (
            "causes",
            "Where rollouts went, over time",
            f"What became of the rollouts paid in each window of the run{over}.",
            figures.causes_over_time,
        ),
        (
            "states",
            "What the model could do, over time",
            f"Prompts visited so far, by the last visit's outcome{over}. Dashed: those evicted now.",
            figures.states_over_time,
        ),
        (
            "lengths",
            "Length of rollouts",
            _how_lengths_read(methods, over),
            figures.lengths,
        ),
        (
            "selection",
            "What is trained on against what was sampled",
            f"Rows less all rollouts{over}: solid, mean length in percent; dashed, expected difficulty in points.",
            figures.selection,
        ),
        (
            "staleness",
            "Staleness",
            "Updates of the weights between a rollout's first token and its use in training; 0 is fresh.",
            figures.staleness,
        ),
    ):
        figure = draw(methods)
        if figure is not None:
            yield Chart(prefix + name, title, caption, figure)


def _how_lengths_read(methods: figures.Methods, over: str) -> str:
    if any("mean_lengths" in line for runs in methods.values() for run in runs for line in run.batches):
        return f"Mean of all rollouts between two batches{over}; dotted, the shortest and the longest."
    return f"Median, middle half and middle four fifths of all rollouts between two batches{over}; dotted, the longest."


def _how_curves_read(seeds: int) -> str:
    if seeds == 1:
        return "Held-out accuracy after each evaluation, with its standard error as a bar; further left is cheaper."
    band = ", shaded its 95% interval" if seeds >= FEWEST else f"; {seeds} seeds are too few for an interval"
    return (
        f"Thin: each seed. Thick: the interquartile mean over seeds{band}. Further left is cheaper. A run that reached the "
        "target keeps its last accuracy from there on; a line ends where the first run short of the target ends."
    )


def _settings(runs: Sequence[RecordedRun]) -> Iterator[tuple[str, str]]:
    """What the runs of a recipe were started with; the first stands for all but the seed."""
    described = runs[0].description
    yield "recipe", _plain(described.get("recipe"))
    yield "seeds", ", ".join(str(run.seed) for run in runs)
    for part in (described.get("parameters") or {}, described.get("source") or {}, runs[0].settings):
        yield from ((name, _plain(value)) for name, value in part.items() if name != "seed")
    yield "max_rollouts", _plain(described.get("max_rollouts"))


def _plain(value: Any) -> str:
    return visible(shortened(value if isinstance(value, str) else json.dumps(value), 300))


def title_of(made: Sequence[Section]) -> str:
    """What the page is called."""
    return f"What the rollouts bought: {', '.join(one_line(section.task, 60) for section in made)}"


def _task(runs: Sequence[RecordedRun]) -> str:
    """What a run's description says it was trained on; of another framework's run, where it lies."""
    if runs[0].note:
        return ", ".join(dict.fromkeys(run.folder.name for run in runs))
    source = runs[0].description.get("source") or {}
    prompts = ", ".join(Path(path).name for path in source.get("prompts", ())) or "unknown prompts"
    return f"{Path(str(source.get('model', 'unknown model'))).name} on {prompts}"
