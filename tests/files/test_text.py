"""Hostile text, made visible."""

import unicodedata
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollalloc.files.text import one_line, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\n", "plain\ttext\n"),
        ("\x1b[31m\x00\x7f", "␛[31m␀⟨U+007F⟩"),
        ("\u202eevil\u2066", "⟨U+202E⟩evil⟨U+2066⟩"),
        ("a\u200bb\ufeff", "a⟨U+200B⟩b⟨U+FEFF⟩"),
        ("\ud800", "⟨U+D800⟩"),
        ("\uffff\ufdd0\U0010fffe\ufffd", "⟨U+FFFF⟩⟨U+FDD0⟩⟨U+10FFFE⟩\ufffd"),
        ("\x1b]8;;http://a\x07b\x9b", "␛]8;;http://a␇b⟨U+009B⟩"),
        ("<b>שלום</b>", "<b>שלום</b>"),
    ],
)
def test_what_acts_or_hides_is_shown(text, shown):
    assert visible(text) == shown


@given(st.text(st.characters(categories=["Cc", "Cf", "Cs", "Zl", "Zp", "L"])))
def test_nothing_hidden_is_left(text):
    left = set(visible(text)) - {"\n", "\t"}
    assert all(unicodedata.category(letter) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for letter in left)


@given(st.text())
def test_what_is_visible_is_xml_and_stays_as_it_is(text):
    shown = visible(text)
    assert ElementTree.fromstring(f"<a>{escape(shown)}</a>").text == (shown or None)
    assert visible(shown) == shown


@given(st.text())
def test_a_name_is_one_short_line(text):
    name = one_line(text, 12)
    assert len(name) <= 12
    assert name == " ".join(name.split())
