"""Features from a model: what they are, that batch and padding do not enter, and what they cost."""

import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from rollalloc.data.feature_blocks import log_length, projection, standardised, token_bag
from rollalloc.models.featurizer import features_of, weights_digest

VOCABULARY, HIDDEN, LAYERS, CONTEXT, PAD = 40, 16, 2, 64, 0
_FAMILIES = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=16, num_hidden_layers=LAYERS,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=CONTEXT, initializer_range=0.3,
        )
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=LAYERS, n_head=2, n_positions=CONTEXT)
    ),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, ffn_dim=16, num_hidden_layers=LAYERS, num_attention_heads=2,
            max_position_embeddings=CONTEXT, word_embed_proj_dim=HIDDEN,
        )
    ),
    "bloom": lambda: BloomForCausalLM(
        BloomConfig(vocab_size=VOCABULARY, hidden_size=HIDDEN, n_layer=LAYERS, n_head=2)
    ),
}  # fmt: skip


def make_model(family="llama", seed=1):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _FAMILIES[family]().eval()


def make_tokens(count, longest=12, seed=0):
    """Prompts of 1 to `longest` random tokens."""
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(2, VOCABULARY, size=size).tolist()) for size in rng.integers(1, longest + 1, size=count)]


def sums_one_by_one(model, tokens):
    """Σ_t h[l, t] of each prompt alone, shape (N, layers · H), without any of what is tested."""
    sums = []
    for ids in tokens:
        with torch.no_grad():
            states = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
        sums.append(torch.cat([state[0].double().sum(0) for state in states]).numpy())
    return np.array(sums)


def hidden_of(model, tokens, **more):
    return features_of(model, tokens, pad_id=PAD, **more).blocks["hidden"]


# what they are


@pytest.mark.parametrize("family", _FAMILIES)
def test_hidden_is_the_standardised_sum_over_tokens_of_all_layers(family):
    model, tokens = make_model(family), make_tokens(30)
    sums_ND = sums_one_by_one(model, tokens)
    assert sums_ND.shape == (30, (LAYERS + 1) * HIDDEN)
    assert hidden_of(model, tokens) == pytest.approx(standardised(sums_ND), abs=2e-3)


def test_the_blocks_besides_hidden_states_are_tokens_and_length():
    tokens = make_tokens(30)
    made = features_of(make_model(), tokens, pad_id=PAD, width=9, seed=2)
    assert list(made.blocks) == ["hidden", "tokens", "length"]
    assert np.array_equal(made.blocks["tokens"], token_bag(tokens, VOCABULARY, width=9, seed=2))
    assert np.array_equal(made.blocks["length"], log_length(tokens))
    assert [block_ND.shape for block_ND in made.blocks.values()] == [(30, 9), (30, 9), (30, 1)]


# what does not enter


@pytest.mark.parametrize("family", _FAMILIES)
@pytest.mark.parametrize("width", [256, 5])
def test_the_batch_and_its_padding_do_not_enter(family, width, monkeypatch):
    monkeypatch.setattr("rollalloc.models.featurizer.SAMPLE", 8)  # so that most prompts are forwarded after the sample
    model, tokens = make_model(family), make_tokens(40)
    alone = hidden_of(model, tokens, width=width, batch_tokens=1)
    for batch_tokens in (20, 100_000):
        assert hidden_of(model, tokens, width=width, batch_tokens=batch_tokens) == pytest.approx(alone, abs=2e-3)
    for pad_id in (1, VOCABULARY - 1):
        padded_otherwise = features_of(model, tokens, pad_id=pad_id, width=width).blocks["hidden"]
        assert np.array_equal(padded_otherwise, hidden_of(model, tokens, width=width))


