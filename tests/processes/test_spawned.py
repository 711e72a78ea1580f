"""A spawned process does not outlive the process that spawned it, even if it ignores every signal but SIGKILL."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys, time
from rollalloc.processes.spawned import Spawned

def serve(pipe, name):
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    pipe.send(name)
    time.sleep(1000)

if __name__ == "__main__":
    child = Spawned(serve, "up", name="deaf")
    assert child.connection.recv() == "up"
    {end}
"""


@pytest.mark.parametrize(
    ("end", "printed"),
    [
        pytest.param("pass", "", id="the script ends"),
        pytest.param("raise KeyboardInterrupt", "", id="the script is interrupted"),
        pytest.param(
            "process = child.process; del child; process.join(); print(process.exitcode)", "-9",
            id="the handle is garbage collected",
        ),
        pytest.param("print(child.end(0.1), child.end())", "-9 -9", id="it is ended, twice"),
    ],
)  # fmt: skip
def test_a_child_that_ignores_signals_is_killed_when_its_parent_lets_go_of_it(tmp_path, end, printed):
    """A script that left such a child alive would hang here: Python waits for its children when it exits."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(end=end))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == printed
    assert done.returncode == (-2 if "Interrupt" in end else 0), done.stderr
