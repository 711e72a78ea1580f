"""A Tinker service in this process, by hand; its policy is a table of logits. Speaks in the SDK's types where there are any.

The gradient is that of the service's documented loss, −Σ exp(logprob − sampled) · advantage; the optimizer is plain descent.
Samples are keyed by the number of requests so far, which a checkpoint keeps: so a resumed run can be held against another.
"""

from __future__ import annotations

from concurrent.futures import Future
from importlib.util import find_spec
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np

EOS, SYMBOLS = 0, 6
IS_INSTALLED = find_spec("tinker") is not None


class AuthenticationError(Exception):
    """As the SDK's."""


def done(value: Any = None, error: BaseException | None = None) -> SimpleNamespace:
    """An answer as newer SDKs give it: with `result` and `future`."""
    future: Future[Any] = Future()
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
    return SimpleNamespace(result=future.result, future=lambda: future)


class Cloud:
    """What outlives a client: weights that were kept, and what was asked of it.

    Attributes:
        faults: request → exception that it ends with, or a future that is given for it.
        steps_fail: optimizer steps that fail, by number from 1.
        mangle: a change to the sequences of an answer; of `answers`, to the answer to a call, by the call's name.
        hung: calls that do not return before it is set, by name.
    """

    def __init__(self) -> None:
        self.kept: dict[str, tuple[np.ndarray, int]] = {}
        self.ttl: dict[str, int | None] = {}
        self.requests = 0
        self.samples = 0
        self.datums: list[list[Any]] = []
        self.faults: dict[int, Any] = {}
        self.steps_fail: set[int] = set()
        self.mangle: Any = None
        self.answers: dict[str, Any] = {}
        self.hung: dict[str, Event] = {}
        self.losses: list[tuple[str, Any]] = []


def mangled(of: Any, name: str) -> Any:
    """A method of the service as it is, or one that hangs, or whose answer is changed."""
    found = object.__getattribute__(of, name)
    if name.startswith("_") or not callable(found):
        return found
    cloud = object.__getattribute__(of, "cloud")

    def called(*given: Any, **named: Any) -> Any:
        if name in cloud.hung:
            cloud.hung[name].wait()
        answer = found(*given, **named)
        return done(cloud.answers[name](answer.result())) if name in cloud.answers else answer

    return called


