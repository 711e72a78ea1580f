"""Tests that every message that docs/troubles.md quotes is a message of the package."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = re.sub(
    r"\s+",
    " ",
    re.sub(r'"\s*\n\s*f?"', "", "\n".join(page.read_text("utf-8") for page in (ROOT / "src").rglob("*.py"))),
)
MESSAGES = re.findall(r'^\| "([^"]+)" \|', (ROOT / "docs" / "troubles.md").read_text("utf-8"), re.MULTILINE)


def test_the_troubles_page_quotes_messages():
    assert len(MESSAGES) > 8


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_one_of_ours(message):
    pattern = ".{1,60}?".join(re.escape(part) for part in re.split(r"\s*\.\.\.\s*", message) if part)
    assert re.search(pattern, SOURCE), f"no message of the package says {message!r}"
