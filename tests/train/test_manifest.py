"""Checkpoints whose manifest says something else: damaged, with the reason, and the one before is used."""

import json

import pytest

from rollalloc.train import checkpoint


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
