"""Options that are fields of `Config` have its descriptions and defaults."""

from dataclasses import fields

import pytest

from rollalloc.cli.options import RunOptions, described
from rollalloc.cli.sampled import Asked
from rollalloc.generate.endpoint import Endpoint
from rollalloc.models.settings import Clip, Loss
from rollalloc.train.config import Config, Schedule


def help_of(option):
    return next(each.metadata["option"].help for each in fields(RunOptions) if each.name == option)


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("max_grad_norm", "Gradients are clipped to this norm. Default: 1."),
        ("heldout", "A Parquet or JSONL file of prompts for evaluation. Default: no evaluation."),
        ("drop_overlong", "Leave out prompts that do not fit the model's context."),
        ("lora_alpha", "Scale of the adapters, above 0. Default: 2 · rank."),
        ("max_rollouts", "Rollout budget. Default: the task's, or 16 per prompt and at least 4,096."),
        ("schedule", 'How the learning rate continues after the warmup: "constant", "linear" or "cosine".'),
    ],
)
def test_the_help_of_an_option_is_the_description_of_its_field(option, expected):
    assert help_of(option) == expected


def test_the_default_of_an_option_is_that_of_its_field():
    options = RunOptions()
    assert options.tokens_per_forward == Config().tokens_per_forward
    assert options.generator_limit == Config().generator_limit_s
    assert (options.kl, options.dual_clip, options.aggregation) == (Loss().kl, Clip().dual, Loss().aggregation)
    assert (options.warmup_steps, options.schedule) == (Schedule().warmup, Schedule().shape)


def test_a_field_without_a_description_is_our_own_mistake():
    with pytest.raises(AssertionError, match="no_such_field is not described"):
        described("no_such_field")


def test_the_limits_of_requests_to_a_server_are_the_endpoints_own():
    assert (Asked.concurrency, Asked.request_limit, Asked.retries) == (
        Endpoint.concurrency,
        Endpoint.limit_s,
        Endpoint.retries,
    )
