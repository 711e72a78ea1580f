"""Writes public sets as files in verl's schema: one file for each split, and a manifest of the files."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from hashlib import file_digest
from pathlib import Path
from reprlib import repr as short
from typing import Any

from rollalloc.data._files import is_readable, read_rows
from rollalloc.data.hub import why_unreachable
from rollalloc.data.overlap import NGrams
from rollalloc.data.prompts import check_row, write_prompts
from rollalloc.data.public import FILTERS, INSTRUCTION, SETS, NoAnswer, PublicSplit, to_verl
from rollalloc.data.splits import SUFFIXES, Wanted, files_of_split
from rollalloc.files.atomic import write_text, written
from rollalloc.files.claims import claim_files, refuse_foreign_files
from rollalloc.files.opening import read_text

MANIFEST = "prepared.json"
_SCHEMA = 1  # of the manifest
_ENTRY = {"from": str, "hub": str, "rows": int, "dropped": dict, "sha256": str}  # the manifest's fields for a file
_REPLACES = (
    "replaces"  # digest of the file that the new one replaces; it may still be there if the call was interrupted
)

Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class Prepared:
    """One prepared file.

    Attributes:
        part: the split in the file.
        path: path of the file.
        rows: number of rows.
        dropped: reason -> number of rows left out for it; only reasons that occurred.
        reused: whether the file existed already and is unchanged.
        read: local files from which the rows were read, relative to the local folder; empty for the hub.
        overlap: evaluation set -> number of this training set's questions that share an n-gram with it.
    """

    part: PublicSplit
    path: Path
    rows: int
    dropped: Mapping[str, int]
    reused: bool
    read: Sequence[str] = ()
    overlap: dict[str, int] = field(default_factory=dict)


def prepare(
    names: Sequence[str],
    out: Path,
    *,
    local: Path | None = None,
    force: bool = False,
    ngram: int = 13,
    splits: Mapping[str, str] | None = None,
    system: bool = True,
    leave_out: str | None = None,
    progress: Progress = lambda part, rows: None,
) -> list[Prepared]:
    """Write the files of some public sets, and count the questions that training and evaluation sets share.

    An existing file that matches the manifest is kept, so that an interrupted call can be repeated. A file that is not in
    the manifest is never overwritten; a file that was changed is overwritten only with `force`. Within a set, repeated
    questions are dropped, and questions with contradicting answers are dropped entirely.

    Args:
        names: names of sets, keys of `SETS`.
        out: folder of the files and of `prepared.json`.
        local: folder with the raw data, in the set's own columns: for each set or split a file or a folder of files, named
            after the set, the split, or the set's name on the hub. In a folder, `splits.files_of_split` finds the files of
            the split. None: read from the Hugging Face hub, with `datasets`.
        force: write existing files again.
        ngram: number of consecutive words that two questions must share to count as overlapping, at least 1.
        splits: name of a set or of its file -> the split to take from its local folder, for folders whose file names do
            not tell.
        system: write a system message for each prompt, which is empty unless the set has its own. False: write none, for
            models whose chat template refuses system messages.
        leave_out: name of a filter of training questions, a key of `FILTERS`; evaluation sets stay complete. None: none.
        progress: called from time to time with the split's name and the number of rows read.

    Raises:
        ValueError: a set or filter is unknown, a filter leaves no row or there is no training set for it, `ngram` is below
            1, the manifest is not valid, a row lacks the set's columns, or the names of local files do not tell their split.
        FileExistsError: a file may not be overwritten; nothing was written.
        FileNotFoundError: a set is not in the local folder.
        ImportError: `datasets` is missing.
    """
    parts = [part for name in dict.fromkeys(names) for part in _parts(name)]
    if ngram < 1:
        raise ValueError(f"ngram must be at least 1 word, got {ngram}")
    _check_splits(splits or {}, parts, local)
    _check_filter(leave_out, parts)
    sources = {part.name: _local_files(part, local, splits or {}) for part in parts} if local is not None else {}
    manifest = _read_manifest(out)
    paths = {part.name: out / f"{part.name}.parquet" for part in parts}
    for name, path in paths.items():  # before anything is written
        _refuse_foreign(path, manifest.get(name), force)
    files: list[Prepared] = []
    for part in parts:
        path, entry, files_read = paths[part.name], manifest.get(part.name), sources.get(part.name)
        origin = _origin(part, local, files_read, system, leave_out)
        reused = not force and entry is not None and _is_unchanged(path, entry, origin)
        if entry is None or not reused:
            rows, dropped = _verl_rows(part, _source(part, files_read), origin["filter"], progress)
            if not system:
                _leave_out_system(rows)
            entry = _write(path, rows, part.name, origin | {"hub": part.hub, "rows": len(rows), "dropped": dropped})
        files.append(Prepared(part, path, entry["rows"], entry["dropped"], reused, origin["files"] or ()))
    _count_overlap(files, ngram)
    return files


def _origin(
    part: PublicSplit, local: Path | None, files: Sequence[Path] | None, system: bool, leave_out: str | None
) -> dict[str, Any]:
    """The manifest's fields for a file's origin. A file of another origin is written again."""
    origin = {
        "system": system,
        "filter": leave_out if part.use == "train" else None,
        "samples": part.samples if part.samples > 1 else None,
    }
    if local is None or files is None:
        return origin | {"from": "hub", "files": None}
    return origin | {"from": "local", "files": [file.relative_to(local).as_posix() for file in files]}


def _is_unchanged(path: Path, entry: Mapping[str, Any], origin: Mapping[str, Any]) -> bool:
    """Whether a file matches the manifest and has this origin."""
    same = all(entry.get(name) == value for name, value in origin.items())
    return same and _digest(path) == entry["sha256"]


def _leave_out_system(rows: Iterable[dict[str, Any]]) -> None:
    for row in rows:
        row["prompt"] = [message for message in row["prompt"] if message["role"] != "system"]


def _check_splits(splits: Mapping[str, str], parts: Sequence[PublicSplit], local: Path | None) -> None:
    """Refuse choices of splits that would have no effect."""
    known = {name for part in parts for name in (part.original, _set_of(part))}
    if unknown := sorted(set(splits) - known):
        raise ValueError(
            f"--split names {unknown[0]!r}, but this command does not prepare it; name one of {', '.join(sorted(known))}"
        )
    if splits and local is None:
        raise ValueError("--split chooses among local files; add --from-local FOLDER, or leave --split out")


def _check_filter(name: str | None, parts: Sequence[PublicSplit]) -> None:
    """Refuse a filter that does not exist or would do nothing."""
    if name is not None and name not in FILTERS:
        raise ValueError(f"--filter must be one of {', '.join(FILTERS)}, got {name!r}")
    if name is not None and not any(part.use == "train" for part in parts):
        raise ValueError(f"--filter {name} is for training sets, and none is named here; name one, or take it out")


def _parts(name: str) -> tuple[PublicSplit, ...]:
    if name not in SETS:
        near = get_close_matches(name, SETS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"unknown set {name!r}{hint}; there are {', '.join(SETS)}")
    return SETS[name]


# ---------------------------------------------------------------------------------------------------------------- rows


def _verl_rows(
    part: PublicSplit, source: Iterable[tuple[str, Mapping[str, Any]]], leave_out: str | None, progress: Progress
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
            row = to_verl(part, number, problem)
        except NoAnswer:
            dropped["no answer"] += 1
            continue
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            columns = ", ".join(map(str, raw)) if isinstance(raw, Mapping) else short(raw)
            raise ValueError(
                f"{place}: not a row of {part.hub}, it has {columns or 'nothing'} ({type(error).__name__}: {error}); check "
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
            f"--filter {leave_out} leaves no row of {part.name}: {dropped[leave_out]:,} are left out; take the filter "
            "or the set out"
        )
    _make_unique(rows)
    return rows, dict(+dropped)


def _make_unique(rows: Sequence[dict[str, Any]]) -> None:
    """If the set's own indices repeat, replace them by row numbers, since a key must identify one prompt."""
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


