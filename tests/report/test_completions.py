"""Rollouts of our logs, of TRL's and of verl's: what is read, what is shown, and what cannot be read."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollalloc.report.completions import FIELDS, as_rows, collected, cut, prompts_over_time
from rollalloc.report.rollouts import LogState, rollouts_of
from rollalloc.runs.discovery import comparisons
from rollalloc.runs.recorded import RecordedRun


def shown(*logs):
    """The rows of the page's table, as dictionaries."""
    table = as_rows(logs)
    rows = [dict(zip(FIELDS, row, strict=True)) for row in table["rows"]]
    return [row | {"asked": table["asked"][row["asked"]]} for row in rows]


@pytest.fixture
def ours(tmp_path, rollouts_into):
    """A run of 8 groups of 4 rollouts."""
    return RecordedRun(rollouts_into(tmp_path, 8))


def test_each_rollout_says_what_became_of_it(ours):
    rows = shown(collected(ours))
    assert len(rows) == 32
    first, alike, too_hard, stopped = rows[0], rows[8], rows[12], rows[15]
    assert (first["prompt"], first["asked"], first["text"]) == ("mine/0", "What is 0? It is 3.", "It is 3.")
    assert (first["outcome"], first["kind"]) == ("right", "trained on")
    assert first["became"] == "trained on in batch 1, advantage +0.5"
    assert (alike["outcome"], alike["kind"]) == ("right", "left out: all alike")
    assert (too_hard["outcome"], too_hard["kind"]) == ("right", "left out: too hard")
    assert (stopped["outcome"], stopped["kind"], stopped["reward"]) == ("no score", "stopped early", None)
    assert rows[31]["asked"] == "What is 7? It is 3."


def test_a_rollout_of_a_trained_group_in_no_batch_was_not_selected(ours):
    path = ours.folder / "decisions.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["rows"] = lines[0]["rows"][1:]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [row["kind"] for row in shown(collected(ours))[:2]] == ["left out: not selected", "trained on"]
    path.unlink()
    assert {row["kind"] for row in shown(collected(ours))} == {"not logged", "stopped early"}


def test_a_rollout_that_was_cut_off_says_by_which_limit(ours):
    path = ours.folder / "rollouts.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0] |= {"truncated": True}
    lines[1] |= {"truncated": True, "limit": 11}
    lines[2] |= {"limit": 11}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    cut_off, stopped, ended, plain = (row["cut"] for row in shown(collected(ours))[:4])
    assert (cut_off, stopped) == ("cut off at the length limit", "stopped at the recipe's limit")
    assert (ended, plain) == ("", "")


def test_of_many_groups_some_are_shown_whole_and_spread_evenly(tmp_path, rollouts_into):
    log = collected(RecordedRun(rollouts_into(tmp_path, 1000)), 100)
    groups = [rollout.group for _, rollout in log.sample]
    assert len(log) == 4000
    assert 50 <= len(groups) <= 100
    assert {groups.count(group) for group in groups} == {4}
    steps = np.diff(sorted(set(groups)))
    assert groups[0] < 100
    assert steps.max() <= 2 * steps.min()
    assert groups[-1] > 850


def test_success_rates_and_rollouts_by_prompt_are_those_of_the_log(tmp_path, rollouts_into):
    log = collected(RecordedRun(rollouts_into(tmp_path, 800)))  # 400 prompts, each visited twice
    rates, paid = prompts_over_time(log, "grpo").panels
    [rates], [paid] = rates.marks, paid.marks
    assert np.nansum(paid.values) == 100 * 8  # the hundred most visited prompts
    assert np.nanmax(paid.values) == 4
    assert set(np.unique(rates.values[~np.isnan(rates.values)])) == {0.5, 2 / 3, 1.0}
    assert paid.labels[0].startswith("mine/")
    assert "(8 rollouts" in paid.labels[0]
    assert np.isnan(rates.values).sum() == np.isnan(paid.values).sum()


def test_long_texts_keep_their_beginning_and_their_end():
    text = "a" * 5000 + "b" * 5000
    assert cut(text) == "a" * 2800 + "\n[… 6,000 characters …]\n" + "b" * 1200
    assert cut("short") == "short"


def test_lines_that_cannot_be_used_are_counted_and_the_first_is_named(ours):
    with (ours.folder / "rollouts.jsonl").open("a") as file:
        file.write(
            '{"group": 1}\nnonsense\n[]\n'
            + json.dumps({"group": 9, "key": "k", "reward": 1e999})
            + '\n{"group": 3, "ke'
        )
    log = collected(ours)
    assert len(log) == 33
    assert log.sample[-1][1].reward is None
    assert log.reading.problem == "rollouts.jsonl:33: no group and key, and 2 more; left out"


