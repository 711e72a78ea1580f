"""Checkpoints whose files are whole but say something else: one error that names file and place, never a bare one."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollalloc.files.json_shape import TRAINER, check_shape
from rollalloc.train import checkpoint

STATE = {
    "identity": {"prompts": "a", "config": {}, "model": {}},
    "allocator": {"recipe": {}, "batch": None, "prompts": {"count": 2}},
    "counters": {
        "batches": 1,
        "seconds": 0.5,
        "next_at": 0,
        "made": {},
        "accuracies": [[0, 0.5]],
        "barren_groups": 0,
        "watched": {"pass_at_k": 0.5},
    },
    "optimizer_steps": 1,
    "rollouts": {
        "generations": [[0, 2, 0]],
        "stream": {"in_flight": [[1, 1, False, 0, 0, 0, [[0, 1]]]], "straddled": 0, "paces": [1, 2, 0.5]},
        "waves": [[1.0, 1.0, False, 2]],
        "unscored": {"x": 1},
    },
    "written": {"metrics.jsonl": {"bytes": 0, "sha256": "a"}},
}
TENSORS = {
    "weights": {"w": torch.zeros(2)},
    "optimizer": {},
    "payloads": {
        "tokens": torch.zeros(2, dtype=torch.int64),
        "logprobs": torch.zeros(2),
        "stream_tokens": torch.zeros(1, dtype=torch.int64),
        "stream_logprobs": torch.zeros(1),
    },
}
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats() | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=4,
)


def places(value, path=()):
    """Every place within plain data, the whole included."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, entry in inside:
        yield from places(entry, (*path, name))


def with_at(value, path, new):
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = with_at(copy[path[0]], path[1:], new)
    return copy


def save(folder, state=STATE, tensors=TENSORS):
    folder.mkdir(exist_ok=True)
    checkpoint.save(folder, 1, state, tensors, keep=2)
    return folder / "checkpoints/1"


def test_a_state_of_the_trainer_is_taken(tmp_path):
    save(tmp_path)
    checkpoint.check_trainer(checkpoint.load_newest(tmp_path), tmp_path)


@given(st.sampled_from([path for path in places(STATE) if path]), anything)
def test_any_change_of_a_state_is_taken_or_named_with_its_place(path, new):
    said = "state.json: " + str(path[0])
    try:
        check_shape(with_at(STATE, path, new), TRAINER, "state.json")
    except ValueError as error:
        said = str(error)
    assert said.startswith("state.json: ")
    assert str(path[0]) in said


def test_a_checkpoint_without_a_file_of_tensors_is_named(tmp_path):
    save(tmp_path, tensors={name: held for name, held in TENSORS.items() if name != "weights"})
    with pytest.raises(ValueError, match=r"manifest.json: weights.safetensors is not among its files"):
        checkpoint.check_trainer(checkpoint.load_newest(tmp_path), tmp_path)


def test_a_checkpoint_of_averaged_weights_has_those_that_are_trained(tmp_path):
    averaged = with_at(STATE, ("identity", "config"), {"averaging": 640})
    save(tmp_path, averaged)
    with pytest.raises(ValueError, match=r"manifest.json: trained.safetensors is not among its files"):
        checkpoint.check_trainer(checkpoint.load_newest(tmp_path), tmp_path)
    save(tmp_path / "whole", averaged, {**TENSORS, "trained": TENSORS["weights"]})
    checkpoint.check_trainer(checkpoint.load_newest(tmp_path / "whole"), tmp_path / "whole")


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
    assert f"checkpoint {tmp_path / 'checkpoints/1'} is corrupt: manifest.json" in caplog.text


@pytest.mark.parametrize(
    ("path", "new", "said"),
    [
        (("counters",), [], r"state.json: counters: expected names with values, got \[\] of type list"),
        (("counters", "batches"), "3", "state.json: counters.batches: expected int, got '3' of type str"),
        (("counters", "batches"), True, "counters.batches: expected int, got True of type bool"),
        (("counters", "accuracies"), [[1]], r"counters.accuracies\[0\]: expected a list of 2, got \[1\]"),
        (("allocator",), {}, "allocator: missing keys .'batch', 'prompts', 'recipe'."),
        (("allocator", "prompts"), None, "allocator.prompts: expected names with values, got null"),
        (("rollouts", "generations"), [[0, 3, 0]], "payloads.safetensors: expected tokens and logprobs of 3 entries"),
        (("rollouts", "stream"), None, "expected tokens and logprobs of 2 entries, as state.json says, got .*stream_"),
        (("rollouts", "stream", "in_flight"), [], "and stream_tokens and stream_logprobs of 0 entries"),
        (("rollouts", "stream", "paces"), [1], r"rollouts.stream.paces: expected a list of 3, got \[1\]"),
        (("more",), 1, "unknown keys .'more'."),
    ],
)
def test_an_odd_state_is_named_with_file_and_place(tmp_path, path, new, said):
    state = {**STATE, "more": 1} if path == ("more",) else with_at(STATE, path, new)
    save(tmp_path, state)
    with pytest.raises(ValueError, match=said) as caught:
        checkpoint.check_trainer(checkpoint.load_newest(tmp_path), tmp_path)
    assert str(tmp_path / "checkpoints/1") in str(caught.value)
