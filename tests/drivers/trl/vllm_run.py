"""One training run by TRL's trainer with the real vLLM on CPUs: vllm_run.py MODEL RECIPE AVERAGING OUT."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import vllm.model_executor.layers.utils as layers
from datasets import Dataset
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig
from trl.generation import vllm_generation

from rollalloc import Limit, recipes
from rollalloc.drivers.trl import AllocatedGRPOTrainer


def keep_weights(layer: Any, remove_weight: bool) -> None:
    """Let a layer compute with its own weights. vLLM's CPU build packs them, and packed weights cannot be updated."""
    layer.cpu_linear = lambda x, weight, bias: linear(x, layer.weight, bias)


def digits(completions: list[str], **_: Any) -> list[float]:
    """The share of digits, which a random model learns in a few steps."""
    return [sum(map(str.isdigit, text)) / max(1, len(text)) for text in completions]


def halves(completions: list[str], **_: Any) -> list[float]:
    """About every second completion is right, whatever the model has learned."""
    return [float(crc32(text.encode()) % 2) for text in completions]


LIMITED = recipes.reinforce(16).replace(limit=Limit(share=0.05, every=3, last=16))


def main(model: str, recipe: str, averaging: int, out: Path) -> None:
    layers.dispatch_cpu_unquantized_gemm = keep_weights
    engine: Any = vllm_generation
    engine.LLM = partial(engine.LLM, enforce_eager=True, dtype="float32")  # TRL has no settings for these
    args = GRPOConfig(
        str(out),
        use_cpu=True,
        bf16=False,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=64,
        per_device_train_batch_size=16,
        num_generations=4 if recipe == "grpo" else 2,
        max_completion_length=40 if recipe == "limited" else 12,
        max_steps=6,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    before = policy.lm_head.weight.detach().clone()
    trainer = AllocatedGRPOTrainer(
        policy,
        halves if recipe == "limited" else digits,
        args,
        Dataset.from_dict({"prompt": [f"{number} + 1 =" for number in range(64)]}),
        processing_class=AutoTokenizer.from_pretrained(model),
        recipe=LIMITED if recipe == "limited" else recipe,
        averaging=averaging,
    )
    trainer.train()
    moved = float((policy.lm_head.weight - before).abs().mean())
    found = {"log": trainer.state.log_history, "moved": moved, "accounts": trainer.allocation.allocator.accounts()}
    (out / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
