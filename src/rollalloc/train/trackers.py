"""Send a run's metrics, and tables of its rollouts, to TensorBoard, Weights & Biases or trackio."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rollalloc.files.text import as_markdown
from rollalloc.runs.metrics import scalars as numbers
from rollalloc.runs.values import QUANTILES

Listener = Callable[[dict[str, Any]], None]  # gets each line of the metrics
EXAMPLES = 16  # rollouts in a table, at most
_PAID, _TABLE = "rollalloc/rollouts_paid", "rollalloc/rollouts"
_COLUMNS = ("prompt", "completion", "reward", "metric", "unscored", "tokens", "version", "key")
_LONGEST = 1000  # characters of a text in a table of Markdown


@contextmanager
def tracked(
    names: Sequence[str], folder: Path, described: Mapping[str, Any], listener: Listener | None = None
) -> Iterator[Listener]:
    """A listener that passes each line of the metrics to the named trackers and to `listener`.

    With each evaluation, the trackers also get a table of some rollouts. The trackers' x axis is the number of rollouts
    paid, so that recipes can be compared at equal cost.

    Args:
        names: names of trackers, from `TRACKERS`.
        folder: folder of the run.
        described: the run as plain data.
        listener: also gets each line.

    Raises:
        ValueError, ImportError: a name is unknown, or a tracker's library is not installed.
    """
    unknown = [name for name in names if name not in TRACKERS]
    if unknown:
        raise ValueError(f"unknown tracker {', '.join(unknown)}; there are {', '.join(TRACKERS)}")
    with ExitStack() as stack:
        listeners = [] if listener is None else [listener]
        listeners += [stack.enter_context(TRACKERS[name](folder, described)) for name in dict.fromkeys(names)]

        def listen(line: dict[str, Any]) -> None:
            for tell in listeners:
                tell(line)

        yield listen


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers in a line of the metrics by name: all under `rollalloc/`, and the mean reward also as `reward`.

    Nested numbers are named by their path. Counts of rollouts without a score are summed over the reasons, because
    reasons are free text. For a line of an evaluation, fields that other lines also have are left out.
    """
    own = {name: value for name, value in line.items() if name not in ("kind", "unscored", "lengths")}
    if line["kind"] == "eval":
        own = {name: own[name] for name in ("accuracy", "standard_error", "breadth", "eval_unscored", "eval_seconds")}
    else:
        own["unscored"] = sum(line["unscored"].values())
    if lengths := line.get("lengths"):
        own["lengths"] = lengths | dict(zip(QUANTILES, lengths["quantiles"], strict=True))
    values = numbers(own)
    if line.get("reward_mean") is not None:
        values["reward"] = float(line["reward_mean"])
    return values


def rollouts_in(line: Mapping[str, Any]) -> list[list[Any]]:
    """The rows of the table of rollouts that comes with a line, with the columns `_COLUMNS`; empty if none comes."""
    names = {"prompt": "prompt_text", "completion": "text"}
    return [[row.get(names.get(name, name)) for name in _COLUMNS] for row in line.get("examples", ())]


def _cell(value: Any) -> str:
    """A value as Markdown. A text is shown unchanged, because a model may have written it."""
    return "" if value is None else as_markdown(str(value), _LONGEST)


@contextmanager
def _tensorboard(folder: Path, described: Mapping[str, Any]) -> Iterator[Listener]:
    """Event files in the folder `tensorboard` of the run."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(f"--track tensorboard needs its library: pip install tensorboard ({error})") from error
    writer = None

    def listen(line: dict[str, Any]) -> None:
        nonlocal writer
        paid = line["rollouts_paid"]
        # Hide the points from this number of rollouts on, which an earlier run logged, or this run before it was resumed.
        writer = writer or SummaryWriter(folder / "tensorboard", purge_step=paid)
        for name, value in scalars(line).items():
            writer.add_scalar(name, value, paid)
        if rows := rollouts_in(line):
            table = [_COLUMNS, ["---"] * len(_COLUMNS), *(map(_cell, row) for row in rows)]
            writer.add_text(_TABLE, "\n".join(f"| {' | '.join(row)} |" for row in table), paid)

    try:
        yield listen
    finally:
        if writer is not None:
            writer.close()


@contextmanager
def _wandb(folder: Path, described: Mapping[str, Any]) -> Iterator[Listener]:
    """A run of Weights & Biases, named and grouped by its folder. A resumed run becomes a new run of the same group."""
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(f"--track wandb needs its library: pip install wandb ({error})") from error
    folder.mkdir(parents=True, exist_ok=True)
    run = wandb.init(project="rollalloc", name=folder.name, group=folder.name, dir=str(folder), config=dict(described))
    run.define_metric("*", step_metric=_PAID)
    ended = False

    def listen(line: dict[str, Any]) -> None:
        rows = rollouts_in(line)
        table = {_TABLE: wandb.Table(columns=list(_COLUMNS), data=rows)} if rows else {}
        run.log(scalars(line) | {_PAID: line["rollouts_paid"]} | table)

    try:
        yield listen
        ended = True
    finally:
        run.finish(exit_code=0 if ended else 1)


@contextmanager
def _trackio(folder: Path, described: Mapping[str, Any]) -> Iterator[Listener]:
    """A run of trackio, named and grouped by its folder. A resumed run becomes a new run of the same group."""
    try:
        import trackio  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(f"--track trackio needs its library: pip install trackio ({error})") from error
    run = trackio.init(project="rollalloc", name=folder.name, group=folder.name, config=dict(described), embed=False)

    def listen(line: dict[str, Any]) -> None:
        # trackio takes texts for Markdown
        rows = [[_cell(value) if isinstance(value, str) else value for value in row] for row in rollouts_in(line)]
        table = {_TABLE: trackio.Table(columns=list(_COLUMNS), data=rows)} if rows else {}
        run.log(scalars(line) | table, step=line["rollouts_paid"])

    try:
        yield listen
    finally:
        run.finish()


TRACKERS: Mapping[str, Callable[[Path, Mapping[str, Any]], AbstractContextManager[Listener]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
}
