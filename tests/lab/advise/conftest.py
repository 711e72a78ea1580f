"""A small `sort` task and runs on it."""

from small_run import one_torch_thread, run_of, task

__all__ = ["one_torch_thread", "run_of", "task"]
