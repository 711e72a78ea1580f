"""Handles errors and Ctrl-C. A step of the core is never interrupted, and an error in one process stops all processes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from accelerate.utils import gather_object

from rollalloc.files.text import error_text

_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # handlers of these signals may raise an exception at any line
_T = TypeVar("_T")


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until the end of the block. A core that was interrupted within a step would be unusable."""
    if threading.current_thread() is not threading.main_thread():  # signal handlers run only in the main thread
        yield
        return
    came: list[tuple[int, Any]] = []
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    deferred = [number for number, handler in handlers.items() if callable(handler)]
    try:
        for number in deferred:
            signal.signal(number, lambda *given: came.append(given))
        yield
    finally:
        for number in deferred:
            signal.signal(number, handlers[number])
        for number, frame in came:
            handlers[number](number, frame)  # pyright: ignore


def by_all(work: Callable[[], _T]) -> list[_T]:
    """Run `work` in every process and gather the results. If `work` fails in one process, all processes raise an error, so
    that no process waits for another.

    Returns:
        The result of each process, in order.

    Raises:
        Exception: the exception of `work`, if it failed in this process.
        RuntimeError: `work` failed in another process; the message names the process and the error.
    """
    made: list[_T] = []
    error: Exception | None = None
    try:
        made.append(work())
    except Exception as raised:
        error = raised
    everyone = gather_object([(made, None if error is None else error_text(error))])
    if error is not None:
        raise error
    for process, (_, failure) in enumerate(everyone):
        if failure is not None:
            raise RuntimeError(f"process {process} could not generate and score its share: {failure}")
    return [one for made, _ in everyone for one in made]
