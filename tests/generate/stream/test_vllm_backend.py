"""vLLM as a back-end, without vLLM: what becomes of what it streams. The real one is in tests/drivers/verl/test_vllm.py."""

import asyncio
import threading
import time
from contextlib import closing

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rollalloc.generate.sampling import Sampling
from rollalloc.generate.stream import begin, settings
from rollalloc.generate.stream.backend import BackendDied, Decoding, Row
from rollalloc.generate.stream.settings import Streaming
from rollalloc.generate.stream.vllm_backend import Chunk, VllmBackend
from rollalloc.models.behaviour import Behaviour

LENGTH = 6
DECODING = Decoding(sampling=Sampling(LENGTH, max_rows=3), eos_ids=(), pad_id=0, seed=5, longest_prompt=4)


class Fake:
    """A model that is served: steps are taken one by one, on `go`; weights come between two of them."""

    def __init__(self, folder=None):
        self.folder, self.dead, self.closed = folder, False, 0
        self.now = 0.0  # the clock, in steps
        self.asked = {}  # name -> the arguments
        self.made = {}  # name -> tokens sampled, of those that are begun and not forgotten
        self.queues = {}
        self.aborted, self.loaded = [], []
        self.takes = True  # weights
        self.answers = asyncio.Event()  # that it took them
        self.answers.set()

    async def generate(self, name, tokens, most, seed, salt):
        self.asked[name] = (tokens, most, seed, salt)
        queue = self.queues[name] = asyncio.Queue()
        while True:
            chunk = await queue.get()
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    def say(self, name, tokens, finish=None, logprobs=None, at=None):
        self.queues[name].put_nowait(
            Chunk(
                tokens, [-1.0] * len(tokens) if logprobs is None else logprobs, finish, self.now if at is None else at
            )
        )

    async def abort(self, names):
        self.aborted += names
        for name in names:
            if name in self.queues:
                self.say(name, [], "abort")

    async def load(self, file):
        self.loaded.append(load_file(file))
        if not self.takes:
            raise RuntimeError("a name that it does not know")
        self.now += 1
        when, made = self.now, dict(self.made)
        await self.answers.wait()
        return when, made

    def paces(self):
        return [(2, 0.5)]

    def figures(self):
        return {"preempted": 1}

    def pids(self):
        return [77]

    def close(self):
        self.closed += 1


@pytest.fixture
def made():
    """(the back-end, the fake that it runs, a way to do something in the event loop and wait for it)."""
    fakes = []

    def serve(folder):
        fakes.append(Fake(folder))
        return fakes[0]

    backend = VllmBackend(serve, DECODING, version=2)
    [fake] = fakes

    def do(doing=lambda: None):
        async def calmly():
            for _ in range(10):  # whatever was asked for before is done
                await asyncio.sleep(0)
            doing()
            for _ in range(10):
                await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(calmly(), backend._loop).result(10)

    with closing(backend):
        yield backend, fake, do
    assert fake.closed == 1
    assert not fake.folder.exists()
    assert "rollalloc vLLM" not in [thread.name for thread in threading.enumerate()]


def name_of(fake, rollout):
    """vLLM's newest name for a rollout."""
    return [name for name in fake.asked if name.partition(".")[0] == str(rollout)][-1]


def started(made, *rows):
    backend, fake, do = made
    backend.start(list(rows))
    do()
    return [name_of(fake, row.rollout) for row in rows]


