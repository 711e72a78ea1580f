"""Options for reading logs of rollouts, and tables of shares, for the commands that need them."""

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

from rollalloc.cli.options import in_no_panel, listed

if TYPE_CHECKING:
    from rollalloc.waste.groups import Log
    from rollalloc.waste.readers import Options
    from rollalloc.waste.shares import Share

LogPath = Annotated[str, typer.Argument(help="Rollout logs: a file, a folder or a glob.", metavar="LOG")]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Options that say how a log of rollouts is read."""

    format: str | None = in_no_panel(
        None, "Format: trl, verl, verifiers, prime-rl or rollalloc (default: detect it from the files)."
    )
    threshold: float | None = in_no_panel(
        None, "For graded rewards: rewards of at least this count as right, others as wrong."
    )
    reward: str | None = in_no_panel(None, "Field or column of the reward. Several names, comma-separated, are summed.")
    weights: str | None = in_no_panel(
        None, "TRL's reward_weights, comma-separated, in the order of the reward columns."
    )
    group_size: int | None = in_no_panel(None, "TRL's num_generations, if the log does not show it.")
    rows: str | None = in_no_panel(None, "training: ignore evaluation rows; all: count them too (default: training).")

    def read(self, path: str | Path, shown: Callable[[str, int, int], None]) -> Log:
        """Read a log.

        Args:
            path: a file, folder or glob.
            shown: progress callback, called for each file with ("reading", files read before it, number of files).

        Raises:
            FileNotFoundError: there is no such file or folder.
            ValueError: an option does not apply to this log, or the files have no usable rollout.
        """
        from rollalloc.waste.readers import read_log

        return read_log(path, self.format, self._options(), shown)

    def _options(self) -> Options:
        from rollalloc.waste.readers import Options

        weights = None if self.weights is None else tuple(listed("--weights", self.weights, float, "1,0.2"))
        return Options(self.reward, weights, self.group_size, self.rows)

    def check(self, *, from_step: int | None) -> None:
        """Refuse invalid options before a file is read.

        Raises:
            ValueError: names the option.
        """
        from rollalloc.waste.finding import check_asked
        from rollalloc.waste.readers import check_format

        check_format(self.format)
        self._options()
        check_asked(threshold=self.threshold, from_step=from_step)


def bare_table(title: str | None = None, caption: str | None = None) -> Table:
    """A table without columns, in the style of all commands. Title and caption may have rich's markup."""
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title, caption=caption)
    made.title_justify = made.caption_justify = "left"
    return made


def table(headings: tuple[str, ...]) -> Table:
    """An empty table. Its first column is left-aligned and wraps; the other columns are right-aligned and do not wrap."""
    made = bare_table()
    for number, heading in enumerate(headings):
        made.add_column(heading, justify="right" if number else "left", no_wrap=number > 0)
    return made


def points(sentences: Iterable[str]) -> Table:
    """Sentences as a bulleted list."""
    made = Table.grid(padding=(0, 1))
    for sentence in sentences:
        made.add_row("-", Text(sentence))
    return made


def interval(share: Share) -> str:
    """A share's 95% interval in percent."""
    return "too few prompts" if share.interval is None else "{:.1%} – {:.1%}".format(*share.interval)


def plain(value: Any) -> Any:
    """Convert a value to JSON data: tuples become lists, infinity and NaN become null."""
    if isinstance(value, dict):
        return {key: plain(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(held) for held in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
