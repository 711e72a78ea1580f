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
from typing import Any

from rollalloc.data._files import read_rows
from rollalloc.data.overlap import NGrams
from rollalloc.data.prompts import write_prompts
from rollalloc.data.public import INSTRUCTION, SETS, NoAnswer, Part, to_verl

MANIFEST = "prepared.json"
_SCHEMA = 1  # of what is written; another one is prepared again
_UNDER_WAY = ""  # the digest of a file that is being written
_SUFFIXES = (".parquet", ".jsonl", ".json")

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
        overlap: by evaluation set, how many of this training set's questions share an n-gram with it.
    """

    part: Part
    path: Path
    rows: int
    dropped: Mapping[str, int]
    reused: bool
    overlap: dict[str, int] = field(default_factory=dict)


def prepare(
    names: Sequence[str],
    out: Path,
    *,
    local: Path | None = None,
    force: bool = False,
    ngram: int = 13,
    progress: Progress = lambda part, rows: None,
) -> list[Prepared]:
    """Write the files of some public sets, and count what training and evaluation sets among them share.

    A file that stands there as the manifest says is not made again, so that a call that was cut short may be repeated.
    Within a set the first of two rows with one question stays; a question with two different answers goes.

    Args:
        names: of sets, keys of `SETS`.
        out: folder of the files and of `prepared.json`.
        local: folder with a file or a folder of files, parquet or JSONL, named after each set or split, in the set's own
            columns; None: from the Hugging Face hub, with `datasets`.
        force: make files again that are there.
        ngram: words that two questions must share to be counted as overlapping, at least 1.
        progress: called with the split's name and the rows read so far, now and then.

    Raises:
        ValueError: an unknown set, or a row without the set's columns.
        FileNotFoundError: a set that is not in the local folder.
        FileExistsError: a file of a set's name that was not written here, or was changed since and `force` is not given.
        ImportError: `datasets` is missing.
    """
    parts = [part for name in dict.fromkeys(names) for part in _parts(name)]
    out.mkdir(parents=True, exist_ok=True)
    manifest = _read_manifest(out)
    files: list[Prepared] = []
    for part in parts:
        path, origin = out / f"{part.name}.parquet", "hub" if local is None else "local"
        entry = manifest.get(part.name)
        reused = not force and entry is not None and entry["from"] == origin and _as_written(path, entry)
        if entry is None or not reused:
            _refuse_foreign(path, entry, force)
            rows, dropped = _verl_rows(part, _source(part, local), progress)
            manifest[part.name] = {"from": origin, "hub": part.hub, "rows": 0, "dropped": {}, "sha256": _UNDER_WAY}
            _write_manifest(out, manifest)  # before the file: a call that is cut short leaves none that nobody claims
            _write_whole(path, rows)
            entry = {"from": origin, "hub": part.hub, "rows": len(rows), "dropped": dropped, "sha256": _sha256(path)}
            manifest[part.name] = entry
            _write_manifest(out, manifest)
        files.append(Prepared(part, path, entry["rows"], entry["dropped"], reused))
    _count_overlap(files, ngram)
    return files


def _parts(name: str) -> tuple[Part, ...]:
    if name not in SETS:
        near = get_close_matches(name, SETS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"unknown set {name!r}{hint}; there are {', '.join(SETS)}")
    return SETS[name]


# ---------------------------------------------------------------------------------------------------------------- rows


def _verl_rows(
    part: Part, source: Iterable[tuple[str, Mapping[str, Any]]], progress: Progress
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
        except NoAnswer:
            dropped["no answer"] += 1
            continue
        except (KeyError, TypeError, ValueError) as error:
            columns = ", ".join(map(str, raw)) or "nothing"
            raise ValueError(
                f"{place}: not a row of {part.hub}, it has {columns} ({type(error).__name__}: {error}); check that the "
                "file belongs to the set"
            ) from error
        question = " ".join(problem.question.split())
        row = to_verl(part, number, problem)
        if question not in kept:
            kept[question] = row
        elif kept[question]["reward_model"] == row["reward_model"]:
            dropped["duplicate"] += 1
        else:
            dropped["contradicted"] += 1
            contradicted.add(question)
    dropped["contradicted"] += len(contradicted)
    rows = [row for question, row in kept.items() if question not in contradicted]
    _make_unique(rows)
    return rows, dict(+dropped)


def _make_unique(rows: Sequence[dict[str, Any]]) -> None:
    """Give each row of a set whose own indices repeat its number instead: a key is to name one prompt."""
    infos = [row["extra_info"] for row in rows]
    if len({info["index"] for info in infos}) < len(infos):
        for number, info in enumerate(infos):
            info["index"] = f"row-{number}"


def _source(part: Part, local: Path | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each row of the set, with its place."""
    if local is not None:
        for file in _local_files(part, local):
            yield from read_rows(file)
        return
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            "public sets are read with datasets: pip install 'rollalloc[data]', or use --from-local"
        ) from error
    rows: Any = load_dataset(part.hub, part.config, split=part.split)
    yield from ((f"{part.hub}[{number}]", row) for number, row in enumerate(rows))


def _local_files(part: Part, folder: Path) -> list[Path]:
    """Files of a split: named after it, or after its set; or all of a folder so named, those of the split if it says so."""
    name = next(name for name, parts in SETS.items() if part in parts)
    for stem in dict.fromkeys((part.name, name) if len(SETS[name]) == 1 else (part.name,)):
        for path in (folder / f"{stem}{suffix}" for suffix in _SUFFIXES):
            if path.is_file():
                return [path]
        inside = sorted(path for path in (folder / stem).rglob("*") if path.suffix in _SUFFIXES)
        if inside:
            return inside
    raise FileNotFoundError(
        f"{folder}: expected {part.name}.parquet or .jsonl, or a folder {part.name} with such files, in the columns of "
        f"{part.hub} ({part.split}); found {', '.join(sorted(path.name for path in folder.glob('*'))) or 'nothing'}"
    )


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
    """Refuse to write over a file that is not as it was written here."""
    if not os.path.lexists(path) or (entry is not None and (entry["sha256"] == _UNDER_WAY or force)):
        return
    if entry is None:
        raise FileExistsError(f"{path} is there, and {MANIFEST} does not name it; give another --out, or move it away")
    if not _as_written(path, entry):
        raise FileExistsError(f"{path} was changed since it was written; --force makes it again, or give another --out")


def _as_written(path: Path, entry: Mapping[str, Any]) -> bool:
    return path.is_file() and _sha256(path) == entry["sha256"]


def _write_whole(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """A call that is killed leaves the old file or the new one."""
    beside = path.with_name(f".partial-{path.name}")
    write_prompts(beside, rows)
    os.replace(beside, path)


def _read_manifest(out: Path) -> dict[str, Any]:
    path = out / MANIFEST
    if not path.exists():
        return {}
    try:
        saved = json.loads(path.read_text())
        return saved["files"] if saved["schema"] == _SCHEMA else {}
    except (ValueError, TypeError, KeyError) as error:
        raise FileExistsError(
            f"{path} is no manifest of this command ({type(error).__name__}: {error}); give another --out, or move it away"
        ) from None


def _write_manifest(out: Path, files: Mapping[str, Any]) -> None:
    beside = out / f".partial-{MANIFEST}"
    beside.write_text(json.dumps({"schema": _SCHEMA, "files": files}, indent=2))
    os.replace(beside, out / MANIFEST)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
