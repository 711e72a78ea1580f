"""Being asked to stop: a signal asks, and the run leaves when what it holds is saved."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType

log = logging.getLogger(__name__)

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(RuntimeError):
    """What was at work was asked to stop, was saved, and can be resumed.

    Args:
        message: says so.
        by: the signal that asked.
    """

    def __init__(self, message: str, by: signal.Signals) -> None:
        super().__init__(message)
        self.by = by


class StopRequest:
    """Whether this process was asked to stop, since `heard` was entered.

    Attributes:
        by: the signal that asked first; None: none did.
    """

    by: signal.Signals | None = None

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Let SIGTERM, Ctrl-C and SIGHUP ask instead of kill, where this thread may decide it; a second Ctrl-C kills.

        A signal that was ignored before, as SIGHUP under `nohup`, still is. Afterwards all is as it was.
        """
        before = {}
        if threading.current_thread() is threading.main_thread():
            before = {each: signal.getsignal(each) for each in ASKING}
            before = {each: handler for each, handler in before.items() if handler not in (signal.SIG_IGN, None)}
        try:
            for each in before:
                signal.signal(each, self._come)
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _come(self, number: int, frame: FrameType | None) -> None:
        if self.by is None:
            self.by = signal.Signals(number)
            # In a thread: the signal may have come in the middle of a line that this one is writing.
            threading.Thread(target=_say, args=(self.by,), daemon=True).start()
        elif number == signal.SIGINT:
            raise KeyboardInterrupt


@contextmanager
def unheard() -> Iterator[None]:
    """Let processes that are started here not hear Ctrl-C, which reaches all of a terminal: their parent decides.

    Not even while they import, when a handler of their own would not be there yet.
    """
    resource_tracker.ensure_running()  # multiprocessing's, which would unblock the signal when it is started below
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _say(by: signal.Signals) -> None:
    log.warning("%s: stops once the batch at work is trained and saved; Ctrl-C leaves at once", by.name)
