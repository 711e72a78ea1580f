"""The only place that speaks to the Tinker SDK: sampling, training, weights, in plain values."""

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

log = logging.getLogger(__name__)

LossName = Literal["importance_sampling", "ppo", "cispo"]  # those that take a log-probability and an advantage a token
MODEL_FILE = "tinker.json"
_FATAL = ("AuthenticationError", "BillingError", "PermissionDeniedError")  # no retry mends these
_DAY_S = 86_400
_T = TypeVar("_T")


class ServiceFailed(RuntimeError):
    """The service refused, or failed again and again; a run that has a checkpoint goes on from it."""


@dataclass(frozen=True, kw_only=True)
class Remote:
    """How the service is used.

    Attributes:
        rank: of the LoRA adapter, at least 1.
        loss: the service's loss: "importance_sampling", or "ppo" or "cispo", which clip as the settings say.
        concurrency: rollouts under way at most, each told as it ends while others go on, under whatever weights they
            began with; at least 1. None: a wave at a time, as a synchronous trainer has it.
        ahead: batches that are sampled while one is trained, at least, as `rollalloc.recipes.streamed` has it; only with a
            concurrency. None: as many as the recipe does.
        request_seconds: a request or an environment's step that takes longer has failed; above 0.
        keep_days: how long the service keeps the weights of a checkpoint, at least 1; None: for ever, which it may bill.
            Those at the end of a run are kept for ever.
        give_up_after: requests in a row that failed before a run is given up, at least 1: an outage must not pass for
            prompts that cannot be scored.

    Raises:
        ValueError: a value out of its range.
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
            raise ValueError(f"ahead={self.ahead}: waves are not sampled beside an update; give a concurrency as well")
        if self.loss not in get_args(LossName):
            raise ValueError(f"loss must be one of {', '.join(get_args(LossName))}, got {self.loss!r}")
        if not 0 < self.request_seconds < inf:
            raise ValueError(f"request_seconds must be above 0 and finite, got {self.request_seconds}")


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """A sequence that the service sampled."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    truncated: bool


class RequestFailed(RuntimeError):
    """A request has no answer."""


class Service:
    """A model that is being trained by the Tinker API, or by what serves the same.

    Args:
        model: the base model's name, as the service knows it.
        remote: how the service is used.
        seed: of the adapter's first weights.
        client: a `tinker.ServiceClient`; None: one by the environment (`TINKER_API_KEY`, `TINKER_BASE_URL`).

    Attributes:
        usage: tokens of answers and updates so far.

    Raises:
        ImportError: the SDK is not there.
        ServiceFailed: the service refuses.
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
        self._counting = Lock()  # samples end in a thread of their own
        self._is_warned = False
        self.client = client if client is not None else self._guarded("making a client", self._sdk.ServiceClient)
        self._seed = seed
        self._made: Any = None  # one that is resumed need not be made first
        self._sampling: Any = None

    @property
    def _training(self) -> Any:
        if self._made is None:
            self._made = self._wait(
                "creating the model",
                lambda: self.client.create_lora_training_client(
                    base_model=self.model, rank=self.remote.rank, seed=self._seed
                ),
            )
        return self._made

    def tokenizer(self) -> Any:
        """The model's, which the SDK fetches by its name."""
        return self._of_model("fetching the tokenizer", lambda model: model.get_tokenizer())

    # -------------------------------------------------------------------------------------------------------- sampling

    def sampler(self) -> Any:
        """What samples from the weights as they are now, and will go on to."""
        if self._sampling is None:
            self._sampling = self._of_model(
                "publishing the weights", lambda model: model.save_weights_and_get_sampling_client()
            )
        return self._sampling

    async def sample(
        self, sampler: Any, prompt: Sequence[int], samples: int, *, max_tokens: int, stop: Any = None
    ) -> list[SampledSequence | str]:
        """Sample from a prompt, at temperature 1, which is the one that is trained at.

        Args:
            sampler: of `sampler()`.
            prompt: token ids, at least one.
            samples: how many.
            max_tokens: of each.
            stop: token ids or texts that end a sample; None: the model's end of sequence.

        Returns:
            As many as came, of at most `samples`; one that cannot be used is a reason in words. More than were asked for are
            paid, and not used.

        Raises:
            RequestFailed: there is no answer, or one that is no answer.
            ServiceFailed: the service refuses to answer at all.
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
            made = list(answer.sequences)
            hits = min(len(prompt), max(0, int(getattr(answer, "prompt_cache_hit_tokens", 0) or 0)))
        except Exception as error:
            if type(error).__name__ in _FATAL:
                self._refuse("sampling", error)
            raise RequestFailed(f"sampling failed, {_named(error)}") from error
        read = [_tokens_of(each) for each in made]
        self._count(
            Usage(
                prefill=len(prompt) - hits,
                cached=hits + (samples - 1) * len(prompt),
                sampled=sum(map(len, read)),
            )
        )
        if len(made) > samples and not self._is_warned:
            self._is_warned = True
            log.warning("the service gives more samples than asked for, %d for %d: paid, not used", len(made), samples)
        return [_usable(*each, max_tokens) for each in zip(made[:samples], read, strict=False)]

    def _count(self, usage: Usage) -> None:
        with self._counting:
            self.usage += usage

    async def answered(self, answer: Any) -> Any:
        """The result of an SDK's future, old or new, or of a coroutine, within the time that a request may take."""
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
        """One optimizer step.

        Args:
            data: of each sequence the input's token ids, and `target_tokens`, `logprobs` and `advantages` of its length.
            adam: parameters of the optimizer.
            clip: thresholds of the ratio; None: the loss has none.

        Returns:
            Of each sequence the log-probabilities of its targets before the step, or None; what the service measured.

        Raises:
            ServiceFailed: it failed; whether the step was taken is not known.
        """
        types = self._sdk
        datums = [
            types.Datum(model_input=types.ModelInput.from_ints(list(tokens)), loss_fn_inputs=dict(inputs))
            for tokens, inputs in data
        ]

        model = self._training

        def submit() -> tuple[Any, Any]:  # both at once: the service need not wait for us in between
            passed = model.forward_backward(datums, self.remote.loss, None if clip is None else dict(clip))
            return passed, model.optim_step(types.AdamParams(**adam))

        passed, stepped = self._guarded("training", submit)
        out = self._wait("the forward and backward pass", lambda: passed)
        done = self._wait("the optimizer step", lambda: stepped)
        self._count(Usage(trained=sum(len(tokens) for tokens, _ in data)))
        self._sampling = None
        return self._guarded("reading what the step measured", lambda: _measured(out, done))

    # --------------------------------------------------------------------------------------------------------- weights

    def keep(self, name: str) -> str:
        """Have the service keep weights and optimizer; returns where.

        Raises:
            ServiceFailed: it failed.
        """
        days = self.remote.keep_days
        return self._kept(name, None if days is None else days * _DAY_S)

    def restore(self, path: str) -> None:
        """Go on from weights and optimizer that were kept.

        Raises:
            ServiceFailed: the service has them no more, or failed.
        """
        self._made = self._wait(
            f"loading {path}, which the service keeps for keep_days only,",
            lambda: self.client.create_training_client_from_state_with_optimizer(path),
        )
        self._sampling = None

    def save(self, folder: Path) -> None:
        """Have the service keep the weights for ever, for training and for sampling, and write down where.

        Raises:
            ServiceFailed: it failed.
        """
        name = f"final-{token_hex(4)}"
        sampler = self._of_model("keeping the weights", lambda model: model.save_weights_for_sampler(name=name))
        path = self._guarded("keeping the weights", lambda: _path(sampler))
        where = {"base_model": self.model, "training": self._kept(name, None), "sampler": path}
        folder.mkdir(parents=True)
        (folder / MODEL_FILE).write_text(json.dumps(where, indent=1))

    def _kept(self, name: str, seconds: int | None) -> str:
        kept = self._of_model("keeping the weights", lambda model: model.save_state(name, ttl_seconds=seconds))
        return self._guarded("keeping the weights", lambda: _path(kept))

    def _of_model(self, what: str, ask: Callable[[Any], Any]) -> Any:
        """The result of a call of the model that is trained, which is made first: that has a time of its own."""
        model = self._training
        return self._wait(what, lambda: ask(model))

    def _wait(self, what: str, ask: Any) -> Any:
        """The result of a call of the SDK, whose newer versions answer with a future where older ones answer at once."""

        def result() -> Any:
            answer = ask()
            return answer.result(self.remote.request_seconds) if hasattr(answer, "result") else answer

        return self._guarded(what, result)

    def _guarded(self, what: str, call: Callable[[], Any]) -> Any:
        """What a call returns; it has as long as a request, whatever it waits for."""
        try:
            return begun(call).result(self.remote.request_seconds)
        except Exception as error:
            self._refuse(what, error)

    def _refuse(self, what: str, error: Exception) -> NoReturn:
        if isinstance(error, TimeoutError | TooLate):
            raise ServiceFailed(f"{what} took more than {self.remote.request_seconds:g} s; resume later") from error
        raise ServiceFailed(f"{what} failed, {_named(error)}; once that is mended, resume the run") from error


