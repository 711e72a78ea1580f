"""The page's files, and that nothing a run's folder may lack or hold makes it fail."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from rollalloc.lab.report.page import sections, write_page
from rollalloc.runs.discovery import comparisons

PNG = b"\x89PNG\r\n\x1a\n"
FIGURES = ("where", "accuracy", "accuracy-tokens", "training", "lengths")


class Elements(HTMLParser):
    """Every element of a page with its attributes."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_a_comparison_becomes_a_page_with_the_same_figures_as_png(write_run, tmp_path):
    for seed in range(2):
        write_run("grpo", seed)
        write_run("ours", seed, speed=1.3)
    page = write_page(tmp_path / "compare")
    assert page == tmp_path / "compare" / "report.html"
    elements = Elements(page).found
    assert [tag for tag, _ in elements].count("figure") == len(FIGURES)
    drawn = [attributes for tag, attributes in elements if tag == "svg"]
    assert all(attributes["role"] == "img" and len(attributes["aria-label"]) > 20 for attributes in drawn)
    for name in FIGURES:
        assert (tmp_path / "compare" / f"{name}.png").read_bytes()[:8] == PNG
    text = page.read_text()
    assert "ours needed" in text
    assert "fewer rollouts than grpo" in text


def test_ids_occur_once_and_what_is_referred_to_is_there(write_run, tmp_path):
    write_run("grpo")
    write_run("ours")
    text = write_page(tmp_path / "compare").read_text()
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:url\(#|href="#|aria-labelledby=")([\w-]+)', text)) <= set(ids)


def test_every_colour_of_a_figure_follows_the_page(write_run):
    text = write_page(write_run("grpo")).read_text()
    drawn = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert "var(--green)" in drawn
    left = set(re.findall(r"#[0-9a-f]{6}\b", drawn))
    assert left <= {"#000001"}  # figures on a coloured ground


@pytest.mark.parametrize("several", [True, False])
def test_no_field_that_may_lack_is_needed(write_run, tmp_path, several):
    folder = write_run("grpo", old=True)
    folder = tmp_path / "compare" if several else folder
    text = write_page(folder).read_text()
    assert "Where every rollout went" in text
    assert "Length of rollouts" not in text  # the older version did not write their lengths


@pytest.mark.usefixtures("undrawn")
def test_runs_that_are_unfinished_failed_or_not_evaluated_are_shown_as_they_are(write_run, tmp_path):
    write_run("grpo", evaluated=False)
    write_run("running", why=None, unscored={"<i>": 3})
    failed = write_run("failed")
    (failed / "metrics.jsonl").unlink()
    text = write_page(tmp_path / "compare").read_text()
    assert "running, seed 0 has not ended" in text
    assert "failed, seed 0 has written no metrics" in text
    assert "&lt;i&gt; (3)" in text


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("damage", ["{", '{"label": "old", "recipe": "grpo"}'])
def test_runs_that_cannot_be_compared_are_still_shown(write_run, tmp_path, damage):
    write_run("grpo")
    (write_run("other") / "run.json").write_text(damage)
    text = write_page(tmp_path / "compare").read_text()
    assert "the runs cannot be compared" in text
    assert "Where every rollout went" in text


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path))):
        write_page(tmp_path)


ACTING = "".join(map(chr, [*range(9), *range(11, 32), *range(127, 160), 0x202E, 0x2066, 0xFDD0, 0xFFFF, 0x10FFFE]))


def test_no_text_of_a_run_acts_on_the_page_or_ends_a_figure(write_run, tmp_path):
    name = f"[/red]{ACTING}\ud800</svg><b>$x^2$ & co"
    folder = write_run("grpo", unscored={name: 3}, why=name)
    described = json.loads((folder / "run.json").read_text())
    described |= {"label": name, "task": name, "parameters": {name: [name]}}
    described[name] = name
    (folder / "run.json").write_text(json.dumps(described))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["accounts"][name] = 5
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for place in (folder, tmp_path / "compare"):
        text = write_page(place).read_text(encoding="utf-8")
        assert set(text).isdisjoint(ACTING)
        assert text.count("⟨U+202E⟩") > 2
        assert text.count("</svg>") == text.count("<svg")
        assert "&lt;b&gt;$x^2$ &amp; co" in text
        assert "<b>$" not in text


@pytest.mark.usefixtures("undrawn")
def test_figures_of_several_tasks_have_names_of_their_own(write_run, tmp_path):
    for number, task in enumerate(("a/b", "a?b", "../\0" + "x" * 300)):
        folder = write_run(f"grpo{number}")
        described = json.loads((folder / "run.json").read_text()) | {"task": task}
        (folder / "run.json").write_text(json.dumps(described))
    write_page(tmp_path / "compare")
    drawn = sorted(path.name for path in (tmp_path / "compare").glob("*where.png"))
    assert drawn == ["1-a-b-where.png", "2-a-b-where.png", f"3--{'x' * 57}-where.png"]


def test_a_run_under_other_settings_that_has_not_ended_is_shown_beside_one_that_has(run_into, tmp_path):
    run_into(tmp_path / "first", "", 0, batches=5)
    run_into(tmp_path / "second", "", 0, batches=5, why=None, max_rollouts=9000)
    [section] = sections(comparisons(tmp_path), tmp_path)
    assert [finding.lead.split(" paid")[0].split(" has")[0] for finding in section.findings] == [
        "first (grpo)",
        "second (grpo)",
    ]
