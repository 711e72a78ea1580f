"""A task of two turns: the product of two numbers, which a tool knows. For TRL (trl_tools.py) and verl; CPU, no download.

    python examples/multiplying.py FOLDER [STEPS]       # about a minute with the 1,500 steps that it takes otherwise

writes prompts, and a tiny Qwen2 that calls the tool in a third of its rollouts and guesses in the others, so that training
can show it which one pays. verl loads this file twice more: for the tool, and for the reward.
"""

import json
import random
import sys
from collections.abc import Collection
from pathlib import Path

try:
    from verl.tools.function_tool import function_tool  # pyright: ignore[reportMissingImports]
except ImportError:  # TRL takes the plain function

    def function_tool(function):
        return function


PIECES = (  # a token each, so that a call is short
    *(f"<|im_start|>{role}\n" for role in ("user", "assistant", "tool")),
    *('<tool_call>\n{"name": "multiply", "arguments": {"a": ', ', "b": ', "}}\n</tool_call>"),
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RESPONSE = {  # how transformers reads what the model wrote; TRL finds the calls of tools by it
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>", "content": "text"},
    },
}
SHOWN, STEPS, GUESSES = 48, 1500, 2 / 3  # dialogues a step, steps, share of dialogues that guess


@function_tool
def multiply(a: int, b: int) -> str:
    """Multiply two numbers.

    Args:
        a: One.
        b: The other.

    Returns:
        Their product.
    """
    return str(a * b)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Whether the last turn is the product; what the tool said does not count."""
    last = solution_str.rpartition("assistant\n")[2]
    return float(last.removesuffix("<|im_end|>").strip() == ground_truth)


def question(chance):
    a, b = chance.randrange(10, 100), chance.randrange(10, 100)
    return a, b, {"role": "user", "content": f"{a}*{b}"}


def dialogue(chance):
    """A guess, or a call of the tool and its answer."""
    a, b, asked = question(chance)
    if chance.random() < GUESSES:
        return [asked, {"role": "assistant", "content": str(chance.randrange(100, 10_000))}]
    call = {"function": {"name": "multiply", "arguments": {"a": a, "b": b}}}
    told = [{"role": role, "content": str(a * b)} for role in ("tool", "assistant")]
    return [asked, {"role": "assistant", "content": "", "tool_calls": [call]}, *told]


def make_prompts(path, count, seed, apart: Collection[str] = ()):
    """Write prompts whose questions are not among `apart`; returns their questions."""
    from datasets import Dataset

    chance, rows = random.Random(seed), []
    while len(rows) < count:
        a, b, asked = question(chance)
        if asked["content"] in apart:
            continue
        truth = {"style": "rule", "ground_truth": str(a * b)}
        rows.append(
            {"data_source": "products", "prompt": [asked], "reward_model": truth, "extra_info": {"index": len(rows)}}
        )
    Dataset.from_list(rows).to_parquet(path)
    return {row["prompt"][0]["content"] for row in rows}


def make_model(folder, steps):
    """Warm a tiny Qwen2 up on dialogues, on the assistant's tokens alone."""
    import torch
    from tokenizers import AddedToken
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    words.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in PIECES])
    words.chat_template = TEMPLATE
    words.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"  # written here, since releases before 5.13 do not know the setting
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"response_template": RESPONSE}))
    model.resize_token_embeddings(len(words))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    start, end = words.convert_tokens_to_ids([PIECES[1], "<|im_end|>"])
    chance = random.Random(0)
    for _ in range(steps):
        texts = [words.apply_chat_template(dialogue(chance), tokenize=False) for _ in range(SHOWN)]
        batch = words(texts, padding=True, padding_side="right", return_tensors="pt")
        ids = batch["input_ids"]
        begun, ended = (ids == start).cumsum(1), (ids == end).cumsum(1)
        own = (ids != start) & (begun > 0) & ((ended - (ids == end).long()) % 2 == 1) & batch["attention_mask"].bool()
        loss = model(**batch, labels=torch.where(own, ids, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python examples/multiplying.py FOLDER [STEPS]")
    sys.path.insert(0, str(Path(__file__).parent / "verl"))
    import make_tiny  # pyright: ignore[reportMissingImports]
    import torch

    torch.set_num_threads(1)  # more threads gain nothing on so small a model, and lose much on a busy machine
    torch.manual_seed(0)
    folder = Path(sys.argv[1])
    make_tiny.make_model(folder / "model")
    make_model(folder / "model", int(sys.argv[2]) if sys.argv[2:] else STEPS)
    trained = make_prompts(folder / "train.parquet", 2048, 1)
    make_prompts(folder / "test.parquet", 256, 2, trained)
