"""Rollouts of unequal numbers of turns on several processes, with an engine that generates for all processes at once.

torchrun --nproc_per_node 2 tests/drivers/trl/turns_in_step.py '{"out": "/tmp/out"}'
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # as a program it has no conftest
sys.path.insert(0, str(Path(__file__).parent))

import test_turns
import tiny_trl
import torch
from accelerate.utils import gather_object

from rollalloc import recipes
from rollalloc.drivers.trl import AllocatedGRPOTrainer
from rollalloc.drivers.trl.generation import Generator

CALLS = (3, 0)  # of each rollout of process 0 and of process 1


class InStep:
    """Stands for TRL's client of a vLLM server: every process must call it, with equally many prompts."""

    def __init__(self, process: int) -> None:
        self.calls, self.turns = CALLS[process], 0
        self.tokenizer = test_turns.talking_tokenizer()

    def sync_weights(self) -> None:
        gather_object(["sync"])

    def generate(self, prompts: list[list[int]], images: None, num_generations: int) -> Any:
        assert len(set(gather_object([len(prompts)]))) == 1
        self.turns += 1
        called = [self.tokenizer.decode(tokens).count("answer 1") for tokens in prompts]
        texts = [test_turns.CALL % ("look_up", 1) if count < self.calls else "Done!" for count in called]
        completions = [self.tokenizer(f"{text}<|im_end|>")["input_ids"] for text in texts]
        return None, completions, [[[-1.0]] * len(tokens) for tokens in completions], None


def main(given: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    trainer: Any = AllocatedGRPOTrainer(
        test_turns.talking_model(),
        test_turns.answered,
        tiny_trl.settings(
            given["out"], per_device_train_batch_size=2, num_generations=4, max_completion_length=800, max_steps=2
        ),
        test_turns.chats(),
        processing_class=test_turns.talking_tokenizer(),
        tools=[test_turns.look_up],
        recipe=recipes.grpo(groups=1, n=4),
    )
    process = trainer.accelerator.process_index
    trainer.use_vllm, trainer.vllm_mode, trainer.vllm_generation = True, "server", InStep(process)
    trainer._generator = Generator(trainer, use_sampler=None, keep_logprobs=False, tools=[test_turns.look_up])
    trainer.train()
    answers = [sum(turn["role"] == "tool" for turn in each.texts[1]) for each in trainer.allocation.generated]
    line = {"turns": trainer.vllm_generation.turns, "answers": answers}
    (Path(given["out"]) / f"process-{process}.json").write_text(json.dumps(line))


if __name__ == "__main__":
    tiny_trl.run_as_program(main)
