"""Whatever README and the guides show as code or as a command is run, or parsed by what would run it, as it stands there.

Python is executed, block after block of a page; a block that begins with `# name.py` is a file of the page's folder, a
`test_*.py` among them is run by pytest. A line of shell is held against what it calls: `rollalloc` parses it, and carries it
out where that is cheap; targets of make, extras of pip, scripts and verl's keys must be there. What is none of these is in
`NOT_RUN`, with the reason. `stand_ins` has the files and names that pages take for granted.
"""

from __future__ import annotations

import ast
import builtins
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import typer

from rollalloc.cli import app as library
from rollalloc.drivers.verl.settings import read_settings
from rollalloc.tasks.files import TaskFiles
from rollalloc.train.config import Config
from rollalloc_lab.cli import app as laboratory
from shown import stand_ins
from test_tools import tool

ROOT = Path(__file__).parents[2]
installs = tool("installs")
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
PAGES += sorted(str(page.relative_to(ROOT)) for page in (ROOT / "lab").rglob("*.md") if page.parent.name != "log")
PAGES += sorted(str(page.relative_to(ROOT)) for page in (ROOT / "recipes").rglob("*.md"))
PROGRAMS = sorted(  # their heads say how they are run
    str(program.relative_to(ROOT))
    for folder in ("tools", "examples", "lab/benchmarks", "lab/experiments")
    for program in (ROOT / folder).glob("*.py")
)
# (page, beginning of a block): why it is not run. An entry that fits no block fails, too.
NOT_RUN = {
    ("README.md", "-from trl import GRPOTrainer"): "the difference between two scripts, not code",
    ("README.md", "recipe        reached"): "what `make demo` prints",
    ("CONTRIBUTING.md", "src/rollalloc/"): "the tree of the package",
    ("CONTRIBUTING.md", "engine.load_weights(version)"): "the calls of an engine, in order",
    ("docs/trl.md", "- trainer = GRPOTrainer("): "the difference between two lines, not code",
    ("lab/docs/simulate.md", "concurrency,seconds_per_token"): "a table of numbers",
    ("docs/tinker.md", "python3.12 -m venv sky"): "installs SkyRL from the net, gigabytes of it",
    ("docs/unsloth.md", "from unsloth import"): "run where Unsloth is: tests/drivers/unsloth/test_cpu_backend.py",
}
COMMAND_LINES = {"rollalloc": library, "rollalloc-lab": laboratory}
# Carried out for real: they take seconds at most and write into the temporary folder only.
CHEAP = {"features", "recipes", "waste", "data convert", "data environment"}
# Carried out as far as they check what they were given, names of sets, tiers, models and tasks by their own tables: here is
# what would then take long. `_reach` also looks at the runs that it gets.
BEGINS = {
    "train": ["rollalloc.train.train.train"],
    "compare": ["rollalloc.compare.compare.compare"],
    "bench": ["rollalloc_lab.bench.leaderboard.run_leaderboard"],
    "model": ["rollalloc.models.pretrained.make_model"],
    "report": ["rollalloc.runs.discovery.comparisons", "rollalloc.runs.verl_run.read_verl_run"],
    "simulate": ["rollalloc_lab.simulate.simulation.simulate"],
    "advise": [
        "rollalloc.waste.readers.read_log",
        "rollalloc.advise.sampled_profile.sample_profile",
        "rollalloc.advise.served.sample_served",
    ],
    "data prepare": ["rollalloc.data.prepare._verl_rows"],
    "data chat": ["rollalloc.tasks.chat.prepare"],
    "ladder": ["rollalloc_lab.tasks.ladder.questions"],
}
OWN = {"--model": "path/to/model", "--prompts": "train.parquet", "--reward": "my_reward.py:compute_score"}
E2E = {"docs/trl.md", "lab/docs/leaderboard.md", "CONTRIBUTING.md"}  # they train, or run pytest
PLAIN = {  # commands, and what must follow each; no folder but the clone's is known
    "git": r"clone REPOSITORY\b",
    "cd": r"rollalloc$",
    "source": r"\.venv/bin/activate$",
    "ray": r"start --(head|address)\b",
    "export": r"([A-Z_]+=\S*\s*)+$",
}
ELLIPSES = ("…", "...")
TINY = {"max_steps": 1, "max_completion_length": 4, "use_cpu": True, "bf16": False, "report_to": "none"}


