"""The page's files, and that nothing a run's folder may lack or hold makes it fail."""

from __future__ import annotations

import base64
import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from rollalloc.report.interactive import as_json, plotly, script_hash
from rollalloc.report.page import MOST, sections, write_page
from rollalloc.runs.discovery import comparisons

PNG = b"\x89PNG\r\n\x1a\n"
FIGURES = (
    "where",
    "where-over-time",
    "accuracy",
    "accuracy-tokens",
    "accuracy-seconds",
    "prompts",
    "training",
    "lengths",
)


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
    drawn = [attributes for tag, attributes in elements if "plot" in attributes.get("class", "").split()]
    assert all(attributes["role"] == "img" and len(attributes["aria-label"]) > 20 for attributes in drawn)
    for name in FIGURES:
        assert (tmp_path / "compare" / f"{name}.png").read_bytes()[:8] == PNG
        assert (tmp_path / "compare" / f"{name}.csv").read_text().count("\n") > 2
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
    [section] = sections(comparisons(write_run("grpo")), Path())
    drawn = as_json([plotly(chart) for chart in section.charts]).decode()
    assert "var(--green)" in drawn
    assert not re.findall(r"#[0-9a-f]{3,6}\b|rgb", drawn)


def packed_data(text):
    """The figures and rollouts that are packed into a page."""
    [packed] = re.findall(r'id="data">([^<]*)<', text)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_the_policy_allows_the_scripts_of_the_page_and_no_others(write_run):
    text = write_page(write_run("grpo", batches=5)).read_text()
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src &#39;none&#39;")
    [library] = re.findall(r'id="library">([^<]*)<', text)
    [script] = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    allowed = [script_hash(gzip.decompress(base64.b64decode(library))), script_hash(script.encode())]
    assert policy.partition("script-src ")[2] == " ".join(allowed).replace("'", "&#39;")


@pytest.mark.usefixtures("undrawn")
def test_where_date_command_and_commit_come_from_is_said(write_run, tmp_path):
    folder = write_run("grpo", batches=5)
    described = json.loads((folder / "run.json").read_text())
    started = {"date": "2026-01-02 03:04:05 UTC", "commit": "abc-dirty", "command": "rollalloc train --x '<b>'"}
    (folder / "run.json").write_text(json.dumps(described | {"starts": [started, 7]}))
    text = write_page(folder, out=tmp_path / "page.html").read_text()
    for words in (str(folder), "2026-01-02 03:04:05 UTC", "abc-dirty", "rollalloc train --x &#39;&lt;b&gt;&#39;"):
        assert words in text
    (folder / "run.json").write_text(json.dumps(described | {"starts": "odd"}))
    assert "not logged" in write_page(folder, out=tmp_path / "page.html").read_text()


@pytest.mark.usefixtures("undrawn")
def test_several_folders_are_compared_on_one_page_and_a_run_in_two_of_them_counts_once(run_into, tmp_path):
    one, two = run_into(tmp_path / "a" / "one", "one", 0), run_into(tmp_path / "b" / "two", "two", 0)
    text = write_page(one, two, one).read_text()
    assert text.count("one needed") == text.count("two needed") == 1
    assert "Accuracy at equal cost" in text
    assert (one / "report.html").exists()
    assert not (two / "report.html").exists()


def test_accuracies_at_equal_cost_are_those_of_the_curves(write_run, tmp_path):
    for label, speed in (("grpo", 1.0), ("ours", 1.5)):
        write_run(label, batches=60 if label == "grpo" else 40, speed=speed, why="budget: spent")
    [section] = sections(comparisons(tmp_path), tmp_path)
    rollouts, *_ = section.equal
    assert (rollouts.cost, list(rollouts.amounts)) == ("rollouts", [1000, 2000, 3000, 4000])
    for (label, accuracies), run in zip(rollouts.rows, section.runs, strict=True):
        curve = dict(zip(run.curve.rollouts, run.curve.accuracy, strict=True))
        assert label == run.label
        assert [each.point for each in accuracies] == [pytest.approx(curve[at]) for at in rollouts.amounts]


@pytest.mark.usefixtures("undrawn")
def test_a_page_stays_short_although_the_texts_cannot_be_compressed(write_run, rollouts_into):
    rng = np.random.default_rng(0)
    texts = tuple(base64.b64encode(rng.bytes(2900)).decode() for _ in range(2000))
    page = write_page(rollouts_into(write_run("grpo", batches=5), 1000, texts))
    assert page.stat().st_size <= MOST
    assert len(packed_data(page.read_text())["completions"]["1"]["rows"]) > 100


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
        assert text.count("</script>") == text.count("<script") == 3
        charts = packed_data(text)["charts"].values()
        drawn = json.dumps([chart["figure"] for chart in charts], ensure_ascii=False)
        assert set(drawn).isdisjoint(ACTING)
        assert "<" not in re.sub("<b>|</b>|<br>|<extra></extra>", "", drawn)
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
