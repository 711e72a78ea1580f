"""What a person types and reads: nonsense for every option is refused, help fits a terminal, errors suggest a name."""

import pytest
from typer.main import get_command

from nonsense import CommandLine, commands, refusals
from rollalloc_lab.cli import app

LINE = CommandLine(
    get_command(app.app),
    base={"bench": ("--tier", "smoke"), "simulate": ("--gpus", "8"), "ladder": ()},
    work=(
        "rollalloc_lab.bench.leaderboard.run_leaderboard",
        "rollalloc_lab.simulate.simulation.simulate",
        "rollalloc_lab.tasks.ladder.questions",
    ),
)
CASES = LINE.cases()


def test_no_command_is_left_out():
    assert {name for name, _ in commands(LINE.built)} == {*LINE.base}


@pytest.mark.parametrize(("command", "parameter"), CASES, ids=[f"{name} {each.name}" for name, each in CASES])
def test_nonsense_is_refused_in_the_name_of_its_option(rollalloc_lab, monkeypatch, tmp_path, command, parameter):
    (own := tmp_path / "own").mkdir()
    (own / "my_reward.py").write_text("")
    (own / "model").mkdir()
    (here := tmp_path / "here").mkdir()
    LINE.check(refusals(own, here, monkeypatch, LINE, rollalloc_lab), command, parameter)


@pytest.mark.parametrize("command", LINE.base)
def test_eighty_columns_hold_every_option_by_its_whole_name(rollalloc_lab, command):
    code, help_, _ = rollalloc_lab(command, "--help", columns=80)
    assert code == 0
    assert "…" not in help_
    assert "bool" not in help_
    assert max(map(len, help_.splitlines())) <= 80


def test_an_unknown_tier_is_refused_with_a_suggestion(rollalloc_lab):
    code, out, err = rollalloc_lab("bench", "--tier", "smok")
    assert code == 2
    assert "error: unknown tier 'smok' (did you mean 'smoke'?); there are " in " ".join((out + err).split())


def test_the_library_knows_the_laboratorys_tasks(rollalloc):
    code, out, err = rollalloc("train", "--task", "walks/lat")
    assert code == 2
    assert "unknown task 'walks/lat' (did you mean 'walks/late'?)" in " ".join((out + err).split())
