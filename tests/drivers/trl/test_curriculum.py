"""What `rollalloc advise --export` writes is read by TRL's trainer, stock or under a recipe, and by prime-rl's pools."""

from __future__ import annotations

from types import SimpleNamespace

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
    assert counts[[2, 5]].sum() > counts[[0, 4]].sum()  # a rate of 1/2 weighs most under the mix variance


def test_prime_rl_takes_the_rates_as_the_state_of_its_pools(curriculum):
    """Needs a checkout of prime-rl on the path, which has no package."""
    pytest.importorskip("prime_rl.orchestrator", reason="prime-rl is not on PyPI")
    try:
        from prime_rl.orchestrator import samplers as pool
    except ImportError:  # as at commit 559b447
        from prime_rl.orchestrator.curriculum.samplers import pool
    pools = {"hard": (0.25, 0.2), "normal": (0.75, 1.0), "easy": (1.0, 0.2)}  # its defaults
    config = SimpleNamespace(
        seed=0, pools={name: SimpleNamespace(threshold=most, weight=each) for name, (most, each) in pools.items()}
    )
    rows = pyarrow.parquet.read_table(curriculum).to_pylist()
    sampler = pool.DifficultyPoolSampler(config, [SimpleNamespace(key=row["key"]) for row in rows])
    state = sampler.state_dict() | {"task_rewards": {row["key"]: row["rate"] for row in rows}}
    sampler.load_state_dict(state)
    assert [sampler.task_pool(row["key"]) for row in rows] == [row["pool"] for row in rows]
    assert sampler.metrics()["pool/unseen"] == 0
    drawn = [next(sampler).key for _ in range(300)]
    hardest, middle = rows[0]["key"], rows[2]["key"]
    assert drawn.count(middle) > 2 * drawn.count(hardest)
