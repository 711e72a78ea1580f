"""What the laboratory adds to the tasks that `--task` knows."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from rollalloc.tasks.files import Shown, TaskFiles
from rollalloc.tasks.presets import Family, Preset
from rollalloc_lab.tasks import ladder, twins, walks
from rollalloc_lab.tasks.rungs import PREFIX, RUNGS


def families() -> tuple[Family, ...]:
    """The families, for the entry point of the group `rollalloc.tasks`."""
    return (
        Family(
            {
                "walks/mixed": Preset(0.70, 40_000, 1000, eval_samples=8, tuned_on="walks/mixed"),
                "walks/late": Preset(0.75, 40_000, 1000, eval_samples=8, tuned_on="walks/mixed"),
                "walks/long": Preset(0.70, 40_000, 1000, eval_samples=8, tuned_on="walks/mixed"),
                "walks/brief": Preset(0.70, 40_000, 1000, eval_samples=8, tuned_on="walks/mixed"),
            },
            _prepare_walks,
            tuned=files("rollalloc_lab.tasks") / "tuned",
        ),
        Family(
            {
                "ladder/0.15m": Preset(0.70, 6_000, 500),
                "ladder/1m": Preset(0.70, 6_000, 500),
                "ladder/8m": Preset(0.70, 4_096, 512, rate=3e-4, precision="bf16"),
                "ladder/135m": Preset(0.50, 1_024, 256, rate=2e-5, precision="bf16"),
            },
            _prepare_ladder,
        ),
        Family(
            {
                "ladder/0.15m-u": Preset(0.60, 6_144, 512),
                "ladder/8m-u": Preset(0.60, 4_096, 512, rate=3e-4, precision="bf16"),
                "ladder/135m-u": Preset(0.60, 1_024, 256, rate=2e-5, precision="bf16"),
            },
            _prepare_twin,
        ),
    )


def _prepare_walks(name: str, folder: Path, shown: Shown) -> TaskFiles:
    return walks.prepare(folder / "walks", name.partition("/")[2], progress=shown)


def _prepare_ladder(name: str, folder: Path, shown: Shown) -> TaskFiles:
    return ladder.prepare(folder / "ladder", RUNGS[name.removeprefix(PREFIX)], progress=shown)


def _prepare_twin(name: str, folder: Path, shown: Shown) -> TaskFiles:
    rung = name.removeprefix(PREFIX).removesuffix(twins.SUFFIX)
    return twins.prepare(folder / "ladder", RUNGS[rung], twins.TWINS[rung], progress=shown)