_FENCED = re.compile(r"^( *)(`{3,}|~{3,})([^\n]*)\n(.*?)^\1\2`*~*$", re.DOTALL | re.MULTILINE)
_STARTS = r"(?:rollalloc|rollalloc-lab|make|python|pip|bash)\s"


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins, its language and its text."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str | None:
        """Name of the file that it is."""
        named = re.match(r"# ([\w/]+\.py)\n", self.text)
        return named[1] if named else None

    @property
    def excused(self) -> bool:
        return any(self.page == page and self.text.startswith(start) for page, start in NOT_RUN)


def blocks_of(page: str) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text = (ROOT / page).read_text("utf-8")
    found = re.finditer(_FENCED, text)
    return [Block(page, text.count("\n", 0, each.start()) + 1, each[3].strip(), dedent(each[4])) for each in found]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working directory with what pages take for granted; what is imported from there is forgotten after the test."""
    stand_ins.furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(".")
    for name in {Path(block.file).stem for block in BLOCKS if block.file} & sys.modules.keys():
        monkeypatch.delitem(sys.modules, name)  # another test's, or another page's
    before = set(sys.modules)
    yield
    for name in sys.modules.keys() - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(tmp_path):
            del sys.modules[name]


def test_what_is_excused_is_there() -> None:
    assert sum(block.excused for block in BLOCKS) == len(NOT_RUN)
    assert len(BLOCKS) > 50


# -------------------------------------------------------------------------------------------------------------- Python


def write_files(blocks: list[Block]) -> None:
    """Write the files that a page shows into the working directory."""
    files = [block for block in blocks if block.language == "python" and block.file]
    assert len({block.file for block in files}) == len(files), "a file is shown twice"
    for block in files:
        Path(str(block.file)).write_text(block.text, "utf-8")


def run_file(*arguments: str) -> None:
    """Python on a file of the page, in a process of its own."""
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{arguments}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def supply(code: ast.Module, known: dict[str, Any]) -> None:
    """Put stand-ins for what a block uses, and nothing before it defined, among the names."""
    made = stand_ins.names()
    bound = {node.id for node in ast.walk(code) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    used = {node.id for node in ast.walk(code) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    for name in used - bound - known.keys():
        if name in made and (name not in vars(builtins) or name == "format"):
            known[name] = made[name]()


@pytest.mark.parametrize("page", [pytest.param(page, marks=pytest.mark.e2e if page in E2E else ()) for page in PAGES])
def test_what_a_page_shows_runs(page: str, home: None, monkeypatch: pytest.MonkeyPatch) -> None:
    trl = pytest.importorskip("trl")
    configured = trl.GRPOConfig.__init__
    monkeypatch.setattr(trl.GRPOConfig, "__init__", lambda self, *args, **how: configured(self, *args, **how | TINY))
    blocks = blocks_of(page)
    write_files(blocks)
    known: dict[str, Any] = {"__name__": "shown"}
    for block in blocks:
        try:
            if not block.excused:
                run_block(block, known)
        except BaseException as error:
            error.add_note(f"in the block at {block}")
            raise


def test_the_script_of_the_readme_trains(home: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One short step, with a tiny model under the name that the script has."""
    trl = pytest.importorskip("trl")
    configured = trl.GRPOConfig.__init__
    monkeypatch.setattr(trl.GRPOConfig, "__init__", lambda self, *args, **how: configured(self, *args, **how | TINY))
    runpy.run_path(str(ROOT / "examples" / "trl_sums.py"))
    assert Path("runs/trl/checkpoint-1/model.safetensors").is_file()


