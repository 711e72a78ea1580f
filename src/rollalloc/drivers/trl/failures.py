"""Errors and Ctrl-C: no step of the core is left half done, and what fails in one process fails in all of them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from accelerate.utils import gather_object

_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # whose handlers may raise anywhere
_T = TypeVar("_T")


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Signals that come within wait until its end: nothing could go on from a core that was stopped half way."""
    if threading.current_thread() is not threading.main_thread():  # others are not interrupted
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
    """What each process made of its share; where one fails, all do, instead of waiting for it for ever.

    Raises:
        Exception: that of `work`, where it failed here.
        RuntimeError: it failed in another process; names it.
    """
    made: list[_T] = []
    error: Exception | None = None
    try:
        made.append(work())
    except Exception as raised:
        error = raised
    everyone = gather_object([(made, None if error is None else f"{type(error).__name__}: {error}")])
    if error is not None:
        raise error
    for process, (_, failure) in enumerate(everyone):
        if failure is not None:
            raise RuntimeError(f"process {process} could not generate and score its share: {failure}")
    return [one for made, _ in everyone for one in made]
