"""math-verify under a short limit, in a process that one answer kills; loaded by this file's path."""

import os
import signal

from rollalloc.rewards.math import MathVerify

_verify = MathVerify(timeout_s=1)


def compute_score(**sample):
    if sample["solution_str"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return _verify(**sample)
