"""Makes what the verl example trains: a tiny Qwen2 with a tokenizer of bytes, and sums as prompts. No download."""

import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

CHAT = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)


def make_model(folder: Path) -> None:
    bytes_only = {character: index for index, character in enumerate(bytes_to_unicode().values())}
    tokenizer = Qwen2Tokenizer(
        vocab=bytes_only,
        merges=[],
        unk_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    ends: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,  # heads of 32: vLLM on a CPU refuses 16
            num_key_value_heads=1,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            bos_token_id=None,
            **ends,
        )
    )
    model.generation_config.update(**ends)
    model.save_pretrained(folder)


def make_prompts(path: Path, first: int, count: int) -> None:
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{number}+{number}="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
            "extra_info": {"index": number},
        }
        for number in range(first, first + count)
    ]
    Dataset.from_list(rows).to_parquet(path)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    make_model(folder / "model")
    make_prompts(folder / "train.parquet", 0, 2048)
    make_prompts(folder / "test.parquet", 5000, 8)
