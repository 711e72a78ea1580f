"""For all tests, the library's and the laboratory's: signals as a terminal's user has them, how many examples Hypothesis
tries, tiers, the command line."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings

TESTS, LAB = Path(__file__).parent / "tests", Path(__file__).parent / "lab" / "tests"
# Modules that tests share, such as `arithmetic`, `forks`, `tiers`, `by_hand`, `logged` and `simulated`.
sys.path[:0] = [
    str(TESTS),
    *(str(TESTS / name) for name in ("compare", "waste", "advise", "report")),
    str(LAB / "simulate"),
]

from tiers import Tiers  # noqa: E402

# What is started in the background (`nohup`, `&` in a script, some CI runners) ignores these from its parent on, and what it
# starts does, too: rightly for a run, which then goes on, but the tests of what Ctrl-C does could not see anything of it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Where a test does not say: HYPOTHESIS_PROFILE=long tries four times as many. No test fails by the clock, hence no deadline.
settings.register_profile("short", max_examples=40, deadline=None)
settings.register_profile("long", max_examples=160, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Tiers())


_CHILD_FAILED = 70  # exit code of a forked child that raised
_CHILD_S = 120


@pytest.fixture
def forked() -> Callable[[Callable[[], object]], int]:
    """Call something in a fork of this process: the exit code, what it returned or 0, 70 where it raised.

    The child never comes back from it, whatever it raises: it would go on with this test and with those after it, and say
    so to who waits for this process. One that hangs is killed.
    """

    def exit_code(act: Callable[[], object]) -> int:
        child = os.fork()
        if child == 0:
            try:
                try:
                    os._exit(int(act() or 0))
                finally:
                    os._exit(_CHILD_FAILED)
            finally:  # an alarm may ring in the other one
                os._exit(_CHILD_FAILED)
        until = time.monotonic() + _CHILD_S
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                pytest.fail(f"the forked child did not end within {_CHILD_S} s")
            time.sleep(0.002)
        return os.waitstatus_to_exitcode(ended[1])

    return exit_code


@pytest.fixture
def forked_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generators are forked: there in milliseconds, where one that is spawned imports PyTorch and transformers first.

    What they are sent once they are there is pickled all the same.
    """
    from rollalloc.generate.stream import process
    from rollalloc.processes import spawned

    class Forked(process.Spawned):
        def __init__(self, serve: Callable[..., None], *arguments: object, name: str) -> None:
            context = multiprocessing.get_context("fork")
            self.connection, theirs = context.Pipe()

            def served() -> None:
                self.connection.close()  # or it would not hear of its end
                serve(theirs, *arguments)

            self.process = context.Process(target=served, name=name, daemon=True)
            self.process.start()
            self._kill = Finalize(self, spawned._kill, (self.process,))
            theirs.close()

    monkeypatch.setattr(process, "Spawned", Forked)


@pytest.fixture
def forked_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of a comparison are `forks.FORKS`, whatever else about them is as it is."""
    from forks import FORKS
    from rollalloc.processes import spawned

    monkeypatch.setattr(spawned, "multiprocessing", SimpleNamespace(get_context=lambda _: FORKS))


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


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are saved empty, in milliseconds: for tests of what stands around them."""
    from matplotlib.figure import Figure

    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda _, *given, **said: save(Figure((1, 1)), *given, **said))


@pytest.fixture
def files_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Write the Python files that a page shows, blocks that begin with `# name.py`, into an empty working directory."""

    def written(page: str) -> None:
        text = (Path(__file__).parent / page).read_text("utf-8")
        blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.DOTALL)
        names = [name for name, _ in blocks]
        assert names, f"{page} shows no file"
        assert len(set(names)) == len(names), f"{page} shows a file twice: {names}"
        monkeypatch.chdir(tmp_path)
        for name, code in blocks:
            Path(name).write_text(code, "utf-8")

    return written