def _local_files(part: PublicSplit, local: Path, splits: Mapping[str, str]) -> list[Path]:
    """The local files of a split: one file named after it, or the files of the split in the folder of its set."""
    name = _set_of(part)
    choice = splits.get(part.original, splits.get(name))
    only_split = len(SETS[name]) == 1
    for stem in dict.fromkeys((part.original, name) if only_split else (part.original,)):
        for path in (local / f"{stem}{suffix}" for suffix in SUFFIXES):
            if path.is_file():
                if choice is not None:
                    raise ValueError(f"--split: {path} is one file, without splits to choose from; leave --split out")
                return [path]
    for stem in dict.fromkeys((part.original, name, part.hub, part.hub.rpartition("/")[2])):
        if (local / stem).is_dir():
            return files_of_split(local / stem, Wanted(name, part.split, part.config, choice))
    contents = ", ".join(sorted(path.name for path in local.glob("*"))[:20]) or "nothing"
    raise FileNotFoundError(
        f"{local}: expected {part.original}.parquet or .jsonl, or a folder {name} or {part.hub} with such files, in the "
        f"columns of {part.hub} ({part.split}); found {contents}"
    )


def _set_of(part: PublicSplit) -> str:
    """The name of the set that a split belongs to."""
    return next(name for name, splits in SETS.items() if part.original in {split.original for split in splits})


