"""Reward functions, good and bad, for the tests; loaded by this file's path."""

import asyncio
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress

not_a_function = 3
_kept = []


def equals(data_source, solution_str, ground_truth, extra_info):
    return solution_str == ground_truth


async def equals_later(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0)
    return {"score": 0.5, "acc": solution_str == ground_truth}


def echo(data_source, solution_str, ground_truth, extra_info):
    """Hands back what it was given, by raising it."""
    raise ValueError(solution_str)


def write_to_channel(data_source, solution_str, ground_truth, extra_info):
    """Writes the completion as a message into every socket of its process, one of which is its channel."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                os.write(descriptor, struct.pack("!I", len(solution_str)) + solution_str.encode())
    return 1.0


def obey(data_source, solution_str, ground_truth, extra_info):
    """Does what the completion says; 1.0 where it survives."""
    if solution_str == "hang":
        time.sleep(3600)
    if solution_str == "spin":
        9**9**9**9
    if solution_str == "exit":
        os._exit(7)
    if solution_str == "sys.exit":
        sys.exit("enough")
    if solution_str == "kill the group":
        os.killpg(0, signal.SIGKILL)
    if solution_str == "abort":
        os.abort()
    if solution_str == "raise":
        raise KeyError("no such thing")
    if solution_str == "flood":
        for stream in (1, 2):
            os.write(stream, b"\0 flood " * 100_000)
        sys.stdout.write("flood" * 100_000)
    if solution_str == "nap":
        time.sleep(0.3)
    if solution_str == "grow":
        bytearray(2**30)
    if solution_str == "wait for the file":
        while not os.path.exists(ground_truth):
            time.sleep(0.01)
    if solution_str == "exit soon":
        threading.Timer(0.1, os._exit, (0,)).start()
    if solution_str == "stop soon":
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    if solution_str == "hold memory":
        _kept.append(b"\1" * 2**28)
    if solution_str == "need memory":
        bytearray(2**28)
    if solution_str == "none":
        return None
    if solution_str == "much":
        return {"score": 0.25, "log": ["x" * 1000] * 100_000}
    return 1.0


def raise_in(data_source, solution_str, ground_truth, extra_info):
    """Raises what the completion says, of a type of its own, and notes in which process."""
    with open(ground_truth, "a") as file:
        file.write(f"{os.getpid()}\n")
    raise type(solution_str.partition(" ")[0], (Exception,), {})(solution_str)


def spoil(data_source, solution_str, ground_truth, extra_info):
    """Raises wherever "spoil" was before in the same process, and at "bad" anywhere."""
    if solution_str == "spoil":
        _kept.append("spoilt")
    elif solution_str == "bad":
        raise RuntimeError("bad")
    elif _kept:
        raise RuntimeError(_kept[-1])
    return 1.0


def process_id(data_source, solution_str, ground_truth, extra_info):
    return os.getpid()


def note_process_id(data_source, solution_str, ground_truth, extra_info):
    with open(ground_truth + ".part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(file.name, ground_truth)
    return obey(data_source, solution_str, ground_truth, extra_info)


def leave_a_child(data_source, solution_str, ground_truth, extra_info):
    command = [sys.executable, "-c", "import time; time.sleep(3600)"]
    child = subprocess.Popen(command, start_new_session=extra_info["new_session"])
    with open(ground_truth, "w") as file:
        file.write(str(child.pid))
    return obey(data_source, solution_str, ground_truth, extra_info)


def kill_parent(data_source, solution_str, ground_truth, extra_info):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(3600)
