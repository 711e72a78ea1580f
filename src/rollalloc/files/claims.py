"""Records which files in a folder rollalloc wrote, so that rollalloc overwrites and removes only these files. Also locks a
folder while a process writes into it.

For each kind of writer, `FOLDER/.rollalloc/` contains a lock and a manifest, which lists the names that the writer has
claimed. Everything that rollalloc writes follows three rules:

1. A folder is used only if it is empty, or if the same kind of writer has used it before (`Claims.refuse_taken`). A
   comparison may also use a folder that contains only runs and reports of rollalloc.
2. A name is claimed before the file is written, and only if no other file has that name (`Claims.add`).
3. Only claimed names are replaced or removed, by `--overwrite` and by later writers (`Claims.remove`).
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Any, Self

from rollalloc.files.regular import opened, read_text, write_text

log = logging.getLogger(__name__)

HIDDEN = ".rollalloc"
_SCHEMA = 1
# A folder that contains only these files counts as empty.
_NOBODYS = (HIDDEN, ".DS_Store", ".gitignore", ".gitkeep", "lost+found")
_SHOWN = 5  # maximum number of names in an error
PATIENCE_S = 2.0  # seconds to wait for the lock; a process that was just killed may hold the lock for a moment
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # errors that mean that the file system has no locks


class InUse(RuntimeError):
    """Another process writes into the folder."""


class Claims:
    """The names in a folder that one kind of writer has claimed.

    Args:
        folder: the folder; it need not exist.
        kind: kind of writer, for example "run".
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind

    @property
    def _manifest(self) -> Path:
        return self.folder / HIDDEN / f"{self.kind}-manifest.json"

    def refuse_taken(self, remedy: str = "give a new or empty folder (--out)", *, beside: str = "") -> None:
        """Raise an error if the folder is not empty and no writer of this kind has used it before.

        Args:
            remedy: advice to the user, for the error message.
            beside: another kind of writer. The folder may contain folders of this writer, and single files that rollalloc
                wrote. For example, a comparison can use a folder that contains runs of `train`. Empty: it may contain
                neither.

        Raises:
            FileExistsError: the folder has other contents. The message names some of them.
            NotADirectoryError: the path is a file.
            OSError: the folder cannot be read.
        """
        if not os.path.lexists(self.folder):
            return
        if not self.folder.is_dir():
            raise NotADirectoryError(
                errno.ENOTDIR, "expected a folder, but the path is something else; " + remedy, str(self.folder)
            )
        if os.path.lexists(self._manifest) or os.path.lexists(_lock_file(self.folder, self.kind)):
            return
        names = [name for name in os.listdir(self.folder) if name not in _NOBODYS]
        if beside:
            files = _of_file(self.folder / HIDDEN).names()
            names = [name for name in names if name not in files and not _holds_only(self.folder / name, beside)]
        refuse_foreign(self.folder, names, remedy)

    def names(self) -> frozenset[str]:
        """The claimed paths, relative to the folder; none if there is no manifest.

        Raises:
            ValueError: the manifest is damaged.
            OSError: the manifest cannot be read.
        """
        if not os.path.lexists(self._manifest):
            return frozenset()
        try:
            saved: Any = json.loads(read_text(self._manifest))
            names = saved["claims"] if saved["schema"] == _SCHEMA else None
            if not isinstance(names, list) or not all(map(_is_inside, names)):
                raise ValueError(f"expected schema {_SCHEMA}, and claimed names that are paths inside the folder")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(
                f"{self._manifest} is not a manifest of rollalloc ({error}), so rollalloc cannot distinguish its files in "
                "the folder from your own: give another folder"
            ) from None
        return frozenset(names)

    def foreign_files(self, names: Iterable[str]) -> list[str]:
        """The subset of these names that exist in the folder and are not claimed."""
        ours = self.names()
        return [name for name in names if name not in ours and os.path.lexists(self.folder / name)]

    def add(self, names: Iterable[str], remedy: str = "give another folder, or move it away") -> None:
        """Claim names, so that files with these names may be written and replaced.

        Raises:
            FileExistsError: a file that is not claimed has one of these names.
        """
        names = list(names)
        refuse_foreign(self.folder, self.foreign_files(names), remedy)
        self.keep(self.names().union(names))

    def keep(self, names: Iterable[str]) -> None:
        """Replace all claimed names by `names`. Files with these names may already exist."""
        text = json.dumps({"schema": _SCHEMA, "claims": sorted(names)}, indent=1)
        if self._manifest.exists() and read_text(self._manifest) == text:
            return
        write_text(self._manifest, text)

    def remove(self, names: Iterable[str]) -> None:
        """Remove claimed files, and then claimed folders that are empty."""
        ours = self.names()
        for name in sorted(names, reverse=True):  # a folder comes after its contents
            path = self.folder / name
            if name not in ours:
                continue
            if path.is_dir() and not path.is_symlink():
                remove_empty(path)
            else:
                path.unlink(missing_ok=True)