def test_chunks_become_one_rollout(made):
    backend, fake, do = made
    first, second = started(made, Row(1, 0, (4, 5)), Row(2, 0, (4, 5), (9, 9)))
    assert backend.capacity() == 1
    assert fake.asked[first][:2] == ((4, 5), LENGTH)
    assert fake.asked[second][:2] == ((4, 5, 9, 9), LENGTH - 2)
    do(lambda: (fake.say(first, [7, 8], logprobs=[-0.5, -0.25]), fake.say(second, [6], "stop")))
    [ended] = backend.step(0)
    assert (ended.rollout, ended.tokens, ended.end, ended.spans) == (2, (6,), "stop", ((2, 1),))
    do(lambda: fake.say(first, [3], "length", logprobs=[-2.0]))
    [ended] = backend.step(0)
    assert (ended.tokens, ended.end, ended.spans, ended.reason) == ((7, 8, 3), "length", ((2, 3),), "")
    np.testing.assert_array_equal(ended.logprobs, np.array([-0.5, -0.25, -2.0], np.float32))
    assert backend.capacity() == 3
    assert backend.step(0) == []
    assert backend.paces() == [(2, 0.5)]
    assert backend.figures() == {"preempted": 1}


def test_seeds_are_of_prompt_rollout_and_where_it_begins(made):
    backend, fake, do = made
    rows = [Row(1, 0, (4,)), Row(2, 0, (4,)), Row(3, 1, (4,)), Row(4, 0, (4,), (9,))]
    seeds = [fake.asked[name][2] for name in started(made, *rows)]
    for row in (Row(1, 0, (4,), (9, 9)), Row(1, 1, (4,))):
        backend.abort([1])
        do()
        assert len(backend.step(0)) == 1
        seeds += [fake.asked[name][2] for name in started(made, row)]
    assert len(set(seeds)) == 6
    assert all(0 <= seed < 2**53 for seed in seeds)


def test_what_is_aborted_comes_back_once_with_what_it_had(made):
    backend, fake, do = made
    first, second = started(made, Row(1, 0, (4,)), Row(2, 0, (4,)))
    do(lambda: (fake.say(first, [7, 8]), fake.say(second, [6])))
    do(lambda: fake.say(second, [1], "stop"))
    backend.abort([1, 2, 99])
    do()
    ended = {each.rollout: each for each in backend.step(0)}
    assert {rollout: (each.tokens, each.end) for rollout, each in ended.items()} == {
        1: ((7, 8), "aborted"),
        2: ((6, 1), "stop"),
    }
    assert fake.aborted == [first]
    backend.abort([1, 2])
    do()
    assert backend.step(0) == []
    assert fake.aborted == [first]


def test_an_abort_that_vllm_missed_is_said_again(made):
    backend, fake, do = made
    [name] = started(made, Row(1, 0, (4,)))
    queue = fake.queues.pop(name)  # it does not know it yet
    backend.abort([1])
    do()
    assert backend.step(0) == []
    fake.queues[name] = queue
    do(lambda: fake.say(name, [7]))
    [ended] = backend.step(0)
    assert (ended.end, ended.tokens) == ("aborted", (7,))


def weights(value):
    return {"weight": torch.full((3,), float(value)), "turned": torch.arange(6.0).view(2, 3).T}


def test_each_token_says_under_which_weights_it_was_sampled(made):
    backend, fake, do = made
    known, waiting, over = started(made, *(Row(rollout, 0, (4,)) for rollout in (1, 2, 3)))
    do(lambda: fake.say(known, [7]))
    fake.made = {known: 3}  # two of them are under way; `over` has ended, its end is under way as well
    ended_at = fake.now
    backend.load(weights(1), 3)
    do()
    do(lambda: (fake.say(known, [7, 7], at=ended_at), fake.say(known, [8])))
    fake.made = {known: 4}
    backend.load(weights(2), 9)
    do()
    do(lambda: fake.say(known, [9, 9], "length"))
    do(lambda: (fake.say(waiting, [9], "stop"), fake.say(over, [1, 1], "stop", at=ended_at)))
    ended = {each.rollout: each.spans for each in backend.step(0)}
    assert ended == {1: ((2, 3), (3, 1), (9, 2)), 2: ((9, 1),), 3: ((2, 2),)}
    [late] = started(made, Row(4, 0, (4,)))
    assert fake.asked[late][3] != fake.asked[known][3]  # what is cached of the old weights is not for it
    do(lambda: fake.say(late, [5], "stop"))
    assert backend.step(0)[0].spans == ((9, 1),)


