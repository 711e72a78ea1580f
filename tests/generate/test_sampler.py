"""The sampler: what it draws, from which distribution, and that a rollout's company does not matter."""

# pyright: reportArgumentType=false

import re
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    FalconMambaConfig,
    Gemma3TextConfig,
    GPT2Config,
    MistralConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5TextConfig,
    RwkvConfig,
)

from rollalloc.generate import sampler
from rollalloc.generate.sampler import Request, draw, draw_keys, generate, stream, uniforms
from rollalloc.models import likelihood
from rollalloc.models.likelihood import completion_logprobs, why_cache_is_unfit
from rollalloc.models.settings import Sampling

PAD, EOS, OTHER_EOS, VOCABULARY = 0, 1, 2, 24
REQUESTS = [
    Request(prompt=7, tokens=(5, 3, 9), rollouts=(10, 11, 12, 13, 14)),
    Request(prompt=2, tokens=(4,), rollouts=(20,)),
    Request(prompt=9, tokens=(8, 8, 3, 17, 20, 6), rollouts=(30, 31, 32)),
]
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": None,
}
HEADER = tuple(3 + (5 * at) % 19 for at in range(20))
ROLLOUTS = [rollout for request in REQUESTS for rollout in request.rollouts]


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Qwen2ForCausalLM(Qwen2Config(**SIZES))


def run(model, requests=REQUESTS, *, max_new_tokens=20, eos_ids=(EOS, OTHER_EOS), seed=0, **settings):
    sampling = Sampling(max_new_tokens=max_new_tokens, **settings)
    return generate(model, requests, sampling, eos_ids=eos_ids, pad_id=PAD, seed=seed)


def streamed(model, on_finished=lambda ended: (), requests=REQUESTS, *, eos_ids=(EOS, OTHER_EOS), **settings):
    """What `stream` hands over, in lists as it comes; `on_finished` names what to stop."""
    sampling = Sampling(**{"max_new_tokens": 20, **settings})
    stopping = stream(model, requests, sampling, eos_ids=eos_ids, pad_id=PAD, seed=0)
    calls, named = [], None
    with suppress(StopIteration):
        while True:
            calls.append(stopping.send(named))
            named = on_finished(calls[-1])
    return calls


@contextmanager
def watched(model, before=lambda rows: None):
    """The number of rows of each forward pass; `before` is called with it, and may raise."""
    widths = []

    def hook(head, inputs):
        widths.append(len(inputs[0]))
        before(len(inputs[0]))

    handle = model.lm_head.register_forward_pre_hook(hook)
    try:
        yield widths
    finally:
        handle.remove()


def tokens_of(generations):
    return {generation.rollout: generation.tokens for generation in generations}


# What comes back


def test_rollouts_come_back_in_the_order_requested_and_end_at_their_first_eos(model):
    generations = run(model)
    assert [generation.rollout for generation in generations] == ROLLOUTS
    for generation in generations:
        ends = [token in (EOS, OTHER_EOS) for token in generation.tokens]
        assert not any(ends[:-1])
        assert generation.truncated == (not ends[-1])
        assert len(generation.tokens) == 20 or not generation.truncated
        assert generation.logprobs.dtype == np.float32
        assert len(generation.logprobs) == len(generation.tokens)
    last = {generation.tokens[-1] for generation in generations}
    assert {EOS, OTHER_EOS} <= last  # both ends occur, so that the assertions above say something


# Behaviour log-probabilities


def assert_logprobs_equal_a_forward_pass(model, temperature=1.0, requests=REQUESTS):
    generations = run(model, requests, temperature=temperature, max_rows=4)
    prompts = [request.tokens for request in requests for _ in request.rollouts]
    completions = [generation.tokens for generation in generations]
    with torch.no_grad():
        logprobs_BT, _ = completion_logprobs(model.eval(), prompts, completions, pad_id=PAD, temperature=temperature)
    for generation, expected_T in zip(generations, logprobs_BT.numpy(), strict=True):
        np.testing.assert_allclose(generation.logprobs, expected_T[: len(generation.tokens)], atol=1e-4, rtol=0)


@pytest.fixture(params=[1, 2])
def threads(request, one_thread):
    """With several threads the sampler attends by a function of its own; `one_thread` puts back what was there."""
    torch.set_num_threads(request.param)


