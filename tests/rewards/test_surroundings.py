"""What a sample changed of its process is put back, or the process is found unfit; each in a process of its own."""

import builtins
import decimal
import os
import pickle
import resource
import signal
import sys
import tempfile
import threading
import time

import pytest

from rollalloc.rewards import function
from rollalloc.rewards._surroundings import Surroundings


def alarm(*_):
    raise KeyboardInterrupt


def ring_often():
    signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)


def limit_files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def close_standard_descriptors():
    os.closerange(0, 3)


def move_to_nepal():
    os.environ["TZ"] = "NPT-5:45"
    time.tzset()


PUT_BACK = {
    "timers": (lambda: signal.setitimer(signal.ITIMER_PROF, 3600), lambda: signal.getitimer(signal.ITIMER_PROF)[0]),
    "handlers": (lambda: signal.signal(signal.SIGUSR1, alarm), lambda: signal.getsignal(signal.SIGUSR1)),
    "a timer that rings meanwhile": (ring_often, lambda: signal.getitimer(signal.ITIMER_REAL)[0]),
    "mask": (
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]),
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, []),
    ),
    "limits": (limit_files, lambda: resource.getrlimit(resource.RLIMIT_NOFILE)),
    "folder": (lambda: os.chdir("/"), os.getcwd),
    "environment": (lambda: os.environ.update(PATH="elsewhere", NEW="1"), lambda: dict(os.environ)),
    "the mapping of the environment": (lambda: setattr(os, "environ", {}), lambda: dict(os.environ)),
    "umask": (lambda: os.umask(0o777), lambda: os.umask(0o022)),
    "trace": (lambda: sys.settrace(lambda *_: None), sys.gettrace),
    "profile": (lambda: sys.setprofile(lambda *_: None), sys.getprofile),
    "recursion limit": (lambda: sys.setrecursionlimit(3000), sys.getrecursionlimit),
    "decimal": (lambda: setattr(decimal.getcontext(), "prec", 2), lambda: decimal.getcontext().prec),
    "streams": (lambda: setattr(sys, "stdout", None), lambda: sys.stdout),
    "built-ins": (lambda: setattr(builtins, "print", None), lambda: builtins.print),
    "a built-in that putting back would use": (lambda: setattr(builtins, "range", None), lambda: builtins.range),
    "hooks": (lambda: setattr(sys, "excepthook", None), lambda: sys.excepthook),
    "os": (lambda: setattr(os, "kill", None), lambda: os.kill),
    "time": (lambda: setattr(time, "sleep", None), lambda: time.sleep),
    "unpickling": (lambda: setattr(pickle, "loads", None), lambda: pickle.loads),
    "files that exist": (lambda: setattr(os.path, "exists", None), lambda: os.path.exists),
    "search path": (lambda: sys.path.insert(0, "elsewhere"), lambda: list(sys.path)),
    "the list of the search path": (lambda: setattr(sys, "path", ["elsewhere"]), lambda: list(sys.path)),
    "finders": (lambda: sys.meta_path.insert(0, None), lambda: list(sys.meta_path)),
    "hooks of the search path": (lambda: setattr(sys, "path_hooks", []), lambda: list(sys.path_hooks)),
    "time zone": (move_to_nepal, lambda: time.localtime(0)[:5]),
    "the scorer": (lambda: setattr(function, "to_outcome", None), lambda: function.to_outcome),
    "a module replaced": (lambda: sys.modules.update(json=None), lambda: sys.modules["json"]),
}


@pytest.mark.parametrize("what", PUT_BACK)
def test_what_was_changed_is_put_back(what, forked):
    change, look = PUT_BACK[what]

    def act():
        os.umask(0o022)
        before = look()
        surroundings = Surroundings()
        for _ in range(2):  # what is put back after one sample must not be changed by the next one
            change()
            is_fit = surroundings.restore()
        return is_fit and look() == before

    # On a busy machine an alarm may ring before `restore` does anything: twice in 500.
    assert any(forked(lambda: not act()) == 0 for _ in range(3 if change is ring_often else 1))


def test_standard_descriptors_are_null_again(forked):
    def act():
        surroundings = Surroundings()
        close_standard_descriptors()
        with tempfile.TemporaryFile() as file:  # takes a number that print writes to
            surroundings.restore()
            return file.fileno() < 3 and all(os.path.sameopenfile(0, descriptor) for descriptor in range(3))

    assert forked(lambda: not act()) == 0


def start_threads():
    for _ in range(200):
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()


UNFIT = {
    "hard limit": lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
    "audit hook": lambda: sys.addaudithook(lambda *_: None),
    "closed stream": lambda: sys.stdout.close(),
    "modules gone": lambda: sys.modules.clear(),
    "threads": start_threads,
    "files": lambda: [os.dup(0) for _ in range(200)],
}


@pytest.mark.parametrize("what", UNFIT)
def test_what_cannot_be_put_back_makes_the_process_unfit(what, forked):
    def act():
        limit_files() if what != "files" else resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
        if what == "hard limit":
            resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
            os.setuid(65534)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        surroundings = Surroundings()
        fit_before = surroundings.restore()
        UNFIT[what]()
        return fit_before and not surroundings.restore()

    assert forked(lambda: not act()) == 0


def test_a_finder_that_a_module_adds_may_stay(forked):
    def act():
        surroundings = Surroundings()
        sys.meta_path.append(None)
        return surroundings.restore() and sys.meta_path.pop() is None

    assert forked(lambda: not act()) == 0
