"""Lines are decoded as the standard library decodes them, whichever library does it."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollalloc.data.jsonl import Unreadable, decoded, read_lines

# Whole numbers around the edges of 64 bits, fractions of many digits, halves of surrogates: where libraries differ.
numbers = (
    st.integers()
    | st.integers(-2, 2).flatmap(lambda off: st.sampled_from([10**18, 2**63, 2**64, 10**19, 10**40]).map(off.__add__))
    | st.floats(width=64)
)
texts = st.text(st.characters(codec=None), max_size=8) | st.text("0123456789", min_size=15, max_size=25)
values = st.recursive(
    st.none() | st.booleans() | numbers | numbers.map(lambda number: -number) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
)


def outcome(decode, line):
    """What a line comes to, where NaN equals itself and 1 is not 1.0; or why it is none."""
    try:
        return repr(decode(line))
    except (ValueError, RecursionError) as error:
        return type(error), str(error)


def standard(line):
    return json.loads(line.decode("utf-8"))


@given(values, st.booleans(), st.sampled_from(["", " ", "\r\n", "\x0b", ",", "\ufeff"]))
def test_a_value_is_decoded_to_the_same(value, as_ascii, end):
    line = (json.dumps(value, ensure_ascii=as_ascii) + end).encode("utf-8", "surrogatepass")
    assert outcome(decoded, line) == outcome(standard, line)


@pytest.mark.parametrize("depth", [1, 500, 513, 980, 1000, 1024, 1025, 100_000])
@pytest.mark.parametrize("level", ["[]", '{"a":}'])
def test_nesting_ends_where_it_does_in_the_standard_library(depth, level):
    begin, end = level[:-1], level[-1]
    line = (begin * depth + ("1" if end == "}" else "") + end * depth).encode()
    ends = []
    for decode in (decoded, standard):
        try:
            decode(line)
            ends.append(None)
        except RecursionError as error:
            ends.append(str(error))
    assert ends[0] == ends[1]


def test_lines_of_a_file_keep_what_only_the_standard_library_takes(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"a": NaN}\n\n{"a": 340282366920938463463374607431768211457}\n"\\ud800"\n[1,]\n\xff\n'
    )
    (first, nan), (third, huge), (fourth, half), (fifth, comma), (sixth, bytes_) = read_lines(path)
    assert [first, third, fourth, fifth, sixth] == [1, 3, 4, 5, 6]
    assert math.isnan(nan["a"])
    assert huge == {"a": 2**128 + 1}
    assert half == "\ud800"
    assert comma == Unreadable("Expecting value: line 1 column 4 (char 3)", "b'[1,]\\n'")
    assert isinstance(bytes_, Unreadable)
    assert "can't decode byte 0xff in position 0" in bytes_.why
