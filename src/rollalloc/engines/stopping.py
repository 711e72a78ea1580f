"""Being asked to stop: a signal asks, and the run leaves when what it holds is saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Stopped(RuntimeError):
    """The run was asked to stop (SIGTERM), was saved, and can be resumed."""


class StopRequest:
    """Whether this process was asked to stop, since `heard` was entered.

    Attributes:
        came: it was.
    """

    came = False

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Let SIGTERM ask instead of kill, where this thread may decide it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, lambda *_: self._come())
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _come(self) -> None:
        self.came = True
