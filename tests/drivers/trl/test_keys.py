"""Prompts found again by key."""

from __future__ import annotations

import logging

import pytest
from datasets import Dataset

from rollalloc.drivers.trl.dataset import check_key, keyed, rows_of

CHATS = [
    [{"role": "user", "content": "one"}],
    [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}],
    [{"role": "user", "content": "onetwo"}],
    [{"role": "assistant", "content": "one"}],
]


def found(now: Dataset, before: Dataset, column: str | None = None) -> list[int]:
    """For each row its place before."""
    source_N = keyed(now, column).source_of(keyed(before, column).state_dict(), "keys")
    assert source_N is not None
    return source_N.tolist()


@pytest.mark.parametrize("prompts", [["a", "b", "", "c"], CHATS], ids=["text", "chats"])
def test_a_prompt_is_found_wherever_it_stands_and_whatever_stands_beside_it(prompts):
    before = Dataset.from_dict({"prompt": prompts, "answer": [1, 2, 3, 4]})
    now = Dataset.from_dict({"other": ["x"] * 4, "prompt": prompts}).select([2, 0, 3, 1])
    assert found(now, before) == [2, 0, 3, 1]
    assert found(now.select([1]), before) == [0]


def test_fields_of_messages_that_other_rows_brought_do_not_change_a_key():
    """A column of Arrow gives each message the fields of all, null where it had none."""
    wide = [[{"role": "user", "content": "new", "name": "me", "parts": [{"n": 1}]}], *CHATS]
    assert found(Dataset.from_list([{"prompt": chat} for chat in wide]), Dataset.from_dict({"prompt": CHATS})) == [
        -1, 0, 1, 2, 3
    ]  # fmt: skip


def test_prompts_that_repeat_are_numbered_in_silence(caplog):
    """They are told of when training begins (`check_data`), and not again at the first checkpoint."""
    rows = Dataset.from_dict({"prompt": ["a", "b", "a", "a"], "id": [7, 8, 9, 10]})
    with caplog.at_level(logging.INFO):
        assert len(set(keyed(rows, None).keys)) == 4
    assert not caplog.records
    assert found(rows.select([0, 1, 2]), rows) == [0, 1, 2]
    assert found(rows.select([3, 2, 1, 0]), rows, "id") == [3, 2, 1, 0]


def test_a_key_must_tell_each_row_from_the_others():
    rows = Dataset.from_dict({"prompt": ["a", "b", "c"], "id": ["x", "y", "x"], "some": ["x", None, "z"]})
    with pytest.raises(ValueError, match="key='id': rows 0 and 2 have the same key, 'x'"):
        check_key(rows, "id")
    with pytest.raises(ValueError, match="key='some': row 1 has no key"):
        check_key(rows, "some")
    with pytest.raises(ValueError, match="key='number' is no column of the data set; it has prompt, id, some"):
        check_key(rows, "number")
    check_key(rows, "prompt")


def test_rows_are_read_at_once_where_the_data_set_can():
    class OneRead(list):
        reads = 0

        def __getitems__(self, numbers):
            self.reads += 1
            return [self[number] for number in numbers]

    rows = [{"prompt": str(number)} for number in range(5)]
    several = OneRead(rows)
    assert rows_of(several, range(4, 1, -1)) == rows_of(rows, range(4, 1, -1)) == rows[4:1:-1]
    assert rows_of(Dataset.from_list(rows), [3, 0]) == [rows[3], rows[0]]
    assert several.reads == 1
