"""Attention of a new token: the same as transformers', where it applies, and nothing left behind."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rollalloc.models.likelihood import attend, decoding_attention

SIZES = {
    "vocab_size": 8,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


@pytest.fixture(autouse=True)
def two_threads(one_thread):
    torch.set_num_threads(2)  # `one_thread` puts back what was there


class Layer(torch.nn.Module):
    num_key_value_groups = 2
    is_causal = True


def given(queries: int = 1) -> dict[str, torch.Tensor]:
    """Three rows, four heads that share two heads of keys, five positions, of which a row has one to five."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 4, queries, 8, generator=generator)
    key, value = torch.randn(2, 3, 2, 5, 8, generator=generator)
    mask = torch.tensor([[True] * 5, [False] * 4 + [True], [False, False, True, True, True]])
    return {"query": query, "key": key, "value": value, "mask": mask[:, None, None].expand(3, 1, queries, 5)}


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("masked", ["not at all", "by truth", "by numbers"])
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_our_attention_equals_that_of_transformers(queries, masked, scaling):
    query, key, value, mask = given(queries).values()
    chosen = {"not at all": None, "by truth": mask, "by numbers": torch.zeros(mask.shape).masked_fill(~mask, -1e9)}[
        masked
    ]
    more = {"scaling": scaling, "is_causal": False, "dropout": 0.0, "sliding_window": None}
    expected, _ = sdpa_attention_forward(Layer(), query, key, value, chosen, **more)
    got, weights = attend(Layer(), query, key, value, chosen, **more)
    assert weights is None
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


def test_our_attention_is_used_only_within_its_context(monkeypatch):
    called = []
    monkeypatch.setattr("rollalloc.models.likelihood.attend", lambda *a, **k: called.append(1) or attend(*a, **k))
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    ids, mask = torch.tensor([[0, 3], [4, 5]]), torch.tensor([[0, 1], [1, 1]])
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        assert not called
        with decoding_attention(model):
            torch.testing.assert_close(model(ids, attention_mask=mask).logits, expected)
        assert called
        with pytest.raises(RuntimeError, match="on the way"), decoding_attention(model):
            raise RuntimeError("on the way")
        called.clear()
        model(ids, attention_mask=mask)
    assert not called
    assert model.config._attn_implementation == "sdpa"


def test_a_single_thread_keeps_the_fused_kernel():
    torch.set_num_threads(1)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    with decoding_attention(model):
        assert model.config._attn_implementation == "sdpa"


def test_a_model_that_attends_otherwise_is_left_as_it_is():
    eager = LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="eager"))
    capped = Gemma2ForCausalLM(Gemma2Config(**SIZES))
    assert capped.config._attn_implementation == "eager"
    for model in (eager, capped):
        with decoding_attention(model):
            assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("masked", [False, True])
def test_in_half_precision_several_tokens_and_their_gradients_are_transformers_own_up_to_rounding(masked):
    query, key, value, mask = given(queries=5).values()
    earlier = torch.ones(5, 5, dtype=torch.bool).tril()
    chosen = mask & earlier if masked else None
    seen = (mask & earlier).any(dim=3)[:, 0] if masked else torch.ones(3, 5, dtype=torch.bool)  # others are padding
    found = []
    for function, half in ((sdpa_attention_forward, False), (attend, True)):
        leaves = [each.clone().requires_grad_() for each in (query, key, value)]
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            out, _ = function(Layer(), *leaves, chosen)
        assert out.isfinite().all()
        out[seen].float().square().sum().backward()
        found.append([out[seen].float(), *(leaf.grad for leaf in leaves)])
    for expected, got in zip(*found, strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got, expected, rtol=0, atol=0.03 * float(expected.detach().abs().max()))


def test_beyond_what_memory_holds_the_fused_kernel_attends(monkeypatch):
    query, key, value, _ = given(queries=5).values()
    called = []
    monkeypatch.setattr("rollalloc.models.likelihood.sdpa_attention_forward", lambda *a, **k: called.append(1))
    scores = query.shape[0] * query.shape[1] * 5 * 5
    for most, fused in ((scores, 0), (scores - 1, 1)):
        monkeypatch.setattr("rollalloc.models.likelihood.MOST_SCORES", (most, most))
        with torch.autocast("cpu", torch.bfloat16):
            attend(Layer(), query, key, value, None)
        assert len(called) == fused
