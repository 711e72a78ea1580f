"""The real vLLM on CPUs as the asynchronous engine's back-end; its engine takes most of the time to begin."""

import os
import signal
from contextlib import closing

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

import psutil
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollalloc.generate.sampling import Sampling
from rollalloc.generate.stream.backend import BackendDied, Decoding, Row
from rollalloc.generate.stream.vllm_backend import VllmBackend
from rollalloc.generate.stream.vllm_engine import Engine, refuse_unservable
from rollalloc.models.likelihood import completion_logprobs, exact_answers
from rollalloc.models.weights import load_weights, weights_of

pytestmark = pytest.mark.verl
LENGTH, SLOTS, EOS, STOP = 40, 24, 1, 7
SAMPLING = Sampling(LENGTH, temperature=0.7, max_rows=SLOTS, kv_tokens=8192, stop_ids=(STOP,))
PROMPTS = [(5, 9, 2), (11, 3), tuple(range(20, 50)) * 5]  # the last fills a block of the cache
LONGEST = 150
NEAR = 1e-3  # nats, between vLLM and a forward pass


def tiny(**changes):
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape |= {"vocab_size": 64, "intermediate_size": 128, "max_position_embeddings": 256, "initializer_range": 0.2}
    torch.manual_seed(0)
    config = Qwen2Config(**shape | {"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": EOS} | changes)
    return Qwen2ForCausalLM(config).eval()


def drained(backend, count):
    ended, in_vain = [], 0
    while len(ended) < count:
        now = backend.step(5.0)
        in_vain = 0 if now else in_vain + 1
        assert in_vain < 100, f"{len(ended)} of {count} came back"
        ended += now
    assert len(ended) == count
    return {each.rollout: each for each in ended}


def forced(model, rows, ended):
    """Log-probabilities of what was sampled by a forward pass, a list of arrays."""
    prompts = [(*row.tokens, *row.begun) for row in rows]
    completions = [ended[row.rollout].tokens for row in rows]
    with torch.inference_mode():
        logprobs_BT, _ = completion_logprobs(model, prompts, completions, pad_id=0, temperature=0.7)
    return [logprobs_BT[at, : len(tokens)].numpy() for at, tokens in enumerate(completions)]


def rows_of(rollouts, **changes):
    return [Row(rollout, rollout % 3, PROMPTS[rollout % 3], **changes) for rollout in rollouts]


def test_rollouts_of_vllm_are_what_they_say_under_each_of_their_weights():
    model, other = tiny(), tiny()
    weights = {name: tensor.detach().clone() for name, tensor in weights_of(model).items()}
    for tensor in weights.values():
        tensor.add_(0.05 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(2)))
    load_weights(other, weights)
    before = set(psutil.Process().children(recursive=True))
    decoding = Decoding(sampling=SAMPLING, eos_ids=(EOS,), pad_id=0, seed=3, longest_prompt=LONGEST)
    backend = VllmBackend(lambda folder: Engine(model, folder, decoding), decoding, version=4)
    with closing(backend):
        rows = rows_of(range(96))
        backend.start(rows)
        ended = drained(backend, len(rows))
        check_what_was_sampled(model, rows, ended)
        check_that_draws_are_keyed(backend, ended)
        check_that_it_goes_on_and_stops(backend, model)
        check_new_weights(backend, model, other, weights)
        assert {paced for paced, _ in backend.paces()} <= set(range(1, SLOTS + 1))
        assert backend.figures() == {"preempted": 0}
        check_that_its_death_is_said(backend)
    left = set(psutil.Process().children(recursive=True)) - before
    assert [process for process in left if "resource_tracker" not in " ".join(process.cmdline())] == []


