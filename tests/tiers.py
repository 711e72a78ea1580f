"""A plugin of pytest: which tests are the tier `e2e`, and how much CPU a session took.

Tests need the same CPU seconds on a machine that is busy and on one that is not; no test fails by them.
`--durations N` also names the N tests that took most.
"""

from __future__ import annotations

import os
import resource
import signal
from collections import Counter
from fnmatch import fnmatch
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

# One pattern of test ids, without parameters, per line; what stands after # is a comment.
TABLE = Path(__file__).with_name("e2e.txt")


def patterns(text: str) -> list[str]:
    return [name for line in text.splitlines() if (name := line.partition("#")[0].strip())]


def cpu_seconds() -> float:
    """User and system time of this process and of all its children that it has waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Tiers:
    """Marks what the table names, and adds up the CPU seconds of a session and of each test.

    A worker of pytest-xdist says at its end what it took; to the main process it is a child like any other, so that only
    what that one took itself is added.
    """

    def __init__(self) -> None:
        self.last_s = 0.0
        self.workers_s: list[float] = []
        self.tests_s: Counter[str] = Counter()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        table = patterns(TABLE.read_text("utf-8"))
        for item in items:
            name = item.nodeid.partition("[")[0]
            if any(fnmatch(name, pattern) for pattern in table):
                item.add_marker(pytest.mark.e2e)
        self.last_s = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Any:
        report = yield
        now_s = cpu_seconds()
        report.cpu_s, self.last_s = now_s - self.last_s, now_s
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.tests_s[report.nodeid] += getattr(report, "cpu_s", 0.0)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.workers_s.append(getattr(node, "workeroutput", {}).get("cpu_s", 0.0))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        # Of `forks`: it has waited for what it forked, and only once it has ended itself are those seconds counted.
        if (server := forkserver._forkserver._forkserver_pid) is not None:
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cpu_s"] = cpu_seconds()

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        own_s = usage.ru_utime + usage.ru_stime if self.workers_s else cpu_seconds()
        terminalreporter.write_line(f"{own_s + sum(self.workers_s):.0f} CPU seconds")
        if (count := config.option.durations) is not None:
            for name, cpu_s in self.tests_s.most_common(count or None):
                terminalreporter.write_line(f"{cpu_s:8.2f} CPU s  {name}")
