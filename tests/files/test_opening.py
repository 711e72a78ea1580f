"""What stands where a regular file should be is refused at once, never waited for."""

import os
import socket

import pytest

from rollalloc.files.claims import Claims, Lock
from rollalloc.files.opening import opened, read_text
from rollalloc.models.checkpoint import CorruptCheckpoint, load_newest
from rollalloc.runs.reader import newest_line, read_metrics
from rollalloc.tasks.files import make_once
from rollalloc.tasks.sort import SortConfig
from rollalloc.train.run_json import read_config


def bind(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


KINDS = {
    "a FIFO": os.mkfifo,
    "a folder": os.mkdir,
    "a socket": bind,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_another_kind_is_named(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)  # a socket's name is short
    KINDS[kind](tmp_path / "it")
    for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT):
        with pytest.raises(OSError, match=f"expected a regular file, but it is {kind}: .*it'"):
            opened(tmp_path / "it", flags)


def test_a_regular_file_is_read_and_written(tmp_path):
    with opened(tmp_path / "new", os.O_RDWR | os.O_CREAT) as file:
        file.write("é".encode())
    assert read_text(tmp_path / "new") == "é"
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "other")


READERS = {
    ".rollalloc/run-manifest.json": lambda folder: Claims(folder, "run").names(),
    ".rollalloc/run.lock": lambda folder: Lock(folder, "run").take(),
    "metrics.jsonl": newest_line,
    "run.json": read_config,
    ".task.lock": lambda folder: make_once(folder / "task", SortConfig(), lambda made: None),
}


@pytest.mark.parametrize("name", READERS)
def test_a_fifo_in_a_folder_of_ours_is_not_waited_for(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(OSError, match="expected a regular file, but it is a FIFO"):
        READERS[name](tmp_path)


def test_a_fifo_among_metrics_and_checkpoints_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match="it is a FIFO"):
        read_metrics(tmp_path / "metrics.jsonl")
    place = tmp_path / "checkpoints" / "5"
    place.mkdir(parents=True)
    (place / "state.json").write_text("{}")
    os.mkfifo(place / "manifest.json")
    with pytest.raises(CorruptCheckpoint, match="none of the checkpoints"):
        load_newest(tmp_path)
