"""The house: imports point one way, and the floors stand in one list."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import rollalloc
from rollalloc.train.config import Config
from test_tools import tool
from tiers import patterns

FLOORS = tool("way").FLOORS
ROOT = Path(rollalloc.__file__).parent


def floor(module: str) -> str | None:
    """The floor that a module stands on; None for what is no module of ours, and for the package itself."""
    parts = module.split(".")
    return parts[1] if parts[0] == "rollalloc" and len(parts) > 1 else None


@cache
def names_imported(path: Path) -> set[str]:
    """Names that a file imports, within functions too: of `from a import b`, both `a` and `a.b`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_every_module_stands_on_a_floor():
    there = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert there - {"__init__", "__main__"} == set(FLOORS)


@pytest.mark.parametrize("name", FLOORS)
def test_no_import_points_up(name):
    here = ROOT / name
    for path in [*here.rglob("*.py")] if here.is_dir() else [here.with_suffix(".py")]:
        floors = {floor(each) for each in names_imported(path)} & set(FLOORS)
        up = {each for each in floors if FLOORS.index(each) > FLOORS.index(name)}
        assert not up, f"{path.relative_to(ROOT)} imports {', '.join(sorted(up))}"


def test_imports_go_in_no_circle():
    """Within a package too, and wherever an import stands: in a function, or for types only."""
    graph = {name_of(path): set(modules_named(path)) - {name_of(path)} for path in ROOT.rglob("*.py")}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imports go in a circle: {' imports '.join(reversed(error.args[1]))}")


