"""Compares the runs of recipes/verl with what the released code of the three systems sets, value by value.

    python tools/released.py           # in the environment with verl; elsewhere all but the comparison
    python tools/released.py --write   # also write the tables of recipes/verl/README.md

recipes/verl/released.yaml holds their values, our names for their keys, and the differences with their reasons; its head
says how. Each run is composed as verl composes it. The tool fails if a value is neither equal nor a listed difference, if a
listed difference is none, if a key or a value of theirs is unknown, or if a row has no number of GPUs.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

RECIPES = Path(__file__).parents[1] / "recipes" / "verl"
FACTS, GUIDE = RECIPES / "released.yaml", RECIPES / "README.md"
GPUS = ("trainer.nnodes", "trainer.n_gpus_per_node")
ABSENT = object()  # the value of a key that our configuration does not have

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Difference:
    """A value of ours that is meant to differ from theirs.

    Attributes:
        keys: theirs that it is about.
        ours: our value; `ABSENT`: we have no such key.
        why: the reason.
        runs: the only runs that it holds for; empty: all of the system.
    """

    keys: tuple[str, ...]
    ours: Any
    why: str
    runs: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """One of their scripts, and the run of ours that answers it.

    Attributes:
        row: our file.
        choice: our override that chooses the method, such as `method=grpo`.
        source: their script.
        values: theirs, by their key.
        names: for each of their keys our key, or ours and the other names of values, as `released.yaml` writes it.
    """

    row: str
    choice: str
    source: str
    values: Config
    names: Config

    @property
    def name(self) -> str:
        """Name of the run, as differences give it."""
        return f"{self.row} {self.choice}"


@dataclass(frozen=True)
class System:
    """What is known of one system's released code."""

    name: str
    runs: tuple[Run, ...]
    unpublished: Mapping[str, str]
    differences: tuple[Difference, ...]


def read(path: Path = FACTS) -> list[System]:
    """The facts.

    Raises:
        ValueError: no YAML, a section that is missing or unknown, a difference without a reason or for a run that is not
            there, or a run without a number of GPUs.
    """
    systems: list[System] = []
    for name, told in _mapping(_yaml(path), path.name).items():
        _check_sections(name, told)
        runs = [
            Run(
                row,
                choice,
                run["source"],
                told["values"] | of_row.get("values", {}) | run["values"],
                {**told["keys"], **run.get("keys", {})},
            )
            for row, of_row in told["rows"].items()
            for choice, run in of_row["runs"].items()
        ]
        differences = [
            Difference(tuple(one["keys"]), one.get("ours", ABSENT), one.get("why", ""), tuple(one.get("runs", ())))
            for one in told["differences"]
        ]
        systems.append(System(name, tuple(runs), told.get("unpublished", {}), tuple(differences)))
        _check_facts(systems[-1])
    return systems


def _yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text("utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path.name} is no YAML: {' '.join(str(error).split())}") from error


def _check_sections(name: str, told: Any) -> None:
    """Refuse sections of a system that are missing, or that nothing would read."""
    _mapping(told, name, {"values", "keys", "differences", "rows"}, {"paper", "code", "unpublished"})
    for row, of_row in _mapping(told["rows"], f"{name}: rows").items():
        of_row = _mapping(of_row, f"{name}: {row}", {"runs"}, {"values"})
        for choice, run in _mapping(of_row["runs"], f"{name}: {row}: runs").items():
            _mapping(run, f"{name}: {row} {choice}", {"source", "values"}, {"keys"})
            _check_names(f"{name}: {row} {choice}", run.get("keys", {}))
    _check_names(name, told["keys"])
    for index, one in enumerate(told["differences"]):
        _mapping(one, f"{name}: difference {index + 1}", {"keys"}, {"ours", "why", "runs"})


def _check_names(where: str, names: Any) -> None:
    """Refuse a name of ours that is neither a key nor a key with the other names of values."""
    for key, ours in _mapping(names, f"{where}: keys").items():
        if not isinstance(ours, str):
            _mapping(ours, f"{where}: {key}", {"ours", "values"}, set())


