"""How long a prompt's answers were at its first visit and are at its newest."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rollalloc.lab.report.lengths import first_and_newest
from rollalloc.lab.report.page import write_page


def said(key, group, tokens, **more):
    return {"key": key, "group": group, "tokens": tokens, "reward": 0.0, "text": ""} | more


def write(folder, lines, end=""):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + end)
    return folder


LINES = [
    said("a", 0, 10),
    said("b", 1, 7),
    said("a", 0, 20),
    said("a", 2, 99),
    said("c", 3, 5),  # once only
    said("a", 4, 4),
    said("b", 5, 8),
    said("b", 5, 1000, unscored="stopped", reward=None),  # it would have been longer
    said("a", 4, 6),
]


def test_a_prompts_first_group_and_its_newest(tmp_path):
    lines = [{name: value for name, value in line.items() if value is not None} for line in LINES]
    found_N2 = first_and_newest(write(tmp_path, lines, '{"corrupt'))
    np.testing.assert_array_equal(found_N2, [[15, 5], [7, 8]])


@pytest.mark.parametrize("lines", [[], [said("a", 0, 3), said("a", 0, 4)]])
def test_where_nothing_came_twice_there_is_nothing(tmp_path, lines):
    assert first_and_newest(write(tmp_path, lines)).shape == (0, 2)


@pytest.mark.parametrize("each", [1, 3])
def test_of_a_large_file_both_ends_are_read_and_no_group_in_part(tmp_path, monkeypatch, each):
    """A group's rollouts come one longer than the other; "b" and "c" are drawn at one end only."""
    monkeypatch.setattr("rollalloc.lab.report.samples._PART_BYTES", 2000)
    lines = [
        said("d" if group in (0, 90) else "abc"[0 if group % 2 else 1 + (group > 50)], group, 10 * group + at)
        for group in range(101)
        for at in range(each)
    ]
    (first, newest), *_ = first_and_newest(write(tmp_path, lines))  # of "a", and of "d" where its end is read whole
    assert first == 10 + (each - 1) / 2
    assert newest == 990 + (each - 1) / 2
    for size in range(300, 3000, 50):  # wherever it is cut, whole groups only
        monkeypatch.setattr("rollalloc.lab.report.samples._PART_BYTES", size)
        found_N2 = first_and_newest(tmp_path)
        assert ((found_N2 - (each - 1) / 2) % 10 == 0).all(), size


def test_answers_without_a_token_and_very_long_ones_are_drawn(write_run, tmp_path, recwarn):
    for label, tokens in (("grpo", 0), ("ours", 12_345)):
        write(write_run(label), [said("a", 0, tokens), said("a", 1, tokens)])
    page = write_page(tmp_path / "compare").read_text(encoding="utf-8")
    assert "0 → 0" in page
    assert "12,345 → 12,345" in page
    write_page(tmp_path / "compare" / "grpo-0")
    assert not [each for each in recwarn if "singular" in str(each.message)]


def test_the_page_has_its_figure_with_the_means(write_run, tmp_path):
    lines = [said(str(prompt), prompt, 20) for prompt in range(3)] + [said(str(p), 9 + p, 10) for p in range(3)]
    write(write_run("grpo"), lines)
    write_run("ours")  # kept none
    page = write_page(tmp_path / "compare").read_text(encoding="utf-8")
    assert "Length by prompt, before and after" in page
    figure = page.partition("Length by prompt")[2].partition("Staleness")[0]
    assert "20 → 10" in figure
    assert "grpo" in figure
    assert "ours" not in figure
