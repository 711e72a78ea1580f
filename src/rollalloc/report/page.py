"""The HTML report on runs and comparisons: one self-contained page, with its figures also as PNG and CSV."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import rollalloc
from rollalloc.compare.summary import Interval, RecipeSummary, Summary, summaries_of
from rollalloc.files.claims import claim_files
from rollalloc.files.origin import origin
from rollalloc.files.regular import write_text
from rollalloc.files.text import one_line, told, visible
from rollalloc.report import completions, figures, interactive, png, series, style
from rollalloc.report.charts import Chart, as_csv
from rollalloc.report.wording import caveats, damage, findings, graded, name_of, silences, story
from rollalloc.runs.discovery import comparisons
from rollalloc.runs.learning_signal import share_taught
from rollalloc.runs.recorded import RecordedRun, by_label

MADE_BY = "rollalloc report"  # the generator in the head of the page
MOST = 5_000_000  # bytes of a page; with fewer rollouts' texts, it becomes shorter
_POLICY = (  # the content security policy; nothing is loaded, and only the page's own scripts run
    "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'; script-src"
)
# fields of `run.json`
_SAID_ELSEWHERE = ("schema", "digests", "recipe", "parameters", "seed", "label", "task", "starts")
_COSTS = ("rollouts", "tokens", "seconds")
_CHARTED_LOGS = 4  # runs of a section whose prompts are drawn over time, at most


@dataclass(frozen=True)
class MethodSentence:
    """A sentence about a method, with the main point first. It has the colour of the method's curves."""

    lead: str
    rest: str
    colour: str


@dataclass(frozen=True)
class Equal:
    """The accuracy of each method at equal cost: amounts of a cost, and for each label its accuracies."""

    cost: str
    amounts: Sequence[float]
    rows: Sequence[tuple[str, Sequence[Interval | None]]]


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
    equal: Sequence[Equal] = ()
    logs: Sequence[completions.LoggedRollouts] = ()
    problems: Sequence[str] = ()

    @property
    def provenance(self) -> dict[str, list[tuple[str, str]]]:
        """The settings of each label's runs, by name."""
        return {label: list(_settings(runs)) for label, runs in by_label(self.runs).items()}

    @property
    def methods(self) -> Sequence[RecipeSummary]:
        """The rows of the cost table."""
        return () if self.summary is None else self.summary.recipes

    @property
    def said_of_texts(self) -> list[str]:
        """Sentences that say which rollouts the page shows."""
        sentences = ["Whole groups, spread evenly over each log, with at most 16 rollouts of a group."]
        for log in self.logs:
            sentences.append(
                f"{name_of(log.run)}: {len(log.sample):,} of the {len(log):,} rollouts in {log.reading.source}."
            )
        return sentences


@dataclass(frozen=True)
class Page:
    """What a page is about, beside its sections.

    Attributes:
        folders: the folders that were given.
        follow_s: seconds after which the page reloads itself, because a run goes on. None: it does not.
        made: when and by what the page is made.
    """

    folders: Sequence[Path]
    follow_s: int | None = None
    made: Mapping[str, str | None] = field(default_factory=origin)


def write_page(*folders: Path, out: Path | None = None) -> Path:
    """Write the report on runs and comparisons. Return the page's path.

    By default the page is `report.html` in the first folder. The figures are written beside the page as PNG and CSV.

    Raises:
        FileNotFoundError: a folder has no run.
        FileExistsError: a file that rollalloc did not write has one of the names. Nothing is written.
    """
    drawn = sections(comparisons(*folders), folders[0])
    return write_sections(drawn, folders[0] / "report.html" if out is None else out, Page(folders))


def write_sections(drawn: Sequence[Section], out: Path, about: Page, *, figures_too: bool = True) -> Path:
    """Write a page of these sections, with the figures beside it. Return the page's path.

    Args:
        drawn: the sections.
        out: the page.
        about: what the page is about.
        figures_too: whether the figures are also written as PNG and CSV.

    Raises:
        FileExistsError: a file that rollalloc did not write has one of the names. Nothing is written.
    """
    charts = [chart for section in drawn for chart in section.charts] if figures_too else []
    claim_files([out, *(out.with_name(f"{chart.name}.{kind}") for chart in charts for kind in ("png", "csv"))])
    tasks = ", ".join(one_line(section.task, 60) for section in drawn)
    write_text(out, _page(f"What the rollouts bought: {tasks}", drawn, about))
    for chart in charts:
        png.save(chart, out.with_name(f"{chart.name}.png"))
        write_text(out.with_name(f"{chart.name}.csv"), as_csv(chart))
    return out


def sections(runs_in: Mapping[Path, Sequence[RecordedRun]], folder: Path) -> list[Section]:
    """The sections of a page: one for each task of a comparison, and one for each single run.

    Args:
        runs_in: runs by the folder that holds them, as `rollalloc.runs.discovery.comparisons` returns them.
        folder: the folder that the page is about, for its name.
    """
    runs = {run.folder: run for of_one in runs_in.values() for run in of_one}
    if list(runs) == [folder]:
        return [_section(folder.name, [runs[folder]])]
    try:
        summaries = _compared(runs)
    except Exception as error:  # show the runs even if they cannot be compared, for example runs of another version
        why = f"No costs are given, because the runs cannot be compared: {told(error)}"
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


