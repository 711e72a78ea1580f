"""Logs of runs of rollalloc: what was paid is read from the run itself, and groups from their ids."""

# pyright: reportOptionalMemberAccess=false

import pyarrow
import pyarrow.parquet
import pytest
from logged import each, lines, rewards

from recorded_run import Run
from rollalloc import recipes
from rollalloc.runs.trl_log import ROLLOUT
from rollalloc.waste.finding import find, sentence
from rollalloc.waste.readers import read_log

RECIPES = {
    "dapo": recipes.dapo(groups=3, n=4, gen_groups=5),
    "pods": recipes.pods(groups=3, n=8, m=4),
    "pilot_commit": recipes.pilot_commit(groups=3, n_pilot=2, n_commit=2, gen_groups=5),
    "cgrpo": recipes.cgrpo(groups=3, sizes_S=(2, 4, 8)),
    "knapsack": recipes.knapsack(groups=3, n=4),
    "reinforce": recipes.reinforce(groups=12),
    "raft": recipes.raft(groups=12),
}


def groups_of(run):
    """The rewards of each group that was trained on."""
    groups = {}
    for batch in run.batches:
        for row in batch.rows:
            groups.setdefault(row.group, []).append(run.reward[row.rollout])
    return [*groups.values()]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("write", [Run.trl, Run.verl])
def test_what_taught_is_of_all_that_was_paid_and_groups_are_the_run_s_own(tmp_path, name, write):
    run = Run(RECIPES[name]).train()
    log = read_log(write(run, tmp_path / "run"))
    assert sorted(map(sorted, rewards(log))) == sorted(map(sorted, groups_of(run)))
    finding = find(log)
    assert finding.booked == run.ended
    paid = sum(run.ended.values())
    assert finding.wasted == 1 - run.ended["trained"] / paid
    assert sentence(finding) == f"{finding.wasted:.1%} of {paid:,} rollouts taught nothing, by the run's own accounts."
    lacks = paid > len(log.groups.rewards_R)
    assert any(f"of the {paid} rollouts that the run paid" in note for note in finding.notes) == lacks
    assert lacks == (name in ("dapo", "pods", "pilot_commit"))


def test_a_table_that_keeps_rows_of_earlier_batches_counts_each_rollout_once(tmp_path):
    """TRL's table has a fixed number of rows, and a recipe with groups of varying size trains on fewer."""
    run = Run(RECIPES["cgrpo"]).train()
    log = read_log(run.trl(tmp_path / "ids", table=24))
    assert rewards(log) == groups_of(run)
    assert any("rows repeat a rollout of an earlier batch" in note for note in log.notes)
    assert rewards(read_log(run.trl(tmp_path / "none", ids=False, table=24))) == groups_of(run)  # by the logged sizes


def test_without_a_state_the_ids_say_that_rollouts_are_missing(tmp_path):
    run = Run(RECIPES["pods"]).train()
    finding = find(read_log(run.trl(tmp_path / "run", state=False)))
    assert not finding.booked
    said = sentence(finding)
    assert " of 72 rollouts that were trained on taught nothing: 18 groups of " in said
    assert said.endswith("more were paid and are not in the log.")
    assert 0 < finding.skipped <= len(run.reward) - 72


def test_a_log_that_went_on_after_the_newest_checkpoint_is_said_to(tmp_path):
    run = Run(recipes.grpo(groups=3, n=4)).train(3)
    folder = tmp_path / "run"
    run.trl_checkpoint(folder)
    run.train(2).trl(folder, state=False)
    finding = find(read_log(folder))
    assert sum(finding.booked.values()) == 36
    assert "the log has 60 rollouts, and checkpoint-3 counts 36: the run went on after that file" in finding.notes