# With and without the sampler's own attention; the tier `e2e` has also those that differ in what is not attention.
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64, vocab_size=VOCABULARY), marks=pytest.mark.e2e
        ),
        Qwen2Config(**SIZES | {"num_key_value_heads": 1}),
        # Two layers of attention over the last four positions only.
        MistralConfig(**SIZES, sliding_window=4),
        # Five layers of the last four positions and one of all, with one head of keys and positions of their own kind.
        Gemma3TextConfig(
            **SIZES | {"num_hidden_layers": 6, "num_key_value_heads": 1},
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=4,
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_other_architectures_agree_with_their_forward_pass_too(config, threads):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = AutoModelForCausalLM.from_config(config)
    assert_logprobs_equal_a_forward_pass(model)
    assert_logprobs_equal_a_forward_pass(model, requests=REQUESTS[:1])  # a wave without padding, and so without a mask
    headed = [replace(request, tokens=HEADER + request.tokens) for request in REQUESTS]
    assert_logprobs_equal_a_forward_pass(model, requests=headed)  # prompts that begin alike


STATEFUL = {
    "linear attention beside attention": (
        Qwen3_5TextConfig(
            **SIZES,
            layer_types=["linear_attention", "full_attention"],
            **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), 2),
            **dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
        ),
        "rows cannot be selected and repeated .LinearAttentionLayer",
    ),
    # Its layers select the keys and values, and leave the other states as they are.
    "both in one layer": (
        FalconH1Config(**SIZES, mamba_d_ssm=16, mamba_n_heads=2, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=4),
        "rows cannot be selected and repeated .LinearAttentionAndFullAttentionLayer",
    ),
    # Before transformers 5.24 it has a name of its own for its cache.
    "a state alone": (
        FalconMambaConfig(vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=2, use_mambapy=False),
        "keeps its state outside|rows cannot be selected and repeated .LinearAttentionLayer",
    ),
    # It ignores the cache, whose layers would do.
    "no cache": (RwkvConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2), "keeps its state outside"),
}


@pytest.mark.parametrize(("config", "says"), STATEFUL.values(), ids=STATEFUL)
def test_a_model_whose_cache_cannot_follow_rows_is_known_before_it_samples(config, says):
    assert re.search(says, why_cache_is_unfit(AutoModelForCausalLM.from_config(config)) or "")


def test_a_model_with_tokens_of_its_own_before_the_prompt_is_known(model):
    peft = pytest.importorskip("peft")
    virtual = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    prompted = peft.get_peft_model(deepcopy(model), virtual)
    assert "other tokens than the model was given" in (why_cache_is_unfit(prompted) or "")


# A rollout's company does not matter


@pytest.mark.parametrize("max_rows", [1, 2, 4])
def test_waves_change_nothing_and_bound_the_batch(model, max_rows):
    with watched(model) as widths:
        waves = tokens_of(run(model, max_rows=max_rows))
    assert max(widths) <= max_rows
    assert waves == tokens_of(run(model))


@pytest.mark.parametrize(("kv_tokens", "widest"), [(26, 1), (60, 2), (200, 7), (234, 9), (None, 9)])
def test_a_bound_on_the_cache_changes_nothing_and_is_kept(model, kv_tokens, widest):
    held, cache = [], sampler.DynamicCache

    def watching(**how):
        held.append(cache(**how))
        return held[-1]

    sizes, settings = [], {"eos_ids": (), "kv_tokens": kv_tokens}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sampler, "DynamicCache", watching)
        with watched(model, lambda rows: sizes.append(rows * held[-1].get_seq_length())) as widths:
            waves = tokens_of(run(model, **settings))
    assert waves == tokens_of(run(model, eos_ids=()))
    assert max(sizes) <= (kv_tokens or max(sizes))
    assert max(widths) == widest


HEADER = tuple(
    3 + (7 * at) % 20 for at in range(20)
)  # what a chat template and a system message put before every prompt


LIMITS = {7: 4, 2: None, 9: 9}  # by prompt


@pytest.mark.parametrize("max_rows", [1024, 4])
def test_a_limit_stops_the_rollouts_of_its_request_and_changes_no_other(model, max_rows):
    whole = {one.rollout: one for one in run(model)}
    limited = [replace(request, limit=LIMITS[request.prompt]) for request in REQUESTS]
    limit_of = {rollout: request.limit or 20 for request in limited for rollout in request.rollouts}
    made = run(model, limited, max_rows=max_rows)
    assert [one.rollout for one in made] == ROLLOUTS
    for one in made:
        before, limit = whole[one.rollout], limit_of[one.rollout]
        assert one.tokens == before.tokens[:limit]
        assert one.truncated == (before.truncated or len(before.tokens) > limit)
    stopped = [one for one in made if len(one.tokens) < len(whole[one.rollout].tokens)]
    assert len({len(one.tokens) for one in stopped}) == 2  # each limit cuts something


