"""REINFORCE on Unsloth's FastLanguageModel with LoRA, on sums of two digits.

python examples/unsloth_reinforce.py    # on a CPU, with a tiny random model: shows that it runs
MODEL=HuggingFaceTB/SmolLM2-135M-Instruct python examples/unsloth_reinforce.py    # on a GPU, or, slowly, on a CPU
"""

# ruff: noqa: E402
# pyright: reportMissingImports=false

import os
import tempfile

MODEL = os.environ.get("MODEL")
if not MODEL:
    os.environ["UNSLOTH_FORCE_CPU"] = "1"  # Unsloth's kernels for GPUs do not fit a model that is so narrow

from unsloth import FastLanguageModel  # before TRL and rollalloc, because it patches TRL

# isort: split
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig

from rollalloc import recipes
from rollalloc.drivers.trl import AllocatedGRPOTrainer
from rollalloc.tasks.tiny import word_tokenizer

SUMS = [(a, b) for a in range(10) for b in range(10)]


def correct(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """A reward function of TRL's: 1 if the completion is the answer, otherwise 0."""
    return [float(text.strip().startswith(right)) for text, right in zip(completions, answer, strict=True)]


def save_tiny(folder: str) -> str:
    """Save a random model over the numbers to 99 and its tokenizer; returns the folder."""
    tokenizer = word_tokenizer([*map(str, range(100)), "+"])
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main() -> None:
    out = tempfile.mkdtemp()
    model, tokenizer = FastLanguageModel.from_pretrained(
        MODEL or save_tiny(f"{out}/model"), max_seq_length=256, load_in_4bit=False
    )
    model = FastLanguageModel.get_peft_model(
        model, r=16, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]
    )
    args = GRPOConfig(
        out,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=1,  # Unsloth's own default is 2
        num_generations=2,
        beta=0.0,  # Unsloth's own default is 0.001
        max_completion_length=4,
        max_steps=4 if not MODEL else 100,
        learning_rate=1e-4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = AllocatedGRPOTrainer(
        model,
        reward_funcs=correct,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a, b in SUMS]),
        processing_class=tokenizer,
        recipe=recipes.reinforce(groups=16),
    )
    trainer.train()
    print({cause: count for cause, count in trainer.allocation.allocator.accounts().items() if count})


if __name__ == "__main__":
    main()
