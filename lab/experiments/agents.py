"""Rollouts of several turns, end to end: a tiny model that must call its tool, under TRL's own trainer and our recipes.

python lab/experiments/agents.py OUT model [calculator|shelf]   warms the model up, a minute
python lab/experiments/agents.py OUT run TASK ARM SEED          one run; does nothing if its result is there
python lab/experiments/agents.py OUT table                      accuracy of each arm

Task `calculator` uses TRL's `tools`: the product of two numbers of two digits. Task `shelf` uses `environment_factory`: a
code that only the row's own environment knows. The warm-up shows dialogues of which a third call the tool and the others
guess, so that the model can do both and must learn which one pays.

Planned before the first run: seeds 0 and 1; 1,024 rollouts a run in batches of 64 rows; AdamW at 1e-3 for every arm;
accuracy of 256 held-out prompts by sampling at temperature 1, before and after. No arm is tuned.
Changed on 2026-11-26 at 10:55, before any of these runs: questions of the calculator that are held out are not trained on;
they were about one in eight. The same seeds, once more.
"""

from __future__ import annotations

import json
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_schema, qwen3_template

from rollalloc import recipes
from rollalloc.drivers.trl import AllocatedGRPOTrainer
from rollalloc.tasks.tiny import Shape, tiny_model

