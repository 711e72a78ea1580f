"""Rewards that raise or hang, trainers that are broken off, workers that die: nothing hangs, nothing is lost in silence."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import pytest
import tiny_async
import tiny_trl
from transformers import TrainerCallback

from rollalloc.core.errors import NoScores
from rollalloc.experimental.trl_async.worker import AllocatedWorker
from rollalloc.generate.stream.backend import BackendDied
from rollalloc.generate.stream.settings import Streaming

pytestmark = pytest.mark.e2e


class Breaks(TrainerCallback):
    """Raises once, at a step's end or before the optimizer's."""

    def __init__(self, where: str, step: int, error: BaseException) -> None:
        self.where, self.step, self.error = where, step, error

    def _break(self, where: str, state) -> None:
        if self.error is not None and where == self.where and state.global_step == self.step:
            error, self.error = self.error, None
            raise error

    def on_step_end(self, args, state, control, **_):
        self._break("end", state)

    def on_optimizer_step(self, args, state, control, **_):
        self._break("stepped", state)

    def on_pre_optimizer_step(self, args, state, control, **_):
        self._break("before", state)


@pytest.mark.parametrize("name", ["grpo", "pilot_commit"])
@pytest.mark.parametrize(
    ("where", "step", "trained"), [("end", 2, 2), ("stepped", 1, 2), ("before", 1, 1)], ids=["end", "stepped", "before"]
)
def test_what_breaks_the_trainer_stops_the_worker_and_a_second_training_goes_on(
    name, where, step, trained, model, tmp_path
):
    breaks = Breaks(where, step, KeyboardInterrupt() if where == "end" else OSError("no space"))
    trainer = tiny_async.trainer(tmp_path, name, model, more={"callbacks": [breaks]})
    seen = tiny_async.Seen(trainer)
    with pytest.raises((KeyboardInterrupt, OSError)):
        trainer.train()
    assert not trainer.rollout_worker.running
    broken = len(seen.samples)
    trainer.train()
    core = trainer.allocation.allocator
    assert core.version == trained + 4, (
        "the batch of a step that was taken is trained once, of one that was not, in full"
    )
    assert len(seen.samples) - broken == 64
    assert not trainer.rollout_worker.running
    assert sum(core.accounts().values()) == core.paid


def test_a_reward_that_raises_ends_the_training_with_its_error(model, tmp_path):
    def broken(completions, **_):
        raise KeyError("broken")

    trainer = tiny_async.trainer(tmp_path, "grpo", model, reward=broken)
    with pytest.raises(KeyError, match="broken"):
        trainer.train()
    assert not trainer.rollout_worker.running
    with pytest.raises(KeyError, match="broken"):
        trainer.rollout_worker.check_health(1.0)


def test_a_reward_that_never_scores_ends_the_training(model, tmp_path):
    trainer = tiny_async.trainer(tmp_path, "grpo", model, reward=lambda completions, **_: [None] * len(completions))
    with pytest.raises(NoScores, match=r"no reward function .* had a score"):
        trainer.train()


def test_a_reward_that_hangs_is_reported_and_holds_nobody_up(model, tmp_path):
    held = threading.Event()

    def hangs(completions, **columns):
        held.wait(60)
        return tiny_trl.starts_right(completions, **columns)

    trainer = tiny_async.trainer(tmp_path, "grpo", model, reward=hangs, heartbeat_stale_after_s=5.0)
    with pytest.raises(RuntimeError, match=r"reward function has not answered.*WorkerScorer"):
        trainer.train()
    assert not trainer.rollout_worker.running
    held.set()


def test_a_generator_that_is_stopped_ends_the_training(model, tmp_path, forked_generators):
    """Its turns go on, so that no turn that hangs would say it; the prompts' features were made by the model."""

    def stops(completions, **columns):
        for process in multiprocessing.active_children():
            if process.name == "rollalloc generator":
                os.kill(process.pid, signal.SIGSTOP)
        return tiny_trl.starts_right(completions, **columns)

    trainer = tiny_async.trainer(
        tmp_path, "foresight", model, reward=stops, driver={"streaming": Streaming()}, heartbeat_stale_after_s=2.0
    )
    with pytest.raises(BackendDied, match=r"process that generates \(\d+\) has given no sign of life"):
        trainer.train()
    assert multiprocessing.active_children() == []


def test_what_generates_dies_and_is_reported(model, tmp_path):
    trainer = tiny_async.trainer(tmp_path, "grpo", model)
    worker = trainer.rollout_worker
    turn = worker._turn

    def dies():
        if trainer.state.global_step == 2:
            raise MemoryError("gone")
        turn()

    worker._turn = dies
    with pytest.raises(MemoryError, match="gone"):
        trainer.train()
    assert not worker.running


def test_weights_that_are_sent_beside_a_step_end_the_run(model, tmp_path):
    class Sends(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 1:
                trainer._sync_weight()

    trainer = tiny_async.trainer(tmp_path, "grpo", model, more={"callbacks": [Sends()]})
    with pytest.raises(RuntimeError, match="without an optimizer step"):
        trainer.train()


def test_generation_that_hangs_is_reported(model, tmp_path, monkeypatch):
    worker = tiny_async.trainer(tmp_path, "grpo", model).rollout_worker
    monkeypatch.setattr(AllocatedWorker, "running", True)
    worker._beat = time.monotonic() - 100
    worker.check_health(1000.0)
    with pytest.raises(RuntimeError, match=r"what generates has not answered for 1\d\d s"):
        worker.check_health(50.0)


def test_what_is_done_between_turns_is_done_by_the_worker_while_it_runs(model, tmp_path):
    """A checkpoint that another thread wrote would be of half a turn."""
    names = []

    class Asks(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            names.append(worker.between_turns(lambda: threading.current_thread().name))

    trainer = tiny_async.trainer(tmp_path, "grpo", model, more={"callbacks": [Asks()]}, max_steps=2)
    worker = trainer.rollout_worker
    trainer.train()
    assert names == ["rollalloc rollout worker"] * 2
    assert worker.between_turns(threading.current_thread) is threading.current_thread()


def test_a_step_that_was_taken_counts_although_the_worker_died_meanwhile(model, tmp_path):
    class Kills(TrainerCallback):
        def on_optimizer_step(self, args, state, control, **_):
            if state.global_step == 1:
                worker._turn = dies
                worker._thread.join(60)

    def dies():
        raise MemoryError("gone")

    trainer = tiny_async.trainer(tmp_path, "grpo", model, more={"callbacks": [Kills()]})
    worker, core = trainer.rollout_worker, trainer.allocation.allocator
    with pytest.raises(MemoryError, match="gone"):
        trainer.train()
    assert trainer.state.global_step == core.version == 2
    assert core.batch is None
    with pytest.raises(MemoryError, match="gone"):
        worker.between_turns(lambda: pytest.fail("half of a turn was saved"))
