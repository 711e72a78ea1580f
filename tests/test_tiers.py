"""Tests of the table of the tier `e2e`, and of the CPU seconds that a test session reports."""

import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tiers import TABLE, patterns

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("pattern", patterns(TABLE.read_text("utf-8")))
def test_what_the_table_names_is_there(pattern):
    files, _, test = pattern.partition("::")
    found = [path for path in ROOT.glob(files.replace("/*", "/**/*.py")) if path.suffix == ".py"]
    names = [
        name for path in found for name in re.findall(r"^(?:class|def) ([Tt]est\w+)", path.read_text(), re.MULTILINE)
    ]
    assert any(fnmatch(name, test or "*") for name in names), f"nothing is named {pattern}; see who moved it"


@pytest.mark.e2e
def test_a_session_says_the_seconds_of_its_workers_and_of_their_processes(tmp_path):
    here = Path(__file__).parent
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(here)!r})\nfrom tiers import Tiers\n"
        "def pytest_configure(config):\n"
        "    config.addinivalue_line('markers', 'e2e: a tier')\n"
        "    config.pluginmanager.register(Tiers())\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import multiprocessing, subprocess, sys, time\nBURN = 'import time\\nwhile time.process_time() < 1: pass'\n"
        "def test_child(): subprocess.run([sys.executable, '-c', BURN])\ndef test_nothing(): pass\n"
        "def test_fork():\n    forked = multiprocessing.get_context('forkserver').Process(target=exec, args=(BURN,))\n"
        "    forked.start()\n    forked.join()\n"
    )
    for more in ((), ("-n", "2")):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations", "1", *more]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        total, each = (
            re.findall(rf"^ *([\d.]+) {what}", done.stdout, re.M) for what in ("CPU seconds", "CPU s  test_it.py")
        )
        assert float(total[0]) >= 2
        assert [float(cpu_s) >= 1 for cpu_s in each] == [True]
