"""A process at the other end of a pipe ends with whoever holds it."""

from __future__ import annotations

import subprocess
import sys

import pytest

DEAF = """
import os, signal, sys, time
from rollalloc.processes.spawned import Spawned

def serve(pipe, name):
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    pipe.send(name)
    time.sleep(1000)

if __name__ == "__main__":
    held = Spawned(serve, "up", name="deaf")
    assert held.connection.recv() == "up"
    {then}
"""


@pytest.mark.parametrize(
    ("then", "says"),
    [
        ("pass", ""),
        ("raise KeyboardInterrupt", ""),
        ("process = held.process; del held; process.join(); print(process.exitcode)", "-9"),
        ("print(held.end(0.1), held.end(), held.process.exitcode)", "-9 -9 -9"),
    ],
)
def test_a_process_that_hears_no_signal_ends_with_the_one_that_began_it(tmp_path, then, says):
    """However that ends: the interpreter waits for its children at its own end."""
    script = tmp_path / "script.py"
    script.write_text(DEAF.format(then=then))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == says
    assert done.returncode == (-2 if "Interrupt" in then else 0), done.stderr