def test_a_limit_beyond_the_longest_rollout_is_none(model):
    limited = [replace(request, limit=50) for request in REQUESTS]
    assert tokens_of(run(model, limited)) == tokens_of(run(model))


def test_a_limit_takes_less_room_in_the_cache(model):
    """Rows of six tokens of prompt and four of completion, where whole ones would have 26."""
    asked = [replace(REQUESTS[2], limit=4)]
    assert tokens_of(run(model, asked, kv_tokens=10)) == tokens_of(run(model, asked))
    with pytest.raises(ValueError, match=r"kv_tokens must hold at least one rollout with its prompt \(26 tokens\)"):
        run(model, REQUESTS[2:], kv_tokens=10)


def headed(length):
    """The requests, with the first `length` tokens of the header before each prompt."""
    return [Request(each.prompt, HEADER[:length] + each.tokens, each.rollouts) for each in REQUESTS]


def forwarded(model, requests, **settings):
    """What is sampled, and the prompt tokens that the model is given, padding included."""
    given = []

    def count(module, arguments, keywords):
        if keywords["input_ids"].shape[1] > 1:
            given.append(keywords["input_ids"].numel())

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        return run(model, requests, **settings), sum(given)
    finally:
        hook.remove()


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.e2e), 2], indirect=True)
def test_what_all_prompts_begin_with_is_prefilled_once_and_changes_nothing(model, threads, monkeypatch):
    made, tokens = forwarded(model, headed(20))
    assert tokens == 20 + 3 * 6
    with monkeypatch.context() as patch:
        patch.setattr(likelihood, "LEAST_SHARED", 1000)
        apart, tokens_apart = forwarded(model, headed(20))
    assert tokens_apart == 3 * 26
    assert [each.tokens for each in made] == [each.tokens for each in apart]
    for each, other in zip(made, apart, strict=True):
        np.testing.assert_allclose(each.logprobs, other.logprobs, atol=1e-4)


def test_a_cache_that_holds_not_one_rollout_is_refused(model):
    with pytest.raises(ValueError, match=r"at least one rollout with its prompt \(26 tokens\), got 25"):
        run(model, kv_tokens=25)


def test_stop_ids_end_a_rollout_as_eos_does(model):
    free = tokens_of(run(model, eos_ids=()))
    stop = next(token for token in free[ROLLOUTS[0]][1:] if token != free[ROLLOUTS[0]][0])
    for made in run(model, eos_ids=(), stop_ids=[stop]):
        whole = free[made.rollout]
        ends = whole.index(stop) + 1 if stop in whole else len(whole)
        assert made.tokens == whole[:ends]
        assert made.truncated == (stop not in whole)
    assert tokens_of(run(model, eos_ids=(), stop_ids=(stop,))) == tokens_of(run(model, eos_ids=(stop,)))
    with pytest.raises(ValueError, match="vocabulary"):
        run(model, stop_ids=(VOCABULARY,))


def test_finished_rows_leave_the_batch_and_change_nothing(model, monkeypatch):
    with watched(model) as widths:
        leaving = run(model)
    # One prefill of a row per prompt, then the rollouts, fewer and fewer.
    assert widths[0] == len(REQUESTS)
    assert widths[1] <= len(ROLLOUTS)
    assert widths[1:] == sorted(widths[1:], reverse=True)
    assert widths[-1] < widths[1]
    monkeypatch.setattr(sampler, "FINISHED_SHARE_TO_DROP", 1.0)
    for left, stayed in zip(leaving, run(model), strict=True):
        assert left.tokens == stayed.tokens
        np.testing.assert_allclose(left.logprobs, stayed.logprobs, atol=1e-4, rtol=0)


def test_seed_prompt_and_rollout_each_change_the_draws(model):
    first = run(model, [Request(prompt=1, tokens=(4, 5), rollouts=(1, 2))], eos_ids=())
    assert first[0].tokens != first[1].tokens
    assert (
        run(model, [Request(prompt=1, tokens=(4, 5), rollouts=(1,))], eos_ids=(), seed=1)[0].tokens != first[0].tokens
    )
    assert run(model, [Request(prompt=2, tokens=(4, 5), rollouts=(1,))], eos_ids=())[0].tokens != first[0].tokens


