"""Checkpoints of a native run: folders of safetensors and JSON files. A checkpoint is written completely or not at all.

A checkpoint is the folder `checkpoints/<batches trained>`. It is written under a hidden name, synced to disk, and then
renamed. If the run is killed or the disk is full, the previous checkpoint is still complete. The manifest contains the size
and SHA-256 of every file. If a file does not match, the previous checkpoint is used.
"""

from __future__ import annotations

import errno
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollalloc.files.names import CHECKPOINTS
from rollalloc.files.regular import read_text, sync
from rollalloc.files.stamps import stamp_of

log = logging.getLogger(__name__)

SCHEMA = 4  # schema number of a checkpoint
_MANIFEST, _STATE = "manifest.json", "state.json"
PAYLOADS = "payloads"  # file of the tensors of rollouts
FILES = ("weights", "optimizer", PAYLOADS)  # files of tensors in each checkpoint of the native trainer
TRAINED = "trained"  # with averaging: file of the trained weights; the file `weights` has the mean
_HIDDEN = ".unfinished-"  # prefix of a folder while it is being written or removed
_TEMPORARY = re.compile(r"\.tmp\w{6}")  # temporary name of a file that safetensors is writing


class CorruptCheckpoint(ValueError):
    """A file of the checkpoint is missing, cut off or changed."""

    def __init__(self, place: Path, why: str) -> None:
        super().__init__(f"checkpoint {place} is corrupt: {why}")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory: number of batches trained, plain data, and tensors by file and name, on the CPU."""

    batches: int
    state: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]


def foreign_files(folder: Path) -> list[str]:
    """Files among a run's checkpoints that rollalloc did not write, as paths in the run's folder."""
    places = [*(folder / CHECKPOINTS).glob(f"{_HIDDEN}*"), *_places(folder / CHECKPOINTS)]
    return [f"{CHECKPOINTS}/{place.name}/{name}" for place in places for name in _foreign_in(place)]


def remove_all(folder: Path) -> None:
    """Remove every checkpoint of a run, including damaged ones."""
    for place in _places(folder / CHECKPOINTS):
        _remove(place)
    clear_away(folder)


def clear_away(folder: Path) -> None:
    """Remove folders that a killed run was writing or removing."""
    for left_over in (folder / CHECKPOINTS).glob(f"{_HIDDEN}*"):
        _unlink(left_over)


def newest(folder: Path) -> int | None:
    """The number of the newest checkpoint in a run's folder, even if it is damaged; None if there is none."""
    return max(_numbers(folder / CHECKPOINTS), default=None)


def save(
    folder: Path, batches: int, state: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]], *, keep: int
) -> None:
    """Write a checkpoint, then remove old checkpoints.

    Args:
        folder: folder of the run.
        batches: number of batches trained so far, 0 or more. It becomes the name of the checkpoint.
        state: the state without its tensors, as JSON data.
        tensors: the tensors by file and name. Tensors of one file must not share memory.
        keep: number of newest checkpoints to keep, including this one; at least 1.

    Raises:
        OSError: the checkpoint could not be written, for example because the disk is full. Earlier checkpoints are kept.
    """
    parent = folder / CHECKPOINTS
    partial, final = _hidden(parent, str(batches)), parent / str(batches)
    try:
        parent.mkdir(exist_ok=True)
        clear_away(folder)
        partial.mkdir()
        for name, of_file in tensors.items():
            plain = {key: tensor.detach().contiguous() for key, tensor in of_file.items()}
            save_file(plain, partial / f"{name}.safetensors")
        (partial / _STATE).write_text(json.dumps(state))
        files = {file.name: stamp_of(file) for file in partial.iterdir()}
        (partial / _MANIFEST).write_text(json.dumps({"schema": SCHEMA, "files": files}, indent=1))
        for file in partial.iterdir():
            sync(file)
        sync(partial)
        if final.exists():  # a corrupt checkpoint; otherwise the run would have resumed from it
            if foreign := _foreign_in(final):
                raise FileExistsError(
                    f"{', '.join(foreign)} in the folder does not belong to a checkpoint; move it away"
                )
            _remove(final)
        partial.rename(final)
        sync(parent)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            _unlink(partial)
        before = newest(folder)
        left = "there is no earlier checkpoint" if before is None else f"the newest checkpoint is after batch {before}"
        do = "Then resume" if isinstance(error, FileExistsError) else "Free some space, then resume"
        what = f"the checkpoint after batch {batches} could not be written ({error}); {left}. {do}"
        raise OSError(getattr(error, "errno", None) or errno.EIO, what, str(final)) from error
    kept = sorted(number for number in _numbers(parent) if number <= batches)[-keep:]
    for number in _numbers(parent):
        if number not in kept and not _foreign_in(parent / str(number)):
            _remove(parent / str(number))


def load_newest(folder: Path) -> Checkpoint:
    """Read the newest undamaged checkpoint in a run's folder. Log a warning for each newer, damaged checkpoint.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CorruptCheckpoint: all checkpoints are damaged.
        ValueError: a checkpoint has another schema.
    """
    return next(undamaged(folder))


