"""Terminal views: what `rollalloc watch` shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollalloc.files.table import FittingTable, Row, sparkline
from rollalloc.files.text import one_line, visible
from rollalloc.lab.report.style import STATES, by_cause, cause, state_of
from rollalloc.lab.report.wording import damage
from rollalloc.runs.recorded import RecordedRun, remaining, state, unshown

_Drawn = TypeVar("_Drawn")

_BAR = 40  # columns
_PROSE = ("run", "", "wasted most on", "state")
_OPTIONAL = ("wasted most on", "", "left", "taught")  # columns that a narrow terminal leaves out


def view(runs: Sequence[RecordedRun]) -> RenderableType:
    """One run in full, or one line for each of several runs; below, whatever could not be read."""
    if len(runs) == 1:
        return _shown(_run, runs[0])[0]
    rows, damages = zip(*(_shown(_line, run) for run in runs), strict=True)
    return Group(_table(rows), *(Text(warning, style="yellow") for warning in damage(damages)))


def _shown(draw: Callable[[RecordedRun], _Drawn], run: RecordedRun) -> tuple[_Drawn, RecordedRun]:
    """What to draw for a run, and the run drawn: itself, or a stand-in if drawing it fails."""
    try:
        return draw(run), run
    except Exception as error:  # a file may hold anything
        return draw(stand_in := unshown(run, error)), stand_in


def _run(run: RecordedRun) -> RenderableType:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", justify="right", no_wrap=True)
    rows.add_column()
    for name, shown in _parts(run):
        rows.add_row(name, shown)
    return rows


def _parts(run: RecordedRun) -> Iterator[tuple[str, RenderableType]]:
    """The named lines of a run's view."""
    seed = "" if run.seed is None else f" · seed {run.seed}"
    yield "run", Text(f"{one_line(run.label)}{seed} · {state(run)}", style="bold")
    if run.problem:
        yield "problem", Text(visible(run.problem), style="yellow")
    yield run.unit.removesuffix(" paid").split()[-1], _progress(run)
    last = run.last
    if last is None:
        return
    paid = f"{run.amount}, {last['tokens_paid']:,} tokens" + (f", {run.taught} taught" if run.grouped else "")
    yield "paid", Text(f"{paid} · {timedelta(seconds=round(last['seconds']))}, {_last_heard(run)}")
    if accuracy := run.curve.accuracy:
        target = "" if run.target is None else f" · target {run.target:g}"
        yield "accuracy", Text.assemble((sparkline(accuracy, _BAR), "bright_blue"), f" {accuracy[-1]:.3f}{target}")
    if run.accounts:
        yield "spent on", _bars(run.accounts, run.paid)
    if (reward := _latest(run, "reward_mean")) is not None:
        entropy = _latest(run, "entropy")
        yield "reward", Text(f"{reward:.3f}" + ("" if entropy is None else f" · entropy {entropy:.3f} nats"))
    if run.silence:
        yield "teaching", Text(run.silence, style="yellow")
    batch = run.batches[-1] if run.batches else {}
    if prompts := batch.get("prompts") or last.get("prompts"):
        yield "prompts", _states(prompts)
        if any(batch.get(name) for name in ("evicted", "revived", "quarantined")):
            words = {"evicted": "evicted", "revived": "visits to evicted", "quarantined": "quarantined"}
            yield "", Text(" · ".join(f"{text} {batch.get(name) or 0:,}" for name, text in words.items()))
    if lengths := batch.get("lengths"):
        least, p10, _, median, _, p90, most = lengths["quantiles"]
        cut = lengths["truncated"] / max(1, lengths["count"])
        text = (
            f"{median:,.0f} tokens, four fifths {p10:,.0f}–{p90:,.0f}, all {least:,.0f}–{most:,.0f}; {cut:.0%} cut off"
        )
        yield "length", Text(text)
    if None not in (batch.get("staleness_mean"), batch.get("staleness_max")):
        yield "staleness", Text(f"{batch['staleness_mean']:.2f} updates, at most {batch['staleness_max']}")
    for reason, count in run.unscored.items():
        yield "unscored", Text(f"{count:,} × {one_line(reason, 90)}", style="yellow")
    if run.note:
        yield "note", Text(visible(run.note), style="dim")
    if run.why:
        yield "failed" if run.failed else "ended", Text(visible(run.why), style="red" if run.failed else "")


def _latest(run: RecordedRun, name: str) -> float | None:
    """A value of the newest batch that has it, as text."""
    return run.batches[-1].get(name) if run.batches else None


def _progress(run: RecordedRun) -> RenderableType:
    budget, left = run.budget, remaining(run)
    if budget is None:
        return Text("no limit was set", style="dim")
    row = Table.grid(padding=(0, 1))
    until = "" if left is None else f" · {left} until the budget is spent"
    row.add_row(ProgressBar(budget, min(run.paid, budget), width=_BAR), f"{run.paid / budget:.0%} of {budget:,}{until}")
    return row


def _bars(accounts: Mapping[str, int], paid: int) -> RenderableType:
    rows = Table.grid(padding=(0, 1))
    for kind, count in by_cause(accounts):
        share = count / max(1, paid)
        bar = "█" * max(1, round(min(share, 1) * _BAR))
        rows.add_row(f"{share:4.0%}", Text(kind.words), Text(bar, style=kind.colour.dark))
    return rows


def _states(prompts: Mapping[str, int]) -> RenderableType:
    """One bar of all prompts by state, and its legend."""
    counts = dict.fromkeys(STATES, 0)
    for fate, count in prompts.items():
        counts[state_of(fate)] += count
    total = max(1, sum(counts.values()))
    bar, legend = Text(), Text()
    for name, kind in STATES.items():
        if counts[name]:
            bar.append("█" * round(counts[name] / total * _BAR), style=kind.colour.dark)
            legend.append("■ ", style=kind.colour.dark).append(f"{kind.words} {counts[name]:,}   ")
    return Group(bar, legend)


def _last_heard(run: RecordedRun) -> str:
    ago = timedelta(seconds=max(0, round(time.time() - run.changed)))
    return f"last line {ago} ago" if run.why is None else f"ended {ago} ago"


def _table(rows: Sequence[Row]) -> FittingTable:
    # A narrow terminal first leaves out columns that are empty for all runs.
    empty = [heading for heading in rows[0] if not any(row[heading] for row in rows)]
    return FittingTable(rows, prose=_PROSE, optional=(*empty, *_OPTIONAL))


def _line(run: RecordedRun) -> Row:
    accuracy, left = run.curve.accuracy, remaining(run)
    waste = {name: count for name, count in run.accounts.items() if name != "trained" and count}
    worst = max(waste, key=waste.__getitem__, default=None)
    return {
        "run": one_line(run.name, 24),
        "seed": "" if run.seed is None else str(run.seed),
        "rollouts": f"{run.paid:,}",
        "accuracy": f"{accuracy[-1]:.3f}" if accuracy else "",
        "": Text(sparkline(accuracy, 12), style="bright_blue"),
        "taught": run.taught,
        "wasted most on": Text()
        if worst is None
        else Text(f"{cause(worst).words} {waste[worst] / run.paid:.0%}", cause(worst).colour.dark),
        "left": "" if left is None else str(left),
        "state": Text(state(run), style="red" if run.failed else "green" if run.reached else ""),
    }
