"""Checkpoints: a run that was stopped, or killed, goes on with what was held and what was not consumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_async

from arithmetic import assert_same_gradients, gradients_of, tokens_by_key
from rollalloc.drivers.trl.callback import newest_with_state

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("name", ["grpo", "reinforce"])
def test_a_run_that_was_stopped_and_resumed_is_the_run_that_was_not(name, model, tmp_path):
    """Which rollouts share a forward pass depends on the clock, and their rounding on that: so, tokens by key."""
    saving = {"save_strategy": "steps", "save_steps": 3}
    with tokens_by_key():
        whole = tiny_async.trainer(tmp_path / "whole", name, model, max_steps=6, **saving)
        with gradients_of(whole.model) as expected:
            whole.train()
        tiny_async.trainer(tmp_path / "parts", name, model, max_steps=3, **saving).train()
        second = tiny_async.trainer(tmp_path / "parts", name, model, max_steps=6, **saving)
        with gradients_of(second.model) as taken:
            second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 6
    assert_same_gradients(expected[3:], taken)
    figures = [
        {key: line[key] for key in ("reward", "rollalloc/rollouts_paid", "rollalloc/accounts/trained")}
        for made in (second, whole)
        for line in made.state.log_history
        if line.get("step") == 6 and "loss" in line
    ]
    assert len(figures) == 2
    assert figures[0] == figures[1]


@pytest.mark.parametrize("name", ["pilot_commit", "grpo_ahead"])
def test_a_batch_that_was_made_and_not_consumed_is_trained_after_a_resume(name, model, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 3}
    first = tiny_async.trainer(tmp_path, name, model, max_steps=3, **saving)
    between, outstanding = first.rollout_worker.between_turns, []

    def once_a_batch_is_there(work):
        """The worker is given time to make the next batch before the checkpoint is written."""
        until = time.monotonic() + 30
        while first.allocation.allocator.batch is None and time.monotonic() < until:
            time.sleep(0.01)
        outstanding.append([row.rollout for row in first.allocation.allocator.batch.rows])
        return between(work)

    first.rollout_worker.between_turns = once_a_batch_is_there
    first.train()
    second = tiny_async.trainer(tmp_path, name, model, max_steps=5, **saving)
    seen = tiny_async.Seen(second)
    second.train(resume_from_checkpoint=True)
    core = second.allocation.allocator
    assert [row.rollout for row in seen.batches[0].rows] == outstanding[-1]
    assert [sample.advantage for sample in seen.samples[:16]] == [row.advantage for row in seen.batches[0].rows]
    assert second.state.global_step == core.version == 5
    assert max(seen.staleness) <= core.recipe.max_staleness
    assert sum(core.accounts().values()) == core.paid
    place = newest_with_state(tmp_path)
    assert not list(place.glob("rollalloc/**/*.p*kl*"))
    assert {file.suffix for file in (place / "rollalloc").rglob("*") if file.is_file()} == {".json", ".safetensors"}


def test_rows_that_the_trainer_would_drop_unseen_end_a_resumed_run(model, tmp_path):
    """A batch that was made under a looser bound than the one of the run that goes on."""
    trainer = tiny_async.trainer(tmp_path, "grpo_ahead", model, max_staleness=1)
    trainer.rollout_worker._max_staleness = 0
    with pytest.raises(ValueError, match=r"1 updates old, and TRL drops rows older than max_staleness=0"):
        trainer.train()


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on(model, tmp_path):
    given = {"out": str(tmp_path), "recipe": "pilot_commit", "model": model, "max_steps": 400, "save_strategy": "steps"}
    given |= {"save_steps": 2, "save_total_limit": 3}
    program = [sys.executable, str(Path(tiny_async.__file__))]
    path = os.pathsep.join([str(Path(tiny_async.__file__).parents[1] / "trl"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen([*program, json.dumps(given)], env=environment, stdout=subprocess.DEVNULL)
    try:
        while newest_with_state(tmp_path) is None or len(list(tmp_path.glob("checkpoint-*"))) < 3:
            assert running.poll() is None
            time.sleep(0.05)
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
    step = int(newest_with_state(tmp_path).name.rpartition("-")[2])
    given |= {"resume": True, "max_steps": step + 4}
    subprocess.run([*program, json.dumps(given)], env=environment, check=True, stdout=subprocess.DEVNULL)
    assert json.loads((tmp_path / "end.json").read_text())["step"] == step + 4


def test_another_recipe_is_refused_unless_it_is_accepted(model, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2}
    tiny_async.trainer(tmp_path, "grpo", model, max_steps=2, **saving).train()
    other = tiny_async.trainer(tmp_path, "dapo", model, max_steps=3)
    with pytest.raises(ValueError, match="another recipe"):
        other.train(resume_from_checkpoint=True)
    accepted = tiny_async.trainer(tmp_path, "dapo", model, max_steps=3, driver={"accept_recipe": True})
    accepted.train(resume_from_checkpoint=True)
    assert accepted.state.global_step == 3
