"""Estimates a model's costs on a GPU with a roofline model, from published sizes and data sheets. Nothing is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rollalloc_lab.simulate.cost import Costs, Latency, option, positive

_BYTES = 2  # per number in bf16

# The share of the data sheet's figures that programs reach. None of these was measured on the simulated machine.
BANDWIDTH_SHARE = 0.7  # share of the memory bandwidth while decoding: a guess
DECODING_SHARE = 0.5  # share of the FLOP/s in prefill and decoding: a guess
TRAINING_SHARE = 0.4  # share of the FLOP/s in training; arXiv 2407.21783, table 4, has 38 to 43% on H100s (Llama 3)
_ALL_REDUCE = 10e-6  # seconds of an all-reduce: a guess; a replica of several GPUs needs two of them per layer


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A dense model's published sizes.

    Attributes:
        parameters: total number of parameters, above 0.
        layers, kv_heads, head_dim: sizes of its attention.
        source: where these numbers are published.
    """

    parameters: float
    layers: int
    kv_heads: int
    head_dim: int
    source: str

    @property
    def weight_bytes(self) -> float:
        """Bytes of its weights in bf16."""
        return _BYTES * self.parameters

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in bf16."""
        return _BYTES * 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class GPU:
    """A GPU's data sheet.

    Attributes:
        memory: bytes of memory.
        bandwidth: bytes per second from memory.
        flops: dense bf16 FLOP per second. (The data sheets of the H100 and H200 give the doubled number, for sparsity.)
        source: the data sheet.
    """

    memory: float
    bandwidth: float
    flops: float
    source: str


MODELS: Mapping[str, ModelSize] = {
    f"qwen2.5-{size}": ModelSize(
        parameters=parameters,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,  # hidden_size / num_attention_heads: 896/14, 1536/12, 2048/16, 3584/28, 5120/40, 5120/40
        source=f"model card and config.json of Qwen/Qwen2.5-{size.upper()}; Qwen2.5 Technical Report, arXiv 2412.15115",
    )
    for size, parameters, layers, kv_heads, head_dim in (
        ("0.5b", 0.49e9, 24, 2, 64),
        ("1.5b", 1.54e9, 28, 2, 128),
        ("3b", 3.09e9, 36, 2, 128),
        ("7b", 7.61e9, 28, 4, 128),
        ("14b", 14.7e9, 48, 8, 128),
        ("32b", 32.5e9, 64, 8, 128),
    )
}

GPUS: Mapping[str, GPU] = {
    "a100": GPU(memory=80e9, bandwidth=2.039e12, flops=312e12, source="NVIDIA A100 data sheet, 80GB SXM"),
    "h100": GPU(memory=80e9, bandwidth=3.35e12, flops=989e12, source="NVIDIA H100 data sheet, SXM"),
    "h200": GPU(memory=141e9, bandwidth=4.8e12, flops=989e12, source="NVIDIA H200 data sheet, SXM"),
}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A model, the GPU type that it runs on, and how much of the memory a replica may fill.

    Attributes:
        model: a key of `MODELS`.
        gpu: a key of `GPUS`.
        memory_share: share of the memory for weights, keys and values, in (0, 1]; 0.9 is vLLM's `gpu_memory_utilization`.

    Raises:
        ValueError: a name is unknown, or the share is out of its range.
    """

    model: str = option("qwen2.5-7b", f"Model to simulate: {', '.join(MODELS)}.")
    gpu: str = option("h100", f"GPU type: {', '.join(GPUS)}.")
    memory_share: float = option(0.9, "Share of a GPU's memory for weights, keys and values.")

    def __post_init__(self) -> None:
        for name, known in (("model", MODELS), ("gpu", GPUS)):
            if (given := getattr(self, name)) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {given!r}")
        positive("memory_share", self.memory_share, most=1)

    def latency(self, gpus: int, slots: int) -> Latency:
        """Estimated seconds of a decoding step of c rollouts with K tokens of context, on a replica of several GPUs.

            t(c, K) = (weights / B + c · 2 · parameters / F + K · token / B) / GPUs, plus 20 µs · layers if GPUs > 1

        B is 70% of the bandwidth, and F half of the FLOP/s. The memory time and the compute time are added, so the estimate
        is at most twice a strict roofline, which takes the larger one. Kernel launches and scheduling are ignored.

        Args:
            gpus: number of GPUs that share the model, at least 1.
            slots: concurrency at the last point of the curve.
        """
        model, gpu = MODELS[self.model], GPUS[self.gpu]
        bandwidth, flops = gpus * BANDWIDTH_SHARE * gpu.bandwidth, gpus * DECODING_SHARE * gpu.flops
        fixed = model.weight_bytes / bandwidth + (2 * model.layers * _ALL_REDUCE if gpus > 1 else 0.0)
        ends = tuple(sorted({1, slots}))
        seconds = tuple(fixed + rollouts * 2 * model.parameters / flops for rollouts in ends)
        return Latency(ends, seconds, f"arithmetic for {self.model} on {self.gpu}", model.token_bytes / bandwidth)

    def costs(self, **given: Any) -> Costs:
        """Estimated costs of passes over tokens: 2 FLOP per parameter and token forward, and 4 backward.

        The hardware reaches the share `DECODING_SHARE` (prefill) or `TRAINING_SHARE` of its peak FLOP/s. Products inside
        attention are left out; at 8,192 tokens they would add a few percent.

        Args:
            given: costs by name. They replace the estimates.
        """
        model, gpu = MODELS[self.model], GPUS[self.gpu]
        forward = 2 * model.parameters / gpu.flops
        arithmetic: dict[str, Any] = {
            "prefill": forward / DECODING_SHARE,
            "logprob": forward / TRAINING_SHARE,
            "train": 3 * forward / TRAINING_SHARE,
        }
        return Costs(**{**arithmetic, **given})

    def kv_tokens(self, gpus: int) -> int:
        """Tokens of context that fit beside the weights on a replica of several GPUs; 0 if the weights alone do not fit."""
        model, gpu = MODELS[self.model], GPUS[self.gpu]
        room = gpus * self.memory_share * gpu.memory - model.weight_bytes
        return max(0, int(room // model.token_bytes))

    def describe(self) -> dict[str, Any]:
        """Names and sources of the figures, for the result."""
        return {**asdict(self), "sources": [MODELS[self.model].source, GPUS[self.gpu].source]}
