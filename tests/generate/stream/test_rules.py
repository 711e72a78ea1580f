"""The asynchronous engine's rules one by one, with a back-end and a core that do as they are told."""

from concurrent.futures import Future
from dataclasses import replace
from threading import Timer

import numpy as np
import pytest

from rollalloc import recipes
from rollalloc.core.events import Actions, Cancelled, Done, Failed, Order
from rollalloc.generate.sampling import Sampling, Streaming
from rollalloc.generate.stream.backend import Ended
from rollalloc.rewards.function import Scored
from rollalloc.rewards.scorers import InlineScorer

EOS = 2


class Scripted:
    """A back-end that notes what it is told, and gives back what `next` says."""

    def __init__(self):
        self.started, self.aborted, self.loaded, self.next = [], [], [], []

    def capacity(self):
        return 8

    def start(self, rows):
        self.started += rows

    def abort(self, rollouts):
        self.aborted += rollouts

    def step(self, wait_s):
        ended, self.next = self.next, []
        return ended

    def load(self, weights, version):
        self.loaded.append(version)

    def paces(self):
        return []

    def figures(self):
        return {}

    def close(self):
        pass


class Core:
    """An allocator that says what `next` says, and notes what it is told."""

    version = 0
    recipe = replace(recipes.grpo(1, 2), max_staleness=3)

    def __init__(self):
        self.next, self.told, self.outstanding_ = Actions(), [], Actions()

    def ask(self, capacity):
        said, self.next = self.next, Actions()
        return said

    def tell(self, events):
        self.told += events

    def outstanding(self):
        return self.outstanding_


@pytest.fixture
def scripted(trainer_of):
    """(scorer, overlap) → the engine, its back-end, its core, and a turn in which these come back from the back-end."""

    def made(scorer=None, overlap=True):
        streams = {"engine": "async", "streaming": Streaming(overlap=overlap), "sampling": Sampling(4)}
        trainer = trainer_of(Core.recipe, scorer=scorer, **streams)
        engine, backend, core = trainer.engine, Scripted(), Core()
        engine._begin = lambda version: backend

        def turn(*ended):
            backend.next = list(ended)
            engine.go_on(core)

        return engine, backend, core, turn

    return made


def ended(rollout, tokens, end="stop", version=0):
    logprobs = -np.arange(10, 10 + len(tokens), dtype=np.float32)
    return Ended(rollout, tuple(tokens), logprobs, ((version, len(tokens)),) if tokens else (), end)


def ordered(*rollouts, prompt=3):
    return Actions(generate=(Order(0, prompt, 0, rollouts),))


def test_a_rollout_that_goes_on_over_an_update_says_so(scripted):
    engine, backend, core, turn = scripted()
    core.next = ordered(1, 2)
    turn()
    engine.updated(1)
    assert (backend.loaded, backend.aborted) == ([1], [])
    turn(replace(ended(1, (5, 7, EOS)), spans=((0, 2), (1, 1))), ended(2, (7,), "length", version=1))
    turn()
    done = {event.rollout: event for event in core.told}
    assert (done[1].tokens, done[1].version, done[1].last_version, done[1].truncated) == (3, 0, 1, False)
    assert (done[2].tokens, done[2].version, done[2].last_version, done[2].truncated) == (1, 1, 1, True)
    assert engine.generations[1].logprobs.tolist() == [-10, -11, -12]
    assert engine.figures()["streaming"]["straddled"] == 1
    assert {*engine._order_of, *engine._running} == set()


def test_one_that_is_cancelled_while_it_is_scored_is_told_with_its_score(scripted):
    later = Future()

    class Late(InlineScorer):
        def submit(self, samples):
            return later

    _, backend, core, turn = scripted(Late(lambda **_: 1.0))
    core.next = ordered(1)
    turn()
    turn(ended(1, (7, EOS)))
    core.next = Actions(cancel=(1,))
    turn()
    assert (backend.aborted, core.told) == ([], [])
    later.set_result([Scored(1.0, 1.0)])
    turn()
    assert [type(event) for event in core.told] == [Done]


def test_where_nothing_overlaps_a_score_is_waited_for(scripted):
    later = Future()

    class Late(InlineScorer):
        def submit(self, samples):
            Timer(0.2, later.set_result, [[Scored(1.0, 1.0)]]).start()
            return later

    _, _, core, turn = scripted(Late(lambda **_: 1.0), overlap=False)
    core.next = ordered(1)
    turn()
    turn(ended(1, (7, EOS)))
    assert [type(event) for event in core.told] == [Done]


def test_after_a_pause_what_is_outstanding_is_begun_again_and_nothing_else_is_known(scripted):
    engine, backend, core, turn = scripted()
    core.next = ordered(1, 2, 4)
    turn()
    engine.close()
    backend.started.clear()
    core.outstanding_ = Actions(generate=(Order(0, 3, 0, (2,)),), cancel=(1,))
    turn(ended(2, (7,), "aborted"))
    assert core.told == [Cancelled(1, 0), Cancelled(2, 1)]
    assert [row.rollout for row in backend.started] == [2]
    assert engine._order_of == {}


def test_what_failed_is_told_with_its_reason_and_nothing_is_held_of_it(scripted):
    engine, _, core, turn = scripted()
    core.next = ordered(1)
    turn()
    turn(replace(ended(1, (7,), "failed"), reason="lost"))
    assert core.told == [Failed(1, "lost", 1)]
    assert {*engine.generations, *engine._order_of} == set()


def test_the_asynchronous_engine_tells_what_it_measured_where_the_recipe_wants_it(trainer_of):
    """Before there are enough steps nothing; then a curve through its own, which the run keeps; no other recipe has it."""
    priced = recipes.darts(2, 2, 1, tail="none", latency="measured")
    how = {"engine": "async", "streaming": Streaming(overlap=False), "sampling": Sampling(4)}
    for recipe in (priced, recipes.darts(2, 2, 1, tail="none")):
        trainer = trainer_of(replace(recipe, max_staleness=1), max_batches=2, **how)
        assert trainer.engine.latency() is None
        trainer.engine.steps += [(1, 0.1)] * 63
        assert trainer.engine.latency() is None
        trainer.engine.steps += [(rows, 0.01 * rows) for rows in range(1, 9)] * 8 + [(0, 0.5), *[(3, 0.0)] * 500]
        assert all(seconds > 0 for _, seconds in trainer.engine.latency())
        trainer.run()
        told = trainer.allocator._run.latency
        assert (told is not None) == (recipe is priced)
    assert [seconds for _, seconds in told or trainer.engine.latency()] == sorted(
        s for _, s in trainer.engine.latency()
    )
    with pytest.raises(ValueError, match="which the synchronous engine does not measure"):
        trainer_of(priced)
