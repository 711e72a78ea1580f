"""Processes that are there at once: forks of one that has imported what takes longer than most tests, and has run nothing.

A process that is spawned imports it again. A fork of the process that runs the tests cannot train once a test before has
started a thread of autograd.
"""

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["trl.trainer.grpo_trainer", "datasets", "rollalloc.drivers.trl", "rollalloc.train.train"])
