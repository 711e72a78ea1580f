"""A generator in a process of its own: the model it builds, whose weights it has, and what is done while it is silent."""

import logging
import os
import signal
import threading

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rollalloc.generate.stream.backend import BackendDied, Decoding, RunningRow
from rollalloc.generate.stream.begin import begin
from rollalloc.generate.stream.blueprint import Blueprint
from rollalloc.generate.stream.process import ProcessBackend
from rollalloc.generate.stream.watchdog import Silence
from rollalloc.models.featurizer import features_of
from rollalloc.models.policy import Behaviour
from rollalloc.models.settings import Lora, Sampling, Streaming
from rollalloc.models.weights import weights_of

SIZES = {"vocab_size": 17, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
SIZES |= {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32}
SCALED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 16}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=SCALED)),
    "tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=17, n_embd=16, n_layer=2, n_head=2, n_positions=32)),
    "eager": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="eager")),
    "half": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16),
    "partly_frozen": lambda: partly_frozen(LlamaForCausalLM(LlamaConfig(**SIZES))),
    "untied": lambda: untied(LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))),
    "buffers": lambda: other_buffers(LlamaForCausalLM(LlamaConfig(**SIZES))),
}


def partly_frozen(model):
    model.model.embed_tokens.requires_grad_(False)
    return model


def untied(model):
    """As transformers leaves it where a checkpoint has both, and they differ."""
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    return model


def other_buffers(model):
    """Not saved, and not what the configuration says."""
    model.model.rotary_emb.inv_freq.mul_(0.5)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_built_once_more(name):
    torch.manual_seed(3)
    model = MODELS[name]().eval()
    features_of(model, [(1, 2), (3,)], pad_id=0)  # which leaves hooks
    made = Blueprint.of(model)
    there = made.built(made.first(model), model.device)
    for names in ("named_parameters", "named_buffers"):
        ours, theirs = (dict(getattr(each, names)(remove_duplicate=False)) for each in (model, there))
        assert list(ours) == list(theirs)
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name])
            assert tensor.dtype == theirs[name].dtype
            assert tensor.requires_grad == theirs[name].requires_grad
            assert tensor.data_ptr() != theirs[name].data_ptr()
    assert list(weights_of(there)) == list(weights_of(model))
    assert there.config._attn_implementation == model.config._attn_implementation
    ids = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(there(ids).logits, model(ids).logits)


def test_a_model_that_its_configuration_does_not_make_is_refused_before_the_run(policy_of, prompts_of):
    class Local(LlamaForCausalLM):
        pass

    policy, tokens = policy_of(), prompts_of(4).tokens

    def begun(overlap):
        streaming = Streaming(overlap=overlap)
        begin(Behaviour(policy, "float32", plain=True), tokens, Sampling(4), streaming, seed=0, limit_s=600.0)

    for spoil, words in (
        (lambda: policy.model.register_buffer("large", torch.zeros(3)), r"large has shape \(3,\), not None"),
        (lambda: setattr(policy.model, "__class__", Local), "Local cannot be built from its"),
    ):
        spoil()
        with pytest.raises(ValueError, match=f"(?s){words}.*--no-overlap.*--engine sync"):
            begun(overlap=True)
    begun(overlap=False)


LENGTH = 12


@pytest.fixture
def process_of(policy, forked_generators):
    """(changes) → a back-end in a process of its own, of up to 64 rows."""
    made = []

    def begun(**changes):
        more = {"version": changes.pop("version", 0), "limit_s": changes.pop("limit_s", 600.0)}
        model = changes.pop("model", policy.model)
        given = {"eos_ids": policy.eos_ids, "pad_id": policy.pad_id, "seed": 3, "longest_prompt": 5} | changes
        decoding = Decoding(sampling=Sampling(LENGTH, max_rows=64), **given)
        made.append(ProcessBackend(model, decoding, **more))
        return made[-1]

    yield begun
    for each in made:
        running = each._spawned.process
        each.close()
        each.close()
        assert running.exitcode is not None
    assert "rollalloc generator's pipe" not in [thread.name for thread in threading.enumerate()]