# Rollouts that are stopped


@pytest.mark.parametrize("max_rows", [2, 1024])
def test_rollouts_are_handed_over_in_the_step_in_which_they_end(model, max_rows):
    with watched(model) as widths:
        steps = []
        calls = streamed(model, lambda ended: steps.append(len(widths)) or (), max_rows=max_rows)
    ended = [each for call in calls for each in call]
    assert sorted(each.rollout for each in ended) == ROLLOUTS
    assert tokens_of(ended) == tokens_of(run(model))
    assert len(set(steps)) == len(calls) > 2  # at most one call a step
    if max_rows > len(ROLLOUTS):
        assert [{len(each.tokens) for each in call} for call in calls] == [{step} for step in steps]


@pytest.mark.parametrize("max_rows", [1, 4, 1024])
@pytest.mark.parametrize("after", [1, 3])
def test_a_stopped_rollout_keeps_its_tokens_so_far_and_the_others_do_not_notice(model, max_rows, after):
    complete = tokens_of(run(model))
    seen, named = [], []

    def on_finished(ended):
        seen.extend(ended)
        if len(seen) >= after and not named:
            named.extend([rollout for rollout in ROLLOUTS if rollout not in tokens_of(seen)][::2])
        return named  # time and again, also when they have ended

    calls = streamed(model, on_finished, max_rows=max_rows)
    ended = [each for call in calls for each in call]
    assert sorted(each.rollout for each in ended) == ROLLOUTS
    assert {each.rollout for each in ended if each.cancelled} == set(named) != set()
    assert [call for call in calls if any(each.cancelled for each in call) and not all(e.cancelled for e in call)] == []
    for each in ended:
        if each.cancelled:
            assert not each.truncated
            assert each.tokens == complete[each.rollout][: len(each.tokens)]
            assert len(each.tokens) < len(complete[each.rollout])
            assert len(each.logprobs) == len(each.tokens)
        else:
            assert each.tokens == complete[each.rollout]


# Memory that does not suffice


def out_of_memory_above(limit):
    def before(rows):
        if rows > limit:
            raise torch.cuda.OutOfMemoryError(f"no memory for {rows} rows")

    return before


@pytest.mark.parametrize("limit", [1, 3, 7])
def test_out_of_memory_halves_the_wave_and_changes_nothing(model, limit, caplog):
    complete = tokens_of(run(model))
    with watched(model, out_of_memory_above(limit)) as widths:
        calls = streamed(model)
    ended = [each for call in calls for each in call]
    assert sorted(each.rollout for each in ended) == ROLLOUTS
    assert tokens_of(ended) == complete
    refused = [rows for rows in widths if rows > limit]
    assert len(refused) == len(caplog.messages) <= 4
    assert "continuing with 5" in caplog.text


def test_no_memory_for_one_row_is_an_error_and_so_is_the_callers_own(model):
    with watched(model, out_of_memory_above(0)), pytest.raises(torch.cuda.OutOfMemoryError, match="for 1 rows"):
        run(model)

    def on_finished(ended):
        raise torch.cuda.OutOfMemoryError("a reward model's")

    with pytest.raises(torch.cuda.OutOfMemoryError, match="a reward model's"):
        streamed(model, on_finished)


# The draws


def test_uniforms_are_uniform_and_uncorrelated():
    """Neighbouring ids and positions are the hash's worst case.

    Error rate: chi-square with 63 degrees of freedom above its 99.99% quantile, 114, eight times: below 1 in 1,000;
    four correlations at 4.5 standard errors: below 1 in 10,000.
    """
    keys_B = draw_keys(0, np.repeat(np.arange(100), 100), np.tile(np.arange(100), 100))
    draws_BT = np.stack([uniforms(keys_B, position) for position in range(8)], axis=1)
    assert draws_BT.dtype == np.float64
    assert draws_BT.min() >= 0
    assert draws_BT.max() < 1
    assert len(np.unique(draws_BT)) == draws_BT.size
    for draws_B in draws_BT.T:
        cells = np.bincount((draws_B * 64).astype(int), minlength=64)
        assert ((cells - len(draws_B) / 64) ** 2 / (len(draws_B) / 64)).sum() < 114
    grid = draws_BT.reshape(100, 100, 8)
    neighbours = {
        "position": (grid[:, :, 1:], grid[:, :, :-1]),
        "rollout": (grid[:, 1:], grid[:, :-1]),
        "prompt": (grid[1:], grid[:-1]),
        "seed": (grid[..., 0], uniforms(draw_keys(1, np.repeat(np.arange(100), 100), np.tile(np.arange(100), 100)), 0)),
    }
    for one, other in neighbours.values():
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 4.5 / np.sqrt(one.size)


