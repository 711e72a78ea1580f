"""The address of an OpenAI-compatible server, without the packages that speak to it."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from rollalloc.core.recipe import at_least

KEY = "OPENAI_API_KEY"
_MOST_AT_ONCE = 1000  # maximum number of connections that the client opens


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The address of a server, and the limits on requests to it.

    Attributes:
        url: the API's base address, e.g. http://localhost:8000/v1.
        concurrency: maximum number of open requests, at least 1.
        limit_s: time limit of a request in seconds, above 0.
        retries: maximum number of repetitions of a request. A request is repeated, with growing pauses, after a lost
            connection, after a time-out, and after one of the status codes 408, 409, 429 and 5xx.

    Raises:
        ValueError: a value is out of its range, or the address is not valid.
    """

    url: str
    concurrency: int = 16
    limit_s: float = 300.0
    retries: int = 5

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            whole = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
        except ValueError:
            whole = False
        if "@" in self.url or "?" in self.url:
            raise ValueError(f"--endpoint: a key must not be part of the address, which is logged; put it into {KEY}")
        if not whole:
            raise ValueError(f"--endpoint: expected an address such as http://localhost:8000/v1, got {self.url!r}")
        at_least("concurrency", self.concurrency, 1)
        at_least("retries", self.retries, 0)
        if self.concurrency > _MOST_AT_ONCE:
            raise ValueError(f"concurrency must be at most {_MOST_AT_ONCE} requests, got {self.concurrency}")
        if not 0 < self.limit_s < 1e6:
            raise ValueError(f"request_limit must be a positive number of seconds, got {self.limit_s}")

    @property
    def address(self) -> str:
        """The address in one spelling, by which answers of different servers are told apart."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.lower()}{parts.path.rstrip('/')}"