def check_what_was_sampled(model, rows, ended):
    """Also that it was drawn from what it says: -log p has the entropy for its mean, within 5 standard errors."""
    for row, logprobs in zip(rows, forced(model, rows, ended), strict=True):
        each = ended[row.rollout]
        np.testing.assert_allclose(each.logprobs, logprobs, atol=NEAR)
        assert each.spans == ((4, len(each.tokens)),)
        over = [at for at, token in enumerate(each.tokens) if token in (EOS, STOP)]
        assert (each.end, over) == (("stop", [len(each.tokens) - 1]) if over else ("length", []))
        assert len(each.tokens) == LENGTH or over
    assert {each.tokens[-1] for each in ended.values()} >= {EOS, STOP}
    assert {each.end for each in ended.values()} == {"stop", "length"}
    prompts, tokens = [row.tokens for row in rows], [ended[row.rollout].tokens for row in rows]
    p_N, entropy_N = exact_answers(model, prompts, tokens, pad_id=0, temperature=0.7)
    beyond_N = -np.log(p_N) - entropy_N * [len(each) for each in tokens]
    assert abs(beyond_N.mean()) < 5 * beyond_N.std() / np.sqrt(len(rows))


def check_that_draws_are_keyed(backend, ended):
    again = rows_of(range(24))
    backend.start(again)
    repeated = drained(backend, len(again))
    assert sum(repeated[row.rollout].tokens == ended[row.rollout].tokens for row in again) >= 20  # but for rounding
    assert len({each.tokens for rollout, each in repeated.items() if rollout % 3 == 0}) > 4


def check_that_it_goes_on_and_stops(backend, model):
    rows = rows_of(range(200, 206), begun=tuple(range(30, 60))) + rows_of(range(300, 360))
    backend.start(rows)
    assert backend.capacity() == 0
    backend.abort([300, 359, 999])  # at once, while most wait
    ended = drained(backend, len(rows))
    assert all(len(ended[rollout].tokens) <= LENGTH - 30 for rollout in range(200, 206))
    for row, logprobs in zip(rows[:6], forced(model, rows[:6], ended), strict=True):
        np.testing.assert_allclose(ended[row.rollout].logprobs, logprobs, atol=NEAR)
    assert {rollout for rollout, each in ended.items() if each.end == "aborted"} == {300, 359}
    assert backend.capacity() == SLOTS


def check_new_weights(backend, model, other, weights):
    rows = rows_of(range(400, 448))
    backend.start(rows)
    first = drained_some(backend, 3)
    backend.load(weights, 5)
    for tensor in weights.values():
        tensor.zero_()  # they are the caller's again
    late = rows_of(range(500, 510))
    backend.start(late)
    ended = first | drained(backend, len(rows) + len(late) - len(first))
    straddling = [row for row in rows if len(ended[row.rollout].spans) == 2]
    assert len(straddling) >= 5
    assert all([version for version, _ in ended[row.rollout].spans] == [4, 5] for row in straddling)
    beyond = []
    for row, logprobs in zip(straddling, forced(model, straddling, ended), strict=True):
        each, old = ended[row.rollout], ended[row.rollout].spans[0][1]
        np.testing.assert_allclose(each.logprobs[:old], logprobs[:old], atol=NEAR)
        beyond.append(abs(each.logprobs[old] - logprobs[old]))
    assert np.median(beyond) > 10 * NEAR
    for row, logprobs in zip(
        late, forced(other, late, ended), strict=True
    ):  # nothing of the old weights is left in these
        assert ended[row.rollout].spans == ((5, len(ended[row.rollout].tokens)),)
        np.testing.assert_allclose(ended[row.rollout].logprobs, logprobs, atol=NEAR)


def drained_some(backend, least):
    ended = []
    while len(ended) < least:
        ended += backend.step(5.0)
    return {each.rollout: each for each in ended}


def check_that_its_death_is_said(backend):
    backend.start(rows_of(range(600, 620)))
    [engine] = [each for each in backend._served._processes if each.is_running()]
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(BackendDied, match="vLLM's engine ended"):
        drained(backend, 20)
    backend.load(weights_of(tiny()), 9)
    backend.load(weights_of(tiny()), 10)  # returns, although nobody takes it
    with pytest.raises(BackendDied):
        backend.step(0.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tie_word_embeddings": True}, "tied to its embeddings"),
        ({"num_attention_heads": 4, "head_dim": 16}, "heads of 32, .* are of 16"),
        ({"architectures": ["NobodysForCausalLM"]}, "does not know NobodysForCausalLM"),
    ],
)
def test_models_that_vllm_cannot_serve_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        refuse_unservable(tiny(**changes))
