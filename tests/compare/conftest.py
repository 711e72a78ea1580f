"""A small `sort` task and runs on it."""

from small_run import interrupted_tasks, run_of, task
from tiny_policy import one_thread

__all__ = ["interrupted_tasks", "one_thread", "run_of", "task"]
