"""Files that are written whole or not at all; what stands where a regular file should be is refused at once."""

import errno
import os
import resource
import socket
from contextlib import contextmanager

import pytest

from rollalloc.files.claims import Claims, Lock
from rollalloc.files.regular import append_text, opened, read_text, write_text, written
from rollalloc.models.checkpoint import CorruptCheckpoint, load_newest
from rollalloc.runs.reader import newest_line, read_metrics
from rollalloc.tasks.files import make_once
from rollalloc.tasks.sort import SortConfig
from rollalloc.train.config import read_config


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, error):
    path = tmp_path / "page.html"
    path.write_text("before")

    def fail():
        with written(path) as beside:
            beside.write_text("half")
            raise error("full")

    with pytest.raises(error, match="full"):
        fail()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_sees_the_old_file_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "a" / "rows.jsonl"
    write_text(path, "old")
    with written(path) as beside:
        assert beside.suffix == ".jsonl"
        beside.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"


def test_two_writers_of_one_file_do_not_mix_their_contents(tmp_path):
    path = tmp_path / "page"
    with written(path) as one, written(path) as other:
        one.write_text("one")
        other.write_text("other")
    assert path.read_text() == "one"  # the last to end


def test_a_file_is_what_the_disk_holds_before_it_has_its_name(tmp_path, monkeypatch):
    path, done = tmp_path / "state.json", []
    sync, replace = os.fsync, type(path).replace
    monkeypatch.setattr("os.fsync", lambda opened: (done.append("synced"), sync(opened)))
    monkeypatch.setattr(type(path), "replace", lambda *names: (done.append("renamed"), replace(*names)))
    write_text(path, "{}")
    assert done == ["synced", "renamed"]


# What a kill leaves, and a full disk


def test_what_a_killed_writer_left_goes_with_the_next_write_and_what_is_being_written_stays(tmp_path):
    (tmp_path / ".partial-0123456789abcdef.json").write_text("half")
    (tmp_path / ".partial-notes").write_text("mine")
    with written(tmp_path / "one.txt") as one:
        one.write_text("one")
        write_text(tmp_path / "two.txt", "two")
    assert {path.name for path in tmp_path.iterdir()} == {".partial-notes", "one.txt", "two.txt"}


@contextmanager
def files_of_at_most(size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_cannot_grow_is_named_and_has_no_half_line(tmp_path):
    log = tmp_path / "metrics.jsonl"
    append_text(log, "a" * 99 + "\n")
    with files_of_at_most(150), pytest.raises(OSError, match=r"File too large: '.*metrics\.jsonl'"):
        append_text(log, "b" * 99 + "\n")
    assert log.read_text() == "a" * 99 + "\n"
    with files_of_at_most(150), pytest.raises(OSError, match=r"File too large: '.*run\.json'"):
        write_text(tmp_path / "run.json", "c" * 200)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_full_disk_is_named_with_what_to_do(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        OSError, match=r"No space left on device; free some space, then .*resume: '.*run\.json'"
    ) as caught:
        write_text(tmp_path / "run.json", "{}")
    assert caught.value.errno == errno.ENOSPC


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
