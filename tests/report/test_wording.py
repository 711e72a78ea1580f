"""Sentences against hand-made summaries."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_series import run_of

from rollalloc.compare.summary import LAST, Interval, RecipeSummary, Summary, ended
from rollalloc.report.wording import caveats, findings, name_of, odd_targets, story
from rollalloc.runs.cost import COSTS
from rollalloc.runs.reader import read_run
from rollalloc.runs.recorded import by_label
from rollalloc.train.config import read_config


def method(label, *, ratio=None, taught=40):
    return RecipeSummary(
        label=label,
        recipe=label,
        parameters={},
        seeds=tuple(range(5)),
        reached=5,
        costs=dict.fromkeys(COSTS, Interval(1000.0, 900.0, 1100.0, (1000.0,) * 5)),
        ratios=dict.fromkeys(COSTS, ratio),
        standard_error=0.0,
        last=dict.fromkeys(LAST),
        k=None,
        accounts={"trained": taught, "zero_variance": 100 - taught},
        rollouts_paid=100,
        folders=(Path("a"),) * 5,
    )


def said_of(other):
    """What is said of the method beside a baseline."""
    sentences = findings(Summary("task", 0.8, "grpo", (method("grpo", taught=32), other), ()))
    return "".join(sentences[other.label])


def ratio(point, low=None, high=None, bound=""):
    return Interval(point, low, high, (point,) * 5, bound)


@pytest.mark.parametrize(
    ("given", "beginning"),
    [
        (
            ratio(1 / 1.05, 1 / 1.2, 1 / 1.02),
            "ours needed 5% more rollouts than grpo for held-out accuracy 0.8 (95% interval: 2% more to 20% more); 40%",
        ),
        (
            ratio(1.25, 0.8, 2.0),
            (
                "ours needed 20% fewer rollouts than grpo for held-out accuracy 0.8 (95% interval: 50% fewer to 25% more, "
                "so no clear difference); 40%"
            ),
        ),
        (
            ratio(0.4),
            (
                "ours needed 2.5 times as many rollouts as grpo for held-out accuracy 0.8 (5 seeds, too few for an "
                "interval); 40%"
            ),
        ),
        (
            ratio(2.0, bound=">"),
            (
                "ours needed 1,000 rollouts (95% interval 900 to 1,100) for held-out accuracy 0.8, at most 0.50 times what "
                "grpo paid; 40%"
            ),
        ),
    ],
)
def test_a_loss_is_said_as_plainly_as_a_win(given, beginning):
    assert said_of(method("ours", ratio=given)) == f"{beginning} of its rollouts taught something, grpo's 32%."


def test_a_run_by_itself(write_run):
    run = read_run(write_run(why=None, batches=10))
    assert "".join(story([run], "grpo")) == (
        "grpo has so far paid 1,000 rollouts; 40% of its rollouts taught something. Its held-out accuracy went from "
        f"{run.curve.accuracy[0]:.3f} to {run.curve.accuracy[-1]:.3f}."
    )
    assert "".join(story([replace(run, metrics=[])], "grpo")) == "grpo has not paid a rollout yet."


def test_where_no_groups_are_compared_it_is_said_with_what_each_rollout_was(write_run):
    folder = write_run(batches=10)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    alone = [line | {"groups": line["rows"]} if line["kind"] == "batch" else line for line in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in alone))
    run, over = read_run(folder), ended(read_config(folder), folder)
    assert (run.grouped, over.grouped) == (False, False)
    assert (
        "40% of its rollouts taught something, each compared with a baseline of its recipe, not with a group"
        in "".join(story([run], "grpo"))
    )
    for recipe, parameters, baseline in (
        ("foresight", {}, "the pass rate that was predicted for its prompt"),
        ("reinforce", {"baseline": "running"}, "the mean of all rewards so far"),
        ("reinforce", {}, "the mean of the batch's other rewards"),
    ):
        alone = replace(method("ours"), grouped=False, recipe=recipe, parameters=parameters)
        assert said_of(alone).endswith(
            f"40% of its rollouts taught something, each compared with {baseline}, not with a group."
        )


def test_runs_of_one_recipe_under_other_settings_are_told_apart_by_their_folder(run_into, tmp_path):
    """Runs trained one by one have no label: two of them pass for seeds only where nothing but the seed differs."""
    runs = []
    for name, seed, budget in (("first", 0, 6000), ("second", 1, 6000), ("longer", 0, 9000)):
        runs.append(read_run(run_into(tmp_path / name, "", seed, max_rollouts=budget)))
    assert {label: len(of_label) for label, of_label in by_label(runs[:2]).items()} == {"grpo": 2}
    assert list(by_label(runs)) == ["first (grpo)", "second (grpo)", "longer (grpo)"]
    assert name_of(runs[2]) == "longer, seed 0"


def test_caveats_name_the_run_and_what_is_wrong_with_it(write_run):
    runs = [
        read_run(write_run("whole")),
        read_run(write_run("running", why=None)),
        read_run(write_run("blind", evaluated=False)),
        read_run(write_run("unsure", unscored={"timeout <b>": 7})),
    ]
    (runs[1].folder / "run.json").write_text("{")
    runs.append(replace(read_run(runs[1].folder), metrics=[]))
    said = caveats(runs)
    assert not any("whole" in each for each in said)
    for beginning in (
        "running, seed 0 has not ended",
        "blind, seed 0 was not evaluated",
        "unsure, seed 0: 7 of 6,000 rollouts have no score; they count as paid, not as wrong. timeout <b> (7)",
        "unsure, seed 0: 1 prompt set aside",
        "running-0 cannot be read in full: run.json: ",
        "running-0 has written no metrics",
    ):
        assert [each for each in said if each.startswith(beginning)], (beginning, said)


@pytest.mark.parametrize(
    ("accuracies", "sentence"),
    [
        ([0.1, 0.7, 0.2], "was at the target 0.6 in some evaluation, but not in two in a row, so it does not count"),
        ([0.1, 0.2, 0.7], "was at the target 0.6 in some evaluation, but not in two in a row, so it does not count"),
        ([0.7, 0.8, 0.2], "was at the target 0.6 before any training: set a higher --target."),
        ([0.1, 0.7, 0.8], None),
        ([0.1, 0.2, 0.3], None),
    ],
)
def test_a_target_that_is_touched_or_where_the_run_began_is_said(accuracies, sentence):
    run = run_of(*((10 * at, accuracy) for at, accuracy in enumerate(accuracies)))
    run = replace(run, folder=Path("grpo"), description={"label": "grpo", "target": 0.6, "seed": 3})
    said = odd_targets([run])
    assert [line.startswith("grpo, seed 3 was at") and sentence in line for line in said] == [True] * bool(sentence)
    assert [line for line in caveats([run]) if line in said] == said
