"""The rollouts that `rollalloc advise` judges: an existing log, or a profile that it samples first."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from rollalloc.cli.exported import Exported
from rollalloc.cli.options import Given, Sampled, folder, output, titled
from rollalloc.cli.progress import leave, say, staged
from rollalloc.cli.reading import Reading

if TYPE_CHECKING:
    from rollalloc.train.description import Run

_PANEL = "Sampling a profile"
_OF_LOGS = ("format", "weights", "group_size", "rows")  # options for reading other frameworks' logs


@dataclass(frozen=True, kw_only=True)
class Asked(Reading, Sampled, Exported):
    """Options that say how a log is read, or which model is sampled on which prompts."""

    reward: Annotated[
        str | None,
        typer.Option(
            help="With a log: reward fields or columns to sum, comma-separated. With --model: the reward function, "
            "package.module:function or file.py:function, called as verl's compute_score."
        ),
    ] = None
    sample_prompts: Annotated[int | None, titled("Prompts to sample, at most (default: 256).", _PANEL)] = None
    sample_n: Annotated[int | None, titled("Rollouts per prompt (default: 4).", _PANEL)] = None
    out: Annotated[
        Path | None,
        output("Folder of the profile; an unfinished one continues (default: a new folder in runs/).", parser=folder),
    ] = None
    overwrite: Annotated[
        bool, output("Delete another profile's files in the folder first, and nothing else.", "--overwrite")
    ] = False

    def log(self, path: str | None, seed: int) -> tuple[str, Reading]:
        """The log to judge, and how to read it; without a path, one is sampled first.

        Raises:
            ValueError: neither a log nor a model, or both; options that do not apply; what `sample_profile` raises.
        """
        useless = [
            name for name in (_OF_LOGS if path is None else _OF_SAMPLING) if getattr(self, name) != getattr(Asked, name)
        ]
        options = ", ".join(f"--{name.replace('_', '-')}" for name in useless)
        if path is not None:
            if useless:
                raise ValueError(
                    f"{options}: does not apply to a log; take it out, or leave the log out to sample a profile"
                )
            return path, self
        if self.task is None and self.model is None:
            raise ValueError("give a log of rollouts, or --model with --prompts and --reward, or --task, to sample one")
        if useless:
            raise ValueError(f"{options}: does not apply when a profile is sampled; take it out")
        return str(self._profile(seed)), replace(self, reward=None)

    def _profile(self, seed: int) -> Path:
        """Sample a profile, or continue one, and return its folder."""
        from rollalloc.cli.sources import run_of
        from rollalloc.lab.advise.sampling import sample_profile
        from rollalloc.lab.bench.presets import made
        from rollalloc.train.execution import one_thread

        console = Console(stderr=True)
        given = Given(**{each.name: getattr(self, each.name) for each in fields(Sampled)})
        run = run_of(given, "reinforce", {}, seed)  # only its source and sampling settings are used
        if self.task:
            one_thread()
        place = self.out or Path("runs") / f"profile-{_name(run)}-{seed}"
        how: dict[str, Any] = {"prompts": self.sample_prompts, "n": self.sample_n}
        how = {name: value for name, value in how.items() if value is not None}
        say(console, f"the profile is kept in {place}; the same command goes on with it")
        try:
            with staged() as shown:
                run = made(run, self.tasks, shown)
                return sample_profile(run, place, seed=seed, overwrite=self.overwrite, progress=shown, **how)
        except KeyboardInterrupt:
            leave(console, f"left at once; the same command goes on from the last whole wave in {place}", SIGINT)


_OF_BOTH = {each.name for kind in (Reading, Exported) for each in fields(kind)}
_OF_SAMPLING = tuple(each.name for each in fields(Asked) if each.name not in _OF_BOTH)


def _name(run: Run) -> str:
    """A profile folder's name: the task, or the last part of the model's name."""
    return run.task.replace("/", "-") or Path(run.source.model).resolve().name
