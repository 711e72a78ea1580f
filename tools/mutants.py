"""Whether the tests see the defects that they are there for: each of tests/mutants.toml is put into a copy of the sources.

python tools/mutants.py [--passed] [WORD]   all of them, or those whose file, killer or meaning has that word in it

A test that fails anyway kills nothing, so all killers are run without a mutant first. `--passed` leaves this out, where they
have just passed on the same sources.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from compileall import compile_dir
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from py_compile import PycInvalidationMode
from queue import SimpleQueue
from shutil import copytree, ignore_patterns
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, Self

ROOT = Path(__file__).parents[1]
FAILED = 1  # pytest's exit status: tests ran, and some failed
TRIES = 3  # a killer may need luck, as where threads race: told, but no reason to fail
LIMIT_S = 120  # for a killer alone; all of them together have this for each
# Imported once, before any killer runs: for many killers this takes longer than the test.
SLOW_IMPORTS = ("hypothesis", "numpy", "torch", "transformers.modeling_utils", "trl.trainer.grpo_trainer")
_SERVE = "--serve"


@dataclass(frozen=True)
class Mutant:
    """A defect.

    Attributes:
        breaks: what does not hold any more.
        file: below `src/rollalloc`, or below `lab/src/rollalloc_lab` as "lab/...".
        original: text that stands there once.
        mutant: what takes its place.
        killer: id of the test that must fail.
    """

    breaks: str
    file: str
    original: str
    mutant: str
    killer: str


def load(file: Path) -> list[Mutant]:
    """The mutants of a file."""
    return [Mutant(**each) for each in tomllib.loads(file.read_text("utf-8"))["mutant"]]


def module_of(mutant: Mutant, library: Path, laboratory: Path) -> Path:
    """The file that a mutant changes, by the folders of both packages."""
    in_lab = mutant.file.startswith("lab/")
    return laboratory / mutant.file.removeprefix("lab/") if in_lab else library / mutant.file


@contextmanager
def applied(mutant: Mutant, sources: Path) -> Iterator[None]:
    """The packages in a folder with the defect in them, for as long as the context lasts.

    Raises:
        ValueError: the original text is not there exactly once.
    """
    file = module_of(mutant, sources / "rollalloc", sources / "rollalloc_lab")
    source = file.read_text("utf-8") if file.exists() else ""
    if (times := source.count(mutant.original)) != 1:
        raise ValueError(f"expected this text once in {mutant.file}, found it {times} times: {mutant.original.strip()}")
    file.write_text(source.replace(mutant.original, mutant.mutant), "utf-8")
    try:
        yield
    finally:
        file.write_text(source, "utf-8")


def environment(sources: Path) -> dict[str, str]:
    """The environment in which tests run these sources."""
    # A file may change twice within a second and to the same length, by which Python's caches would not know it: none is
    # written, and those that are there know a source by its digest.
    return os.environ | {"PYTHONPATH": str(sources), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def all_pass(tests: Sequence[str], sources: Path, root: Path, jobs: int) -> tuple[int, str]:
    """Pytest's exit status and output for all killers at once, of sources without a mutant."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", str(jobs if jobs > 1 else 0)]
    try:
        done = subprocess.run(
            [*command, *tests],
            cwd=root,
            env=environment(sources),
            capture_output=True,
            text=True,
            timeout=LIMIT_S * len(tests),
        )
    except subprocess.TimeoutExpired:
        return FAILED, "hangs"
    return done.returncode, done.stdout + done.stderr


