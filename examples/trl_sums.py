"""README's script, whole: TRL's trainer with one line changed. It downloads a model of 0.5B parameters; a laptop is enough.

    python examples/trl_sums.py

Twenty steps only show that everything works. MODEL=path/to/model trains another model, for example a local one.
"""

import os
import re

import torch
from datasets import Dataset
from trl import GRPOConfig

from rollalloc import recipes
from rollalloc.drivers.trl import AllocatedGRPOTrainer

sums = [(a, b) for a in range(50) for b in range(50)]
dataset = Dataset.from_dict(
    {
        "prompt": [[{"role": "user", "content": f"{a} + {b} = ?"}] for a, b in sums],
        "answer": [str(a + b) for a, b in sums],
    }
)


def right(completions, answer, **columns):
    numbers = [re.findall(r"\d+", messages[0]["content"]) for messages in completions]
    return [
        float(found[-1:] == [total]) for found, total in zip(numbers, answer, strict=True)
    ]  # the last number counts


config = GRPOConfig(
    output_dir="runs/trl",
    bf16=torch.cuda.is_available(),  # TRL's default, True, is refused on a machine without a GPU
    per_device_train_batch_size=32,
    num_generations=2,  # TRL refuses 1; the recipe still generates one rollout per prompt
    max_completion_length=32,
    max_steps=20,
)
trainer = AllocatedGRPOTrainer(  # instead of GRPOTrainer
    os.environ.get("MODEL", "Qwen/Qwen2.5-0.5B-Instruct"),
    right,
    args=config,
    train_dataset=dataset,
    recipe=recipes.reinforce(groups=32),
)
trainer.train()
