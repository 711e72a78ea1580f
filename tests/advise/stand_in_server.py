"""A server that answers as OpenAI-compatible ones do, or fails as they do, for the tests of served models."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

# A status, and what is sent as JSON (text as it is); or a function of the handler that sends what it likes.
Reply = tuple[int, Any] | Callable[[BaseHTTPRequestHandler], None]
MODEL = "org/tiny"


def completion(
    text: str, *, finish: str | None = "stop", model: str = MODEL, tokens: int = 3, chat: bool = True
) -> Any:
    """An answer in the protocol's form."""
    choice = {"index": 0, "finish_reason": finish, "logprobs": None}
    choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    usage = {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens}
    kind = "chat.completion" if chat else "text_completion"
    return {"id": "x", "object": kind, "created": 0, "model": model, "choices": [choice], "usage": usage}


class StandIn:
    """What the server does, and what it was asked.

    Attributes:
        requests: bodies of the completions asked for, in the order in which they came.
        headers: of the newest one, their names in lower case.
        most: most requests under way at once.
        replies: (number of the request from 0, its body) → reply; None: cut the connection.
        models: that it lists; None: it lists none (404).
        paths: paths of its addresses, others are not found; None: all are the same to it.
    """

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.most = self._now = 0
        self.models: list[str] | None = [MODEL]
        self.listing: Reply | None = None
        self.replies: Callable[[int, dict[str, Any]], Reply | None] = answered
        self.url = ""
        self.paths: tuple[str, ...] | None = None
        self._lock = threading.Lock()

    def take(self, body: dict[str, Any], headers: dict[str, str]) -> Reply | None:
        with self._lock:
            number = len(self.requests)
            self.requests.append(body)
            self.headers = headers
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            return self.replies(number, body)
        finally:
            with self._lock:
                self._now -= 1


def answered(number: int, body: dict[str, Any]) -> Reply:
    """An answer of one or two words at random."""
    text = "yes" if random.random() < 0.5 else "no"
    return 200, completion(text, chat="messages" in body)


@contextmanager
def serving() -> Iterator[StandIn]:
    """The server at a free port of this machine."""
    stand_in = StandIn()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            listed = {"object": "list", "data": [{"id": name, "object": "model"} for name in stand_in.models or ()]}
            self.reply(stand_in.listing or ((404, {}) if stand_in.models is None else (200, listed)))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.reply(stand_in.take(body, {name.lower(): value for name, value in self.headers.items()}))

        def reply(self, reply: Reply | None) -> None:
            if stand_in.paths is not None and self.path not in stand_in.paths:
                reply = 404, {"detail": "Not Found"}
            if reply is None:
                self.close_connection = True
                self.connection.close()
                return
            if callable(reply):
                self.close_connection = True
                with suppress(OSError):  # the client may have left
                    reply(self)
                return
            status, value = reply
            sent = (value if isinstance(value, str) else json.dumps(value)).encode()
            self.send_response(status)
            kind = "text/html" if isinstance(value, str) and value.startswith("<") else "application/json"
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(sent)))
            if status == 429:
                self.send_header("retry-after-ms", "1")
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    stand_in.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield stand_in
    finally:
        server.shutdown()
        server.server_close()


def logged(folder="profile"):
    return [json.loads(line) for line in (Path(folder) / "rollouts.jsonl").read_text().splitlines()]
