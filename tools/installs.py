"""Checks that every install command in README, guides, recipes, examples, constraints and Makefile can be carried out.

    python tools/installs.py   # about half a minute

Each command is parsed, pip itself reads each constraints file, and uv resolves what each command asks for, on every Python
that the command is for. Nothing is installed, so no GPU is needed. uv does not read pip's settings; the tool passes it the
folders of wheels in PIP_FIND_LINKS. If the index has no CPU build of PyTorch, verl's CPU environment cannot be resolved: set
UV_TORCH_BACKEND=cpu. tests/shown checks the same commands without a network.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NoReturn

from packaging.requirements import InvalidRequirement, Requirement

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PYTHONS = tuple(name.rpartition(" ")[2] for name in PROJECT["classifiers"] if ":: Python :: 3." in name)
PAGES = ("README.md", "CONTRIBUTING.md", "docs/*.md", "recipes/**/*.md", "recipes/**/Containerfile")
PAGES += ("examples/**/*.py", "examples/**/*.sh", "examples/**/*.md", "constraints/*.txt")
# Environments of the Makefile: `make --dry-run` prints their commands with the variables filled in.
ENVIRONMENTS = (
    ".venv/ready",
    ".venv-docs/ready",
    ".venv-verl/ready",
    ".venv-unsloth/ready",
    ".trl-1.0/ready",
    ".trl-vllm/ready",
)
COMMAND = re.compile(
    r"(?:\b(python3\.\d+)\b.*)?(?:^|[`\s/])pip3?(?: -[-\w]+)* (?:install|download) ([^`\n#]+)", re.MULTILINE
)
LOCAL = re.compile(r"\.(?:/lab|\[([\w,-]+)\])?")  # this project, with extras, and its laboratory


@dataclass(frozen=True)
class Install:
    """An install command.

    Attributes:
        requirements: what is asked for; one that begins with "." is this project.
        constraints: files that pin versions, relative to the root of the repository.
        pythons: versions of Python that it is for.
    """

    requirements: tuple[str, ...]
    constraints: tuple[str, ...]
    pythons: tuple[str, ...]


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"pip install: {message}")


def parse(words: Sequence[str], python: str = "") -> Install:
    """What the words after `pip install` ask for.

    Args:
        words: as a shell splits them.
        python: version of Python that the command names, or "".

    Raises:
        ValueError: an option or a requirement that this tool does not know or pip would not take, an extra or a constraints
            file that does not exist, or `rollalloc` by name, which is on no package index.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("requirements", nargs="*")
    parser.add_argument("--editable", "-e", action="append", default=[])
    parser.add_argument("--constraint", "-c", action="append", default=[])
    for option in ("--target", "--torch-backend"):
        parser.add_argument(option)
    for flag in ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-cache-dir"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_intermixed_args(list(words))
    requirements = tuple(_requirement(text) for text in (*options.requirements, *options.editable))
    if not requirements:
        raise ValueError("pip install: nothing to install is named")
    ran_with = {version for file in options.constraint for version in _constraints(file)}
    pythons = (python,) if python else tuple(version for version in PYTHONS if not ran_with or version in ran_with)
    return Install(requirements, tuple(options.constraint), pythons)


def _requirement(text: str) -> str:
    """A requirement that pip takes; this project "from git" is the project here.

    Raises:
        ValueError: it is none, or this project with an extra that does not exist, or by name alone.
    """
    if (local := LOCAL.fullmatch(text)) is None:
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            raise ValueError(f"{text!r} is no requirement: {error}") from None
        if requirement.name != PROJECT["name"]:
            return text
        if not (requirement.url or "").startswith("git+"):
            raise ValueError(f"{text}: {requirement.name} is on no package index; write '.[extra]', from a clone")
        return _requirement(f".[{','.join(sorted(requirement.extras))}]" if requirement.extras else ".")
    if unknown := set((local[1] or "").split(",")) - {"", *PROJECT["optional-dependencies"]}:
        raise ValueError(f"{text}: pyproject.toml has no extra {', '.join(sorted(unknown))}")
    return text


