"""`rollalloc ledger`, `replay` and `forecast`: from runs to a file, and from the file to a run that can be resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollalloc.runs.names import PRIORS

SAMPLES = Path(__file__).parents[1] / "waste" / "samples"
OWN = ("--model", "model", "--prompts", "prompts.parquet", "--reward", "my_reward.py:score", "--device", "cpu",
       "--max-new-tokens", 3, "--reward-workers", 0, "--checkpoint-every", 1)  # fmt: skip
FORESIGHT = ("train", "--recipe", "foresight", "--set", "groups=4", *OWN)


def lines(folder):
    """The metrics without what the clock says."""
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if "seconds" not in name} for line in read]


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_not_the_current_folder(call, tmp_path, name):
    code, said = call("ledger", "add", tmp_path / "l.db", name)
    assert code == 2
    assert "got an empty name; give . for the current folder" in said
    assert not (tmp_path / "l.db").exists()


def test_a_run_starts_from_a_ledger_and_is_resumed_without_it(call, tmp_path):
    ledger, first, whole, cut = (tmp_path / name for name in ("l.db", "first", "whole", "cut"))
    code, said = call(*FORESIGHT, "--max-rollouts", 40, "--log-rollouts", "--out", first)
    assert code == 0, said
    code, said = call("ledger", "add", ledger, first)
    assert code == 0
    assert "run 1, 40 rollouts" in said
    begin = (*FORESIGHT, "--ledger", ledger, "--seed", 1)
    assert call(*begin, "--max-rollouts", 24, "--out", whole)[0] == 0
    plain = tmp_path / "plain"
    assert call(*FORESIGHT, "--seed", 1, "--max-rollouts", 24, "--out", plain)[0] == 0
    assert lines(plain) != lines(whole)  # the ledger says something
    assert call(*begin, "--max-rollouts", 12, "--out", cut)[0] == 0
    kept = (cut / PRIORS).read_bytes()
    ledger.unlink()  # the run goes on with what it began with
    code, said = call(*begin, "--max-rollouts", 24, "--out", cut, "--resume", "--accept-recipe")
    assert code == 0, said
    assert (cut / PRIORS).read_bytes() == kept
    batches = [[line for line in lines(folder) if line["kind"] == "batch"] for folder in (cut, whole)]
    assert batches[0] == batches[1]
    assert json.loads((cut / "allocator.json").read_text()) == json.loads((whole / "allocator.json").read_text())


def test_a_ledger_that_nobody_reads_or_that_is_none_is_refused(call, tmp_path):
    (tmp_path / "mine").write_text("mine")
    code, said = call(*FORESIGHT, "--ledger", tmp_path / "mine", "--out", tmp_path / "o")
    assert code == 2
    assert "is not a ledger of rollalloc" in said
    code, said = call("train", "--recipe", "grpo", *OWN, "--ledger", tmp_path / "mine", "--out", tmp_path / "o")
    assert code == 2
    assert "does not look at priors" in said
    assert not (tmp_path / "o" / "metrics.jsonl").exists()


@pytest.mark.parametrize("format", ["trl", "verl", "prime-rl", "rollalloc"])
def test_logs_of_others_are_added_and_shown(call, tmp_path, format):
    ledger = tmp_path / "l.db"
    for again in (False, True):
        code, said = call("ledger", "add", ledger, SAMPLES / format, "--model", "theirs", "--threshold", 0.5)
        assert code == 0, said
        assert ("are not counted again" in said) == again
    code, said = call("ledger", "show", ledger, "--json")
    assert code == 0
    (run,) = json.loads(said)["runs"]
    assert run["format"] == format
    assert run["model"] == "theirs"
    assert 0 <= run["successes"] <= run["scored"] <= run["attempts"] == {"prime-rl": 24}.get(format, 96)
    assert "96 rollouts" in call("ledger", "show", ledger)[1] or format == "prime-rl"
    assert call("ledger", "show", ledger, "--prompt", "no such")[0] == 2


def test_a_run_without_rollouts_is_said_and_fails(call, tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "run.json").write_text("{}")
    code, said = call("ledger", "add", tmp_path / "l.db", tmp_path / "r")
    assert code == 2
    assert "without --log-rollouts" in said
    assert not (tmp_path / "l.db").exists()


def test_replay_and_forecast_say_what_they_are_not(call, tmp_path):
    code, said = call("replay", SAMPLES / "rollalloc", "--recipe", "grpo", "--set", "groups=4", "--set", "n=2",
                      "--resamples", 4, "--json")  # fmt: skip
    assert code == 0, said
    found = json.loads(said[said.index("{") :])
    assert 0 < found["support"] <= 1
    assert "not what is paid for accuracy" in found["notes"][0]
    evals = [{"kind": "eval", "at": at, "rollouts_paid": at, "tokens_paid": 5 * at, "seconds": 0.0, "optimizer_steps": at,
              "version": at, "accuracy": 0.5 + at / 10_000, "standard_error": 0.0} for at in (0, 1000)]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evals))
    code, said = call("forecast", tmp_path, "--target", 0.7, "--price", 2, "--json")
    assert code == 0, said
    found = json.loads(said)
    assert found["money"]["value"] == pytest.approx(found["tokens"]["value"] * 2e-6)
    assert call("forecast", tmp_path, "--target", 0.7, "--price", -1)[0] == 2
    assert call("forecast", tmp_path, "--target", 1.7)[0] == 2
