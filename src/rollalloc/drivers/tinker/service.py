"""The only module that calls the Tinker SDK. It samples, trains and saves weights, with plain arguments and results."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from dataclasses import dataclass
from math import inf, isfinite
from numbers import Real
from pathlib import Path
from secrets import token_hex
from threading import Lock, Thread
from typing import Any, Literal, NoReturn, TypeVar, get_args

import numpy as np

from rollalloc.core.recipe import at_least
from rollalloc.drivers.tinker.costs import Usage
from rollalloc.files.text import error_text

log = logging.getLogger(__name__)

LossName = Literal["importance_sampling", "ppo", "cispo"]  # losses of the service that use per-token advantages
MODEL_FILE = "tinker.json"
_FATAL = ("AuthenticationError", "BillingError", "PermissionDeniedError")  # errors after which no retry can succeed
_DAY_S = 86_400
REASON_LENGTH = 300  # maximum number of characters of an error in the reason for a missing score
_T = TypeVar("_T")


class ServiceFailed(RuntimeError):
    """The service refused a request or failed repeatedly. A run with a checkpoint can be resumed."""


@dataclass(frozen=True, kw_only=True)
class Remote:
    """Settings for training at a service.

    Attributes:
        rank: rank of the LoRA adapter, at least 1.
        loss: the service's loss, one of "importance_sampling", "ppo" and "cispo". "ppo" and "cispo" clip at the
            thresholds of `Config.loss.clip`.
        concurrency: maximum number of rollouts in flight, at least 1. Each rollout is reported to the allocator as soon as
            it ends, and keeps the weights that it started with. None: rollouts are sampled in waves, as by a synchronous
            trainer.
        ahead: number of batches that are sampled while another batch is trained, at least 1; needs `concurrency`. See
            `rollalloc.recipes.streamed`. None: the recipe's own number.
        request_seconds: time limit of a request and of an environment step, above 0.
        keep_days: number of days for which the service keeps the weights of a checkpoint, at least 1. None: forever. The
            service may bill storage. The weights at the end of a run are always kept without a time limit.
        give_up_after: number of failed requests in a row after which the run stops, at least 1. Without this limit, an
            outage would look like prompts that cannot be scored.

    Raises:
        ValueError: a value is out of its range.
    """

    rank: int = 32
    loss: LossName = "importance_sampling"
    concurrency: int | None = None
    ahead: int | None = None
    request_seconds: float = 3600.0
    keep_days: int | None = 7
    give_up_after: int = 16

    def __post_init__(self) -> None:
        for name in ("rank", "concurrency", "ahead", "keep_days", "give_up_after"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        if self.ahead is not None and self.concurrency is None:
            raise ValueError(
                f"ahead={self.ahead} needs concurrency to be set: without it, sampling waits for each update"
            )
        if self.loss == "stable_reinforce":
            raise ValueError(
                'loss="stable_reinforce" is not supported: it trains only on sequences that the service recorded in this '
                "session and has not yet forgotten, and a resumed run has rows of an earlier one; for rows of older weights "
                "use 'ppo' or 'cispo', which clip the ratio"
            )
        if self.loss not in get_args(LossName):
            raise ValueError(f"loss must be one of {', '.join(get_args(LossName))}, got {self.loss!r}")
        if not 0 < self.request_seconds < inf:
            raise ValueError(f"request_seconds must be above 0 and finite, got {self.request_seconds}")


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """One sample of the service: the generated tokens, without the prompt."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    truncated: bool


class RequestFailed(RuntimeError):
    """A request has no usable answer."""


