"""The runs of recipes/verl against the released values: the tool names each that is neither equal nor explained."""

import copy
import importlib.util
import sys
from pathlib import Path

import compositions
import pytest
import yaml

from rollalloc.drivers.verl import check

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("released_tool", ROOT / "tools" / "released.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.verl
def test_every_released_value_is_equal_or_listed_with_a_reason(tool, capsys, monkeypatch):
    pytest.importorskip("verl", reason="verl's environment: make verl-test")
    monkeypatch.setattr(check, "composed", compositions.composed)
    assert tool.main([]) == 0, capsys.readouterr().out
    assert "released values of" in capsys.readouterr().out


def test_every_row_has_a_script_or_is_listed_as_unpublished_and_says_its_gpus(tool):
    assert list(tool.wrong_rows(tool.read())) == []


def test_the_tables_of_the_guide_are_those_of_the_facts(tool):
    guide = tool.GUIDE.read_text("utf-8")
    assert tool.with_tables(guide, tool.read()) == guide


INSTRUCTIONS = {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "CMD"}


def test_the_containerfile_is_made_of_instructions_and_copies_what_there_is(tool):
    """What it installs is parsed and resolved by tools/installs.py."""
    text = (tool.RECIPES / "Containerfile").read_text("utf-8")
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    words = [line.split() for line in lines]
    assert {instruction for instruction, *_ in words} == INSTRUCTIONS
    assert words[0] == ["FROM", "docker.io/library/python:3.12-slim-bookworm"]
    copied = [name for instruction, *names in words if instruction == "COPY" for name in names[:-1]]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert any("--constraint constraints/verl-cuda.txt" in line for line in lines)


# ---------------------------------------------------------------------------------------- a made-up system, and its faults

FACTS = {
    "tiny": {
        "values": {"lr": 1e-6, "sampling": "max_variance", "truncation": "left", "places": 8, "machines": 2},
        "keys": {
            "lr": "optim.lr",
            "sampling": {"ours": "promote", "values": {"max_variance": "top_variance"}},
            "places": "trainer.n_gpus_per_node",
            "machines": "trainer.nnodes",
        },
        "differences": [{"keys": ["truncation"], "ours": "error", "why": "half a question has no right answer"}],
        "rows": {"tiny_row": {"runs": {"method=grpo": {"source": "run.sh", "values": {"logger": None}}}}},
    }
}
OURS = {
    "optim": {"lr": 1e-6},
    "promote": "top_variance",
    "truncation": "error",
    "trainer": {"n_gpus_per_node": 8, "nnodes": 2},
    "logger": None,
}


def written(folder, facts):
    path = folder / "released.yaml"
    path.write_text(yaml.safe_dump(facts), "utf-8")
    return path


def compared(tool, folder, facts, ours):
    (system,) = tool.read(written(folder, facts))
    (run,) = system.runs
    return list(tool.compare(system, run, ours))


def changed(original, **changes):
    """A copy with these values changed, by their paths; None removes one."""
    made = copy.deepcopy(original)
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = made
        for parent in parents:
            place = place[parent]
        if value is None:
            del place[last]
        else:
            place[last] = value
    return made


def test_equal_values_and_listed_differences_pass(tool, tmp_path):
    assert compared(tool, tmp_path, FACTS, OURS) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"optim__lr": 2e-6}, "lr is 1.0e-06 in run.sh, ours is optim.lr: 2.0e-06"),
        ({"promote": "random"}, "sampling is max_variance in run.sh, ours is promote: random"),
        ({"truncation": "right"}, "ours for truncation is right; released.yaml lists error"),
        ({"truncation": "left"}, "ours for truncation is left; released.yaml lists error"),
        ({"logger": "console"}, "logger is null in run.sh, ours is logger: console"),
        ({"optim__lr": None}, "lr is a key that released.yaml does not know: there is no optim.lr here"),
    ],
)
def test_a_changed_value_of_ours_fails_by_name(tool, tmp_path, changes, says):
    (line,) = compared(tool, tmp_path, FACTS, changed(OURS, **changes))
    assert line.startswith("tiny_row method=grpo: ")
    assert says in line


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tiny__values__lr": 1e-5}, "lr is 1.0e-05 in run.sh, ours is optim.lr: 1.0e-06"),
        (
            {"tiny__values__sampling": "least_recent"},
            "sampling: least_recent is a value that released.yaml does not know",
        ),
        ({"tiny__values__unheard": 3}, "unheard is a key that released.yaml does not know: there is no unheard here"),
        ({"tiny__values__truncation": "error"}, "truncation is listed as a difference, but both are error"),
        (
            {"tiny__differences": []},
            "truncation is left in run.sh, ours is truncation: error; make them equal, or list why",
        ),
    ],
)
def test_a_changed_or_unknown_released_value_fails_by_name(tool, tmp_path, changes, says):
    (line,) = compared(tool, tmp_path, changed(FACTS, **changes), OURS)
    assert says in line


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"tiny__values__machines": None},
            "tiny_row method=grpo has no number of GPUs: released.yaml has no trainer.nnodes",
        ),
        ({"tiny__values__places": "eight"}, "has no number of GPUs: released.yaml has no trainer.n_gpus_per_node"),
        ({"tiny__differences": [{"keys": ["truncation"], "ours": "error"}]}, "difference of truncation has no reason"),
        (
            {"tiny__differences": [{"keys": ["lr"], "why": "so", "runs": ["other method=grpo"]}]},
            "difference of lr is for 'other method=grpo', which is no run",
        ),
    ],
)
def test_facts_that_are_not_whole_are_refused(tool, tmp_path, changes, says):
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        tool.read(written(tmp_path, changed(FACTS, **changes)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tiny: [", "released.yaml is no YAML"),
        ("", "released.yaml must be a mapping, got null"),
        ("tiny: 3", "tiny must be a mapping, got 3"),
        ("tiny: {values: {}, keys: {}, rows: {}}", "tiny has no differences"),
        (
            "tiny: {values: {}, keys: {}, rows: {row: {runs: {method=grpo: {source: run.sh}}}}, differences: []}",
            "tiny: row method=grpo has no values",
        ),
        ("tiny: {values: {}, keys: {lr: {ours: lr}}, rows: {}, differences: []}", "tiny: lr has no values"),
        (
            "tiny: {values: {}, keys: {}, rows: {}, differences: [{keys: [lr], wy: so}]}",
            "tiny: difference 1: wy is unknown; expected keys, ours, runs, why",
        ),
    ],
)
def test_sections_that_are_missing_or_misspelled_are_refused_by_name(tool, tmp_path, text, says):
    path = tmp_path / "released.yaml"
    path.write_text(text, "utf-8")
    with pytest.raises(ValueError, match=says):
        tool.read(path)


def test_facts_that_are_not_whole_end_the_tool_with_their_name_and_no_traceback(tool, tmp_path, monkeypatch, capsys):
    path = written(tmp_path, changed(FACTS, tiny__values__machines=None))
    read = tool.read
    monkeypatch.setattr(tool, "read", lambda: read(path))
    assert tool.main([]) == 1
    assert "tiny_row method=grpo has no number of GPUs" in capsys.readouterr().out
