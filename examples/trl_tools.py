"""A model that learns to call its tool, with TRL and one rollout for each prompt; CPU, nothing is downloaded.

python examples/multiplying.py runs/multiplying                # the model and the prompts, about a minute
python examples/trl_tools.py runs/multiplying                  # TRL's `tools`: a function that all rollouts share
python examples/trl_tools.py runs/multiplying --environment    # TRL's `environment_factory`: an instance for each rollout
"""

import argparse
from pathlib import Path

import torch
from datasets import load_dataset
from multiplying import multiply
from trl import GRPOConfig

from rollalloc import recipes
from rollalloc.drivers.trl import AllocatedGRPOTrainer


class Calculator:
    """An environment whose tool is the method `multiply`."""

    def reset(self, **row: object) -> None:
        """Begin a rollout; TRL gives the row of the data set."""
        self.calls = 0

    def multiply(self, a: int, b: int) -> str:
        """
        Multiply two numbers.

        Args:
            a: One.
            b: The other.

        Returns:
            Their product.
        """
        self.calls += 1
        return multiply(a, b)


def correct(completions: list, reward_model: list[dict], **columns: object) -> list[float]:
    """1 where the model itself says the product in its last message; what the tool said does not count."""
    return [
        float(talk[-1]["role"] == "assistant" and (talk[-1].get("content") or "").strip() == row["ground_truth"])
        for talk, row in zip(completions, reward_model, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what examples/multiplying.py wrote")
    parser.add_argument("--environment", action="store_true", help="use environment_factory instead of tools")
    parser.add_argument("--steps", type=int, default=16)
    given = parser.parse_args()
    files = {part: str(given.folder / f"{part}.parquet") for part in ("train", "test")}
    rows = load_dataset("parquet", data_files=files)
    trainer = AllocatedGRPOTrainer(
        str(given.folder / "model"),
        reward_funcs=correct,
        args=GRPOConfig(
            str(given.folder / "trl"),
            num_generations=2,  # TRL takes no 1; the recipe generates one rollout for each prompt
            per_device_train_batch_size=64,
            max_completion_length=48,  # of all turns, with the tool's answers
            max_steps=given.steps,
            learning_rate=1e-3,
            per_device_eval_batch_size=64,
            num_generations_eval=1,
            logging_steps=4,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
        ),
        train_dataset=rows["train"],
        eval_dataset=rows["test"],
        recipe=recipes.reinforce(groups=64),
        environment_factory=Calculator if given.environment else None,
        tools=None if given.environment else [multiply],
    )
    before = trainer.evaluate()["eval_reward"]
    trainer.train()
    print(f"right on held-out questions: {before:.2f} before, {trainer.evaluate()['eval_reward']:.2f} after")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
