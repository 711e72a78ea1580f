"""TRL's asynchronous trainer under recipes, on CPUs: python experiments/trl_async.py [--steps 150] [--seeds 0 1 2].

A tiny model from scratch learns sums of two numbers modulo 4. Said of each run: accuracy before and after (exactly: the mean
probability of the right answer), rollouts paid, stopped, trained and without variance, updates that trained rows were old,
seconds. Generation is in a process of its own.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace

import torch
from datasets import Dataset
from transformers.utils.logging import disable_progress_bar
from trl.experimental.async_grpo import AsyncGRPOConfig

from rollalloc import Recipe, recipes
from rollalloc.experimental.trl_async import AllocatedAsyncGRPOTrainer
from rollalloc.lab.bench.tasks.tiny import Shape, tiny_model, word_tokenizer

PAIRS = [(one, other) for one in range(8) for other in range(8)]
TOKENIZER = word_tokenizer(["plus", *(f"k{number}" for number in range(8)), *(f"a{number}" for number in range(4))])
DATA = Dataset.from_list(
    [{"prompt": f"k{one} plus k{other} =", "answer": f"a{(one + other) % 4}"} for one, other in PAIRS]
)
RECIPES: dict[str, Recipe] = {
    "grpo": recipes.grpo(groups=8, n=8),
    "grpo, one ahead": replace(recipes.grpo(groups=8, n=8), max_staleness=1),
    "pilot_commit": recipes.pilot_commit(groups=8, n_pilot=4, n_commit=4, gen_groups=16),
    "reinforce": recipes.reinforce(groups=64),
}


def right(completions: list[str], answer: list[str], **_: object) -> list[float]:
    return [float(text.split()[:1] == [wanted]) for text, wanted in zip(completions, answer, strict=True)]


def accuracy(weights: dict[str, torch.Tensor]) -> float:
    """Mean probability of the right first token."""
    model = tiny_model(TOKENIZER, Shape(hidden=64, layers=2, context=16))
    model.load_state_dict(weights)
    prompts = TOKENIZER(list(DATA["prompt"]), return_tensors="pt")["input_ids"]
    wanted = TOKENIZER(list(DATA["answer"]), return_tensors="pt")["input_ids"][:, :1]
    with torch.no_grad():
        return float(model(prompts).logits[:, -1].softmax(-1).gather(1, wanted).mean())


def run(name: str, seed: int, steps: int, folder: str) -> str:
    recipe = RECIPES[name]
    one = name == "reinforce"
    args = AsyncGRPOConfig(
        f"{folder}/out",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=4,
        num_generations=1 if one else 8,
        max_completion_length=2,
        max_steps=steps,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        seed=seed,
    )
    torch.manual_seed(seed)
    model = tiny_model(TOKENIZER, Shape(hidden=64, layers=2, context=16))
    model.save_pretrained(f"{folder}/{seed}")
    TOKENIZER.save_pretrained(f"{folder}/{seed}")
    trainer = AllocatedAsyncGRPOTrainer(f"{folder}/{seed}", right, args, DATA, recipe=recipe)
    before, began = accuracy(model.state_dict()), time.monotonic()
    trainer.train()
    core, seconds = trainer.allocation.allocator, time.monotonic() - began
    after = accuracy({key: tensor.detach() for key, tensor in trainer.model.state_dict().items()})
    lines = [line for line in trainer.state.log_history if "sample/staleness_mean" in line]
    mean = sum(line["sample/staleness_mean"] for line in lines) / len(lines)
    oldest = max(line["sample/staleness_max"] for line in lines)
    counts = {cause: count for cause, count in core.accounts().items() if count}
    paid = f"paid {core.paid} {counts}" if sum(counts.values()) == core.paid else "ACCOUNTS DO NOT SUM UP"
    return (
        f"{name:16} seed {seed}: {before:.3f} -> {after:.3f}, {core.version} batches, {paid}, "
        f"old {mean:.2f} on average, {oldest:.0f} at most, {seconds:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=list(RECIPES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        found = [run(name, seed, given.steps, folder) for name in given.only for seed in given.seeds]
    print("\n".join(["", *found]))


if __name__ == "__main__":
    main()
