"""The back-ends: what they sample, and that each rollout comes back once."""

import multiprocessing
import multiprocessing.spawn
import random
import threading

import numpy as np
import pytest
import torch

from rollalloc.generate.sampler import Request, generate
from rollalloc.generate.stream.backend import BackendDied, Decoding, RunningRow
from rollalloc.generate.stream.local import LocalBackend
from rollalloc.generate.stream.process import ProcessBackend
from rollalloc.models.likelihood import completion_logprobs
from rollalloc.models.settings import Sampling
from rollalloc.models.weights import weights_of

LENGTH = 20


def decoding(policy, sampling, longest_prompt=5):
    ends = {"eos_ids": policy.eos_ids, "pad_id": policy.pad_id}
    return Decoding(sampling=sampling, **ends, seed=3, longest_prompt=longest_prompt)


@pytest.fixture
def expected(policy, prompts_of):
    """(tokens of 30 prompts, what each of 6 rollouts of each comes to in waves)."""
    draw = random.Random(7)
    tokens = [tokens[: draw.randint(1, len(tokens))] for tokens in prompts_of(30).tokens]
    requests = [Request(at, prompt, tuple(range(6 * at, 6 * at + 6))) for at, prompt in enumerate(tokens)]
    made = generate(policy.model, requests, Sampling(LENGTH), eos_ids=policy.eos_ids, pad_id=policy.pad_id, seed=3)
    return tokens, {each.rollout: each for each in made}


