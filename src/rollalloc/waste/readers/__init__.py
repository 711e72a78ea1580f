"""Reads logs of TRL, verl, verifiers, prime-rl and rollalloc into one `Log`. Files are streamed; texts are not kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from glob import glob, has_magic
from hashlib import file_digest
from pathlib import Path

from rollalloc.named import near
from rollalloc.runs.discovery import natural
from rollalloc.waste.groups import Log
from rollalloc.waste.readers import ours, prime_rl, trl, verl
from rollalloc.waste.readers.shared import Files, Options, Progress, by_suffix, names, objects

__all__ = ["FORMATS", "Options", "check_format", "read_log"]

_OTHER = (
    "write the log of another trainer in verl's form: a file of JSON lines, one for each rollout, with input (the prompt), "
    "output, score and step"
)
_PACKED = (".bz2", ".xz", ".zip")
FORMATS = {
    "trl": trl.FORMAT,
    "verl": verl.FORMAT,
    "verifiers": prime_rl.VERIFIERS,  # before prime-rl, which would also match these lines
    "prime-rl": prime_rl.FORMAT,
    "rollalloc": ours.FORMAT,
}


def read_log(
    path: str | Path, format: str | None = None, options: Options | None = None, progress: Progress | None = None
) -> Log:
    """Read the log of a run.

    Args:
        path: a file, a folder with such files (at any depth), or a glob.
        format: one of `FORMATS`. None: it is detected from the files' names and first lines.
        options: information that the log does not contain.
        progress: called before each file with ("reading", files read before it, number of files).

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: the format is unknown, or the files have no usable rollout.
    """
    check_format(format)
    files = _files(str(path))
    format = format or _detect(files, path)
    reader, options = FORMATS[format], options or Options()
    unused = [
        name
        for name in ("reward", "weights", "group_size", "rows")
        if getattr(options, name) is not None and name not in reader.options
    ]
    if unused:
        raise ValueError(f"{' and '.join(unused)}: does not apply to a log of {format}; leave it out, or set --format")
    chosen = reader.choose(files)
    if not chosen:
        raise ValueError(f"{path}: expected {reader.expects}, found {_some(files)}")
    log = Log(format)
    kept = without_copies(chosen)
    reader.read(Files(kept, progress), log, options)
    if log.accounts is None and log.runs:
        log.accounts = dict(sum((Counter(run.accounts) for run in log.runs), Counter[str]()))
    if copies := len(chosen) - len(kept):
        log.notes.append(f"{copies:,} files are copies of others and were left out")
    if not log.groups and log.accounts is None:
        why = f"; the first of {log.bad} lines that cannot be used is {log.first_bad}" if log.bad else ""
        raise ValueError(f"{path}: expected {reader.expects}, found no rollout in {_some(chosen)}{why}")
    return log


def check_format(format: str | None) -> None:
    """Raise an error if the format is unknown.

    Raises:
        ValueError: the format is unknown.
    """
    if format is not None and format not in FORMATS:
        raise ValueError(f"--format must be one of {', '.join(FORMATS)}, got {format!r}{near(format, FORMATS)}")


def _files(path: str) -> list[Path]:
    """The files under a path, in natural order: step_9 comes before step_10."""
    if not path.strip():
        raise ValueError("expected a file, a folder or a glob of rollout logs, got an empty path; . is this folder")
    paths = (
        [Path(entry) for entry in glob(path, recursive=True)]
        if has_magic(path) and not Path(path).exists()
        else [Path(path)]
    )
    files = [file for entry in paths for file in (entry.rglob("*") if entry.is_dir() else [entry]) if file.is_file()]
    if not files:
        raise FileNotFoundError(f"{path}: no such file, and no folder or glob with files; give a log of rollouts")
    return sorted(set(files), key=natural)


def _detect(files: Sequence[Path], path: str | Path) -> str:
    """The format of the first line of the first readable file.

    Raises:
        ValueError: no format is recognised.
    """
    if any(file.suffix == ".parquet" for file in files):
        return "trl"
    for file in sorted(by_suffix(files, ".jsonl"), key=lambda file: file.name.startswith("metrics.")):
        line = next((row for _, row in objects(file, Log(""))), None)
        for name, format in FORMATS.items():
            if line is not None and format.marks is not None and format.marks(line):
                return name
    expected = "; ".join(f"{name}: {format.expects}" for name, format in FORMATS.items())
    raise ValueError(f"{path}: expected a log of one of these ({expected}), found {_some(files)}; {_OTHER}")


def without_copies(files: Sequence[Path]) -> list[Path]:
    """The files, without byte-identical copies of earlier files. Only files of equal size are compared."""
    size_of = {file: file.stat().st_size for file in files}
    times = Counter(size_of.values())
    seen: set[bytes] = set()
    kept: list[Path] = []
    for file in files:
        if times[size_of[file]] > 1 and size_of[file]:
            with file.open("rb") as held:
                digest = file_digest(held, "blake2b").digest()
            if digest in seen:
                continue
            seen.add(digest)
        kept.append(file)
    return kept


def _some(files: Sequence[Path]) -> str:
    shown = names(file.name for file in files[:3])
    shown += f" and {len(files) - 3} more" if len(files) > 3 else ""
    return f"{shown}; unpack it first" if any(file.suffix in _PACKED for file in files) else shown