def run_block(block: Block, known: dict[str, Any]) -> None:
    """Run a block, Python among the names that blocks before it defined."""
    if block.language != "python":
        check_shell(block)
    elif block.file:
        pytest_of = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
        run_file(*(pytest_of if block.file.startswith("test_") else ()), block.file)
    else:
        code = ast.parse("\n" * block.line + block.text, block.page)
        supply(code, known)
        exec(compile(code, str(ROOT / block.page), "exec", dont_inherit=True), known)


# --------------------------------------------------------------------------------------------------------------- shell


def lines_of(block: Block) -> Iterator[list[str]]:
    """Each command as words, without comments; of a transcript only what follows a prompt, `$ `."""
    text = re.sub(r"\\\n\s*", " ", block.text)
    lines = [line.strip() for line in text.splitlines()]
    lines = [line[2:] for line in lines if line.startswith("$ ")] or lines
    for line in lines:
        for command in re.split(r"\s&&\s", line):
            if words := shlex.split(command, comments=True):
                while re.fullmatch(r"\w+=.*", words[0]) and len(words) > 1:  # a variable before the command
                    words = words[1:]
                yield words


class _Reached(Exception):
    """A command has checked all it was given and would begin."""


def find_command(words: list[str]) -> tuple[Any, list[str], list[str]]:
    """The command that words call, its name, and the words after it."""
    program, name = words[0], list[str]()
    command: Any = typer.main.get_command(COMMAND_LINES[program].app)
    words = words[1:]
    while commands := getattr(command, "commands", None):
        assert words, "no command"
        assert words[0] in commands, f"{program} has no command {words[0]!r}"
        command, words, name = commands[words[0]], words[1:], [*name, words[0]]
    return command, name, words


def check_rollalloc(words: list[str]) -> None:
    """Parse a command, and carry it out as far as that is cheap."""
    words, elided = _completed(words)
    command, name, words = find_command(words)
    try:
        parsed = command.make_context(" ".join(name), list(words))
    except Exception as error:  # click's, of which typer may have a copy of its own
        if elided and type(error).__name__ == "MissingParameter":
            return
        raise AssertionError(f"{name}: {error}") from error
    if " ".join(name) in CHEAP and not elided:
        command.invoke(parsed)
    elif not elided or name[0] == "train":
        begin(command, parsed, BEGINS[" ".join(name)])


def begin(command: Any, parsed: Any, begins: list[str]) -> None:
    """Carry a command out up to what takes long; `bench --plan` ends before."""
    task = TaskFiles(
        Path(OWN["--model"]), Path("train.parquet"), Path("test.parquet"), OWN["--reward"], 8, single_answer=False
    )
    if parsed.params.get("export"):  # the file is there for what comes after the command
        Path(parsed.params["export"]).unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("rollalloc.tasks.presets.task_files", lambda *_: task)  # minutes to make
        for name in begins:
            patched.setattr(name, _reach)
        with nullcontext() if parsed.params.get("plan") else pytest.raises(_Reached):
            command.invoke(parsed)
    stand_ins.furnish_curriculum(Path.cwd())


def _completed(words: list[str]) -> tuple[list[str], bool]:
    """A command with what it leaves out, `…` and FOLDER, and what it calls optional; and whether it left something out."""
    elided = any(word in ELLIPSES or re.fullmatch(r"[A-Z_]{2,}…?", word) for word in words)
    words = [OWN[before] if word in ELLIPSES and before in OWN else word for before, word in pairwise(["", *words])]
    words = [word.strip("[]") if word.startswith("[--") or "[" not in word else word for word in words]
    words = [word for word in words if word not in ELLIPSES]
    if elided and words[1] == "train" and "--task" not in words:
        words += [word for option, value in OWN.items() if option not in words for word in (option, value)]
    return words, elided


