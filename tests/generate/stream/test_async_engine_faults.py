"""Tests of the engine while everything around it fails, with the conformance kit's audit."""

import random
from concurrent.futures import Future
from dataclasses import replace

import pytest

from rollalloc import recipes
from rollalloc.core.allocator import Allocator
from rollalloc.generate.stream.backend import BackendDied
from rollalloc.models.checkpoint import newest
from rollalloc.models.settings import Sampling, Streaming
from rollalloc.rewards.function import Unscored
from rollalloc.rewards.scorers import InlineScorer
from rollalloc.testing.audit import Auditor
from rollalloc.testing.promises import watched
from rollalloc.train.evaluation import HeldOut
from tiny_policy import lines_of

ROLLOUTS = 300  # in CI; 2,000 where `slow` is asked for


class Audited(Allocator):
    """An allocator that has books kept of it by the conformance kit, with every rule of its recipe watched."""

    def __init__(self, recipe, prompts, seed):
        under_watch, verdicts = watched(recipe, recipe)
        super().__init__(under_watch, prompts, seed)
        self.audit = Auditor(recipe, verdicts)

    def tell(self, events):
        for event in events:
            self.audit.told(event)
            super().tell([event])

    def ask(self, capacity=None):
        actions = super().ask(capacity)
        self.audit.answered(actions, capacity)
        self.audit.accounts(self.accounts())
        return actions


class Faulty:
    """A back-end around another one: it loses rollouts, aborts some unasked, withholds news, and at times has no room."""

    def __init__(self, backend, draw):
        self.backend, self.draw = backend, draw
        self.withheld = []
        self.no_room = 0
        self.ended = 0

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def capacity(self):
        if self.no_room:
            self.no_room -= 1
            return 0
        if self.draw.random() < 0.05:
            self.no_room = 5
        return self.backend.capacity()

    def poll(self, wait_s):
        self.withheld += self.backend.poll(0.0)
        now = [each for each in self.withheld if self.draw.random() < 0.6]
        self.withheld = [each for each in self.withheld if each not in now]
        self.ended += len(now)
        return [self.spoilt(each) for each in now]

    def spoilt(self, ended):
        return replace(ended, truncated=False, cancelled=True) if self.draw.random() < 0.1 else ended


class Slow(InlineScorer):
    """A scorer that answers late, in any order, and loses some scores; `beat` lets time pass."""

    def __init__(self, function, draw):
        super().__init__(function)
        object.__setattr__(self, "draw", draw)
        object.__setattr__(self, "pending", [])

    def submit(self, samples):
        future = Future()
        outcomes = [Unscored("timed out") if self.draw.random() < 0.05 else each for each in self.score(samples)]
        self.pending.append((future, outcomes))
        return future

    def beat(self):
        for one in [one for one in self.pending if self.draw.random() < 0.3]:
            self.pending.remove(one)
            if one[0].set_running_or_notify_cancel():
                one[0].set_result(one[1])


RECIPES = {
    "grpo": replace(recipes.grpo(8, 4), max_staleness=1),
    "darts": replace(recipes.darts(8, 2, 1, tail="sampled"), max_staleness=2),  # a storm of cancellations
    # Two pilots are both right now and then: were none probed again, all prompts would be evicted before the end.
    "pilot_commit": recipes.pilot_commit(4, 2, 4, 12, promote="oldest", reprobe_every=1),
    "dapo": replace(recipes.dapo(4, 4, 8), max_staleness=1),
    "mopps": replace(recipes.mopps(8, 4), max_staleness=3),
    "foresight": replace(recipes.foresight(16, replay=4), max_staleness=2),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.e2e] * (name in ("dapo", "mopps", "foresight"))) for name in RECIPES]
)
@pytest.mark.parametrize("rollouts", [ROLLOUTS, pytest.param(2000, marks=pytest.mark.slow)])
def test_the_laws_hold_whatever_fails(trainer_of, policy, name, rollouts):
    draw = random.Random(name)
    scorer = Slow(lambda *, solution_str, **_: float(solution_str.startswith("a")), draw)
    trainer = trainer_of(
        RECIPES[name],
        rollouts,
        scorer=scorer,
        sampling=Sampling(8, max_rows=24),
        engine="async",
        streaming=Streaming(overlap=True),
        stop_when_barren=False,
    )
    trainer.config = replace(trainer.config, streaming=Streaming(overlap=False))  # of the back-end only
    audited = Audited(trainer.allocator.recipe, trainer.allocator.table, 0)
    trainer.allocator = trainer.state.allocator = audited
    engine = trainer.engine
    begin = trainer._make_engine(audited.recipe, None)._begin
    engine._begin = lambda version: Faulty(begin(version), draw)
    engine._wait_for_others = scorer.beat
    poll = engine.poll

    def polling(*, wait=True):
        scorer.beat()
        if draw.random() < 0.003:  # a pause: everything in flight is lost, and ordered again
            engine.close()
            trainer._begin_rollouts()
        return poll(wait=wait)

    engine.poll = polling
    why = trainer.run()
    assert why.startswith("the budget of ")
    assert rollouts - 40 < audited.paid == len(audited.audit.order_of) <= rollouts
    assert not audited.audit.live
    assert audited.accounts()["open"] == 0
    assert trainer.engine.generations == {}


@pytest.mark.parametrize("while_training", [False, True])
def test_a_back_end_that_is_gone_is_said_and_the_run_is_saved(trainer_of, tmp_path, while_training):
    """Also where that is found in the middle of an update, which ends first."""
    made = {"folder": tmp_path / "run", "checkpoint_minutes": None, "sampling": Sampling(8, max_rows=8)}
    made |= {"engine": "async", "streaming": Streaming(overlap=False)}
    recipe = replace(RECIPES["grpo"], max_staleness=1)
    trainer = trainer_of(recipe, max_batches=5, **made)
    begin, update, training = trainer.engine._begin, trainer.updater.update, []

    class Dies(Faulty):
        def poll(self, wait_s):
            if trainer.counters.batches == 2 and bool(training) == while_training:
                raise BackendDied("gone")
            return self.backend.poll(wait_s)

        def load_weights(self, weights, version):
            assert trainer.counters.batches <= 2, "it is gone"
            self.backend.load_weights(weights, version)

    def in_update(*batch, between_passes, **options):
        def between():
            training.append(True)
            between_passes()
            training.clear()

        return update(*batch, between_passes=between, **options)

    trainer.engine._begin = lambda version: Dies(begin(version), random.Random(1))
    trainer.updater.update = in_update
    with pytest.raises(BackendDied, match=f"gone; a checkpoint after batch {2 + while_training} is in .*--resume"):
        trainer.run()
    assert lines_of(tmp_path / "run")[-1]["kind"] == "failed"
    resumed = trainer_of(recipe, max_batches=5, **made)
    assert resumed.resume() == 2 + while_training
    assert resumed.updater.steps == 2 + while_training
    resumed.run()
    assert resumed.counters.batches == 5


@pytest.mark.parametrize("heldout", [False, True])
def test_a_back_end_that_never_generated_anything_leaves_no_checkpoint(trainer_of, tmp_path, prompts_of, heldout):
    held = HeldOut(prompts_of(4)) if heldout else None
    streams = {"engine": "async", "streaming": Streaming(overlap=False), "heldout": held}
    trainer = trainer_of(RECIPES["grpo"], max_batches=5, folder=tmp_path / "run", **streams)

    def begin(version):
        raise BackendDied("not there")

    trainer.engine._begin = begin
    with pytest.raises(BackendDied, match="not there; there is no checkpoint"):
        trainer.run()
    assert newest(tmp_path / "run") is None
