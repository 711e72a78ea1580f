"""Whether the tests see the defects that they are there for: each of tests/mutants.toml is put into a copy of the sources.

python tools/mutants.py [WORD]   all of them, or those whose file, killer or meaning has that word in it
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from shutil import copytree, ignore_patterns
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
FAILED = 1  # pytest's exit status: tests ran, and some failed
LIMIT_S = 120  # for a killer alone; all of them together have this for each


@dataclass(frozen=True)
class Mutant:
    """A defect.

    Attributes:
        breaks: what does not hold any more.
        file: below `src/rollalloc`.
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


@contextmanager
def applied(mutant: Mutant, package: Path) -> Iterator[None]:
    """The package with the defect in it, for as long as the context lasts.

    Raises:
        ValueError: the original text is not there exactly once.
    """
    file = package / mutant.file
    source = file.read_text("utf-8") if file.exists() else ""
    if (times := source.count(mutant.original)) != 1:
        raise ValueError(f"expected this text once in {mutant.file}, found it {times} times: {mutant.original.strip()}")
    file.write_text(source.replace(mutant.original, mutant.mutant), "utf-8")
    try:
        yield
    finally:
        file.write_text(source, "utf-8")


def status(tests: Sequence[str], sources: Path, root: Path, jobs: int = 1) -> tuple[int, str]:
    """Pytest's exit status and output for some tests of these sources; those that hang have failed."""
    # A file may change twice within a second and to the same length, by which Python's caches would not know it.
    environment = os.environ | {"PYTHONPATH": str(sources), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", str(jobs if jobs > 1 else 0)]
    limit_s = LIMIT_S * len(tests)
    try:
        done = subprocess.run(
            [*command, *tests], cwd=root, env=environment, capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return FAILED, "hangs"
    return done.returncode, done.stdout + done.stderr


def fault(mutant: Mutant, sources: Path, root: Path) -> str | None:
    """What is wrong with a mutant or its killer; None where it dies."""
    try:
        with applied(mutant, sources / "rollalloc"):
            code, output = status([mutant.killer], sources, root)
    except ValueError as error:
        return str(error)
    if code == 0:
        return f"lives: {mutant.killer} passes"
    return None if code == FAILED else f"its killer did not run (pytest's exit status {code}):\n{output[-2000:]}"


def main(word: str = "", root: Path = ROOT, jobs: int = int(os.environ.get("JOBS", "2"))) -> int:
    """Put each mutant to the test, as many at a time as there are jobs; 0 where all die."""
    mutants = load(root / "tests" / "mutants.toml")
    mutants = [each for each in mutants if word in f"{each.file} {each.killer} {each.breaks}"]
    if not mutants:
        print(f"no mutant has {word!r} in its file, killer or meaning")
        return 1
    with TemporaryDirectory() as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for job in range(jobs):
            sources = Path(folder) / str(job)
            copytree(root / "src" / "rollalloc", sources / "rollalloc", ignore=ignore_patterns("__pycache__"))
            copies.put(sources)
        code, output = status(sorted({each.killer for each in mutants}), sources, root, jobs)
        if code:
            print(f"without a mutant the killers do not pass (pytest's exit status {code}):\n{output[-4000:]}")
            return 1

        def tried(mutant: Mutant) -> str | None:
            sources = copies.get()
            try:
                return fault(mutant, sources, root)
            finally:
                copies.put(sources)

        wrong, pool = 0, ThreadPoolExecutor(jobs)
        for mutant, what in zip(mutants, pool.map(tried, mutants), strict=True):
            wrong += what is not None
            print(f"{'died' if what is None else 'WRONG'}  {mutant.file}: {mutant.breaks}", flush=True)
            if what is not None:
                print(f"       {what}", flush=True)
    print(f"{len(mutants) - wrong} of {len(mutants)} mutants died")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
