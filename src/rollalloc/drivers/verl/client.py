# pyright: reportMissingImports=false
# (verl and what it needs live in an environment of their own: constraints/verl-cpu.txt)
"""A client of verl's servers whose requests can be stopped one by one."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

_RETRY = 0.05  # seconds between two tries to stop a request that has not reached the engine yet


class Stopped(Exception):
    """The session was stopped while it generated."""


@dataclass
class Live:
    """A session that runs.

    Attributes:
        tokens: generated in its finished requests.
        first_version: of the weights at its first token; None: none is known.
        last_version: at its last token in a finished request.
        stopped: it shall end.
        server: the server of its running request.
        request: the engine's id of it; None while nothing is generated.
    """

    tokens: int = 0
    first_version: int | None = None
    last_version: int | None = None
    stopped: bool = False
    server: Any = None
    request: str | None = None

    def generated(self, tokens: int, version: int | None) -> None:
        """A request ended; one that was aborted before its first token says nothing of the weights."""
        self.tokens += tokens
        if tokens and version is not None:
            self.first_version = version if self.first_version is None else self.first_version
            self.last_version = version

    async def stop(self) -> None:
        """End the session if it generates, or before it does; one that is being scored goes on."""
        self.stopped = True
        while self.request is not None and not await self.server.__ray_call__.remote(_abort, self.request):
            await asyncio.sleep(_RETRY)


LIVE: ContextVar[Live | None] = ContextVar("the session of this task", default=None)


class Client(LLMServerClient):
    """Knows which session each request belongs to."""

    async def generate(self, request_id: str, **kwargs: Any) -> TokenOutput:
        """As verl's; raises `Stopped` where the session was stopped."""
        live = LIVE.get()
        if live is None:
            return await super().generate(request_id, **kwargs)
        try:
            output = await super().generate(request_id, **kwargs)
        finally:
            live.request = None
        live.generated(len(output.token_ids), output.extra_fields.get("global_steps"))
        if live.stopped:
            raise Stopped
        return output

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        server_id, server = await super()._acquire_server(request_id, **extra)
        if (live := LIVE.get()) is not None:
            live.server = server
        return server_id, server

    def _vllm_request_id(self, request_id: str) -> str:
        engine_id = super()._vllm_request_id(request_id)
        if (live := LIVE.get()) is not None:
            if live.stopped:  # while it waited for a server: nothing is sent
                raise Stopped
            live.request = engine_id
        return engine_id


class ResumingClient(FullyAsyncLLMServerClient, Client):
    """verl's client that goes on with what an update broke off; each of its attempts is a request of the other's.

    One that is broken off and stopped at once is not sent again.
    """


def _abort(server: Any, request: str) -> bool:
    """Runs in the server: abort a request, which then returns what it has; False where the engine does not know it."""
    known = request in server.engine.output_processor.external_req_ids
    if known:
        task = asyncio.get_running_loop().create_task(server.engine.abort(request))
        _ABORTS.add(task)
        task.add_done_callback(_ABORTS.discard)
    return known


_ABORTS: set[asyncio.Task[None]] = set()  # the event loop itself holds only weak references


def requests_left(server: Any) -> int:
    """Runs in the server: requests that its engine has."""
    return len(server.engine.output_processor.request_states)
