"""Processes that are there at once: forks of one that has imported what takes longer than most tests, and has run nothing.

A process that is spawned imports it again. A fork of the process that runs the tests cannot train once a test before has
started a thread of autograd.
"""

import multiprocessing
import os
import runpy
import sys
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["trl.trainer.grpo_trainer", "datasets", "rollalloc.drivers.trl", "rollalloc.train.train"])


def script(file: Path, *words: object, said: Path) -> int | None:
    """Run a Python file as `python FILE WORDS` does; returns the exit code, and writes into `said` what it printed."""
    process = FORKS.Process(target=_run, args=(file, [str(word) for word in words], said))
    process.start()
    process.join()
    return process.exitcode


def _run(file: Path, words: list[str], said: Path) -> None:
    with said.open("w") as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
    sys.argv = [str(file), *words]
    sys.path.insert(0, str(file.parent))
    runpy.run_path(str(file), run_name="__main__")
