"""Tests of a second call of `train()`: after an error, after Ctrl-C, after its end, and from a checkpoint."""

# pyright: reportArgumentType=false

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import tiny_trl
import torch
from transformers import TrainerCallback

from arithmetic import assert_same_gradients, gradients_of, tokens_by_key
from rollalloc.core.allocator import Allocator
from rollalloc.core.events import Done
from rollalloc.recipes.pilot_commit import Band
from rollalloc.rules import prompts, rows

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]  # a test of these that fails may hang

STEPS = 4


class Broken(Exception):
    """What the test raises."""


class Fuse:
    """Raises at its n-th call, once."""

    def __init__(self, at: int, error: type[BaseException] = Broken) -> None:
        self.left, self.error = at, error

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


class Watch(TrainerCallback):
    """Raises in one of the trainer's events."""

    def __init__(self, event: str, fuse: Fuse) -> None:
        setattr(self, event, lambda *given, **named: fuse())


def in_reward(trainer: Any, fuse: Fuse) -> None:
    rewards = trainer.allocation.rewards
    inner = rewards.functions[0]

    def function(**given: Any) -> Any:
        fuse()
        return inner(**given)

    object.__setattr__(rewards, "functions", [function])


def before(name: str) -> Callable[[Any, Fuse], None]:
    """Raise before a method of the trainer, or of what one of its attributes holds, is called."""

    def put(trainer: Any, fuse: Fuse) -> None:
        *path, method = name.split(".")
        for part in path:
            trainer = getattr(trainer, part)
        inner = getattr(trainer, method)

        def call(*given: Any, **named: Any) -> Any:
            fuse()
            return inner(*given, **named)

        setattr(trainer, method, call)

    return put


def in_callback(event: str, *, first: bool = False) -> Callable[[Any, Fuse], None]:
    def put(trainer: Any, fuse: Fuse) -> None:
        trainer.add_callback(Watch(event, fuse))
        if first:
            trainer.callback_handler.callbacks.insert(0, trainer.callback_handler.callbacks.pop())

    return put


PLACES: dict[str, Callable[[Any, Fuse], None]] = {
    "reward": in_reward,
    "loss": before("compute_loss"),
    "optimizer, first": in_callback("on_pre_optimizer_step", first=True),
    "after the optimizer": in_callback("on_optimizer_step", first=True),
    "step end, first": in_callback("on_step_end", first=True),
    "log": in_callback("on_log"),
}


class Books:
    """What the core was told and gave out, and how often the optimizer stepped on each batch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ordered: Counter[int] = Counter()
        self.done: Counter[int] = Counter()
        self.trained: Counter[int] = Counter()
        ask, tell = Allocator.ask, Allocator.tell
        step = torch.optim.AdamW.step

        def asked(core: Allocator, capacity: int | None = None) -> Any:
            actions = ask(core, capacity)
            self.ordered.update(rollout for order in actions.generate for rollout in order.rollouts)
            return actions

        def told(core: Allocator, events: Any) -> None:
            events = list(events)
            tell(core, events)
            self.done.update(event.rollout for event in events if isinstance(event, Done))

        def stepped(optimizer: Any, *given: Any, **named: Any) -> Any:
            found = step(optimizer, *given, **named)
            if self.core is not None and self.core.batch is not None:
                self.trained.update(row.rollout for row in self.core.batch.rows)
            return found

        self.core: Allocator | None = None
        monkeypatch.setattr(Allocator, "ask", asked)
        monkeypatch.setattr(Allocator, "tell", told)
        monkeypatch.setattr(torch.optim.AdamW, "step", stepped)

    def check(self, allocation: Any, steps_a_batch: int = 1) -> None:
        """Each rollout was ordered once, ended once and trained at most once, and what is open is there."""
        core = allocation.allocator
        assert sum(core.accounts().values()) == core.paid == len(self.ordered)
        assert set(self.ordered.values()) == set(self.done.values()) == {1}
        assert len(self.done) == core.paid - core.accounts()["cancelled"]
        assert 1 <= max(self.trained.values()) <= steps_a_batch
        assert not core.outstanding().generate
        allocation._ask(0)  # what may be freed is
        assert len(allocation.rollouts) == core.accounts()["open"]


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> Books:
    return Books(monkeypatch)


@pytest.mark.parametrize(
    ("place", "error"), [*((place, Broken) for place in PLACES), ("optimizer, first", KeyboardInterrupt)]
)
def test_a_trainer_continues_after_an_error_and_trains_each_rollout_once(place, error, books, tmp_path):
    trainer = tiny_trl.trainer(tmp_path, "pilot_commit", max_steps=STEPS)
    core = books.core = trainer.allocation.allocator
    PLACES[place](trainer, Fuse(3, error))
    with pytest.raises(error):
        trainer.train()
    version, steps = core.version, sum(books.trained.values()) // 16
    assert steps in (version, version + 1)
    trainer.train()
    assert trainer.state.global_step == STEPS
    assert core.version == sum(books.trained.values()) // 16 == steps + STEPS
    books.check(trainer.allocation)


SHAPES: dict[str, dict[str, Any]] = {
    "micro-batches": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
    "two passes": {"num_iterations": 2},
    "two steps": {"steps_per_generation": 2, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
}


@pytest.mark.parametrize(
    ("shape", "place"), [("micro-batches", "loss"), ("two passes", "step end, first"), ("two steps", "reward")]
)
def test_train_begins_with_a_new_batch_wherever_the_last_call_broke_off(shape, place, books, tmp_path):
    """TRL's own count of micro-batches stands in the middle of a batch then."""
    trainer = tiny_trl.trainer(tmp_path, "pilot_commit", max_steps=STEPS, **SHAPES[shape])
    core = books.core = trainer.allocation.allocator
    PLACES[place](trainer, Fuse(3))
    with pytest.raises(Broken):
        trainer.train()
    broken_off = core.version + (
        core.batch is not None and any(row.rollout in books.trained for row in core.batch.rows)
    )
    trainer.train()
    steps_a_batch = 1 if shape == "micro-batches" else 2
    assert core.version == broken_off + STEPS // steps_a_batch
    books.check(trainer.allocation, steps_a_batch)


