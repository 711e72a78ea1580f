"""Creates or continues the folder of a sampled profile, or refuses it. Only one process at a time writes to it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from rollalloc.core.packing import differences
from rollalloc.data._files import read_rows
from rollalloc.files.claims import Claims, Lock, refuse_foreign, refuse_read_only
from rollalloc.files.names import ANSWERS, FEATURES, PROFILE, PROMPTS, REWARDS, ROLLOUTS
from rollalloc.files.regular import read_text, write_text
from rollalloc.files.stamps import GrowingStamp, Stamp

PROMPTS_DRAWN, ROLLOUTS_EACH = 256, 4  # prompts of a profile, unless the user says how many, and rollouts of each
_MADE = (PROFILE, ROLLOUTS, PROMPTS, FEATURES, REWARDS)
_NAMES = (*_MADE, ANSWERS)
_KIND = "profile"
_GROWS = "prompts"  # a key of the description; its value may grow when more prompts are sampled
_FOUND = "of"  # a key of the description: the number of prompts from which the profile's prompts were drawn
_STAMP = "log"  # a key of the description: the log's checksum after the newest wave
_NOTHING: Stamp = {"bytes": 0, "sha256": sha256().hexdigest()}


class ProfileFolder:
    """The folder of a profile, with a lock that is held from `check` until the end of the `with` block.

    Only files in the folder's manifest are overwritten or removed (see `rollalloc.files.claims`).

    Args:
        path: the folder; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._claims, self._lock = Claims(path, _KIND), Lock(path, _KIND)
        self._log = GrowingStamp(path / ROLLOUTS)
        self._begun = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._begun:
            self._lock.release()
        else:
            self._lock.withdraw()

    def check(self, described: Mapping[str, Any], *, overwrite: bool = False) -> None:
        """Raise an error if this profile can neither start nor continue in the folder. Nothing is changed.

        Args:
            described: the profile, as plain data.
            overwrite: whether files of an earlier profile in the folder may be removed.

        Raises:
            InUse: another process is sampling into the folder.
            FileExistsError: the folder has files that are not ours.
            PermissionError: the folder cannot be created.
            ValueError: the folder has a profile with other settings (the message names them), or a modified profile.
        """
        self._claims.refuse_taken("give a new or empty folder (--out)")
        if self.path.exists():
            refuse_foreign(
                self.path, self._claims.foreign_files(_NAMES), "give another folder (--out), or move it away"
            )
            self._lock.take()
        else:
            refuse_read_only(self.path)
        saved = _described(self.path)
        if saved is None or overwrite:
            return
        refuse_changed(self.path, unfinished=True)
        others = [*differences(_fixed(saved), _fixed(described), "profile")]
        if saved[_GROWS] > described[_GROWS]:
            others.append(f"profile.{_GROWS}: saved {saved[_GROWS]}, given {described[_GROWS]}")
        if others:
            do = "give the saved settings, give another folder (--out), or replace the profile (--overwrite)"
            raise ValueError(f"{self.path} has a profile that was made with other settings: {'; '.join(others)}; {do}")

    def is_whole(self, prompts: int, n: int) -> bool:
        """Whether the folder has n rollouts each for `prompts` prompts, or for all prompts of the data."""
        saved = _described(self.path)
        if saved is None or saved[_GROWS] not in (prompts, saved[_FOUND]):
            return False
        return self.rollouts() == n * saved[_GROWS]

    def begin(self, *, overwrite: bool = False) -> int:
        """Claim the folder after `check`. Return the number of prompts that its profile already has; 0 for a new profile.

        A server's answers are kept even if everything else is removed, because they cost money.
        """
        self._lock.take()
        if overwrite:
            self._claims.remove(_MADE)
        self._claims.add(_NAMES)
        self._begun = True
        return self.prompts()

    def prompts(self) -> int:
        """Number of prompts of the folder's profile; 0 if there is none."""
        saved = _described(self.path)
        return 0 if saved is None else int(saved[_GROWS])

    def describe(self, described: Mapping[str, Any]) -> None:
        """Write the description. Only the rollouts may be written later: all other files must already exist."""
        saved = _described(self.path)
        self._write(dict(described) | {_STAMP: _NOTHING if saved is None else saved[_STAMP]})

    def stamp(self) -> None:
        """Record the log's checksum. The log must end with a complete wave."""
        saved = _described(self.path)
        assert saved is not None  # `describe` is called before the first wave
        self._write(saved | {_STAMP: self._log.renewed()})

    def _write(self, described: Mapping[str, Any]) -> None:
        write_text(self.path / PROFILE, json.dumps(described, indent=2))

    def rollouts(self) -> int:
        """Number of rollouts in the complete waves of the log."""
        return len(self._ends()) - 1

    def cut(self, rollouts: int) -> None:
        """Remove an unfinished wave: everything after the first `rollouts` rollouts of the log."""
        if (self.path / ROLLOUTS).exists():
            os.truncate(self.path / ROLLOUTS, self._ends()[rollouts])
        self._log = GrowingStamp(self.path / ROLLOUTS)  # the old stamp may cover bytes that were cut

    def _ends(self) -> list[int]:
        """Byte offset of each line's end in the log, beginning with 0. Lines after the last complete wave are ignored."""
        ends, path = [0], self.path / ROLLOUTS
        saved = _described(self.path)
        if saved is None or not path.exists():
            return ends
        with path.open("rb") as lines:
            for line in lines:
                if ends[-1] + len(line) > saved[_STAMP]["bytes"]:
                    break
                ends.append(ends[-1] + len(line))
        return ends


