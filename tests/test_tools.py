"""What `make package` refuses: the rest of it is run, not tested."""

from __future__ import annotations

import io
import sys
import tarfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
ABOUT = "rollalloc-1.0.dist-info/"
TRACKED = {"README.md", "src/rollalloc/__init__.py", "tests/test_all.py"}


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = spec_from_file_location("package_tool", ROOT / "tools" / "package.py")
    assert spec
    assert spec.loader
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
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
            extras = "".join(f"Provides-Extra: {name}\n" for name in ("native", "surprise"))
            made.writestr(name, f"Name: rollalloc\n{extras}Classifier: Programming Language :: Python :: 3\n")
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


def test_what_is_gone_from_git_too_is_missed(package, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "TRACKED", TRACKED - {"src/rollalloc/py.typed"})
    with pytest.raises(SystemExit, match=r"lacks rollalloc/py\.typed"):
        package.check_contents(*packed(tmp_path), TRACKED)


def test_an_extra_that_nothing_tries_and_a_package_for_no_python_are_refused(package, tmp_path):
    wheel, _ = packed(tmp_path)
    with pytest.raises(SystemExit, match=r"native, surprise; give each its line in TRIES"):
        package.extras_of(wheel)
    with pytest.raises(SystemExit, match="no version of Python"):
        package.pythons_of(wheel)


def test_a_command_that_fails_or_should_have_ends_it(package):
    assert package.run([sys.executable, "-c", "print('fine')"]) == "fine\n"
    with pytest.raises(SystemExit, match=r"(?s)why.*exit code 3"):
        package.run([sys.executable, "-c", "print('why'); raise SystemExit(3)"])
    with pytest.raises(SystemExit, match="exit code 0"):
        package.run([sys.executable, "-c", ""], fails=True)
