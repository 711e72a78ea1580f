"""Tests of `SilenceCallback`: it warns beside stock TRL's trainer if rewards give no learning signal."""

from types import SimpleNamespace

import pytest

from rollalloc import Allocator, recipes
from rollalloc.drivers.trl import SilenceCallback
from rollalloc.drivers.trl.callback import AllocationCallback

ARGS = SimpleNamespace(
    per_device_train_batch_size=8, world_size=2, gradient_accumulation_steps=8, num_iterations=1
)  # 128 rollouts a step
ONE_STEP = {"steps_per_generation": 1, "num_iterations": 1, "gradient_accumulation_steps": 1}  # a batch


def logged(shares, *, every=10):
    return [
        {"step": every * at, "frac_reward_zero_std": share, "reward": 0.05, "loss": 0.0}
        for at, share in enumerate(shares, start=1)
    ]


def state_of(history):
    return SimpleNamespace(log_history=list(history), global_step=0, is_world_process_zero=True)


def told(callback, state, lines):
    for line in lines:
        state.global_step = line["step"]
        callback.on_log(ARGS, state, None, logs={name: value for name, value in line.items() if name != "step"})


def test_the_silence_callback_warns_once_with_a_remedy(caplog):
    callback, state = SilenceCallback(), state_of([])
    callback.on_train_begin(ARGS, state, None)
    told(callback, state, logged([0.8] * 20))
    [said] = [record.message for record in caplog.records]
    assert said.startswith(
        "80% of the last 2,048 rollouts were in groups of equal rewards, whose loss is zero; mean reward 0.05"
    )
    assert said.endswith("all wrong, easier prompts or a stronger model would help; if all right, harder prompts")


def test_rewards_that_never_differ_are_said_at_once_with_what_to_check(caplog):
    callback, state = SilenceCallback(), state_of([])
    told(callback, state, logged([1.0] * 20, every=1))
    [said] = [record.message for record in caplog.records]
    assert said.startswith("check the reward function: of the last rollouts no two to the same prompt got different")
    assert "mean reward 0.05. Test it with an answer that you know to be right" in said


@pytest.mark.parametrize("at", [1, 5, 30])
def test_a_resumed_run_says_what_the_other_says(at, caplog):
    lines = logged([0.3] * 3 + [0.6] * 10 + [0.9] * 20 + [0.1] * 10 + [0.7] * 10)
    whole, resumed = SilenceCallback(), SilenceCallback()
    told(whole, state_of([]), lines[:at])
    caplog.clear()
    told(whole, state_of([]), lines[at:])
    expected = [record.message for record in caplog.records]
    state = state_of(lines[:at])
    resumed.on_train_begin(ARGS, state, None)
    caplog.clear()
    told(resumed, state, lines[at:])
    assert [record.message for record in caplog.records] == expected


@pytest.mark.parametrize(("notices", "main"), [(True, True), (True, False), (False, True)])
def test_under_a_recipe_the_callback_says_what_the_core_says(notices, main, caplog):
    allocation = SimpleNamespace(
        finished=None,
        allocator=Allocator(recipes.grpo(2, 2), 4, 0),
        trained=lambda: None,
        rewards=SimpleNamespace(is_weighted_sum=True, names=("right",)),
    )
    allocation.allocator.teaching.add({"all_wrong": 2048})
    allocation.allocator.teaching.after_batch()
    callback = AllocationCallback(allocation, None, None, accept_recipe=False, accept_data=False, notices=notices)
    state = SimpleNamespace(global_step=1, is_world_process_zero=main)
    callback.on_step_end(SimpleNamespace(**ONE_STEP), state, None)
    said = [record.message for record in caplog.records]
    assert [message[:29] for message in said] == ["check the reward function: th"] * (notices and main)


@pytest.mark.parametrize(("iterations", "every", "line"), [(1, 10, 2), (1, 1, 16), (4, 10, 7)])
def test_each_line_counts_the_rollouts_since_the_one_before(iterations, every, line, caplog):
    """128 rows a step, trained on so many times: the window of 2,048 is full after so many lines."""
    callback, state = SilenceCallback(), state_of([])
    args = SimpleNamespace(**vars(ARGS) | {"num_iterations": iterations})
    for at, logs in enumerate(logged([0.75] * 20, every=every), start=1):
        state.global_step = logs["step"]
        for _ in range(2):  # the same step again, as with logs of a recovered run, has no rollouts of its own
            callback.on_log(args, state, None, logs=logs)
        assert len(caplog.records) == (at >= line)


def test_only_one_process_warns(caplog):
    callback, state = SilenceCallback(), state_of([])
    state.is_world_process_zero = False
    told(callback, state, logged([1.0] * 20))
    assert caplog.records == []
