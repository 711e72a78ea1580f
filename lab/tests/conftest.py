"""For the laboratory's tests: its command line in this process, a small `sort` task, and threads as in the library's."""

from collections.abc import Callable

import pytest

from small_run import interrupted_tasks, run_of, task
from tiny_policy import one_thread

__all__ = ["interrupted_tasks", "one_thread", "run_of", "task"]


@pytest.fixture
def rollalloc_lab(
    monkeypatch: pytest.MonkeyPatch, rollalloc: Callable[..., tuple[int, str, str]]
) -> Callable[..., tuple[int, str, str]]:
    """Call `rollalloc-lab` with these arguments in this process: (exit code, standard output, standard error)."""
    from rollalloc.cli import app as library
    from rollalloc_lab.cli import app

    monkeypatch.setattr(library, "main", lambda: app.main())
    return rollalloc