def refuse_changed(log: Path, *, unfinished: bool = False) -> None:
    """Raise an error if the log of a profile was modified, according to its recorded checksum.

    Args:
        log: the profile's log, or its folder.
        unfinished: whether the log may have lines beyond its recorded length. Such lines come from an interrupted wave, or
            from another program.

    Raises:
        ValueError: the log was modified, or is longer; the message says what to do.
    """
    folder = log if log.is_dir() else log.parent
    saved = _described(folder)
    if saved is None:
        return
    recorded: Stamp = saved[_STAMP]
    if recorded["bytes"] and (reason := GrowingStamp(folder / ROLLOUTS).why_changed(recorded)):
        raise ValueError(
            f"{reason}: the log was modified after sampling. Restore it from a copy, sample again (--overwrite), "
            "or copy only the log into another folder, to read the modified log"
        )
    if not unfinished and (folder / ROLLOUTS).stat().st_size > recorded["bytes"]:
        raise ValueError(
            f"{folder / ROLLOUTS} has lines after the {recorded['bytes']:,} bytes that the profile recorded. If "
            "sampling was interrupted, run the same command again; if lines were added, remove them"
        )


def _described(folder: Path) -> dict[str, Any] | None:
    """The description of the profile in a folder; None if there is none.

    Raises:
        ValueError: the description is damaged.
    """
    path = folder / PROFILE
    if not path.exists():
        return None
    try:
        saved = json.loads(read_text(path))
        if missing := {_GROWS, _FOUND, _STAMP, "source"} - set(saved):
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} does not describe a profile ({error}); it is damaged: replace it (--overwrite), or give another "
            "folder (--out)"
        ) from None
    return saved


def settings_beside(log: Path) -> dict[str, Any]:
    """The settings with which `rollalloc advise` sampled a log (a file or its folder); empty for other logs.

    Raises:
        ValueError: the description is damaged.
    """
    folder = log if log.is_dir() else log.parent
    return (_described(folder) or {}) if (folder / ROLLOUTS).is_file() else {}


def prompts_beside(log: Path) -> dict[str, dict[str, Any]]:
    """Rows of the profile's prompts by key; empty if the log is not in a profile's folder.

    Args:
        log: a file, or its folder.

    Raises:
        ValueError: the prompts file is damaged.
    """
    folder = log if log.is_dir() else log.parent
    if PROMPTS not in Claims(folder, _KIND).names() or not (folder / PROMPTS).is_file():
        return {}
    rows = [row for _, row in read_rows(folder / PROMPTS)]
    try:
        return {row["key"]: row for row in rows}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / PROMPTS} is damaged ({error}); sample the profile again (--overwrite)") from None


def _fixed(described: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in described.items() if name not in (_GROWS, _FOUND, _STAMP)}
