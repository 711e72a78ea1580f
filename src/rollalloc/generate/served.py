"""Rollouts from a model behind an OpenAI-compatible server: vLLM, SGLang, llama.cpp, Ollama, or a hosted API.

The server applies the chat template and tokenizes; chat prompts are sent as messages. The key is read from
`OPENAI_API_KEY` and never written to a file or a message.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from hashlib import blake2b
from importlib import import_module
from itertools import islice
from threading import Thread
from typing import Any, Self
from urllib.parse import urlsplit

from rollalloc.core.recipe import at_least
from rollalloc.data.prompts import Prompt
from rollalloc.files.text import visible
from rollalloc.generate.sampling import Sampling

log = logging.getLogger(__name__)

KEY = "OPENAI_API_KEY"
_CONNECT_S = 10.0  # time limit for connecting to a server
_LISTING_S = 20.0  # time limit for listing its models
_MALFORMED = 3  # number of attempts if an answer cannot be parsed
_SHOWN = 300  # maximum number of characters shown of a server's message
_MOST_AT_ONCE = 1000  # maximum number of connections that the client opens
# Without these, servers use defaults of their own or of generation_config.json: top_k is 40 in llama.cpp, 20 for Qwen.
_NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
_ANSWERED = ("stop", "length", "eos", "stop_sequence")  # reasons of complete answers and of the length limit
_REFUSALS = (400, 413, 422)  # codes for a request whose content the server does not accept
_NO_LIST = (404, 405, 501)  # codes of a server that does not list its models
# vLLM's older and newer name of reasoning that it takes out of an answer
_REASONING = ("reasoning_content", "reasoning")
_MOST_TOKENS = 10**9  # a larger count can only be an error


class ServerFailed(RuntimeError):
    """The server cannot be reached, refuses a request, or uses another protocol. Earlier answers are kept."""


class _Refused(ServerFailed):
    """The server refuses one request because of its content."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The address of a served model, and limits for its use.

    Attributes:
        url: the API's base address, e.g. http://localhost:8000/v1.
        model: the name under which the server offers the model.
        concurrency: maximum number of open requests, at least 1.
        limit_s: time limit of a request in seconds, above 0.
        retries: number of retries of a request that failed (no connection, time-out, 408, 409, 429, 5xx), with growing
            pauses.

    Raises:
        ValueError: a value is out of its range, or the address is not valid.
    """

    url: str
    model: str
    concurrency: int = 16
    limit_s: float = 300.0
    retries: int = 5

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            whole = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
        except ValueError:
            whole, parts = False, urlsplit("")
        if parts.username is not None or parts.password is not None or parts.query:
            raise ValueError(f"--endpoint: a key must not be part of the address, which is logged; put it into {KEY}")
        if not whole:
            raise ValueError(f"--endpoint: expected an address such as http://localhost:8000/v1, got {self.url!r}")
        if not self.model.strip():
            raise ValueError("--served-model: expected the name under which the model is served, got an empty one")
        at_least("concurrency", self.concurrency, 1)
        at_least("retries", self.retries, 0)
        if self.concurrency > _MOST_AT_ONCE:
            raise ValueError(f"concurrency must be at most {_MOST_AT_ONCE} requests, got {self.concurrency}")
        if not 0 < self.limit_s < 1e6:
            raise ValueError(f"request_limit must be a positive number of seconds, got {self.limit_s}")


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer to one request.

    Attributes:
        text: text of the completion.
        tokens: number of tokens of the completion, as counted by the server; None if the server does not report it.
        prompt_tokens: number of tokens of the prompt, as counted by the server; None as above.
        truncated: whether the length limit cut it off.
        failure: why the answer cannot be used as a rollout: the server cut it off for another reason, or refused the
            prompt. Empty if it can be used.
    """

    text: str
    tokens: int | None
    prompt_tokens: int | None
    truncated: bool
    failure: str = ""


@dataclass(frozen=True)
class Ask:
    """The part of a request that is the same for every prompt.

    Attributes:
        model: name of the model.
        sampling: its maximum tokens, temperature and top_p are sent. top_k, min_p and the repetition penalty are
            switched off, if the server knows these parameters.
        template_args: arguments of the server's chat template.
        skip_refused: True: a prompt that the server refuses gives an answer with a `failure`. False: it raises an
            error.
    """

    model: str
    sampling: Sampling
    template_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    skip_refused: bool = False

    def digest(self, prompt: Prompt) -> str:
        """A digest of everything that determines the distribution of the answers to a prompt."""
        sampling = self.sampling
        asked = [self.model, sampling.max_new_tokens, sampling.temperature, sampling.top_p, dict(self.template_args)]
        return blake2b(json.dumps([*asked, prompt], sort_keys=True).encode(), digest_size=12).hexdigest()


