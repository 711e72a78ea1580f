"""What is added: the logs under a path, and what is known of the runs that wrote them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from rollalloc.regular import read_text
from rollalloc.runs.names import DESCRIPTION, MODEL, ROLLOUTS

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_OURS = "rollalloc"


@dataclass(frozen=True, slots=True)
class Source:
    """A log to add.

    Attributes:
        log: file, folder or glob, as `read_log` takes it.
        format: of it; None: told from its files.
        model: that the run began with, as it was named; None: nobody said.
        weights: digest of these weights; None: not known.
        weights_after: of those that the run ended with.
        recipe: that it ran under.
        seed: of it.
        missing: what a run of ours lacks, so that nothing can be added; empty: nothing.
    """

    log: Path
    format: str | None = None
    model: str | None = None
    weights: str | None = None
    weights_after: str | None = None
    recipe: str | None = None
    seed: int | None = None
    missing: str = ""


def sources_of(path: str, format: str | None = None, model: str | None = None) -> Iterator[Source]:
    """The logs under a path: each run of ours, of a comparison too, by itself; anything else is one log.

    Args:
        path: a run's folder, a folder of runs, or the log of another framework.
        format: as it was said; None: not.
        model: name or folder of the model, for logs that do not name it.
    """
    place = Path(path)
    found = [place] if place.name == ROLLOUTS else []
    if place.is_dir():
        found = sorted({*place.rglob(ROLLOUTS), *(there.with_name(ROLLOUTS) for there in place.rglob(DESCRIPTION))})
    if format not in (None, _OURS) or not found:
        yield Source(place, format, model, None if model is None else weights_in(Path(model)))
        return
    yield from (_of_ours(log, model) for log in found)


def _of_ours(log: Path, model: str | None) -> Source:
    """A run of our own trainer, described by what lies beside its log; what is damaged there is not known."""
    missing = "" if log.is_file() else f"no {ROLLOUTS}: it was trained without --log-rollouts"
    try:
        saved: Any = json.loads(read_text(log.with_name(DESCRIPTION)))
        named = model or saved["source"]["model"]
        recipe, seed, digests = saved["recipe"], saved["settings"]["seed"], saved.get("digests") or {}
        if not (isinstance(named, str) and isinstance(recipe, str) and type(seed) is int):
            raise TypeError("expected names and a seed")
        weights = weights_of(digests, named) if model is None else weights_in(Path(model))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return Source(log, _OURS, model, None if model is None else weights_in(Path(model)), missing=missing)
    return Source(log, _OURS, named, weights, weights_in(log.with_name(MODEL)), recipe, seed, missing)


def weights_in(folder: Path) -> str | None:
    """A digest of the files of weights in a model's folder; None where there are none, as for a name of a hub."""
    if not folder.is_dir():
        return None
    digests: dict[str, str] = {}
    for file in sorted(folder.rglob("*")):
        if file.suffix in _WEIGHTS and file.is_file():
            with file.open("rb") as opened:
                digests[str(file)] = file_digest(opened, "sha256").hexdigest()
    return weights_of(digests, str(folder))


def weights_of(digests: Mapping[str, str], model: str) -> str | None:
    """The same of files whose SHA-256 is known, by path, as `run.json` has them; None where none of them is of weights."""
    inside = {
        Path(name).relative_to(model).as_posix(): digest
        for name, digest in digests.items()
        if Path(name).is_relative_to(model) and Path(name).suffix in _WEIGHTS
    }
    return sha256(json.dumps(sorted(inside.items())).encode()).hexdigest()[:32] if inside else None
