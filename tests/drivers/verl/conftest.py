"""What the driver's tests share: a crew of workers and a loader without verl, and a way to run the real one."""

from collections import deque
from dataclasses import dataclass, field

import pytest

from rollalloc import Allocator
from rollalloc.drivers.verl.rounds import Outcome, Rounds
from rollalloc.drivers.verl.settings import read_settings


@dataclass
class FakeLoader:
    """Prompts 0 to count - 1 in order, `size` at a time."""

    count: int
    size: int
    epoch: int = 0
    at: int = 0

    def __len__(self):
        return self.count

    def next_prompts(self):
        if self.at + self.size > self.count:
            self.at, self.epoch = 0, self.epoch + 1
        self.at += self.size
        return range(self.at - self.size, self.at), self.epoch


@dataclass
class FakeCrew:
    """Ends `at_once` sessions a call, oldest first, by `outcome(submission, session)`; holds the rows."""

    outcome: object
    at_once: int = 8
    version: int = 0
    submitted: list = field(default_factory=list)
    waiting: deque = field(default_factory=deque)
    cancelled: set = field(default_factory=set)
    rows: set = field(default_factory=set)
    copies: dict = field(default_factory=dict)

    def submit(self, submissions):
        self.submitted += submissions
        self.waiting += [(s, at) for s in submissions for at in range(len(s.rollouts))]

    def cancel(self, sessions):
        assert sessions
        self.cancelled |= set(sessions)

    def outcomes(self):
        assert self.waiting, "waits for ever"
        ended = [self.waiting.popleft() for _ in range(min(self.at_once, len(self.waiting)))]
        outcomes = [self._end(submission, session) for submission, session in ended]
        self.rows |= {key for outcome in outcomes for key in outcome.keys}
        return outcomes

    def _end(self, submission, session):
        if (submission.uid, session) in self.cancelled:
            return Outcome(submission.uid, session, tokens=3, cancelled=True)
        return self.outcome(submission, session)

    def copy(self, keys):
        assert set(keys) <= self.rows, "copies what is not there"
        assert self.rows.isdisjoint(keys.values()), "a key is used twice"
        self.rows |= set(keys.values())
        self.copies |= keys

    def release(self, keys):
        assert set(keys) <= self.rows, set(keys) - self.rows
        self.rows -= set(keys)


def mixed(submission, session):
    """Every second session is right."""
    right = float(session % 2)
    return Outcome(submission.uid, session, tokens=5 + session, reward=right, metric=right, rows=1)


@pytest.fixture
def make_rounds():
    def make(section, outcome=mixed, prompts=64, groups=4, n=4, **crew):
        settings = read_settings(section, groups, n)
        loader = FakeLoader(prompts, groups) if settings.loader_draws else None
        return Rounds(Allocator(settings.recipe, prompts, settings.seed), FakeCrew(outcome, **crew), loader)

    return make