class Service:
    """A model that is trained by the Tinker API, or by another server with this API.

    Args:
        model: the base model's name at the service.
        remote: settings of the service.
        seed: seed of the adapter's initial weights.
        client: a `tinker.ServiceClient`. None: it is created from the environment (`TINKER_API_KEY`, `TINKER_BASE_URL`).

    Attributes:
        usage: tokens sampled and trained so far.

    Raises:
        ImportError: the Tinker SDK is not installed.
        ServiceFailed: the client cannot be created.
    """

    def __init__(self, model: str, remote: Remote, seed: int, *, client: Any = None) -> None:
        try:
            import tinker
        except ImportError as error:
            raise ImportError(
                "rollalloc.drivers.tinker needs the Tinker SDK; pip install 'rollalloc[tinker]'"
            ) from error
        self._sdk: Any = tinker
        self.model, self.remote, self.usage = model, remote, Usage()
        self._usage_lock = Lock()  # needed because samples are counted in the thread of the event loop
        self._has_warned = False
        self.client = client if client is not None else self._guarded("creating a client", self._sdk.ServiceClient)
        self._seed = seed
        self._training_client: Any = None  # created at the first use, because a resumed run creates another one
        self._sampling_client: Any = None  # None after a step, until the service has published the new weights

    @property
    def _training(self) -> Any:
        if self._training_client is None:
            self._training_client = self._wait(
                "creating the model",
                lambda: self.client.create_lora_training_client(
                    base_model=self.model, rank=self.remote.rank, seed=self._seed
                ),
            )
        return self._training_client

    def tokenizer(self) -> Any:
        """The model's tokenizer. The SDK downloads it."""
        return self._of_model("fetching the tokenizer", lambda model: model.get_tokenizer())

    # -------------------------------------------------------------------------------------------------------- sampling

    def sampler(self) -> Any:
        """A client that samples from the current weights. After a later update it still samples from these weights."""
        if self._sampling_client is None:
            self._sampling_client = self._of_model(
                "publishing the weights", lambda model: model.save_weights_and_get_sampling_client()
            )
        return self._sampling_client

    async def sample(
        self, sampler: Any, prompt: Sequence[int], samples: int, *, max_tokens: int, stop: Any = None
    ) -> list[SampledSequence | str]:
        """Sample completions of a prompt. The temperature is 1, because the service's losses assume this temperature.

        Args:
            sampler: the result of `sampler()`.
            prompt: token ids, at least one.
            samples: number of samples.
            max_tokens: maximum length of each sample.
            stop: token ids or texts that end a sample; None: the model's end of sequence.

        Returns:
            The samples. The list is shorter than `samples` if the service returned fewer. Surplus samples are billed, but
            left out. An unusable sample is replaced by the reason, a string.

        Raises:
            RequestFailed: the request failed, timed out, or returned no sequences.
            ServiceFailed: the service refuses all requests of this account.
        """
        types = self._sdk
        try:
            answer = await self.answered(
                sampler.sample(
                    prompt=types.ModelInput.from_ints(list(prompt)),
                    num_samples=samples,
                    sampling_params=types.SamplingParams(max_tokens=max_tokens, temperature=1.0, stop=stop),
                )
            )
            sequences = list(answer.sequences)
            hits = min(len(prompt), max(0, int(getattr(answer, "prompt_cache_hit_tokens", 0) or 0)))
        except Exception as error:
            if type(error).__name__ in _FATAL:
                self._refuse("sampling", error)
            raise RequestFailed(f"sampling failed, {error_text(error, REASON_LENGTH)}") from error
        tokens_of_each = [_tokens_of(sequence) for sequence in sequences]
        self._count(
            Usage(
                prefill=len(prompt) - hits,
                cached=hits + (samples - 1) * len(prompt),
                sampled=sum(map(len, tokens_of_each)),
            )
        )
        if len(sequences) > samples and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the service returned %d samples where %d were requested; the surplus is billed but not used",
                len(sequences),
                samples,
            )
        return [
            _usable(sequence, tokens, max_tokens)
            for sequence, tokens in zip(sequences[:samples], tokens_of_each, strict=False)
        ]

    def _count(self, usage: Usage) -> None:
        with self._usage_lock:
            self.usage += usage

    async def answered(self, answer: Any) -> Any:
        """Await a coroutine or an SDK future, for at most `remote.request_seconds`.

        Older SDKs return a `concurrent.futures.Future`, newer SDKs an object with a method `future()`.
        """
        if not asyncio.iscoroutine(answer):
            future = answer if isinstance(answer, Future) else answer.future()
            answer = asyncio.wrap_future(future)
        return await asyncio.wait_for(answer, self.remote.request_seconds)

    # -------------------------------------------------------------------------------------------------------- training

    def step(
        self,
        data: Sequence[tuple[Sequence[int], Mapping[str, Any]]],
        adam: Mapping[str, float],
        clip: Mapping[str, float] | None,
    ) -> tuple[list[Any], dict[str, float]]:
        """Take one optimizer step.

        Args:
            data: for each sequence, its input token ids, and a dictionary with `target_tokens`, `logprobs` and
                `advantages`. The ids and the three lists have the same length.
            adam: parameters of the optimizer.
            clip: clipping thresholds of the ratio. None: no clipping.

        Returns:
            A list with the log-probabilities of each sequence's targets before the step (None if the service returned none),
            and the service's own metrics of the step.

        Raises:
            ServiceFailed: a request failed. It is unknown whether the service took the step.
        """
        types = self._sdk
        datums = [
            types.Datum(model_input=types.ModelInput.from_ints(list(tokens)), loss_fn_inputs=dict(inputs))
            for tokens, inputs in data
        ]

        model = self._training

        def submit() -> tuple[Any, Any]:  # both requests at once, so that the service need not wait between them
            pass_request = model.forward_backward(datums, self.remote.loss, None if clip is None else dict(clip))
            return pass_request, model.optim_step(types.AdamParams(**adam))

        pass_request, step_request = self._guarded("training", submit)
        pass_result = self._wait("the forward and backward pass", lambda: pass_request)
        step_result = self._wait("the optimizer step", lambda: step_request)
        self._count(Usage(trained=sum(len(tokens) for tokens, _ in data)))
        self._sampling_client = None
        return self._guarded("reading the metrics of the step", lambda: _measured(pass_result, step_result))

    # --------------------------------------------------------------------------------------------------------- weights

    def keep(self, name: str) -> str:
        """Save the weights and the optimizer at the service for `remote.keep_days`. Return the path.

        Raises:
            ServiceFailed: the service could not save the weights.
        """
        days = self.remote.keep_days
        return self._save_state(name, None if days is None else days * _DAY_S)

    def restore(self, path: str) -> None:
        """Load the weights and the optimizer from a path that `keep` returned.

        Raises:
            ServiceFailed: the service has deleted the weights, or the request failed.
        """
        self._training_client = self._wait(
            f"loading {path} (the service deletes it after keep_days)",
            lambda: self.client.create_training_client_from_state_with_optimizer(path),
        )
        self._sampling_client = None

    def save(self, folder: Path) -> None:
        """Save the weights at the service forever, for training and for sampling. Write both paths to a file.

        Raises:
            ServiceFailed: the service could not save the weights.
        """
        name = f"final-{token_hex(4)}"
        sampler = self._of_model("saving the weights", lambda model: model.save_weights_for_sampler(name=name))
        path = self._guarded("saving the weights", lambda: _path(sampler))
        paths = {"base_model": self.model, "training": self._save_state(name, None), "sampler": path}
        folder.mkdir(parents=True)
        (folder / MODEL_FILE).write_text(json.dumps(paths, indent=1))

    def _save_state(self, name: str, seconds: int | None) -> str:
        saved = self._of_model("saving the weights", lambda model: model.save_state(name, ttl_seconds=seconds))
        return self._guarded("saving the weights", lambda: _path(saved))

    def _of_model(self, action: str, call: Callable[[Any], Any]) -> Any:
        """The result of a call on the training client. Creating the client has its own time limit."""
        model = self._training
        return self._wait(action, lambda: call(model))

    def _wait(self, action: str, call: Callable[[], Any]) -> Any:
        """The result of an SDK call. Newer SDKs return a future, older SDKs the result itself."""

        def result() -> Any:
            answer = call()
            return answer.result(self.remote.request_seconds) if hasattr(answer, "result") else answer

        return self._guarded(action, result)

    def _guarded(self, action: str, call: Callable[[], Any]) -> Any:
        """The result of a call. It fails after `remote.request_seconds`, even if the SDK blocks for longer."""
        try:
            return in_thread(call).result(self.remote.request_seconds)
        except Exception as error:
            self._refuse(action, error)

    def _refuse(self, action: str, error: Exception) -> NoReturn:
        if isinstance(error, TimeoutError | TooLate):
            limit = f"{self.remote.request_seconds:g} s"
            raise ServiceFailed(f"{action} took more than {limit}; resume the run when the service answers") from error
        raise ServiceFailed(
            f"{action} failed, {error_text(error, REASON_LENGTH)}; fix the cause, then resume the run"
        ) from error