class ServedModel:
    """Asks a server for completions. Use it within one event loop.

    Args:
        endpoint: the server, and limits for its use.
        ask: the model and the sampling parameters.

    Attributes:
        refused: parameters that the server does not know, so that its own defaults apply.

    Raises:
        ImportError: the `openai` package is not installed.
        ValueError: the key contains characters that cannot be sent.
    """

    def __init__(self, endpoint: Endpoint, ask: Ask) -> None:
        self._openai = openai_module()
        self.endpoint, self.ask = endpoint, ask
        self.refused: list[str] = []
        self._key = os.environ.get(KEY, "")
        if not (self._key.isascii() and self._key.isprintable() and " " not in self._key):
            raise ValueError(f"{KEY} contains a space, a line break or a letter outside ASCII; export the key alone")
        self._client = self._openai.AsyncOpenAI(
            base_url=endpoint.url,
            api_key=self._key or "none",
            max_retries=endpoint.retries,
            timeout=self._openai.Timeout(endpoint.limit_s, connect=_CONNECT_S),
            http_client=_http_client(self._openai),
        )
        self._length = "max_tokens"
        self._warned = False

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def check(self) -> None:
        """Check that the server responds, uses the protocol, accepts the key and serves the model. This costs nothing.

        Raises:
            ServerFailed: a check failed. The message says which one, and what to do.
        """
        try:
            page = await self._client.with_options(timeout=_LISTING_S, max_retries=1).models.list()
            served = [str(model.id) for model in page.data]
        except self._openai.OpenAIError as error:
            if getattr(error, "status_code", None) in _NO_LIST:
                return
            raise ServerFailed(self._why(error)) from None
        except (AttributeError, TypeError, ValueError):
            raise ServerFailed(f"{self.endpoint.url}/models {_NO_PROTOCOL}") from None
        if served and self.endpoint.model not in served:
            near = get_close_matches(self.endpoint.model, served, 1, 0.3) or served[:1]
            some = self._hidden(", ".join(served[:8])) + (" ..." if len(served) > 8 else "")
            raise ServerFailed(
                f"{self.endpoint.url} serves {some}, not {self.endpoint.model!r}; give --served-model "
                f"{self._hidden(near[0])}"
            )

    async def answer(self, prompt: Prompt) -> Answer:
        """Request one completion of a prompt.

        Raises:
            ServerFailed: all attempts failed, or the server refused. The message says why.
        """
        problem = ""
        for _ in range(_MALFORMED):
            try:
                reply = await self._request(prompt)
                return self._read(reply, chat=not isinstance(prompt, str))
            except _Refused as error:
                if not self.ask.skip_refused:
                    raise
                return Answer("", 0, 0, False, failure=str(error))
            except self._openai.OpenAIError as error:
                raise ServerFailed(self._why(error)) from None
            except (AttributeError, TypeError, ValueError, IndexError) as error:  # incomplete or unexpected JSON
                problem = f"{type(error).__name__}: {error}"[:_SHOWN]
        raise ServerFailed(f"{self.endpoint.url} {_NO_PROTOCOL} ({self._hidden(problem)}, {_MALFORMED} times)")

    async def _request(self, prompt: Prompt) -> Any:
        """Send a request. Optional parameters that the server does not know are omitted from then on."""
        while True:
            length, extra = self._length, {name: _NEUTRAL[name] for name in _NEUTRAL if name not in self.refused}
            try:
                return await self._send(prompt, length, dict(extra))
            except self._openai.APIStatusError as error:
                message = self._message(error)
                unknown = [name for name in extra if name in message]
                if error.status_code not in _REFUSALS:
                    raise
                if unknown:  # another request may have learned it meanwhile
                    self.refused += [name for name in unknown if name not in self.refused]
                elif length == "max_tokens" and "max_completion_tokens" in message:
                    self._length = "max_completion_tokens"
                else:
                    raise _Refused(f"the server refuses a prompt: {message}") from None

    async def _send(self, prompt: Prompt, length: str, extra: dict[str, Any]) -> Any:
        sampling = self.ask.sampling
        common: dict[str, Any] = {
            "model": self.endpoint.model,
            length: sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stream": False,  # some proxies stream by default
        }
        if isinstance(prompt, str):
            return await self._client.completions.create(prompt=prompt, extra_body=extra, **common)
        if self.ask.template_args:
            extra["chat_template_kwargs"] = dict(self.ask.template_args)
        if prompt[-1]["role"] == "assistant":  # the model continues the message
            extra |= {"continue_final_message": True, "add_generation_prompt": False}
        return await self._client.chat.completions.create(messages=list(prompt), extra_body=extra, **common)

    def _read(self, reply: Any, *, chat: bool) -> Answer:
        """Convert a reply of the expected shape into an `Answer`."""
        if isinstance(reply, str):
            raise ValueError(f"expected JSON, got {reply[:60]!r}")
        if (problem := getattr(reply, "error", None)) is not None:
            raise ValueError(f"the answer is an error: {problem}")
        choice = reply.choices[0]
        text = choice.message.content if chat else choice.text
        if chat and not self._warned and any(getattr(choice.message, name, None) for name in _REASONING):
            self._warned = True
            log.warning(
                "%s takes the reasoning out of answers, but training scores the whole text; serve without a reasoning "
                "parser", self.endpoint.url,
            )  # fmt: skip
        if not isinstance(text or "", str):
            raise TypeError(f"expected a text, got {type(text).__name__}")
        served = getattr(reply, "model", None) or self.endpoint.model
        asked = self.endpoint.model
        if not str(served).startswith(asked) and not asked.endswith(str(served)):
            raise ServerFailed(
                f"{self.endpoint.url} was asked for {asked!r} and answered with {self._hidden(str(served))!r}; give "
                f"--served-model {self._hidden(str(served))} if that is the model to profile"
            )
        ending, usage = choice.finish_reason, getattr(reply, "usage", None)
        failure = "" if ending in _ANSWERED else f"the server cut the answer off: {self._hidden(str(ending))[:60]}"
        if ending is None:
            failure = "the server does not say why the answer ended (finish_reason is null)"
        return Answer(
            text or "",
            _count(getattr(usage, "completion_tokens", None)),
            _count(getattr(usage, "prompt_tokens", None)),
            truncated=ending == "length",
            failure=failure,
        )

    def _why(self, error: Any) -> str:
        """Explain an error of the client, and say what to do."""
        url, openai = self.endpoint.url, self._openai
        tries, code = self.endpoint.retries + 1, getattr(error, "status_code", 0)
        if isinstance(error, openai.APITimeoutError):
            limit = f"{self.endpoint.limit_s:g}"
            return (
                f"{url} did not answer a request within {limit} s, {tries} times; give more time with --request-limit"
            )
        if isinstance(error, openai.APIConnectionError):
            cause = self._hidden(str(error.__cause__ or error))
            return f"no server answers at {url} ({cause}); start it, or correct --endpoint"
        if isinstance(error, (openai.AuthenticationError, openai.PermissionDeniedError)):
            is_set = "is set but not accepted" if self._key else "is not set"
            return f"{url} asks for a key: {KEY} {is_set} ({self._message(error)}); export it before the command"
        if isinstance(error, openai.RateLimitError):
            what = f"{url} refuses for too many requests, {tries} times ({self._message(error)})"
            return f"{what}; lower --concurrency, or go on later"
        if isinstance(error, openai.NotFoundError):
            what = f"{url} knows neither this request nor the model {self.endpoint.model!r} ({self._message(error)})"
            return f"{what}; --endpoint usually ends in /v1, and prompts that are text need /completions"
        if 300 <= code < 400:
            elsewhere = self._hidden(error.response.headers.get("location", "another address"))
            return f"{url} redirects to {elsewhere}; if that is your server, give its address as --endpoint"
        if isinstance(error, openai.APIStatusError):
            times = f"failed {tries} times" if code >= 500 or code in (408, 409) else "refuses requests"
            return f"{url} {times} ({self._message(error)}); see the server's log"
        return f"{url} {_NO_PROTOCOL} ({self._message(error)})"

    def _message(self, error: Any) -> str:
        """The server's own message in an error."""
        body = getattr(error, "body", None)
        words = body.get("message", body) if isinstance(body, Mapping) else body
        code = getattr(error, "status_code", None)
        text = str(words or getattr(error, "message", error))
        return self._hidden(text if code is None or str(code) in text else f"{code}: {text}")

    def _hidden(self, text: str) -> str:
        """Make a server's text short and safe to print, and remove the key, which some servers repeat."""
        return visible(text.replace(self._key, "[key]") if self._key else text)[:_SHOWN].strip()


