"""Tests of the checks for NaN and infinity in tensors of any format and size."""

import math

import pytest
import torch

from rollalloc.core.events import Batch, Row
from rollalloc.models.weights import Diverged, check_figures, first_not_finite, in_batch


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_first_tensor_with_an_entry_that_is_not_finite_is_named(dtype, value):
    tensors = {name: torch.ones(3, 5, dtype=dtype) for name in ("first", "second", "third")}
    assert first_not_finite(tensors.items()) is None
    tensors["second"][2, 4] = value
    tensors["third"][0, 0] = value
    assert first_not_finite(tensors.items()) == "second"


@pytest.mark.parametrize(("dtype", "large"), [(torch.float16, 6e4), (torch.float32, 1e30), (torch.bfloat16, 1e38)])
def test_large_entries_are_finite_even_where_their_norm_is_not(dtype, large):
    assert first_not_finite([("large", torch.full((9,), large, dtype=dtype)), ("usual", torch.ones(3))]) is None


def test_empty_and_quantized_tensors_are_passed_over():
    named = [("empty", torch.empty(0)), ("quantized", torch.ones(3, dtype=torch.uint8))]
    assert first_not_finite(named) is None
    assert first_not_finite([*named, ("broken", torch.tensor([math.nan]))]) == "broken"


def test_every_figure_that_is_not_finite_is_named_with_its_value_and_step():
    check_figures({"the loss": 1e300, "the norm": 0.0}, 4, "nothing")
    with pytest.raises(
        Diverged, match=r"^the loss is -inf and the norm is nan in optimizer step 4: .* the step was skipped$"
    ):
        check_figures(
            {"the loss": -math.inf, "the mean": 1.0, "the norm": math.nan}, 4, consequence="the step was skipped"
        )


def test_the_message_names_the_batch_at_most_five_prompts_and_the_checkpoint():
    def message(prompts):
        rows = tuple(
            Row(rollout=rollout, group=0, prompt=prompt, advantage=0.0, weight=1.0, version=6)
            for rollout, prompt in enumerate(prompts)
        )
        return str(in_batch(Diverged("the loss is nan"), Batch(rows, 6), "p{}".format, "the last one is in x"))

    assert "batch 7, with the prompts p3, p1. The last one is in x. Look at" in message([3, 1, 3])
    assert "p8, p7, p6, p5, p4 and 2 more. " in message([8, 7, 6, 5, 4, 3, 2])
