"""Tests of the asynchronous engine with a made-up back-end: versions, cancelled rollouts, and waiting for scores."""

from concurrent.futures import Future
from dataclasses import replace
from threading import Timer

import numpy as np
import pytest

from rollalloc import recipes
from rollalloc.core.events import Order
from rollalloc.generate.sampler import Generation
from rollalloc.models.settings import Sampling, Streaming
from rollalloc.rewards.function import Scored
from rollalloc.rewards.scorers import InlineScorer

EOS = 2
AHEAD = replace(recipes.grpo(1, 2), max_staleness=3)


class Scripted:
    """A back-end that notes what it is told, and gives back what `next` says."""

    def __init__(self):
        self.submitted, self.cancelled, self.loaded, self.next = [], [], [], []

    def capacity(self):
        return 8

    def submit(self, rows):
        self.submitted += rows

    def cancel(self, rollouts):
        self.cancelled += rollouts

    def poll(self, wait_s):
        ended, self.next = self.next, []
        return ended

    def load_weights(self, weights, version):
        self.loaded.append(version)

    def paces(self):
        return []

    def figures(self):
        return {}

    def close(self):
        pass


@pytest.fixture
def scripted(trainer_of):
    """(scorer, overlap) → the engine, its back-end, and what `poll` returns once these come back from the back-end."""

    def made(scorer=None, overlap=True):
        streams = {"engine": "async", "streaming": Streaming(overlap=overlap), "sampling": Sampling(4)}
        engine = trainer_of(AHEAD, scorer=scorer, **streams).engine
        backend = Scripted()
        engine._begin = lambda version: backend
        engine.load_weights(0)

        def poll(*ended):
            backend.next = list(ended)
            return engine.poll(wait=False)

        return engine, backend, poll

    return made


def ended(rollout, tokens, truncated=False, version=0):
    logprobs = -np.arange(10, 10 + len(tokens), dtype=np.float32)
    spans = ((version, len(tokens)),) if tokens else ()
    return Generation(rollout, tuple(tokens), logprobs, truncated, spans=spans)


def order(*rollouts, prompt=3):
    return [Order(0, prompt, 0, rollouts)]


def test_a_rollout_that_goes_on_over_an_update_says_so(scripted):
    engine, backend, poll = scripted()
    engine.submit(order(1, 2))
    engine.load_weights(1)
    assert (backend.loaded, backend.cancelled) == ([1], [])
    results = poll(replace(ended(1, (5, 7, EOS)), spans=((0, 2), (1, 1))), ended(2, (7,), truncated=True, version=1))
    results += poll()
    done = {result.rollout: result for result in results}
    assert (done[1].tokens, done[1].version, done[1].last_version, done[1].truncated) == (3, 0, 1, False)
    assert (done[2].tokens, done[2].version, done[2].last_version, done[2].truncated) == (1, 1, 1, True)
    assert engine.generations[1].logprobs.tolist() == [-10, -11, -12]
    assert engine.figures()["streaming"]["straddled"] == 1
    assert engine.figures()["streaming"]["in_flight"] == 0


def test_a_rollout_cancelled_while_it_is_scored_keeps_its_score(scripted):
    later = Future()

    class Late(InlineScorer):
        def submit(self, samples):
            return later

    engine, backend, poll = scripted(Late(lambda **_: 1.0))
    engine.submit(order(1))
    assert poll(ended(1, (7, EOS))) == []
    engine.cancel([1])
    assert (backend.cancelled, poll()) == ([], [])
    later.set_result([Scored(1.0, 1.0)])
    [result] = poll()
    assert result.is_scored


def test_where_nothing_overlaps_a_score_is_waited_for(scripted):
    later = Future()

    class Late(InlineScorer):
        def submit(self, samples):
            Timer(0.2, later.set_result, [[Scored(1.0, 1.0)]]).start()
            return later

    engine, _, poll = scripted(Late(lambda **_: 1.0), overlap=False)
    engine.submit(order(1))
    [result] = poll(ended(1, (7, EOS)))
    assert result.is_scored
