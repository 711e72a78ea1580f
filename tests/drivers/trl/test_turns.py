"""Tools, environments and parsed responses: rollouts of several turns, as stock TRL plays, masks and shows them."""

from __future__ import annotations

import json
import re
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import tiny_trl
import torch
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOTrainer
from trl.chat_template_utils import add_response_schema, parse_response, qwen3_chat_template

from rollalloc import recipes
from rollalloc.drivers.trl import callback
from rollalloc.drivers.trl.allocation import Allocation
from rollalloc.drivers.trl.rollout import decode

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
CALL = '<tool_call>\n{"name": "%s", "arguments": {"a": %d}}\n</tool_call>'


class _Parses(PreTrainedTokenizerFast):
    """TRL's first versions ask transformers of then to parse, by a schema; transformers of now has no such parser."""

    def parse_response(self, ids: list[int], *_: Any, **__: Any) -> dict[str, Any]:  # pyright: ignore
        text = self.decode(ids)
        parts = re.fullmatch(
            r"(?:<think>(.*?)</think>\s*)?(.*?)((?:<tool_call>.*?</tool_call>\s*)*)<\|im_end\|>", text, re.S
        )
        if parts is None:
            raise ValueError(text)
        calls = [json.loads(call) for call in re.findall(r"<tool_call>(.*?)</tool_call>", parts[3], re.S)]
        message: dict[str, Any] = {"role": "assistant", "content": parts[2]}
        message |= {"reasoning_content": parts[1]} if parts[1] else {}
        return message | ({"tool_calls": [{"type": "function", "function": call} for call in calls]} if calls else {})


TALKING = PreTrainedTokenizerFast if "prefix" in signature(parse_response).parameters else _Parses