def name_of(path: Path) -> str:
    """The name of the module in this file."""
    return ".".join(("rollalloc", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def modules_named(path: Path) -> Iterator[str]:
    """Modules of this package that a file imports: of `from a import b`, `a.b` if it is a module, else `a`."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from filter(is_module, [name if is_module(name) else str(node.module) for name in whole])
        elif isinstance(node, ast.Import):
            yield from filter(is_module, [alias.name for alias in node.names])


@pytest.mark.parametrize("way", ["`rollalloc train`", "TRL", "verl"])
def test_the_files_that_contributing_names_on_a_rollouts_way_are_there(way):
    """How many files a run really goes through is measured by tools/way.py."""
    page = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text("utf-8")
    section = page.partition(f"\n**{way}**\n")[2].partition("\n**")[0].partition("\n## ")[0]
    files = re.findall(r"`([\w/]+\.py)`", section)
    assert len(files) >= 8
    assert len(set(files)) == len(files)
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_contributing_names_the_packages_in_the_order_of_imports():
    page = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text("utf-8")
    tree = re.search(r"```\nsrc/rollalloc/\n(.*?)```", page, re.DOTALL)
    assert tree is not None
    assert tuple(re.findall(r"^  (\w+)", tree[1], re.MULTILINE)) == FLOORS


def modules_imported(module: str) -> set[str]:
    """Modules of this package that a module's text imports, within functions too."""
    path = ROOT.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return {name for name in names_imported(path) if is_module(name)}


def is_module(name: str) -> bool:
    place = ROOT.joinpath(*name.split(".")[1:])
    return name.startswith("rollalloc.") and (place.is_dir() or place.with_suffix(".py").exists())


def reachable(first: str, *, without: str) -> set[str]:
    """Modules of this package that a module imports, directly or through others, without those behind one of them."""
    seen, open_ = {without}, [first]
    while open_:
        module = open_.pop()
        if module not in seen:
            seen.add(module)
            open_ += modules_imported(module)
    return seen - {without}


def test_the_library_imports_nothing_of_the_laboratory():
    imported = {name for file in ROOT.rglob("*.py") for name in names_imported(file)}
    assert not sorted(name for name in imported if name.partition(".")[0] == "rollalloc_lab")


def test_training_a_model_of_ones_own_needs_no_task_and_no_judge_of_runs():
    modules = reachable("rollalloc.cli.train", without="rollalloc.cli.tasks")
    assert {"rollalloc.cli.sources", "rollalloc.train.config", "rollalloc.train.train"} <= modules
    assert not sorted(name for name in modules if floor(name) in ("tasks", "compare", "waste", "report", "advise"))
    assert "rollalloc.tasks.presets" in reachable("rollalloc.cli.tasks", without="")  # it makes a task's files


@pytest.mark.parametrize("driver", ["trl", "verl"])
def test_a_driver_of_a_framework_imports_nothing_of_the_native_trainer(driver):
    """What both need, such as likelihoods, averaging and checkpoints, stands below them. Tinker's driver runs our loop."""
    imported = {name for file in (ROOT / "drivers" / driver).rglob("*.py") for name in names_imported(file)}
    assert not sorted(name for name in imported if floor(name) == "train")


# Packages that are imported and come with another one that pyproject.toml names; wandb and trackio are the user's own.
COME_WITH_OTHERS = {"huggingface_hub", "tokenizers", "packaging", "markupsafe", "sympy", "trackio", "wandb"}
COME_WITH_VERL = {"hydra", "omegaconf", "ray", "tensordict", "torchdata", "transfer_queue"}


def test_every_package_that_is_imported_is_one_that_an_installation_has():
    """Wherever the import stands; packages of the extras `dev` and `docs` are not there at the user's."""
    project = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    extras = {name: wanted for name, wanted in project["optional-dependencies"].items() if name not in ("dev", "docs")}
    wanted = [*project["dependencies"], *(line for lines in extras.values() for line in lines)]
    there = {re.split(r"[^\w-]", line)[0].lower().replace("_", "-") for line in wanted}
    modules = {name for file in ROOT.rglob("*.py") for name in names_imported(file)}
    packages = {module.partition(".")[0] for module in modules} - {"rollalloc", *sys.stdlib_module_names}
    known = packages_distributions()
    absent = {
        package
        for package in packages - COME_WITH_OTHERS - COME_WITH_VERL
        if there.isdisjoint(name.lower().replace("_", "-") for name in known.get(package, [package]))
    }
    assert not absent


def test_a_class_name_is_defined_once():
    """So that a name in an error, a guide or a search is one class. Private classes and private modules are free."""
    modules: dict[str, set[str]] = {}
    for path in ROOT.rglob("*.py"):
        module = path.relative_to(ROOT).with_suffix("").parts
        if any(part.startswith("_") and part != "__init__" for part in module):
            continue
        for name in re.findall(r"^ *class ([A-Za-z]\w*)[(:]", path.read_text("utf-8"), re.MULTILINE):
            modules.setdefault(name, set()).add(".".join(module))
    shared = {name: where for name, where in modules.items() if len(where) > 1}
    assert not shared


def test_every_setting_of_a_run_is_read_where_it_acts():
    """What only `Config` itself reads, to check or to write it, would be an option without effect."""
    config = ROOT / "train" / "config.py"
    [kind] = [node for node in ast.parse(config.read_text("utf-8")).body if getattr(node, "name", "") == "Config"]
    makes_the_recipe = [node for node in ast.walk(kind) if getattr(node, "name", "") == "make_recipe"]
    read = read_of(("self",), *makes_the_recipe)
    for path in ROOT.rglob("*.py"):
        if path != config:
            read |= read_of(("config", "_config", "run"), ast.parse(path.read_text("utf-8")))
    assert not sorted({each.name for each in fields(Config)} - read)


def read_of(owners: tuple[str, ...], *trees: ast.AST) -> set[str]:
    """Names of the attributes that are read of variables and attributes with one of these names."""
    return {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        if getattr(node.value, "id", getattr(node.value, "attr", None)) in owners
    }


ACROSS = Path(__file__).with_name("across.txt")


def test_a_file_of_tests_is_named_after_what_it_tests():
    """Or it stands in tests/across.txt, with the reason; and nothing stands there that is gone or has such a name."""
    top = ACROSS.parents[1]
    homes = {top / "tests": ROOT, top / "lab" / "tests": top / "lab" / "src" / "rollalloc_lab"}
    unlike = {
        path.relative_to(top).as_posix()
        for tests, sources in homes.items()
        for path in tests.rglob("*/test_*.py")
        if not mirrors(path.stem, sources / path.relative_to(tests).parent)
    }
    assert unlike == set(patterns(ACROSS.read_text("utf-8")))


def mirrors(name: str, sources: Path) -> bool:
    """Whether test_Y or test_Y_MORE is named after a module or a folder of this folder."""
    words = name.removeprefix("test_").split("_")
    begins = ["_".join(words[:count]) for count in range(1, len(words) + 1)]
    places = [sources / f"{private}{begin}" for begin in begins for private in ("", "_")]
    return any(place.is_dir() or place.with_suffix(".py").is_file() for place in places)
