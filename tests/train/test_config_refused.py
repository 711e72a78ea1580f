"""Settings out of range are refused when they are made, with what was expected."""

# pyright: reportArgumentType=false

from functools import partial
from math import inf, nan

import pytest

from rollalloc.models.settings import Clip, Lora, Loss, Sampling
from rollalloc.train.config import Config, Schedule

config = partial(Config, sampling=Sampling(3))
lora = partial(Lora, rank=4)
sampling = partial(Sampling, max_new_tokens=4)


def each(name, *values):
    """A case for each value of one setting."""
    return [{name: value} for value in values]


# What is made, the message, and the settings with which it is refused.
WRONG = [
    (Clip, "expected low in", [*each("low", 0.0, 1.1, -0.2, nan), *each("high", 0.0, nan), *each("stale", 0.9, nan)]),
    (Clip, "expected dual above 1", each("dual", 1.0, 0.5, -3.0, nan)),
    (Loss, "aggregation must be one of token_mean, sequence_mean, dr_grpo, got 'mean'", each("aggregation", "mean")),
    (Loss, "kl must be 0 or more, and finite, got", each("kl", -0.1, nan)),
    (Schedule, "warmup must be 0 or more", each("warmup", -1)),
    (Schedule, "constant, linear, cosine, got 'step'", [{"shape": "step", "steps": 5}]),
    (Schedule, "floor must be a share", each("floor", 1.1, nan)),
    (Schedule, "a constant rate has no steps", each("steps", 5)),
    (Schedule, "steps must be more than the warm-up steps, 5, got 5", [{"shape": "cosine", "steps": 5, "warmup": 5}]),
    (lora, "rank of LoRA must be a whole number of at least 1, got 0", each("rank", 0)),
    (lora, "alpha of LoRA must be above 0 and finite, got", each("alpha", 0.0, nan, inf)),
    (lora, "got an empty name", each("targets", (" ",))),
    (sampling, "max_new_tokens must be", each("max_new_tokens", 0)),
    (sampling, "temperature must be", each("temperature", 0.0, nan, inf)),
    (sampling, "max_rows must be", each("max_rows", 0)),
    (config, "optimizer_steps_per_batch", each("optimizer_steps_per_batch", 0)),
    (config, "tokens_per_forward", each("tokens_per_forward", 0)),
    (config, "eval_every", each("eval_every", 0)),
    (config, "eval_samples", each("eval_samples", 0)),
    (config, "learning_rate", each("learning_rate", 0.0, nan, inf)),
    (config, "weight_decay", each("weight_decay", -0.1)),
    (config, "seed", each("seed", -1)),
    (config, "checkpoint_minutes", each("checkpoint_minutes", 0.0, nan)),
    (config, "keep_checkpoints", each("keep_checkpoints", 0)),
    (config, "max_batches", each("max_batches", 0)),
    (config, "max_grad_norm", each("max_grad_norm", 0.0)),
    (config, "betas", each("betas", (0.9, 1.0), (0.9,))),
    (config, "precision", each("precision", "fp16")),
    (config, "averaging must be a whole number of at least 0", each("averaging", -1, 0.5, nan)),
    (config, "sampling_dtype must be one of float32, bfloat16, float16, got 'int8'", each("sampling_dtype", "int8")),
]


@pytest.mark.parametrize(("make", "message", "given"), [(*case[:2], given) for case in WRONG for given in case[2]])
def test_a_setting_out_of_range_is_refused_and_what_was_expected_is_said(make, message, given):
    with pytest.raises(ValueError, match=message):
        make(**given)


@pytest.mark.parametrize("recipe", ["grpo", "mopps"])
def test_one_rollout_per_prompt_with_nothing_to_compare_it_with_is_refused(recipe):
    config(recipe=recipe, parameters={"n": 2}).make_recipe()
    config(recipe="reinforce", parameters={"n": 1}).make_recipe()
    with pytest.raises(ValueError, match="every advantage would be 0; use reinforce for one rollout per prompt"):
        config(recipe=recipe, parameters={"n": 1}).make_recipe()
