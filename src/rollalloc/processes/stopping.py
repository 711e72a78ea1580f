"""Stopping by signals: a signal requests the stop, and the run ends after it has saved its state."""

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
    """The run was stopped by a signal. The state is saved, so the run can be resumed.

    Args:
        message: text of the error.
        by: the signal.
    """

    def __init__(self, message: str, by: signal.Signals) -> None:
        super().__init__(message)
        self.by = by


class StopRequest:
    """Records whether a signal requested a stop while the context `heard` was open.

    Attributes:
        by: the first signal that was recorded; None if there was none.
    """

    by: signal.Signals | None = None

    @contextmanager
    def heard(self) -> Iterator[None]:
        """A context in which SIGTERM, Ctrl-C and SIGHUP are recorded instead of ending the process. A second Ctrl-C
        ends the process.

        Signals that were ignored before stay ignored, such as SIGHUP under `nohup`. Outside of the main thread, where Python
        does not allow signal handlers, nothing is recorded. The previous handlers are restored at the end.
        """
        before = {}
        if threading.current_thread() is threading.main_thread():
            before = {number: signal.getsignal(number) for number in ASKING}
            before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
        try:
            for number in before:
                signal.signal(number, self._come)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _come(self, number: int, frame: FrameType | None) -> None:
        if self.by is None:
            self.by = signal.Signals(number)
            # Log from another thread, because the signal may have interrupted this thread while it was writing to the log.
            threading.Thread(target=_say, args=(self.by,), daemon=True).start()
        elif number == signal.SIGINT:
            raise KeyboardInterrupt


@contextmanager
def unwound() -> Iterator[None]:
    """A context in which SIGTERM and SIGHUP end the process as Ctrl-C does: after contexts have removed what is temporary.

    Handlers that are not Python's default stay, as do all outside of the main thread.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    chosen: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        chosen = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    try:
        for number in chosen:
            signal.signal(number, leave)
        yield
    finally:
        for number in chosen:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def unheard() -> Iterator[None]:
    """A context in which child processes start with Ctrl-C blocked.

    A terminal sends Ctrl-C to the parent and to its children, but the parent should decide when its children end. A
    handler in the child would be installed too late: only after the child has imported its modules.
    """
    # Start multiprocessing's resource tracker before blocking the signal, because its start would unblock the signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _say(by: signal.Signals) -> None:
    log.warning("%s: stopping after the current batch is trained and saved; press Ctrl-C to stop at once", by.name)
