"""A crew of workers and a loader without verl, and a section for each recipe."""

from collections import deque
from dataclasses import dataclass, field

from rollalloc.drivers.verl.rounds import SessionOutcome

RECIPES = {
    "grpo": {"recipe": "grpo"},
    "dapo": {"recipe": "dapo", "gen_groups": 8},
    "pilot_commit": {"recipe": "pilot_commit", "n_pilot": 2, "n_commit": 4, "gen_groups": 8},
    "pods": {"recipe": "pods", "m": 2},
    "darts": {"recipe": "darts", "shortest": 2, "longest": 1, "tail": "sampled"},
    "racing": {"recipe": "racing", "sizes_S": [2, 4], "gen_groups": 8},
    "rloo": {"recipe": "rloo"},
    "dr_grpo": {"recipe": "dr_grpo"},
    "raft": {"recipe": "raft"},
    "reinforce": {"recipe": "reinforce", "neg": 0.5},
    "reinforce_running": {"recipe": "reinforce", "baseline": "running", "neg": 1},
    "mopps": {"recipe": "mopps"},
    "greso": {"recipe": "greso", "gen_groups": 8},
    "reinforce_ada": {"recipe": "reinforce_ada", "round_n": 2, "rounds": 3},
    "knapsack": {"recipe": "knapsack"},
    "vcrl": {"recipe": "vcrl"},
    "cgrpo": {"recipe": "cgrpo", "sizes_S": [2, 4]},
    "spo": {"recipe": "spo"},
    "foresight": {"recipe": "foresight"},
    "pilot_commit+foresight": {"recipe": "pilot_commit+foresight", "n_pilot": 2, "n_commit": 4, "gen_groups": 8},
    "pilot_commit+pods": {"recipe": "pilot_commit+pods", "n_pilot": 2, "n_commit": 4, "gen_groups": 8, "m": 4},
}


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

    def outcomes(self, wait=True):
        assert self.waiting or not wait, "waits for ever"
        ended = [self.waiting.popleft() for _ in range(min(self.at_once, len(self.waiting)))]
        outcomes = [self._end(submission, session) for submission, session in ended]
        self.rows |= {key for outcome in outcomes for key in outcome.keys}
        return outcomes

    def _end(self, submission, session):
        if (submission.uid, session) in self.cancelled:
            return SessionOutcome(submission.uid, session, tokens=3, cancelled=True)
        return self.outcome(submission, session)

    def copy(self, keys):
        assert set(keys) <= self.rows, "copies what is not there"
        assert self.rows.isdisjoint(keys.values()), "a key is used twice"
        self.rows |= set(keys.values())
        self.copies |= keys

    def release(self, keys):
        assert set(keys) <= self.rows, set(keys) - self.rows
        self.rows -= set(keys)


def scored(submission, session, score, **more):
    """A session of one row that ended with this reward and metric."""
    given = {"tokens": 5, "reward": score, "metric": score, "rows": 1} | more
    return SessionOutcome(submission.uid, session, **given)


def mixed(submission, session):
    """Every second session is right."""
    return scored(submission, session, float(session % 2), tokens=5 + session)


def by_quarter(submission, session):
    """Of four prompts one is solved, one too hard and two are mixed."""
    return scored(submission, session, [1.0, 0.0, float(session % 2), float(session % 2)][submission.prompt % 4])


def figures(metrics, prefix):
    return {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
