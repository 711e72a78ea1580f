"""A tiny training run under TRL's asynchronous trainer, and what was seen of it; as a program, one that may be killed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tiny_trl
import torch
from trl.experimental.async_grpo import AsyncGRPOConfig

from rollalloc import Recipe, recipes
from rollalloc.experimental.trl_async import AllocatedAsyncGRPOTrainer
from rollalloc.generate.stream.settings import Streaming

LOCAL = Streaming(overlap=False)  # in this process: it begins at once, and without staleness depends on no clock
RECIPES: dict[str, Recipe] = {
    "grpo": recipes.grpo(groups=4, n=4),
    "grpo_ahead": replace(recipes.grpo(groups=4, n=4), max_staleness=1),
    "dapo": recipes.dapo(groups=4, n=4, gen_groups=6),
    "pilot_commit": recipes.pilot_commit(groups=4, n_pilot=2, n_commit=2, gen_groups=8),
    "darts": recipes.darts(groups=4, shortest=3, longest=1, tail="sampled"),
    "darts_none": recipes.darts(groups=4, shortest=3, longest=1, tail="none"),
    "pods": recipes.pods(groups=4, n=8, m=4),
    "reinforce": recipes.reinforce(groups=16, neg=0.5),
    "foresight": recipes.foresight(groups=16),
}
ONE_EACH = ("reinforce", "foresight")


def saved_model(folder: Path) -> str:
    """The tiny model of the other driver's tests, in a folder."""
    tiny_trl.tiny_model().save_pretrained(folder)
    tiny_trl.tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def settings(out: Path | str, **changes: Any) -> AsyncGRPOConfig:
    given = tiny_trl.USUAL | {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "heartbeat_stale_after_s": 60.0,
    }
    return AsyncGRPOConfig(str(out), **given | changes)


def trainer(
    out: Path | str,
    recipe: Recipe | str,
    model: str,
    *,
    reward: Any = tiny_trl.starts_right,
    dataset: Any = None,
    driver: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
    **changes: Any,
) -> AllocatedAsyncGRPOTrainer:
    """A trainer under a recipe; `changes` of TRL's settings, `driver` for rollalloc's own, `more` for the trainer."""
    if recipe in ONE_EACH:
        changes = {"num_generations": 1} | changes
    return AllocatedAsyncGRPOTrainer(
        model,
        reward,
        settings(out, **changes),
        tiny_trl.prompts() if dataset is None else dataset,
        recipe=RECIPES[recipe] if isinstance(recipe, str) else recipe,
        **{"streaming": LOCAL} | (driver or {}),
        **(more or {}),
    )


class Seen:
    """What a trainer took from its queue, and each batch as the core made it.

    Attributes:
        samples: in the order in which the trainer took them.
        staleness: of each, in updates, when it was taken.
        batches: of the core.
    """

    def __init__(self, trainer: AllocatedAsyncGRPOTrainer) -> None:
        self.samples: list[Any] = []
        self.staleness: list[int] = []
        self.batches: list[Any] = []
        worker: Any = trainer.rollout_worker
        buffer, hand_over = worker.rollout_buffer, worker._hand_over
        get = buffer.get

        def taken(*given: Any, **more: Any) -> Any:
            sample = get(*given, **more)
            self.samples.append(sample)
            self.staleness.append(trainer.model_version - sample.model_version)
            return sample

        def made(batch: Any) -> None:
            self.batches.append(batch)
            hand_over(batch)

        buffer.get, worker._hand_over = taken, made

    @property
    def real(self) -> list[Any]:
        """Those that are rows of the core."""
        return [sample for sample in self.samples if sample.group_id >= 0]


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return tiny_trl.weights(trainer.accelerator.unwrap_model(trainer.model))


def decided(trainer: AllocatedAsyncGRPOTrainer) -> str:
    """Everything that the core knows, as text."""
    return json.dumps(trainer.allocation.allocator.state_dict(), sort_keys=True)


def main(given: dict[str, Any]) -> None:
    """Train, and write what was decided and the weights' digest."""
    torch.set_num_threads(1)
    out, resume = Path(given.pop("out")), given.pop("resume", None)
    made = trainer(out, given.pop("recipe"), given.pop("model"), **given)
    made.train(resume_from_checkpoint=resume)
    total = float(np.sum([tensor.double().abs().sum().item() for tensor in weights(made).values()]))
    (out / "end.json").write_text(
        json.dumps({"decided": decided(made), "total": total, "step": made.state.global_step})
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
