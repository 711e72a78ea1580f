"""Builds the wheel and the sdist and tries them as a user would: `make package`.

    python tools/package.py                          # a minute: built, checked, installed bare, each extra resolved
    python tools/package.py --install native,tasks   # and these extras installed, each into an empty environment

Needs a clone, and an environment with the extra `dev`. Builds into dist/. uv takes its settings from the environment: with
UV_TORCH_BACKEND=cpu an installation has PyTorch without its gigabytes of CUDA.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from time import monotonic
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
CLASSIFIERS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["classifiers"]
PYTHONS = [each.rpartition(" ")[2] for each in CLASSIFIERS if ":: Python :: 3." in each]
# What a person would miss who found it gone, whatever git says.
NEEDED = (
    "rollalloc/py.typed",
    "rollalloc/tasks/tuned/skills-late.json",
    "rollalloc/report/templates/report.html.j2",
    "rollalloc/report/templates/page.js",
)
# Imports what needs no extra, every module of it.
CORE = """
import importlib, pkgutil, rollalloc
from rollalloc import core, predict, recipes, rules, testing
for package in (core, predict, rules, testing):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
print(rollalloc.__version__, rollalloc.__file__)
"""
# Reads what the wheel has besides Python.
FILES = """
from jinja2 import PackageLoader
from rollalloc.tasks.presets import tuned_of
assert tuned_of("skills/late")
assert {"report.html.j2", "page.js"} <= set(PackageLoader("rollalloc.report").list_templates())
"""
# Each extra → what must work where it is installed; a test holds the names against pyproject.toml.
TRIES = {
    "native": ("import rollalloc.cli.app, rollalloc.train.train, rollalloc.compare.compare", FILES),
    "rewards": ("import rollalloc.rewards.math",),
    "tasks": ("from rollalloc.tasks.gym import *; import reasoning_gym",),
    "lora": ("import peft, rollalloc.train.train",),
    "gguf": ("import gguf, rollalloc.models.pretrained",),
    "smollm2": ("import gguf, rollalloc.models.pretrained",),
    "data": ("import datasets, rollalloc.data.prepare",),
    "track": ("import tensorboard",),
    "trl": ("import rollalloc.drivers.trl",),
    "served": ("import rollalloc.generate.openai_server, openai",),
    "environments": ("import rollalloc.rewards.environment",),
    "tinker": ("import rollalloc.drivers.tinker.trainer, tinker",),
    "verl": ("import rollalloc.drivers.verl.trainer",),
    "docs": ("import mkdocs, material, mkdocstrings_handlers.python",),
    "dev": ("import rollalloc.drivers.trl, rollalloc.rewards.math, pytest, hypothesis, build, twine",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", default="", metavar="EXTRA,…", help="extras to install for real, or all")
    given = parser.parse_args()
    chosen = list(TRIES) if given.install == "all" else [each for each in given.install.split(",") if each]
    if unknown := set(chosen) - set(TRIES):
        parser.error(f"expected extras of {listed(TRIES)}, or all, got {listed(unknown)}")
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME"):  # the wheel is tried, not this clone
        os.environ.pop(name, None)
    with step("built and checked"):
        tracked = files_in_git()
        wheel, sdist = build()
        run([sys.executable, "-m", "twine", "check", "--strict", wheel, sdist])
        check_contents(wheel, sdist, tracked)
    with tempfile.TemporaryDirectory(prefix="rollalloc-package-") as scratch:
        with step("installed without extras, and its commands"):
            try_commands(install_bare(Path(scratch) / "bare", wheel))
        with step("each extra resolved"):
            resolve_all(wheel)
        for extra in chosen:
            with step(f"[{extra}] installed"):
                install_extra(Path(scratch) / extra, wheel, extra)


@contextmanager
def step(name: str) -> Iterator[None]:
    """Says what is done, and in how many seconds it was."""
    print(f"{name} …", flush=True)
    start = monotonic()
    yield
    print(f"{name}: ok, {monotonic() - start:.1f} s", flush=True)


def run(command: Sequence[str | Path], *, fails: bool = False, cwd: Path | None = None) -> str:
    """What a command says, run away from this clone; where it fails, or, with `fails`, does not, this ends with that."""
    where = cwd or Path(tempfile.gettempdir())
    done = subprocess.run([str(part) for part in command], cwd=where, capture_output=True, text=True, check=False)
    if (done.returncode != 0) != fails:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}exit code {done.returncode}")
    return done.stdout + done.stderr


def files_in_git() -> set[str]:
    """What git tracks here: what a package may be made of."""
    if not (ROOT / ".git").exists():
        sys.exit(f"{ROOT} is no clone: what a package may contain is what git tracks")
    return set(run(["git", "ls-files", "-z"], cwd=ROOT).rstrip("\0").split("\0"))


def build() -> tuple[Path, Path]:
    """The wheel, built out of the sdist, and the sdist."""
    before = {path: path.stat().st_mtime_ns for path in DIST.glob("*")}
    run([sys.executable, "-m", "build", "--outdir", DIST, ROOT])
    made = [path for path in DIST.glob("*") if path.stat().st_mtime_ns != before.get(path)]
    wheel, sdist = ([path for path in made if path.name.endswith(end)] for end in (".whl", ".tar.gz"))
    if (len(wheel), len(sdist)) != (1, 1):
        sys.exit(f"expected one wheel and one sdist, got {', '.join(path.name for path in made)}")
    return wheel[0], sdist[0]


def check_contents(wheel: Path, sdist: Path, tracked: set[str]) -> None:
    """The sdist has what git tracks, so that its tests can be run; the wheel the package, its metadata and the license."""
    with tarfile.open(sdist) as packed:
        inside = {member.name.partition("/")[2] for member in packed if not member.isdir()}
    same(sdist.name, inside - {"PKG-INFO"}, tracked)
    name = "-".join(wheel.name.split("-")[:2]) + ".dist-info/"
    about = {name + each for each in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    package = {path.removeprefix("src/") for path in tracked if path.startswith("src/rollalloc/")}
    with ZipFile(wheel) as packed:
        same(wheel.name, set(packed.namelist()), package | about)
        if missing := set(NEEDED) - set(packed.namelist()):
            sys.exit(f"{wheel.name} lacks {', '.join(sorted(missing))}")


def same(name: str, inside: set[str], expected: set[str]) -> None:
    if inside != expected:
        sys.exit(
            f"{name} must hold what git tracks; too much: {listed(inside - expected)}; missing: "
            f"{listed(expected - inside)}. Commit or remove the file, or see [tool.hatch.build] in pyproject.toml"
        )


def listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def install_bare(folder: Path, wheel: Path) -> Path:
    """The wheel and what it depends on, by pip: the core imports, and the command says what it needs."""
    run([sys.executable, "-m", "venv", folder])
    python = folder / "bin" / "python"
    run([python, "-m", "pip", "install", "--quiet", wheel])
    says = run([python, "-c", CORE])
    version = re.escape(wheel.name.split("-")[1])
    if not re.fullmatch(rf"{version} {re.escape(str(folder))}\S+", says.strip()):
        sys.exit(f"expected version {version} from {folder}, got {says}")
    says = run([folder / "bin" / "rollalloc", "--help"], fails=True)
    if "Traceback" in says or "pip install 'rollalloc[native]'" not in says:
        sys.exit(f"expected one line on the extra native, got {says}")
    return python


def try_commands(python: Path) -> None:
    """With the dependencies of this environment beside it the wheel's command works, and finds its files."""
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    beside = [path for path in sys.path if path.endswith("site-packages")]
    (site / "beside.pth").write_text("\n".join(beside) + "\n")  # its own come before them
    if "advise" not in run([python.parent / "rollalloc", "--help"]):
        sys.exit("rollalloc --help does not list its commands")
    run([python.parent / "rollalloc", "recipes"])
    run([python, "-c", FILES])


