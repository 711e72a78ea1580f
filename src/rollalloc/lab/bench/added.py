"""Finished runs that were made elsewhere, put beside a leaderboard's own; what does not match is refused by name.

They lie in `added-DIGEST` of its folder, the digest being their plan's, each a leaderboard's folder of its own.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain
from math import isfinite
from os import fstat
from os.path import lexists, realpath
from pathlib import Path
from typing import Any

from rollalloc.core.packing import differences
from rollalloc.files.atomic import sync, write_text
from rollalloc.files.claims import HIDDEN, Claims, Lock
from rollalloc.files.names import DESCRIPTION, METRICS
from rollalloc.files.text import one_line
from rollalloc.lab.bench.contestants import BASELINE, Contestant
from rollalloc.lab.bench.leaderboard import said_to_diverge, settings_in
from rollalloc.lab.bench.plan import DIVERGED, KIND, PLAN, Plan, TaskPlan, frozen_in, place_of
from rollalloc.lab.bench.rungs import PREFIX, RUNGS
from rollalloc.lab.bench.tiers import TRACKS
from rollalloc.runs.files import open_regular, why
from rollalloc.runs.reader import read_metrics
from rollalloc.runs.recorded import Line
from rollalloc.runs.whole import refuse_unfinished
from rollalloc.train.description import Run
from rollalloc.train.settings import NEWER

_BEFORE = "added-"
_STAGED = f"{HIDDEN}/adding"
_NAME = re.compile(r"\w[\w.+@/-]{0,99}")  # of a task or a label: it becomes a part of a path
_DIGEST = re.compile("[0-9a-f]{64}")
_LARGEST: Mapping[str, int] = {PLAN: 8 << 20, DIVERGED: 8 << 20, DESCRIPTION: 8 << 20, METRICS: 256 << 20}  # bytes
_MOST = 10_000  # final runs of a track
_SAID = ("rollalloc", "torch")  # what a plan must say that it was made with, besides the machine
_MACHINE = ("device", "processor")
_CHUNK = 1 << 20
_LONGEST = 8000  # letters of what a plan was made with, which the page shows
_ODD = (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)  # what is none that rollalloc wrote
_SHOWN = 300  # letters of what others wrote, in an error


@dataclass(frozen=True, slots=True)
class _Final:
    """A final run of a plan, by where it is to be."""

    name: str
    track: str
    task: TaskPlan
    contestant: Contestant
    seed: int
    diverged: bool


def add(folder: Path, out: Path) -> str:
    """Put the finished runs of another leaderboard's folder beside those of this one.

    They may be of other tasks, sizes and machines; what is compared on them must be what is compared here.

    Args:
        folder: of the other leaderboard, all of whose runs are over.
        out: of this one.

    Returns:
        The name of the folder that they are copied into, whole or not at all.

    Raises:
        FileNotFoundError: one of the two is no leaderboard's folder.
        FileExistsError: something that is not ours has that name.
        ValueError: names what does not match, with what to do; nothing was changed.
        InUse: another process writes into this leaderboard's folder.
        OSError: a file is of another kind, or cannot be read or written.
    """
    ours, _ = frozen_in(out)
    theirs = _plan_of(folder, ours)
    name = f"{_BEFORE}{theirs.digest[:12]}"
    with Lock(out, KIND):
        claims, staged = Claims(out, KIND), out / _STAGED
        if name in claims.names() and lexists(out / name):
            raise ValueError(f"{folder} was added before, as {out / name}: the plan is the same")
        finals = _finals(theirs, folder)
        known = _curves_in(out)
        _refuse(finals, theirs, folder, known)
        try:
            shutil.rmtree(staged, ignore_errors=True)  # of a process that was killed
            _copy(finals, folder, staged)
            _refuse(_finals(_plan_of(staged, ours), staged), theirs, staged, known)  # as they are copied
            claims.add([name])
            staged.rename(out / name)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    return name


def added_in(folder: Path) -> list[Path]:
    """The folders of the runs that were added to a leaderboard."""
    ours = Claims(folder, KIND).names()
    return [folder / name for name in sorted(ours) if name.startswith(_BEFORE) and (folder / name).is_dir()]


# ------------------------------------------------------------------------------------------------------------ the plan


def _plan_of(folder: Path, ours: Plan) -> Plan:
    """The plan in a folder, where it may stand beside ours.

    Raises:
        FileNotFoundError, OSError: as `frozen_in`; it is too large.
        ValueError: names what does not match.
    """
    if lexists(folder / PLAN):
        _refuse_large(folder / PLAN)
    try:
        theirs, _ = frozen_in(folder)
        wrong = next(chain(_odd(theirs), _unlike(theirs, ours)), None)
    except _ODD as error:
        wrong, theirs = f"is none that rollalloc wrote ({type(error).__name__}: {error})", ours
    if wrong is not None:
        raise ValueError(f"{folder} cannot be added: its {PLAN} {one_line(wrong, _SHOWN)}")
    return theirs


def _odd(plan: Plan) -> Iterator[str]:
    """What a plan says that none can; somebody else wrote it."""
    most = len(plan.tasks) * len(plan.contestants) * len({*plan.seeds, *plan.default_seeds})
    if most > _MOST:  # before anything is done for each
        yield f"has {most:,} final runs a track, expected at most {_MOST:,}"
    named = [*(task.name for task in plan.tasks), *(each.label for each in plan.contestants)]
    for name in named:
        if not isinstance(name, str) or not _NAME.fullmatch(name) or ".." in name:
            yield f"has the name {name!r}, which no folder may have"
    if len(set(named)) < len(named):
        yield "names a task or a method twice"
    if not all(isinstance(track, str) and track in TRACKS for track in plan.tracks):
        yield f"has the tracks {list(plan.tracks)}, expected some of {list(TRACKS)}"
    for task in plan.tasks:
        counts = (task.budget, task.eval_every, task.eval_samples, 1 if task.seeds is None else task.seeds)
        rates = (task.target, plan.rate_of(task))
        if not all(type(each) is int and each > 0 for each in counts) or not all(map(_is_rate, rates)):
            yield f"has a budget, grid, count, target or learning rate of {task.name} that is no number above 0"
    for track in plan.tracks:
        for task in plan.tasks:
            seeds = plan.seeds_of(track, task)
            if not seeds or len(set(seeds)) < len(seeds) or not all(type(seed) is int for seed in seeds):
                yield f"has the seeds {list(seeds)} for {task.name}, {track}: expected whole numbers, each once"
    said = plan.made_with
    texts = all(isinstance(value, str) for value in said.values()) and len(json.dumps(said)) <= _LONGEST
    if not texts or not {*_SAID} <= said.keys():
        yield f"does not say what it was made with: expected {', '.join(_SAID)} and a machine, in short"
    elif machine_of(plan) == "":
        yield f"does not say on what machine: expected {' or '.join(_MACHINE)} in made_with"


def _unlike(theirs: Plan, ours: Plan) -> Iterator[str]:
    """What keeps a plan from standing beside ours."""
    if theirs.digest == ours.digest:
        yield "is this leaderboard's own: go on in its folder"
    if not theirs.tracks or not {*theirs.tracks} <= {*ours.tracks}:
        yield f"has the tracks {list(theirs.tracks)}, expected some of {list(ours.tracks)}"
    by_label = {each.label: each for each in ours.contestants}
    if BASELINE not in {each.label for each in theirs.contestants}:
        yield f"has no {BASELINE}, which every ratio is to"
    for each in theirs.contestants:
        if each.label not in by_label:
            yield f"has the method {each.label}, which is none of {', '.join(by_label)}"
        elif others := list(_other_method(each, by_label[each.label], theirs.tracks)):
            yield f"has another method under the label {each.label}: {'; '.join(others[:3])}"
    if "tuned" in theirs.tracks and theirs.search != ours.search:
        yield "has another search, so that its settings had another chance"
    known = {task.name: task for task in ours.tasks}
    for task in theirs.tasks:
        rung = RUNGS.get(task.name.removeprefix(PREFIX)) if task.name.startswith(PREFIX) else None
        if rung is not None and task.rung != rung.digest:
            yield f"has another rung under the name {task.name}: its digest is {task.rung!r}, expected {rung.digest!r}"
        if task.name in known:
            for other in differences(asdict(known[task.name]), asdict(task), task.name):
                yield f"is another for a task of this leaderboard: {other}; give it another name"
            for track in theirs.tracks:
                seeds = theirs.seeds_of(track, task), ours.seeds_of(track, known[task.name])
                if seeds[0] != seeds[1]:
                    yield f"has the seeds {list(seeds[0])} for {task.name}, expected {list(seeds[1])}"


def _other_method(theirs: Contestant, ours: Contestant, tracks: Sequence[str]) -> Iterator[str]:
    names = ("recipe", "contents", *("grid" if track == "tuned" else track for track in tracks))
    one, other = ({name: json.loads(json.dumps(asdict(each)[name])) for name in names} for each in (ours, theirs))
    return differences(one, other, ours.label)


def machine_of(plan: Plan) -> str:
    """What a plan says that it was made on; "" where it does not."""
    return next((plan.made_with[name] for name in _MACHINE if plan.made_with.get(name)), "")


def _is_rate(value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value) and value > 0


# ------------------------------------------------------------------------------------------------------------ the runs


def _finals(plan: Plan, folder: Path) -> list[_Final]:
    """The final runs of a plan.

    Raises:
        ValueError: the folder holds others, or what it says of them is damaged.
    """
    if lexists(folder / DIVERGED):
        _refuse_large(folder / DIVERGED)
    lost = said_to_diverge(folder / DIVERGED)
    finals: list[_Final] = []
    for track in plan.tracks:
        for task in plan.tasks:
            for each in plan.contestants:
                for seed in plan.seeds_of(track, task) if settings_in(plan, track, task, each) else ():
                    name = place_of(track, task, each.label, seed)
                    finals.append(_Final(name, track, task, each, seed, name in lost))
    expected = {final.name for final in finals}
    for track in TRACKS:
        for file in sorted((folder / track).glob(f"*/*/{DESCRIPTION}")):
            if (name := file.parent.relative_to(folder).as_posix()) not in expected:
                raise ValueError(
                    f"{folder} cannot be added: {one_line(name, _SHOWN)} is none of its plan, by its seed or its name; all "
                    "runs of a plan are shown, and no others"
                )
    return finals


def _refuse(finals: Sequence[_Final], plan: Plan, folder: Path, known: Mapping[str, str]) -> None:
    """Refuse runs that are not those of their plan, or did not come to their end, or are there twice.

    Raises:
        ValueError, OSError: names the first of them.
    """
    curves, first = dict(known), dict[str, tuple[str, dict[str, Any]]]()
    chosen: dict[str, Any] = {}
    if missing := [final.name for final in finals if not lexists(folder / final.name / METRICS)]:
        raise ValueError(
            f"{folder} cannot be added: {len(missing)} of its {len(finals)} final runs are missing, as {missing[0]}; go on "
            "with the command that it was begun with"
        )
    for final in finals:
        place = folder / final.name
        try:
            if Path(realpath(place)) != Path(realpath(folder)) / final.name:
                raise ValueError("it is a link; put the folder itself there")
            for name in (DESCRIPTION, METRICS):
                _refuse_large(place / name)
            setting, alike = _described(final, plan, place)
            if chosen.setdefault(place.parent.name + final.track + final.contestant.label, setting) != setting:
                raise ValueError("its setting is another than that of its method's other seeds")
            name, before = first.setdefault(final.task.name, (final.name, alike))
            if others := list(differences(before, alike, "run.json")):
                raise ValueError(f"it is of another model, data or settings than {name}: {'; '.join(others[:3])}")
            task = final.task
            lines = refuse_unfinished(place, budget=task.budget, every=task.eval_every, diverged=final.diverged)
            if final.diverged and not str(lines[-1].get("why")).startswith(FloatingPointError.__name__):
                raise ValueError(f"{DIVERGED} says that it diverged, and it does not")
            if (twice := curves.setdefault(_curve(lines), final.name)) != final.name:
                raise ValueError(f"its curve is that of {twice}, to the second: one run under two seeds or names")
        except (ValueError, OSError, *_ODD) as error:
            said = one_line(f"{error}" if type(error) is ValueError else f"{type(error).__name__}: {error}", 2 * _SHOWN)
            raise ValueError(
                f"{folder} cannot be added: {final.name}: {said}; run it again with the command that it was begun with"
            ) from None


def _described(final: _Final, plan: Plan, place: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The setting that a final run has, and what is the same for all runs on its task: digests, source, other settings.

    Raises:
        ValueError: it is another run than the plan has there, or says no digests.
    """
    with open_regular(place / DESCRIPTION):  # not a FIFO, nor a link out of it
        run = Run.described_in(place)
    task, each = final.task, final.contestant
    said = (run.task, run.recipe, run.name, run.settings.seed, run.max_rollouts, run.settings.eval_every)
    planned = (task.name, each.recipe, each.label, final.seed, task.budget, task.eval_every)
    for name, expected, found in zip(("task", "recipe", "label", "seed", "budget", "grid"), planned, said, strict=True):
        if expected != found or type(expected) is not type(found):
            raise ValueError(f"its {name} is {found!r}, and the plan has {expected!r}")
    described = run.description()
    settings = described["settings"]
    del settings["seed"]
    # A description leaves out a setting that is as it was before there was one, as `adaptive_clip`.
    names = ("learning_rate", "betas", "adaptive_clip", "averaging")
    made = {name: settings.pop(name, NEWER.get(name)) for name in names}
    made["parameters"] = described["parameters"]
    allowed = [
        {"learning_rate": one.learning_rate, **one.optimizer, "parameters": one.parameters}
        for one in settings_in(plan, final.track, task, each)
    ]
    if made not in json.loads(json.dumps(allowed)):
        raise ValueError(f"its parameters, rate or optimizer are none that the plan allows: {made}")
    if (settings["target"], settings["eval_samples"]) != (None, task.eval_samples):
        raise ValueError("its target or the samples of its evaluations are not the plan's")
    return made, {"source": described["source"], "settings": settings, "digests": _digests(place, run)}


