"""Finds the files of a data set's split in a local folder, by the same layouts that the Hugging Face hub accepts."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from reprlib import repr as short
from typing import Any

log = logging.getLogger(__name__)

ALL = "all"  # the choice that takes every file of a folder

SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".tsv")
_NO_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "prepared.json"}
# Words by which the hub recognizes splits in the names of files and folders.
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLIT_OF = {word: split for split, words in _WORDS.items() for word in words}
_SHARD = re.compile(r"(?P<split>\w[\w.]*?)-\d{5}-of-\d{5}(?:-[0-9a-f]+)?$")  # train-00000-of-00002, also with a hash
_SHOWN = 12  # maximum number of choices in an error message


@dataclass(frozen=True)
class Wanted:
    """The split to find.

    Attributes:
        name: name of the data set on the hub, for error messages.
        split: name of the split, for example "test".
        config: configuration of the data set, for example GSM8K's "main"; None: it has only one.
        choice: the group of files that the user chose with --split; None: the user did not choose.
    """

    name: str
    split: str
    config: str | None = None
    choice: str | None = None

    @property
    def named(self) -> str:
        """Split and configuration as a choice is written."""
        return self.split if self.config is None else f"{self.config}/{self.split}"


def files_of_split(folder: Path, wanted: Wanted) -> list[Path]:
    """The files of a folder that belong to a split.

    The user's choice comes first, then the `configs:` in the folder's README.md, then the names of files and folders, as in
    `data/train-00000-of-00002.parquet`, `test.jsonl` or `main/test/0.parquet`. If no name contains a split, all files are
    taken.

    Args:
        folder: folder of one data set.
        wanted: the split.

    Returns:
        One or more files, sorted by name.

    Raises:
        ValueError: the names do not tell which files belong to the split; the message lists the choices.
        FileNotFoundError: the folder has no data files.
    """
    files = [path for path in sorted(folder.rglob("*")) if _holds_data(path, folder)]
    if not files:
        raise FileNotFoundError(
            f"{folder}: expected files of {wanted.name} ({', '.join(SUFFIXES)}), found none; download the data set into it"
        )
    groups = _by_readme(folder, files) or _by_name(folder, files)
    if wanted.choice is not None:
        groups[ALL] = files
        if wanted.choice in groups:
            return groups[wanted.choice]
        raise ValueError(f"{folder} has no split {wanted.choice!r}; {_choices(groups, wanted)}")
    chosen = _chosen(groups, wanted)
    if chosen is None:
        raise ValueError(
            f"{folder}: cannot tell which files are the split {wanted.named!r} of {wanted.name}; {_choices(groups, wanted)}"
        )
    if chosen == ALL:
        log.warning(
            "%s: the file names contain no split, so all %d files are used as the %r split of %s; if they belong to several "
            "splits, choose with --split, or move each split into a folder of its name",
            folder,
            len(files),
            wanted.split,
            wanted.name,
        )
    return groups[chosen]


def _holds_data(path: Path, folder: Path) -> bool:
    if path.suffix not in SUFFIXES or path.name in _NO_DATA:
        return False
    return path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)


def _chosen(groups: Mapping[str, Sequence[Path]], wanted: Wanted) -> str | None:
    """The group of the wanted split; None if there is none, or if several could be meant."""
    if wanted.named in groups:
        return wanted.named
    if list(groups) == [ALL]:  # no name contains a split
        return ALL
    same = [name for name in groups if name.rpartition("/")[2] == wanted.split]
    if wanted.config is not None:  # another configuration has other rows
        same = [name for name in same if "/" not in name]
    return same[0] if len(same) == 1 else None


def _choices(groups: Mapping[str, Sequence[Path]], wanted: Wanted) -> str:
    choices = [f"{name} ({len(files)} file{'s' * (len(files) > 1)})" for name, files in groups.items() if name != ALL]
    more = f" and {len(choices) - _SHOWN} more" if len(choices) > _SHOWN else ""
    example = next((name for name in groups if name != ALL), ALL)
    return (
        f"it has {', '.join(choices[:_SHOWN]) or 'files without a split in their names'}{more}. Choose with --split "
        f"SET=NAME, for example --split {wanted.name.rpartition('/')[2]}={example}; {ALL!r} takes every file"
    )


# --------------------------------------------------------------------------------------------------------------- names


def _by_name(folder: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Groups of files by "split" or "folder/split". Files whose names have no split are grouped by folder, or as `ALL`."""
    named = [(_group(path.relative_to(folder)), path) for path in files]
    if not any(split for (_, split), _ in named):
        named = [(("/".join(path.relative_to(folder).parts[:-1]), ""), path) for path in files]
        if len({group for group, _ in named}) == 1:
            return {ALL: list(files)}
    groups: dict[str, list[Path]] = {}
    for (prefix, split), path in named:
        groups.setdefault("/".join(filter(None, (prefix, split))) or path.name, []).append(path)
    return dict(sorted(groups.items()))


