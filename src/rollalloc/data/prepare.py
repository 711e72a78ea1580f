"""From public sets to files in verl's schema: one a split, written whole or not at all, with a manifest beside them."""

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
from rollalloc.data.filters import FILTERS
from rollalloc.data.hub import why_unreachable
from rollalloc.data.overlap import NGrams
from rollalloc.data.prompts import check_row, write_prompts
from rollalloc.data.public import INSTRUCTION, SETS, NoAnswer, PublicSplit, to_verl
from rollalloc.data.splits import SUFFIXES, Wanted, files_of_split
from rollalloc.files.atomic import write_text, written
from rollalloc.files.claims import claim_files, refuse_foreign_files
from rollalloc.files.opening import read_text

MANIFEST = "prepared.json"
_SCHEMA = 1  # of what is written
_ENTRY = {"from": str, "hub": str, "rows": int, "dropped": dict, "sha256": str}  # what the manifest says of a file
_REPLACES = "replaces"  # the digest of the file that stood there before; it may still, if the call was cut short

Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class Prepared:
    """One file.

    Attributes:
        part: the split that it holds.
        path: of the file.
        rows: in it.
        dropped: rows left out, by reason; only reasons that occurred.
        reused: it was there already, as it was written.
        read: local files that its rows are from, relative to the local folder; empty for the hub.
        overlap: by evaluation set, how many of this training set's questions share an n-gram with it.
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
    """Write the files of some public sets, and count what training and evaluation sets among them share.

    A file that stands there as the manifest says is not made again, so that a call that was cut short may be repeated.
    One that the manifest does not know is never overwritten, one that was changed since only with `force`.
    Within a set the first of two rows with one question stays; a question with two different answers goes.

    Args:
        names: of sets, keys of `SETS`.
        out: folder of the files and of `prepared.json`.
        local: folder with a file or a folder of files, in the set's own columns, named after each set or split, or as the
            set is on the hub. Of a folder those of the split are taken, as `splits.files_of_split` finds them. None: from
            the Hugging Face hub, with `datasets`.
        force: make files again that are there.
        ngram: words that two questions must share to be counted as overlapping, at least 1.
        splits: the split to take from the local folder of a set, by name of the set or of its file, where the names of its
            files do not say it.
        system: write the system message of each prompt, an empty one unless the set brings its own; False: write none, for
            models whose chat template refuses system messages.
        leave_out: name of the filter of training questions, a key of `FILTERS`; evaluation sets stay whole. None: none.
        progress: called with the split's name and the rows read so far, now and then.

    Raises:
        ValueError: an unknown set or filter, a filter that leaves no row or has no training set, n-grams of no words, a
            manifest that is none, a row without the set's columns, or local files that do not say which split they are.
        FileExistsError: a file is in the way; nothing was made.
        FileNotFoundError: a set that is not in the local folder.
        ImportError: `datasets` is missing.
    """
    parts = [part for name in dict.fromkeys(names) for part in _parts(name)]
    if ngram < 1:
        raise ValueError(f"n must be at least 1 word, got {ngram}")
    _check_splits(splits or {}, parts, local)
    _check_filter(leave_out, parts)
    sources = {part.name: _local_files(part, local, splits or {}) for part in parts} if local is not None else {}
    manifest = _read_manifest(out)
    paths = {part.name: out / f"{part.name}.parquet" for part in parts}
    for name, path in paths.items():  # before anything is made
        _refuse_foreign(path, manifest.get(name), force)
    files: list[Prepared] = []
    for part in parts:
        path, entry, files_read = paths[part.name], manifest.get(part.name), sources.get(part.name)
        how = _how(part, local, files_read, system, leave_out)
        reused = not force and entry is not None and _is_as_made(path, entry, how)
        if entry is None or not reused:
            rows, dropped = _verl_rows(part, _source(part, files_read), how["filter"], progress)
            if not system:
                _leave_out_system(rows)
            entry = _write(path, rows, part.name, how | {"hub": part.hub, "rows": len(rows), "dropped": dropped})
        files.append(Prepared(part, path, entry["rows"], entry["dropped"], reused, how["files"] or ()))
    _count_overlap(files, ngram)
    return files


def _how(
    part: PublicSplit, local: Path | None, files: Sequence[Path] | None, system: bool, leave_out: str | None
) -> dict[str, Any]:
    """What the manifest says of how a file was made; one that was made otherwise is made again."""
    how = {
        "system": system,
        "filter": leave_out if part.use == "train" else None,
        "samples": part.samples if part.samples > 1 else None,
    }
    if local is None or files is None:
        return how | {"from": "hub", "files": None}
    return how | {"from": "local", "files": [file.relative_to(local).as_posix() for file in files]}


def _is_as_made(path: Path, entry: Mapping[str, Any], how: Mapping[str, Any]) -> bool:
    """Whether a file is as the manifest says, and would be made in the same way now."""
    same = all(entry.get(name) == value for name, value in how.items())
    return same and _digest(path) == entry["sha256"]


def _leave_out_system(rows: Iterable[dict[str, Any]]) -> None:
    for row in rows:
        row["prompt"] = [message for message in row["prompt"] if message["role"] != "system"]


def _check_splits(splits: Mapping[str, str], parts: Sequence[PublicSplit], local: Path | None) -> None:
    """Refuse choices of splits that would do nothing."""
    known = {name for part in parts for name in (part.original, _set_of(part))}
    if unknown := sorted(set(splits) - known):
        raise ValueError(
            f"--split names {unknown[0]!r}, which is not prepared here; name one of {', '.join(sorted(known))}"
        )
    if splits and local is None:
        raise ValueError("--split chooses among local files; give --from-local FOLDER as well, or take it out")


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
    """The set's rows in verl's schema, and how many were left out for what."""
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
            found = ", ".join(map(str, raw)) if isinstance(raw, Mapping) else short(raw)
            raise ValueError(
                f"{place}: not a row of {part.hub}, it has {found or 'nothing'} ({type(error).__name__}: {error}); check "
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
    """Give each row of a set whose own indices repeat its number instead: a key is to name one prompt."""
    infos = [row["extra_info"] for row in rows]
    if len({info["index"] for info in infos}) < len(infos):
        for number, info in enumerate(infos):
            info["index"] = f"row-{number}"


def _source(part: PublicSplit, files: Sequence[Path] | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each row of the set, with its place."""
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
            f"there is no copy of {part.hub} on this machine, and the hub cannot be asked ({unreachable}); give a folder "
            "with its files (--from-local), or try again where there is a network"
        ) from error
    yield from ((f"{part.hub}[{number}]", row) for number, row in enumerate(rows))


