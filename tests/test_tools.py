"""What `make package`, `make installs` and `make mutants` refuse, the rest of them is run; what CI says of its stages."""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
ABOUT = "rollalloc-1.0.dist-info/"
TRACKED = {"README.md", "src/rollalloc/__init__.py", "tests/test_all.py"}


def tool(name: str) -> ModuleType:
    return module_at(ROOT / "tools" / f"{name}.py")


def module_at(file: Path) -> ModuleType:
    """A program of the repository as a module, under a name that no package has."""
    spec = spec_from_file_location(f"{file.stem}_of_{file.parent.name}", file)
    assert spec
    assert spec.loader
    made = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = tool("package")
    tracked = {f"src/{name}" for name in made.NEEDED}
    monkeypatch.setattr(sys.modules[__name__], "TRACKED", TRACKED | tracked)
    return made


def packed(
    folder: Path, *, wheel: set[str] = frozenset(), sdist: set[str] = frozenset(), lacks: str = ""
) -> list[Path]:
    """A wheel and an sdist of what is tracked, with these files more, and one of the wheel's fewer."""
    about = [ABOUT + name for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")]
    inside = {name.removeprefix("src/") for name in TRACKED if name.startswith("src/")} | set(about) | wheel
    with ZipFile(folder / "rollalloc-1.0-py3-none-any.whl", "w") as made:
        for name in inside - {lacks}:
            made.writestr(name, "")
    with tarfile.open(folder / "rollalloc-1.0.tar.gz", "w:gz") as made:
        for name in TRACKED | {"PKG-INFO"} | sdist:
            made.addfile(tarfile.TarInfo(f"rollalloc-1.0/{name}"), io.BytesIO())
    return [folder / "rollalloc-1.0-py3-none-any.whl", folder / "rollalloc-1.0.tar.gz"]


def test_what_git_tracks_passes(package, tmp_path):
    package.check_contents(*packed(tmp_path), TRACKED)


@pytest.mark.parametrize(
    ("built", "says"),
    [
        ({"wheel": {"tests/test_all.py"}}, r"whl must hold.*too much: tests/test_all\.py; missing: nothing"),
        ({"wheel": {"rollalloc/notes.py"}}, r"whl must hold.*too much: rollalloc/notes\.py"),
        ({"sdist": {"secret.env"}}, r"tar\.gz must hold.*too much: secret\.env"),
        ({"lacks": "rollalloc/py.typed"}, r"missing: rollalloc/py\.typed\. Commit"),
        ({"lacks": ABOUT + "licenses/LICENSE"}, r"missing: \S+licenses/LICENSE"),
    ],
)
def test_what_should_not_be_there_or_should_is_named(package, tmp_path, built, says):
    with pytest.raises(SystemExit, match=says):
        package.check_contents(*packed(tmp_path, **built), TRACKED)


def test_each_extra_is_tried_on_each_python(package):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert set(package.TRIES) == set(project["optional-dependencies"])
    assert package.PYTHONS == ["3.11", "3.12"]


def test_a_command_that_fails_or_should_have_ends_it(package):
    assert package.run([sys.executable, "-c", "print('fine')"]) == "fine\n"
    with pytest.raises(SystemExit, match=r"(?s)why.*exit code 3"):
        package.run([sys.executable, "-c", "print('why'); raise SystemExit(3)"])
    with pytest.raises(SystemExit, match="exit code 0"):
        package.run([sys.executable, "-c", ""], fails=True)


def test_a_mutant_dies_lives_or_is_none(tmp_path, capsys):
    package = tmp_path / "src" / "rollalloc"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "sums.py").write_text("def total(one, other):\n    return one + other\n")
    killer = "test_sums.py::test_a_sum"
    (tmp_path / "test_sums.py").write_text(
        "from rollalloc.sums import total\n\n\ndef test_a_sum():\n    assert total(2, 3) == 5\n"
    )
    (tmp_path / "tests").mkdir()
    expected = {
        ("one + other", "one - other"): "died  sums.py: 0\n",
        ("one + other", "other + one"): f"WRONG  sums.py: 1\n       {killer}: passes, so the mutant lives\n",
        ("one * other", "other"): f"WRONG  sums.py: 2\n       {killer}: expected this text once in sums.py, found it 0",
        ("one", "other"): f"WRONG  sums.py: 3\n       {killer}: expected this text once in sums.py, found it 2",
        ("one + other", "one +"): f"WRONG  sums.py: 4\n       {killer}: did not run (pytest's exit status",
    }
    (tmp_path / "tests" / "mutants.toml").write_text(
        "".join(
            f'[[mutant]]\nbreaks = "{at}"\nfile = "sums.py"\noriginal = "{original}"\nmutant = "{mutant}"\n'
            f'killer = "{killer}"\n'
            for at, (original, mutant) in enumerate(expected)
        )
    )
    mutants = tool("mutants")
    assert mutants.main(root=tmp_path, imports=()) == 1
    said = capsys.readouterr().out
    assert [each for each in expected.values() if each not in said] == []
    died, *wrong = expected.values()
    end = said[said.index(wrong[-1]) + len(wrong[-1]) :]  # only this may be kept of a long output
    assert died not in end
    assert [each for each in wrong if each not in end] == []
    assert said.endswith("1 of 5 mutants died\n")
    assert mutants.main("nothing", root=tmp_path) == 1  # has this word in it
    (tmp_path / "test_sums.py").write_text("def test_another():\n    pass\n")
    assert mutants.main("0", root=tmp_path, imports=(), passed=True) == 1
    assert f"{killer}: did not run (pytest's exit status 4)" in capsys.readouterr().out
    assert "one + other" in (package / "sums.py").read_text()


