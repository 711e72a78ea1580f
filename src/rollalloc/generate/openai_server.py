"""Rollouts from a model behind an OpenAI-compatible server: vLLM, SGLang, llama.cpp, Ollama, or a hosted API.

The server applies the chat template and tokenizes; chats are sent as messages. The key is read from `OPENAI_API_KEY` and
never written to a file or a message.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from difflib import get_close_matches
from hashlib import blake2b
from typing import Any, Self
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from rollalloc.data.prompts import Prompt
from rollalloc.files.text import error_text, visible
from rollalloc.generate.endpoint import KEY, Endpoint
from rollalloc.generate.whole_answers import HTTP, TooLarge, WholeAnswers, hidden
from rollalloc.models.settings import Sampling

try:
    import openai  # pyright: ignore[reportMissingImports]
    from anyio.from_thread import start_blocking_portal  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError("a served model needs the openai package; pip install 'rollalloc[served]'") from error

log = logging.getLogger(__name__)

_CONNECT_S = 10.0  # time limit for connecting to a server
_LISTING_S = 20.0  # time limit for listing a server's models
_MALFORMED = 3  # number of attempts if an answer cannot be parsed
_VERSION = re.compile(r"(:latest|[-@]\d{4}-?\d\d-?\d\d)?")  # suffixes that servers append to a model's name
_SHOWN = 300  # maximum number of characters shown of a server's message
# Each request sets these parameters, because servers have other defaults: top_k is 40 in llama.cpp, for example, and 20 in
# Qwen's generation_config.json.
_TOP_P = 1.0  # in training, tokens are sampled from the whole distribution
_NEUTRAL = {"top_p": _TOP_P, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
# Finish reasons of complete answers, in lower case.
_COMPLETE = ("stop", "eos", "eos_token", "end_turn", "stop_sequence")
_CUT_OFF = ("length", "max_tokens")  # finish reasons of answers that the length limit cut off
_REFUSALS = (400, 413, 422)  # status codes for a request whose content the server does not accept
_NO_LIST = (404, 405, 501)  # status codes of a server that does not list its models
# vLLM removes the reasoning from an answer, and puts it into a field with one of these names.
_REASONING = ("reasoning_content", "reasoning")
_TEXT_PARTS, _REASONING_PARTS = ("text", "output_text"), ("thinking", "reasoning")  # types of the parts of an answer
_ERROR_SENT = "an error came in place of an answer"  # the status code was 200
_MOST_TOKENS = 10**9  # a larger count can only be an error
_NO_PROTOCOL = (
    "does not speak the OpenAI protocol: its answers are not the expected JSON; give the base address of an "
    "OpenAI-compatible API, which usually ends in /v1"
)
_BROKEN_OFF = (HTTP.RemoteProtocolError, HTTP.ReadError, HTTP.DecodingError)
_UNREADABLE = (
    AttributeError,
    TypeError,
    ValueError,
    LookupError,
    RecursionError,
)  # incomplete, unexpected or deep JSON


class ServerFailed(RuntimeError):
    """The server cannot be reached, refuses a request, or uses another protocol. Earlier answers are kept."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer to one request.

    Attributes:
        text: text of the completion.
        tokens: number of tokens of the completion, as the server counts them; None if the server does not report it.
        prompt_tokens: number of tokens of the prompt, as the server counts them; None if the server does not report it.
        truncated: whether the length limit cut the completion off.
        failure: why the answer cannot be used as a rollout; empty if it can be used. For example, the server refused the
            prompt, or stopped the answer for another reason than its length.
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
        sampling: the maximum number of tokens and the temperature. top_p, top_k, min_p and the repetition penalty are
            switched off if the server knows these parameters.
        template_args: arguments of the server's chat template.
        skip_refused: whether a prompt that the server refuses gives an answer with a `failure`. If False, such a prompt
            raises a `ServerFailed`.
    """

    model: str
    sampling: Sampling
    template_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    skip_refused: bool = False

    def digest(self, server: str, prompt: Prompt) -> str:
        """A digest of the server's address, the prompt, and all settings on which the answers depend."""
        sampling = self.sampling
        asked = [server, self.model, sampling.max_new_tokens, sampling.temperature, _TOP_P, dict(self.template_args)]
        return blake2b(json.dumps([*asked, prompt], sort_keys=True).encode(), digest_size=12).hexdigest()


