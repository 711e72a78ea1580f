"""The file of features: found again by key, whole or refused, and never over what is not ours."""

import json
import logging
import os
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from rollalloc.core.prompts import key_digests
from rollalloc.data.feature_blocks import FeatureCost, Features
from rollalloc.data.feature_file import Origin, holds_features, read_features, write_features

KEYS = tuple(f"mine/{number}" for number in range(6))
ORIGIN = Origin("some/model", "abc", 3)


def make_features(rows=6, **more):
    numbers_N = np.arange(rows, dtype=np.float32)
    blocks = {"hidden": np.stack([numbers_N, -numbers_N], axis=1), "length": numbers_N[:, None], **more}
    return Features(blocks, FeatureCost(rows, 40, 1.5))


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "features.safetensors"
    write_features(file, KEYS, make_features(), origin=ORIGIN)
    return file


def described_in(path):
    length = int.from_bytes(path.read_bytes()[:8], "little")
    return json.loads(json.loads(path.read_bytes()[8 : 8 + length])["__metadata__"]["rollalloc"])


def changed(path, tensors=None, **header):
    """Write the file again with another header or other tensors."""
    described = described_in(path) | header
    numbers_N = np.arange(6, dtype=np.float32)
    hidden_N2 = np.stack([numbers_N, -numbers_N], axis=1)
    held = {"keys": key_digests(KEYS), "block:hidden": hidden_N2, "block:length": numbers_N[:, None]}
    held = {name: array for name, array in (held | (tensors or {})).items() if array is not None}
    save_file(held, path, metadata={"rollalloc": json.dumps(described)})


# written and read


def test_features_that_were_written_are_read_back(path):
    read = read_features(path, KEYS)
    assert list(read.blocks) == ["hidden", "length"]
    for name, block_ND in make_features().blocks.items():
        assert np.array_equal(read.blocks[name], block_ND)
        assert read.blocks[name].dtype == np.float32
    assert read.cost == FeatureCost(6, 40, 1.5)
    described = described_in(path)
    assert described["origin"] == {"model": "some/model", "weights": "abc", "seed": 3}
    assert described["blocks"] == {"hidden": 2, "length": 1}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=9))
def test_rows_come_in_the_readers_order(path, order):
    read = read_features(path, [KEYS[row] for row in order])
    assert read.blocks["length"][:, 0].tolist() == order
    assert read.blocks["hidden"][:, 1].tolist() == [-row for row in order]


def test_missing_prompts_are_counted_and_the_first_is_named(path):
    with pytest.raises(
        ValueError, match=r"lacks the features of 2 prompts \(of 3\), for example of 'other/1'; write it again"
    ) as e:
        read_features(path, ["mine/3", "other/1", "other/2"])
    assert str(path) in str(e.value)


def test_another_models_features_are_taken_with_a_warning(path, caplog):
    with caplog.at_level(logging.WARNING):
        read_features(path, KEYS, weights="abc")
        assert not caplog.records
        read_features(path, KEYS, weights="abd")
    assert "has features of another model ('some/model') than the run's" in caplog.text


# never over what is not ours, and whole or not at all


def test_features_are_replaced_only_when_told(path):
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match="holds features already; replace them"):
        write_features(path, KEYS[:1], make_features(1))
    assert path.read_bytes() == before
    write_features(path, KEYS[:1], make_features(1), overwrite=True)
    assert len(read_features(path, KEYS[:1])) == 1
    assert {file.name for file in path.parent.iterdir()} == {path.name, ".rollalloc"}


def make_foreign(path, kind):
    path.unlink()
    if kind == "model":
        save_file({"weight": np.zeros(3, np.float32)}, path, metadata={"format": "pt"})
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        write_features(path.with_name("real.safetensors"), KEYS, make_features())
        path.symlink_to("real.safetensors")
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.write_bytes({"empty": b"", "text": b"my notes", "huge header": b"\xff" * 100}[kind])


@pytest.mark.parametrize("kind", ["model", "folder", "link", "dangling", "fifo", "empty", "text", "huge header"])
def test_nothing_of_others_is_overwritten(path, kind):
    make_foreign(path, kind)
    if not path.is_symlink() and path.is_file():  # a file that replaced ours has our claim
        shutil.rmtree(path.parent / ".rollalloc")
    before = sorted(path.parent.iterdir())
    assert not holds_features(path)
    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match=r"which was not written by rollalloc.* move it away"):
            write_features(path, KEYS, make_features(), overwrite=overwrite)
    assert sorted(path.parent.iterdir()) == before


@pytest.mark.parametrize("before", [True, False])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch, before):
    path = tmp_path / "f.safetensors"
    if before:
        write_features(path, KEYS, make_features())
    held = {file: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}

    def full(tensors, file, metadata):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rollalloc.data.feature_file.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        write_features(path, KEYS, make_features(), overwrite=True)
    assert {file: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()} == held


@pytest.mark.parametrize("name", ["features", "features.npz", ".safetensors", "a/.safetensors"])
def test_a_name_says_what_the_file_is(tmp_path, name):
    with pytest.raises(ValueError, match=r"ends in \.safetensors"):
        write_features(tmp_path / name, KEYS, make_features())
    assert not list(tmp_path.iterdir())


def test_features_need_one_key_for_each_row(tmp_path):
    path = tmp_path / "f.safetensors"
    with pytest.raises(ValueError, match="got 5 keys for 6 rows"):
        write_features(path, KEYS[:5], make_features())
    with pytest.raises(ValueError, match="1 keys occur more than once"):
        write_features(path, (*KEYS[:5], KEYS[0]), make_features())
    assert not path.exists()


# corrupt, foreign and hostile files


def test_a_missing_file_of_features_is_refused(tmp_path):
    for path in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(FileNotFoundError, match="no such file; `rollalloc features"):
            read_features(path, KEYS)


def test_a_torn_file_is_one_clear_error(path):
    whole = path.read_bytes()
    for length in {0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1}:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="not a complete file of features"):
            read_features(path, KEYS)
    path.write_bytes(whole + b"more")
    with pytest.raises(ValueError, match="not a complete file of features"):
        read_features(path, KEYS)


def test_a_file_of_another_schema_is_refused(path):
    changed(path, schema=1)
    with pytest.raises(ValueError, match=r"not a complete file of features of schema 4 \(.*schema 1.*write it again"):
        read_features(path, KEYS)


@pytest.mark.parametrize(
    "header",
    [
        {"schema": 1},
        {"schema": 5},
        {"made_by": "others"},
        {"prompts": 7},
        {"prompts": 6.0},
        {"blocks": {}},
        {"blocks": {"hidden": 3}},
        {"blocks": {"other": 2}},
        {"cost": {"prompts": 1, "tokens": 2, "seconds": float("nan")}},
        {"origin": {"model": "m"}},
    ],
)
def test_a_header_that_is_not_ours_is_refused(path, header):
    changed(path, **header)
    with pytest.raises(ValueError, match="not a complete file of features"):
        read_features(path, KEYS)
