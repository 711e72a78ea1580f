"""The process between `WorkerScorer` and a worker. It kills the worker, and every process that the worker started.

The keeper runs no user code, so it still works if a reward function blocks the interpreter or kills its parent process. The
keeper is started by its file path and does not import the package, because imports may start threads, and a process with
threads cannot fork safely.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_WATCH_S = 0.5  # seconds between two checks whether the parent is alive
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>


def keep(parent_id: int, descriptor: int, serve: Callable[[int], None]) -> None:
    """Fork the worker and wait until it ends, the parent ends, or SIGTERM arrives. Then kill the worker and its processes.

    Does not return: this process exits with the worker's exit code or signal. On Linux, this process becomes the parent of
    the worker's orphans, so it finds and kills them even if they moved to another session. Elsewhere it kills only the
    worker's process group.

    Args:
        parent_id: the parent's process id, to notice that the parent has ended. The channel does not show this, because
            other processes that the parent forked may keep the channel open.
        descriptor: the file descriptor of the worker's end of the channel.
        serve: called in the worker with `descriptor`.
    """
    _control_process(_PR_SET_CHILD_SUBREAPER, 1)
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    keeper_id = os.getpid()
    worker_id = os.fork()
    if worker_id == 0:
        _control_process(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper_id:
            os._exit(1)
        os.setsid()  # so that a function that signals its process group does not reach the parent
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
    """Kill the worker and every process that it started. Return the worker's exit status."""
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
    """Exit statuses of the children that have ended, by process id."""
    ended: dict[int, int] = {}
    with suppress(ChildProcessError):
        while True:
            child, status = os.waitpid(-1, os.WNOHANG if ended else options)
            if not child:
                break
            ended[child] = status
    return ended


def _children() -> list[int]:
    """The ids of this process's children, from /proc; empty on systems without it."""
    own = os.getpid()
    children: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            process_id, _, rest = stat.read_text(errors="replace").partition(" (")
            if int(rest.rpartition(") ")[2].split()[1]) == own:
                children.append(int(process_id))
    return children


def _exit_as(status: int) -> None:
    """End this process as another process ended: with the same exit code, or by the same signal."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError, ValueError):  # SIGKILL's handler cannot be set
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
    os._exit(code if code >= 0 else 128 - code)


def _control_process(option: int, value: int) -> None:
    if sys.platform != "linux":
        return
    with suppress(ImportError):  # without ctypes, orphans in other sessions are not killed
        import ctypes

        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)
