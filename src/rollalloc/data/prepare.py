"""Writes public sets as files in verl's schema: one file for each split."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any, get_args

from rollalloc.data._files import read_rows
from rollalloc.data.hub import why_unreachable
from rollalloc.data.prompts import check_row, write_prompts
from rollalloc.data.public import FILTERS, SETS, Ask, NoAnswer, PublicSplit, to_verl
from rollalloc.files.claims import claim_files, refuse_foreign_files
from rollalloc.files.text import error_text
from rollalloc.named import near

_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".tsv")

Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class Prepared:
    """One prepared file.

    Attributes:
        part: the split in the file.
        path: path of the file.
        rows: number of rows.
        dropped: number of rows left out, by reason; only reasons that occurred.
        read: local files from which the rows were read, relative to the local folder. Empty if the hub was read.
    """

    part: PublicSplit
    path: Path
    rows: int
    dropped: Mapping[str, int]
    read: Sequence[str] = ()


def prepare(
    names: Sequence[str],
    out: Path,
    *,
    local: Path | None = None,
    overwrite: bool = False,
    system: bool = True,
    leave_out: str | None = None,
    ask: Ask = "box",
    progress: Progress = lambda part, rows: None,
) -> list[Prepared]:
    """Write the files of some public sets.

    Within a set, repeated questions are written once. Questions with contradicting answers are left out.

    Args:
        names: names of sets, keys of `SETS`.
        out: folder of the files.
        local: folder with the original data, in the columns of the hub. For each split, it contains a file with the split's
            name, or a subfolder with the name of the split, of the set, or of the data set on the hub. `datasets` finds the
            split's files in the subfolder. None: read from the Hugging Face hub.
        overwrite: True: replace files that an earlier call wrote. Other files are never replaced.
        system: True: write a system message for each prompt, empty unless the set has its own. False: write none, for
            models whose chat template refuses system messages.
        leave_out: name of a filter for training questions, a key of `FILTERS`. It does not change evaluation sets. None: no
            filter.
        ask: what prompts ask for: "box", the final answer in a box; "tags", the reasoning and the answer in tags, in a
            system message, for the rewards of `rollalloc.rewards.pods`.
        progress: called from time to time with the split's name and the number of rows read.

    Raises:
        ValueError: a set, a filter or `ask` is unknown; a filter leaves no row, or there is no training set to filter; a set
            has prompts of its own, or no system message is allowed, and `ask` is "tags"; a row lacks the set's columns; or
            it is unclear which local files belong to the split.
        FileExistsError: a file may not be overwritten; nothing was written.
        FileNotFoundError: a set is not in the local folder.
        ImportError: `datasets` is missing.
    """
    parts = [part for name in dict.fromkeys(names) for part in _parts(name)]
    _check_filter(leave_out, parts)
    _check_ask(ask, parts, system)
    paths = {part.name: out / f"{part.name}.parquet" for part in parts}
    refuse_foreign_files(paths.values())  # before anything is written
    if not overwrite and (there := [str(path) for path in paths.values() if os.path.lexists(path)]):
        raise FileExistsError(f"{', '.join(there)} exists already; replace it (--overwrite), or give another --out")
    sources = {part.name: _local_files(part, local) for part in parts} if local is not None else {}
    files: list[Prepared] = []
    for part in parts:
        path, read = paths[part.name], sources.get(part.name)
        of_part = leave_out if part.use == "train" else None
        rows, dropped = _verl_rows(part, _source(part, read), of_part, ask, progress)
        if not system:
            for row in rows:
                row["prompt"] = [message for message in row["prompt"] if message["role"] != "system"]
        claim_files([path])
        write_prompts(path, rows)
        files.append(Prepared(part, path, len(rows), dropped, [os.path.relpath(file, local) for file in read or ()]))
    return files


def _check_filter(name: str | None, parts: Sequence[PublicSplit]) -> None:
    """Raise an error if the filter does not exist or would do nothing."""
    if name is not None and name not in FILTERS:
        raise ValueError(f"--filter must be one of {', '.join(FILTERS)}, got {name!r}")
    if name is not None and not any(part.use == "train" for part in parts):
        raise ValueError(
            f"--filter {name} is for training sets, and no training set is given; add one, or leave --filter out"
        )


def _check_ask(ask: Ask, parts: Sequence[PublicSplit], system: bool) -> None:
    """Raise an error if the prompts cannot ask for this."""
    if ask not in get_args(Ask):
        raise ValueError(f"--ask must be one of {', '.join(get_args(Ask))}, got {ask!r}")
    own = [part.name for part in parts if part.own_prompts]
    if ask == "tags" and own:
        raise ValueError(f"--ask tags: {', '.join(own)} has prompts of its own; prepare it without --ask")
    if ask == "tags" and not system:
        raise ValueError("--ask tags asks in a system message; leave --no-system out")


def _parts(name: str) -> tuple[PublicSplit, ...]:
    if name not in SETS:
        raise ValueError(f"unknown set {name!r}{near(name, SETS)}; there are {', '.join(SETS)}")
    return SETS[name]


# ---------------------------------------------------------------------------------------------------------------- rows


def _verl_rows(
    part: PublicSplit,
    source: Iterable[tuple[str, Mapping[str, Any]]],
    leave_out: str | None,
    ask: Ask,
    progress: Progress,
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The set's rows in verl's schema, and the number of rows left out for each reason."""
    kept: dict[str, dict[str, Any]] = {}  # by question
    contradicted: set[str] = set()
    dropped: Counter[str] = Counter()
    for number, (place, raw) in enumerate(source):
        if number % 1000 == 0:
            progress(part.name, number)
        try:
            problem = part.read(raw)
            question = " ".join(problem.question.split())
            row = to_verl(part, number, problem, ask)
        except NoAnswer:
            dropped["no answer"] += 1
            continue
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            columns = ", ".join(map(str, raw)) if isinstance(raw, Mapping) else short(raw)
            raise ValueError(
                f"{place}: not a row of {part.hub}, it has {columns or 'nothing'} ({error_text(error)}); check "
                "that the file belongs to the set"
            ) from error
        check_row(place, row)
        if leave_out is not None and FILTERS[leave_out](problem.answer):
            dropped[leave_out] += 1
            continue
        if question not in kept:
            kept[question] = row
        elif kept[question]["reward_model"] == row["reward_model"]:
            dropped["duplicate"] += 1
        else:
            dropped["contradicted"] += 1
            contradicted.add(question)
    dropped["contradicted"] += len(contradicted)
    rows = [row for question, row in kept.items() if question not in contradicted]
    if leave_out is not None and not rows:
        raise ValueError(
            f"no row of {part.name} is left, because --filter {leave_out} leaves out {dropped[leave_out]:,} rows; remove "
            "the filter, or this set"
        )
    _make_unique(rows)
    return rows, dict(+dropped)