def test_uniforms_are_pinned():
    """SplitMix64's published first outputs from state 0: a run's draws must not change between versions."""
    first = (np.array([0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4], dtype=np.uint64) >> np.uint64(11)) * 2.0**-53
    zero = np.zeros(1, dtype=np.uint64)
    assert [uniforms(zero, position)[0] for position in range(2)] == first.tolist()


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
@pytest.mark.parametrize("possible", [[3], [0], [7], [2, 5], [0, 7], list(range(8))])
def test_impossible_tokens_are_never_drawn_even_at_the_ends(uniform, possible):
    for scale in (-30.0, 0.0, 1.0, 3.3, 50.0):
        logits_V = torch.full((8,), -torch.inf)
        logits_V[possible] = scale + 0.37 * torch.arange(len(possible))
        tokens_B, _ = draw(logits_V[None], torch.tensor([uniform], dtype=torch.float64))
        assert tokens_B.item() == (possible[0] if uniform == 0 else possible[-1])


# Bad input


def test_bad_requests_are_refused(model):
    with pytest.raises(ValueError, match="is requested 2 times"):
        run(model, [Request(0, (3,), (1, 2)), Request(1, (4,), (2,))])
    with pytest.raises(ValueError, match="at least one token"):
        run(model, [Request(0, (), (1,))])
    with pytest.raises(ValueError, match="vocabulary"):
        run(model, eos_ids=[VOCABULARY])
    with pytest.raises(ValueError, match=r"only requested rollouts can be stopped, got \[99\]"):
        streamed(model, lambda ended: [10, 99])


def test_logits_that_are_not_numbers_are_an_error(model):
    hook = model.lm_head.register_forward_hook(lambda head, inputs, output: output * float("nan"))
    try:
        with pytest.raises(FloatingPointError, match="finite logits"):
            run(model)
    finally:
        hook.remove()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_equal_a_forward_pass(model, temperature):
    assert_logprobs_equal_a_forward_pass(model, temperature)


def test_stopped_rollouts_leave_the_batch_and_those_not_begun_cost_nothing(model):
    others = [rollout for rollout in ROLLOUTS if rollout != 32]
    with watched(model) as widths:
        # The prompt of 20 comes first, alone in its wave: when it ends, all but one are stopped before they begin.
        ended = [each for call in streamed(model, lambda _: others, max_rows=1) for each in call]
    assert [each.rollout for each in ended if not each.cancelled] == [20, 32]
    assert all(each.tokens == () for each in ended if each.cancelled)
    assert len(widths) == sum(len(each.tokens) for each in ended)

    with watched(model) as widths:
        ended = [each for call in streamed(model, lambda _: others) for each in call]
    first = min(len(each.tokens) for each in ended)
    assert widths[first - 1] > widths[first] == 1  # all in one batch: 32 goes on by itself
    with watched(model) as widths:
        streamed(model, lambda _: ROLLOUTS)
    assert len(widths) == first


def test_frequencies_match_the_softmax():
    """Error rate: chi-square with 7 degrees of freedom at its 99.99% quantile, 29.9: 1 in 10,000."""
    logits_V = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0, -torch.inf, 1.5, 0.3, -0.5])
    rows = 20_000
    uniforms_B = torch.from_numpy(uniforms(draw_keys(3, np.zeros(rows), np.arange(rows)), 0))
    tokens_B, logprobs_B = draw(logits_V.expand(rows, -1), uniforms_B)
    probability_V = logits_V.double().softmax(dim=-1).numpy()
    counts_V = np.bincount(tokens_B.numpy(), minlength=len(probability_V))
    assert counts_V[5] == 0
    possible_V = probability_V > 0
    expected_V = rows * probability_V[possible_V]
    assert ((counts_V[possible_V] - expected_V) ** 2 / expected_V).sum() < 29.9
    np.testing.assert_allclose(logprobs_B.numpy(), np.log(probability_V[tokens_B.numpy()]), atol=1e-6)