def _local_files(part: PublicSplit, local: Path, splits: Mapping[str, str]) -> list[Path]:
    """The files of a split: one that is named after it, or those of it in the folder of its set."""
    name = _set_of(part)
    choice = splits.get(part.original, splits.get(name))
    alone = len(SETS[name]) == 1
    for stem in dict.fromkeys((part.original, name) if alone else (part.original,)):
        for path in (local / f"{stem}{suffix}" for suffix in SUFFIXES):
            if path.is_file():
                if choice is not None:
                    raise ValueError(f"--split: {path} is one file and has no splits to choose from; take --split out")
                return [path]
    for stem in dict.fromkeys((part.original, name, part.hub, part.hub.rpartition("/")[2])):
        if (local / stem).is_dir():
            return files_of_split(local / stem, Wanted(name, part.split, part.config, choice))
    there = ", ".join(sorted(path.name for path in local.glob("*"))[:20]) or "nothing"
    raise FileNotFoundError(
        f"{local}: expected {part.original}.parquet or .jsonl, or a folder {name} or {part.hub} with such files, in the "
        f"columns of {part.hub} ({part.split}); found {there}"
    )


def _set_of(part: PublicSplit) -> str:
    """The name of the set that a split belongs to."""
    return next(name for name, parts in SETS.items() if part.original in {each.original for each in parts})


# --------------------------------------------------------------------------------------------------------------- files


def _count_overlap(files: Sequence[Prepared], ngram: int) -> None:
    """Set each training file's `overlap`."""
    training = [file for file in files if file.part.use == "train"]
    evaluation = [file for file in files if file.part.use == "evaluation"]
    if not (training and evaluation):
        return
    remembered = {file.part.name: NGrams(_questions(file.path), ngram) for file in evaluation}
    for file in training:
        questions = _questions(file.path)
        for name, grams in remembered.items():
            file.overlap[name] = len(grams.shared(questions))


def _questions(path: Path) -> list[str]:
    """Last message of each prompt, without the instruction that all have in common."""
    return [row["prompt"][-1]["content"].removesuffix(INSTRUCTION) for _, row in read_rows(path)]


def _refuse_foreign(path: Path, entry: Mapping[str, Any] | None, force: bool) -> None:
    """Refuse to write where something stands that rollalloc did not write, or that was changed since."""
    refuse_foreign_files([path])
    if not os.path.lexists(path) or entry is None:
        return
    if not path.is_file():
        raise FileExistsError(f"{path}: expected a file, it is something else; move it away, or choose another --out")
    ours = _digest(path) in (entry["sha256"], entry.get(_REPLACES))
    if not (ours or force) and is_readable(path):
        raise FileExistsError(
            f"{path}: was changed after this command wrote it; move it away, choose another --out, or make it again with "
            "--force"
        )


def _write(path: Path, rows: Sequence[dict[str, Any]], name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Write a file and what the manifest says of it, which is returned.

    The manifest comes first: a call that is killed in between leaves a file that is known, not one that is in the way.
    """
    claim_files([path, path.parent / MANIFEST])
    with written(path) as beside:
        write_prompts(beside, rows)
        entry = {**entry, "sha256": _digest(beside), _REPLACES: _digest(path)}
        manifest = {**_read_manifest(path.parent), name: entry}
        write_text(path.parent / MANIFEST, json.dumps({"schema": _SCHEMA, "files": manifest}, indent=2))
    return entry


def _read_manifest(out: Path) -> dict[str, Any]:
    """What was written there, by name.

    Raises:
        ValueError: a file of that name which is not a manifest of this version.
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
            f"{path}: not what this version of `rollalloc data prepare` writes under that name, so nothing beside it is "
            "known to be its own; move it away, or choose another --out"
        )
    return files


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and all(isinstance(entry.get(name), kind) for name, kind in _ENTRY.items())


def _digest(path: Path) -> str | None:
    """SHA-256 of a file; None where there is none."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
