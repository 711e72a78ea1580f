"""The child's side of `WorkerScorer`: a process that scores samples until its parent hangs up."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import resource
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from traceback import format_exception_only
from typing import Any

from rollalloc.rewards.function import Outcome, RewardFunction, Sample, Scored, Unscored, load_reward, score_sample

_ERROR_LENGTH = 2000  # characters of why the function could not be loaded


def serve(descriptor: int, parent_id: int, reward: str, limit_s: float, memory_bytes: int) -> None:
    """Loads the reward function, says so, and answers each sample with its outcome.

    The first message is null, or why the function could not be loaded. Only outcomes go back, as JSON, so that a
    function that returns gigabytes costs the parent nothing, and one that was taken over cannot make it run code.

    Args:
        descriptor: this process's end of the socket.
        parent_id: the parent's process id.
        reward: path of the function, as `load_reward` takes it.
        limit_s: seconds a sample may take.
        memory_bytes: what samples may make this process allocate.
    """
    Thread(target=_end_with, args=(parent_id,), daemon=True).start()
    with Connection(descriptor) as parent:
        try:
            function = load_reward(reward)
        except (Exception, SystemExit) as error:
            _send(parent, "".join(format_exception_only(error)).strip()[:_ERROR_LENGTH])
            return
        _limit_memory(memory_bytes)
        _send(parent, None)
        try:
            while True:
                message = parent.recv_bytes()
                _die_if_orphaned(limit_s)
                _send(parent, _encode(_score(function, message)))
        except (EOFError, OSError):  # the parent has gone
            return


def _score(function: RewardFunction, message: bytes) -> Outcome:
    try:
        sample = Sample(*pickle.loads(message))
    except Exception as error:  # of a class that cannot be imported here, say
        return Unscored(f"cannot be unpickled in the worker: {error}"[:_ERROR_LENGTH])
    return score_sample(function, sample)


def _encode(outcome: Outcome) -> list[float] | str:
    return [outcome.reward, outcome.metric] if isinstance(outcome, Scored) else outcome.reason


def _send(parent: Connection, message: Any) -> None:
    parent.send_bytes(json.dumps(message).encode())


def _end_with(parent_id: int) -> None:
    """Ends this process, and all that it started, soon after its parent has gone: a sleeping sample would not notice.

    Asks for the parent's id, not for the socket's end, which a process that the parent forked may hold open.
    """
    while os.getppid() == parent_id:
        time.sleep(0.5)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _die_if_orphaned(limit_s: float) -> None:
    """Lets the kernel end this process, should the sample spin on after the parent, which enforces the limit, died.

    Processor time, not an alarm: reward functions use the alarm themselves, and neither a signal handler nor a thread
    runs inside a 9 ** 9 ** 9. All cores may count at once, and the parent's limit is to come first, hence the factor
    and the margin.
    """
    _lower_limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + (limit_s + 10) * (os.cpu_count() or 1)))


def _limit_memory(more_bytes: int) -> None:
    """Lets this process allocate so much more than it has, where the kernel tells and limits it: on Linux.

    What it has depends on the machine, since numerical libraries allocate for every core.
    """
    status = Path("/proc/self/status")
    if status.exists():
        (kilobytes,) = re.findall(r"^VmData:\s*(\d+) kB$", status.read_text(), re.MULTILINE)
        _lower_limit(resource.RLIMIT_DATA, int(kilobytes) * 1024 + more_bytes)


def _lower_limit(kind: int, soft: int) -> None:
    """Sets a soft limit, within the hard one."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