def test_an_end_that_overtakes_the_answer_to_a_load_waits_for_it(made):
    backend, fake, do = made
    before, after = started(made, Row(1, 0, (4,)), Row(2, 0, (4,)))
    fake.answers.clear()
    fake.made = {before: 2, after: 1}
    backend.load(weights(1), 3)
    do()
    do(lambda: (fake.say(before, [7, 7], "stop", at=0.0), fake.say(after, [7, 7, 7], "stop")))
    assert backend.step(0) == []
    do(fake.answers.set)
    assert {each.rollout: each.spans for each in backend.step(0)} == {1: ((2, 2),), 2: ((2, 1), (3, 2))}


def test_what_is_started_behind_weights_begins_under_them(made):
    backend, fake, do = made
    [first] = started(made, Row(1, 0, (4,)))
    fake.answers.clear()
    backend.load(weights(1), 3)
    backend.start([Row(2, 0, (4,)), Row(3, 0, (4,))])
    backend.abort([3])
    do()
    assert set(fake.asked) == {first}
    do(fake.answers.set)
    second = name_of(fake, 2)
    assert set(fake.asked) == {first, second}
    assert fake.asked[second][3] != fake.asked[first][3]
    do(lambda: fake.say(second, [7], "stop"))
    assert {each.rollout: each.spans for each in backend.step(0)} == {2: ((3, 1),), 3: ()}


def test_what_is_under_way_when_it_closes_is_ended_and_removed(made):
    backend, fake, do = made
    started(made, Row(1, 0, (4,)))
    fake.answers.clear()
    backend.load(weights(1), 3)
    do()
    assert backend._file.exists()
    backend.close()
    assert not backend._file.exists()
    assert not backend._tasks
    backend.close()


def test_weights_wait_for_those_before_them(made):
    backend, fake, do = made
    fake.answers.clear()
    backend.load(weights(1), 3)
    later = threading.Thread(target=backend.load, args=(weights(2), 4))
    later.start()
    later.join(0.2)
    assert later.is_alive()
    do(fake.answers.set)
    later.join(60)
    assert not later.is_alive()
    do()
    assert len(fake.loaded) == 2


def test_weights_that_it_does_not_take_end_the_run(made):
    backend, fake, do = made
    fake.takes = False
    backend.load(weights(1), 3)
    do()
    for _ in range(2):
        with pytest.raises(BackendDied, match="weights of version 3: a name that it does not know"):
            backend.step(0)
    backend.load(weights(1), 4)  # waits for nothing


def test_what_it_loses_is_given_back_as_failed(made):
    backend, fake, do = made
    names = started(made, *(Row(rollout, 0, (4,)) for rollout in (1, 2, 3)))
    do(lambda: fake.say(names[0], [7], "repetition"))
    do(lambda: fake.say(names[1], [7], "abort"))  # nobody asked for that
    do(lambda: fake.queues[names[2]].put_nowait(KeyError("odd")))
    ended = {each.rollout: each for each in backend.step(0)}
    assert {each.end for each in ended.values()} == {"failed"}
    assert "repetition" in ended[1].reason
    assert "KeyError: 'odd'" in ended[3].reason
    assert backend.capacity() == 3


def test_its_death_is_said_at_every_step(made):
    backend, fake, do = made
    [name] = started(made, Row(1, 0, (4,)))
    do(lambda: fake.queues[name].put_nowait(BackendDied("gone")))
    for _ in range(2):
        with pytest.raises(BackendDied, match="gone"):
            backend.step(0)


def test_its_silence_is_not_waited_for_without_an_end(made):
    backend, fake, do = made
    [name] = started(made, Row(1, 0, (4,)))
    backend._silence.limit_s = 0.0
    for _ in range(3):  # tokens are signs of life
        do(lambda: fake.say(name, [7]))
        assert backend.step(0) == []
    for _ in range(2):
        with pytest.raises(BackendDied, match=r"vLLM's engine \(77\) has given no sign of life.*and 1 rollouts"):
            backend.step(0)