def test_decisions_that_somebody_edited_do_no_harm(ours):
    lines = ['{"batch": 1, "rows": [[0]], "groups": {"trained": 7}}', '{"rows": {}, "groups": []}', "[]"]
    (ours.folder / "decisions.jsonl").write_text("\n".join(lines) + "\n")
    log = collected(ours)
    assert log.reading.bad == 2
    assert {row["kind"] for row in shown(log)} == {"not logged", "stopped early"}


def test_completions_of_trl_are_read_with_their_rewards(tmp_path):
    (tmp_path / "completions").mkdir()
    table = {
        "step": [5] * 4,
        "prompt": [[{"role": "user", "content": "2 + 2?"}]] * 2 + [[{"role": "user", "content": "3 + 3?"}]] * 2,
        "completion": [[{"role": "assistant", "content": words}] for words in ("4", "5", "6", "7")],
        "right": [1.0, 0.0, 1.0, None],
        "short": [0.0, 0.0, 0.5, None],
        "advantage": [1.0, -1.0, 0.0, 0.0],
    }
    pq.write_table(pa.table(table), tmp_path / "completions" / "completions_00005.parquet")
    (tmp_path / "completions" / "completions_00006.parquet").write_bytes(b"cut off")
    log = collected(RecordedRun(tmp_path))
    rows = shown(log)
    assert [(row["asked"], row["text"], row["reward"], row["outcome"]) for row in rows] == [
        ("2 + 2?", "4", 1.0, "right"),
        ("2 + 2?", "5", 0.0, "wrong"),
        ("3 + 3?", "6", 1.5, "right"),
        ("3 + 3?", "7", None, "no score"),
    ]
    assert [row["group"] for row in rows] == [1, 1, 2, 2]
    assert rows[0]["became"] == "advantage +1"
    assert "completions_00006.parquet: cannot be read" in log.reading.problem


def test_rows_that_our_trainer_names_are_in_its_groups_and_replayed_ones_are_shown_once(tmp_path):
    """Two visits of one prompt are two groups, although their rows lie side by side."""
    (tmp_path / "completions").mkdir()
    for step, names in enumerate((["0/0", "0/1", "1/2"], ["2/3", "0/1"])):
        count = len(names)
        table = {"step": [step] * count, "prompt": ["2 + 2?"] * count, "completion": names, "right": [1.0] * count}
        made = pa.table(table | {"rollalloc/rollout": names, "advantage": [1.0] * count})
        pq.write_table(made, tmp_path / "completions" / f"completions_{step:05d}.parquet")
    rows = shown(collected(RecordedRun(tmp_path)))
    assert [(row["group"], row["text"]) for row in rows] == [(1, "0/0"), (1, "0/1"), (2, "1/2"), (3, "2/3")]


def test_pilots_and_commits_in_a_dump_of_verl_are_one_group(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine.jsonl").write_text(json.dumps({"step": 1, "data": {"timing_s/step": 1.0}}) + "\n")
    row = {"input": "2 + 2?", "output": "4", "score": 1.0, "step": 1}
    rows = [row | {"uid": uid} for uid in ("g5s0r1_0_0", "g5s1r9_0_0", "g50s0r3_0_0")]
    (tmp_path / "mine" / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    [[run]] = comparisons(tmp_path).values()
    one, same, other = (rollout.group for rollout in rollouts_of(run, LogState()))
    assert one == same != other


def test_dumps_of_verl_belong_to_the_log_of_their_name(tmp_path):
    log = tmp_path / "mine.jsonl"
    log.write_text(json.dumps({"step": 1, "data": {"timing_s/step": 1.0, "critic/score/mean": 0.5}}) + "\n")
    (tmp_path / "mine").mkdir()
    row = {"input": "user 2 + 2?", "output": "4", "score": 1.0, "step": 1, "uid": "a_0_0"}
    (tmp_path / "mine" / "1.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({"input": "x"}) + "\n")
    [[run]] = comparisons(tmp_path).values()
    state = LogState()
    [rollout] = rollouts_of(run, state)
    assert (rollout.asked, rollout.text, rollout.reward, rollout.version) == ("user 2 + 2?", "4", 1.0, 1)
    assert (state.source, state.bad) == ("mine/*.jsonl", 1)