class Server:
    """A process that runs one test at a time, each in a fork of itself, so that slow packages are imported once.

    Args:
        sources: the folder with the packages that the tests import; the process itself never imports it.
        root: the folder in which pytest runs.
        imports: packages to import beforehand.
    """

    def __init__(self, sources: Path, root: Path, imports: Sequence[str]) -> None:
        self.sources = sources
        self._process = subprocess.Popen(
            [sys.executable, __file__, _SERVE, *imports],
            cwd=root,
            env=environment(sources),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.communicate()  # closes its input, so it ends

    def status(self, test: str) -> tuple[int, str]:
        """Pytest's exit status and output for a test; one that hangs has failed."""
        assert self._process.stdin
        assert self._process.stdout
        print(test, file=self._process.stdin, flush=True)
        code, output = json.loads(self._process.stdout.readline())
        return code, output


def serve(imports: Sequence[str]) -> None:
    """Run each test that is named on standard input; write a line of JSON for each, its status and its output."""
    for name in ("pytest", *imports):
        with suppress(ImportError):  # then only the tests that need it fail
            __import__(name)
    for plugin in entry_points(group="pytest11"):
        plugin.load()
    gc.freeze()  # else each fork looks through, and so copies, what was imported here
    for line in sys.stdin:
        with TemporaryFile("w+") as output:
            child = os.fork()
            if child == 0:
                _run(line.strip(), output)
            code = _ended(child)
            output.seek(0)
            print(json.dumps((code, output.read())), flush=True)


def _run(test: str, output: Any) -> None:
    """Run a test in this forked process, and end it."""
    import pytest

    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
        # Without those that are slow, which CI does not run: as a killer, such a test is told like one that is not there.
        chosen = ["-x", "-m", "not slow", test]
        os._exit(pytest.main(["-q", "-p", "no:cacheprovider", "--assert=plain", "-n", "0", *chosen]))
    finally:
        os._exit(1)


def _ended(child: int) -> int:
    """The exit status of a child, once it has ended. One that hangs is killed with what it started."""
    until = time.monotonic() + LIMIT_S
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > until:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return FAILED
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1])


def fault(mutant: Mutant, server: Server) -> str | None:
    """What is wrong with a mutant or its killer; None where it dies."""
    try:
        with applied(mutant, server.sources):
            code, output = server.status(mutant.killer)
    except ValueError as error:
        return str(error)
    if code == 0:
        return "passes, so the mutant lives"
    return None if code == FAILED else f"did not run (pytest's exit status {code}):\n{output[-2000:]}"


def main(
    word: str = "",
    root: Path = ROOT,
    jobs: int = int(os.environ.get("JOBS", "2")),
    imports: Sequence[str] = SLOW_IMPORTS,
    passed: bool = False,
) -> int:
    """Put each mutant to the test, as many at a time as there are jobs; 0 where all die.

    Args:
        word: that a mutant has in its file, killer or meaning.
        root: of the repository.
        jobs: mutants at a time.
        imports: packages that each server imports beforehand.
        passed: whether the killers are known to pass without a mutant.
    """
    mutants = load(root / "tests" / "mutants.toml")
    mutants = [each for each in mutants if word in f"{each.file} {each.killer} {each.breaks}"]
    if not mutants:
        print(f"no mutant has {word!r} in its file, killer or meaning")
        return 1
    with TemporaryDirectory() as folder, ExitStack() as stack:
        copies = [Path(folder) / str(job) for job in range(jobs)]
        for sources in copies:
            for package in (root / "src" / "rollalloc", root / "lab" / "src" / "rollalloc_lab"):
                if package.exists():  # a test of this tool has no laboratory
                    copytree(package, sources / package.name, ignore=ignore_patterns("__pycache__"))
            compile_dir(sources, quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        killers = sorted({each.killer for each in mutants})
        code, output = (0, "") if passed else all_pass(killers, copies[0], root, jobs)
        if code:
            print(f"without a mutant the killers do not pass (pytest's exit status {code}):\n{output[-4000:]}")
            return 1
        servers: SimpleQueue[Server] = SimpleQueue()
        for sources in copies:
            servers.put(stack.enter_context(Server(sources, root, imports)))

        def tried(mutant: Mutant) -> list[str]:
            """What was wrong at each try, until the mutant dies."""
            server, found = servers.get(), list[str]()
            try:
                while len(found) < TRIES and (what := fault(mutant, server)) is not None:
                    found.append(what)
                return found
            finally:
                servers.put(server)

        wrong, pool = [], ThreadPoolExecutor(jobs)
        for mutant, found in zip(mutants, pool.map(tried, mutants), strict=True):
            if len(found) < TRIES:
                luck = f" (at try {len(found) + 1}: {mutant.killer} needs luck)" if found else ""
                print(f"died  {mutant.file}: {mutant.breaks}{luck}", flush=True)
            else:
                wrong.append(f"WRONG  {mutant.file}: {mutant.breaks}\n       {mutant.killer}: {found[-1]}")
                print(wrong[-1], flush=True)
    # Once more: of a long output only the end may be kept.
    print("\n".join([*wrong, f"{len(mutants) - len(wrong)} of {len(mutants)} mutants died"]))
    return int(bool(wrong))


if __name__ == "__main__":
    if sys.argv[1:2] == [_SERVE]:
        serve(sys.argv[2:])
    else:
        words = [word for word in sys.argv[1:] if word != "--passed"]
        sys.exit(main("".join(words[:1]), passed="--passed" in sys.argv))
