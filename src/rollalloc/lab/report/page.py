"""The HTML report on runs and comparisons: one self-contained page, with its figures also as PNG."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

import rollalloc
from rollalloc.files.atomic import write_text
from rollalloc.files.claims import claim_files
from rollalloc.files.text import error_text, one_line, visible
from rollalloc.lab.bench.summary import FEWEST, RecipeSummary, Summary, summaries_of
from rollalloc.lab.report import figures, style
from rollalloc.lab.report.wording import caveats, damage, findings, graded, silences, story
from rollalloc.runs.discovery import comparisons
from rollalloc.runs.recorded import RecordedRun, by_label
from rollalloc.runs.teaching import share_taught

MADE_BY = "rollalloc report"  # the generator in the head of the page
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"  # CSP

_SAID_ELSEWHERE = ("schema", "digests", "recipe", "parameters", "seed", "label", "task")  # fields of `run.json`


@dataclass(frozen=True)
class Chart:
    """A figure of the page: its heading, a sentence that explains it, and the name of its PNG without the suffix."""

    name: str
    title: str
    caption: str
    figure: Figure

    @property
    def svg(self) -> Markup:
        """The figure as an inline SVG element."""
        return Markup(figures.inline_svg(self.figure, self.name, f"{self.title}. {self.caption}"))


@dataclass(frozen=True)
class MethodSentence:
    """A sentence about a method, with the main point first. It has the colour of the method's curves."""

    lead: str
    rest: str
    colour: str


@dataclass(frozen=True)
class Section:
    """A comparison on one task, or a single run without a summary. `problems` are also listed with the caveats."""

    name: str
    task: str
    findings: Sequence[MethodSentence]
    caveats: Sequence[str]
    charts: Sequence[Chart]
    summary: Summary | None
    runs: Sequence[RecordedRun]
    problems: Sequence[str] = ()

    @property
    def provenance(self) -> dict[str, list[tuple[str, str]]]:
        """The settings of each label's runs, by name."""
        return {label: list(_settings(runs)) for label, runs in by_label(self.runs).items()}

    @property
    def methods(self) -> Sequence[RecipeSummary]:
        """The rows of the cost table."""
        return () if self.summary is None else self.summary.recipes


def write_page(folder: Path, out: Path | None = None) -> Path:
    """Write the report on a run, on a comparison, or on several comparisons in one folder. Return the page's path.

    By default the page is `report.html` in this folder. The figures are written beside the page as PNG.

    Raises:
        FileNotFoundError: the folder has no run.
        FileExistsError: a file that rollalloc did not write has one of the names. Nothing is written.
    """
    return write_sections(sections(comparisons(folder), folder), folder / "report.html" if out is None else out)


def write_sections(drawn: Sequence[Section], out: Path) -> Path:
    """Write a page of these sections, with the figures beside it. Return the page's path.

    Raises:
        FileExistsError: a file that rollalloc did not write has one of the names. Nothing is written.
    """
    charts = {out.with_name(f"{chart.name}.png"): chart.figure for section in drawn for chart in section.charts}
    claim_files([out, *charts])
    tasks = ", ".join(one_line(section.task, 60) for section in drawn)
    page = _page(f"What the rollouts bought: {tasks}", drawn)
    write_text(out, page)
    for path, figure in charts.items():
        figures.save(figure, path)
    return out


def sections(runs_in: Mapping[Path, Sequence[RecordedRun]], folder: Path) -> list[Section]:
    """The sections for a folder's page: one for each task of a comparison, and one for each single run.

    Args:
        runs_in: runs by the folder that holds them, as `rollalloc.runs.discovery.comparisons` returns them.
        folder: the folder that the page is about.
    """
    runs = {run.folder: run for of_one in runs_in.values() for run in of_one}
    if folder in runs:
        return [_section(folder.name, [runs[folder]])]
    try:
        summaries = _compared(runs)
    except Exception as error:  # show the runs even if they cannot be compared, for example runs of another version
        why = f"No costs are given, because the runs cannot be compared: {error_text(error)}"
        shown = [of_unit for of_one in runs_in.values() for of_unit in _by_unit(of_one)]
        names = _file_names([_place(of_unit).name for of_unit in shown])
        return [
            _section(_place(of_unit).name, of_unit, why=why, prefix=name)
            for of_unit, name in zip(shown, names, strict=True)
        ]
    names = _file_names([summary.task or folder.name for summary in summaries])
    return [
        _section(summary.task or folder.name, [runs[place] for place in _folders(summary)], summary, prefix=name)
        for summary, name in zip(summaries, names, strict=True)
    ]


def _by_unit(runs: Sequence[RecordedRun]) -> list[list[RecordedRun]]:
    """Split runs by the unit of their logs, because rollouts and optimizer steps cannot share an axis."""
    return [[run for run in runs if run.unit == unit] for unit in dict.fromkeys(run.unit for run in runs)]


def _place(runs: Sequence[RecordedRun]) -> Path:
    """The folder that holds all of these runs."""
    return runs[0].folder if len(runs) == 1 else runs[0].folder.parent


def _compared(runs: Mapping[Path, RecordedRun]) -> list[Summary]:
    """Summaries of the runs, task by task.

    Raises:
        ValueError: a run is damaged, so its cost is unknown. Runs of another version may raise other errors.
    """
    if damaged := [run for run in runs.values() if run.problem]:
        raise ValueError(f"{damaged[0].folder}: {damaged[0].problem}")
    return summaries_of(list(runs))