def resolve_all(wheel: Path) -> None:
    """The requirements of each extra can be met together, on every Python; nothing is installed."""
    asked = list(product(TRIES, PYTHONS))
    with ThreadPoolExecutor(4) as pool:  # each waits for the package index most of its time
        found = list(pool.map(lambda each: resolve(wheel, *each), asked))
    wrong = [says for _, says in found if says]
    for (extra, version), (count, _) in zip(asked, found, strict=True):
        print(f"  {extra}, {version}: {count or 'no'} packages", flush=True)
    if wrong:
        sys.exit("\n".join(wrong))


def resolve(wheel: Path, extra: str, version: str) -> tuple[int, str]:
    """How many packages the extra takes on this Python, and why it cannot be had, or ""."""
    command = ["uv", "pip", "compile", "--quiet", "--python-version", version, "--python", sys.executable, "-"]
    wanted = f"rollalloc[{extra}] @ {wheel.as_uri()}\n"
    done = subprocess.run([sys.executable, "-m", *command], input=wanted, capture_output=True, text=True, check=False)
    if done.returncode:
        return 0, f"rollalloc[{extra}] cannot be installed on Python {version}:\n{done.stderr}"
    return len(re.findall(r"^\w", done.stdout, re.MULTILINE)), ""


def install_extra(folder: Path, wheel: Path, extra: str) -> None:
    """Into an empty environment, and what the extra is for imports there."""
    uv = [sys.executable, "-m", "uv"]
    run([*uv, "venv", "--quiet", "--python", sys.executable, folder])
    python = folder / "bin" / "python"
    run([*uv, "pip", "install", "--quiet", "--python", python, f"rollalloc[{extra}] @ {wheel.as_uri()}"])
    run([*uv, "pip", "check", "--python", python])
    for code in TRIES[extra]:
        run([python, "-c", code])
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