def talking_tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, and Qwen3's chat template, which TRL knows how to parse."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=text in SPECIAL, normalized=False) for text in (*SPECIAL, *PLAIN)])
    made = TALKING(tokenizer_object=tokenizer, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    made.chat_template = qwen3_chat_template
    return made


def talking_model() -> LlamaForCausalLM:
    tokenizer = talking_tokenizer()
    config = tiny_trl.tiny_model().config
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config.update({"vocab_size": len(tokenizer), "max_position_embeddings": 4096, **ends})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def look_up(a: int) -> str:
    """
    Look up a number.

    Args:
        a: Which.

    Returns:
        The answer.
    """
    if a == 3:
        raise RuntimeError("there is no third")
    return f"answer {a}"


async def look_up_later(a: int) -> str:
    return look_up(a)


class Shelf:
    """An environment with a tool, which counts what was asked of it since its reset."""

    def reset(self, **row: Any) -> str:
        self.row, self.asked = row, 0
        return " Shelf."

    def look_up(self, a: int) -> str:
        self.asked += 1
        return look_up(a)


look_up_later.__doc__ = Shelf.look_up.__doc__ = look_up.__doc__  # TRL describes a tool by it


class Spoken:
    """What a model says, in turn: two of three call the tool, one of them in vain; then both are done."""

    def __init__(self, tool: str) -> None:
        self.tokenizer = talking_tokenizer()
        self.said = [CALL % (tool, 1), CALL % (tool, 3), "I do not know."]

    def __call__(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        first = "answer 1" not in self.tokenizer.decode(input_ids[0])
        texts = [f"{text}<|im_end|>" for text in (self.said * len(input_ids) if first else ["Done!"] * len(input_ids))]
        made = self.tokenizer(texts[: len(input_ids)], padding=True, padding_side="right", return_tensors="pt")
        return torch.cat([input_ids, made["input_ids"]], dim=1)


def answered(completions: list[Any], **_: Any) -> list[float]:
    """Of the messages of each rollout: whether a tool gave the answer."""
    return [float(any(m["role"] == "tool" and "answer" in m["content"] for m in messages)) for messages in completions]


def chats(count: int = 3) -> Dataset:
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": "Look!"}]] * count, "book": ["b"] * count})


def both(tmp_path: Path, reward: Any = answered, **more: Any) -> list[Any]:
    """The same trainer twice, stock TRL's and ours."""
    made = []
    for kind in (GRPOTrainer, tiny_trl.AllocatedGRPOTrainer):
        own = {} if kind is GRPOTrainer else {"recipe": recipes.grpo(groups=1, n=3)}
        given: dict[str, Any] = {
            "model": talking_model(),
            "reward_funcs": reward,
            "args": tiny_trl.settings(
                tmp_path, per_device_train_batch_size=3, num_generations=3, max_completion_length=400, max_steps=1
            ),
            "train_dataset": chats(),
            "processing_class": talking_tokenizer(),
        }
        made.append(kind(**given | more | own))
    return made


def trained_on(trainer: Any, tool: str) -> dict[str, torch.Tensor]:
    """What the trainer's loss is given in its one step."""
    given = []
    compute = trainer._compute_loss

    def keep(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        given.append({name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)})
        return compute(model, inputs)

    with patch.object(trainer, "_compute_loss", keep), patch.object(trainer.model, "generate", Spoken(tool)):
        trainer.train()
    *_, inputs = given  # ours first passes rows through the loss to check them
    order = inputs["completion_ids"].sum(dim=1).argsort()  # TRL shuffles
    return {name: value[order] if value.ndim else value for name, value in inputs.items()}


def assert_same(trainers: list[Any], tool: str) -> None:
    stock, ours = (trained_on(trainer, tool) for trainer in trainers)
    lines = [trainer.state.log_history[0] for trainer in trainers]
    assert not stock["tool_mask"].bool().all()
    for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "num_items_in_batch"):
        assert torch.equal(stock[name].long(), ours[name].long()), name
    torch.testing.assert_close(stock["advantages"], ours["advantages"], rtol=0, atol=1e-5)
    for name in ("tools/call_frequency", "tools/failure_frequency", "completions/mean_length", "num_tokens", "reward"):
        assert lines[0][name] == pytest.approx(lines[1][name]), name
    assert lines[1]["tools/call_frequency"] == pytest.approx(2 / 3)
    assert lines[1]["tools/failure_frequency"] == pytest.approx(1 / 2)


@pytest.mark.parametrize("tool", [look_up, look_up_later])
def test_with_tools_the_loss_gets_what_stock_trl_gives_it(tool, tmp_path):
    assert_same(both(tmp_path, tools=[tool]), tool.__name__)


@pytest.mark.filterwarnings("ignore:You are using 'environment_factory'")
def test_with_environments_the_loss_gets_what_stock_trl_gives_it(tmp_path):
    """And a reward function gets the environment that each rollout was played in."""
    seen = []

    def asked(environments: list[Shelf], completions: list[Any], **_: Any) -> list[float]:
        seen.append([each.asked for each in environments])
        assert len({id(each) for each in environments}) == 3
        assert all(each.row["book"] == "b" for each in environments)
        return [float(value) for value in answered(completions)]

    trainers = both(tmp_path, asked, environment_factory=Shelf)
    assert_same(trainers, "look_up")
    assert seen == [[1, 1, 0], [1, 1, 0]]
    [rollout, *_] = trainers[1].allocation.generated
    assert rollout.texts[0] == [{"role": "user", "content": "Look! Shelf."}]
    assert trainers[1].train_dataset[0]["prompt"] == [{"role": "user", "content": "Look!"}]


def test_held_rollouts_with_tools_are_saved_whole(tmp_path):
    trainer = both(tmp_path, tools=[look_up])[1]
    with patch.object(trainer.model, "generate", Spoken("look_up")):
        trainer.train()
    allocation: Allocation = trainer.allocation
    allocation.rollouts = {each.made.rollout: each for each in allocation.generated}
    place = tmp_path / "here"
    callback.save(allocation, place)
    (place / "trainer_state.json").write_text("{}")  # TRL's
    kept, allocation.rollouts = allocation.rollouts, {}
    callback.load(allocation, callback.read(place), place, accept_recipe=False, accept_data=False)
    assert [each.own is not None for each in kept.values()] == [True] * 3
    for number, rollout in kept.items():
        again = allocation.rollouts[number]
        assert (again.own, again.texts, again.length) == (rollout.own, rollout.texts, rollout.length)
        assert (again.prompt_tokens, again.made.tokens) == (rollout.prompt_tokens, rollout.made.tokens)


def test_reasoning_is_no_part_of_the_content_where_the_tokenizer_can_tell(tmp_path):
    """Exact matches of the content would all fail, were it left in."""
    trainer = both(tmp_path)[1]
    text = "<think>\nb comes after a\n</think>\n\nb<|im_end|>"
    pairs = [
        (trainer.processing_class("<|im_start|>assistant\n")["input_ids"], trainer.processing_class(text)["input_ids"])
    ]
    [[whole]] = decode(trainer, [[{"role": "user", "content": "Look!"}]], pairs)
    assert "comes after" in whole["content"]
    add_response_schema(trainer.processing_class)
    [[message]] = decode(trainer, [[{"role": "user", "content": "Look!"}]], pairs)
    assert message["content"] == "b"
    assert "comes after" in message["reasoning_content"]
    assert decode(trainer, ["Look!"], pairs) == [whole["content"]]


def test_more_rollouts_than_trl_reckons_with_have_an_environment_each(tmp_path):
    recipe = recipes.pods(groups=1, n=7, m=3)
    trainer = both(tmp_path, environment_factory=Shelf, tools=None)[1]
    more = type(trainer)(
        talking_model(),
        answered,
        trainer.args,
        chats(),
        processing_class=talking_tokenizer(),
        environment_factory=Shelf,
        tools=[look_up_later],
        recipe=recipe,
    )
    with patch.object(more.model, "generate", Spoken("look_up")):
        more.train()
    assert len(more.allocation.generated) == 7
    assert sum(rollout.length < len(rollout.made.tokens) for rollout in more.allocation.generated) == 5  # of 7