def _make_unique(rows: Sequence[dict[str, Any]]) -> None:
    """If the set's own indices repeat, replace them by row numbers, because a key must identify one prompt."""
    infos = [row["extra_info"] for row in rows]
    if len({info["index"] for info in infos}) < len(infos):
        for number, info in enumerate(infos):
            info["index"] = f"row-{number}"


def _source(part: PublicSplit, files: Sequence[Path] | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows of the set, each with its place for error messages."""
    if files is not None:
        for file in files:
            yield from read_rows(file)
        return
    try:
        from datasets import config, load_dataset
    except ImportError as error:
        raise ImportError(
            "public sets are read with datasets: pip install 'rollalloc[data]', or use --from-local"
        ) from error
    unreachable = why_unreachable()
    if unreachable is not None:
        config.HF_HUB_OFFLINE = True
    try:
        rows: Any = load_dataset(part.hub, part.config, split=part.split)
    except OSError as error:
        if unreachable is None:
            raise
        raise ConnectionError(
            f"there is no copy of {part.hub} on this machine, and the hub cannot be reached ({unreachable}); give a folder "
            "with its files (--from-local), or try again with a network connection"
        ) from error
    yield from ((f"{part.hub}[{number}]", row) for number, row in enumerate(rows))


def _local_files(part: PublicSplit, local: Path) -> list[Path]:
    """The local files of a split: one file with the split's name, or the files that `datasets` finds in a subfolder."""
    name = _set_of(part)
    only_split = len(SETS[name]) == 1
    for stem in dict.fromkeys((part.original, name) if only_split else (part.original,)):
        for path in (local / f"{stem}{suffix}" for suffix in _SUFFIXES):
            if path.is_file():
                return [path]
    for stem in dict.fromkeys((part.original, name, part.hub, part.hub.rpartition("/")[2])):
        if (local / stem).is_dir():
            return _files_of_split(local / stem, part)
    contents = ", ".join(sorted(path.name for path in local.glob("*"))[:20]) or "nothing"
    raise FileNotFoundError(
        f"{local}: expected {part.original}.parquet or .jsonl, or a folder {name} or {part.hub} with such files, in the "
        f"columns of {part.hub} ({part.split}); found {contents}"
    )


def _files_of_split(folder: Path, part: PublicSplit) -> list[Path]:
    """The files of a split in a folder.

    As on the hub, `configs:` in the folder's README.md, or else the file names, say which files belong to the split.

    Raises:
        ValueError: there is no such split or configuration. Other files are not used, because they may contain held-out
            questions.
        ImportError: `datasets` is missing.
    """
    try:
        from datasets import load_dataset_builder
    except ImportError as error:
        raise ImportError(f"files in {folder} are found with datasets: pip install 'rollalloc[data]'") from error
    try:
        splits: Any = load_dataset_builder(str(folder.absolute()), part.config).config.data_files
    except Exception as error:  # the type depends on the version of datasets
        why = str(error).partition("\n")[0]
    else:
        if part.split in splits:
            return [Path(file) for file in splits[part.split]]
        why = f"its splits are {', '.join(map(str, splits))}"
    raise ValueError(
        f"{folder}: expected the files of the {part.split} split of {part.hub}, but {why}; put them into one file, "
        f"{part.original}.parquet or .jsonl, beside this folder"
    )


def _set_of(part: PublicSplit) -> str:
    """The name of the set that a split belongs to."""
    return next(name for name, splits in SETS.items() if part.original in {split.original for split in splits})
