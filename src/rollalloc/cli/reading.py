"""What the commands share that read a log of rollouts: how it is read, and how shares are shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from rollalloc.cli.options import listed

if TYPE_CHECKING:
    from rollalloc.lab.waste.groups import Log
    from rollalloc.lab.waste.readers import Options
    from rollalloc.lab.waste.shares import Share

LogPath = Annotated[str, typer.Argument(help="A file, a folder or a glob of rollout logs.", metavar="LOG")]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How logs of rollouts are read, as the command line says it."""

    format: Annotated[
        str | None, typer.Option(help="trl, verl, prime-rl or rollalloc; by default told from the files.")
    ] = None
    threshold: Annotated[
        float | None, typer.Option(help="Rewards of at least this are right, all others wrong; for graded rewards.")
    ] = None
    reward: Annotated[
        str | None,
        typer.Option(help="The field or column that holds the reward; several, comma-separated, are added up."),
    ] = None
    weights: Annotated[
        str | None, typer.Option(help="TRL's reward_weights, comma-separated, in the order of its columns.")
    ] = None
    group_size: Annotated[int | None, typer.Option(help="TRL's num_generations, where rows do not tell it.")] = None
    rows: Annotated[
        str | None, typer.Option(help="training (default) leaves out rows of evaluations; all counts them.")
    ] = None

    def read(self, path: str | Path, shown: Callable[[str, int, int], None]) -> Log:
        """The log under a path.

        Args:
            path: a file, folder or glob.
            shown: told of each file that is read: (what, how many before it, how many there are).

        Raises:
            FileNotFoundError: nothing there.
            ValueError: options that mean nothing, or files that have no usable rollout.
        """
        from rollalloc.lab.waste.readers import read_log

        options = self._options()
        return read_log(path, self.format, options, lambda file, done, files: shown("reading", done, files))

    def _options(self) -> Options:
        from rollalloc.lab.waste.readers import Options

        return Options(self.reward, _numbers(self.weights), self.group_size, self.rows)

    def check(self, *, from_step: int | None, seed: int) -> None:
        """Refuse options that mean nothing, before a file is read.

        Raises:
            ValueError: names the option.
        """
        from rollalloc.lab.waste.finding import check_asked
        from rollalloc.lab.waste.readers import check_format

        check_format(self.format)
        self._options()
        check_asked(threshold=self.threshold, from_step=from_step, seed=seed)


def table(headings: tuple[str, ...]) -> Table:
    """An empty table whose first column is text and whose others are figures."""
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for number, heading in enumerate(headings):
        made.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return made


def points(sentences: Iterable[str]) -> Table:
    """Sentences as a list."""
    made = Table.grid(padding=(0, 1))
    for sentence in sentences:
        made.add_row("-", Text(sentence))
    return made


def interval(share: Share) -> str:
    """The interval of a share as percentages."""
    return "too few prompts" if share.interval is None else "{:.1%} – {:.1%}".format(*share.interval)


def _numbers(text: str | None) -> tuple[float, ...] | None:
    return None if text is None else tuple(listed("--weights", text, float, "1,0.2"))


def plain(value: Any) -> Any:
    """Plain data as JSON takes it, which has no infinity."""
    if isinstance(value, dict):
        return {key: plain(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(held) for held in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