def rows_of(tokens, rollouts):
    return [RunningRow(rollout, rollout // 6, tokens[rollout // 6]) for rollout in rollouts]


@pytest.mark.parametrize("slots", [1, 3, 17, 64, 1000])
def test_a_rollouts_tokens_do_not_depend_on_other_rollouts(policy, expected, slots):
    tokens, waves = expected
    draw = random.Random(slots)
    rollouts = draw.sample(sorted(waves), len(waves) if slots > 1 else 20)
    backend = LocalBackend(policy.model, decoding(policy, Sampling(LENGTH, max_rows=slots)))
    left, ended = rows_of(tokens, rollouts), {}
    for _ in range(20_000):  # a few are started at a time, as there is room
        now = min(backend.capacity(), draw.randint(1, 4))
        backend.submit(left[:now])
        left = left[now:]
        for each in backend.poll(5.0):
            assert each.rollout not in ended
            ended[each.rollout] = each
        if len(ended) == len(rollouts):
            break
    assert ended.keys() == set(rollouts)
    for rollout, each in ended.items():
        assert each.tokens == waves[rollout].tokens
        np.testing.assert_allclose(each.logprobs, waves[rollout].logprobs, atol=1e-4)
        assert each.truncated == waves[rollout].truncated
        assert each.spans == ((0, len(each.tokens)),)
    assert backend.capacity() == slots
    assert {each.truncated for each in ended.values()} == {True, False}


def test_a_cancelled_rollout_comes_back_with_its_tokens(policy, expected):
    tokens, waves = expected
    backend = LocalBackend(policy.model, decoding(policy, Sampling(LENGTH, max_rows=8)))
    backend.submit(rows_of(tokens, range(12)))
    backend.cancel([11])  # before it begins
    ended = {each.rollout: each for _ in range(3) for each in backend.poll(0)}
    running = [rollout for rollout in range(12) if rollout not in ended]
    backend.cancel([running[0], running[3], 999])
    assert backend.capacity() >= 0
    ended |= {each.rollout: each for each in drained_rest(backend, 12 - len(ended))}
    assert ended.keys() == set(range(12))
    stopped = {rollout for rollout, each in ended.items() if each.cancelled}
    assert stopped == {running[0], running[3], 11}
    assert ended[11].tokens == ()
    for rollout, each in ended.items():
        assert each.tokens == waves[rollout].tokens[: len(each.tokens)]
        assert len(each.tokens) == len(waves[rollout].tokens) or rollout in stopped


def drained_rest(backend, count):
    ended, in_vain = [], 0
    while len(ended) < count:
        now = backend.poll(5.0)
        in_vain = 0 if now else in_vain + 1
        assert in_vain < 60, f"{len(ended)} of {count} came back"
        ended += now
    return ended


def changed(model):
    """Other weights for a model."""
    made = {name: tensor.detach().clone() for name, tensor in weights_of(model).items()}
    with torch.no_grad():
        for tensor in made.values():
            tensor.add_(0.3 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(2)))
    return made


def test_each_token_says_under_which_weights_it_was_drawn(policy_of, prompts_of):
    policy, tokens = policy_of(), prompts_of(6).tokens
    own = policy_of()
    backend = LocalBackend(own.model, decoding(policy, Sampling(LENGTH)))
    rows = [RunningRow(rollout, rollout % 6, tokens[rollout % 6]) for rollout in range(60)]
    backend.submit(rows)
    ended = [each for _ in range(3) for each in backend.poll(0)]
    backend.load_weights(changed(policy.model), 7)
    ended += drained_rest(backend, 60 - len(ended))
    assert {each.spans[0][0] for each in ended} == {0}
    straddling = [each for each in ended if len(each.spans) == 2]
    assert straddling
    for each in straddling:
        assert each.spans == ((0, 3), (7, len(each.tokens) - 3))
        # the first three are drawn from the old weights, and say so
        before, _ = completion_logprobs(
            policy.model, [tokens[each.rollout % 6]], [each.tokens[:3]], pad_id=policy.pad_id, temperature=1.0
        )
        np.testing.assert_allclose(each.logprobs[:3], before[0].detach().numpy(), atol=1e-4)
    backend.submit([RunningRow(1000, 0, tokens[0])])
    [fresh] = drained_rest(backend, 1)
    assert fresh.spans == ((7, len(fresh.tokens)),)
    under_new = weights_of(own.model)
    assert all(torch.equal(under_new[name], each) for name, each in changed(policy.model).items())


def test_rows_that_cannot_run_are_refused(policy):
    backend = LocalBackend(policy.model, decoding(policy, Sampling(2, max_rows=1), longest_prompt=3))
    backend.submit([RunningRow(1, 0, (4, 5))])
    for row, words in [
        (RunningRow(1, 0, (4,)), "is already running"),
        (RunningRow(2, 0, ()), "1 to 3 tokens, got 0"),
        (RunningRow(2, 0, (4, 4, 4, 4)), "1 to 3 tokens, got 4"),
    ]:
        with pytest.raises(ValueError, match=words):
            backend.submit([row])
    assert backend.capacity() == 0
    assert len(drained_rest(backend, 1)) == 1


def test_memory_bounds_the_rows(policy):
    assert decoding(policy, Sampling(10, max_rows=8), 6).slots == 8
    assert decoding(policy, Sampling(10, max_rows=8, kv_tokens=47), 6).slots == 2
    with pytest.raises(ValueError, match=r"with its prompt \(16 tokens\), got 15"):
        _ = decoding(policy, Sampling(10, kv_tokens=15), 6).slots


def test_weights_that_diverged_are_said(policy_of):
    policy = policy_of()
    backend = LocalBackend(policy.model, decoding(policy, Sampling(4)))
    backend.submit([RunningRow(1, 0, (4, 5))])
    backend.load_weights({name: each * torch.nan for name, each in weights_of(policy.model).items()}, 1)
    with pytest.raises(FloatingPointError, match="diverged"):
        backend.poll(0)


def soon(act):
    """What it returns; it may not wait for ever."""
    returned = []
    thread = threading.Thread(target=lambda: returned.append(act()), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it waits for ever"
    assert returned, "it raised"
    return returned[0]


def test_a_process_that_dies_before_it_has_read_anything_is_not_waited_for(policy_of, monkeypatch):
    """Nor for weights."""
    monkeypatch.setattr(multiprocessing.spawn, "get_executable", lambda: b"/bin/false")
    policy = policy_of()
    backend = soon(lambda: ProcessBackend(policy.model, decoding(policy, Sampling(LENGTH, max_rows=4))))
    weights = weights_of(policy.model)
    for version in range(1, 5):
        backend._heard.copied = True
        soon(lambda version=version: backend.load_weights(weights, version))
        assert not backend._heard.copied, "the next one would not wait for it"
    backend.submit([RunningRow(1, 0, (4, 5))])
    with pytest.raises(BackendDied, match=r"exit code 1, as the process before it did.*--max-rows"):
        drained_rest(backend, 1)
    backend.close()