# --------------------------------------------------------------------------------------------------------------- files


def _count_overlap(files: Sequence[Prepared], ngram: int) -> None:
    """Set each training file's `overlap`."""
    training = [file for file in files if file.part.use == "train"]
    evaluation = [file for file in files if file.part.use == "evaluation"]
    if not (training and evaluation):
        return
    ngrams = {file.part.name: NGrams(_questions(file.path), ngram) for file in evaluation}
    for file in training:
        questions = _questions(file.path)
        for name, grams in ngrams.items():
            file.overlap[name] = len(grams.shared(questions))


def _questions(path: Path) -> list[str]:
    """The last message of each prompt, without the instruction that all prompts share."""
    return [row["prompt"][-1]["content"].removesuffix(INSTRUCTION) for _, row in read_rows(path)]


def _refuse_foreign(path: Path, entry: Mapping[str, Any] | None, force: bool) -> None:
    """Refuse to overwrite a file that rollalloc did not write, or that was changed since."""
    refuse_foreign_files([path])
    if not os.path.lexists(path) or entry is None:
        return
    if not path.is_file():
        raise FileExistsError(f"{path} exists and is not a file; move it away, or choose another --out")
    ours = _digest(path) in (entry["sha256"], entry.get(_REPLACES))
    if not (ours or force) and is_readable(path):
        raise FileExistsError(
            f"{path}: was changed after this command wrote it; move it away, choose another --out, or make it again with "
            "--force"
        )


def _write(path: Path, rows: Sequence[dict[str, Any]], name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Write a file and its entry in the manifest; returns the entry.

    The manifest is written first. If the call is killed in between, the next call recognizes the old file as its own.
    """
    claim_files([path, path.parent / MANIFEST])
    with written(path) as temporary:
        write_prompts(temporary, rows)
        entry = {**entry, "sha256": _digest(temporary), _REPLACES: _digest(path)}
        manifest = {**_read_manifest(path.parent), name: entry}
        write_text(path.parent / MANIFEST, json.dumps({"schema": _SCHEMA, "files": manifest}, indent=2))
    return entry


def _read_manifest(out: Path) -> dict[str, Any]:
    """The manifest's entries by name; empty without a manifest.

    Raises:
        ValueError: the file is not a manifest of this version.
        OSError: it cannot be read.
    """
    path = out / MANIFEST
    if not os.path.lexists(path):
        return {}
    try:
        saved = json.loads(read_text(path))
    except (ValueError, RecursionError):
        saved = None
    files = saved.get("files") if isinstance(saved, dict) and saved.get("schema") == _SCHEMA else None
    if not isinstance(files, dict) or not all(map(_is_entry, files.values())):
        raise ValueError(
            f"{path} is not a manifest of this version of `rollalloc data prepare`, so it is not known which files here may "
            "be overwritten; move it away, or choose another --out"
        )
    return files


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and all(isinstance(entry.get(name), kind) for name, kind in _ENTRY.items())


def _digest(path: Path) -> str | None:
    """SHA-256 of a file; None if there is no file."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