def _page(title: str, drawn: Sequence[Section], about: Page) -> str:
    """The page as HTML, at most `MOST` bytes long as long as that is possible with fewer rollouts' texts."""
    charts = {
        chart.name: {"figure": interactive.plotly(chart), "csv": as_csv(chart)}
        for section in drawn
        for chart in section.charts
    }
    every = 1
    while True:
        texts = [completions.as_rows(section.logs, every) for section in drawn]
        page = _rendered(title, drawn, about, texts, charts)
        if len(page.encode()) <= MOST or not any(table["rows"] for table in texts):
            return page
        every *= 2


def _rendered(
    title: str, drawn: Sequence[Section], about: Page, texts: Sequence[dict[str, Any]], charts: Mapping[str, Any]
) -> str:
    """The page with these rollouts' texts and figures. Every value is escaped."""
    environment = Environment(
        loader=PackageLoader("rollalloc.report"),
        autoescape=True,
        finalize=_fit_to_be_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {
        "one_line": one_line,
        "by_cause": style.by_cause,
        "share_taught": share_taught,
        "in_short": png.short,
        "start": _start,
        "last_written": _last_written,
    }
    library, of_library = interactive.library()
    script = _script()
    data = {"charts": charts, "completions": {str(at): table for at, table in enumerate(texts, start=1)}}
    return environment.get_template("report.html.j2").render(
        policy=f"{_POLICY} {of_library} {interactive.script_hash(script.encode())}",
        colours=style.COLOURS,
        causes=style.CAUSES,
        version=rollalloc.__version__,
        made_by=MADE_BY,
        title=title,
        sections=drawn,
        texts=texts,
        origin=about.made,
        folders=[str(folder) for folder in about.folders],
        follow_s=about.follow_s,
        library=Markup(library),
        data=Markup(interactive.packed(interactive.as_json(data))),
        script=Markup(script),
    )


@cache
def _script() -> str:
    return (files("rollalloc.report") / "templates" / "page.js").read_text(encoding="utf-8")


def _start(run: RecordedRun) -> dict[str, str | None]:
    """When and by what a run was started first; None where its files do not say."""
    first = run.starts[0] if run.starts else {}
    known = {name: first.get(name) for name in ("date", "commit", "rollalloc", "command")}
    return {name: value if isinstance(value, str) else None for name, value in known.items()}


def _last_written(run: RecordedRun) -> str:
    """When the newest file in the run's folder was changed."""
    places = [run.folder] if run.folder.is_file() else [run.folder, *run.folder.glob("*"), *run.folder.glob("*/*.json")]
    times = [place.lstat().st_mtime for place in places if place.name != "report.html"]
    return f"{datetime.fromtimestamp(max(times), UTC):%Y-%m-%d %H:%M} UTC"


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
    share = max(60, completions.SHOWN // len(runs))
    logs = [log for run in runs if (log := completions.collected(run, share)) is not None]
    unread = [f"{name_of(log.run)}: {visible(problem)}" for log in logs if (problem := log.reading.problem)]
    return Section(
        name=name,
        task=(summary and summary.task) or _task(runs),
        findings=[MethodSentence(*sentence, colours[label].name) for label, sentence in sentences.items()],
        caveats=[*([why] if why else ()), *graded(summary), *caveats(runs), *unread, *silences(methods)],
        charts=[replace(chart, name=prefix + chart.name) for chart in _charts(methods, runs[0].target, logs)],
        summary=summary,
        runs=runs,
        equal=[equal for cost in _COSTS if (equal := _equal(methods, cost)) is not None],
        logs=logs,
        problems=[*damage(runs), *unread],
    )


def _charts(
    methods: figures.Methods, target: float | None, logs: Sequence[completions.LoggedRollouts]
) -> Iterator[Chart]:
    yield from figures.charts(methods, target)
    for at, log in enumerate(logs[:_CHARTED_LOGS], start=1):
        if (chart := completions.prompts_over_time(log, name_of(log.run))) is not None:
            yield replace(chart, name=f"{chart.name}-{at}") if len(logs) > 1 else chart


def _equal(methods: figures.Methods, cost: str) -> Equal | None:
    compared = series.at_equal_cost(methods, cost)
    if compared is None:
        return None
    amounts_X, accuracies = compared
    rows = [(label, middle.intervals()) for label, middle in accuracies.items()]
    unit = next(run.unit for runs in methods.values() for run in runs)
    return Equal(unit.removesuffix(" paid") if cost == "rollouts" else cost, amounts_X.tolist(), rows)


def _settings(runs: Sequence[RecordedRun]) -> Iterator[tuple[str, str]]:
    """The settings of a recipe's runs, from the first run, because the runs differ only in their seed."""
    described = runs[0].description
    yield "recipe", _plain(described.get("recipe"))
    yield "seeds", ", ".join(str(run.seed) for run in runs)
    for start in runs[0].starts:
        yield "started", _plain(start.get("date"))
        yield "command", _plain(start.get("command"))
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