class ServedModel:
    """A model behind a server. Use it in a `with` block, which starts and ends a thread for requests.

    If the block ends with an error, no further request is sent, but open requests are completed because they cost money
    anyway. After Ctrl-C, open requests are cancelled.

    Args:
        endpoint: the server, and limits for its use.
        ask: the model and the sampling parameters.

    Attributes:
        refused: parameters that the server does not know. The server uses its own values instead.

    Raises:
        ValueError: the key contains characters that cannot be sent, or the proxy in the environment cannot be used.
    """

    def __init__(self, endpoint: Endpoint, ask: Ask) -> None:
        self.endpoint, self.ask = endpoint, ask
        self.refused: list[str] = []
        self._key = os.environ.get(KEY, "")
        if not (self._key.isascii() and self._key.isprintable() and " " not in self._key):
            raise ValueError(f"{KEY} contains a space, a line break or a letter outside ASCII; export the key alone")
        self._client = openai.AsyncOpenAI(
            base_url=endpoint.url,
            api_key=self._key or "none",
            max_retries=endpoint.retries,
            timeout=openai.Timeout(endpoint.limit_s, connect=_CONNECT_S),
            http_client=WholeAnswers(),
        )
        self._length = "max_tokens"
        self._listed = False  # whether the server lists the model
        self._warned: set[str] = set()
        self._stack = ExitStack()
        self._free = asyncio.Semaphore(endpoint.concurrency)
        self._stopping = False
        self._futures: list[Future[Answer]] = []

    def __enter__(self) -> Self:
        self._thread = self._stack.enter_context(start_blocking_portal())
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        self._stopping = True
        if kind is None or not issubclass(kind, KeyboardInterrupt):
            wait(self._futures)
        self._thread.call(self._client.close)
        self._stack.__exit__(kind, *rest)

    def check_server(self) -> None:
        """Check that the server responds, uses the protocol, accepts the key and serves the model. Nothing is generated.

        Raises:
            ServerFailed: a check failed. The message names the check and says what to do.
        """
        try:
            page = self._thread.call(self._client.with_options(timeout=_LISTING_S, max_retries=1).models.list)
            served = [str(model.id) for model in page.data]
        except openai.OpenAIError as error:
            if getattr(error, "status_code", None) in _NO_LIST:
                return
            raise ServerFailed(self._why(error)) from None
        except _UNREADABLE:
            raise ServerFailed(f"{self.endpoint.url}/models {_NO_PROTOCOL}") from None
        self._listed = self.ask.model in served
        if served and not self._listed:
            near = get_close_matches(self.ask.model, served, 1, 0.3) or served[:1]
            some = self._hidden(", ".join(served[:8])) + (" ..." if len(served) > 8 else "")
            raise ServerFailed(
                f"{self.endpoint.url} serves {some}, not {self.ask.model!r}; give --served-model {self._hidden(near[0])}"
            )

    def answers(self, prompts: Sequence[Prompt], keep: Callable[[int, Answer], None]) -> Sequence[Future[Answer]]:
        """Request a completion of each prompt, in order. At most `Endpoint.concurrency` requests are open at a time.

        Args:
            prompts: one prompt for each request.
            keep: called with the number of a request and its answer when the answer arrives, in the thread for requests.

        Returns:
            One future per prompt. If a request or `keep` fails, its future raises that error. Later requests are then not
            sent, and their futures raise `ServerFailed`.
        """

        async def answer(number: int) -> Answer:
            async with self._free:
                if self._stopping:
                    raise ServerFailed("a request was not sent, because sampling stops")
                try:
                    answer = await self._answer(prompts[number])
                    keep(number, answer)
                except Exception:
                    self._stopping = True
                    raise
                return answer

        for number in range(len(prompts)):
            self._futures.append(self._thread.start_task_soon(answer, number))
            wait(self._futures[:1])  # wait only for the first answer, to learn which parameters the server knows
        return self._futures

    async def _answer(self, prompt: Prompt) -> Answer:
        problem = ""
        for _ in range(_MALFORMED):
            try:
                return self._read(await self._request(prompt), chat=not isinstance(prompt, str))
            except openai.OpenAIError as error:
                if getattr(error, "status_code", None) not in _REFUSALS:
                    raise ServerFailed(self._why(error)) from None
                refusal = f"the server refuses a prompt: {self._message(error)}"
                if not self.ask.skip_refused:
                    raise ServerFailed(refusal) from None
                return Answer("", 0, 0, False, failure=refusal)
            except _UNREADABLE as error:
                problem = error_text(error).removeprefix("ValueError: ")  # `_hidden` will shorten it
        what = "does not answer" if _ERROR_SENT in problem else _NO_PROTOCOL
        raise ServerFailed(f"{self.endpoint.url} {what} ({self._hidden(problem)}, {_MALFORMED} times)")

    async def _request(self, prompt: Prompt) -> Any:
        """Send a request. If the server does not know an optional parameter, send it again without the parameter.
        Later requests leave the parameter out too.
        """
        while True:
            length, extra = self._length, {name: _NEUTRAL[name] for name in _NEUTRAL if name not in self.refused}
            try:
                return await self._send(prompt, length, dict(extra))
            except openai.APIStatusError as error:
                message = self._message(error)
                unknown = [name for name in extra if name in message]
                if error.status_code not in _REFUSALS:
                    raise
                if unknown:  # may be in `refused` already, because of another request
                    self.refused += [name for name in unknown if name not in self.refused]
                elif length == "max_tokens" and "max_completion_tokens" in message:
                    self._length = "max_completion_tokens"
                else:
                    raise

    async def _send(self, prompt: Prompt, length: str, extra: dict[str, Any]) -> Any:
        sampling = self.ask.sampling
        common: dict[str, Any] = {
            "model": self.ask.model,
            length: sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "stream": False,  # some proxies stream by default
        }
        if isinstance(prompt, str):
            return await self._client.completions.create(**common, prompt=prompt, extra_body=extra)
        if self.ask.template_args:
            extra["chat_template_kwargs"] = dict(self.ask.template_args)
        if prompt[-1]["role"] == "assistant":  # the model continues the message
            extra |= {"continue_final_message": True, "add_generation_prompt": False}
        common["messages"] = list(prompt)
        return await self._client.chat.completions.create(**common, extra_body=extra)

    def _read(self, reply: Any, *, chat: bool) -> Answer:
        """Convert a reply of the expected shape into an `Answer`."""
        if isinstance(reply, str):
            raise ValueError(f"expected JSON, got {self._hidden(reply)[:60]!r}")
        if (problem := getattr(reply, "error", None)) is not None:
            raise ValueError(f"{_ERROR_SENT}: {problem}")
        choice, usage = reply.choices[0], getattr(reply, "usage", None)
        text, has_reasoning = _text_of(choice.message.content if chat else choice.text)
        if has_reasoning or (chat and any(getattr(choice.message, name, None) for name in _REASONING)):
            self._warn("takes the reasoning out of answers", "training scores the whole text; use no reasoning parser")
        asked = self.ask.model
        served = str(getattr(reply, "model", None) or asked)
        if not _same_model(asked, served):
            other = f"was asked for {asked!r} and answered with {self._hidden(served)!r}"
            if not self._listed:
                how = f"give --served-model {self._hidden(served)} if that is the model to profile"
                raise ServerFailed(f"{self.endpoint.url} {other}; {how}")
            self._warn(other, "it lists the requested model; check that its answers come from the model to profile")
        ending, failure = str(choice.finish_reason or "").lower(), ""
        if not ending:
            failure = "the server does not say why the answer ended (finish_reason is null)"
        elif ending not in _COMPLETE + _CUT_OFF:
            failure = f"the server cut the answer off: {self._hidden(str(choice.finish_reason))[:60]}"
        tokens, prompt_tokens = (_count(getattr(usage, f"{part}_tokens", None)) for part in ("completion", "prompt"))
        # A blank text may be an answer, with about one token per character. With more, the server lost the text.
        if ending in _COMPLETE and not text.strip() and (tokens or 0) > len(text) + 1:
            failure = "the server counted tokens of the answer, but sent no text"
        return Answer(text, tokens, prompt_tokens, truncated=ending in _CUT_OFF, failure=failure)

    def _warn(self, what: str, why: str) -> None:
        """Log a warning, but only once for each `why`."""
        if why not in self._warned:
            self._warned.add(why)
            log.warning("%s %s, but %s", self.endpoint.url, what, why)

    def _by_proxy(self) -> str:
        """For error messages: a hint that requests go through the environment's proxy; empty if they do not."""
        parts, proxies = urlsplit(self.endpoint.url), getproxies()
        if proxy_bypass(parts.netloc) or not (parts.scheme in proxies or "all" in proxies):
            return ""
        return f"; the request went through the environment's proxy, export NO_PROXY={parts.hostname} to avoid it"

    def _why(self, error: openai.OpenAIError) -> str:
        """Explain an error of the client, and say what to do."""
        url, tries, message = self.endpoint.url, self.endpoint.retries + 1, self._message(error)
        match error:
            case openai.APITimeoutError():
                limit = f"{self.endpoint.limit_s:g} s, {tries} times"
                return f"{url} did not answer a request within {limit}; give more time with --request-limit"
            case openai.APIConnectionError():
                cause = self._hidden(str(error.__cause__ or error))
                if isinstance(error.__cause__, TooLarge):
                    return f"{url} sent an answer of {cause}; lower --max-new-tokens, or see the server's log"
                if "CERTIFICATE_VERIFY_FAILED" in cause:
                    return f"{url} has a certificate that is not trusted ({cause}); export SSL_CERT_FILE=its_certificate.pem"
                if isinstance(error.__cause__, _BROKEN_OFF) and "without sending a response" not in cause:
                    return (
                        f"{url} sent an answer that is incomplete or cannot be decoded ({cause}); see the server's log"
                    )
                return f"no server answers at {url} ({cause}); start it, or correct --endpoint{self._by_proxy()}"
            case openai.AuthenticationError() | openai.PermissionDeniedError():
                is_set = "is set but not accepted" if self._key else "is not set"
                return f"{url} asks for a key: {KEY} {is_set} ({message}); export it before the command"
            case openai.RateLimitError():
                return f"{url} refused a request {tries} times: too many requests ({message}); lower --concurrency, or wait"
            case openai.NotFoundError():
                return (
                    f"{url} knows neither this request nor the model {self.ask.model!r} ({message}); --endpoint usually "
                    "ends in /v1, and prompts that are text need /completions"
                )
            case openai.APIStatusError(status_code=code) if 300 <= code < 400:
                elsewhere = self._hidden(error.response.headers.get("location", "another address"))
                return f"{url} redirects to {elsewhere}; if that is your server, give its address as --endpoint"
            case openai.APIStatusError(status_code=code):
                times = f"failed {tries} times" if code >= 500 or code in (408, 409) else "refuses requests"
                return f"{url} {times} ({message}); see the server's log{self._by_proxy()}"
            case _:
                return f"{url} {_NO_PROTOCOL} ({message})"

    def _message(self, error: openai.OpenAIError) -> str:
        """The server's own message in an error."""
        body = getattr(error, "body", None)
        words = body.get("message", body) if isinstance(body, Mapping) else body
        code = getattr(error, "status_code", None)
        text = str(words or getattr(error, "message", error))
        return self._hidden(text if code is None or str(code) in text else f"{code}: {text}")

    def _hidden(self, text: str) -> str:
        """Make a server's text short and safe to print. Before that, remove the key, which some servers repeat, and other
        secrets: cut off first, a part of them could stay.
        """
        return visible(hidden(text, self._key)[:_SHOWN])[:_SHOWN].strip()


def _same_model(asked: str, served: str) -> bool:
    """Whether both names are of the same model. The served name may lack the organisation or have a version."""
    return asked.endswith(f"/{served}") or (served.startswith(asked) and bool(_VERSION.fullmatch(served, len(asked))))


def _text_of(content: Any) -> tuple[str, bool]:
    """The text of an answer, and whether it had reasoning that is not part of the text.

    Args:
        content: text, None, or a list of parts of types "text" and "thinking".
    """
    if not isinstance(content, list):
        if not isinstance(content or "", str):
            raise TypeError(f"expected text, got {type(content).__name__}")
        return content or "", False
    for part in content:
        if part["type"] not in (*_TEXT_PARTS, *_REASONING_PARTS):
            raise TypeError(f"expected parts of text, got a part of type {part['type']!r}")
    texts = [part["text"] for part in content if part["type"] in _TEXT_PARTS]
    return "".join(texts), len(texts) < len(content)


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= _MOST_TOKENS else None