def _digests(place: Path, run: Run) -> dict[str, str]:
    """The digests that a `run.json` has, of the prompts at least."""
    with open_regular(place / DESCRIPTION) as file:
        digests = json.loads(file.readall()).get("digests")
    if not isinstance(digests, dict) or not all(_DIGEST.fullmatch(str(each)) for each in digests.values()):
        raise ValueError("run.json has no SHA-256 of each of its files")
    for needed in (*run.source.prompts, run.source.heldout):
        if needed not in digests:
            raise ValueError(f"run.json has no digest of {needed!r}")
    return digests


def _curve(lines: Sequence[Line]) -> str:
    """What no two runs have alike: what each line had paid, by the clock too."""
    return json.dumps([(line["kind"], line["tokens_paid"], line["seconds"]) for line in lines])


def _curves_in(out: Path) -> dict[str, str]:
    """The curves of a leaderboard's final runs, those that were added included: curve → folder."""
    found: dict[str, str] = {}
    for folder in (out, *added_in(out)):
        for file in (file for track in TRACKS for file in sorted((folder / track).glob(f"*/*/{METRICS}"))):
            with suppress(ValueError, OSError):  # a damaged one has no curve
                found[_curve(read_metrics(file))] = str(file.parent)
    return found


# ------------------------------------------------------------------------------------------------------------ the copy


