"""The forward pass against hand-made sums, and exact success against what sampling finds."""

import warnings

import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen2Config, Qwen2ForCausalLM

from rollalloc.generate.sampler import Request, generate
from rollalloc.models import likelihood
from rollalloc.models.likelihood import (
    cache_argument,
    completion_logprobs,
    evaluating,
    exact_answers,
)
from rollalloc.models.settings import Sampling

PAD, EOS, VOCABULARY = 0, 1, 12
PROMPTS = [[5, 3], [7], [2, 4, 6, 8, 9], [11, 2, 3]]
COMPLETIONS = [[4, EOS], [9, 9, 3, EOS], [EOS], [2, 3, 4]]


def qwen2(**more) -> Qwen2ForCausalLM:
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.5,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Qwen2ForCausalLM(Qwen2Config(**settings | more))


@pytest.fixture
def model() -> Qwen2ForCausalLM:
    return qwen2()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_batch_equals_each_pair_alone_without_padding(model, temperature):
    logprobs_BT, mask_BT = completion_logprobs(model, PROMPTS, COMPLETIONS, pad_id=PAD, temperature=temperature)
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        logits_SV = model(input_ids=torch.tensor([prompt + completion])).logits[0] / temperature
        predicted_TV = logits_SV[len(prompt) - 1 : -1].log_softmax(dim=-1)
        expected_T = predicted_TV.gather(-1, torch.tensor(completion)[:, None])[:, 0]
        torch.testing.assert_close(logprobs_BT[row, : len(completion)], expected_T, atol=1e-4, rtol=0)
        assert mask_BT[row].tolist() == [True] * len(completion) + [False] * (mask_BT.shape[1] - len(completion))
        assert not logprobs_BT[row, len(completion) :].any()


def test_gradients_are_finite_and_padding_has_none(model):
    logprobs_BT, mask_BT = completion_logprobs(model, PROMPTS, COMPLETIONS, pad_id=10, temperature=1.0)
    (logprobs_BT.sum() / mask_BT.sum()).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    # Token 10 is only padding here. As an input it must leave no trace; only the head, untied in this model, sees it.
    assert not model.get_input_embeddings().weight.grad[10].any()


HEADER = [2 + (5 * at) % 9 for at in range(20)]


def judged(model, prompts):
    """Log-probabilities, their gradient, and the tokens that the model was given, padding included."""
    given = []
    hook = model.register_forward_pre_hook(
        lambda _, __, named: given.append(named["input_ids"].numel()), with_kwargs=True
    )
    model.zero_grad()
    logprobs_BT, _ = completion_logprobs(model, prompts, COMPLETIONS, pad_id=PAD)
    hook.remove()
    (logprobs_BT * torch.arange(1, logprobs_BT.numel() + 1).view_as(logprobs_BT)).sum().backward()
    return logprobs_BT.detach(), [parameter.grad.clone() for parameter in model.parameters()], given


@pytest.mark.parametrize(
    "rests", [PROMPTS, [[5], [7], [2], [11]], [[5]] * 4], ids=["with padding", "without", "all alike"]
)
def test_what_all_prompts_begin_with_is_read_once_with_the_same_gradient(model, rests, monkeypatch):
    model.double().eval()
    prompts = [HEADER + rest for rest in rests]
    width = max(map(len, rests)) + max(map(len, COMPLETIONS)) - 1
    logprobs_BT, gradients, given = judged(model, prompts)
    assert given == [20, 4 * width]
    monkeypatch.setattr(likelihood, "LEAST_SHARED", 100)
    apart_BT, gradients_apart, given_apart = judged(model, prompts)
    assert given_apart == [4 * (20 + width)]
    torch.testing.assert_close(logprobs_BT, apart_BT, atol=1e-5, rtol=0)  # in float32: logits are rounded to it
    for gradient, expected in zip(gradients, gradients_apart, strict=True):
        torch.testing.assert_close(gradient, expected, atol=1e-4, rtol=1e-5)


def test_only_completion_positions_go_through_the_head(model):
    widths = []
    model.lm_head.register_forward_hook(lambda head, inputs, output: widths.append(output.shape[1]))
    completion_logprobs(model, PROMPTS, COMPLETIONS, pad_id=PAD)
    assert widths == [max(map(len, COMPLETIONS))]


