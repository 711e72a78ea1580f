"""Files and modules that pages, docstrings and messages name are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"rollalloc": ROOT / "src" / "rollalloc", "rollalloc_lab": ROOT / "lab" / "src" / "rollalloc_lab"}
_FILE = re.compile(
    r"(?<![\w/.-])(?:lab|tools|examples|tests|docs|src|recipes|constraints)/[\w/.-]*\w\.(?:py|md|sh|json|toml|txt|yaml|png)\b"
)
_MODULE = re.compile(r"(?<![\w./-])rollalloc(?:_lab)?(?:[.:][A-Za-z]\w*)+")
OTHERS = {"rollalloc.json", "rollalloc.recipes.NAME"}  # a file of a checkpoint, and a placeholder


def texts() -> dict[str, str]:
    """Pages but the log and the changelog, which have the names of their day, and programs but tests."""
    folders = (
        "src",
        "lab/src",
        "lab/experiments",
        "lab/benchmarks",
        "tools",
        "examples",
        "docs",
        "lab/docs",
        "recipes",
    )
    files = [file for folder in folders for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".md")]
    files += [*(ROOT / "lab").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "PAPERS.md"]
    return {str(file.relative_to(ROOT)): file.read_text("utf-8") for file in sorted(files)}


def files_missing(text: str, folder: Path) -> list[str]:
    """Paths of a text that neither the repository, nor the library, nor the text's folder has."""
    places = (ROOT, PACKAGES["rollalloc"], folder)
    return [name for name in _FILE.findall(text) if not any((place / name).exists() for place in places)]


def is_there(dotted: str) -> bool:
    """Whether a package has the module, and the module's text the word after its dot or colon; nothing further."""
    first, *names = re.split("[.:]", dotted)
    at = PACKAGES[first]
    while names and (at / names[0]).is_dir():
        at, names = at / names[0], names[1:]
    module = at / "__init__.py"
    if names and (at / f"{names[0]}.py").is_file():
        module, names = at / f"{names[0]}.py", names[1:]
    return not names or (module.is_file() and re.search(rf"\b{names[0]}\b", module.read_text("utf-8")) is not None)


def test_every_file_that_a_text_names_is_there() -> None:
    found = {name: missing for name, text in texts().items() if (missing := files_missing(text, (ROOT / name).parent))}
    assert found == {}


def test_every_module_that_a_text_names_is_there() -> None:
    named = {name: set(_MODULE.findall(text)) - OTHERS for name, text in texts().items()}
    assert sum(map(len, named.values())) > 1000
    missing = {name: lost for name, words in named.items() if (lost := sorted(w for w in words if not is_there(w)))}
    assert missing == {}


@pytest.mark.parametrize(
    "name",
    [
        "rollalloc.lab.bench",
        "rollalloc.data.features.own_features",
        "rollalloc.core.backtracking",
        "rollalloc.rewards.math:perhaps",
    ],
)
def test_a_module_that_went_is_found(name: str) -> None:
    assert not is_there(name)


def test_a_file_that_went_is_found() -> None:
    assert files_missing("see lab/simulate/hardware.py and docs/trl.md", ROOT) == ["lab/simulate/hardware.py"]
