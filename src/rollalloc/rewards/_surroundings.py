"""Undoes changes that a reward function makes to its process, so that they do not affect the next sample."""

from __future__ import annotations

import builtins
import decimal
import os
import os.path
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from operator import itemgetter
from threading import active_count
from typing import Any

from rollalloc.rewards._channel import most_descriptors

_SPARE_THREADS = 128  # number of threads that a function may leave running after a sample, for example in a pool
_OPEN_SHARE = 0.25  # share of the allowed open files that a function may leave open after a sample
# Modules with functions that mocks and guards for untrusted code often replace. This package's modules are added.
_OFTEN_PATCHED = (builtins, os, os.path, pickle, shutil, signal, subprocess, sys, time)
_OWN = __name__.rpartition(".")[0]
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_LIMITS = sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})
_SIGNALS = range(1, 32)  # the standard signals, without real-time signals
_ATTEMPTS = 10
# 30 times faster than signal.getsignal, which creates enums.
_getsignal: Callable[[int], Any] = import_module("_signal").getsignal
_setitimer = signal.setitimer  # stored now, because a sample may replace it later


class Surroundings:
    """The state of this process when the object is created. `restore` restores this state after each sample.

    The state consists of: timers, signal handlers and the signal mask; resource limits; the three standard streams; the
    working directory, environment, umask and time zone; the interpreter's hooks and recursion limit; the module search
    path and finders; the decimal context; the table of modules; and functions of three kinds of modules: the built-ins,
    modules for processes and files, and this package. Other modules are not restored, because a function may keep caches,
    pools and connections in them.
    """

    def __init__(self) -> None:
        own = [module for name, module in list(sys.modules.items()) if name.rpartition(".")[0] == _OWN]
        self._tables = [_Table(vars(module), callable) for module in (*_OFTEN_PATCHED, *own)]
        # Only top-level modules: to check every submodule would take longer than a simple reward.
        self._tables.append(_Table(sys.modules, lambda module: "." not in getattr(module, "__name__", ".")))
        self._modules = len(sys.modules)
        self._search_path = list(sys.path)
        self._finders: list[tuple[str, list[Any], list[Any]]] = [
            (name, getattr(sys, name), list(getattr(sys, name))) for name in ("meta_path", "path_hooks")
        ]
        self._time_zone = _time_zone()
        self._was_hooked = False
        sys.addaudithook(self._note_hook)  # notes whether a sample adds an audit hook, because hooks cannot be removed
        self._streams = sys.stdin, sys.stdout, sys.stderr
        self._hooks = sys.gettrace(), sys.getprofile()
        self._recursion_limit = sys.getrecursionlimit()
        self._decimal = decimal.getcontext().copy()
        self._handlers = {number: _getsignal(number) for number in _SIGNALS}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._limits = {kind: resource.getrlimit(kind) for kind in _LIMITS}
        self._environment = dict(os.environ)
        self._encoded = dict(vars(os.environ)["_data"])
        self._directory = _directory()
        self._umask = os.umask(0o077)
        os.umask(self._umask)
        self._null = os.stat(os.devnull)
        self._threads = active_count()
        self._most_open = max(_lowest_free_descriptor(), _OPEN_SHARE * most_descriptors())

    def restore(self) -> bool:
        """Undo the changes of the last sample. Return False if this fails, or if too many threads or files are open."""
        for _ in range(_ATTEMPTS):
            try:
                self._restore()
                return self._is_fit()
            except BaseException:  # a signal handler or hook of the sample may still be active, and may raise anything
                continue
        return False

    def _restore(self) -> None:
        for timer in _TIMERS:  # first, because a timer of 0.1 ms would interrupt the other steps
            _setitimer(timer, 0)
        sys.setrecursionlimit(self._recursion_limit)
        for table in self._tables:
            table.restore()
        if (sys.gettrace(), sys.getprofile()) != self._hooks:
            sys.settrace(self._hooks[0])
            sys.setprofile(self._hooks[1])
        for number, handler in self._handlers.items():
            if _getsignal(number) is not handler and handler is not None:
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for kind, limits in self._limits.items():
            if resource.getrlimit(kind) != limits:
                resource.setrlimit(kind, limits)
        self._restore_streams()
        decimal.setcontext(self._decimal.copy())
        if vars(os.environ)["_data"] != self._encoded:  # a hundred times faster than comparing the decoded values
            os.environ.clear()
            os.environ.update(self._environment)
        if _time_zone() != self._time_zone:
            time.tzset()
        self._restore_search_path()
        if self._directory is not None and _directory() != self._directory:
            os.chdir(self._directory)
        os.umask(self._umask)

    def _restore_search_path(self) -> None:
        """Restore the module search path. Finders that were appended, for example by an imported module, stay."""
        if sys.path != self._search_path:
            sys.path[:] = self._search_path
        for name, finders, original in self._finders:
            setattr(sys, name, finders)
            if finders[: len(original)] != original:
                finders[:] = original

    def _note_hook(self, event: str, _: object) -> None:
        if event == "sys.addaudithook":
            self._was_hooked = True

    def _restore_streams(self) -> None:
        sys.stdin, sys.stdout, sys.stderr = self._streams
        for descriptor in range(3):
            try:
                status = os.fstat(descriptor)
            except OSError:
                status = None
            if status is None or (status.st_dev, status.st_ino) != (self._null.st_dev, self._null.st_ino):
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, descriptor)
                if null != descriptor:
                    os.close(null)

    def _is_fit(self) -> bool:
        return (
            not self._was_hooked
            and not any(stream.closed for stream in self._streams)
            and len(sys.modules) >= self._modules
            and active_count() <= self._threads + _SPARE_THREADS
            and _lowest_free_descriptor() <= self._most_open
        )


class _Table:
    """The original values of some entries of a dictionary. Entries that are added later, for example by late imports,
    are not removed.
    """

    def __init__(self, table: dict[str, Any], restores: Callable[[Any], bool]) -> None:
        self._table = table
        self._original = {name: value for name, value in table.items() if restores(value)}
        self._look_up = itemgetter(*self._original)
        self._values = self._look_up(table)

    def restore(self) -> None:
        try:
            # Fast: this runs in C, and compares identities first.
            changed = self._look_up(self._table) != self._values
        except KeyError:
            changed = True
        if changed:
            self._table.update(self._original)


def _time_zone() -> tuple[object, ...]:
    return time.tzname, time.timezone, time.altzone


def _directory() -> str | None:
    """The working directory; None if it was deleted."""
    with suppress(OSError):
        return os.getcwd()
    return None


def _lowest_free_descriptor() -> int:
    """The lowest free file descriptor, which shows how many files were left open."""
    with suppress(OSError):
        descriptor = os.dup(0)
        os.close(descriptor)
        return descriptor
    return sys.maxsize
