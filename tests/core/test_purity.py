"""The core is pure: numpy and the standard library only, and of that nothing that does I/O, reads a clock or waits."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rollalloc

PACKAGE = Path(rollalloc.__file__).parent
FORBIDDEN = {
    "asyncio", "concurrent", "datetime", "http", "io", "logging", "multiprocessing", "os", "pathlib", "pickle", "queue",
    "random", "selectors", "shelve", "shutil", "signal", "socket", "sqlite3", "subprocess", "sys", "tempfile",
    "threading", "time", "urllib", "uuid", "warnings",
}  # fmt: skip
INSIDE = {
    "core": ("rollalloc.core",),
    "predict": ("rollalloc.core.packing", "rollalloc.predict"),
    "rules": ("rollalloc.core", "rollalloc.predict", "rollalloc.rules"),
}
PURE = [file for folder in INSIDE for file in sorted(PACKAGE.glob(f"{folder}/*.py"))]


def imported(file):
    """Absolute names of all modules that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            yield node.module


@pytest.mark.parametrize("file", PURE, ids=lambda f: f"{f.parent.name}/{f.name}")
def test_core_predict_and_rules_import_the_standard_library_numpy_and_inwards(file):
    for name in imported(file):
        top = name.partition(".")[0]
        if top == "rollalloc":
            assert name.startswith(INSIDE[file.parent.name]), f"{file.name} imports {name}"
        else:
            assert top == "numpy" or (top in sys.stdlib_module_names and top not in FORBIDDEN), (
                f"{file.name} imports {top}"
            )


def test_the_core_draws_from_no_global_generator_and_prints_nothing():
    for file in PURE:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("print", "open", "input", "hash", "id"), f"{file.name} calls {called}"
                if called.startswith("np.random."):
                    assert called.split(".")[2] in ("Generator", "Philox", "SeedSequence"), (
                        f"{file.name} calls {called}"
                    )


def test_importing_the_package_needs_no_framework():
    code = (
        "import rollalloc, rollalloc.testing, sys;"
        "print(sorted({'torch', 'transformers', 'pyarrow', 'rich', 'typer', 'matplotlib', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