def _holds_only(folder: Path, kind: str, depth: int = 1) -> bool:
    """Whether a folder belongs to this kind of writer, or contains only folders that do.

    The second case is a comparison on one task, whose folder contains folders of runs.
    """
    if folder.is_symlink() or not folder.is_dir():
        return False
    if os.path.lexists(_lock_file(folder, kind)) or os.path.lexists(Claims(folder, kind)._manifest):
        return True
    names = [name for name in os.listdir(folder) if name not in _NOBODYS]
    return bool(names) and depth > 0 and all(_holds_only(folder / name, kind, depth - 1) for name in names)


def claim_files(paths: Iterable[Path]) -> None:
    """Claim single files, each in the manifest of its folder, before they are written.

    Raises:
        FileExistsError: one of the files exists, and rollalloc did not write it. Nothing was claimed.
    """
    paths = list(paths)
    refuse_foreign_files(paths)
    for path in paths:
        claims = _of_file(path)
        claims.keep(claims.names() | {path.name})


def refuse_foreign_files(paths: Iterable[Path]) -> None:
    """Raise a FileExistsError if one of these files exists and rollalloc did not write it."""
    for path in paths:
        ours = path.name in _of_file(path).names() and path.is_file() and not path.is_symlink()
        if os.path.lexists(path) and not ours:
            refuse_foreign(path.parent, [path.name], "move it away, or give another place (--out)")


def _of_file(path: Path) -> Claims:
    return Claims(path.parent, "file")


def refuse_foreign(folder: Path, foreign: Iterable[str], remedy: str) -> None:
    """Raise an error if there are files that rollalloc did not write.

    Args:
        folder: the folder of these files.
        foreign: names of the files. If there are none, nothing happens.
        remedy: advice to the user.

    Raises:
        FileExistsError: there are such files. The message names them.
    """
    names = sorted(foreign)
    if names:
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        raise FileExistsError(
            f"{folder} holds {shown}, which was not written by rollalloc; rollalloc does not mix its "
            f"files with others: {remedy}"
        )


def refuse_read_only(folder: Path) -> None:
    """Raise a PermissionError if a folder does not exist and cannot be created."""
    parent = next(place for place in folder.absolute().parents if place.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, f"{folder} cannot be created; give another folder", str(parent))


def remove_empty(folder: Path) -> None:
    """Remove a folder if it is empty."""
    try:
        folder.rmdir()
    except OSError:
        if not folder.exists() or any(folder.iterdir()):
            return
        raise


def _is_inside(name: Any) -> bool:
    if not isinstance(name, str) or not name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


class Lock:
    """A lock on a folder. Only one process can hold it. The operating system frees it when the process ends or is killed.

    Args:
        folder: the folder. It is created when the lock is taken.
        kind: kind of writer, for example "run".
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        self._file: FileIO | None = None
        self._made: list[Path] = []  # files and folders that this lock created
        _LOCKS.add(self)

    def take(self) -> None:
        """Take the lock.

        Raises:
            InUse: another process has the lock; the message names the process.
            FileExistsError: the name of the hidden folder is used for something else.
            OSError: the folder cannot be written to.
        """
        if self._file is not None:
            return
        hidden = self.folder / HIDDEN
        if os.path.lexists(hidden) and not hidden.is_dir():
            refuse_foreign(self.folder, [HIDDEN], "move it away, or give another folder")
        path = _lock_file(self.folder, self.kind)
        while True:
            self._made = [new for new in (path, hidden) if not new.exists()]
            hidden.mkdir(parents=True, exist_ok=True)
            try:
                self._file = opened(path, os.O_RDWR | os.O_CREAT)
            except FileNotFoundError:  # another process removed its lock at this moment
                continue
            try:
                self._wait(self._file.fileno())
            except BaseException:
                self.release()
                raise
            if path.exists() and os.path.samestat(path.stat(), os.fstat(self._file.fileno())):
                return
            self.release()

    def withdraw(self) -> None:
        """Free the lock, and remove the files and folders that were created for it."""
        if self._file is not None:
            for path in self._made:
                with suppress(OSError):  # another process may be using them already
                    path.rmdir() if path.is_dir() else path.unlink()
        self.release()

    def release(self) -> None:
        """Free the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __del__(self) -> None:
        self.release()

    def __enter__(self) -> Self:
        self.take()
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def _wait(self, descriptor: int) -> None:
        until = time.monotonic() + PATIENCE_S
        while not self._is_free(descriptor):
            if time.monotonic() > until:
                holder = os.pread(descriptor, 100, 0).decode(errors="replace").strip() or "another process"
                raise InUse(f"{self.folder} is in use by {holder}; wait until it has ended, or give another folder")
            time.sleep(0.1)

    def _is_free(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            log.warning("%s has no locks (%s): make sure that no other process writes there", self.folder, error)
        else:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)  # for messages only
        return True


def _lock_file(folder: Path, kind: str) -> Path:
    return folder / HIDDEN / f"{kind}.lock"


_LOCKS: weakref.WeakSet[Lock] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Close the locks in a forked process, which would otherwise hold them even after its parent has ended."""
    for lock in list(_LOCKS):
        lock.release()


os.register_at_fork(after_in_child=_leave_to_parent)
