"""What `rollalloc advise --export` writes is read by TRL's trainer, stock or under a recipe, and by prime-rl's pools."""

# pyright: reportArgumentType=false, reportMissingImports=false

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import tiny_trl
from datasets import Dataset, load_dataset
from trl import GRPOTrainer

from curriculum_file import HITS, exported

PROMPTS = [f"k{number} =" for number in range(len(HITS))]


@pytest.fixture
def curriculum(tmp_path):
    return exported(tmp_path, PROMPTS)


@pytest.mark.parametrize("stock", [True, False])
def test_trl_trains_on_a_curriculum_that_was_drawn_by_its_weights(curriculum, stock, tmp_path):
    dataset = load_dataset("parquet", data_files=str(curriculum), split="train", cache_dir=str(tmp_path / "cache"))
    assert isinstance(dataset, Dataset)
    weight = np.array(dataset["weight"])
    drawn = dataset.select(np.random.default_rng(0).choice(len(dataset), 40, p=weight / weight.sum()))
    seen: list[tuple[str, str]] = []

    def reward(prompts, completions, reward_model, key, **columns):
        seen.extend((prompt, truth["ground_truth"]) for prompt, truth in zip(prompts, reward_model, strict=True))
        assert {"rate", "weight", "pool"} <= columns.keys()
        return [float(text.startswith("a")) for text in completions]

    trainer = tiny_trl.trainer(tmp_path, "grpo", dataset=drawn, reward=reward, max_steps=1)
    if stock:
        tokenizer = trainer.processing_class
        trainer = GRPOTrainer(trainer.model, reward, trainer.args, drawn, processing_class=tokenizer)
    trainer.train()
    assert seen
    assert set(seen) <= {(f"k{number} =", str(number)) for number in range(len(HITS))}
    counts = np.bincount([PROMPTS.index(prompt) for prompt in drawn["prompt"]], minlength=len(HITS))
    assert counts[[2, 5]].sum() > counts[[0, 4]].sum()  # 4 of 8 right weigh most, 0 and 8 of 8 least, by the variance


class Pools:
    """The rule of prime-rl's `DifficultyPoolSampler`, in our words, as its source has it at 559b447 and at 114f3ca.

    A task with a score is in the first pool, by threshold, whose threshold is not below the score, or else in the last one.
    One without a score has the weight 1. A task is drawn by the weight of its pool; the state is the generator and the
    scores by key.
    """

    def __init__(self, config: Any, tasks: Any) -> None:
        self._tasks, self._pools, self._random = tasks, config.pools, random.Random(config.seed)
        self._scores: dict[str, float] = {}

    def task_pool(self, key: str) -> str | None:
        if key not in self._scores:
            return None
        ordered = sorted(self._pools, key=lambda name: self._pools[name].threshold)
        return next((name for name in ordered if self._scores[key] <= self._pools[name].threshold), ordered[-1])

    def __next__(self) -> Any:
        pools = [self.task_pool(task.key) for task in self._tasks]
        weights = [1.0 if pool is None else self._pools[pool].weight for pool in pools]
        return self._random.choices(self._tasks, weights)[0]

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self._random.getstate(), "task_rewards": dict(self._scores)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._random.setstate(state["rng"])
        self._scores = dict(state["task_rewards"])


def own_of_prime_rl() -> Any:
    """The class itself, where a checkout of prime-rl is on the path: it has no package."""
    pytest.importorskip("prime_rl.orchestrator", reason="prime-rl is not on PyPI")
    try:
        from prime_rl.orchestrator.curriculum.samplers import pool
    except ImportError:  # as a fork has it
        from prime_rl.orchestrator import samplers as pool
    return pool.DifficultyPoolSampler


@pytest.mark.parametrize("sampler_class", [lambda: Pools, own_of_prime_rl], ids=["its rule", "itself"])
def test_prime_rl_takes_the_rates_as_the_state_of_its_pools(curriculum, sampler_class):
    pools = {"hard": (0.25, 0.2), "normal": (0.75, 1.0), "easy": (1.0, 0.2)}  # its defaults
    config = SimpleNamespace(
        seed=0, pools={name: SimpleNamespace(threshold=most, weight=each) for name, (most, each) in pools.items()}
    )
    rows = pyarrow.parquet.read_table(curriculum).to_pylist()
    sampler = sampler_class()(config, [SimpleNamespace(key=row["key"]) for row in rows])
    sampler.load_state_dict(sampler.state_dict() | {"task_rewards": {row["key"]: row["rate"] for row in rows}})
    assert [sampler.task_pool(row["key"]) for row in rows] == [row["pool"] for row in rows]
    assert {row["pool"] for row in rows} == pools.keys()
    drawn = [next(sampler).key for _ in range(300)]
    hardest, middle = rows[0]["key"], rows[2]["key"]
    assert drawn.count(middle) > 2 * drawn.count(hardest)