def _reach(given: Any, *_: Any, **__: Any) -> None:
    for run in filter(lambda each: isinstance(each, Config), given if isinstance(given, list) else [given]):
        run.make_recipe()
        for file in (*run.prompts, run.heldout or "train.parquet"):
            assert Path(file).exists(), f"there is no {file}"
    raise _Reached


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    for word in words:
        assert word in targets or re.fullmatch(r"[A-Z]+=.*", word), f"make {word}: no such target"


def check_pip(words: list[str]) -> None:
    assert words[0] in ("install", "download"), f"pip {words[0]}"
    installs.parse(words[1:])


def check_verl(words: list[str]) -> None:
    """Keys of ours are what the driver reads, and configurations are there."""
    keys = dict(word.lstrip("+").split("=", 1) for word in words if "=" in word and not word.startswith("-"))
    given = {key.rpartition(".")[2]: value for key, value in keys.items() if key.startswith("trainer.v1.rollalloc.")}
    if section := {key: int(value) if value.isdigit() else value for key, value in given.items()}:
        read_settings(section, groups=128, n=section.get("n_pilot", 4) + section.get("n_commit", 4))
    if "--config-name" in words:
        folder = ROOT / words[words.index("--config-path") + 1].replace("$PWD/", "")
        assert (folder / f"{words[words.index('--config-name') + 1]}.yaml").is_file()
        for group, choice in keys.items():
            if "." not in group:
                assert (folder / group / f"{choice}.yaml").is_file(), f"{group}={choice}"


def check_python(words: list[str]) -> None:
    if words[:2] == ["-m", "venv"]:
        return
    if words[:1] == ["-m"] and words[1] in ("verl.trainer.main_ppo", "rollalloc.drivers.verl.check"):
        check_verl(words[2:])
    elif not Path(words[0]).is_file():  # else a file that the page itself shows
        check_script(ROOT / words[0], words[1:])


def check_script(script: Path, words: list[str]) -> None:
    """A program of the repository is there, and it or what it imports from its folder has these options and commands."""
    assert script.is_file(), f"python {script.relative_to(ROOT)}: no such file"
    source = script.read_text("utf-8")
    beside = re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE)
    source += "".join(each.read_text("utf-8") for name in beside if (each := script.with_name(f"{name}.py")).is_file())
    for word in words:
        name = word.partition("=")[0]
        if re.fullmatch(r"--[a-z-]+|[a-z_]+", name) and name != "--help":
            assert re.search(rf"[\"']{name}[\"']|\bdef {name}\b", source), f"python {script.name}: no {name!r}"


def check_bash(words: list[str]) -> None:
    """The example of verl, with a folder and verl's keys."""
    assert words[0] == "examples/verl/cpu.sh", f"bash {words[0]}"
    check_verl(words[2:])


def check_shell(block: Block) -> None:
    """Each line of a block, by what it calls."""
    checks = {"make": check_make, "pip": check_pip, "bash": check_bash}
    checks |= dict.fromkeys(("python", "python3", "python3.12", ".venv-verl/bin/python"), check_python)
    for words in lines_of(block):
        if words[0] in COMMAND_LINES:
            check_rollalloc(words)
        elif words[0] in checks:
            checks[words[0]](words[1:])
        elif words[0] in PLAIN:
            assert re.match(PLAIN[words[0]], " ".join(words[1:])), words
        else:
            keys = all(re.fullmatch(r"\+?[\w.]+=\S+", word) for word in words)
            assert keys, f"{words[0]!r} is neither checked nor excused"
            check_verl(words)


