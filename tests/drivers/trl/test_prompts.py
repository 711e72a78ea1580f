"""What the model reads of a prompt, and what reward functions read of a completion."""

from __future__ import annotations

import re
from typing import Any

import pytest
import tiny_trl
import torch
from datasets import Dataset
from tokenizers.processors import TemplateProcessing
from transformers import GPT2Config, GPT2LMHeadModel
from trl import GRPOTrainer

from rollalloc.drivers.trl.dataset import check_prompts
from rollalloc.drivers.trl.rollout import encode

LONG = [{"prompt": "k1 =", "answer": "a1"}] * 3 + [{"prompt": "k1 " * 60, "answer": "a1"}]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] == 'u' and 'k0 ' or 'k5 ' }}{{ m['content'] }} = {% endfor %}"
    "{% if add_generation_prompt %}k5 {% endif %}"
)


def gpt2(vocabulary: int, context: int = 512) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=vocabulary, n_positions=context, n_embd=16, n_layer=1, n_head=2, **ids)
    )


def answer_tokens() -> Any:
    """A tokenizer in which `a1` and `a2` are special tokens, as `<answer>` is for some models."""
    tokenizer = tiny_trl.tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["a1", "a2"]})
    return tokenizer


@pytest.mark.parametrize("model", [None, "gpt2"])
@pytest.mark.parametrize("held_out", [False, True])
def test_prompts_beyond_the_context_are_named_before_training(model, held_out, tmp_path):
    size = len(tiny_trl.tiny_tokenizer())
    long = Dataset.from_list(LONG * 2)
    data = {"dataset": tiny_trl.prompts(8), "more": {"eval_dataset": {"hard": long}}} if held_out else {"dataset": long}
    trainer = tiny_trl.trainer(tmp_path, "grpo", model=model and gpt2(size, 32), **data)
    where = "eval_dataset['hard']" if held_out else "train_dataset"
    said = (
        f"2 of 8 prompts of {where} have more than 28 tokens, the maximum for the model's context of 32 tokens, of "
        "which max_completion_length=4 are for the completion: rows 3 (60 tokens), 7 (60 tokens). Remove them"
    )
    with pytest.raises(ValueError, match=re.escape(said)):
        trainer.train()
    assert trainer.allocation.allocator.paid == 0


def test_an_embedding_that_zero_3_has_emptied_has_the_size_that_deepspeed_notes(tmp_path):
    trainer = tiny_trl.trainer(tmp_path, "grpo")
    weight = trainer.model.get_input_embeddings().weight
    weight.ds_shape, weight.data = weight.shape, torch.empty(0)
    check_prompts(trainer)
    weight.ds_shape = torch.Size((3, 16))
    with pytest.raises(ValueError, match="has embeddings for 3 tokens only"):
        check_prompts(trainer)


def test_a_completion_as_long_as_the_context_is_refused_with_the_number_that_fits(tmp_path):
    trainer = tiny_trl.trainer(tmp_path, "grpo", max_completion_length=512)
    with pytest.raises(ValueError, match=r"no prompt fits .*; set max_completion_length to less than 31"):
        trainer.train()


@pytest.mark.parametrize(
    ("words", "name"), [("a3", "row 1 of train_dataset has token 12 ('a3')"), ("k1", "padding has token 0")]
)
def test_a_tokenizer_larger_than_the_embedding_is_refused_with_the_token(words, name, tmp_path):
    size = len(tiny_trl.tiny_tokenizer())
    dataset = Dataset.from_list([{"prompt": "k1 =", "answer": "a1"}, {"prompt": f"{words} =", "answer": "a1"}] * 4)
    trainer = tiny_trl.trainer(tmp_path, "grpo", dataset=dataset, model=gpt2(size - 1))
    if words == "k1":
        name = name.replace("0", str(size))
        trainer.processing_class.add_special_tokens({"pad_token": "<padding>"})
    with pytest.raises(ValueError, match=re.escape(name) + ".*embeddings for 12 tokens only.*resize_token_embeddings"):
        trainer.train()


@pytest.mark.parametrize(("text", "expected"), [("k1 =", "k0 k1 ="), ("k0 k1 =", "k0 k1 =")])
def test_a_text_has_one_bos_and_no_eos_in_training_and_evaluation(text, expected, tmp_path):
    tokenizer = tiny_trl.tiny_tokenizer()
    ids = {word: tokenizer.convert_tokens_to_ids(word) for word in ("k0", "a0")}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="k0 $A a0", special_tokens=list(ids.items()))
    trainer = tiny_trl.trainer(tmp_path, "grpo", more={"processing_class": tokenizer})
    assert tokenizer.convert_ids_to_tokens(encode(trainer, [text])[0]) == expected.split()
    assert trainer._tokenize_prompts([text])[0] == [list(ids) for ids in encode(trainer, [text])]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"role": "user", "content": "k1"}], "k0 k1 = k5"),
        ([{"role": "user", "content": "k1"}, {"role": "assistant", "content": "k2"}], "k0 k1 = k5 k2"),
    ],
)
def test_a_last_message_of_the_assistant_is_continued(messages, expected, tmp_path):
    tokenizer = tiny_trl.tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    trainer = tiny_trl.trainer(tmp_path, "grpo", more={"processing_class": tokenizer})
    assert tokenizer.convert_ids_to_tokens(encode(trainer, [messages])[0]) == expected.split()
    assert trainer._tokenize_prompts([messages])[0] == [list(ids) for ids in encode(trainer, [messages])]


@pytest.mark.parametrize(
    ("talk", "skip"), [(False, False), (False, True), (True, False), pytest.param(True, True, marks=pytest.mark.e2e)]
)
def test_a_reward_sees_the_models_own_special_tokens_unless_asked_not_to(skip, talk, tmp_path):
    seen: dict[bool, str] = {True: "", False: ""}

    def reward(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
        if talk:
            assert {message["role"] for prompt in prompts for message in prompt} == {"user"}
            assert {message["role"] for completion in completions for message in completion} == {"assistant"}
        texts = [completion[0]["content"] if talk else completion for completion in completions]
        seen[trainer.model.training] += " ".join(texts) + " "
        return [float(len(text)) for text in texts]

    tokenizer = answer_tokens()
    tokenizer.chat_template = TEMPLATE
    dataset = tiny_trl.prompts(8)
    if talk:
        dataset = dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    trainer = tiny_trl.trainer(
        tmp_path,
        "grpo",
        reward=reward,
        dataset=dataset,
        driver={"skip_special_tokens": skip},
        more={"processing_class": tokenizer, "eval_dataset": dataset},
        max_steps=2,
    )
    trainer.train()
    trainer.evaluate()
    for text in seen.values():
        assert ("a1" in text and "a2" in text) != skip
        assert "a0" in text  # an ordinary word
        assert tokenizer.eos_token not in text
        assert tokenizer.pad_token not in text


def test_stock_trl_leaves_out_special_tokens(tmp_path):
    """What `skip_special_tokens=True` stands for."""
    texts: list[str] = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        texts.extend(completions)
        return [float(len(text)) for text in completions]

    args = tiny_trl.settings(tmp_path, max_steps=2)
    data, tokenizer = tiny_trl.prompts(), answer_tokens()
    GRPOTrainer(tiny_trl.tiny_model(), reward, args, data, processing_class=tokenizer).train()
    assert any("a0" in text for text in texts)
    assert not any("a1" in text or "a2" in text for text in texts)
