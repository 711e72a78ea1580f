"""What the commands that read logs of rollouts share: their options, and JSON without infinities."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rollalloc.lab.waste.groups import Log

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
    reward: Annotated[str | None, typer.Option(help="The field or column that holds the reward.")] = None
    weights: Annotated[
        str | None, typer.Option(help="TRL's reward_weights, comma-separated, in the order of its columns.")
    ] = None
    group_size: Annotated[int | None, typer.Option(help="TRL's num_generations, where rows do not tell it.")] = None

    def read(self, path: str | Path, shown: Callable[[str, int, int], None]) -> Log:
        """The log under a path.

        Args:
            path: a file, folder or glob.
            shown: told of each file that is read: (what, how many before it, how many there are).

        Raises:
            FileNotFoundError: nothing there.
            ValueError: options that mean nothing, or files that have no usable rollout.
        """
        from rollalloc.lab.waste.readers import Options, read_log

        options = Options(self.reward, numbers(self.weights), self.group_size)
        return read_log(path, self.format, options, lambda file, done, files: shown("reading", done, files))

    def check(self, **asked: Any) -> None:
        """Refuse what means nothing, before a file is read; beside it what else is asked, as `check_asked` has it.

        Raises:
            ValueError: names the option.
        """
        from rollalloc.lab.waste.finding import check_asked
        from rollalloc.lab.waste.readers import Options, check_format

        check_format(self.format)
        Options(self.reward, numbers(self.weights), self.group_size)
        nothing = {"from_step": None, "n": None, "n_pilot": None, "resamples": 2, "seed": 0}
        check_asked(threshold=self.threshold, **nothing | asked)


def numbers(text: str | None) -> tuple[float, ...] | None:
    """The weights of TRL's rewards, as an option gives them.

    Raises:
        ValueError: they are no numbers.
    """
    try:
        return None if text is None else tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--weights: expected numbers separated by commas, got {text!r}; e.g. 1,0.2") from None


def plain(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, dict):
        return {key: plain(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(held) for held in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