def rows(count, first=0):
    return [RunningRow(rollout, rollout % 4, (4 + rollout % 4, 5)) for rollout in range(first, first + count)]


def drained(backend, count):
    """So many ends, by rollout, none twice."""
    ended = {}
    for _ in range(1000):
        if len(ended) == count:
            return ended
        for each in backend.poll(1.0):
            assert each.rollout not in ended
            ended[each.rollout] = each
    pytest.fail(f"{len(ended)} of {count} came back")


def stop(backend):
    """Stop the process as it stands, and forget what it said until then."""
    pid = backend._spawned.process.pid
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)  # it has stopped, it was not only asked to
    return pid


def go_on(backend):
    os.kill(backend._spawned.process.pid, signal.SIGCONT)


def other(model, value):
    return {name: torch.full_like(tensor, value) for name, tensor in weights_of(model).items()}


def test_weights_are_not_overwritten_while_they_are_copied(policy, process_of):
    backend = process_of()
    backend.submit(rows(1))
    drained(backend, 1)
    stop(backend)
    backend.load_weights(other(policy.model, 0.25), 1)
    later = threading.Thread(target=backend.load_weights, args=(other(policy.model, 0.5), 2))
    later.start()
    later.join(0.2)
    assert later.is_alive()
    assert all(bool((held == 0.25).all()) for held in backend._weights.views().values())
    go_on(backend)
    later.join(60)
    assert not later.is_alive()
    assert all(bool((held == 0.5).all()) for held in backend._weights.views().values())


def test_a_process_begins_at_the_version_of_its_weights_and_so_does_its_successor(policy, process_of):
    backend = process_of(version=5)
    backend.submit(rows(4))
    before = drained(backend, 4)
    assert {span for each in before.values() for span, _ in each.spans} == {5}
    backend.load_weights(weights_of(policy.model), 6)
    stop(backend)
    backend.submit(rows(4))
    os.kill(backend._spawned.process.pid, signal.SIGKILL)
    after = drained(backend, 4)
    assert {span for each in after.values() for span, _ in each.spans} == {6}
    assert all(after[rollout].tokens == each.tokens for rollout, each in before.items())
    assert backend.figures() == {"restarts": 1}


def test_what_was_cancelled_does_not_begin_again_in_another_process(process_of):
    backend = process_of()
    stop(backend)
    backend.submit(rows(10))
    backend.cancel([2, 9])
    os.kill(backend._spawned.process.pid, signal.SIGKILL)
    ended = drained(backend, 10)
    assert {rollout for rollout, each in ended.items() if each.cancelled} == {2, 9}
    assert backend.capacity() == 64
    backend.submit(rows(1, first=2))  # its id is free again
    assert drained(backend, 1)[2].tokens
    stop(backend)
    backend.submit(rows(1, first=20))
    os.kill(backend._spawned.process.pid, signal.SIGKILL)
    assert drained(backend, 1)[20].tokens


def test_lora_and_features_leave_nothing_that_cannot_be_sent(policy_of, prompts_of, process_of):
    policy = policy_of()
    features_of(policy.model, prompts_of(4).tokens, pad_id=policy.pad_id)
    behaviour = Behaviour(policy.with_lora(Lora(2), seed=1), "float32", plain=True)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    model = behaviour.policy().model
    here, there = process_of(model=model), process_of(model=policy_of().model)
    there.load_weights(weights_of(model), 1)
    tokens = []
    for backend in (here, there):
        backend.submit(rows(20))
        tokens.append({rollout: each.tokens for rollout, each in drained(backend, 20).items()})
    assert tokens[0] == tokens[1]


# ------------------------------------------------------------------------------------------------------------- silence


@pytest.fixture
def silence(caplog):
    """A watch over process 7, with a limit of 40 s, and its clock."""
    now = [0.0]
    caplog.set_level(logging.WARNING, "rollalloc")
    return Silence(lambda: "the process that generates (7)", 40.0, lambda: now[0]), now