def _mapping(value: Any, where: str, needed: Set[str] = frozenset(), optional: Set[str] | None = None) -> Config:
    """The value, which must be a mapping; if `optional` is given, with no other keys than these and the needed ones."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be a mapping, got {_shown(value)}")
    if missing := needed - value.keys():
        raise ValueError(f"{where} has no {min(missing)}")
    if optional is not None and (unknown := value.keys() - needed - optional):
        raise ValueError(f"{where}: {min(unknown)} is unknown; expected {', '.join(sorted(needed | optional))}")
    return value


def _check_facts(system: System) -> None:
    names = {run.name for run in system.runs}
    for one in system.differences:
        if not one.why.strip():
            raise ValueError(f"{system.name}: the difference of {', '.join(one.keys)} has no reason; write why")
        if unknown := set(one.runs) - names:
            raise ValueError(f"{system.name}: the difference of {one.keys[0]} is for {min(unknown)!r}, which is no run")
    for run in system.runs:
        ours = {_translated(run, key, value)[0] for key, value in run.values.items() if isinstance(value, int)}
        if missing := set(GPUS) - ours:
            raise ValueError(
                f"{system.name}: {run.name} has no number of GPUs: released.yaml has no {min(missing)} of it"
            )


def wrong_rows(systems: Sequence[System], folder: Path = RECIPES) -> Iterator[str]:
    """What is wrong with the files of the rows themselves: one without a script, or without a number of GPUs of its own."""
    known = {row for system in systems for row in (*system.unpublished, *(run.row for run in system.runs))}
    files = {path.stem: _mapping(_yaml(path), path.name) for path in sorted(folder.glob("*.yaml"))}
    rows = {stem for stem, content in files.items() if "defaults" in content}
    for row in sorted(rows - known):
        yield f"{row}.yaml is a row that released.yaml does not know; give its script, or list it under unpublished"
    for row in sorted(known - rows):
        yield f"released.yaml names the row {row}, and there is no {row}.yaml"
    for row in sorted(rows & known):
        bases = [name for name in files[row]["defaults"] if isinstance(name, str) and name in files]
        for key in GPUS:
            section, _, name = key.partition(".")
            if not any(name in (files[part].get(section) or {}) for part in (row, *bases)):
                yield f"{row}.yaml has no number of GPUs: set {key}, in it or in a base that it names"


def compare(system: System, run: Run, ours: Config) -> Iterator[str]:
    """What is wrong with a run: values that differ and are not listed, and listed ones that do not.

    Args:
        system: that the run is of.
        run: theirs.
        ours: our composed configuration, nested.
    """
    listed = {key: one for one in system.differences if not one.runs or run.name in one.runs for key in one.keys}
    for key, theirs in run.values.items():
        own, expected = _translated(run, key, theirs)
        value = _at(ours, own)
        if (difference := listed.get(key)) is not None:
            wrong = _not_as_listed(key, value, expected, difference)
        elif expected is ABSENT:
            wrong = f"{key}: {_shown(theirs)} is a value that released.yaml does not know; add it to the key's values"
        elif value is ABSENT:
            wrong = (
                f"{key} is a key that released.yaml does not know: there is no {own} here; give ours, or a difference"
            )
        elif not _same(value, expected):
            wrong = f"{key} is {_shown(theirs)} in {run.source}, ours is {own}: {_shown(value)}; "
            wrong += "make them equal, or list why"
        else:
            continue
        if wrong:
            yield f"{run.name}: {wrong}"


def _not_as_listed(key: str, value: Any, expected: Any, difference: Difference) -> str:
    """What is wrong with a listed difference; "" if our value is the one that it lists."""
    if not _same(value, difference.ours):
        return f"ours for {key} is {_shown(value)}; released.yaml lists {_shown(difference.ours)}: correct one of them"
    if value is not ABSENT and _same(value, expected):
        return f"{key} is listed as a difference, but both are {_shown(value)}; take it out of the list"
    return ""


def _translated(run: Run, key: str, theirs: Any) -> tuple[str, Any]:
    """Our key, and the value that it should have; `ABSENT` where a translation lacks it."""
    name = run.names.get(key, key)
    if isinstance(name, str):
        return name, theirs
    return name["ours"], name["values"].get(theirs, ABSENT)


def _at(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return ABSENT
        value = value[part]
    return value


def _same(first: Any, second: Any) -> bool:
    return (type(first) is bool) == (type(second) is bool) and first == second


def _shown(value: Any) -> str:
    if value is ABSENT:
        return "no such key"
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("\n...")


# --------------------------------------------------------------------------------------------------------------- tables


def tables(system: System) -> Iterator[str]:
    """The system's differences and names of keys, as Markdown."""
    yield from ("", "| their key | theirs | ours | why |", "|---|---|---|---|")
    for one in system.differences:
        theirs = dict.fromkeys(
            _cell(run.values[key])
            for run in system.runs
            for key in one.keys
            if key in run.values and (not one.runs or run.name in one.runs)
        )
        ours = "–" if one.ours is ABSENT else _cell(one.ours)
        yield f"| {', '.join(f'`{key}`' for key in one.keys)} | {', '.join(theirs)} | {ours} | {one.why} |"
    yield from ("", "| their key | ours |", "|---|---|")
    names = {key: name for run in system.runs for key, name in run.names.items() if key in run.values}
    for key, name in names.items():
        if isinstance(name, str):
            yield f"| `{key}` | `{name}` |"
        else:
            yield (
                f"| `{key}` | `{name['ours']}`: "
                + ", ".join(f"{_cell(old)} → {_cell(new)}" for old, new in name["values"].items())
                + " |"
            )
    yield ""


