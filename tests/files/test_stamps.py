"""Stamps tell whether a file still holds what was written, whatever was appended since."""

from __future__ import annotations

import hashlib

import pytest

from rollalloc.files.stamps import GrowingStamp, stamp_of


def test_a_stamp_is_size_and_sha256(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\n")
    assert stamp_of(path) == {"bytes": 8, "sha256": hashlib.sha256(b"one\ntwo\n").hexdigest()}
    assert GrowingStamp(path).renewed(4) == {"bytes": 4, "sha256": hashlib.sha256(b"one\n").hexdigest()}


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (b"one\ntwo\n", None),
        (b"one\ntwo\nthree\n", None),
        (b"one\n", "has 4 bytes, but had 8"),
        (b"one\ntwO\nthree\n", "was changed within its first 8 bytes"),
        (None, "is gone"),
    ],
)
def test_a_stamp_ignores_appended_bytes_and_finds_changed_ones(tmp_path, now, reason):
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\n")
    stamp = stamp_of(path)
    if now is None:
        path.unlink()
    else:
        path.write_bytes(now)
    found = GrowingStamp(path).why_changed(stamp)
    assert found is None if reason is None else reason in found


def test_a_growing_stamp_reads_only_what_was_appended(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"")
    growing = GrowingStamp(path)
    for _ in range(3):
        with path.open("ab") as file:
            file.write(b"x" * (1 << 20) + b"\n")
        assert growing.renewed() == stamp_of(path)
    expected = stamp_of(path)
    path.write_bytes(b"y" * (expected["bytes"]))
    assert growing.renewed() == expected  # what it saw before, so that an edit is found later
    assert "was changed" in GrowingStamp(path).why_changed(expected)
