"""REINFORCE on Unsloth's FastLanguageModel with LoRA, on sums of two digits.

python examples/unsloth_reinforce.py    # on a CPU, with a tiny random model: shows that it runs
MODEL=HuggingFaceTB/SmolLM2-135M-Instruct python examples/unsloth_reinforce.py    # on a GPU
"""

# ruff: noqa: E402
# pyright: reportMissingImports=false

import os
import tempfile
from typing import Any

MODEL = os.environ.get("MODEL")
if not MODEL:  # Unsloth's own switches: without a GPU it patches nothing, and cannot compile
    os.environ |= {"UNSLOTH_ALLOW_CPU": "1", "UNSLOTH_COMPILE_DISABLE": "1", "UNSLOTH_FORCE_FLOAT32": "1"}

from unsloth import FastLanguageModel  # before TRL and rollalloc, because it patches TRL

if not MODEL:
    from unsloth.models.rl import _patch_trl_rl_trainers

    _patch_trl_rl_trainers("grpo_trainer")  # as Unsloth itself does where it finds a GPU

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig

from rollalloc import recipes
from rollalloc.drivers.trl import AllocatedGRPOTrainer
from rollalloc.lab.bench.tasks.tiny import word_tokenizer

SUMS = [(a, b) for a in range(10) for b in range(10)]


def correct(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """A reward function of TRL's: 1 if the completion is the answer, otherwise 0."""
    return [float(text.strip().startswith(right)) for text, right in zip(completions, answer, strict=True)]


def tiny(folder: str) -> tuple[Any, PreTrainedTokenizerFast]:
    """A random model over the numbers to 99, saved and loaded again, as a model from the hub would be."""
    tokenizer = word_tokenizer([*map(str, range(100)), "+"])
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    words = len(tokenizer)
    LlamaForCausalLM(LlamaConfig(vocab_size=words, max_position_embeddings=64, **sizes)).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder), tokenizer


def main() -> None:
    out = tempfile.mkdtemp()
    lora = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "r": 16, "lora_alpha": 16}
    if MODEL:
        model, tokenizer = FastLanguageModel.from_pretrained(MODEL, max_seq_length=256, load_in_4bit=False)
        model = FastLanguageModel.get_peft_model(model, **lora)
    else:  # FastLanguageModel asks for the properties of a GPU
        model, tokenizer = tiny(f"{out}/model")
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora))
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
        use_cpu=not MODEL,
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