def begun(call: Callable[[], _T]) -> Future[_T]:
    """What a call returns, which may block: it is made meanwhile, and who does not wait leaves it to itself."""
    result: Future[_T] = Future()
    result.set_running_or_notify_cancel()

    def work() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    Thread(target=work, daemon=True).start()  # no pool's: those are waited for when the process ends
    return result


def _tokens_of(made: Any) -> tuple[Any, ...]:
    """What a sequence has for tokens; none where it is no sequence."""
    try:
        return tuple(made.tokens)
    except Exception:  # whatever the service sent
        return ()


def _usable(made: Any, tokens: tuple[Any, ...], most: int) -> SampledSequence | str:
    """A sequence as it came, or why it cannot be used."""
    if not 0 < len(tokens) <= most:
        return f"expected 1 to {most} tokens, got {len(tokens) or 'none'}"
    if not all(type(token) is int and token >= 0 for token in tokens):
        return "expected token ids, got something else"
    try:
        logprobs = tuple(map(float, made.logprobs or ()))
    except Exception as error:  # whatever the service sent
        return f"expected log-probabilities, {_named(error)}"
    if len(logprobs) != len(tokens):
        return f"expected a log-probability of each of {len(tokens)} tokens, got {len(logprobs) or 'none'}"
    if not all(map(isfinite, logprobs)):
        return "a log-probability is not finite"
    return SampledSequence(tokens, logprobs, str(made.stop_reason) == "length")


def _measured(out: Any, done: Any) -> tuple[list[Any], dict[str, float]]:
    """Of each sequence the log-probabilities, or None, and all figures of a step that are numbers."""
    figures = {**(out.metrics or {}), **(done.metrics or {})}
    logprobs = [_array(each.get("logprobs")) for each in out.loss_fn_outputs]
    return logprobs, {str(name): float(value) for name, value in figures.items() if isinstance(value, Real)}


def _path(kept: Any) -> str:
    if not (isinstance(kept.path, str) and kept.path):
        raise ValueError(f"expected the path of weights, got {kept.path!r}")
    return kept.path


def _array(data: Any) -> Any:
    return None if data is None else np.asarray(data.tolist() if hasattr(data, "tolist") else data.data, np.float32)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]