def test_logits_that_are_not_numbers_are_said(made):
    backend, fake, do = made
    [name] = started(made, Row(1, 0, (4,)))
    do(lambda: fake.say(name, [7], logprobs=[float("nan")]))
    with pytest.raises(FloatingPointError, match="diverged"):
        backend.step(0)


def test_one_that_does_not_begin_leaves_nothing():
    folders = []

    def serve(folder):
        folders.append(folder)
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        VllmBackend(serve, DECODING)
    assert not folders[0].exists()
    assert "rollalloc vLLM" not in [thread.name for thread in threading.enumerate()]


def test_where_it_is_not_installed_that_is_said(policy, monkeypatch):
    monkeypatch.setattr(settings, "find_spec", lambda name: None)
    vllm = Streaming(backend="vllm")
    with pytest.raises(ImportError, match=r"vLLM is not installed.*--backend own"):
        begin.begin(Behaviour(policy, "float32"), [(1, 2)], Sampling(LENGTH), vllm, seed=0, limit_s=600.0)


def test_rows_are_refused_before_any_is_taken(made):
    backend, _, _ = made
    started(made, Row(1, 0, (4,)))
    for row, words in [
        (Row(1, 0, (4,)), "runs already"),
        (Row(3, 0, ()), "1 to 4 tokens, got 0"),
        (Row(3, 0, (4,), (4,) * LENGTH), "all it may have"),
    ]:
        with pytest.raises(ValueError, match=words):
            backend.start([Row(2, 0, (4,)), row])
    assert backend.capacity() == 2


def test_one_that_is_aborted_before_it_begins_is_never_asked_for(made):
    backend, fake, do = made
    backend.start([Row(1, 0, (4,))])
    backend.abort([1])
    do()
    [ended] = backend.step(0)
    assert (ended.end, ended.tokens) == ("aborted", ())
    assert fake.asked == {} or fake.aborted


def test_one_that_begins_again_has_another_name(made):
    backend, _, do = made
    [first] = started(made, Row(1, 0, (4,)))
    backend.abort([1])
    do()
    assert len(backend.step(0)) == 1
    [second] = started(made, Row(1, 0, (4,)))
    assert first != second


def test_weights_may_be_changed_once_they_are_handed_over(made):
    backend, fake, do = made
    given = weights(1)
    backend.load(given, 3)
    given["weight"].zero_()
    backend.load(weights(2), 4)
    do()
    assert [each["weight"].tolist() for each in fake.loaded] == [[1.0] * 3, [2.0] * 3]
    assert fake.loaded[0]["turned"].tolist() == weights(0)["turned"].tolist()
    assert not backend._file.exists()


def test_weights_that_nobody_took_are_removed(made):
    backend, _, _ = made
    backend._loop.call_soon_threadsafe(time.sleep, 0.3)  # what follows reaches the loop in one go
    backend.load(weights(1), 3)
    assert backend._file.exists()
    backend.close()
    assert not backend._file.exists()


def test_its_death_is_said_where_nothing_runs(made):
    backend, fake, _ = made
    assert backend.step(0) == []
    fake.dead = True
    with pytest.raises(BackendDied, match="standard error"):
        backend.step(0)


def test_waiting_ends_with_the_first_to_end(made):
    backend, fake, do = made
    [name] = started(made, Row(1, 0, (4,)))
    threading.Timer(0.1, lambda: do(lambda: fake.say(name, [7], "stop"))).start()
    began = time.monotonic()
    assert [each.rollout for each in backend.step(60.0)] == [1]
    assert time.monotonic() - began < 30


def test_settings_that_cannot_be_are_refused():
    assert Streaming(backend="vllm").overlap
    with pytest.raises(ValueError, match="backend must be one of own, vllm, got 'sglang'"):
        Streaming(backend="sglang")
    with pytest.raises(ValueError, match="leave out --no-overlap"):
        Streaming(backend="vllm", overlap=False)
