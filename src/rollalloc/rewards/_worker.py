"""The worker's side of `WorkerScorer`: a process that scores samples until its parent closes the channel."""

from __future__ import annotations

import os
import pickle
import re
import resource
from pathlib import Path
from traceback import format_exception_only

from rollalloc.rewards._channel import LONGEST_REASON, Answer, WorkerEnd, answer_message
from rollalloc.rewards._surroundings import Surroundings
from rollalloc.rewards.function import (
    Outcome,
    RewardFunction,
    Sample,
    Unscored,
    end_if_forked,
    load_reward,
    score_sample,
    what_was_raised,
)


def serve(descriptor: int, reward: str, memory_bytes: int) -> None:
    """Report this process's id, load the reward function, and answer each sample with its outcome.

    If the function forks, the forked process exits when the function returns or raises. Only this process answers.

    Args:
        descriptor: this process's end of the channel.
        reward: path of the function, see `load_reward`.
        memory_bytes: number of bytes that samples may allocate in this process.
    """
    parent = WorkerEnd(descriptor)
    parent.send(["started", os.getpid()])
    function = _load(reward)
    if isinstance(function, str):
        parent.send(["broken", function])
        return
    _limit_memory(memory_bytes)
    surroundings = Surroundings()
    parent.send(["ready"])
    while True:
        try:
            request, message = parent.receive()
        except (EOFError, OSError):  # the parent has ended
            return
        outcome = _score(function, message)
        parent.send(answer_message(Answer(request, outcome, fit=surroundings.restore())))


def _load(reward: str) -> RewardFunction | str:
    """The function, or the text of the error that loading it raised. If the module forks, the forked process exits here."""
    process_id = os.getpid()
    error: BaseException | None = None
    try:
        return load_reward(reward)
    except BaseException as caught:
        error = caught
        return "".join(format_exception_only(caught)).strip()[:LONGEST_REASON]
    finally:
        end_if_forked(process_id, error)


def _score(function: RewardFunction, message: bytes) -> Outcome:
    try:
        sample = Sample(*pickle.loads(message))
    except Exception as error:  # for example, because its class cannot be imported in this process
        return Unscored(f"cannot be unpickled in the worker: {error}"[:LONGEST_REASON])
    try:
        return score_sample(function, sample)
    except BaseException as error:  # even an exception such as KeyboardInterrupt must not end the worker
        return Unscored(what_was_raised(error), raised=True)


def _limit_memory(more_bytes: int) -> None:
    """Limit this process to `more_bytes` beyond its present memory, on Linux.

    The limit is relative, because numerical libraries allocate memory for every core when a process starts.
    """
    status = Path("/proc/self/status")
    if status.exists():
        (kilobytes,) = re.findall(r"^VmData:\s*(\d+) kB$", status.read_text(), re.MULTILINE)
        soft = int(kilobytes) * 1024 + more_bytes
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