def _folders(summary: Summary) -> list[Path]:
    """The folders of the runs that have ended, in the summary's order; then those of the other runs."""
    return [*(place for recipe in summary.recipes for place in recipe.folders), *summary.unfinished]


def _file_names(names: Sequence[str]) -> list[str]:
    """A unique prefix for the figure files of each section. A single section has no prefix."""
    if len(names) == 1:
        return [""]
    plain = [re.sub(r"[^\w.+-]+", "-", name)[:60].lstrip(".") for name in names]
    alike = len(set(plain)) < len(plain)
    return [f"{at}-{name}-" if alike else f"{name}-" for at, name in enumerate(plain, start=1)]


def _page(title: str, drawn: Sequence[Section]) -> str:
    """The page as HTML. Every value is escaped."""
    environment = Environment(
        loader=PackageLoader("rollalloc.lab.report"),
        autoescape=True,
        finalize=_fit_to_be_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {"one_line": one_line, "by_cause": style.by_cause, "share_taught": share_taught}
    return environment.get_template("report.html.j2").render(
        policy=POLICY,
        colours=style.COLOURS,
        causes=style.CAUSES,
        version=rollalloc.__version__,
        made_by=MADE_BY,
        title=title,
        sections=drawn,
    )


def _fit_to_be_shown(value: Any) -> Any:
    """Make a value safe to show. All template values go through this, except for Markup that this package made."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _section(
    name: str,
    runs: Sequence[RecordedRun],
    summary: Summary | None = None,
    *,
    why: str | None = None,
    prefix: str = "",
) -> Section:
    """A section about some runs.

    Args:
        name: heading of the section.
        runs: the runs.
        summary: the comparison of these runs, if there is one.
        why: why there is no summary.
        prefix: prefix for the file names of the figures.
    """
    methods = by_label(runs)
    colours = dict(zip(methods, style.METHODS * len(methods), strict=False))
    sentences = {} if summary is None else findings(summary)
    # An unfinished run can have other settings than the finished runs, and so another label.
    if not sentences.keys() <= methods.keys():
        sentences = {}
    sentences = sentences or {label: story(of_label, label) for label, of_label in methods.items()}
    return Section(
        name=name,
        task=(summary and summary.task) or _task(runs),
        findings=[MethodSentence(*sentence, colours[label].name) for label, sentence in sentences.items()],
        caveats=[
            *([why] if why else ()),
            *graded(summary),
            *caveats(runs),
            *silences(methods),
        ],
        charts=list(_charts(methods, runs[0].target, prefix)),
        summary=summary,
        runs=runs,
        problems=damage(runs),
    )


def _charts(methods: figures.Methods, target: float | None, prefix: str) -> Iterator[Chart]:
    """The figures for which the runs have data, in the order of the page."""
    seeds = max(len(runs) for runs in methods.values())
    over = "" if seeds == 1 else ", mean over seeds until the shortest run ends"
    for name, title, caption, draw in (
        (
            "where",
            "Where every rollout went",
            "The length of a bar is the number of rollouts that a method paid; green is the part that was trained on.",
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
            f"By batch{over}: mean reward of all scored rollouts, gradient norm before clipping, loss, entropy in nats.",
            figures.training,
        ),
        (
            "lengths",
            "Length of rollouts",
            _how_lengths_read(methods, over),
            figures.lengths,
        ),
    ):
        figure = draw(methods)
        if figure is not None:
            yield Chart(prefix + name, title, caption, figure)


def _how_lengths_read(methods: figures.Methods, over: str) -> str:
    if any("mean_lengths" in line for runs in methods.values() for run in runs for line in run.batches):
        return f"All rollouts between two batches{over}: mean length; the dotted lines are the shortest and longest rollout."
    return f"All rollouts between two batches{over}: median length, 25 to 75%, 10 to 90%; dotted: the longest rollout."


def _how_curves_read(seeds: int) -> str:
    if seeds == 1:
        return "Held-out accuracy after each evaluation, with its standard error as a bar; further left is cheaper."
    band = ", shaded its 95% interval" if seeds >= FEWEST else f"; {seeds} seeds are too few for an interval"
    return (
        f"Thin: each seed. Thick: the interquartile mean over seeds{band}. Further left is cheaper. After its end, a run "
        "that reached the target keeps its last accuracy. The thick line ends where the first run ends below the target."
    )


def _settings(runs: Sequence[RecordedRun]) -> Iterator[tuple[str, str]]:
    """The settings of a recipe's runs, from the first run, because the runs differ only in their seed."""
    described = runs[0].description
    yield "recipe", _plain(described.get("recipe"))
    yield "seeds", ", ".join(str(run.seed) for run in runs)
    yield from ((name, _plain(value)) for name, value in (described.get("parameters") or {}).items())
    yield from ((name, _plain(value)) for name, value in described.items() if name not in _SAID_ELSEWHERE)


def _plain(value: Any) -> str:
    return one_line(value if isinstance(value, str) else json.dumps(value), 300)


def _task(runs: Sequence[RecordedRun]) -> str:
    """A name for the task: the model and prompts of the first run or, for runs of another framework, their folders."""
    if runs[0].note:
        return ", ".join(dict.fromkeys(run.folder.name for run in runs))
    described = runs[0].description
    prompts = ", ".join(Path(path).name for path in described.get("prompts", ())) or "unknown prompts"
    return f"{Path(str(described.get('model', 'unknown model'))).name} on {prompts}"
