"""`decisions.jsonl` against the accounts of the allocator and the rollouts that were logged."""

import json
from collections import Counter
from pathlib import Path

from rollalloc import recipes


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_rollout_has_the_fate_that_the_accounts_count(trainer_of, tmp_path):
    trainer = trainer_of(
        recipes.pilot_commit(groups=2, n_pilot=2, n_commit=2, gen_groups=6), 64, folder=tmp_path, log_rollouts=True
    )
    trainer.run()
    rollouts, decided = lines_of(tmp_path / "rollouts.jsonl"), lines_of(tmp_path / "decisions.jsonl")
    fates = {group: fate for line in decided for fate, groups in line["groups"].items() for group in groups}
    rows = {rollout for line in decided for rollout, _, _ in line["rows"]}
    became = Counter[str]()
    for rollout in rollouts:
        fate = fates.get(rollout["group"], "open").partition("/")[0]
        left_out = fate == "trained" and rollout["rollout"] not in rows
        became["unselected" if left_out else fate] += 1
    assert became == {cause: count for cause, count in trainer.allocator.accounts().items() if count}
    assert len(became) > 1
    batches = [line["batch"] for line in decided if line["batch"] is not None]
    assert batches == list(range(1, len(batches) + 1))


def test_the_first_rollout_of_each_order_has_the_prompts_text(trainer_of, tmp_path):
    trainer = trainer_of(recipes.grpo(groups=2, n=3), 12, folder=tmp_path, log_rollouts=True)
    trainer.run()
    for line in lines_of(tmp_path / "rollouts.jsonl"):
        asked = trainer.train.prompt_set.text(line["prompt"]) if line["rollout"] % 3 == 0 else None
        assert line.get("prompt_text") == asked


def test_nothing_is_decided_on_disk_without_a_log(trainer_of, tmp_path):
    trainer_of(recipes.grpo(groups=2, n=2), 8, folder=tmp_path).run()
    assert not (tmp_path / "decisions.jsonl").exists()