ROLLOUTS, ROWS, RATE, HELD_OUT, HELD_OUT_SEED = 1024, 64, 1e-3, 256, 9_999
SHOWN, WARM_UP, GUESSES = 48, 1500, 2 / 3  # dialogues a step, steps, share of dialogues that guess
SPECIAL = ("<|endoftext|>", "<|im_end|>")
PIECES = (
    *(f"<|im_start|>{role}\n" for role in ("user", "assistant", "tool")),
    *('<tool_call>\n{"name": "multiply", "arguments": {"a": ', ', "b": '),
    *('<tool_call>\n{"name": "look_up", "arguments": {"shelf": ', "}}\n</tool_call>"),
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ARMS = {
    "trl grpo n=8": None,
    "reinforce": recipes.reinforce(groups=64),
    "pilot_commit": recipes.pilot_commit(groups=8, n_pilot=4, n_commit=4, gen_groups=16),
    "dapo": recipes.dapo(groups=8, n=8, gen_groups=16),
}


def multiply(a: int, b: int) -> str:
    """
    Multiply two numbers.

    Args:
        a: One.
        b: The other.

    Returns:
        Their product.
    """
    return str(a * b)


class Shelf:
    """An environment whose tool looks a row's code up."""

    def reset(self, answer: str, **row: Any) -> None:
        """Take the row's code."""
        self._code = answer

    def look_up(self, shelf: int) -> str:
        """
        Look up the code on a shelf.

        Args:
            shelf: Its number.

        Returns:
            The code.
        """
        return self._code


TURNS: dict[str, dict[str, Any]] = {"calculator": {"tools": [multiply]}, "shelf": {"environment_factory": Shelf}}


def rows(task: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Questions with their answers."""
    chance = random.Random(f"{task} {seed}")
    made = []
    for _ in range(count):
        a, b, code = chance.randrange(10, 100), chance.randrange(10, 100), str(chance.randrange(100, 1000))
        text, answer = (f"{a}*{b}", str(a * b)) if task == "calculator" else (f"shelf {a}", code)
        made.append({"prompt": [{"role": "user", "content": text}], "answer": answer})
    return made


def dialogue(task: str, row: dict[str, Any], chance: random.Random) -> list[dict[str, Any]]:
    """One for the warm-up: a guess, or a call of the tool and its answer."""
    text, answer = row["prompt"][0]["content"], row["answer"]
    if chance.random() < GUESSES:
        return [*row["prompt"], {"role": "assistant", "content": str(chance.randrange(100, 1000))}]
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    name, names = ("multiply", ("a", "b")) if task == "calculator" else ("look_up", ("shelf",))
    function = {"name": name, "arguments": dict(zip(names, numbers, strict=True))}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    return [*row["prompt"], call, {"role": "tool", "content": answer}, {"role": "assistant", "content": answer}]


def tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte and one for each fixed piece of a dialogue."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_tokens([AddedToken(text, special=text in SPECIAL, normalized=False) for text in (*SPECIAL, *PIECES)])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=SPECIAL[1], pad_token=SPECIAL[0])
    fast.chat_template = TEMPLATE
    fast.response_schema, fast.response_template = qwen3_schema, qwen3_template  # pyright: ignore
    return fast


def warm_up(task: str, folder: Path) -> None:
    """Train a tiny model on dialogues, on the assistant's tokens alone, and save it."""
    chance = random.Random(0)
    words: Any = tokenizer()
    torch.manual_seed(0)
    model: Any = tiny_model(words, Shape(context=128))
    model.generation_config.eos_token_id = model.config.eos_token_id = words.eos_token_id
    model.generation_config.pad_token_id = model.config.pad_token_id = words.pad_token_id
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, WARM_UP)
    start, end = words.convert_tokens_to_ids([PIECES[1], SPECIAL[1]])
    loss = torch.zeros(())
    for step in range(WARM_UP):
        texts = [
            words.apply_chat_template(dialogue(task, row, chance), tokenize=False)
            for row in rows(task, SHOWN, 10_000 + step)
        ]
        batch = words(texts, padding=True, padding_side="right", return_tensors="pt")
        ids = batch["input_ids"]
        begun, ended = (ids == start).cumsum(1), (ids == end).cumsum(1)
        own = (ids != start) & (begun > 0) & ((ended - (ids == end).long()) % 2 == 1)
        loss = model(**batch, labels=torch.where(own & batch["attention_mask"].bool(), ids, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
    print(f"{task}: loss {loss.item():.3f}")


@torch.no_grad()
def accuracy(model: Any, task: str) -> tuple[float, float]:
    """Share of held-out questions answered rightly, and share for which the tool was called; played here, two turns."""
    held = rows(task, HELD_OUT, HELD_OUT_SEED)
    words: Any = tokenizer()
    torch.manual_seed(0)
    model.eval()

    def said(talks: list[Any]) -> list[str]:
        texts = [words.apply_chat_template(talk, tokenize=False, add_generation_prompt=True) for talk in talks]
        batch = words(texts, padding=True, padding_side="left", return_tensors="pt")
        given = {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": 16}
        made = model.generate(**batch, **given)[:, batch["input_ids"].shape[1] :]
        return words.batch_decode(made)

    right = called = 0
    talks: list[Any] = []
    answers: list[str] = []
    for row, text in zip(held, said([row["prompt"] for row in held]), strict=True):
        if "<tool_call>" not in text:
            right += text.partition(SPECIAL[1])[0].strip() == row["answer"]
            continue
        called += 1
        numbers = [int(number) for number in re.findall(r"\d+", text.partition(SPECIAL[1])[0])]
        if task == "calculator" and len(numbers) != 2:
            continue
        tool = str(numbers[0] * numbers[1]) if task == "calculator" else row["answer"]
        name, names = ("multiply", ("a", "b")) if task == "calculator" else ("look_up", ("shelf",))
        function = {"name": name, "arguments": dict(zip(names, numbers, strict=False))}
        call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        talks.append([*row["prompt"], call, {"role": "tool", "content": tool}])
        answers.append(row["answer"])
    if talks:
        texts = said(talks)
        right += sum(
            text.partition(SPECIAL[1])[0].strip() == answer for text, answer in zip(texts, answers, strict=True)
        )
    model.train()
    return right / len(held), called / len(held)


def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Whether the last message of a rollout is the answer, by the assistant."""
    last = [talk[-1] for talk in completions]
    return [
        float(message["role"] == "assistant" and (message.get("content") or "").strip() == wanted)
        for message, wanted in zip(last, answer, strict=True)
    ]


def run(out: Path, task: str, arm: str, seed: int) -> None:
    """One run, whose result is written at its end."""
    result = out / f"{task}-{arm.replace(' ', '_')}-{seed}.json"
    if result.exists():
        return
    recipe, counted = ARMS[arm], [0]

    def counting(completions: list[Any], answer: list[str], **more: Any) -> list[float]:
        counted[0] += len(completions)
        return right(completions, answer, **more)

    reward: Any = counting

    model = AutoModelForCausalLM.from_pretrained(out / f"model-{task}", dtype=torch.float32)
    before = accuracy(model, task)
    settings = GRPOConfig(
        output_dir=str(out / "trl"),
        num_generations=2 if arm == "reinforce" else 8,
        per_device_train_batch_size=ROWS,
        max_completion_length=48,
        max_steps=ROLLOUTS // ROWS,
        learning_rate=RATE,
        beta=0.0,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        seed=seed,
        top_k=0,
    )
    held = {row["prompt"][0]["content"] for row in rows(task, HELD_OUT, HELD_OUT_SEED)}
    chosen = [row for row in rows(task, 2048, seed) if task == "shelf" or row["prompt"][0]["content"] not in held]
    data = Dataset.from_list(chosen[:1024])  # a shelf may be held out: its code is new each time
    given: dict[str, Any] = {"args": settings, "train_dataset": data, "processing_class": tokenizer(), **TURNS[task]}
    if recipe is None:
        trainer: Any = GRPOTrainer(model, reward, **given)
    else:
        recipe = replace(recipe, budget=replace(recipe.budget, run_rollouts=ROLLOUTS))
        trainer = AllocatedGRPOTrainer(model, reward, recipe=recipe, **given)
    trainer.train()
    after = accuracy(trainer.model, task)
    lines = [line for line in trainer.state.log_history if "tools/call_frequency" in line]
    found = {
        "before": before,
        "after": after,
        "rollouts": counted[0],
        "steps": trainer.state.global_step,
        "calls": [line["tools/call_frequency"] for line in lines],
    }
    result.write_text(json.dumps(found))
    print(f"{task} {arm} {seed}: {before} → {after} with {counted[0]} rollouts in {found['steps']} steps")


def table(out: Path) -> None:
    """Accuracy after the budget, of each seed."""
    for task in TURNS:
        for arm in ARMS:
            files = sorted(out.glob(f"{task}-{arm.replace(' ', '_')}-*.json"))
            found = [json.loads(file.read_text()) for file in files]
            if found:
                after = ", ".join(f"{each['after'][0]:.3f}" for each in found)
                rollouts = ", ".join(str(each["rollouts"]) for each in found)
                print(f"{task:10} {arm:14} {found[0]['before'][0]:.3f} → {after}; rollouts {rollouts}")


def main(out: str, what: str, *rest: str) -> None:
    """As the module says."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    if what == "model":
        for task in rest or TURNS:
            if not (folder / f"model-{task}" / "config.json").exists():
                warm_up(task, folder / f"model-{task}")
    elif what == "run":
        task, arm, seed = rest
        run(folder, task, arm, int(seed))
    else:
        table(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
