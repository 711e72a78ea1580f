"""Ctrl-C reaches every process of a terminal; which of them hears it is the parent's matter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from tempfile import TemporaryDirectory

import pytest

from rollalloc.processes.stopping import unheard, unwound

CHILD = "import sys; print('up', flush=True); sys.exit(int(sys.stdin.readline()))"
SPAWNING = """
import multiprocessing, os, signal, sys
from rollalloc.processes.stopping import unheard

def child():
    sys.exit(7)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: None)
    process = multiprocessing.get_context("spawn").Process(target=child)
    with unheard():
        process.start()
    os.killpg(0, signal.SIGINT)
    process.join()
    print(process.exitcode)
"""


def start():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", CHILD], **pipes)
    assert process.stdout.readline() == "up\n"
    return process


def test_a_process_that_was_started_unheard_goes_on_after_ctrl_c():
    with unheard():
        process = start()
    process.send_signal(signal.SIGINT)
    assert process.communicate("7\n", timeout=60) == ("", "")
    assert process.returncode == 7


def test_a_process_of_multiprocessing_ignores_ctrl_c_before_its_first_line(tmp_path):
    """The group of a terminal gets the signal while the child, which is slow to start, has not come to any handler."""
    script = tmp_path / "parent.py"
    script.write_text(SPAWNING)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run([sys.executable, script], start_new_session=True, timeout=120, **pipes)
    assert (done.returncode, done.stdout) == (0, "7\n")


def test_ctrl_c_that_comes_meanwhile_is_not_lost():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background it is ignored

    def interrupted():
        with unheard():
            os.kill(os.getpid(), signal.SIGINT)

    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_end_removes_what_is_temporary(number, tmp_path):
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as ended, unwound(), TemporaryDirectory(dir=tmp_path):
            os.kill(os.getpid(), number)
        assert ended.value.code == 128 + number
        assert not list(tmp_path.iterdir())
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_handler_of_ones_own_is_left_as_it_is():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with unwound():
            os.kill(os.getpid(), signal.SIGHUP)  # is ignored, as under nohup
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
