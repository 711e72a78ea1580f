"""Reward functions in a thread of their own, so that generation goes on meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from queue import SimpleQueue
from time import monotonic
from typing import Any


class Judge:
    """Does one piece of work after the other.

    The thread is a daemon's: a function that hangs for ever holds up neither the end of a training run nor that of the
    program.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._waiting: set[Future[Any]] = set()
        self._closed = False
        self._lock = threading.Lock()  # nothing is taken beside `close`: nobody would ever do it
        self._since: float | None = None
        threading.Thread(target=self._run, name="rollalloc judge", daemon=True).start()

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Do this when what came before is done; the future fails as it does, and by `close` with `CancelledError`."""
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                future.set_exception(CancelledError())
                return future
            self._waiting.add(future)
        self._work.put((work, future))
        return future

    def busy_s(self) -> float:
        """Seconds that the piece at hand has taken so far; 0 where there is none."""
        since = self._since
        return 0.0 if since is None else monotonic() - since

    def close(self) -> None:
        """Cancel everything; what is at hand is let run, and nobody hears what it gives."""
        with self._lock:
            self._closed = True
            for future in self._waiting:
                with suppress(InvalidStateError):  # it has just been done
                    future.set_exception(CancelledError())  # who waits for several does not hear of `cancel`
        self._work.put(None)

    def _run(self) -> None:
        while (given := self._work.get()) is not None:
            work, future = given
            if not future.done():
                self._do(work, future)
            with self._lock:
                self._waiting.discard(future)

    def _do(self, work: Callable[[], Any], future: Future[Any]) -> None:
        self._since = monotonic()
        try:
            made = work()
        except BaseException as error:  # also what calls `exit`: it ends the run, not this thread in silence
            with suppress(InvalidStateError):
                future.set_exception(error)
        else:
            with suppress(InvalidStateError):  # cancelled meanwhile
                future.set_result(made)
        finally:
            self._since = None