def in_thread(call: Callable[[], _T]) -> Future[_T]:
    """Run a call in its own thread, because it may block. The result is a future."""
    result: Future[_T] = Future()
    result.set_running_or_notify_cancel()

    def work() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    Thread(target=work, daemon=True).start()  # not in a pool, because Python would wait for it at exit
    return result


def _tokens_of(sequence: Any) -> tuple[Any, ...]:
    """The tokens of a sequence; empty if the service sent no list of tokens."""
    try:
        return tuple(sequence.tokens)
    except Exception:  # the service may send anything
        return ()


def _usable(sequence: Any, tokens: tuple[Any, ...], max_tokens: int) -> SampledSequence | str:
    """The sample, or the reason why it cannot be used."""
    if not 0 < len(tokens) <= max_tokens:
        return f"expected 1 to {max_tokens} tokens, got {len(tokens) or 'none'}"
    if not all(type(token) is int and token >= 0 for token in tokens):
        return "expected token ids, got something else"
    try:
        logprobs = tuple(map(float, sequence.logprobs or ()))
    except Exception as error:  # the service may send anything
        return f"expected log-probabilities, {error_text(error, REASON_LENGTH)}"
    if len(logprobs) != len(tokens):
        return f"expected {len(tokens)} log-probabilities, one for each token, got {len(logprobs) or 'none'}"
    if not all(map(isfinite, logprobs)):
        return "a log-probability is not finite"
    return SampledSequence(tokens, logprobs, str(sequence.stop_reason) == "length")


def _measured(pass_result: Any, step_result: Any) -> tuple[list[Any], dict[str, float]]:
    """The log-probabilities of each sequence (None if the service returned none), and the numeric metrics of the step."""
    metrics = {**(pass_result.metrics or {}), **(step_result.metrics or {})}
    logprobs = [_array(output.get("logprobs")) for output in pass_result.loss_fn_outputs]
    return logprobs, {str(name): float(value) for name, value in metrics.items() if isinstance(value, Real)}


def _path(saved: Any) -> str:
    if not (isinstance(saved.path, str) and saved.path):
        raise ValueError(f"expected the path of the saved weights, got {saved.path!r}")
    return saved.path


def _array(data: Any) -> Any:
    return None if data is None else np.asarray(data.tolist() if hasattr(data, "tolist") else data.data, np.float32)