_NO_PROTOCOL = (
    "does not speak the OpenAI protocol: expected its JSON; give the base address of such a server, which usually ends in "
    "/v1"
)


class Answers:
    """Answers to a list of requests. A thread sends them in order, a limited number at a time.

    As a context manager it ends the thread. After an error no further request is sent, but open requests are completed,
    because they are paid for. After Ctrl-C open requests are cancelled.

    Args:
        endpoint: the server, and limits for its use.
        ask: the model and the sampling parameters.
        prompts: one prompt for each request.
        keep: called in the thread with the number of a request and its answer, as soon as the answer has arrived.
    """

    def __init__(
        self, endpoint: Endpoint, ask: Ask, prompts: Sequence[Prompt], keep: Callable[[int, Answer], None]
    ) -> None:
        self._endpoint, self._ask, self._prompts, self._keep = endpoint, ask, prompts, keep
        self._futures: list[Future[Answer]] = [Future() for _ in prompts]
        self._stopping = False
        self._cancel: Callable[[], object] = lambda: None
        self.refused: list[str] = []
        self._thread = Thread(target=lambda: asyncio.run(self._all()), name="served model", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._stopping = True
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            with suppress(RuntimeError):  # the loop has ended: all answers are here
                self._cancel()
        self._thread.join()

    def __getitem__(self, number: int) -> Answer:
        """Wait for the answer to a request and return it.

        Raises:
            ServerFailed: a request failed before this one was answered. Other requests may have answers.
        """
        return self._futures[number].result()

    async def _all(self) -> None:
        loop, (task,) = asyncio.get_running_loop(), asyncio.all_tasks()
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        failed: list[BaseException] = []
        try:
            async with aclosing(ServedModel(self._endpoint, self._ask)) as served:
                self.refused = served.refused
                waiting = iter(range(len(self._prompts)))
                await self._work(served, islice(waiting, 1), failed)  # shows which parameters the server knows
                each = (self._work(served, waiting, failed) for _ in range(self._endpoint.concurrency))
                await asyncio.gather(*each)
        except BaseException as error:
            failed.append(error)
        ended = failed[0] if failed else ServerFailed("sampling was stopped")
        for future in self._futures:
            if not future.done():
                future.set_exception(ended)

    async def _work(self, served: ServedModel, waiting: Iterator[int], failed: list[BaseException]) -> None:
        """Send one request after another until none is left, a request failed, or the thread must stop."""
        for number in waiting:
            if failed or self._stopping:
                return
            try:
                answer = await served.answer(self._prompts[number])
                self._keep(number, answer)
                self._futures[number].set_result(answer)
            except Exception as error:
                failed.append(error)
                return


def check_server(endpoint: Endpoint, ask: Ask) -> None:
    """Check a server before anything is paid for, as `ServedModel.check` does.

    Raises:
        ServerFailed, ImportError: as for `ServedModel`.
    """

    async def checked() -> None:
        async with aclosing(ServedModel(endpoint, ask)) as served:
            await served.check()

    asyncio.run(checked())


def openai_module() -> Any:
    """Import and return the `openai` package.

    Raises:
        ImportError: it is not installed. The message says how to install it.
    """
    try:
        import openai  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("a served model needs the openai package; pip install 'rollalloc[served]'") from error
    return openai


def _http_client(openai: Any) -> Any:
    """An HTTP client that follows no redirect, which would send prompts to another host, and whose requests end in time.

    That client limits the time between two parts of an answer; here the limit is for the whole answer.
    """
    base = openai.DefaultAsyncHttpxClient
    http = import_module(base.__base__.__module__.partition(".")[0])  # httpx; under openai 3, httpx2

    class BoundedClient(base):
        async def send(self, request: Any, **options: Any) -> Any:
            limit_s = request.extensions["timeout"]["read"]
            try:
                return await asyncio.wait_for(super().send(request, **options), limit_s)
            except TimeoutError as error:
                raise http.ReadTimeout(f"no whole answer within {limit_s:g} s", request=request) from error

    return BoundedClient(follow_redirects=False)


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= _MOST_TOKENS else None
