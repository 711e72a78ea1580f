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
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from operator import itemgetter
from threading import active_count
from typing import Any

from rollalloc.rewards._channel import most_descriptors

_SPARE_THREADS = 128  # number of threads that a function may leave running after a sample, for example in a pool
_OPEN_SHARE = 0.25  # share of the allowed open files that a function may leave open after a sample
# Modules with functions that mocks and guards for untrusted code often replace. This package's modules are added.
_OFTEN_PATCHED = (builtins, os, os.path, pickle, shutil, signal, subprocess, sys, time)
_VARIABLES = {"environ", "environb", "stdin", "stdout", "stderr", "meta_path", "path_hooks"}  # restored like functions
_OWN = __name__.rpartition(".")[0]
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_LIMITS = sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})
_SIGNALS = range(1, 32)  # the standard signals, without real-time signals
_ATTEMPTS = range(10)
# 30 times faster than signal.getsignal, which creates enums.
_getsignal: Callable[[int], Any] = import_module("_signal").getsignal
_Part = tuple[Callable[[], Any], Callable[[Any], Any]]  # reads a part of the process's state; restores what was read
_always = object  # reads a part that is restored after every sample: no two of these objects are equal


class Surroundings:
    """The state of this process when the object is created. `restore` restores this state after each sample.

    `_parts` lists the parts of the state. Of most modules nothing is restored, because a function may keep caches, pools and
    connections in them.
    """

    def __init__(self) -> None:
        self._was_hooked = False
        sys.addaudithook(self._note_hook)  # notes whether a sample adds an audit hook, because hooks cannot be removed
        self._streams = sys.stdin, sys.stdout, sys.stderr
        self._modules = len(sys.modules)
        self._threads = active_count()
        self._most_open = max(_lowest_free_descriptor(), _OPEN_SHARE * most_descriptors())
        self._parts = [(read, write, read()) for read, write in _parts()]

    def restore(self) -> bool:
        """Undo the changes of the last sample. Return False if this fails, or if too many threads or files are open."""
        for _ in _ATTEMPTS:
            try:
                for read, write, original in self._parts:
                    if read() != original:
                        write(original)
                return self._is_fit()
            except BaseException:  # a signal handler or hook of the sample may still be active, and may raise anything
                continue
        return False

    def _note_hook(self, event: str, _: object) -> None:
        if event == "sys.addaudithook":
            self._was_hooked = True

    def _is_fit(self) -> bool:
        return (
            not self._was_hooked
            and not any(stream.closed for stream in self._streams)
            and len(sys.modules) >= self._modules
            and active_count() <= self._threads + _SPARE_THREADS
            and _lowest_free_descriptor() <= self._most_open
        )


def _parts() -> Iterator[_Part]:
    """The parts of this process's state, in the order in which they are restored."""
    # Timers are first, because a timer of 0.1 ms would interrupt the other steps; a sample may have replaced the function.
    set_timer = signal.setitimer
    yield _always, lambda _: [set_timer(timer, 0) for timer in _TIMERS]
    yield sys.getrecursionlimit, sys.setrecursionlimit
    own = [module for name, module in list(sys.modules.items()) if name.rpartition(".")[0] == _OWN]
    for table in map(vars, (*_OFTEN_PATCHED, *own)):
        yield _entries(table, [name for name, value in table.items() if callable(value) or name in _VARIABLES])
    # Only top-level modules: to check every submodule would take longer than a simple reward.
    top = [name for name, module in sys.modules.items() if "." not in getattr(module, "__name__", ".")]
    yield _entries(sys.modules, top)
    yield sys.gettrace, sys.settrace
    yield sys.getprofile, sys.setprofile
    for number in _SIGNALS:
        if _getsignal(number) is not None:
            yield partial(_getsignal, number), partial(signal.signal, number)
    yield partial(signal.pthread_sigmask, signal.SIG_BLOCK, ()), partial(signal.pthread_sigmask, signal.SIG_SETMASK)
    for kind in _LIMITS:
        yield partial(resource.getrlimit, kind), partial(resource.setrlimit, kind)
    yield lambda: [_file_of(descriptor) for descriptor in range(3)], _open_null
    arithmetic = decimal.getcontext().copy()
    yield _always, lambda _: decimal.setcontext(arithmetic.copy())
    yield lambda: dict(vars(os.environ)["_data"]), _set_environment  # a hundred times faster than the decoded values
    yield lambda: (time.tzname, time.timezone, time.altzone), lambda _: time.tzset()
    yield lambda: sys.path[:], lambda original: _refill(sys.path, original)
    for finders in (sys.meta_path, sys.path_hooks):  # appended finders stay, for example those of an imported module
        yield partial(finders.__getitem__, slice(len(finders))), partial(_refill, finders)
    if _directory() is not None:
        yield _directory, os.chdir
    umask = os.umask(0o077)
    os.umask(umask)
    yield _always, lambda _: os.umask(umask)


def _entries(table: dict[str, Any], names: list[str]) -> _Part:
    """Some entries of a dictionary. Entries that are added later, for example by late imports, are not removed."""
    original = {name: table[name] for name in names}
    look_up = itemgetter(*names)

    def read() -> tuple[Any, ...]:
        try:
            return look_up(table)  # fast: runs in C, and a comparison of two tuples compares identities first
        except KeyError:
            return ()

    return read, lambda _: table.update(original)


def _refill(items: list[Any], original: list[Any]) -> None:
    items[:] = original


def _set_environment(encoded: dict[bytes, bytes]) -> None:
    os.environb.clear()
    os.environb.update(encoded)


def _open_null(_: object) -> None:
    """Open the null device as the three standard descriptors, as they are when a worker starts."""
    for descriptor in range(3):
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, descriptor)
        if null != descriptor:
            os.close(null)


def _file_of(descriptor: int) -> tuple[int, int] | None:
    """The identity of an open file; None if it is closed."""
    with suppress(OSError):
        status = os.fstat(descriptor)
        return status.st_dev, status.st_ino
    return None


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
