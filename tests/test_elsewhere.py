"""docs/elsewhere.md: its examples run, the one for slime against stand-ins for what it imports."""

import asyncio
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rollalloc import Budget, recipes

BLOCKS = re.findall(
    r"```python\n(.*?)```", (Path(__file__).parents[1] / "docs" / "elsewhere.md").read_text("utf-8"), re.DOTALL
)


@pytest.fixture
def page() -> dict[str, Any]:
    """What the page's blocks define, one after the other."""
    defined: dict[str, Any] = {}
    for block in BLOCKS:
        exec(block, defined)
    return defined


@pytest.mark.parametrize("name", ["dapo", "pilot_commit", "pods", "racing", "reinforce"])
def test_the_plain_loop_makes_batches_until_the_budget_is_spent(page, name):
    recipe = {
        "dapo": recipes.dapo(groups=4, n=4, gen_groups=8),
        "pilot_commit": recipes.pilot_commit(groups=2, n_pilot=4, n_commit=4, gen_groups=8),
        "pods": recipes.pods(groups=4, n=6, m=4),
        "racing": recipes.racing(groups=4, sizes_S=(2, 4), gen_groups=8),
        "reinforce": recipes.reinforce(groups=8),
    }[name]
    batches = page["Batches"](replace(recipe, budget=Budget(run_rollouts=300)), 20)
    asked = 0

    def roll_out(orders):
        nonlocal asked
        asked += sum(n for _, n in orders)
        return [
            [None if (prompt, at) == (3, 0) else (float((prompt + at) % 3 == 0), 5, (prompt, at)) for at in range(n)]
            for prompt, n in orders
        ]

    made = 0
    while (rows := batches.next(roll_out)) is not None:
        made += 1
        assert all(payload[0] == row.prompt for row, payload in rows)
    accounts = batches.allocator.accounts()
    assert made > 3
    assert sum(accounts.values()) == asked <= 300
    assert accounts["trained"] > 0
    assert accounts["open"] == 0


def test_slimes_function_returns_rows_with_their_advantages(page, monkeypatch):
    def module(name, **names):
        made = ModuleType(name)
        vars(made).update(names)
        monkeypatch.setitem(sys.modules, name, made)

    class Sample(SimpleNamespace):
        def get_reward_value(self, args):
            return self.reward

    async def generate_and_rm_group(args, group, sampling_params, evaluation=False):
        for at, sample in enumerate(group):
            sample.reward, sample.response_length = float((sample.index + at) % 2), 7
        return group

    for name in ("slime", "slime.rollout", "slime.utils"):
        module(name)
    module("slime.rollout.base_types", RolloutFnTrainOutput=SimpleNamespace)
    module(
        "slime.rollout.sglang_rollout",
        GenerateState=lambda args: SimpleNamespace(sampling_params={}),
        eval_rollout=None,
        generate_and_rm_group=generate_and_rm_group,
    )
    module("slime.utils.async_utils", run=asyncio.run)

    class Source:
        def __len__(self):
            return 9

        def get_samples(self, count):
            return [[Sample(index=4 * n + at, reward=None, rollout_id=None) for at in range(4)] for n in range(count)]

    args = SimpleNamespace(rollout_batch_size=2, n_samples_per_prompt=4)
    for rollout_id in range(3):
        output = page["generate_rollout"](args, rollout_id, Source())
        samples = [sample for group in output.samples for sample in group]
        assert len(samples) == 8
        assert len({sample.rollout_id for sample in samples}) == 8
        assert sum(sample.reward for sample in samples) == pytest.approx(0, abs=1e-6)
        assert {abs(sample.reward) for sample in samples} != {0.0}
