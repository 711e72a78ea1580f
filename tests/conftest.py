"""For all tests: the signals as a terminal's user has them, how many examples Hypothesis tries, and the command line."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import pytest
from hypothesis import settings

# What is started in the background (`nohup`, `&` in a script, some CI runners) ignores these from its parent on, and what it
# starts does, too: rightly for a run, which then goes on, but the tests of what Ctrl-C does could not see anything of it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Where a test does not say: HYPOTHESIS_PROFILE=long tries four times as many.
settings.register_profile("short", max_examples=40)
settings.register_profile("long", max_examples=160)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))


@pytest.fixture
def rollalloc(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Call `rollalloc` with these arguments in this process: (exit code, standard output, standard error)."""
    from rollalloc.cli import app

    def called(*arguments: object, columns: int = 300) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rollalloc", *map(str, arguments)])
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.setenv("COLUMNS", str(columns))
        code = 0
        try:
            app.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, *capsys.readouterr()

    return called
