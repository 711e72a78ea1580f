"""Ten searches that find their page: run on the search index of a built site, as the last step of `make site`.

    python tools/searches.py site/    # ends with an error if a search does not have its page among the first three

Ranks as the site's own search does in what matters: a word in a heading counts far more than one in the text, a rare word
more than a frequent one, and a short part of a page more than a long one (BM25). A page has the rank of its best part.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import unescape
from math import log
from pathlib import Path

# What people type, and the pages of which one has to come among the first three.
SEARCHES: Mapping[str, Sequence[str]] = {
    "quickstart": ("docs/quickstart/",),
    "install": ("docs/install/",),
    "learning rate": ("docs/trl/", "docs/train/"),
    "vLLM server": ("docs/trl/",),
    "out of memory": ("docs/troubles/",),
    "staleness": ("docs/streaming/",),
    "--max-rollouts": ("docs/train/", "docs/commands/"),
    "resume": ("docs/train/", "docs/trl/"),
    "LoRA": ("docs/models/",),
    "wandb": ("docs/train/",),
}
FIRST = 3
_HEADING = 1000.0  # weight of a heading: the boost of the site's own search
_K, _B = 1.2, 0.75  # lunr's constants


@dataclass(frozen=True)
class Part:
    """A part of a page: its page, and how often each word stands in its heading and its text."""

    page: str
    heading: Counter[str]
    text: Counter[str]


def words(text: str) -> list[str]:
    """The words of a text, as the site's search divides it, without punctuation around them."""
    plain = unescape(re.sub(r"<[^>]*>", " ", text)).lower()
    found = (re.sub(r"^\W+|\W+$", "", word) for word in re.split(r"[\s\-]+", plain))
    return [word for word in found if word]


def parts_of(index: Path) -> list[Part]:
    """The parts of all pages in a search index of MkDocs."""
    found = json.loads(index.read_text("utf-8"))["docs"]
    return [
        Part(str(each["location"]).partition("#")[0], Counter(words(each["title"])), Counter(words(each["text"])))
        for each in found
    ]


def ranked(parts: Sequence[Part], query: str) -> list[str]:
    """The pages that have a word of the query, best first."""
    best: dict[str, float] = {}
    asked = set(words(query))
    score = dict.fromkeys(range(len(parts)), 0.0)
    for weight, field in ((_HEADING, "heading"), (1.0, "text")):
        counts: list[Counter[str]] = [getattr(part, field) for part in parts]
        mean = sum(count.total() for count in counts) / max(1, len(counts))
        for word in asked:
            having = sum(word in count for count in counts)
            rarity = log(1 + (len(counts) - having + 0.5) / (having + 0.5))
            for at, count in enumerate(counts):
                length = 1 - _B + _B * count.total() / mean if mean else 1.0
                score[at] += weight * rarity * count[word] * (_K + 1) / (count[word] + _K * length)
    for at, part in enumerate(parts):
        if score[at] > best.get(part.page, 0.0):
            best[part.page] = score[at]
    return sorted(best, key=lambda page: (-best[page], page))


def problems(parts: Sequence[Part]) -> list[str]:
    """The searches whose page is not among the first three, with what comes instead."""
    found: list[str] = []
    for query, pages in SEARCHES.items():
        first = ranked(parts, query)[:FIRST]
        if not set(first) & set(pages):
            found.append(f"{query!r} should find {' or '.join(pages)}, but finds {', '.join(first) or 'nothing'}")
    return found


def main() -> int:
    if len(sys.argv) != 2:
        print("expected the folder of the built site: python tools/searches.py site", file=sys.stderr)
        return 2
    found = problems(parts_of(Path(sys.argv[1]) / "search" / "search_index.json"))
    print(*found or [f"{len(SEARCHES)} searches find their page"], sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
