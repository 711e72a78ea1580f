"""`train()` once more on the same trainer: after an error, after Ctrl-C, after its end, and from a checkpoint."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny_trl
import torch
from transformers import TrainerCallback

from rollalloc.core.allocator import Allocator
from rollalloc.core.events import Done

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
    rewards = trainer_allocation(trainer).rewards
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
    "backward": before("accelerator.backward"),
    "clip": before("_clip_grad_norm"),
    "optimizer": in_callback("on_pre_optimizer_step"),
    "optimizer, first": in_callback("on_pre_optimizer_step", first=True),
    "after the optimizer": in_callback("on_optimizer_step", first=True),
    "step end": in_callback("on_step_end"),
    "step end, first": in_callback("on_step_end", first=True),
    "log": in_callback("on_log"),
}


def trainer_allocation(trainer: Any) -> Any:
    return getattr(trainer, "allocation", None) or trainer.rollout_func.allocation


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

    def check(self, core: Allocator, steps_a_batch: int = 1) -> None:
        accounts = core.accounts()
        assert sum(accounts.values()) == core.paid == len(self.ordered)
        assert set(self.ordered.values()) == set(self.done.values()) == {1}
        assert max(self.trained.values()) <= steps_a_batch
        assert sum(self.trained.values()) > 0
        waiting = sum(len(group.done) for group in core._groups.values())
        assert accounts["open"] == waiting + (0 if core.batch is None else len(core.batch.rows))


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> Books:
    return Books(monkeypatch)


@pytest.fixture(autouse=True)
def nothing_hangs() -> Iterator[None]:
    """The alarm goes off in place of a test that never ends."""

    def rang(*_: Any) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, rang)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
@pytest.mark.parametrize("place", PLACES)
def test_after_an_error_it_goes_on_and_trains_each_rollout_once(place, error, books, tmp_path):
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
    books.check(core)
