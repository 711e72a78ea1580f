"""A language model of about three thousand parameters, prompts for it, and a trainer: what the engine's tests share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rollalloc import recipes
from rollalloc.data.prompts import EncodedPrompts, PromptSet
from rollalloc.models.policy import Policy
from rollalloc.models.settings import Sampling
from rollalloc.rewards.scorers import InlineScorer, Scorer
from rollalloc.tasks.tiny import EOS_ID, PAD_ID, word_tokenizer
from rollalloc.train.config import Config
from rollalloc.train.train import Trainer

RECIPES = {
    "grpo": recipes.grpo(4, 4),
    "dapo": recipes.dapo(4, 4, 8),
    "dapo_carry": recipes.dapo(4, 4, 8, surplus="carry"),
    "pilot_commit": recipes.pilot_commit(4, 2, 6, 12),
    "pilot_commit_as_published": recipes.pilot_commit(4, 2, 6, 12, p_solve=1.0, confidence=None, reprobe_every=None),
    "pods": recipes.pods(4, 8, 4),
    "darts": recipes.darts(4, 3, 1),
    "darts_stopped": recipes.darts(4, 3, 1, tail="sampled"),
    "racing": recipes.racing(4, (2, 4), 8),
}
WORDS = [f"k{number}" for number in range(6)] + [f"a{number}" for number in range(4)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def sizes() -> dict[str, Any]:
    """The sizes of all tiny models. A function, because tests of other drivers replace `WORDS`."""
    return {
        "vocab_size": len(word_tokenizer(WORDS)),
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }


def tiny_model(seed: int = 1) -> LlamaForCausalLM:
    """A random Llama over `WORDS`: one layer of width 16, confident enough that rollouts differ from each other."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**sizes(), num_hidden_layers=1, num_key_value_heads=2))


def tiny_gemma3(seed: int = 1) -> Gemma3ForCausalLM:
    """A random Gemma 3 over `WORDS`: five layers that see the last three tokens, and one that sees all."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = Gemma3TextConfig(
            **sizes(), num_hidden_layers=6, num_key_value_heads=1, head_dim=8, query_pre_attn_scalar=8, sliding_window=3
        )
        return Gemma3ForCausalLM(config)


MODELS: Mapping[str, Callable[..., PreTrainedModel]] = {"llama": tiny_model, "gemma3": tiny_gemma3}


def make_policy(seed: int = 1, family: str = "llama") -> Policy:
    """A random model of the family with its tokenizer."""
    tokenizer = word_tokenizer(WORDS)
    return Policy(MODELS[family](seed).eval(), tokenizer, (EOS_ID,), PAD_ID, 32, len(tokenizer))


def make_prompts(count: int) -> EncodedPrompts:
    """Different prompts of three skills each; the ground truth is one image."""
    tokenizer = word_tokenizer(WORDS)
    numbers_N3 = [np.base_repr(prompt, 6).zfill(3) for prompt in range(count)]
    texts = tuple(" ".join(f"k{digit}" for digit in digits) + " =" for digits in numbers_N3)
    prompt_set = PromptSet(
        keys=tuple(f"test/{prompt}" for prompt in range(count)),
        sources=("test",) * count,
        prompts=texts,
        ground_truths=tuple(f"a{prompt % 4}" for prompt in range(count)),
        extra_infos=tuple({"index": prompt} for prompt in range(count)),
    )
    return EncodedPrompts(prompt_set, tuple(tuple(ids) for ids in tokenizer(list(texts))["input_ids"]))


def names_an_image(*, data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Right where the first word is an image, whichever: true of about a third of a random model's rollouts."""
    return float(solution_str.startswith("a"))


SETTINGS = Config(sampling=Sampling(3), learning_rate=1e-3, eval_every=100, stop_when_barren=True)


@pytest.fixture
def policy() -> Policy:
    return make_policy()


@pytest.fixture(scope="session")
def trainer_of() -> Callable[..., Trainer]:
    """(recipe, rollouts to pay, **changes) → a trainer on a fresh policy; `changes` also of the settings."""

    def made(
        recipe: Any,
        max_rollouts: int | None = None,
        *,
        reward: Callable[..., Any] = names_an_image,
        scorer: Scorer | None = None,
        prompts: int | EncodedPrompts = 40,
        policy: Policy | None = None,
        folder: Any = None,
        heldout: Any = None,
        listener: Any = None,
        **changes: Any,
    ) -> Trainer:
        recipe = replace(recipe, budget=replace(recipe.budget, run_rollouts=max_rollouts))
        return Trainer(
            policy or make_policy(),
            recipe,
            make_prompts(prompts) if isinstance(prompts, int) else prompts,
            scorer or InlineScorer(reward),
            replace(SETTINGS, **changes),
            heldout=heldout,
            folder=folder,
            listener=listener,
        )

    return made


@pytest.fixture(scope="session")
def prompts_of() -> Callable[[int], EncodedPrompts]:
    return make_prompts


@pytest.fixture(scope="session")
def policy_of() -> Callable[..., Policy]:
    return make_policy


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run; what is not JSON, such as NaN, is refused."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def untimed(folder: Path) -> list[dict[str, Any]]:
    """The metrics without what depends on a clock."""
    return [without_times(line) for line in lines_of(folder)]


def without_times(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the metrics without measured times, also in nested figures such as `streaming`."""
    return {
        name: without_times(value) if isinstance(value, Mapping) else value
        for name, value in line.items()
        if not name.endswith("seconds")
    }


def flat(model: torch.nn.Module) -> torch.Tensor:
    """A copy of every parameter, one after the other."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def weights(trainer: Any) -> torch.Tensor:
    """Those of the policy of a trainer or an updater."""
    return flat(trainer.policy.model)


def checkpoints(folder: Path) -> list[int]:
    """The batches after which there is a checkpoint."""
    return sorted(int(path.name) for path in (folder / "checkpoints").glob("*"))


def killed_after(batches: int) -> Callable[[dict[str, Any]], None]:
    """A listener that ends the run, in the middle of the metrics, as an exception does."""

    def listen(line: dict[str, Any]) -> None:
        if line["kind"] == "batch" and line["batch"] == batches:
            raise KeyboardInterrupt

    return listen


def resumed_is_unbroken(run_of: Callable[..., Trainer], folder: Path, breaks: int, **changes: Any) -> tuple[Any, Any]:
    """A run, and the same that breaks in a batch and goes on: metrics, weights and all that outlives it are equal.

    Args:
        run_of: makes a trainer with a checkpoint after each second batch, of a folder and changes.
        folder: gets `unbroken` and `broken`.
        breaks: the batch.
        changes: of the run.

    Returns:
        The trainer that was never broken, and the one that went on.
    """
    unbroken = run_of(folder / "unbroken", **changes)
    why = unbroken.run()
    with pytest.raises(KeyboardInterrupt):
        run_of(folder / "broken", listener=killed_after(breaks), **changes).run()
    resumed = run_of(folder / "broken", **changes)
    every = resumed.config.checkpoint_every
    assert resumed.resume() == (breaks - 1) // every * every
    assert resumed.run() == why
    assert untimed(folder / "broken") == untimed(folder / "unbroken")
    assert torch.equal(weights(resumed), weights(unbroken))
    assert resumed.allocator.state_dict() == unbroken.allocator.state_dict()
    assert checkpoints(folder / "broken") == checkpoints(folder / "unbroken")
    return unbroken, resumed
