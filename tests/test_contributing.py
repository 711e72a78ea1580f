"""The contributor's guide: its tests find mistakes in its files; `shown` runs them as they stand there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def outcome(files_of):
    """Run pytest on the guide's files, of which one may be changed before: (exit code, what it said)."""

    def run(test: str, change: tuple[str, str, str] | None = None) -> tuple[int, str]:
        files_of("CONTRIBUTING.md")
        if change:
            name, was, becomes = change
            code = Path(name).read_text("utf-8")
            assert code.count(was) == 1
            Path(name).write_text(code.replace(was, becomes), "utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", test]
        path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120, check=False
        )
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.parametrize(
    ("test", "change"),
    [
        ("test_brief.py", ("brief.py", "np.argsort(group.tokens_G", "np.argsort(-group.tokens_G")),
        ("test_brief.py", ("brief.py", '("tokens_G",)', '("rewards_G",)')),
        ("test_driver.py", ("driver.py", "self.payloads = dict(", "self.payloads = {}, dict(")),
        ("test_driver.py", ("driver.py", "in order.rollouts", "in order.rollouts[1:]")),
    ],
)
def test_a_mistake_in_what_the_guide_shows_is_found(outcome, test, change):
    code, said = outcome(test, change)
    assert code == 1, said
