"""A small `sort` task and runs on it; `logged` is shared with the tests of `waste`."""

import sys
from pathlib import Path

from small_run import one_torch_thread, run_of, task

__all__ = ["one_torch_thread", "run_of", "task"]
sys.path.insert(0, str(Path(__file__).parents[1] / "waste"))