def test_rows_without_ids_in_a_log_with_ids_are_of_evaluations(tmp_path):
    folder = Run(recipes.grpo(groups=3, n=4)).train(2).trl(tmp_path / "run", state=False)
    last = folder / "completions" / "completions_00002.parquet"
    table = pyarrow.parquet.read_table(last)
    at = table.schema.get_field_index(ROLLOUT)
    ids = pyarrow.array([None if row < 4 else name for row, name in enumerate(table[ROLLOUT].to_pylist())])
    pyarrow.parquet.write_table(table.set_column(at, ROLLOUT, ids), last)
    log = read_log(folder)
    assert len(log.groups.rewards_R) == 20
    assert any(note.startswith("4 rows are of steps with an evaluation") for note in log.notes)


def test_accounts_beside_a_log_count_though_only_the_log_was_given(tmp_path):
    row = {"key": "a", "version": 0, "group": 0}
    log = lines(tmp_path / "rollouts.jsonl", [row | {"rollout": at, "metric": float(at)} for at in range(2)])
    paid = {"rollouts_paid": 5, "tokens_paid": 9, "seconds": 1.0, "accounts": {"trained": 2, "stale": 3}}
    lines(tmp_path / "metrics.jsonl", [{"kind": "end", "why": "done"} | paid])
    assert sentence(find(read_log(log))).startswith("60.0% of 5 rollouts taught nothing, by the run's own accounts")


def test_what_the_recipe_s_limit_stopped_is_not_called_truncated(tmp_path):
    """Groups of two wrong rollouts: stopped by the recipe, by the generator's own limit, and of both of which one ended."""
    cut = [
        [{"truncated": True, "limit": 5}] * 2,
        [{"truncated": True}] * 2,
        [{"truncated": True, "limit": 5}, {"limit": 5}],
    ]
    rows = [
        {"key": str(group), "version": 0, "group": group, "rollout": 2 * group + at, "metric": 0.0} | how
        for group, hows in enumerate(cut)
        for at, how in enumerate(hows)
    ]
    right = {"key": "r", "version": 0, "group": 9, "rollout": 9, "metric": 1.0, "truncated": True, "limit": 5}
    log = read_log(lines(tmp_path / "rollouts.jsonl", [*rows, right]))
    assert log.groups.truncated_V.tolist() == [2, 2, 1, 1]
    assert log.groups.limited_V.tolist() == [2, 0, 1, 1]
    assert {cause: count for cause, count in find(log).shares.rollouts.items() if count} == {
        "all_limited": 2,
        "all_truncated": 2,
        "all_wrong": 2,
    }
    odd = read_log(lines(tmp_path / "odd" / "rollouts.jsonl", [right | {"limit": "five"}]))
    assert (odd.odd, odd.groups.limited_V.tolist()) == (1, [0])


# ------------------------------------------------------------------------------------------------------- logs without ids


def stock(folder, *series):
    """A table of TRL's own trainer: a series of rows for each prompt, of groups of rewards."""
    rows = [
        {"step": 1, "prompt": prompt, "right": reward, "advantage": reward - sum(group) / len(group)}
        for prompt, groups in series
        for group in groups
        for reward in group
    ]
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "1.parquet")
    return folder


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        ([("a", [[0.0, 1, 0, 0], [0.0, 0, 0, 0]])], [[0, 1, 0, 0], [0, 0, 0, 0]]),  # drawn twice in a row, and only so
        ([("a", [[0.0, 1, 0, 0]]), ("b", [[0.0] * 4, [0.0] * 4])], [[0, 1, 0, 0], [0] * 4, [0] * 4]),
        (
            [("a", [[0.0, 1]]), ("b", [[0.0, 1, 0, 0]]), ("c", [[0.0] * 8])],
            [[0, 1], [0, 1, 0, 0], [0] * 8],
        ),  # sizes vary
        ([("a", [[0.0] * 4]), ("b", [[1.0] * 8])], [[0] * 4, [1] * 4, [1] * 4]),  # no advantage: the shortest
    ],
)
def test_advantages_show_where_groups_end(tmp_path, series, expected):
    assert [group.rewards for group in each(read_log(stock(tmp_path / "log", *series)).groups)] == expected
