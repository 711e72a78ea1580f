"""tools/searches.py: a heading counts more than text, and a search that does not find its page is named."""

import json

import pytest

from test_tools import tool


@pytest.fixture
def searches():
    return tool("searches")


def index_of(tmp_path, *parts):
    file = tmp_path / "search_index.json"
    file.write_text(
        json.dumps({"docs": [dict(zip(("location", "title", "text"), part, strict=True)) for part in parts]})
    )
    return file


def test_a_word_of_a_heading_outranks_the_same_word_in_a_text_however_often(searches, tmp_path):
    index = index_of(
        tmp_path,
        ("dev/LOG/#today", "Figures", "<p>LoRA lora, and lora.</p>" * 9),
        ("docs/models/#lora", "<code>LoRA</code>: adapters", "<p>PEFT</p>"),
        ("docs/data/", "Data", "<p>rows</p>"),
    )
    assert searches.ranked(searches.parts_of(index), "--LoRA") == ["docs/models/", "dev/LOG/"]


def test_a_search_that_does_not_find_its_page_is_named(searches, tmp_path, monkeypatch):
    monkeypatch.setattr(searches, "SEARCHES", {"wandb": ("docs/train/",), "install": ("docs/install/",)})
    others = [(f"docs/{name}/", "wandb", "") for name in "abc"]
    index = index_of(tmp_path, *others, ("docs/train/", "Train", "wandb"), ("docs/install/", "Install", ""))
    assert searches.problems(searches.parts_of(index)) == [
        "'wandb' should find docs/train/, but finds docs/a/, docs/b/, docs/c/"
    ]