def _group(path: PurePath) -> tuple[str, str]:
    """A file's folders that do not name a split, and its split; "" if no name contains one."""
    shard = _SHARD.match(path.stem)
    splits = [[shard["split"]] if shard else _splits_in(path.stem)]
    prefix: list[str] = []
    for part in reversed(path.parts[:-1]):
        if words := _splits_in(part):
            splits.append(words)
        elif part != "data":
            prefix.insert(0, part)
    innermost = next((words for words in splits if words), [])
    return "/".join(prefix), "+".join(innermost)


def _splits_in(name: str) -> list[str]:
    """The splits in a name, without repetitions: ["train"] for "math_train_v2"."""
    words = re.split(r"[\W_\d]+", name.lower())
    return list(dict.fromkeys(_SPLIT_OF[word] for word in words if word in _SPLIT_OF))


# -------------------------------------------------------------------------------------------------------------- README


def _by_readme(folder: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Groups of files from README.md's `configs:`, by "config/split"; for the default configuration also by "split"."""
    groups: dict[str, list[Path]] = {}
    for config in _listed(_metadata(folder).get("configs")):
        if not isinstance(config, Mapping):
            continue
        name = str(config.get("config_name", "default"))
        for split, patterns in _data_files(config.get("data_files")).items():
            if matching := _matching(folder, patterns, files):
                groups.setdefault(f"{name}/{split}", matching)
                if name == "default" or config.get("default") is True:
                    groups.setdefault(split, matching)
    return groups


def _metadata(folder: Path) -> dict[str, Any]:
    """The YAML header of README.md; empty if there is none, or if it cannot be read."""
    from huggingface_hub import metadata_load

    try:
        return metadata_load(folder / "README.md") or {}
    except Exception:  # the type depends on the versions of the library and of its YAML parser
        return {}


def _data_files(entries: Any) -> dict[str, list[str]]:
    """Split -> patterns of file names. As on the hub, data files without a split belong to "train"."""
    patterns: dict[str, list[str]] = {}
    for entry in _listed(entries):
        split, paths = (entry.get("split"), entry.get("path")) if isinstance(entry, Mapping) else ("train", entry)
        patterns.setdefault(str(split), []).extend(path for path in _listed(paths) if isinstance(path, str))
    return patterns


def _listed(value: Any) -> list[Any]:
    """The value as a list: a list unchanged, None as an empty list, any other value as a list of one."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _matching(folder: Path, patterns: Sequence[str], files: Sequence[Path]) -> list[Path]:
    """The files that match a pattern or lie in a folder that does. Only files of `files`, so patterns cannot leave it."""
    matched: set[Path] = set()
    for pattern in patterns:
        try:
            matched |= set(folder.glob(pattern.removeprefix("./")))
        except (ValueError, NotImplementedError, IndexError):
            raise ValueError(
                f"{folder / 'README.md'}: data_files has an invalid path, {short(pattern)}; correct it, or choose files "
                "with --split"
            ) from None
    return [path for path in files if path in matched or any(parent in matched for parent in path.parents)]
