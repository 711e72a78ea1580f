"""Pilot-Commit in TRL's GRPOTrainer, on sums of reasoning-gym, from a tiny model made here: CPU only, nothing downloaded.

python examples/trl_pilot_commit.py            # some minutes; --steps 10 for a short look
"""

import argparse
import tempfile

import reasoning_gym
import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig

from rollalloc import recipes
from rollalloc.drivers.trl import AllocatedGRPOTrainer
from rollalloc.models.likelihood import completion_logprobs

CHARACTERS = ["<pad>", "<eos>", *" +-=0123456789"]


def sums(count: int, seed: int, terms: int = 3) -> Dataset:
    """Prompts like `7 - 12 + 4 =`, in reasoning-gym's data set of that seed."""
    made = reasoning_gym.create_dataset(
        "chain_sum", size=count, seed=seed, min_terms=2, max_terms=terms, min_digits=1, max_digits=2
    )
    return Dataset.from_list(
        [{"prompt": item["question"].rpartition(":")[2].strip(), "answer": item["answer"]} for item in made]
    )


def correct(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """A reward function of TRL's: one number a completion, the data set's columns by name."""
    return [float(completion.strip() == right) for completion, right in zip(completions, answer, strict=True)]


def character_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({character: at for at, character in enumerate(CHARACTERS)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("<eos>|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def half_taught_model(tokenizer: PreTrainedTokenizerFast, steps: int) -> LlamaForCausalLM:
    """A model of 400,000 parameters that has seen so many batches of solved sums: it is right now and then."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=384,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            initializer_range=0.1,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    taught = sums(64 * steps, seed=1)
    for start in range(0, len(taught), 64):
        rows = taught[start : start + 64]
        logprobs, mask = completion_logprobs(
            model,
            tokenizer(rows["prompt"])["input_ids"],
            tokenizer([answer + "<eos>" for answer in rows["answer"]])["input_ids"],
            pad_id=0,
        )
        optimizer.zero_grad()
        (-logprobs.sum() / mask.sum()).backward()
        optimizer.step()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--taught", type=int, default=400, help="batches of solved sums the model has seen")
    given = parser.parse_args()
    tokenizer = character_tokenizer()
    args = GRPOConfig(
        tempfile.mkdtemp(),
        per_device_train_batch_size=64,  # 8 groups of 8 rows, as the recipe says
        num_generations=8,
        max_completion_length=6,
        max_steps=given.steps,
        learning_rate=3e-4,
        per_device_eval_batch_size=256,
        num_generations_eval=1,
        logging_steps=25,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = AllocatedGRPOTrainer(
        half_taught_model(tokenizer, given.taught),
        reward_funcs=correct,
        args=args,
        train_dataset=sums(4096, seed=2),
        eval_dataset=sums(512, seed=3),
        processing_class=tokenizer,
        recipe=recipes.pilot_commit(groups=8, n_pilot=4, n_commit=4, gen_groups=24),
    )
    trainer.evaluate()
    before = trainer.state.log_history[-1]["eval_reward"]
    trainer.train()
    trainer.evaluate()
    print(f"right on held-out sums: {before:.2f} before, {trainer.state.log_history[-1]['eval_reward']:.2f} after")
    print({cause: count for cause, count in trainer.allocation.allocator.accounts().items() if count})


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
