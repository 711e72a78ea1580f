"""What README and the guides take for granted: files of a newcomer's folder, and names that snippets do not define."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
WORDS = [f"k{number}" for number in range(6)] + [f"a{number}" for number in range(4)]
ROWS = [
    {
        "data_source": "sums",
        "prompt": f"k{number // 36} k{number // 6 % 6} k{number % 6} =",
        "reward_model": {"style": "rule", "ground_truth": f"a{number % 4}"},
        "extra_info": {"index": number},
    }
    for number in range(160)
]
REWARD = """def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str.strip() == ground_truth)
"""


def furnish(folder: Path) -> None:
    """Put the files that commands and snippets name into a folder: models, prompts, a reward, logs of runs."""
    from rollalloc.data._files import write_rows
    from rollalloc.tasks.tiny import Shape, tiny_model, word_tokenizer

    tokenizer = word_tokenizer(WORDS)
    tokenizer.chat_template = "{% for message in messages %}k0 {% endfor %}="  # it knows no other words than its own
    model = tiny_model(tokenizer, Shape(hidden=16, layers=1, context=64))
    for name in ("path/to/model", "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-0.5B", "runs/smollm2"):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for name, rows in {"train": ROWS[:120], "test": ROWS[120:]}.items():
        write_rows(folder / f"{name}.parquet", rows)
    for name, rows in {"train": ROWS[:120], "heldout": ROWS[120:]}.items():
        write_rows(folder / "runs" / "chat" / "filter" / f"{name}.parquet", rows)
    write_rows(folder / "gsm8k.jsonl", [{"question": f"{n} + 1", "answer": f"#### {n + 1}"} for n in range(3)])
    said = [[{"role": "user", "content": f"{n} + 1"}, {"role": "assistant", "content": f"{n + 1}"}] for n in range(3)]
    write_rows(folder / "openai.jsonl", [{"messages": each} for each in said])
    write_rows(folder / "trl.parquet", [{"prompt": f"{n} + 1", "solution": str(n + 1)} for n in range(3)])
    furnish_curriculum(folder)
    verl = {"step": 1, "data": {"val-core/openai/gsm8k/acc/mean@1": 0.5}}
    for name in ("rollalloc", "runs/a", "runs/b"):
        (folder / name).mkdir()
    (folder / "rollalloc" / "grpo.jsonl").write_text(json.dumps(verl) + "\n")
    for name in ("my_package/rewards.py", "my_reward.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(REWARD)
    logs = ROOT / "tests" / "waste" / "samples" / "trl"
    for name in ("runs/mine/completions", "made", "path/to/completions", "path/to/rollouts"):
        shutil.copytree(logs, folder / name)
    evaluation = '{"kind": "eval", "at": 0, "accuracy": 0.5, "paid": 0}\n'
    (folder / "runs" / "mine" / "metrics.jsonl").write_text(evaluation)


def furnish_curriculum(folder: Path) -> None:
    """Put the curriculum into a folder that `rollalloc advise --export` would write."""
    from rollalloc.data._files import write_rows

    write_rows(folder / "curriculum.parquet", [row | {"weight": 1.0} for row in ROWS])


def model() -> Any:
    """A tiny model, as it is loaded from its folder."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained("path/to/model")


def tokenizer() -> Any:
    """That model's."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained("path/to/model")


def dataset() -> Any:
    """Prompts with a column of answers."""
    from datasets import Dataset

    return Dataset.from_list([{"prompt": row["prompt"], "answer": row["reward_model"]["ground_truth"]} for row in ROWS])


def accuracy(completions: Any, answer: Any, **_: Any) -> list[float]:
    """TRL's signature, 1 or 0."""
    return [float(text.strip() == one) for text, one in zip(completions, answer, strict=True)]


def format(completions: Any, **_: Any) -> list[float]:
    """TRL's signature, for shape alone."""
    return [float(len(text.split()) == 1) for text in completions]


def names() -> dict[str, Callable[[], Any]]:
    """How each name is made that snippets use and do not define."""
    from rollalloc.core.rule import Drawn, PromptRule
    from rollalloc.rules.prompts import some_free

    values = {
        "dataclass": dataclass, "np": np, "isnan": isnan, "Drawn": Drawn, "PromptRule": PromptRule, "some_free": some_free,
        "reward_funcs": accuracy, "accuracy": accuracy, "format": format,
        "my_model": SimpleNamespace(encode=lambda texts: np.ones((len(texts), 3))), "tokens": [[3, 4], [5]],
    }  # fmt: skip
    made = {name: lambda value=value: value for name, value in values.items()}
    return made | {"model": model, "tokenizer": tokenizer, "dataset": dataset}
