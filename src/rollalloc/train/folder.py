"""Creates the folder of a run, resumes the run in it, or refuses to use it. Only one trainer at a time may use a folder."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self

from safetensors import SafetensorError

from rollalloc.data.feature_blocks import Features
from rollalloc.data.feature_file import save_features
from rollalloc.files.atomic import naming, remove_partials
from rollalloc.files.claims import HIDDEN, Claims, Lock, refuse_foreign, refuse_read_only
from rollalloc.files.names import (
    ALLOCATOR,
    CHECKPOINTS,
    DECISIONS,
    DESCRIPTION,
    FEATURES,
    METRICS,
    MODEL,
    REWARDS,
    ROLLOUTS,
)
from rollalloc.runs.reader import newest_line
from rollalloc.train import checkpoint

_PARTIAL = ".unfinished-model"
# Everything that a run writes, except the files of trackers. The metrics, which mark a run's folder, are written first.
_NAMES = (METRICS, DESCRIPTION, ROLLOUTS, DECISIONS, REWARDS, ALLOCATOR, FEATURES, MODEL, _PARTIAL, CHECKPOINTS)
_PRODUCTS = (MODEL, ALLOCATOR, ROLLOUTS, DECISIONS)
_NEW_FOLDER = "give a new or empty folder (--out)"
_REMEDY = "give another folder (--out), or move it away"


class Saves(Protocol):
    """A model that can be saved to a folder."""

    def save(self, folder: Path) -> None:
        """Write the model into the folder."""


class RunFolder:
    """The folder of a run.

    `check` (if the folder exists), `begin` and `go_on` lock the folder, and `release` unlocks it. Only files in the manifest
    of the folder's runs are overwritten or removed (see `rollalloc.files.claims`).

    Args:
        path: the folder; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._claims, self._lock = Claims(path, "run"), Lock(path, "run")
        self._begun = self._checked = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def lock(self) -> None:
        """Take the lock, until `release`. Raise `InUse` if another trainer has it."""
        self._lock.take()

    def release(self) -> None:
        """Release the lock. If no run began, also remove the files that were created for the lock."""
        if self._begun:
            self._lock.release()
        else:
            self._lock.withdraw()
        self._begun = False

    def held(self) -> str | None:
        """Describe the files of a run in the folder; None if there is nothing to lose."""
        if METRICS not in self._claims.names():
            return None
        last, saved = newest_line(self.path), checkpoint.newest(self.path)
        if last is not None and last["kind"] == "end":
            return "a run that has ended"
        if saved is not None:
            return f"a run that has not ended, with a checkpoint after batch {saved}"
        if last is not None:
            return "a run that has not ended, without a checkpoint"
        left = [name for name in _PRODUCTS if (self.path / name).exists()]
        return f"{', '.join(left)} of a run" if left else None

    def is_broken(self) -> bool:
        """Whether the folder's run can only start again: it did not end, and has no checkpoint."""
        return (
            checkpoint.newest(self.path) is None
            and not any((self.path / name).exists() for name in (MODEL, ALLOCATOR))
            and METRICS in self._claims.names()
        )

    def check(self, *, overwrite: bool = False) -> None:
        """Raise an error if a new run must not begin in this folder. Nothing is changed.

        Args:
            overwrite: True: files of another run in the folder may be removed.

        Raises:
            InUse: another trainer is using the folder.
            FileExistsError: the folder has a run that must not be overwritten, or files that rollalloc did not write.
            PermissionError: the folder cannot be created.
        """
        if not self._checked:  # check only once, because trackers write files into the folder later
            self._claims.refuse_taken(_NEW_FOLDER)
            self._checked = True
        if self.path.exists():
            self.lock()
        else:  # raise now, before the model is loaded
            refuse_read_only(self.path)
        held = self.held()
        if held is not None and not overwrite:
            do = "go on with it (--resume), replace what it wrote (--overwrite), or give another folder (--out)"
            raise FileExistsError(f"{self.path} holds {held}; {do}")
        inside = [*self._claims.foreign_files(self._inside(MODEL)), *checkpoint.foreign_files(self.path)]
        refuse_foreign(self.path, self._claims.foreign_files(_NAMES) or inside, _REMEDY)

    def begin(self, *, overwrite: bool = False) -> None:
        """Begin a new run in the folder. A second call does nothing. For arguments and errors see `check`."""
        if self._begun:
            return
        self.check(overwrite=overwrite)
        self.lock()
        ours = self._claims.names()
        if ours:
            self._claims.remove([METRICS])
            checkpoint.remove_all(self.path)
            shutil.rmtree(self.path / _PARTIAL, ignore_errors=True)
            self._claims.remove(ours)
        self._claims.keep(_NAMES)
        (self.path / METRICS).write_text("")
        self._begun = True

    def go_on(self) -> None:
        """Continue the run in the folder. Call it after checking that the checkpoint belongs to this run."""
        self.lock()
        for folder in (self.path, self.path / HIDDEN):
            remove_partials(folder)
        self._begun = True

    def save_features(self, keys: Sequence[str], features: Features) -> None:
        """Save the run's features for a resumed run, because another machine could compute slightly different features."""
        self._claims.add({FEATURES})
        save_features(self.path / FEATURES, keys, features)

    def save_model(self, model: Saves) -> None:
        """Write the model completely or not at all. It replaces only an earlier model of a run.

        Raises:
            FileExistsError: a file that rollalloc did not write has the name of the model's folder.
            OSError: the model could not be written, for example because the disk is full. The message names the folder.
                The last checkpoint is kept.
        """
        partial, final = self.path / _PARTIAL, self.path / MODEL
        if partial.exists():  # left by a run that was killed
            shutil.rmtree(partial)
        with naming(final):
            try:
                model.save(partial)
            except SafetensorError as error:  # safetensors raises its own error, even if the disk is full
                full = "No space left" in str(error) or "os error 28" in str(error)
                raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from error
        files = [file.relative_to(partial).as_posix() for file in partial.rglob("*") if file.is_file()]
        before = {name for name in self._claims.names() if name.startswith(f"{MODEL}/")}
        # The names include files in subfolders.
        names = {f"{MODEL}/{path.relative_to(partial).as_posix()}" for path in partial.rglob("*")}
        self._claims.add(names)
        self._claims.remove(before - names)
        for file in files:
            (final / file).parent.mkdir(parents=True, exist_ok=True)
            (partial / file).replace(final / file)
        shutil.rmtree(partial)
        self._claims.keep(self._claims.names() - (before - names))

    def slim(self) -> None:
        """Remove the model and the checkpoints of a finished run. Its metrics, and files of others, are kept."""
        self.lock()
        checkpoint.remove_all(self.path)
        names = {name for name in self._claims.names() if name.startswith(f"{MODEL}/")}
        self._claims.remove({*names, MODEL, ALLOCATOR, FEATURES, CHECKPOINTS})

    def _inside(self, folder: str) -> list[str]:
        """The files in a folder of the run."""
        return [
            file.relative_to(self.path).as_posix()
            for file in (self.path / folder).rglob("*")
            if file.is_symlink() or not file.is_dir()
        ]
