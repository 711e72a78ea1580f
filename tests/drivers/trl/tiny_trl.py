"""A tiny model, prompts and rewards for TRL; run as a program, one training run, for several processes and for resuming.

torchrun --nproc_per_node 2 tests/drivers/trl/tiny_trl.py '{"out": "/tmp/out", "recipe": "pilot_commit"}'
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # as a program it has no conftest

import torch
from accelerate import DistributedType, PartialState
from datasets import Dataset
from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig

import arithmetic
from rollalloc import Limit, Recipe, recipes
from rollalloc.drivers.trl import AllocatedGRPOTrainer
from rollalloc.tasks.tiny import word_tokenizer
from tiny_policy import WORDS, tiny_model

RECIPES = {
    "grpo": recipes.grpo(groups=4, n=4),
    "dapo": recipes.dapo(groups=4, n=4, gen_groups=6),
    "pilot_commit": recipes.pilot_commit(groups=4, n_pilot=2, n_commit=2, gen_groups=8),
    "pods": recipes.pods(groups=4, n=8, m=4),
    "darts": recipes.darts(groups=4, shortest=3, longest=1),
    "darts_sampled": recipes.darts(groups=4, shortest=3, longest=1, tail="sampled"),
    "darts_none": recipes.darts(groups=4, shortest=3, longest=1, tail="none"),
    "racing": recipes.racing(groups=4, sizes_S=(2, 4), gen_groups=6),
    "rloo": recipes.rloo(groups=4, n=4),
}
ONE_EACH = {  # of which a batch has one row per prompt
    "reinforce": recipes.reinforce(groups=16, neg=0.5),
    "reinforce_running": recipes.reinforce(groups=16, baseline="running", neg=1),
    "raft": recipes.raft(groups=16),
    "spo": recipes.spo(groups=16),
    "foresight": recipes.foresight(groups=16),
    "foresight_uniform": recipes.foresight(groups=16, exponent=None),
    "foresight_replay": recipes.foresight(groups=16, replay=8, replay_staleness=3),
    "reinforce_gated": recipes.reinforce(groups=16, neg=0.5, replay=8, replay_moved=0.0, replay_pause=1),
}
RECIPES |= ONE_EACH
# By name, but for a few tests only.
BESIDE = {
    "lone_commits": recipes.pilot_commit(groups=1, n_pilot=3, n_commit=1, gen_groups=2),
    "reinforce_limited": recipes.reinforce(groups=16).replace(limit=Limit(share=0.05, every=2, last=16)),
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    return word_tokenizer(WORDS)


def prompts(count: int = 40) -> Dataset:
    """Prompts of one to three words, each with an answer and its own number."""
    texts = [" ".join(f"k{(number * 7 + at) % 6}" for at in range(1 + number % 3)) + " =" for number in range(count)]
    return Dataset.from_dict(
        {"prompt": texts, "answer": [f"a{number % 4}" for number in range(count)], "number": list(range(count))}
    )


DISTINCT = Dataset.from_dict(  # prompts of which no two are the same
    {
        "prompt": [f"k{at % 6} k{at // 6 % 6} k{at // 36} =" for at in range(40)],
        "answer": [f"a{at % 4}" for at in range(40)],
        "number": list(range(40)),
    }
)


def starts_right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Right where the first word is the answer, half right where it is any other image."""
    return [
        float(text.startswith(right)) or 0.5 * text.startswith("a")
        for text, right in zip(completions, answer, strict=True)
    ]


USUAL: dict[str, Any] = {  # of every trainer's settings, whatever its class
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "num_generations": 4,
    "max_completion_length": 4,
    "max_steps": 4,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "learning_rate": 1e-2,
    "seed": 3,
}


def settings(out: Path | str, **changes: Any) -> GRPOConfig:
    given = USUAL | {"per_device_train_batch_size": 16, "lr_scheduler_type": "constant"}
    return GRPOConfig(str(out), **given | changes)