def looked(silence, now, signs, seconds):
    for _ in range(seconds):
        now[0] += 1
        silence.check(signs, "3 rollouts")


def test_silence_is_said_now_and_then_and_given_up_at_last(silence, caplog):
    silence, now = silence
    looked(silence, now, 1, 10)
    assert caplog.messages == []
    looked(silence, now, 1, 29)
    said = "the process that generates (7) has given no sign of life for {} s, and 3 rollouts wait for it"
    assert caplog.messages == [f"{said.format(s)}; it will be killed after 40 s" for s in (10, 20)]
    with pytest.raises(BackendDied, match=r"process that generates \(7\).*for 40 s, and 3 rollouts.*--generator-limit"):
        looked(silence, now, 1, 2)


def test_signs_of_life_keep_a_long_rollout_alive(silence, caplog):
    silence, now = silence
    for signs in range(1, 100):
        looked(silence, now, signs, 9)
    assert caplog.messages == []
    looked(silence, now, 99, 10)
    looked(silence, now, 100, 1)
    assert caplog.messages[-1] == "the process that generates (7) responds again"
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("waits_for", ["rollouts", "weights"])
def test_a_process_that_is_stopped_is_given_up_and_killed(policy, process_of, waits_for):
    backend = process_of()
    backend.submit(rows(1))
    drained(backend, 1)
    process = backend._spawned.process
    pid = stop(backend)
    backend._silence.limit_s = 0.1
    backend.submit(rows(3, first=1))
    backend.load_weights(other(policy.model, 0.5), 1)
    wait = {
        "rollouts": lambda: drained(backend, 3),
        "weights": lambda: backend.load_weights(other(policy.model, 0.5), 2),
    }
    with pytest.raises(BackendDied, match=rf"\({pid}\) has given no sign of life for \d+ s, and .*{waits_for}"):
        wait[waits_for]()
    assert process.exitcode == -signal.SIGKILL


def test_a_process_that_reads_nothing_is_given_up_without_a_wait(process_of):
    """What is sent to it is more than a pipe holds."""
    backend = process_of(longest_prompt=20_000)
    backend.submit(rows(1, first=20))
    drained(backend, 1)
    process = backend._spawned.process
    pid = stop(backend)
    backend._silence.limit_s = 0.1
    many = [RunningRow(each, 0, (5,) * 20_000) for each in range(20)]
    begun = threading.Thread(target=backend.submit, args=(many,), daemon=True)
    begun.start()
    begun.join(20)
    assert not begun.is_alive()
    with pytest.raises(BackendDied, match=rf"\({pid}\) has given no sign of life for \d+ s, and 20 rollouts"):
        drained(backend, 20)
    assert process.exitcode == -signal.SIGKILL


def test_a_process_at_work_says_so(process_of, monkeypatch):
    monkeypatch.setattr("rollalloc.generate.stream.process.SPEAKS_S", 0.0)
    backend = process_of(eos_ids=())
    backend.submit(rows(2))
    drained(backend, 2)
    assert backend._heard.signs > LENGTH  # at each step, though nothing ended before the last


def test_a_process_that_stood_still_goes_on_where_it_was(policy, process_of):
    """Stopped with rollouts and new weights on their way to it."""
    ended = []
    for stands in (False, True):
        backend = process_of(seed=7)
        backend.submit(rows(1, first=90))
        drained(backend, 1)
        if stands:
            stop(backend)
        backend.load_weights(other(policy.model, 0.25), 1)
        backend.submit(rows(30))
        if stands:
            assert backend.poll(0.1) == []
            go_on(backend)
        ended.append({rollout: (each.tokens, each.spans) for rollout, each in drained(backend, 30).items()})
        assert backend.figures() == {"restarts": 0}
    assert ended[0] == ended[1]
    assert {span for _, spans in ended[1].values() for span, _ in spans} == {1}
