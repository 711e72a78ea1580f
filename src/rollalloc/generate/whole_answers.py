"""An HTTP client for servers that are not trusted: an answer is limited in time and in size, also when it is compressed."""

from __future__ import annotations

import asyncio
import os
import re
import zlib
from importlib import import_module
from typing import Any
from urllib.parse import unquote
from urllib.request import getproxies

import openai  # pyright: ignore[reportMissingImports]

MOST_BYTES = 16 * 2**20  # maximum size of an answer, before and after decompression
_COMPRESSED = ("gzip", "x-gzip", "deflate")  # encodings that zlib reads within a limit
_ANY_ZLIB = 47  # zlib's code for a gzip or a zlib header
_LEAST_SECRET = 4  # shorter passwords are hidden only within an address; alone, they may be part of any word
_USER_IN_ADDRESS = re.compile(r"(?<=//)[^/\s]*@")
# The HTTP library that openai uses: httpx, or httpx2 from openai 3 on.
HTTP = import_module(openai.DefaultAsyncHttpxClient.__base__.__module__.partition(".")[0])


class TooLarge(Exception):
    """An answer has more than `MOST_BYTES`."""


class WholeAnswers(openai.DefaultAsyncHttpxClient):
    """An HTTP client with limits for the whole answer. The base class limits only the time for each part.

    Redirects are not followed, because they would send prompts to another host.

    Raises:
        ValueError: on creation, the proxy in the environment cannot be used. The message does not show it, because it may
            contain a password.
    """

    def __init__(self) -> None:
        try:
            super().__init__(follow_redirects=False)
        except (ImportError, ValueError, HTTP.InvalidURL) as error:
            why = (
                f"{error}"
                if isinstance(error, ImportError)
                else "it is no address such as http://proxy:3128, without blanks"
            )
            raise ValueError(
                f"the environment's proxy cannot be used ({hidden(why)}); correct or unset {', '.join(_proxy_variables())}"
            ) from None

    async def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
        """Send a request, and return its complete answer, already decompressed.

        Raises:
            TooLarge: the answer has more than `MOST_BYTES`.
            HTTP.ReadTimeout: the answer was not complete within the time limit.
            HTTP.DecodingError: the answer cannot be decompressed.
        """
        limit_s = request.extensions["timeout"]["read"]
        request.headers["accept-encoding"] = "identity"
        try:
            return await asyncio.wait_for(self._whole(request, options), limit_s)
        except TimeoutError as error:
            raise HTTP.ReadTimeout(f"no complete answer within {limit_s:g} s", request=request) from error

    async def _whole(self, request: Any, options: dict[str, Any]) -> Any:
        answer = await super().send(request, stream=True, **options)
        body = bytearray()
        try:
            async for part in answer.aiter_raw():
                body += part
                _refuse_larger(len(body))
        finally:
            await answer.aclose()
        content = _decompressed(bytes(body), answer.headers.get("content-encoding", "identity").strip().lower())
        kept = [(name, value) for name, value in answer.headers.multi_items() if name not in _OF_TRANSFER]
        return HTTP.Response(answer.status_code, headers=kept, content=content, request=request)


_OF_TRANSFER = ("content-encoding", "content-length", "transfer-encoding")  # headers that say how the body was sent


def _refuse_larger(size: int) -> None:
    if size > MOST_BYTES:
        raise TooLarge(f"more than {MOST_BYTES >> 20} MiB")


def _decompressed(body: bytes, encoding: str) -> bytes:
    """The content of a body. At most `MOST_BYTES` are decompressed."""
    if encoding == "identity" or not body:
        return body
    if encoding not in _COMPRESSED:
        raise HTTP.DecodingError(f"its content encoding is {encoding[:40]!r}, which was not asked for")
    decoder = zlib.decompressobj(_ANY_ZLIB)
    try:
        content = decoder.decompress(body, MOST_BYTES + 1)
    except zlib.error as error:
        raise HTTP.DecodingError(str(error)) from error
    _refuse_larger(len(content))
    if not decoder.eof:
        raise HTTP.DecodingError("it ends within its compressed data")
    return content


# -------------------------------------------------------------------------------------------------------------- secrets


def hidden(text: str, key: str = "") -> str:
    """A text without the key, without users and passwords in addresses, and without those of the environment's proxies."""
    text = text.replace(key, "[key]") if key else text
    for secret in _proxy_secrets():
        text = text.replace(secret, "[hidden]")
    return _USER_IN_ADDRESS.sub("[hidden]@", text)


def _proxy_variables() -> list[str]:
    """Names of the environment's variables that name a proxy, such as HTTPS_PROXY."""
    return sorted(name for name in os.environ if name.lower().endswith("_proxy") and name.lower() != "no_proxy")


def _proxy_secrets() -> list[str]:
    """What must not be shown of the proxies in the environment: "user:password", and the password alone."""
    secrets: list[str] = []
    for proxy in getproxies().values():
        user, found, _ = (proxy.partition("//")[2] or proxy).rpartition("@")
        password = user.partition(":")[2]
        secrets += [user] if found and user else []
        secrets += [secret for secret in (password, unquote(password)) if len(secret) >= _LEAST_SECRET]
    return secrets
