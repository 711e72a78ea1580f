"""Ctrl-C reaches every process of a terminal; which of them hears it is the parent's matter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from rollalloc.engines.stopping import unheard

CHILD = "import sys; print('up', flush=True); sys.exit(int(sys.stdin.readline()))"


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


def test_ctrl_c_that_comes_meanwhile_is_not_lost():
    def interrupted():
        with unheard():
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
