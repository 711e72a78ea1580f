"""A reward whose samples leave their process in disorder, among ordinary ones that must not notice.

A sample's completion names what it does. The ordinary ones answer with a value of their own, so that an answer that
went to another sample shows, and rely on what the hostile ones put out of order. Loaded by this file's path.
"""

from __future__ import annotations

import asyncio
import atexit
import builtins
import ctypes
import decimal
import faulthandler
import gc
import importlib
import json
import math
import multiprocessing
import os
import pickle
import pty
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np

HOSTILE: dict[str, Callable[[], Any]] = {}
OVERDUE = ("hang", "spin_in_c", "coroutine_never_ends", "fork_and_hang", "stop_itself", "ignore_signals_and_hang")
_SOON_S = 0.02  # after which what was left behind strikes, in the middle of another sample
_kept: list[Any] = []
_HOME = os.getcwd()
_HOUR = time.localtime(0).tm_hour
os.environ["IN_ORDER"] = "yes"


def hostile(function: Callable[[], Any]) -> Callable[[], Any]:
    HOSTILE[function.__name__] = function
    return function


def reward(*, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Any:
    if data_source == "hostile":
        return HOSTILE[solution_str]()
    return ORDINARY[solution_str](float(ground_truth))


# Ordinary samples: each gives back its number where all is in order


def plain(number: float) -> float:
    return number


def printed(number: float) -> float:
    print(number, "x" * 1000)
    print(number, file=sys.stderr, flush=True)
    return json.loads(json.dumps({"number": number}))["number"]


def napped(number: float) -> float:
    time.sleep(2 * _SOON_S)
    return number


def exact(number: float) -> float:
    return float(decimal.Decimal(str(number)) / decimal.Decimal(3) * decimal.Decimal(3)) if number else 0.0


def relative(number: float) -> dict[str, float]:
    return {"score": number, "acc": float((os.getcwd(), os.environ["IN_ORDER"]) == (_HOME, "yes"))}


def looked_up(number: float) -> float:
    return -1.0 if os.path.exists("/no/such/file") else number


def imported(number: float) -> float:
    sys.modules.pop("colorsys", None)
    return number if importlib.import_module("colorsys").ONE_THIRD else -1.0


def in_time(number: float) -> float:
    return number if time.localtime(0).tm_hour == _HOUR else -1.0


def alarmed(number: float) -> float:
    """As math-verify does."""

    def ring(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, _SOON_S)
    try:
        time.sleep(10)
    except TimeoutError:
        return number
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return -1.0


def forked(number: float) -> float:
    child = os.fork()
    if child == 0:
        sys.exit(3)
    return number if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3 else -1.0


def deep(number: float) -> float:
    return number if _depth(500) == 500 else -1.0


def awaited(number: float) -> Any:
    async def answer() -> float:
        await asyncio.sleep(0)
        return number

    return answer()


def wrote(number: float) -> float:
    with tempfile.TemporaryFile("w+") as file:
        file.write(str(number))
        file.seek(0)
        return float(file.read())


ORDINARY = {
    function.__name__: function
    for function in (
        plain,
        printed,
        napped,
        exact,
        relative,
        forked,
        deep,
        awaited,
        wrote,
        looked_up,
        imported,
        in_time,
        alarmed,
    )
}


def _depth(levels: int) -> int:
    return 0 if levels == 0 else 1 + _depth(levels - 1)


# Children that come back


@hostile
def fork_return() -> float:
    return 0.25 if os.fork() == 0 else 0.75


@hostile
def fork_raise() -> float:
    if os.fork() == 0:
        raise ValueError("in the child")
    return 0.75


@hostile
def fork_sys_exit() -> float:
    if os.fork() == 0:
        sys.exit(0)
    return 0.75


@hostile
def fork_os_exit() -> float:
    if os.fork() == 0:
        os._exit(0)
    return 0.75


@hostile
def fork_keyboard_interrupt() -> float:
    if os.fork() == 0:
        raise KeyboardInterrupt
    return 0.75


@hostile
def fork_generator_exit() -> float:
    if os.fork() == 0:
        raise GeneratorExit
    return 0.75


@hostile
def fork_return_late() -> float:
    if os.fork() == 0:
        time.sleep(_SOON_S)
        return 0.25
    return 0.75


@hostile
def fork_many() -> float:
    for _ in range(4):
        os.fork()
    return 0.25


@hostile
def fork_parent_exits() -> float:
    if os.fork():
        os._exit(0)
    return 0.25


@hostile
def fork_and_hang() -> float:
    if os.fork() == 0:
        time.sleep(3600)
    os.wait()
    return 0.75


@hostile
def fork_in_coroutine() -> Any:
    async def answer() -> float:
        return 0.25 if os.fork() == 0 else 0.75

    return answer()


@hostile
def fork_in_thread() -> float:
    thread = threading.Thread(target=os.fork)
    thread.start()
    thread.join()
    return 0.75


@hostile
def fork_in_c() -> float:
    """No hook of the interpreter's sees it."""
    return 0.25 if ctypes.CDLL(None).fork() == 0 else 0.75


@hostile
def fork_in_repr() -> Any:
    class Answer:
        def __repr__(self) -> str:
            return str(os.fork())

    return Answer()


@hostile
def fork_in_float() -> Any:
    class Answer(float):
        def __float__(self) -> float:
            return 0.25 if os.fork() == 0 else 0.75

    return Answer(0.5)


@hostile
def fork_pty() -> float:
    return 0.25 if pty.fork()[0] == 0 else 0.75


@hostile
def fork_double() -> float:
    """As daemons do."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 256)
            time.sleep(3600)
        return 0.25
    return 0.75


@hostile
def fork_kills_parent() -> float:
    if os.fork() == 0:
        time.sleep(_SOON_S)
        os.kill(os.getppid(), signal.SIGKILL)
        return 0.25
    return 0.75


@hostile
def fork_stops_parent() -> float:
    if os.fork() == 0:
        time.sleep(_SOON_S)
        os.kill(os.getppid(), signal.SIGTERM)
    return 0.75


# Processes and programs


@hostile
def pool() -> float:
    with multiprocessing.get_context("fork").Pool(2) as workers:
        return sum(workers.map(abs, [-0.25, -0.5]))


@hostile
def pool_left_open() -> float:
    workers = multiprocessing.get_context("fork").Pool(2)
    _kept.append(workers)
    return sum(workers.map(abs, [-0.25, -0.5]))


@hostile
def process_left_running() -> float:
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,)).start()
    return 0.75


@hostile
def program() -> float:
    return 0.75 if subprocess.run(["true"]).returncode == 0 else 0.25


@hostile
def program_left_running() -> float:
    subprocess.Popen(["sleep", "3600"], start_new_session=True)
    return 0.75


@hostile
def program_with_all_descriptors() -> float:
    subprocess.Popen(["sh", "-c", "for f in /proc/self/fd/*; do echo 1 > $f; done"], close_fds=False)
    return 0.75


@hostile
def replaced_by_program() -> None:
    os.execvp("true", ["true"])


@hostile
def replaced_by_program_that_stays() -> None:
    os.execvp("sleep", ["sleep", "3600"])


@hostile
def spawned() -> float:
    os.posix_spawnp("true", ["true"], os.environ)
    return 0.75


# Ends and signals


@hostile
def os_exit() -> None:
    os._exit(0)


@hostile
def sys_exit() -> None:
    sys.exit(0)


@hostile
def keyboard_interrupt() -> None:
    raise KeyboardInterrupt


@hostile
def system_abort() -> None:
    os.abort()


@hostile
def segmentation_fault() -> None:
    ctypes.string_at(0)


@hostile
def kill_parent() -> float:
    os.kill(os.getppid(), signal.SIGKILL)
    return 0.75


@hostile
def terminate_parent() -> float:
    os.kill(os.getppid(), signal.SIGTERM)
    return 0.75


@hostile
def stop_parent() -> float:
    os.kill(os.getppid(), signal.SIGSTOP)
    return 0.75


@hostile
def kill_group() -> None:
    os.killpg(0, signal.SIGKILL)


@hostile
def stop_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@hostile
def alarm_left() -> float:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, _SOON_S)
    return 0.75


@hostile
def raising_alarm_left() -> float:
    def ring(*_: Any) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, _SOON_S, 0.0005)
    return 0.75


@hostile
def raising_timer_at_once() -> float:
    def ring(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0001, 0.0001)
    return 0.75


@hostile
def signals_blocked() -> float:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    return 0.75


@hostile
def ignore_signals_and_hang() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(3600)


@hostile
def children_ignored() -> float:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    return 0.75


# Threads that stay


@hostile
def thread_exits_later() -> float:
    threading.Timer(_SOON_S, os._exit, (0,)).start()
    return 0.75


@hostile
def thread_spins() -> float:
    def spin() -> None:
        while True:
            pass

    threading.Thread(target=spin, daemon=True).start()
    return 0.75


@hostile
def threads_left() -> float:
    for _ in range(20):
        threading.Thread(target=time.sleep, args=(3600,)).start()
    return 0.75


@hostile
def thread_forks_later() -> float:
    threading.Timer(_SOON_S, os.fork).start()
    return 0.75


@hostile
def thread_changes_folder() -> float:
    pool = ThreadPoolExecutor(1)
    pool.submit(os.chdir, "/").result()
    return 0.75


@hostile
def dump_and_exit_later() -> float:
    faulthandler.dump_traceback_later(_SOON_S, exit=True, file=os.open(os.devnull, os.O_WRONLY))
    return 0.75


# Files and descriptors


@hostile
def close_some() -> float:
    os.closerange(3, 256)
    return 0.75


@hostile
def close_all() -> float:
    os.closerange(0, 65_536)
    return 0.75


@hostile
def close_streams() -> float:
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()
    return 0.75


@hostile
def close_standard_descriptors() -> float:
    os.closerange(0, 3)
    _kept.append(os.open(os.devnull, os.O_RDWR))
    return 0.75


@hostile
def duplicate_over_all() -> float:
    file = os.open(os.devnull, os.O_RDWR)
    for descriptor in _descriptors():
        if descriptor != file:
            os.dup2(file, descriptor)
    return 0.75


@hostile
def scribble_on_all() -> float:
    for descriptor in _descriptors():
        with suppress(OSError):
            os.write(descriptor, b'\0\0\0\x0e["ready", 1.0]')
    return 0.75


@hostile
def child_scribbles_on_all() -> float:
    child = ctypes.CDLL(None).fork()
    if child == 0:
        scribble_on_all()
        os._exit(0)
    os.waitpid(child, 0)
    return 0.75


@hostile
def read_from_all() -> float:
    for descriptor in _descriptors():
        with suppress(OSError):
            os.set_blocking(descriptor, False)
            os.read(descriptor, 65_536)
    return 0.75


@hostile
def close_sockets() -> float:
    for found in gc.get_objects():
        if isinstance(found, socket.socket):
            found.close()
    return 0.75


@hostile
def leave_files_open() -> float:
    _kept.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(100))
    return 0.75


@hostile
def flood() -> float:
    for descriptor in (1, 2):
        os.write(descriptor, b"flood" * 200_000)
    print("flood" * 200_000)
    return 0.75


@hostile
def streams_are_none() -> float:
    sys.stdin = sys.stdout = sys.stderr = None
    return 0.75


# What the process holds


@hostile
def elsewhere() -> float:
    os.chdir("/")
    return 0.75


@hostile
def nowhere() -> float:
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    shutil.rmtree(folder)
    return 0.75


@hostile
def environment_changed() -> float:
    os.environ["IN_ORDER"] = "no"
    return 0.75


@hostile
def environment_cleared() -> float:
    os.environ.clear()
    return 0.75


@hostile
def arithmetic_changed() -> float:
    decimal.getcontext().prec = 2
    decimal.getcontext().rounding = decimal.ROUND_UP
    return 0.75


@hostile
def traced() -> float:
    def trace(*_: Any) -> Any:
        raise RuntimeError("traced")

    sys.settrace(trace)
    sys.setprofile(trace)
    return 0.75


@hostile
def shallow() -> float:
    sys.setrecursionlimit(60)
    return 0.75


@hostile
def too_deep() -> None:
    sys.setrecursionlimit(10**9)

    def deeper() -> None:
        deeper()

    deeper()


@hostile
def recursion() -> None:
    recursion()


@hostile
def guarded_against_itself() -> float:
    """What HumanEval's `reliability_guard` does to the process that it is called in."""
    builtins.exit = builtins.quit = builtins.open = None
    for name in ("kill", "system", "putenv", "remove", "fork", "getcwd", "chdir", "read", "write", "_exit", "getpid"):
        setattr(os, name, None)
    shutil.rmtree = subprocess.Popen = None
    modules: Any = sys.modules
    for name in ("json", "resource", "psutil"):
        modules[name] = None
    resource.setrlimit(resource.RLIMIT_STACK, (2**20, 2**20))
    return 0.75


@hostile
def modules_removed() -> float:
    for name in ("json", "decimal", "tempfile", "asyncio", "pickle"):
        sys.modules.pop(name, None)
    return 0.75


@hostile
def modules_cleared() -> float:
    sys.modules.clear()
    return 0.75


@hostile
def time_stands_still() -> float:
    time.time = time.monotonic = lambda: 0.0
    time.sleep = lambda _: None
    return 0.75


@hostile
def hook_left() -> float:
    def hook(*_: Any) -> None:
        os._exit(9)

    sys.excepthook = sys.unraisablehook = hook
    return 0.75


@hostile
def exits_replaced() -> float:
    sys.exit = sys.getrecursionlimit = None
    return 0.75


@hostile
def loops_replaced() -> float:
    def run(*_: Any) -> None:
        raise RuntimeError("no loop here")

    asyncio.run = asyncio.sleep = run
    return 0.75


@hostile
def numbers_replaced() -> float:
    json.dumps = tempfile.TemporaryFile = None
    return 0.75


@hostile
def unpickling_replaced() -> float:
    pickle.loads = lambda _: ("ordinary", "plain", "-1", {})
    return 0.75


@hostile
def existence_replaced() -> float:
    os.path.exists = lambda _: True
    return 0.75


@hostile
def search_path_changed() -> float:
    sys.path[:] = []
    return 0.75


@hostile
def finders_changed() -> float:
    class Finder:
        @staticmethod
        def find_spec(*_: Any) -> None:
            raise ImportError("nothing is found")

    sys.meta_path.insert(0, Finder)  # pyright: ignore[reportArgumentType]
    sys.path_importer_cache.clear()
    sys.path_hooks.clear()
    return 0.75


@hostile
def finders_replaced() -> float:
    sys.meta_path = []
    return 0.75


@hostile
def time_zone_changed() -> float:
    os.environ["TZ"] = "Asia/Kathmandu" if _HOUR != 5 else "UTC"
    time.tzset()
    return 0.75


@hostile
def audit_hook_left() -> float:
    def hook(event: str, _: Any) -> None:
        if event in ("open", "os.fork", "tempfile.mkstemp", "import"):
            raise RuntimeError(event)

    sys.addaudithook(hook)
    return 0.75


@hostile
def scorer_replaced() -> float:
    modules: Any = sys.modules
    function = modules["rollalloc.rewards.function"]
    function.to_outcome = lambda _: function.Scored(0.5, 0.5)
    modules["rollalloc.rewards._worker"].score_sample = lambda *_: function.Scored(0.25, 0.25)
    return 0.75


@hostile
def files_limited() -> float:
    resource.setrlimit(resource.RLIMIT_NOFILE, (8, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return 0.75


@hostile
def file_size_limited_for_good() -> float:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    return 0.75


@hostile
def warnings_are_errors() -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.warn("an error", stacklevel=1)
    return 0.75


@hostile
def at_exit() -> float:
    atexit.register(time.sleep, 3600)
    return 0.75


# Time, memory, and odd answers


@hostile
def hang() -> None:
    time.sleep(3600)


@hostile
def spin_in_c() -> None:
    _kept.append(9**9**9**9)


@hostile
def coroutine_never_ends() -> Any:
    async def answer() -> None:
        while True:
            await asyncio.sleep(0)

    return answer()


@hostile
def memory_bomb() -> None:
    _kept.append(bytearray(2**34))


@hostile
def memory_leak() -> float:
    _kept.append(b"\1" * 2**27)
    return 0.75


@hostile
def huge_answer() -> dict[str, Any]:
    return {"score": 0.75, "log": ["x" * 2**20] * 1000}


@hostile
def huge_text() -> str:
    return "1" * 2**26


@hostile
def huge_error() -> None:
    raise ValueError("x" * 2**26)


@hostile
def huge_number() -> int:
    return 10**5000


@hostile
def not_a_number() -> dict[str, float]:
    return {"score": 0.75, "acc": math.nan}


@hostile
def infinite() -> float:
    return -math.inf


@hostile
def text() -> str:
    return "0.75"


@hostile
def boolean() -> bool:
    return True


@hostile
def numpy_scalar() -> Any:
    return np.float32(0.75)


@hostile
def numpy_array() -> Any:
    return np.ones(3)


@hostile
def generator() -> Any:
    yield 0.75


@hostile
def odd_float() -> Any:
    class Odd(float):
        def __float__(self) -> float:
            raise KeyboardInterrupt

        def __repr__(self) -> str:
            sys.exit(0)

    return Odd(0.75)


@hostile
def odd_error() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise self

    raise Odd


@hostile
def odd_dict() -> Any:
    class Odd(dict[str, Any]):
        def get(self, *_: Any) -> Any:
            os._exit(0)

    return Odd()


def _descriptors() -> list[int]:
    """Those that are open, the worker's channel among them: no accident finds it otherwise."""
    return [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]
