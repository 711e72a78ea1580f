"""Models, GPUs and what follows from them by arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import FREE, Given

from rollalloc_lab.simulate.cluster import Cluster, Scenario
from rollalloc_lab.simulate.cost import Pace
from rollalloc_lab.simulate.hardware import GPUS, MODELS, Hardware


def step(hardware, rollouts, context, gpus=1):
    """Seconds of a decoding step of so many rollouts that hold so many tokens each."""
    curve = hardware.latency(gpus, rollouts)
    return Pace(curve.table(rollouts), curve.per_held).seconds_N[rollouts] + curve.per_held * rollouts * context


@pytest.mark.parametrize(
    ("model", "token_bytes"),
    [
        ("qwen2.5-1.5b", 28_672),
        ("qwen2.5-3b", 36_864),
        ("qwen2.5-7b", 57_344),
        ("qwen2.5-14b", 196_608),
        ("qwen2.5-32b", 262_144),
    ],
)
def test_bytes_of_a_token_are_two_times_two_times_layers_heads_and_dimensions(model, token_bytes):
    assert MODELS[model].token_bytes == token_bytes


def test_a_step_by_hand():
    """7.61 billion parameters on an H100: 6.49 ms for the weights, 30.8 µs a rollout, 24.5 ns a token of context."""
    hardware = Hardware()
    assert step(hardware, 1, 0) == pytest.approx(6.49e-3 + 30.8e-6, rel=1e-3)
    assert step(hardware, 128, 2000) == pytest.approx(16.7e-3, rel=2e-3)
    assert step(hardware, 128, 8000) == pytest.approx(35.5e-3, rel=2e-3)
    assert step(hardware, 128, 8000, gpus=2) == pytest.approx(35.5e-3 / 2 + 0.56e-3, rel=2e-3)


def test_a_memory_by_hand():
    assert Hardware().kv_tokens(1) == 990_164  # (0.9 · 80 GB - 15.22 GB) / 57,344: 118 rollouts of 8,392
    assert Hardware().kv_tokens(2) == (2 * 72_000_000_000 - 15_220_000_000) // 57_344
    assert Hardware(model="qwen2.5-32b", memory_share=0.5).kv_tokens(1) == 0
    assert Hardware(model="qwen2.5-32b", gpu="h200").kv_tokens(1) == (126_900_000_000 - 65_000_000_000) // 262_144


def test_costs_by_hand():
    costs = Hardware(model="qwen2.5-14b", gpu="a100").costs(train=7.0)
    assert costs.prefill == pytest.approx(2 * 14.7e9 / (0.5 * 312e12))
    assert costs.logprob == pytest.approx(2 * 14.7e9 / (0.4 * 312e12))
    assert (costs.train, costs.weight_sync) == (7.0, 2.0)
    assert Hardware().costs().train == pytest.approx(6 * 7.61e9 / (0.4 * 989e12))


@given(st.sampled_from(sorted(MODELS)), st.sampled_from(sorted(GPUS)), st.integers(1, 512), st.integers(0, 40_000))
def test_more_rollouts_more_context_and_a_larger_model_take_longer_and_a_newer_gpu_less(model, gpu, rollouts, context):
    hardware = Hardware(model=model, gpu=gpu)
    took = step(hardware, rollouts, context)
    assert step(hardware, rollouts + 1, context) > took
    assert step(hardware, rollouts, context + 1) > took
    larger = list(MODELS)[min(len(MODELS) - 1, list(MODELS).index(model) + 1)]
    newer = list(GPUS)[min(len(GPUS) - 1, list(GPUS).index(gpu) + 1)]
    assert step(replace(hardware, model=larger), rollouts, context) >= took
    assert step(replace(hardware, gpu=newer), rollouts, context) <= took
    assert replace(hardware, gpu=newer).kv_tokens(1) >= hardware.kv_tokens(1)


def test_a_rollout_that_no_memory_holds_is_refused_and_one_that_just_fits_is_not():
    cluster = Cluster(gpus=2, slots=4)
    limits = {"cluster": cluster, "workload": Given([90]), "prompt_tokens": 10}
    assert Scenario(**limits, kv_tokens=100).room == 100
    with pytest.raises(
        ValueError, match="--kv-tokens: keys and values of 99 tokens fit, but a rollout may need 100: 10 for the prompt"
    ):
        Scenario(**limits, kv_tokens=99)
    large = Hardware(model="qwen2.5-32b", memory_share=0.8)
    with pytest.raises(ValueError, match=r"qwen2\.5-32b on 1 h100: keys and values of 0 tokens fit"):
        Scenario(**limits, hardware=large)
    shared = replace(cluster, gpus_per_replica=2)
    assert (
        Scenario(**(limits | {"cluster": shared}), hardware=large).room == (128_000_000_000 - 65_000_000_000) // 262_144
    )


def test_what_is_given_is_taken_instead_of_arithmetic():
    plain = Scenario(cluster=Cluster(gpus=1))
    assert (plain.charges, plain.room) == (Hardware().costs(), Hardware().kv_tokens(1))
    own = Scenario(cluster=Cluster(gpus=1), costs=FREE, latency=Hardware().latency(1, 256))
    assert (own.charges, own.room) == (FREE, float("inf"))