def undamaged(folder: Path) -> Iterator[Checkpoint]:
    """The undamaged checkpoints in a run's folder, newest first. Log a warning for each damaged one. See `load_newest`."""
    parent = folder / CHECKPOINTS
    numbers = sorted(_numbers(parent), reverse=True)
    if not numbers:
        raise FileNotFoundError(errno.ENOENT, "there is no checkpoint to resume from; start afresh", str(parent))
    reasons: list[str] = []
    for number in numbers:
        try:
            yield _read(parent / str(number), number)
        except CorruptCheckpoint as error:
            log.warning("%s", error)
            reasons.append(str(error))
    if len(reasons) == len(numbers):
        raise CorruptCheckpoint(
            parent, f"none of the checkpoints {numbers} is whole ({reasons[0]}); start a new run with --overwrite"
        )


def _read(place: Path, batches: int) -> Checkpoint:
    tensors: dict[str, dict[str, Tensor]] = {}
    for file in (place / name for name in _checked_files(place) if name.endswith(".safetensors")):
        try:
            tensors[file.stem] = load_file(file)
        except (OSError, SafetensorError) as error:
            raise CorruptCheckpoint(place, f"{file.name} is no safetensors file ({error})") from None
    return Checkpoint(batches, _read_json(place, _STATE), tensors)


def _read_json(place: Path, name: str) -> dict[str, Any]:
    """Read a JSON object from a file of a checkpoint."""
    try:
        value = json.loads(read_text(place / name))
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptCheckpoint(place, f"{name} is missing or cut off ({error})") from None
    if not isinstance(value, dict):
        raise CorruptCheckpoint(place, f"{name}: expected an object, got {type(value).__name__}")
    return value


def _checked_files(place: Path) -> list[str]:
    """Names of the files of a checkpoint, after checking each against the manifest."""
    manifest = _read_json(place, _MANIFEST)
    # The schema is checked first, because the manifest of another schema may have another form.
    if "schema" in manifest and manifest["schema"] != SCHEMA:
        raise ValueError(
            f"expected a checkpoint of schema {SCHEMA}, got {manifest['schema']} in {place}; "
            "resume with the version of rollalloc that wrote it"
        )
    try:
        files = {name: (stamp["bytes"], stamp["sha256"]) for name, stamp in manifest["files"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(place, f"{_MANIFEST} is not a manifest of rollalloc ({error!r})") from None
    for name in (_STATE, *files):
        if name not in files or Path(name).name != name or not name:
            raise CorruptCheckpoint(place, f"{_MANIFEST} lacks {_STATE}, or lists a path outside the folder: {name!r}")
    for name, (size, digest) in files.items():
        file = place / name
        if not file.is_file():
            raise CorruptCheckpoint(place, f"{name} is missing")
        if (now := file.stat().st_size) != size:
            raise CorruptCheckpoint(place, f"{name} has {now} bytes of {size}")
        if stamp_of(file)["sha256"] != digest:
            raise CorruptCheckpoint(place, f"{name} was changed: its digest differs")
    return list(files)


def _places(parent: Path) -> list[Path]:
    """The checkpoints in a folder, including damaged ones."""
    named = [path for path in parent.iterdir() if path.name.isdecimal()] if parent.is_dir() else []
    return [place for place in named if place.is_dir() and _ours(place)]


def _numbers(parent: Path) -> list[int]:
    return [int(place.name) for place in _places(parent)]


def _ours(place: Path) -> set[str]:
    """Names of the files of rollalloc in a checkpoint. Without a readable manifest, tensor files count as rollalloc's."""
    try:
        named = set(json.loads(read_text(place / _MANIFEST))["files"])
    except (OSError, ValueError, TypeError, KeyError):
        named = {file.name for file in place.glob("*.safetensors")}
    if place.name.startswith(_HIDDEN):
        named |= {file.name for file in place.iterdir() if _TEMPORARY.fullmatch(file.name)}
    usual = (_STATE, _MANIFEST, *(f"{name}.safetensors" for name in (*FILES, TRAINED)))
    return {name for name in (*named, *usual) if Path(name).name == name and (place / name).is_file()}


def _foreign_in(place: Path) -> list[str]:
    """Files in a checkpoint's folder that rollalloc did not write."""
    ours = _ours(place)
    return sorted(path.name for path in place.iterdir() if path.name not in ours)


def _remove(place: Path) -> None:
    """Remove a checkpoint. It is renamed first, because the rest after an interruption must not count as a checkpoint."""
    _unlink(place.rename(_hidden(place.parent, place.name)))


def _hidden(parent: Path, name: str) -> Path:
    """A new hidden folder for a checkpoint that is being written or removed."""
    return parent / f"{_HIDDEN}{name}-{token_hex(4)}"


def _unlink(place: Path) -> None:
    for name in sorted(_ours(place) - {_MANIFEST}):
        (place / name).unlink()
    (place / _MANIFEST).unlink(missing_ok=True)  # removed last, because it lists the files that are ours
    if not any(place.iterdir()):
        place.rmdir()
