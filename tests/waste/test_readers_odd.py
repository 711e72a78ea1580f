"""Logs in which anything may stand anywhere: what is no use is counted and named with file and row, or refused."""

import bz2
import gzip
import json
import random
import re
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from logged import lines, rewards

from rollalloc.data import jsonl
from rollalloc.waste.finding import find
from rollalloc.waste.readers import FORMATS, Options, read_log

SAMPLES = Path(__file__).parent / "samples"
ODD = [
    None, "x", "", -1, 10**400, 1e308, float("nan"), float("inf"), [], {}, [1, [2]], {"a": {}}, True, "\ud800", 2**63,
]  # fmt: skip


@pytest.mark.parametrize("odd", ["one", "nan", [1], {"a": 1}, float("inf"), float("nan"), 10**400])
def test_an_odd_score_is_unscored_counted_and_named(tmp_path, odd):
    row = {"input": "a", "output": "b", "score": 1, "step": 1}
    log = read_log(lines(tmp_path / "1.jsonl", [row, row | {"score": odd}]))
    assert rewards(log) == [[1, None]]
    assert log.odd == 1
    assert log.first_odd.startswith(f"{tmp_path / '1.jsonl'}:2: score is ")


@pytest.mark.parametrize(
    ("name", "row", "field", "odd", "said"),
    [
        ("1.jsonl", {"input": "a", "output": "b", "score": 1}, "step", [1], r"step is \[1\], expected a whole number"),
        ("1.jsonl", {"input": "a", "output": "b", "score": 1}, "step", 10**30, "step is 10+"),
        ("1.jsonl", {"input": "a", "output": "b", "score": 1}, "input", None, "expected the fields input and acc or score"),
        ("rollouts.jsonl", {"group": 1, "version": 1, "key": "k", "metric": 1.0}, "group", [1], "expected group, version"),
        ("rollouts.jsonl", {"group": 1, "version": 1, "key": "k", "metric": 1.0}, "truncated", "false", "truncated is"),
        ("rollouts.jsonl", {"group": 1, "version": 1, "key": "k", "metric": 1.0}, "stage", {}, "stage is {}"),
        ("t.jsonl", {"group_id": "g", "task": {"key": "k"}, "rewards": {"r": 1}}, "group_id", {"a": 1}, "a group's id"),
        ("t.jsonl", {"group_id": "g", "task": {"key": "k"}, "rewards": {"r": 1}}, "rewards", {"r": "x"}, "reward r is 'x'"),
        (
            "t.jsonl", {"group_id": "g", "task": {"key": "k"}, "rewards": {"r": 1}}, "rewards",
            {"r": {"score": 1, "weight": "x"}}, "weight of reward r is 'x'",
        ),
    ],
)  # fmt: skip
def test_an_odd_field_is_counted_and_named(tmp_path, name, row, field, odd, said):
    rows = [row | {"rollout": at} if name == "rollouts.jsonl" else row for at in range(3)]
    log = read_log(lines(tmp_path / name, [*rows[:2], rows[2] | {field: odd}]))
    assert log.odd + log.bad == 1
    assert re.search(rf"{tmp_path / name}:3: .*{said}", log.first_odd + log.first_bad)
    assert any("3: " in note for note in find(log).notes)


def test_trl_odd_columns_are_named(tmp_path):
    def write(name, **columns):
        pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "a"], **columns}), tmp_path / name)

    write("1.parquet", r=[0.0, 1.0])
    write("2.parquet", r=["0", "1"])
    write("3.parquet", other=[0.0, 1.0])
    write("4.parquet", r=[float("inf"), 1.0], step=["x", "2"])
    write("5.parquet", r=[0.5, 1.0], prompt=[None, "a"])
    log = read_log(tmp_path)
    assert rewards(log) == [[0, 1], [0, 1], [None, 1], [1]]
    assert (log.bad, log.odd) == (2, 2)
    assert log.first_bad.startswith(f"{tmp_path / '2.parquet'}: expected the column prompt and a column of numbers")
    assert "reward: r and in other files other" in log.notes
    assert log.first_odd == f"{tmp_path / '4.parquet'}:1: step is 'x', expected a whole number"
    with pytest.raises(ValueError, match=r"2\.parquet: column r holds string, expected numbers"):
        read_log(tmp_path / "2.parquet", options=Options(reward="r"))


def test_groups_without_a_step_are_told_of(tmp_path):
    row = {"input": "a", "output": "b", "score": 1}
    log = read_log(lines(tmp_path / "x.jsonl", [row | {"step": 3}, row | {"input": "b"}]))
    assert any("1 groups with an unknown step were left out" in note for note in find(log, from_step=1).notes)


def test_a_line_of_any_length_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "LONGEST", 1000)
    row = json.dumps({"input": "a", "output": "b", "score": 1})
    for filling in (999 - len(row), 1000 - len(row), 5000):
        log = read_log(lines(tmp_path / "1.jsonl", [row, row + " " * filling, row]))
        fits = len(row) + filling + 1 <= 1000
        assert (rewards(log), log.bad) == ([[1, 1, 1]], 0) if fits else ([[1, 1]], 1)


