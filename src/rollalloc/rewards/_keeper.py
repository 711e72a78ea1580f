"""The process between `WorkerScorer` and a worker, which ends the worker with all that it started.

It runs nothing of the user's, so that neither a function that holds the interpreter nor one that kills its parent gets
in the way. Run by its path: without the package, whose imports may start threads, it is small and may fork.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_WATCH_S = 0.5  # between two looks at whether the parent is still there
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>


def keep(parent_id: int, descriptor: int, serve: Callable[[int], None]) -> None:
    """Forks the worker, waits until it, the parent or SIGTERM ends it, and exits as it did. Does not return.

    What the worker's children leave behind becomes this process's own child, on Linux, and ends as well, whatever
    session it has moved to; elsewhere what stayed in the worker's process group does.

    Args:
        parent_id: the parent's process id. Not the channel's end tells that it has gone: what the parent forked may
            hold that open.
        descriptor: the worker's end of the channel.
        serve: what the worker runs, with `descriptor`.
    """
    _control_process(_PR_SET_CHILD_SUBREAPER, 1)
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    keeper_id = os.getpid()
    worker_id = os.fork()
    if worker_id == 0:
        _control_process(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper_id:
            os._exit(1)
        os.setsid()  # a function that signals its own group reaches itself
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        try:
            serve(descriptor)
        finally:
            os._exit(1 if sys.exc_info()[0] else 0)
    os.close(descriptor)
    signal.setitimer(signal.ITIMER_REAL, _WATCH_S, _WATCH_S)
    status = None
    while status is None and os.getppid() == parent_id:
        if signal.sigwait((signal.SIGCHLD, signal.SIGTERM, signal.SIGALRM)) == signal.SIGTERM:
            break
        status = _reap(os.WNOHANG).get(worker_id)
    _exit_as(_end_all(worker_id, status))


def _end_all(worker_id: int, status: int | None) -> int:
    """Kills the worker and all that it started; the worker's status."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker_id, signal.SIGKILL)
    while True:
        for child in _children() or ([worker_id] if status is None else []):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        ended = _reap(0)
        if not ended:
            return signal.SIGKILL if status is None else status
        status = ended.get(worker_id, status)


def _reap(options: int) -> dict[int, int]:
    """The children that have ended, with their status."""
    ended: dict[int, int] = {}
    with suppress(ChildProcessError):
        while True:
            child, status = os.waitpid(-1, os.WNOHANG if ended else options)
            if not child:
                break
            ended[child] = status
    return ended


def _children() -> list[int]:
    """The children of this process, where /proc tells."""
    own = os.getpid()
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            process_id, _, rest = stat.read_text(errors="replace").partition(" (")
            if int(rest.rpartition(") ")[2].split()[1]) == own:
                found.append(int(process_id))
    return found


def _exit_as(status: int) -> None:
    """Ends this process as another one ended."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError, ValueError):  # of SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
    os._exit(code if code >= 0 else 128 - code)


def _control_process(option: int, value: int) -> None:
    if sys.platform != "linux":
        return
    with suppress(ImportError):  # where Python was built without it, less is ended
        import ctypes

        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)
