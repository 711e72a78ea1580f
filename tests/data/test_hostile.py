"""Prompt files and folders that are not what they should be: named with file and row, and never overwritten."""

# pyright: reportArgumentType=false

import json
import logging
from collections import deque
from itertools import product
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollalloc.data import prepare
from rollalloc.data._files import read_rows, write_rows
from rollalloc.data.prompts import load_prompts, write_prompts


def row(content="2+2=", ground_truth="4", **extra_info):
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": content}],
        "reward_model": {"ground_truth": ground_truth},
        "extra_info": extra_info,
    }


def nested(depth):
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (json.dumps(row("\ud800")), r"content of each message must be text, got '\\ud800' with half of a surrogate"),
        (json.dumps(row(ground_truth="a\udfff")), "reward_model.ground_truth must be text, .* as character 2"),
        (json.dumps(row(ground_truth={"\ud800": 1})), "reward_model.ground_truth must be text"),
        (json.dumps(row(index="\ud800")), "extra_info.index must be text"),
        (json.dumps(row() | {"prompt": "\ud800"}), "prompt must be text"),
        (json.dumps(row() | {"data_source": "\ud800"}), "data_source must be text"),
        (
            json.dumps(row(ground_truth=float("nan"))),
            "ground_truth must not contain NaN, because no answer equals NaN, got nan",
        ),
        (json.dumps(row(ground_truth=[1.0, float("nan")])), "ground_truth must not contain NaN"),
        (json.dumps(row()).replace('"4"', nested(200)), "must not be nested more than 100 levels deep"),
        (nested(100_000), r"expected one JSON object on each line, got b'\[.*nested too deep"),
        ('{"prompt": "a", "prompt": "b"}', "the key 'prompt' occurs twice in one object"),
        (json.dumps(row()).replace('"4"', "9" * 5000), "expected one JSON object on each line"),
        (json.dumps({"\x1b[2J": 1}), r"missing or null, found \\x1b\[2J"),
        (json.dumps(row(prior=10**400)), "prior must be a success rate"),
    ],
)
def test_an_odd_row_is_named_with_file_and_row(tmp_path, line, said):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row()) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=said) as caught:
        load_prompts(path)
    assert type(caught.value) is ValueError
    assert str(caught.value).startswith(f"{path}:2: ")


def test_parquet_that_breaks_off_further_in_is_named_with_its_row(tmp_path):
    path, texts = tmp_path / "a.parquet", [f"unlike any other {at:05d} " * 20 for at in range(4000)]
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, path, row_group_size=2000, compression="snappy", use_dictionary=False)
    content = bytearray(path.read_bytes())
    half = len(content) * 3 // 4
    content[half : half + 500] = bytes(500)
    path.write_bytes(content)
    places = []
    with pytest.raises(ValueError, match=rf"{path}:\d+: from this row on, not a readable parquet file") as caught:
        deque((places.append(place) for place, _ in read_rows(path)), maxlen=0)
    assert places == [f"{path}:{at}" for at in range(1, len(places) + 1)]
    assert f"{path}:{len(places) + 1}: " in str(caught.value)


def test_repeated_rows_and_shared_indices_are_said(tmp_path, caplog):
    write_prompts(tmp_path / "a.jsonl", [row("a", index=0), row("a", index=0), row("b", index=1), row("c", index=1)])
    with caplog.at_level(logging.WARNING):
        assert load_prompts(tmp_path / "a.jsonl").dropped == {"duplicate": 1}
    assert "1 of 4 rows repeat a prompt that came before" in caplog.text
    assert "2 of 3 rows share an index with another row of the same source, for example 'sums/1'" in caplog.text


@pytest.mark.parametrize(
    ("name", "bad"),
    [*product(["a.jsonl", "a.parquet"], [object(), {1, 2}]), ("a.parquet", "\ud800")],  # JSON can hold the last one
)
def test_rows_are_written_whole_or_not_at_all(tmp_path, name, bad):
    path = tmp_path / name
    path.write_bytes(b"what was there")
    with pytest.raises(ValueError, match=f"{name}: "):
        write_rows(path, [{"a": "fine"}, {"a": bad}])
    assert [file.name for file in tmp_path.iterdir()] == [name]
    assert path.read_bytes() == b"what was there"


# ---------------------------------------------------------------------------------------------- what is not ours to write


@pytest.fixture
def sets(tmp_path):
    for part in ("gsm8k_train", "gsm8k_test"):
        write_rows(tmp_path / "sets" / f"{part}.jsonl", [{"question": f"{part}?", "answer": "#### 1"}])
    return tmp_path / "sets"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_a_file_that_rollalloc_did_not_write_is_never_overwritten(sets, tmp_path, overwrite, kind):
    out = tmp_path / "out"
    path = out / "gsm8k_test.parquet"
    out.mkdir()
    if kind == "file":
        write_rows(path, [{"mine": 1}])
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError, match=r"holds gsm8k_test.parquet, which was not written by rollalloc"):
        prepare.prepare(["gsm8k"], out, local=sets, overwrite=overwrite)
    assert list(out.iterdir()) == [path]  # nor was the other file made


@pytest.mark.parametrize("again", [False, True], ids=["new", "made again"])
def test_a_call_that_is_killed_before_the_file_has_its_name_may_be_repeated(sets, tmp_path, monkeypatch, again):
    out = tmp_path / "out"
    if again:
        prepare.prepare(["gsm8k"], out, local=sets)
    write_rows(sets / "gsm8k_train.jsonl", [{"question": "another?", "answer": "#### 2"}])
    replace, left = Path.replace, [1]

    def killed(self, target):
        if target.suffix == ".parquet" and not left.pop():
            return self
        if target.suffix == ".parquet" and target.parent == out and not target.name.startswith(".partial"):
            raise KeyboardInterrupt
        left.append(1)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare.prepare(["gsm8k"], out, local=sets, overwrite=True)
    monkeypatch.undo()
    assert not list(out.glob(".partial*"))
    assert again == (out / "gsm8k_train.parquet").exists()
    files = prepare.prepare(["gsm8k"], out, local=sets, overwrite=True)
    assert load_prompts(files[0].path).ground_truths == ("2",)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("polaris", [1]),
        ("polaris", {"problem": "Q?", "answer": "1", "difficulty": "1/0"}),
        ("dapo17k", {"prompt": [{"content": [1]}], "reward_model": {"ground_truth": "1"}, "extra_info": {"index": 1}}),
        ("math500", {"problem": "\ud800", "answer": "1"}),
    ],
)
def test_a_row_that_is_none_of_its_set_is_named(tmp_path, name, bad):
    path = tmp_path / f"{name}.jsonl"
    path.write_text(json.dumps(bad) + "\n")
    with pytest.raises(ValueError, match=rf"{path}:1: "):
        prepare.prepare([name], tmp_path / "out", local=tmp_path)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(), max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["data_source", "prompt", "reward_model", "extra_info"]), anything, st.booleans())
def test_every_row_is_loaded_or_named(tmp_path, field, value, deep):
    path, odd = tmp_path / "a.jsonl", row(index=1)
    if deep and isinstance(odd[field], dict):
        odd[field] = {"index": value, "prior": value, "ground_truth": value}
    else:
        odd[field] = value
    path.write_text(json.dumps(row()) + "\n" + json.dumps(odd) + "\n")
    try:
        load_prompts(path).table()
        return
    except ValueError as error:
        refused = error
    assert type(refused) is ValueError
    assert f"{path}:2" in str(refused)
