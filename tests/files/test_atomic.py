"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import stat

import pytest

from rollalloc.files.atomic import write_text, written


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


def test_two_who_write_the_same_file_do_not_write_into_each_others(tmp_path):
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


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_others_may_read_it_as_the_user_has_it(tmp_path, mask):
    before = os.umask(mask)
    try:
        write_text(tmp_path / "page", "\ud800")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "page").stat().st_mode) == 0o666 & ~mask
    assert (tmp_path / "page").read_text() == "?"
