"""The leaderboard in Markdown: two tables per task, with all results, whether better or worse than the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollalloc.compare.summary import FEWEST, OF_GRADED, Interval, in_words, measure_of
from rollalloc.files.claims import Claims
from rollalloc.files.regular import write_text
from rollalloc.files.text import as_markdown
from rollalloc_lab.bench.cells import Board, Cell, TaskPart, board_of
from rollalloc_lab.bench.plan import BASELINE, KIND, TABLE

_LONGEST = 2000  # maximum number of characters in a line of Markdown
_EXTRA = {"accuracy": "accuracy", "pass_at_k": "pass@{k}", "right_pairs_differ": "differ", "entropy": "entropy"}
_COSTS = {"rollouts": ",.0f", "tokens": ",.0f", "steps": ",.0f", "seconds": ",.1f"}


@dataclass(frozen=True, slots=True)
class Table:
    """A table. A row has a method's name and its figures; unknown figures are "". The column of names has no heading."""

    title: str
    headings: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]


def write_leaderboard(folder: Path) -> Board:
    """Write the tables of the leaderboard whose runs are in a folder. The leaderboard need not be finished.

    Raises:
        FileExistsError: a file with this name is not ours. Nothing is written.
        ValueError: the plan is damaged, or a run in the folder does not belong to the plan.
    """
    board = board_of(folder)
    Claims(folder, KIND).add([TABLE])
    write_text(folder / TABLE, markdown(board))
    return board


def markdown(board: Board) -> str:
    """The leaderboard as Markdown."""
    lines = ["# Leaderboard", "", *(f"- {_plain(note)}" for note in _notes(board)), ""]
    for table in (_overview(board), *(table for part in board.parts for table in tables_of(part))):
        lines += [f"## {_plain(table.title)}", "", *_lines(table), ""]
    lines += ["## What was run", "", *(f"- {_plain(name)}: {_plain(value)}" for name, value in _facts(board)), ""]
    return "\n".join(lines)


def tables_of(part: TaskPart) -> list[Table]:
    """The tables of one task: the costs of each method, and the results of its last evaluations."""
    k = next((cell.paid.k for cell in part.cells if cell.paid and cell.paid.k), "k")
    measure = measure_of(cell.paid for cell in part.cells if cell.paid)
    named = _EXTRA if measure == _EXTRA["accuracy"] else _EXTRA | OF_GRADED
    extra = [words.format(k=k) for words in named.values()]
    headings = ["reached"]
    for name in _COSTS:
        headings += [name, f"{BASELINE} / this"]
    costs = len(headings)
    headings += extra
    rows = [(cell.label, _row(cell)) for cell in part.cells]
    paid = _columns(f"{part.task.name}: until held-out {measure} {part.task.target:g}", headings, rows, range(costs))
    worth = f"{part.task.name}: the policy at {part.task.budget:,} rollouts"
    return [paid, _columns(worth, headings, rows, range(costs, len(headings)))]


def _columns(
    title: str, headings: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], columns: Sequence[int]
) -> Table:
    """A table of the given columns, without columns in which all values are unknown."""
    known = [at for at in columns if any(row[at] for _, row in rows)]
    return Table(title, [headings[at] for at in known], [(label, [row[at] for at in known]) for label, row in rows])


def _row(cell: Cell) -> list[str]:
    paid = cell.paid
    if paid is None:
        return [""] * (1 + 2 * len(_COSTS) + len(_EXTRA))
    row = [f"{paid.reached} of {cell.runs}" + (f" [{cell.diverged} diverged]" if cell.diverged else "")]
    for name, form in _COSTS.items():
        row += [_figure(paid.costs[name], form), _figure(paid.ratios[name], ".2f")]
    return row + [_figure(cell.budget.get(name), ".3f") for name in _EXTRA]


def _figure(interval: Interval | None, form: str) -> str:
    """Like `in_words`, but the values of single seeds are left out if the figure is only a bound."""
    return in_words(interval, form, point_only=interval is not None and bool(interval.bound))


def _overview(board: Board) -> Table:
    """The baseline's rollouts divided by each method's, task by task."""
    by_label = [{cell.label: cell for cell in part.cells} for part in board.parts]
    rows = [
        (contestant.label, [_saving(cells.get(contestant.label)) for cells in by_label])
        for contestant in board.plan.contestants
    ]
    title = f"{BASELINE}'s rollouts divided by each method's; above 1, the method is cheaper"
    return Table(title, [part.task.name for part in board.parts], rows)


def _saving(cell: Cell | None) -> str:
    if cell is None or cell.paid is None:
        return "not run"
    reached = "" if cell.paid.reached == cell.runs else f"; reached by {cell.paid.reached} of {cell.runs}"
    return (_figure(cell.paid.ratios["rollouts"], ".2f") or "–") + reached


_READ = (
    f"{BASELINE} / this: the baseline's cost divided by this method's, paired by seed; above 1, this method is cheaper.",
    "A figure marked > or < is a bound, because some runs did not reach the target. It has no interval.",
    "All runs have the same budget.",
    "A run's cost is what it had spent when its accuracy first reached the target. The next evaluation must confirm this.",
    "Targets, budgets, seeds and the plan were fixed before the first run.",
)


def _notes(board: Board) -> list[str]:
    """Sentences that say how to read the tables."""
    plan = board.plan
    seeds = max(len(plan.seeds_of(task)) for task in plan.tasks)
    how = (
        "with their bootstrapped 95% intervals"
        if seeds >= FEWEST
        else "with the values, because there are too few for an interval"
    )
    notes = [f"Tier {plan.tier}: interquartile means over {seeds} seeds, {how}.", *_READ]
    notes.append(
        "Nothing was tuned. All methods have the trainer's own optimizer, the same batch size as far as possible, and the "
        f"same learning rate: that of the task, or else {plan.rate:g}."
    )
    if board.missing:
        notes.insert(0, f"Not finished: {board.missing} runs are missing, so these figures may still change.")
    return notes


def _facts(board: Board) -> list[tuple[str, str]]:
    plan = board.plan
    tasks: list[tuple[str, str]] = []
    for task in plan.tasks:
        seeds = ", ".join(map(str, plan.seeds_of(task)))
        tasks.append((task.name, f"target {task.target:g}, {task.budget:,} rollouts per run, seeds {seeds}"))
    return [("plan", f"frozen {board.date}"), *tasks, *plan.made_with.items()]


def _lines(table: Table) -> list[str]:
    headings = ["method", *map(_plain, table.headings)]
    rows = [[_plain(label), *figures] for label, figures in table.rows]
    ruled = ["---", *["---:"] * len(table.headings)]
    return [f"| {' | '.join(cells)} |" for cells in (headings, ruled, *rows)]


def _plain(text: str) -> str:
    return as_markdown(text, _LONGEST)