def trainer(
    out: Path | str,
    recipe: Recipe | str,
    *,
    reward: Any = starts_right,
    dataset: Dataset | None = None,
    model: Any = None,
    driver: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
    **changes: Any,
) -> AllocatedGRPOTrainer:
    """A trainer under a recipe; `changes` of TRL's settings, `driver` for rollalloc's own, `more` for the trainer."""
    recipe = (RECIPES | BESIDE)[recipe] if isinstance(recipe, str) else recipe
    if recipe in ONE_EACH.values():
        changes = {"num_generations": 2} | changes  # the least that TRL takes
    dataset = prompts() if dataset is None else dataset
    given = {
        "model": tiny_model() if model is None else model,
        "args": settings(out, **changes),
        "train_dataset": dataset,
        "processing_class": tiny_tokenizer(),
        **(more or {}),
    }
    return AllocatedGRPOTrainer(reward_funcs=reward, recipe=recipe, **(driver or {}), **given)


class FakeVllm:
    """Stands for TRL's vLLM client: each completion is one image, of another likelihood than the model's."""

    def __init__(self) -> None:
        self.synced = 0

    def sync_weights(self) -> None:
        self.synced += 1

    def generate(self, prompts: Any, images: None, num_generations: int) -> Any:
        assert images is None
        assert num_generations == 1
        completions = [[9 + at % 4, 1] for at in range(len(prompts))]
        return None, completions, [[[-1.0], [None]] for _ in completions], None


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def shard() -> None:
    """Let accelerate shard the model by FSDP2, which it does only where it finds GPUs."""
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = lambda state: setattr(state, "device", torch.device("cpu"))
    wrapped = {"AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer"}
    os.environ |= {"ACCELERATE_USE_FSDP": "true"} | {f"FSDP_{key}": value for key, value in wrapped.items()}
    os.environ |= {"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
    USUAL["use_cpu"] = False


def main(given: dict[str, Any]) -> None:
    """Train, and write what each process decided and, once, losses and, unless the model is sharded, weights and gradients.

    With `by_key` tokens know no weights: see `arithmetic`.
    """
    torch.set_num_threads(1)
    if given.pop("sharded", False):
        shard()
    disable_progress_bar()
    tokens = arithmetic.tokens_by_key() if given.pop("by_key", False) else nullcontext()
    out, resume, unscored = Path(given.pop("out")), given.pop("resume", None), given.pop("unscored", "nothing")
    negative, broken_in = given.pop("negative", False), given.pop("broken_in", None)

    def reward(completions: list[str], **columns: Any) -> list[float | None]:
        if str(broken_in) == os.environ.get("RANK"):
            raise KeyError("broken")
        scores = [score - negative for score in starts_right(completions, **columns)]
        return [None if unscored in text else score for text, score in zip(completions, scores, strict=True)]

    made = trainer(out, given.pop("recipe"), reward=reward, **given)
    with tokens, arithmetic.gradients_of(made.model) as gradients:
        made.train(resume_from_checkpoint=resume)
    allocation = made.allocation
    for group in allocation.allocator._run.flight.groups.values():  # what two processes round each in its own way
        group.done = [replace(done, uncertainty=None) for done in group.done]
    decided = json.dumps(allocation.allocator.state_dict()).encode()
    line = {"decisions": sha256(decided).hexdigest(), "held": sorted(allocation.rollouts)}
    (out / f"process-{made.accelerator.process_index}.json").write_text(json.dumps(line))
    if made.accelerator.is_main_process:
        (out / "history.json").write_text(json.dumps(made.state.log_history))
    if made.accelerator.is_main_process and not made.is_fsdp_enabled:
        torch.save(weights(made.accelerator.unwrap_model(made.model)), out / "weights.pt")
        torch.save(gradients, out / "gradients.pt")


def run_as_program(main: Callable[[dict[str, Any]], None]) -> None:
    """Run `main` with the argument of the command line, and leave without taking the interpreter apart.

    A thread of gloo that still frees a tensor while Python ends aborts the process: pytorch/pytorch#179291.
    """
    main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    run_as_program(main)
