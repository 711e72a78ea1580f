"""Checkpoints whose manifest says something else: damaged, with the reason, and the one before is used."""

import json
from pathlib import Path

import pytest

from rollalloc.models import checkpoint


def save(folder):
    folder.mkdir(exist_ok=True)
    checkpoint.save(folder, 1, {"some": "state"}, {}, keep=2)
    return folder / "checkpoints/1"


MANIFEST = {"schema": checkpoint.SCHEMA, "files": {"state.json": {"bytes": 1, "sha256": "a"}}}


@pytest.mark.parametrize(
    "odd",
    [
        [],
        [{}],
        None,
        "x",
        {},
        {"schema": checkpoint.SCHEMA},
        {**MANIFEST, "files": []},
        {**MANIFEST, "files": {}},
        {**MANIFEST, "files": {"state.json": None}},
        {**MANIFEST, "files": {"state.json": {"bytes": "1", "sha256": "a"}}},
        {**MANIFEST, "files": {"state.json": {"bytes": 1}}},
        {**MANIFEST, "files": {**MANIFEST["files"], "../../metrics.jsonl": {"bytes": 1, "sha256": "a"}}},
        {**MANIFEST, "files": {**MANIFEST["files"], "": {"bytes": 1, "sha256": "a"}}},
    ],
)
def test_an_odd_manifest_is_torn_and_says_where(tmp_path, caplog, odd):
    (save(tmp_path) / "manifest.json").write_text(json.dumps(odd))
    with pytest.raises(checkpoint.CorruptCheckpoint, match=r"none of the checkpoints \[1\]"):
        checkpoint.load_newest(tmp_path)
    assert f"checkpoint {tmp_path / 'checkpoints/1'} is corrupt: " in caplog.text


@pytest.mark.parametrize("killed_at", range(4))
def test_a_removal_that_is_killed_leaves_what_the_next_one_removes(tmp_path, monkeypatch, killed_at):
    """Also a file that only the manifest says is ours, as another release may write one."""
    place = save(tmp_path)
    for name in ("a.codec", "z.codec"):
        (place / name).write_text("of another release")
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["files"] |= {"a.codec": {}, "z.codec": {}}
    (place / "manifest.json").write_text(json.dumps(manifest))
    unlink, calls = Path.unlink, []

    def killed(file, **how):
        calls.append(file.name)
        if len(calls) > killed_at:
            raise KeyboardInterrupt
        unlink(file, **how)

    monkeypatch.setattr(Path, "unlink", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.remove_all(tmp_path)
    monkeypatch.setattr(Path, "unlink", unlink)
    assert checkpoint.foreign_files(tmp_path) == []
    checkpoint.clear_away(tmp_path)
    assert [*(tmp_path / "checkpoints").iterdir()] == []