def test_exact_answers_sum_to_one_over_all_answers_and_matches_sampling(model):
    """Error rate of the last assertion: six binomial counts at 4.5 standard errors, below 1 in 20,000."""
    prompt, rollouts = [5, 3], 4000
    # Every completion of length 1 that ends, and of length 2: together with "longer" they are all there is.
    answers = [[EOS], *([token, EOS] for token in range(VOCABULARY) if token != EOS)]
    p_N = exact_answers(model, [prompt] * len(answers), answers, pad_id=PAD, batch_rows=5)[0]
    assert p_N.dtype == np.float64
    assert 0 < p_N.sum() < 1

    requests = [Request(prompt=0, tokens=tuple(prompt), rollouts=tuple(range(rollouts)))]
    sampled = generate(model, requests, Sampling(max_new_tokens=2), eos_ids=[EOS], pad_id=PAD, seed=5)
    for index in np.argsort(p_N)[-6:]:
        share = np.mean([generation.tokens == tuple(answers[index]) for generation in sampled])
        assert abs(share - p_N[index]) < 4.5 * np.sqrt(p_N[index] * (1 - p_N[index]) / rollouts)


def test_the_entropy_along_an_answer_is_that_of_each_next_token(model):
    """By hand: of the distribution before each token of the answer, at another temperature, EOS included."""
    prompt, answer = [5, 3], [4, 6, EOS]
    with torch.inference_mode():
        logits_TV = model(torch.tensor([prompt + answer])).logits[0, 1:4] / 0.7
    p_TV = logits_TV.softmax(-1)
    by_hand = float(-(p_TV * p_TV.log()).sum(-1).mean())
    _, [entropy] = exact_answers(model, [prompt], [answer], pad_id=PAD, temperature=0.7)
    assert entropy == pytest.approx(by_hand, rel=1e-5)


def test_each_module_gets_its_own_mode_back(model):
    model.train()
    model.model.norm.eval()
    with evaluating(model):
        assert not any(module.training for module in model.modules())
        assert torch.is_inference_mode_enabled()
    assert [module for module in model.modules() if not module.training] == [model.model.norm]
    with pytest.raises(KeyError), evaluating(model):
        raise KeyError
    assert [module for module in model.modules() if not module.training] == [model.model.norm]


def test_bad_input_is_named(model):
    with pytest.raises(ValueError, match="got 2 prompts and 1 completions"):
        completion_logprobs(model, [[5], [6]], [[4]], pad_id=PAD)
    with pytest.raises(ValueError, match="got none in sequence 1"):
        completion_logprobs(model, [[5], []], [[4], [4]], pad_id=PAD)
    with pytest.raises(ValueError, match="got 0 prompts"):
        completion_logprobs(model, [], [], pad_id=PAD)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_where_the_length_of_what_is_read_turns_the_positions_nothing_is_shared(kind):
    """The header read alone is short, the rows are beyond the original length: read once it would have other positions."""
    rope = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 21}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    model = qwen2(max_position_embeddings=21, rope_parameters=rope).eval()
    assert_each_row_is_as_if_alone(model)


def assert_each_row_is_as_if_alone(model):
    """The log-probabilities of rows that begin alike; returns the sizes of what the model was given."""
    made_BT, _, given = judged(model, [HEADER + rest for rest in PROMPTS])
    for row, rest in enumerate(PROMPTS):
        completion = COMPLETIONS[row]
        logits_SV = model(input_ids=torch.tensor([HEADER + rest + completion])).logits[0]
        expected_T = logits_SV[-len(completion) - 1 : -1].log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])
        torch.testing.assert_close(made_BT[row, : len(completion)], expected_T[:, 0].detach(), atol=1e-4, rtol=0)
    return given


ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
DYNAMIC = ROPE | {"rope_type": "dynamic", "factor": 4.0}


@pytest.mark.parametrize(
    ("layers", "of_full", "shares"),
    [
        (["sliding_attention"] * 5 + ["full_attention"], ROPE, False),
        (["full_attention"] * 2, ROPE, True),
        (["full_attention"] * 2, DYNAMIC, False),
    ],
    ids=["sliding windows", "none", "none, by length"],
)
def test_gemma_3_reads_a_common_prefix_once_only_where_all_its_layers_can(layers, of_full, shares):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = Gemma3TextConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=len(layers),
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            query_pre_attn_scalar=8,
            max_position_embeddings=64,
            initializer_range=0.3,
            layer_types=layers,
            sliding_window=8,
            rope_parameters={"full_attention": of_full, "sliding_attention": ROPE},
        )
        given = assert_each_row_is_as_if_alone(Gemma3ForCausalLM(config).eval())
    assert (given[0] == len(HEADER)) == shares


def test_a_cache_goes_by_the_name_that_the_model_has_for_it(model):
    """`past_key_values` is `cache` from transformers 5.24 on, which warns of the old one at each pass."""

    class Older(type(model)):
        def forward(self, input_ids=None, past_key_values=None, **more):
            raise NotImplementedError

    older = object.__new__(Older)
    assert cache_argument(older, None) == {"past_key_values": None}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache_argument(model, None).keys() <= {"cache", "past_key_values"}
        completion_logprobs(model.eval(), [(2, 3) * 10] * 2, [(3, 4), (5, 6)], pad_id=0)
