"""Reader for verl's dumps of training rollouts: `trainer.rollout_data_dir`, one file per step.

`trainer.validation_data_dir` gets files of the same form. Validation rows have a field `reward` equal to `score`; training
rows do not.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rollalloc.files.text import visible
from rollalloc.runs.own import OwnRun, own_run
from rollalloc.runs.verl_run import is_log
from rollalloc.waste.groups import Gathering, Groups, Log, key_of
from rollalloc.waste.readers.shared import (
    Fields,
    Files,
    Format,
    Options,
    by_suffix,
    names,
    number,
    objects,
    said,
    text,
    whole,
)

_OURS = re.compile(r"(g\d+)s\d+r\d+(?:a\d+)?")  # uids of rollalloc's driver: group, stage, first rollout, and a resume
_FIELDS = ("acc", "score")  # fields that may have the reward, the preferred one first


@dataclass(slots=True)
class _Rewards:
    """The values of one field in all rollouts, of which the reader may choose another field in the end.

    Attributes:
        read: the values, in the order of the rollouts; NaN if missing or invalid.
        doubts: counts the invalid values.
    """

    name: str
    read: array[float] = field(default_factory=lambda: array("d"))
    doubts: Log = field(default_factory=lambda: Log(""))

    def add(self, row: Fields, where: str) -> None:
        value = number(row.get(self.name), self.doubts, where, names([self.name]))
        self.read.append(np.nan if value is None else value)

    @property
    def known(self) -> int:
        """Number of rollouts with a value."""
        return int(np.count_nonzero(~np.isnan(self.read)))


def _read(files: Files, log: Log, options: Options) -> None:
    gathering, seen = Gathering(), set[int]()
    fields = [_Rewards(name) for name in ((options.reward,) if options.reward else _FIELDS)]
    repeated = validation = 0
    logs = [file for file in files.paths if is_log(file)]
    for file in files:
        if file in logs:
            continue
        # An agent's session may have several outputs, each with its own line. The last line has the rollout's result.
        latest: _Row | None = None
        step_of_file = int(file.stem) if file.stem.isdecimal() else None
        for where, row in objects(file, log):
            if row.get("input") is None or not any(each.name in row for each in fields):
                wanted = names((each.name for each in fields), " or ")
                log.reject(where, f"expected the fields input and {wanted}, found {names(row)}")
                continue
            if not options.all_rows and "reward" in row and row["reward"] == row.get("score"):
                validation += 1
                continue
            if (name := _id(row)) is not None:
                if (mark := hash((str(file), name))) in seen:  # another file may have other rollouts with this id
                    repeated += 1
                    continue
                seen.add(mark)
            now = _Row(row, where, *_ids(row), whole(row.get("step", step_of_file), log, where, "step"))
            if latest is not None and (now.session is None or now[2:4] != latest[2:4]):
                _add(gathering, latest, fields)
            latest = now
        if latest is not None:
            _add(gathering, latest, fields)
        gathering.close()
    log.complete = False
    log.runs = _own_runs(files.paths, logs)
    # One field for the whole log, because values of two fields cannot be compared.
    used = max(fields, key=lambda each: each.known)
    groups = gathering.groups()
    log.groups = _with(groups, used)
    log.odd, log.first_odd = log.odd + used.doubts.odd, log.first_odd or used.doubts.first_odd
    if validation and not len(groups):
        folder = visible(str(files.paths[0].parent))
        raise ValueError(
            f"{folder}: expected rollouts of training, but all {validation:,} rows are of validation "
            "(they have the field reward, equal to score); give the folder of trainer.rollout_data_dir, or count them with "
            "--rows all"
        )
    log.notes += _notes(groups, fields, used)
    if validation:
        log.notes.append(
            f"{validation:,} rows are of validation and were left out (they have the field reward, equal to score); "
            "--rows all counts them"
        )
    if repeated:
        log.notes.append(f"{repeated:,} lines repeat the uid of another and were left out")
    log.notes.append(
        "verl dumps what it trains on: groups left out by algorithm.filter_groups or by a recipe of rollalloc are missing, "
        "so the true waste may be higher"
    )


def _own_runs(files: Sequence[Path], logs: Sequence[Path]) -> list[OwnRun]:
    """The run of rollalloc that wrote the dumps, if its checkpoints or its log are among them or in their parent folder.

    After a resume, verl writes a new log. The newest one has the totals of the whole run.
    """
    folders = dict.fromkeys(place for file in files for place in (file.parent, file.parent.parent))
    found = [run for folder in folders for file in logs or (None,) if (run := own_run(folder, file)) is not None]
    return [max(found, key=lambda run: (run.paid, run.attempts_N is not None))] if found else []


def _with(groups: Groups, used: _Rewards) -> Groups:
    """The groups, whose rewards are indices of rollouts, with the values of a field as rewards."""
    return replace(groups, rewards_R=np.asarray(used.read)[groups.rewards_R.astype(np.int64)])


def _notes(groups: Groups, fields: Sequence[_Rewards], used: _Rewards) -> list[str]:
    """Notes on the reward field: the one that was used, and what another field tells."""
    rollouts = len(groups.rewards_R)
    lengths = "lengths are in characters of the output, because verl logs no tokens"
    notes = [f"reward: {names([used.name])} ({used.known:,} of {rollouts:,} rollouts); {lengths}"]
    acc, *others = fields
    if used is not acc and acc.known + acc.doubts.odd:
        notes.append(
            f"acc is missing or invalid in {rollouts - acc.known:,} of {rollouts:,} rollouts, so score counts in all of "
            "them; --reward acc counts by acc"
        )
    # A session's last line counts, so a field's values are those of the rollouts, and groups can be compared by them.
    if used is acc and others:
        by_acc, by_score = _with(groups, acc), _with(groups, others[0])
        apart_V = by_score.mixed_V & ~by_acc.mixed_V
        if apart := int(apart_V.sum()):
            notes.append(
                f"in {apart:,} of {len(groups):,} groups, acc is equal but score differs. verl trains on score, so these "
                "groups gave a learning signal; --reward score counts by it"
            )
    return notes


class _Row(NamedTuple):
    """A line, with the group and session that it belongs to."""

    row: Fields
    where: str
    group: str
    session: str | None
    prompt: str
    step: int | None


def _add(gathering: Gathering, rollout: _Row, fields: Sequence[_Rewards]) -> None:
    """Add a rollout. Its reward is its index, until a field is chosen."""
    row = rollout.row
    at = float(len(fields[0].read))
    for each in fields:
        each.add(row, rollout.where)
    asked, answered = text(row["input"]), said(row.get("output"))
    gathering.add(rollout.group, rollout.prompt, rollout.step, at, asked=asked, answered=answered)


def _id(row: Fields) -> str | None:
    """The id of a line; None if it has none. An id may be 0."""
    return next((str(row[name]) for name in ("uid", "request_id") if row.get(name) is not None), None)


def _ids(row: Fields) -> tuple[str, str | None, str]:
    """Group, session and prompt of a row. The older trainer logs no uid; its group is the prompt in a step."""
    prompt = key_of(text(row["input"]))
    if row.get("uid") is None:
        return f"{prompt} {row.get('step')}", None, prompt
    return *group_and_session(str(row["uid"])), prompt


def group_and_session(uid: str) -> tuple[str, str | None]:
    """The group and the session of a logged uid, which is `{uid}_{session}_{output}` in the V1 trainer.

    Under a recipe of rollalloc, a group may have several such uids: one for each stage, and for each part of an order. All
    begin with the group's number.
    """
    session, _, output = uid.rpartition("_")
    group, _, number = session.rpartition("_")
    if not (group and number.isdecimal() and output.isdecimal()):
        return uid, None
    ours = _OURS.fullmatch(group)
    return (group if ours is None else ours[1]), session


FORMAT = Format(
    "JSON lines of trainer.rollout_data_dir with input and score",
    partial(by_suffix, suffix=".jsonl"),
    _read,
    lambda line: "input" in line and "output" in line,
    ("reward", "rows"),
)
