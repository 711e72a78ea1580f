"""Files that are written whole or not at all."""

import errno
import os
import resource
from contextlib import contextmanager

import pytest

from rollalloc.files.atomic import append_text, write_text, written


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