def test_a_second_call_of_train_continues_with_other_prompts(books, tmp_path):
    trainer = tiny_trl.trainer(tmp_path, "grpo")
    core = books.core = trainer.allocation.allocator
    for calls in (1, 2):
        trainer.train()
        assert core.version == calls * STEPS
    books.check(trainer.allocation)
    assert (core.statistics.attempts_N > 0).sum() == 2 * STEPS * 4


@pytest.mark.parametrize("place", ["reward", "step end, first"])
def test_after_an_error_the_same_trainer_resumes_exactly(place, tmp_path):
    given = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4}
    whole = tiny_trl.trainer(tmp_path / "whole", "pilot_commit", **given)
    whole.train()
    again = tiny_trl.trainer(tmp_path / "again", "pilot_commit", **given)
    again.train()
    PLACES[place](again, Fuse(2))
    with pytest.raises(Broken):
        again.train()
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    theirs = tiny_trl.weights(again.model)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in tiny_trl.weights(whole.model).items())
    assert again.allocation.allocator.state_dict() == whole.allocation.allocator.state_dict()


RULES = {
    "draw": (prompts.Shuffled, "pick"),
    "judge": (Band, "__call__"),
    "rows": (rows.Everything, "__call__"),
}


@pytest.mark.parametrize("rule", RULES)
def test_ctrl_c_within_the_core_waits_until_its_step_is_done(rule, books, monkeypatch, tmp_path):
    trainer = tiny_trl.trainer(tmp_path, "pilot_commit", max_steps=8)
    books.core = trainer.allocation.allocator
    kind, method = RULES[rule]
    inner, left = getattr(kind, method), 5

    def call(*given: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            signal.raise_signal(signal.SIGINT)
        return inner(*given)

    monkeypatch.setattr(kind, method, call)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    books.check(trainer.allocation)


def test_a_step_broken_off_before_the_optimizer_is_repeated_exactly(tmp_path):
    """Generated again, a rollout is the same: its draws are keyed by its number."""
    given = {"learning_rate": 1e-3, "max_grad_norm": 1e9}
    whole, again = (tiny_trl.trainer(tmp_path / name, "pilot_commit", **given) for name in ("whole", "again"))
    with tokens_by_key(), gradients_of(whole.model) as expected:
        whole.train()
    with tokens_by_key(), gradients_of(again.model) as taken:
        for place in ("reward", "loss"):
            PLACES[place](again, Fuse(1))
            with pytest.raises(Broken):
                again.train()
        again.train()
    assert_same_gradients(expected, taken)  # to rounding: TRL shuffles the rows by torch's random state


@pytest.mark.parametrize(("at", "use_sampler"), [(1, None), (2, None), (5, None), (1, False)])
def test_rollouts_that_were_being_stopped_are_made_up_for(at, use_sampler, books, tmp_path):
    driver = {"use_sampler": use_sampler}
    trainer = tiny_trl.trainer(tmp_path, "darts_none", driver=driver, max_completion_length=12, max_steps=STEPS)
    core = books.core = trainer.allocation.allocator
    in_reward(trainer, Fuse(at))
    with pytest.raises(Broken):
        trainer.train()
    trainer.train()
    assert core.version >= STEPS
    assert (core.accounts()["cancelled"] > 0) == (use_sampler is None)
    books.check(trainer.allocation)
