"""Runs of recipes that predict: where their features are from, what is kept of them, and a resume."""

import json
import logging
from dataclasses import replace

import numpy as np
import pytest

from rollalloc.data.feature_blocks import own_features
from rollalloc.data.feature_file import read_features, write_features
from rollalloc.data.prompts import load_prompts
from rollalloc.train.config import Config
from rollalloc.train.train import train
from tiny_policy import killed_after, lines_of, untimed

FORESIGHT = {"groups": 8, "replay": 4, "replay_staleness": 3}


@pytest.fixture
def predicting(run_of):
    def made(parameters=FORESIGHT, recipe="foresight", **changes) -> Config:
        return run_of(recipe, parameters, **changes)

    return made


def batches_of(folder):
    return [line for line in lines_of(folder) if line["kind"] == "batch"]


# About half of any model's answers are right: what is replayed must not hang on what a hardly trained one happens to solve.
HALF = """
from hashlib import sha256


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(sha256(f"{ground_truth} {solution_str}".encode()).digest()[0] % 2)
"""


def test_features_are_made_at_the_start_and_kept_with_the_run(predicting, tmp_path):
    (tmp_path / "half.py").write_text(HALF)
    run = predicting(reward=f"{tmp_path / 'half.py'}:compute_score")
    train(run, tmp_path / "run")
    prompts = load_prompts(*run.prompts)
    kept = read_features(tmp_path / "run" / "features.safetensors", prompts.keys)
    assert set(kept.blocks) == {"hidden", "tokens", "length"}
    [cost] = [line for line in lines_of(tmp_path / "run") if line["kind"] == "features"]
    assert (cost["features_prompts"], cost["features_tokens"]) == (80, kept.cost.tokens)
    assert cost["rollouts_paid"] == 0
    batches = batches_of(tmp_path / "run")
    assert all(batch["groups"] == 8 and batch["rows"] == 8 + batch["replayed"] for batch in batches)
    assert sum(batch["replayed"] for batch in batches) > 0
    assert "weight/record" in batches[-1]["prediction"]


def test_a_resumed_run_goes_on_with_its_features_and_is_the_unbroken_one(predicting, tmp_path, monkeypatch):
    run = predicting(checkpoint_every=2)
    train(run, tmp_path / "unbroken")

    with pytest.raises(KeyboardInterrupt):
        train(run, tmp_path / "broken", killed_after(7))

    def another_machine(*_, **__):
        raise AssertionError("features are made again, which another machine would round otherwise")

    monkeypatch.setattr("rollalloc.train.loading.features_of", another_machine)
    train(run, tmp_path / "broken", resume=True)
    assert untimed(tmp_path / "broken") == untimed(tmp_path / "unbroken")


def test_features_of_ones_own_are_read_by_key(predicting, tmp_path):
    run = predicting()
    prompts = load_prompts(*run.prompts)
    rows_ND = np.random.default_rng(0).standard_normal((80, 3))
    write_features(tmp_path / "own.safetensors", prompts.keys[::-1], own_features({"mine": rows_ND[::-1]}))
    train(predicting(features=str(tmp_path / "own.safetensors")), tmp_path / "run")
    assert {"weight/mine/0.1", "weight/mine/1", "weight/mine/10"} <= batches_of(tmp_path / "run")[-1][
        "prediction"
    ].keys()


def test_without_features_it_says_so_and_predicts_from_records(predicting, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        train(predicting(features="none"), tmp_path / "run")
    assert "without features" in caplog.text
    assert not (tmp_path / "run" / "features.safetensors").exists()
    assert not [line for line in lines_of(tmp_path / "run") if line["kind"] == "features"]


@pytest.mark.parametrize(
    ("recipe", "parameters", "features", "error", "message"),
    [
        ("grpo", {"groups": 4, "n": 4}, "none", ValueError, "does not use them"),
        ("foresight", FORESIGHT, "missing.safetensors", FileNotFoundError, "expected a file that"),
    ],
)
def test_features_that_nobody_reads_or_that_are_not_there_are_refused(
    predicting, tmp_path, monkeypatch, recipe, parameters, features, error, message
):
    monkeypatch.setattr("rollalloc.train.train.Policy.load", lambda *_, **__: pytest.fail("a model is loaded"))
    with pytest.raises(error, match=message):
        train(predicting(parameters, recipe, features=features), tmp_path / "run")


def test_spo_is_told_how_far_the_weights_moved(predicting, tmp_path):
    train(predicting({"groups": 8}, "spo"), tmp_path / "run")
    moved = [batch["approx_kl"] for batch in batches_of(tmp_path / "run")]
    assert all(0 <= each < 1 for each in moved)
    assert max(moved) > 0
    state = json.loads((tmp_path / "run" / "allocator.json").read_text())
    assert state["kl_sum"] == pytest.approx(sum(moved))


def gated(run, moved, **parameters):
    """The run with 4 rows replayed behind a gate with this bound; weights that move by much in an update."""
    return replace(run, parameters={"groups": 8, "replay": 4, "replay_moved": moved, **parameters}, learning_rate=3e-3)


def test_a_gate_that_leaves_every_replayed_row_out_trains_as_without_replay(predicting, tmp_path, caplog):
    """With two steps a batch, in metrics to the digit, but for what is measured; after eight batches, a warning says so."""
    (tmp_path / "half.py").write_text(HALF)
    run = predicting(recipe="reinforce", reward=f"{tmp_path / 'half.py'}:compute_score", max_rollouts=96)
    run = replace(run, optimizer_steps_per_batch=2)
    for name, made in {
        "shut": gated(run, 0.0, replay_pause=0),
        "without": replace(run, parameters={"groups": 8}, learning_rate=3e-3),
    }.items():
        train(made, tmp_path / name)
    shut, without = (batches_of(tmp_path / name) for name in ("shut", "without"))
    for one, other in zip(shut, without, strict=True):
        assert {name for name in one if name not in other} == {"moved", "left_out"}
        assert {name: one[name] for name in other if "seconds" not in name} == {
            name: other[name] for name in other if "seconds" not in name
        }
    assert [line["left_out"] for line in shut] == list(range(0, 4 * len(shut), 4))
    assert shut[0]["moved"] is None
    assert all(0 < line["moved"] <= 1 for line in shut[1:])
    assert [line.split(" that had")[0] for line in caplog.messages if "replay gives nothing" in line] == [
        "replay gives nothing: in each of the last 8 batches"
    ]


def test_a_run_behind_a_gate_resumes_in_a_pause(predicting, tmp_path):
    (tmp_path / "half.py").write_text(HALF)
    run = predicting(recipe="reinforce", reward=f"{tmp_path / 'half.py'}:compute_score", checkpoint_every=1)
    run = gated(run, 0.05, replay_pause=2)
    train(run, tmp_path / "unbroken")
    batches = batches_of(tmp_path / "unbroken")
    asked = [line["moved"] is not None for line in batches]
    assert True in asked, "it was asked"
    assert False in asked[1:], "it paused"
    with pytest.raises(KeyboardInterrupt):
        train(run, tmp_path / "broken", killed_after(5))
    train(run, tmp_path / "broken", resume=True)
    assert untimed(tmp_path / "broken") == untimed(tmp_path / "unbroken")
