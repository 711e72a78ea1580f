"""A real log of TRL: GRPOTrainer as it comes, on skills/late with its tiny model, on a CPU; docs/advise.md reads it.

python lab/experiments/trl_log.py OUT [TASKS]
rollalloc advise OUT/completions
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from rollalloc.data.prompts import load_prompts
from rollalloc.tasks import skills

PROMPTS, EACH, STEPS = 16, 8, 24


def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """TRL's signature, 1 or 0."""
    return [float(text.strip() == wanted) for text, wanted in zip(completions, answer, strict=True)]


def main(out: str, tasks: str = "runs/tasks") -> None:
    """Train, and log every completion."""
    task = skills.prepare(Path(tasks) / "skills", "late")
    given = load_prompts(task.train)
    data = Dataset.from_dict({"prompt": list(given.prompts), "answer": list(given.ground_truths)})
    config = GRPOConfig(
        output_dir=out,
        num_generations=EACH,
        per_device_train_batch_size=PROMPTS * EACH // 2,
        gradient_accumulation_steps=2,
        max_completion_length=10,
        max_steps=STEPS,
        learning_rate=1e-6,
        beta=0.0,
        logging_steps=1,
        log_completions=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        seed=0,
    )
    reward: Any = right
    GRPOTrainer(str(task.model), reward_funcs=reward, args=config, train_dataset=data).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