def _copy(finals: Sequence[_Final], folder: Path, to: Path) -> None:
    """Copy a plan and its final runs, and no other file of theirs."""
    to.mkdir(parents=True)
    lost = said_to_diverge(folder / DIVERGED)
    write_text(
        to / DIVERGED, json.dumps({final.name: lost[final.name] for final in finals if final.diverged}, indent=1)
    )
    _copy_file(folder / PLAN, to / PLAN)
    for final in finals:
        (to / final.name).mkdir(parents=True)
        for name in (DESCRIPTION, METRICS):
            _copy_file(folder / final.name / name, to / final.name / name)
    Claims(to, KIND).keep([PLAN, DIVERGED])


def _copy_file(path: Path, to: Path) -> None:
    with open_regular(path) as file, to.open("xb") as copy:
        left = _LARGEST[path.name]
        while left > 0 and (chunk := file.read(min(_CHUNK, left))):
            copy.write(chunk)
            left -= len(chunk)
    sync(to)


def _refuse_large(path: Path) -> None:
    """Refuse what is no regular file, or larger than one of its name can be.

    Raises:
        ValueError, OSError: says so.
    """
    try:
        with open_regular(path) as file:
            size = fstat(file.fileno()).st_size
    except OSError as error:
        raise OSError(f"{path} cannot be read: {why(error)}") from None
    if size > _LARGEST[path.name]:
        raise ValueError(f"{path} has {size:,} bytes, expected at most {_LARGEST[path.name]:,}")
