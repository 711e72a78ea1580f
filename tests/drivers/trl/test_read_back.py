"""What a run under TRL writes, and what `waste` and `advise` read of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pandas as pd
import tiny_trl

from rollalloc.waste.finding import find
from rollalloc.waste.readers import read_log


def test_the_table_has_the_ids_of_rollouts_and_a_reader_asks_the_run_what_was_paid(tmp_path, capsys):
    """A resumed run, too. An evaluation writes its rows, which have no ids, to the table of its step."""

    def made(steps: int) -> Any:
        table = {"log_completions": True, "num_completions_to_print": 1, "save_strategy": "steps", "save_steps": 3}
        evaluated = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
        given = {"eval_dataset": tiny_trl.prompts(1)}
        return tiny_trl.trainer(tmp_path, "pilot_commit", max_steps=steps, more=given, **table, **evaluated)

    made(3).train()
    again = made(4)
    again.train(resume_from_checkpoint=True)
    tables = [pd.read_parquet(tmp_path / "completions" / f"completions_0000{step}.parquet") for step in (1, 2, 3, 4)]
    ids = [[id_ for id_ in table["rollalloc/rollout"] if isinstance(id_, str)] for table in tables]
    # A table keeps 16 rows, and each run also evaluates at its end.
    assert [*map(len, ids)] == [16, 12, 12, 12]
    assert [*Counter(id_.partition("/")[0] for id_ in ids[0]).values()] == [4, 4, 4, 4]
    log, allocator = read_log(tmp_path), again.allocation.allocator
    assert log.groups is not None
    assert len(log.groups.rewards_R) == sum(map(len, ids))
    assert log.runs[0].recipe == "pilot_commit"
    assert find(log).booked == {
        cause: count for cause, count in allocator.accounts().items() if count and cause != "open"
    }