class Client:
    """Stands for `tinker.ServiceClient`."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud

    def __getattribute__(self, name: str) -> Any:
        return mangled(self, name)

    def create_lora_training_client(self, base_model: str, rank: int = 32, seed: int | None = None) -> Any:
        return done(Training(self.cloud, np.zeros((64, 4, SYMBOLS))))

    def create_training_client_from_state_with_optimizer(self, path: str) -> Any:
        if path not in self.cloud.kept:
            return done(error=LookupError(f"{path} has expired"))
        weights, self.cloud.requests = self.cloud.kept[path]
        return done(Training(self.cloud, weights.copy()))


class Training:
    def __getattribute__(self, name: str) -> Any:
        return mangled(self, name)

    def __init__(self, cloud: Cloud, weights: np.ndarray) -> None:
        self.cloud, self.weights = cloud, weights
        self.gradient = np.zeros_like(weights)
        self.steps = 0

    def save_weights_and_get_sampling_client(self) -> Any:
        return done(Sampling(self.cloud, self.weights.copy()))

    def save_state(self, name: str, ttl_seconds: int | None = None) -> Any:
        path = f"tinker://fake/weights/{name}"
        assert path not in self.cloud.kept
        self.cloud.kept[path], self.cloud.ttl[path] = (self.weights.copy(), self.cloud.requests), ttl_seconds
        return done(SimpleNamespace(path=path))

    def save_weights_for_sampler(self, name: str) -> Any:
        return done(SimpleNamespace(path=f"tinker://fake/sampler_weights/{name}"))

    def forward_backward(self, data: list[Any], loss: str, config: Any) -> Any:
        self.cloud.datums.append(data)
        self.cloud.losses.append((loss, config))
        outputs, total = [], 0.0
        for datum in data:
            tokens = list(datum.model_input.to_ints())
            given = {name: np.asarray(listed(column)) for name, column in datum.loss_fn_inputs.items()}
            assert all(len(column) == len(tokens) for column in given.values())
            logprobs, start = np.zeros(len(tokens)), 0
            for at, advantage in enumerate(given["advantages"]):
                if not advantage:  # read; what is sampled next begins behind it
                    start = at + 1
                    continue
                p_V = softmax(self.weights[tokens[start]][at - start])
                token = int(given["target_tokens"][at])
                logprobs[at] = np.log(p_V[token])
                ratio = np.exp(logprobs[at] - given["logprobs"][at])
                total -= ratio * advantage
                self.gradient[tokens[start]][at - start] -= ratio * advantage * (np.eye(SYMBOLS)[token] - p_V)
            outputs.append({"logprobs": SimpleNamespace(tolist=logprobs.tolist)})
        return done(SimpleNamespace(metrics={"loss:sum": total}, loss_fn_outputs=outputs))

    def optim_step(self, params: Any) -> Any:
        self.steps += 1
        if self.steps in self.cloud.steps_fail:
            return done(error=ConnectionError("the trainer is gone"))
        self.weights = self.weights - params.learning_rate * self.gradient
        norm, self.gradient = float(np.linalg.norm(self.gradient)), np.zeros_like(self.gradient)
        return done(SimpleNamespace(metrics={"skyrl.ai/grad_norm": norm}))


class Sampling:
    def __getattribute__(self, name: str) -> Any:
        return mangled(self, name)

    def __init__(self, cloud: Cloud, weights: np.ndarray) -> None:
        self.cloud, self.weights = cloud, weights

    def sample(self, prompt: Any, num_samples: int, sampling_params: Any) -> Any:
        self.cloud.requests += 1
        self.cloud.samples += num_samples
        fault = self.cloud.faults.get(self.cloud.requests)
        if isinstance(fault, BaseException):
            return done(error=fault)
        if fault is not None:
            return SimpleNamespace(result=fault.result, future=lambda: fault)
        rng = np.random.default_rng(self.cloud.requests)
        last = prompt.to_ints()[-1]
        sequences = [self._sequence(rng, last, min(4, sampling_params.max_tokens)) for _ in range(num_samples)]
        if self.cloud.mangle is not None:
            sequences = self.cloud.mangle(sequences)
        return done(SimpleNamespace(sequences=sequences, prompt_cache_hit_tokens=0))

    def _sequence(self, rng: np.random.Generator, last: int, most: int) -> Any:
        tokens: list[int] = []
        logprobs: list[float] = []
        while len(tokens) < most and (not tokens or tokens[-1] != EOS):
            p_V = softmax(self.weights[last][len(tokens)])
            tokens.append(int(rng.choice(SYMBOLS, p=p_V)))
            logprobs.append(float(np.log(p_V[tokens[-1]])))
        return sequence(tokens, logprobs, "stop" if tokens[-1] == EOS else "length")


def sequence(tokens: list[int], logprobs: list[float], reason: str) -> Any:
    """A sampled sequence, of the SDK's own type where it is installed."""
    if IS_INSTALLED:
        from tinker.types import SampledSequence

        names: dict[str, Any] = {"sequence_id": "0"} if "sequence_id" in SampledSequence.__dataclass_fields__ else {}
        return SampledSequence(  # older SDKs know no id
            **names,
            stop_reason=reason,  # pyright: ignore[reportArgumentType]
            tokens_np=np.array(tokens, np.int32),
            logprobs_np=np.array(logprobs, np.float32),
        )
    return SimpleNamespace(tokens=tokens, logprobs=logprobs, stop_reason=reason)


def softmax(logits_V: np.ndarray) -> np.ndarray:
    p_V = np.exp(logits_V - logits_V.max())
    return p_V / p_V.sum()


def listed(column: Any) -> list[Any]:
    return column.tolist() if hasattr(column, "tolist") else list(column)


class ModelInput:
    def __init__(self, tokens: list[int]) -> None:
        self._tokens = list(tokens)

    @classmethod
    def from_ints(cls, tokens: list[int]) -> ModelInput:
        return cls(tokens)

    def to_ints(self) -> list[int]:
        return self._tokens


def module() -> SimpleNamespace:
    """Stands for the module `tinker` where it is not installed."""
    return SimpleNamespace(
        ModelInput=ModelInput, SamplingParams=SimpleNamespace, Datum=SimpleNamespace, AdamParams=SimpleNamespace
    )