def test_no_forward_pass_is_larger_than_asked(monkeypatch):
    model, tokens = make_model(), make_tokens(300)
    shapes = []
    forward = model.model.forward

    def seen(*, input_ids, **more):
        shapes.append(tuple(input_ids.shape))
        return forward(input_ids=input_ids, **more)

    monkeypatch.setattr(model.model, "forward", seen)
    hidden_of(model, tokens, batch_tokens=30)
    assert all(rows * columns <= 30 for rows, columns in shapes)
    assert sum(rows for rows, _ in shapes) == 300  # each prompt once, those of the sample too
    shapes.clear()
    hidden_of(model, tokens, batch_tokens=5)  # a longer prompt goes alone
    assert all(rows * columns <= 5 or rows == 1 for rows, columns in shapes)


# few, short, odd


@pytest.mark.parametrize(
    ("tokens", "more", "message"),
    [
        ([], {}, "at least one token each, got no prompts"),
        ([(1,), ()], {}, "got none in prompt 1"),
        ([(1, VOCABULARY)], {}, r"expected tokens in \[0, 40\), got 1 to 40; use the tokenizer"),
        ([(-1, 3)], {}, "got -1 to 3"),
        ([(1,), (1,) * 65], {}, "prompt 1 has 65 tokens, but the model's context is 64"),
        ([(1,)], {"width": 0}, "width must be a whole number of at least 1, got 0"),
        ([(1,)], {"width": 1025}, "width must be at most 1024, got 1025"),
        ([(1,)], {"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ([(1,)], {"batch_tokens": 0}, "batch_tokens must be a whole number of at least 1, got 0"),
    ],
)
def test_what_cannot_be_is_refused(tokens, more, message):
    with pytest.raises(ValueError, match=message):
        features_of(make_model(), tokens, pad_id=PAD, **more)


def test_states_that_are_not_finite_name_the_prompt():
    model = make_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.nan
    with pytest.raises(ValueError, match="hidden states of prompt 2 are not finite"):
        features_of(model, [(3, 4), (5,), (6, 7), (8, 8)], pad_id=PAD, batch_tokens=4)


def test_a_model_without_hidden_states_says_what_to_do_instead(monkeypatch):
    model = make_model()
    monkeypatch.setattr(model.model, "forward", lambda **_: None)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM gives no hidden states .*own_features"):
        features_of(model, [(3,)], pad_id=PAD)


# which model it was


def test_a_model_is_known_by_its_weights_in_whatever_precision():
    model = make_model()
    digest = weights_digest(model)
    assert digest == weights_digest(make_model())
    assert digest == weights_digest(make_model().train())
    assert weights_digest(make_model().to(torch.bfloat16)) == digest
    assert weights_digest(make_model(seed=2)) != digest
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 0.1
    assert weights_digest(model) != digest


def test_wide_sums_are_scaled_and_then_projected():
    model, tokens = make_model(), make_tokens(30)
    sums_ND = sums_one_by_one(model, tokens)
    scaled_ND = (sums_ND - sums_ND.mean(axis=0)) / sums_ND.std(axis=0)
    expected = standardised(scaled_ND @ projection(5, scaled_ND.shape[1], 7))
    assert hidden_of(model, tokens, width=7, seed=5) == pytest.approx(expected, abs=2e-3)


def test_the_model_is_left_as_it_was():
    model = make_model("gpt2").train()  # with dropout, which does not enter either
    model.transformer.h[0].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    tokens = make_tokens(10)
    assert np.array_equal(hidden_of(model, tokens), hidden_of(make_model("gpt2"), tokens))
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_one_prompt_has_features_that_say_nothing():
    made = features_of(make_model(), [(5, 6, 7)], pad_id=PAD)
    assert all(not block_ND.any() for block_ND in made.blocks.values())
    assert made.blocks["hidden"].shape == (1, (LAYERS + 1) * HIDDEN)


def test_bfloat16_gives_nearly_the_same():
    tokens = make_tokens(100)
    exact, rounded = (hidden_of(make_model(), tokens, precision=precision) for precision in ("fp32", "bf16"))
    assert not np.array_equal(exact, rounded)
    # One correlation over all entries, which states of 8 bits with errors of their own would keep above 0.99.
    assert np.corrcoef(exact.ravel(), rounded.ravel())[0, 1] > 0.99