# ------------------------------------------------------------------------------------------------------- corrupted samples


def changed(value, dice):
    """Plain data with one place of it taken out or made odd."""
    inside = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    if not inside or dice.random() < 0.1:
        return dice.choice(ODD)
    at, copy = dice.choice(list(inside)), value.copy()
    if dice.random() < 0.2:
        del copy[at]
    else:
        copy[at] = changed(value[at], dice)
    return copy


def corrupt(file, dice):
    if file.suffix == ".parquet" or dice.random() < 0.3:
        content = bytearray(file.read_bytes())
        for _ in range(dice.randint(1, 9)):
            content[dice.randrange(len(content))] = dice.randrange(256)
        file.write_bytes(content[: dice.randint(1, len(content))] if dice.random() < 0.2 else content)
        return
    held = file.read_text().splitlines()
    for at in dice.sample(range(len(held)), min(4, len(held))):
        held[at] = dice.choice(["[" * 5000, json.dumps(changed({"a": 1}, dice))] + 8 * [held[at]])
        if held[at].startswith("{"):
            # A whole number of too many digits cannot be written by json either.
            held[at] = json.dumps(changed(json.loads(held[at]), dice))
    file.write_text("\n".join(held))


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(list(FORMATS)), st.integers(0, 1 << 30), st.booleans())
def test_a_corrupted_sample_is_read_and_told_of_or_refused(tmp_path, format, seed, say):
    dice, folder = random.Random(seed), tmp_path / "log"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(SAMPLES / format, folder)
    files = sorted(file for file in folder.rglob("*") if file.suffix in (".jsonl", ".parquet"))
    for file in dice.sample(files, dice.randint(1, len(files))):
        corrupt(file, dice)
    try:
        said = find(read_log(folder, format if say else None)).described()
        json.dumps(said, default=float).encode()
        assert all(note.isprintable() for note in said["notes"])
        return
    except ValueError as error:
        refused = error
    assert type(refused) is ValueError
    assert str(refused).isprintable()
    assert str(folder) in str(refused) or "but it counts none" in str(refused)


def rows_of(*sizes):
    return [
        {"input": f"p{at}", "output": "x", "score": at % 2, "step": 1}
        for at, size in enumerate(sizes)
        for _ in range(size)
    ]


@pytest.mark.parametrize("format", ["verl/v1", "verifiers", "rollalloc"])
def test_a_file_that_gzip_packed_is_read_as_it_is(tmp_path, format):
    for file in (SAMPLES / format).rglob("*.jsonl"):
        (tmp_path / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
    packed, plain = read_log(tmp_path), read_log(SAMPLES / format)
    assert (packed.format, packed.bad) == (plain.format, 0)
    assert rewards(packed) == rewards(plain)


@pytest.mark.parametrize("keep", [0.6, 0.0])
def test_what_of_a_packed_file_can_be_read_counts_and_the_rest_is_named(tmp_path, keep):
    row = {"input": "a", "output": "b", "score": 1, "step": 1}
    lines(tmp_path / "1.jsonl", [row, row])
    packed = gzip.compress("".join(json.dumps(row | {"output": str(at)}) + "\n" for at in range(90_000)).encode())
    (tmp_path / "2.jsonl.gz").write_bytes(packed[: int(keep * len(packed))] if keep else b"not packed at all")
    log = read_log(tmp_path)
    assert sum(map(len, rewards(log))) >= (1000 if keep else 2)
    assert log.bad == 1
    assert log.first_bad.startswith(f"{tmp_path / '2.jsonl.gz'}: the packed file is damaged or cut off (")


@pytest.mark.parametrize("forced", [None, "verifiers"])
def test_another_packed_file_is_to_be_unpacked(tmp_path, forced):
    file = tmp_path / "traces.jsonl.bz2"
    file.write_bytes(bz2.compress((SAMPLES / "verifiers" / "traces.jsonl").read_bytes()))
    with pytest.raises(ValueError, match=r"found traces\.jsonl\.bz2; unpack it first"):
        read_log(file, forced)


def test_groups_of_one_rollout_are_too_few_to_say_anything(tmp_path):
    """A log of REINFORCE has nothing else: that all of it taught nothing would be wrong."""
    found = find(read_log(lines(tmp_path / "1.jsonl", rows_of(*[1] * 5))))
    assert found.described()["finding"].startswith(
        "No group has 2 rollouts or more, so it is unknown what the 5 rollouts taught"
    )
    assert (found.wasted, found.shares, found.alone) == (None, None, 5)


def test_a_few_groups_of_one_rollout_spoil_nothing_of_what_the_others_say(tmp_path):
    without = find(read_log(lines(tmp_path / "1.jsonl", rows_of(*[8] * 90))))
    found = find(read_log(lines(tmp_path / "1.jsonl", rows_of(*[8] * 90, *[1] * 20))))
    assert found.shares == without.shares
    assert "20 rollouts alone in their group are not counted" in found.described()["finding"]
    assert any(note.startswith("20 rollouts are alone in their group") for note in found.notes)