def test_a_mutant_whose_killer_needs_luck_dies_at_a_later_try_and_that_is_said(tmp_path, capsys):
    package = tmp_path / "src" / "rollalloc"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "sums.py").write_text("ONE = 1\n")
    (tmp_path / "test_sums.py").write_text(
        "from pathlib import Path\n\nfrom rollalloc.sums import ONE\n\n\ndef test_one():\n"
        "    if ONE != 1 and not (seen := Path('seen')).exists():\n        seen.touch()\n"
        "    else:\n        assert ONE == 1\n"
    )
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "mutants.toml").write_text(
        '[[mutant]]\nbreaks = "one"\nfile = "sums.py"\noriginal = "1"\nmutant = "2"\nkiller = "test_sums.py::test_one"\n'
    )
    assert tool("mutants").main(root=tmp_path, imports=()) == 0
    assert "died  sums.py: one (at try 2: test_sums.py::test_one needs luck)\n" in capsys.readouterr().out


def test_a_script_says_what_its_stages_took_also_where_one_fails():
    script = (
        'set -e; . "$0"; stage true; (set -e; stage sleep 0.01) & wait $!; echo between; stage bash -c "$1"; echo no'
    )
    command = ["bash", "-c", script, str(ROOT / ".ci" / "stages"), "echo loud >&2; exit 3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    took = r" *\d+ +\d+  {}\n".format
    stages = [took("true"), took("sleep 0.01"), took(r"bash -c echo loud >&2; exit 3 \(failed: 3\)")]
    table = r"\n  wall s    CPU s  stage\n" + "".join(stages)
    assert re.fullmatch("".join([*stages[:2], "between\n", stages[2], table]), done.stdout)
    assert (done.returncode, done.stderr) == (3, "loud\n")


def test_each_mutant_is_of_a_text_and_has_a_killer():
    """What moves takes its mutants along: found here in a moment, and not when each of them is run."""
    mutants, wrong = tool("mutants"), []
    for mutant in mutants.load(ROOT / "tests" / "mutants.toml"):
        source = mutants.module_of(mutant, ROOT / "src" / "rollalloc", ROOT / "lab" / "src" / "rollalloc_lab")
        file, test = mutant.killer.partition("[")[0].split("::")[:2]
        if not source.exists() or source.read_text("utf-8").count(mutant.original) != 1:
            wrong.append(f"{mutant.breaks}: the text is not in {mutant.file} once")
        if not (ROOT / file).exists() or not re.search(rf"(def|class) {test}\b", (ROOT / file).read_text("utf-8")):
            wrong.append(f"{mutant.breaks}: no {mutant.killer}")
    assert wrong == []


@pytest.fixture
def installs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool, looking at an empty folder."""
    made = tool("installs")
    monkeypatch.setattr(made, "ROOT", tmp_path)
    return made


def test_every_install_command_that_is_shown_is_one():
    tool_ = tool("installs")
    shown = list(tool_.shown())
    assert len(shown) > 15
    assert {place.partition(":")[0] for place, _, _ in shown} >= {"README.md", "Makefile", "constraints/verl-cuda.txt"}
    for place, words, python in shown:
        assert tool_.parse(words, python).pythons, place


def test_what_python_keeps_beside_an_example_is_no_page(installs, tmp_path):
    cache = tmp_path / "examples" / "__pycache__" / "loop.cpython-311.pyc"
    cache.parent.mkdir(parents=True)
    cache.write_bytes(b"\xa7\r\r\n")
    example = tmp_path / "examples" / "loop.py"
    example.write_text("# pip install torch\n")
    assert installs.pages() == [example]


def test_a_constraints_file_pins_a_version_in_each_line(installs, tmp_path):
    (tmp_path / "good.txt").write_text(
        "# Ran on Python 3.11.\n\ntorch==2.11.0  # CUDA\nray[default]==2.60.0; python_version > '3'\n"
    )
    assert installs.parse(["-c", "good.txt", "torch"]) == installs.Install(("torch",), ("good.txt",), ("3.11",))
    from_git = installs.parse(["rollalloc[native] @ git+https://example.org/rollalloc"])
    assert from_git.requirements == (".[native]",)
    for line, says in {
        "cupy-cu130), and of the rest what was run": "no requirement",
        "torch>=2": "pins no version",
    }.items():
        (tmp_path / "bad.txt").write_text(f"# head\n{line}\n")
        with pytest.raises(ValueError, match=rf"bad\.txt, line 2.*{says}"):
            installs.parse(["--constraint", "bad.txt", "torch"])
        assert bool(installs.pip_reads("bad.txt")) == (says == "no requirement")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("", "nothing to install"),
        ("'.[nativ]'", "no extra nativ"),
        ("'rollalloc[native]'", "on no package index"),
        ("'rollalloc[nativ] @ git+https://example.org/x'", "no extra nativ"),
        ("'rollalloc[native] @ https://example.org/x.zip'", "on no package index"),
        ("torch==", "no requirement"),
        ("--constrain x.txt torch", "unrecognized arguments: --constrain"),
        ("-c none.txt torch", "no constraints file none.txt"),
    ],
)
def test_an_install_command_that_pip_would_not_take_is_refused(installs, command, says):
    with pytest.raises(ValueError, match=says):
        installs.parse(shlex.split(command))


def test_an_extra_that_a_message_names_exists():
    """`pip install 'rollalloc[x]'` adds an extra to what is installed, so that messages, but no pages, say it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    named = [
        (file.name, extra)
        for file in (ROOT / "src").rglob("*.py")
        for names in re.findall(r"rollalloc\[([\w,-]+)\]", file.read_text("utf-8"))
        for extra in names.split(",")
    ]
    assert len(named) > 5
    assert [one for one in named if one[1] not in extras] == []


def test_other_arithmetic_runs_tests_of_ours_alone_and_each_file_that_it_names():
    arithmetic = tool("arithmetic")
    files = {Path(file) for file in arithmetic.files()}
    assert {Path("tests/models"), Path("tests/drivers/trl"), Path("lab/tests/tasks")} <= {file.parent for file in files}
    assert not {file for file in files if file.parts[0] != "tests" and file.parts[:2] != ("lab", "tests")}
    assert {Path(file) for file in arithmetic.ALSO} <= files
