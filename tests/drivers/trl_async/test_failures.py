"""Rewards that raise or hang, trainers that are broken off, workers that die: nothing hangs, nothing is lost in silence."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import CancelledError, Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_async
import tiny_trl
from transformers import TrainerCallback

from rollalloc.core.errors import NoScores
from rollalloc.experimental.trl_async import trainer as driver
from rollalloc.experimental.trl_async import worker as worker_module
from rollalloc.experimental.trl_async.worker import AllocatedWorker
from rollalloc.generate.stream.backend import BackendDied
from rollalloc.generate.stream.settings import Streaming
from rollalloc.rewards.frameworks import Reward
from rollalloc.rewards.scorers import WorkerScorer

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


def test_a_reward_whose_own_work_was_cancelled_ends_the_training_with_that(model, tmp_path):
    """As one does that waits for an executor of its own; only `stop` cancels without an error."""

    def cancelled(completions, **_):
        raise CancelledError("their executor")

    trainer = tiny_async.trainer(tmp_path, "grpo", model, reward=cancelled)
    with pytest.raises(CancelledError, match="their executor"):
        trainer.train()


@pytest.mark.parametrize("wrong", [[1.0], [float("inf")] * 64, "text"])
def test_a_reward_that_returns_nonsense_ends_the_training(wrong, model, tmp_path):
    trainer = tiny_async.trainer(tmp_path, "grpo", model, reward=lambda **_: wrong)
    with pytest.raises(ValueError, match="must return"):
        trainer.train()


def test_a_reward_that_exits_does_not_hang(model, tmp_path):
    def exits(completions, **_):
        raise SystemExit(0)

    trainer = tiny_async.trainer(tmp_path, "grpo", model, reward=exits)
    with pytest.raises(SystemExit):
        trainer.train()


def test_a_reward_in_processes_that_hangs_costs_its_rollouts_alone(model, tmp_path):
    file = tmp_path / "hostile.py"
    file.write_text(
        "import time\n"
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if ground_truth == 'a1':\n"
        "        time.sleep(600)\n"
        "    return float(solution_str.startswith('a'))\n"
    )
    with WorkerScorer(f"{file}:score", limit_s=0.3) as scorer:
        reward = Reward(scorer, ground_truth="answer")
        trainer = tiny_async.trainer(tmp_path, "grpo", model, reward=reward, max_steps=1, dataset=tiny_trl.prompts(8))
        trainer.train()
    accounts = trainer.allocation.allocator.accounts()
    assert accounts["failed"] > 0
    assert sum(accounts.values()) == trainer.allocation.allocator.paid


def test_a_worker_that_is_not_there_is_reported(model, tmp_path):
    trainer = tiny_async.trainer(tmp_path, "grpo", model)
    with pytest.raises(RuntimeError, match="not running"):
        trainer.rollout_worker.check_health(1.0)
    trainer.rollout_worker.stop()


def test_nothing_is_left_running(model, tmp_path):
    before = {thread.name for thread in threading.enumerate()}
    tiny_async.trainer(Path(tmp_path), "dapo", model).train()
    until = time.monotonic() + 10
    while any(t.name.startswith("rollalloc judge") for t in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(t.name.startswith("rollalloc") and t.name not in before for t in threading.enumerate())


def test_features_may_take_longer_than_a_heartbeat(model, tmp_path, monkeypatch):
    made, said = driver._of_model, []

    def slow(*given):
        time.sleep(0.2)
        try:
            trainer.rollout_worker.check_health(0.1)
        except RuntimeError as error:
            said.append(error)
        return made(*given)

    monkeypatch.setattr(driver, "_of_model", slow)
    trainer = tiny_async.trainer(tmp_path, "foresight", model, max_steps=1)
    trainer.train()
    assert not said


def test_a_training_that_ended_before_it_began_may_be_begun_again(model, tmp_path):
    """A callback of the user's comes before TRL's own, which starts the worker."""

    class Away(TrainerCallback):
        error: OSError | None = OSError("tracker")

        def on_train_begin(self, args, state, control, **_):
            if self.error is not None:
                error, self.error = self.error, None
                raise error

    trainer = tiny_async.trainer(tmp_path, "grpo", model, more={"callbacks": [Away()]}, max_steps=2)
    with pytest.raises(OSError, match="tracker"):
        trainer.train()
    trainer.train()
    assert trainer.state.global_step == trainer.allocation.allocator.version == 2


def test_work_between_turns_that_ends_as_its_wait_does_is_done(model, tmp_path, monkeypatch):
    class Late(Future):
        def result(self, timeout=None):
            super().result(None)
            if timeout is not None:
                raise TimeoutError
            return super().result()

    monkeypatch.setattr(worker_module, "Future", Late)
    saving = {"save_strategy": "steps", "save_steps": 1}
    trainer = tiny_async.trainer(tmp_path, "grpo", model, max_steps=1, **saving)
    trainer.train()
    assert (tmp_path / "checkpoint-1" / "rollalloc").is_dir()


@pytest.mark.parametrize(("busy", "who"), [(60.0, "a reward function"), (10.0, "what generates")])
def test_a_turn_that_waits_for_a_reward_is_no_hang_of_generation(model, tmp_path, monkeypatch, busy, who):
    worker = tiny_async.trainer(tmp_path, "grpo", model).rollout_worker
    monkeypatch.setattr(AllocatedWorker, "running", True)
    worker._judge = SimpleNamespace(busy_s=lambda: busy)
    worker._beat = time.monotonic() - 70
    worker.check_health(65.0)
    with pytest.raises(RuntimeError, match=f"{who} has not answered"):
        worker.check_health(50.0)