def _constraints(file: str) -> list[str]:
    """Versions of Python that the head of a constraints file names; none: all.

    Raises:
        ValueError: the file does not exist, or a line is neither a comment nor a pinned requirement.
    """
    path = ROOT / file
    if not path.is_file():
        raise ValueError(f"there is no constraints file {file}")
    lines = path.read_text("utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if (text := line.partition("#")[0].strip()) == "":
            continue
        try:
            pinned = any(clause.operator == "==" for clause in Requirement(text).specifier)
        except InvalidRequirement as error:
            raise ValueError(f"{file}, line {number}: {text!r} is no requirement: {error}") from None
        if not pinned:
            raise ValueError(f"{file}, line {number}: {text!r} pins no version")
    return re.findall(r"Python (3\.\d+)", "\n".join(line for line in lines if line.startswith("#")))


def pages() -> list[Path]:
    """What shows install commands, by kinds of file: Python keeps its caches beside the examples."""
    return sorted(path for pattern in PAGES for path in ROOT.glob(pattern))


def shown() -> Iterator[tuple[str, list[str], str]]:
    """Each install command that a page shows: where it stands, its words after `install`, and the Python that it names."""
    texts = {str(page.relative_to(ROOT)): page.read_text("utf-8") for page in pages()}
    make = ["make", "--dry-run", "--always-make", *ENVIRONMENTS]
    texts["Makefile"] = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for page, text in texts.items():
        for number, line in enumerate(re.sub(r"\\\n\s*", " ", text).splitlines(), 1):
            for command in COMMAND.finditer(line):
                words = command[2].split("&&")[0]
                yield f"{page}:{number}", shlex.split(words), (command[1] or "").removeprefix("python")


def pip_reads(file: str) -> str:
    """What pip says against a constraints file; "" where it takes it. pip itself is installed, so nothing is looked up."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--no-deps",
        "--no-index",
        "--constraint",
        file,
        "pip",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


def resolve(install: Install, python: str) -> str:
    """Why the requirements cannot be met together on this Python; "" where they can."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--python-version", python, "--python"]
    command += [sys.executable, *_wheels(), "-"]
    for file in install.constraints:
        command += ["--constraint", file]
    wanted = "".join(f"{requirement}\n" for requirement in install.requirements)
    done = subprocess.run(command, cwd=ROOT, input=wanted, capture_output=True, text=True, check=False)
    return f"Python {python}: {done.stderr}" if done.returncode else ""


def _wheels() -> list[str]:
    """Folders of wheels that pip is set to look into, as options of uv."""
    folders = os.environ.get("PIP_FIND_LINKS", "").split()
    return [word for folder in folders for word in ("--find-links", folder)]


def main() -> int:
    """Check all; 0 where nothing is wrong."""
    wrong: list[str] = []
    places: dict[Install, list[str]] = {}
    for place, words, python in shown():
        try:
            places.setdefault(parse(words, python), []).append(place)
        except ValueError as error:
            wrong.append(f"{place}: {error}")
    for path in sorted((ROOT / "constraints").glob("*.txt")):
        file = str(path.relative_to(ROOT))
        if said := pip_reads(file):
            wrong.append(f"{file}: pip cannot read it: {said}")
        if not any(file in install.constraints for install in places):
            wrong.append(f"{file}: no page shows the command that takes it")
    asked = [(install, python) for install in places for python in install.pythons]
    with ThreadPoolExecutor(4) as pool:  # each waits for the package index most of its time
        answers = list(pool.map(lambda one: resolve(*one), asked))
    for install, answered in groupby(zip(asked, answers, strict=True), key=lambda pair: pair[0][0]):
        failures = [said for _, said in answered if said]
        command = " ".join([*install.requirements, *(f"under {file}" for file in install.constraints)])
        print(f"{'WRONG' if failures else 'ok   '}  {command} ({', '.join(install.pythons)})", flush=True)
        wrong += [f"{', '.join(places[install])}: {said}" for said in failures]
    print("\n".join(wrong) or f"{sum(map(len, places.values()))} install commands can be carried out")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