def _cell(value: Any) -> str:
    return f"`{_shown(value)}`".replace("|", "\\|")


def with_tables(guide: str, systems: Sequence[System]) -> str:
    """The guide with each system's tables between its marks.

    Raises:
        ValueError: a mark is missing.
    """
    for system in systems:
        begin, end = f"<!-- {system.name}, by tools/released.py -->", f"<!-- end of {system.name} -->"
        before, found, rest = guide.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"{GUIDE} must hold {begin} and, after it, {end}")
        guide = "\n".join((before + begin, *tables(system), end + after))
    return guide


def main(arguments: Sequence[str]) -> int:
    """Compare all; 0 where nothing is wrong."""
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the tables of recipes/verl/README.md")
    write = parser.parse_args(arguments).write
    try:
        systems = read()
        wrong = list(wrong_rows(systems))
    except ValueError as error:
        print(error)
        return 1
    guide = GUIDE.read_text("utf-8")
    if write:
        GUIDE.write_text(with_tables(guide, systems), "utf-8")
    elif guide != with_tables(guide, systems):
        wrong.append(
            "the tables of recipes/verl/README.md are not those of released.yaml: python tools/released.py --write"
        )
    compares = find_spec("verl") is not None
    if compares:
        for system in systems:
            for run in system.runs:
                wrong += compare(system, run, composed(run))
    runs = sum(len(system.runs) for system in systems)
    values = sum(len(run.values) for system in systems for run in system.runs)
    done = f"{values} released values of {runs} runs are equal here, or listed with a reason"
    print(
        "\n".join(wrong)
        or (done if compares else "nothing was compared: verl is not installed here (make .venv-verl/ready)")
    )
    return int(bool(wrong))


def composed(run: Run) -> dict[str, Any]:
    """Our configuration of a run, as verl composes it."""
    from omegaconf import OmegaConf  # pyright: ignore[reportMissingImports]  # verl brings it

    from rollalloc.drivers.verl.check import composed as of_command

    config = of_command([f"--config-path={RECIPES}", f"--config-name={run.row}", run.choice])
    return OmegaConf.to_container(config, resolve=True)  # pyright: ignore[reportReturnType]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