def inline_of(page: str) -> Iterator[tuple[int, list[str]]]:
    """Each command that stands within a sentence: its line, and its words."""
    text = (ROOT / page).read_text("utf-8")
    if page.endswith(".py"):
        text = ast.get_docstring(ast.parse(text)) or ""
        text = re.sub(
            rf"^ *({_STARTS}[^`\n]+?)(?:  .*)?$", r"`\1`", text, flags=re.MULTILINE
        )  # a line that is a command
    else:
        text = re.sub(_FENCED, lambda block: "\n" * block[0].count("\n"), text)
    for command in re.finditer(rf"`({_STARTS}[^`]+)`", text):
        yield text.count("\n", 0, command.start()) + 1, shlex.split(command[1], comments=True)


@pytest.mark.parametrize("page", [*PAGES, *PROGRAMS])
def test_a_command_within_a_sentence_calls_what_there_is(page: str, home: None) -> None:
    for number, words in inline_of(page):
        try:
            check_inline(words)
        except BaseException as error:
            error.add_note(f"{page}:{number}: {' '.join(words)}")
            raise


def check_inline(words: list[str]) -> None:
    """A command that may be no more than its name, as in "`rollalloc train` reads it"."""
    if words[0] in COMMAND_LINES:
        command, _, rest = find_command(_completed(words)[0])
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        for word in rest:
            assert not word.startswith("--") or word.partition("=")[0] in known, f"no option {word}"
    else:
        check_shell(Block("", 1, "", shlex.join(words).replace("COMMAND…", "")))


def test_what_the_makefile_runs_is_there(home: None) -> None:
    targets = ["demo", "demo-all", "laptop", "verl-demo", "mutants", "package", "installs"]
    shown = ["make", "--dry-run", "--always-make", *targets]
    recipes = subprocess.run(shown, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    commands = [line for line in recipes.replace("\\\n", " ").splitlines() if ".venv/bin/rollalloc" in line]
    assert len(commands) >= 5
    for command in commands:
        words = shlex.split(command)
        check_rollalloc(["rollalloc", *words[words.index(".venv/bin/rollalloc") + 1 :]])
    for file in re.findall(r"(?<![\w/.-])(?:tools|examples)/[\w/]+\.(?:py|sh)", recipes):
        assert (ROOT / file).is_file(), f"make runs {file}, which is not there"


@pytest.mark.parametrize(
    "text",
    [
        "rollalloc train --task skills/late --recipe foresigt",
        "rollalloc train --task skills/late --exponent 3",
        "rollalloc compare --task skills/late --recipes grpo --set grpo.groups=0",
        "rollalloc tain",
        "rollalloc data convert none.jsonl --question q --answer a --out x.jsonl",
        "rollalloc data environment gsm8k --tasks 500 --out x.parquet",
        "rollalloc data prepare gsm9k --out data",
        "rollalloc data chat sumz",
        "rollalloc model smollm9 runs/new",
        "rollalloc-lab bench --tier huge --plan",
        "rollalloc report runs/none",
        "rollalloc-lab simulate --recipes grpo --gpus none",
        "rollalloc advise --model path/to/model --prompts none.parquet --reward my_reward.py:compute_score",
        "make tests",
        "pip install '.[nativ]'",
        "pip instal '.[native]'",
        "python examples/none.py",
        "python -m verl.trainer.main_ppo +trainer.v1.rollalloc.recip=dapo",
        "sing a song",
    ],
)
def test_a_command_that_is_wrong_is_found(text: str, home: None) -> None:
    with pytest.raises((AssertionError, ValueError, OSError, ImportError)):
        check_shell(Block("README.md", 1, "", text))


@pytest.mark.parametrize(
    "text",
    [
        "rollalloc repot",
        "rollalloc train --modle x",
        "make tests",
        "python tools/none.py",
        "python tools/readme.py --drawn",
        "python lab/experiments/scale.py tabel OUT",
    ],
)
def test_a_command_within_a_sentence_that_is_wrong_is_found(text: str, home: None) -> None:
    with pytest.raises(AssertionError):
        check_inline(shlex.split(text))
