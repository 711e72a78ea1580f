"""The child's side of `WorkerScorer`: a process that scores samples until its parent hangs up."""

from __future__ import annotations

import math
import os
import resource
import time
from multiprocessing.connection import Connection
from traceback import format_exception_only

from rollalloc.rewards.function import RewardFunction, Sample, load_reward, score_sample


def serve(descriptor: int, reward: str, limit_s: float) -> None:
    """Loads the reward function, says so, and answers each list of samples with one outcome after the other.

    The first message is None, or why the function could not be loaded. Only outcomes go back, so that a function that
    returns gigabytes costs the parent nothing.

    Args:
        descriptor: this process's end of a `multiprocessing.Pipe`.
        reward: path of the function, as `load_reward` takes it.
        limit_s: seconds a sample may take.
    """
    with Connection(descriptor) as parent:
        try:
            function = load_reward(reward)
        except (Exception, SystemExit) as error:
            parent.send("".join(format_exception_only(error)).strip())
            return
        parent.send(None)
        try:
            while True:
                _answer(parent, function, limit_s)
        except (EOFError, OSError):  # the parent has gone
            return


def _answer(parent: Connection, function: RewardFunction, limit_s: float) -> None:
    samples: list[Sample] = parent.recv()
    for sample in samples:
        _die_if_orphaned(limit_s)
        parent.send(score_sample(function, sample))


def _die_if_orphaned(limit_s: float) -> None:
    """Lets the kernel end this process, should the sample spin on after the parent, which enforces the limit, died.

    Processor time, not an alarm: reward functions use the alarm themselves, and no signal handler runs inside a
    9 ** 9 ** 9. All cores may count at once, and the parent's limit is to come first, hence the factor and the margin.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(time.process_time() + (limit_s + 10) * (os.cpu_count() or 1))
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
