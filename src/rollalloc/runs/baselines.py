"""Finds the run of plain GRPO with which a run of verl is compared, by the names of their logs.

A name is ROW-METHOD-REST, as the configurations of recipes/verl make it: `polaris_4b-pilot_commit`,
`pods_gsm8k-pods-64-16`. The row is the model and the data. Two runs can be compared if they have the same row, and are
validated on the same benchmarks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rollalloc.files.text import visible
from rollalloc.named import RECIPES

BENCHMARKS = "benchmarks"  # key of a run's description: the validation metrics whose mean is its accuracy
_BASELINE = "grpo"
_METHODS = {*RECIPES, "stream", "streamdapo", "roll"}  # the last three are methods of recipes/verl
# Between dashes; in a name without such a part, between other marks: qwen_grpo.
_PARTS = (re.compile(r"(?:^|-)([^-]+)(?=-|$)"), re.compile(rf"(?:^|[-_.])({'|'.join(_METHODS)})(?=[-_.]|$)"))


@dataclass(frozen=True)
class RunName:
    """The parts of a run's name. Parts that the name lacks are "".

    Attributes:
        row: the model and the data.
        method: a recipe or a method of recipes/verl; several recipes are joined by "+".
        rest: what follows, for example sizes or a seed.
    """

    row: str
    method: str
    rest: str


@dataclass(frozen=True)
class Arm:
    """What is needed to find the baseline of a run.

    Attributes:
        name: name of the run.
        benchmarks: the validation metrics whose mean is the run's accuracy.
    """

    name: str
    benchmarks: Sequence[str]


def name_of(text: str) -> RunName:
    """The parts of a name. If several parts of a name are methods, the last one counts."""
    for parts in _PARTS:
        found = [each for each in parts.finditer(text) if _METHODS.issuperset(each[1].split("+"))]
        if found:
            last = found[-1]
            return RunName(text[: last.start()], last[1], text[last.end() :])
    return RunName("", "", "")


def baselines_of(arms: Sequence[Arm], named: str | None = None) -> list[int | None]:
    """For each run, the index of its baseline: a run of plain GRPO with the same row and the same benchmarks.

    If a name has no row, it may be compared with any row. Of several baselines, the one with the same rest of the name is
    taken. None: there is no baseline.

    Args:
        arms: the runs.
        named: name of the baseline of all runs with its benchmarks. None: find it by the names of the runs.

    Raises:
        ValueError: there is no run with the name `named`; or a run has several baselines.
    """
    if named is not None:
        at = next((at for at, arm in enumerate(arms) if arm.name == named), None)
        if at is None:
            raise ValueError(
                f"--baseline: there is no run {visible(named)}; there are {visible(', '.join(a.name for a in arms))}"
            )
        return [at if [*arm.benchmarks] == [*arms[at].benchmarks] else None for arm in arms]
    return [_baseline(arm, arms) for arm in arms]


def _baseline(arm: Arm, arms: Sequence[Arm]) -> int | None:
    names = {at: name_of(each.name) for at, each in enumerate(arms)}
    own = name_of(arm.name)
    plain = [
        at for at, name in names.items() if name.method == _BASELINE and [*arms[at].benchmarks] == [*arm.benchmarks]
    ]
    same_row = [at for at in plain if names[at].row == own.row]
    found = same_row or [at for at in plain if not (own.row and names[at].row)]
    if len(found) > 1:
        found = [at for at in found if names[at].rest == own.rest] or found
    if len(found) > 1:
        raise ValueError(
            f"{visible(arm.name)} could be compared with {visible(' or '.join(arms[at].name for at in found))}; name "
            "one of them with --baseline"
        )
    return found[0] if found else None
