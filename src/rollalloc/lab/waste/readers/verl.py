"""Reader for verl's dumps of training rollouts: `trainer.rollout_data_dir`, one file per step.

`trainer.validation_data_dir` gets files of the same form. Validation rows have a field `reward` equal to `score`; training
rows do not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollalloc.files.text import visible
from rollalloc.lab.waste.groups import Gathering, Log, key_of
from rollalloc.lab.waste.readers.shared import (
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


def _read(files: Files, log: Log, options: Options) -> None:
    gathering, used, seen = Gathering(), Counter[str](), set[int]()
    spreads: dict[tuple[Any, Any], _Spread] = {}  # by step and group
    repeated = validation = 0
    for file in files:
        # An agent's session may have several outputs, each with its own line. The last line has the rollout's result.
        latest: tuple[Any, ...] | None = None
        step_of_file = int(file.stem) if file.stem.isdecimal() else None
        for where, row in objects(file, log):
            field = options.reward or ("acc" if row.get("acc") is not None else "score")
            if row.get("input") is None or field not in row:
                log.reject(where, f"expected the fields input and {field}, found {names(row)}")
                continue
            if not options.all_rows and "reward" in row and row["reward"] == row.get("score"):
                validation += 1
                continue
            if (name := row.get("uid") or row.get("request_id")) is not None:
                if (mark := hash((file.stem, str(name)))) in seen:
                    repeated += 1
                    continue
                seen.add(mark)
            used[field] += 1
            asked = text(row["input"])
            prompt = key_of(asked)
            group, session = _ids(row, prompt)
            step = whole(row.get("step", step_of_file), log, where, "step")
            score = number(row[field], log, where, field)
            trained = row.get("score") if field == "acc" and options.reward is None else None
            now = (group, session, prompt, step, score, asked, said(row.get("output")), trained)
            if latest is not None and (session is None or now[:2] != latest[:2]):
                _add(gathering, latest, spreads)
            latest = now
        if latest is not None:
            _add(gathering, latest, spreads)
        gathering.close()
    log.groups = gathering.groups()
    log.complete = False
    if validation and not len(log.groups):
        folder = visible(str(files.paths[0].parent))
        raise ValueError(
            f"{folder}: expected rollouts of training, but all {validation:,} rows are of validation "
            "(they have the field reward, equal to score); give the folder of trainer.rollout_data_dir, or count them with "
            "--rows all"
        )
    fields = " and ".join(f"{names([name])} ({rows:,} rows)" for name, rows in used.items())
    log.notes.append(f"reward: {fields}; lengths are in characters of the output, because verl logs no tokens")
    if apart := sum(each.only_trained for each in spreads.values()):
        log.notes.append(
            f"in {apart:,} of {len(spreads):,} groups, acc is equal but score differs. verl trains on score, so these "
            "groups gave a learning signal; --reward score counts by it"
        )
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


@dataclass(slots=True)
class _Spread:
    """Whether the values of `acc` and of `score` differ within a group."""

    first: tuple[Any, Any]
    acc: bool = False
    score: bool = False

    @property
    def only_trained(self) -> bool:
        """Whether the score, on which verl trains, differs and `acc` does not."""
        return self.score and not self.acc


def _add(gathering: Gathering, rollout: tuple[Any, ...], spreads: dict[tuple[Any, Any], _Spread]) -> None:
    group, _, prompt, step, reward, asked, answered, trained = rollout
    gathering.add(group, prompt, step, reward, asked=asked, answered=answered)
    if trained is not None:
        spread = spreads.setdefault((step, group), _Spread((reward, trained)))
        spread.acc |= reward != spread.first[0]
        spread.score |= trained != spread.first[1]


def _ids(row: Fields, prompt: str) -> tuple[str, str | None]:
    """Group and session of a row. The uid of the V1 trainer is `{uid}_{session}_{output}`; the older trainer logs none."""
    uid = row.get("uid")
    if not isinstance(uid, str):
        return prompt, None
    parts = uid.rsplit("_", 2)
    return (parts[0], parts[1]) if len(parts) == 3 and parts[1].isdecimal() and parts[2].isdecimal() else (uid, None)


FORMAT = Format(
    "JSON lines of trainer.rollout_data_dir with input and score",
    partial(by_suffix, suffix=".jsonl"),
    _read,
    lambda line: "input" in line and "output" in line,
    ("reward", "rows"),
)
