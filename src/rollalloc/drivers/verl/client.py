# pyright: reportMissingImports=false
# (verl and its dependencies are installed in a separate environment: constraints/verl-cpu.txt)
"""A client of verl's generation servers that can stop single requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

_RETRY = 0.05  # seconds between attempts to stop a request that has not reached the engine yet


class SessionStopped(BaseException):
    """The session was stopped while it generated.

    This class does not derive from `Exception`, because agent loops and tools catch every `Exception` as a bad answer.
    """


@dataclass
class Live:
    """A running session: the model's turns, and the work of the agent loop between them.

    Attributes:
        limit: maximum number of generated tokens, of the recipe. None: verl's own.
        patience: seconds that the agent loop may spend between two turns, for example in a tool. None: no limit.
        tokens: number of tokens generated in finished requests.
        first_version: version of the weights at the first token; None if unknown.
        last_version: version of the weights at the last token of a finished request; None if unknown.
        stopped: whether the session was told to stop.
        truncated: whether the session ended because a tool's answer did not fit.
        requests: for each running request, its id in the engine and its server.
        clock: ends the session when the agent loop exceeds `patience`. None: no limit.
    """

    patience: float | None = None
    limit: int | None = None
    tokens: int = 0
    first_version: int | None = None
    last_version: int | None = None
    stopped: bool = False
    truncated: bool = False
    requests: dict[str, Any] = field(default_factory=dict)
    clock: asyncio.Timeout | None = None
    _turns: int = 0  # number of turns that are running; an agent loop may run several at once
    _over: bool = False

    def generated(self, tokens: int, version: int | None) -> None:
        """Count the tokens of a finished request. A request without tokens does not set the versions."""
        self.tokens += tokens
        if tokens and version is not None:
            self.first_version = version if self.first_version is None else self.first_version
            self.last_version = version

    def between_turns(self) -> None:
        """Start the clock. No turn of the model is running; the agent loop is doing other work, such as a tool call."""
        self._set(None if self._over else self.patience)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A context for generating, or for waiting for a server. Within the context, the clock does not run."""
        self._turns += 1
        self._set(None)
        try:
            yield
        finally:
            self._turns -= 1
            if not self._turns:
                self.between_turns()

    def over(self) -> None:
        """Record that the trajectory is complete. From now on the session is scored, with another time limit, and cannot be
        stopped.
        """
        self._over = True
        self._set(None)

    def _set(self, seconds: float | None) -> None:
        if self.clock is not None and not self.clock.expired():
            self.clock.reschedule(None if seconds is None else asyncio.get_running_loop().time() + seconds)

    async def stop(self) -> None:
        """End the session, unless it is being scored. The session may be in a tool call, or may not have started."""
        self.stopped = True
        if not (self._turns or self._over):
            self._set(0)
        for request, server in list(self.requests.items()):
            while request in self.requests and not await server.__ray_call__.remote(_abort, request):
                await asyncio.sleep(_RETRY)


LIVE: ContextVar[Live | None] = ContextVar("the session of this task", default=None)


@dataclass
class _Call:
    """One call of `Client.generate`; an agent loop may have several at once."""

    server: Any = None
    request: str = ""


_CALL: ContextVar[_Call] = ContextVar("the call of this task")


class Client(LLMServerClient):
    """verl's client. It also records the session and the server of each request, so that requests can be aborted."""

    async def generate(self, request_id: str, **kwargs: Any) -> TokenOutput:
        """Generate as verl does, but raise `SessionStopped` if the session was stopped."""
        live = LIVE.get()
        if live is None:
            return await super().generate(request_id, **kwargs)
        _CALL.set(call := _Call())
        with live.turn():
            try:
                output = await super().generate(request_id, **kwargs)
            except Exception:
                if live.stopped:  # the error may come from aborting the request
                    raise SessionStopped from None
                raise
            finally:
                live.requests.pop(call.request, None)
        live.generated(len(output.token_ids), output.extra_fields.get("global_steps"))
        if live.stopped:
            raise SessionStopped
        return output

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        server_id, server = await super()._acquire_server(request_id, **extra)
        if LIVE.get() is not None:
            _CALL.get().server = server
        return server_id, server

    def _vllm_request_id(self, request_id: str) -> str:
        """The engine's id of a request. verl calls this method for every engine, not only for vLLM."""
        engine_id = super()._vllm_request_id(request_id)
        if (live := LIVE.get()) is not None:
            if live.stopped:  # the session was stopped while it waited for a server; send no request
                raise SessionStopped
            call = _CALL.get()
            call.request = engine_id
            live.requests[engine_id] = call.server
        return engine_id


class ResumingClient(FullyAsyncLLMServerClient, Client):
    """verl's client that continues requests after an update has interrupted them.

    Each attempt is a call of `Client.generate`. If a session is stopped during the interruption, there is no new attempt.
    """

    async def generate(self, request_id: str, **kwargs: Any) -> TokenOutput:
        """Generate as verl does. All attempts, and the waits between them, are one turn."""
        live = LIVE.get()
        if live is None:
            return await super().generate(request_id, **kwargs)
        with live.turn():
            return await super().generate(request_id, **kwargs)


def _abort(server: Any, request: str) -> bool:
    """Abort a request, so that it returns the tokens generated so far. Runs in the server.

    Returns:
        False if the engine does not know the request.
    """
    if (sglang := getattr(server, "tokenizer_manager", None)) is not None:
        if known := request in sglang.rid_to_state:
            sglang.abort_request(request)
    elif known := request in server.engine.output_processor.external_req_ids:
        task = asyncio.get_running_loop().create_task(server.engine.abort(request))
        _ABORTS.add(task)
        task.add_done_callback(_ABORTS.discard)
    return known


_ABORTS: set[asyncio.Task[None]] = set()  # keeps the tasks alive, because the event loop has only weak references


def requests_left(server: Any) -> int:
    """The number of requests in the server's engine. Runs in the server."""
    if (sglang := getattr(server, "tokenizer_manager", None)) is not None:
        return len(sglang.rid_to_state)
    return len(server.engine.output_processor.request_states)
