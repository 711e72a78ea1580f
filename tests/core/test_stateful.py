"""Random drivers against a bookkeeper of its own: whatever is told in whatever order, the laws hold."""

import json
from dataclasses import dataclass, replace
from math import inf
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollalloc import Allocator, Budget, EventError, PromptTable, recipes
from rollalloc.core.events import Cancelled, Done, Failed, Progress, Updated
from rollalloc.core.recipe import Replay
from rollalloc.core.rule import Drawn
from rollalloc.predict.predictor import Predictor
from rollalloc.rules import predictions, prompts

PROMPTS = PromptTable(
    [f"p{x}" for x in range(14)],
    prior_N=[0.5, float("nan")] * 7,
    features={"x": [[x / 7 - 1, x % 3] for x in range(14)]},
)
QUICK = Predictor(ridges=(1.0,), events=16, first_fits=(4, 8), fit_every=8, track_every=4)
ALL = Replay(rows=3, times=2, max_staleness=3, above=-inf)
BOLD = Replay(rows=4, times=9, max_staleness=4)


@dataclass(frozen=True)
class Believes(prompts.Shuffled):
    """Every group is drawn with thoughts that follow from its prompt and the version, so that they can be told again."""

    def pick(self, memory, k, free_N, view, rng):
        picked = super().pick(memory, k, free_N, view, rng)
        return [thought(prompt, view.version) for prompt in picked]

    def observe(self, memory, group, view):
        seen = (group.predicted, group.baseline, group.sampling_ratio)
        assert seen in [thought(group.prompt, version)[1:] for version in range(view.version + 1)]


def thought(prompt, version):
    return Drawn(prompt, (prompt % 5) / 4, -prompt / 3 + version, 1 / (2 + prompt))


RECIPES = (
    recipes.grpo(2, 3),
    recipes.dapo(2, 2, 4),
    recipes.dapo(2, 2, 4, "carry", max_candidates=6),
    recipes.pilot_commit(2, 2, 2, 5, p_lower=0.0),
    recipes.pilot_commit(2, 2, 2, 5, max_staleness=0, promote="random", reprobe_every=1),
    recipes.pilot_commit(2, 2, 2, 4, p_lower=0.0, max_staleness=1, promote="oldest"),
    recipes.mix(recipes.pilot_commit(2, 2, 2, 4, p_lower=0.0), recipes.pods(2, 4, 2)),
    recipes.darts(2, 2, 1, tail="sampled"),
    recipes.darts(2, 2, 0, tail="none"),
    recipes.racing(2, (2, 4, 6), 3),
    recipes.racing(2, (2, 4), 3, 2),
    replace(recipes.pilot_commit(2, 2, 2, 4, p_lower=0.0), prompts=prompts.Posterior()),
    replace(recipes.reinforce(3, neg=0.5), replay=BOLD, prompts=Believes()),
    replace(recipes.pilot_commit(2, 2, 2, 5, p_lower=0.0), replay=ALL, prompts=Believes()),
    replace(recipes.dapo(2, 2, 4, "carry"), replay=ALL),
    replace(recipes.pods(2, 4, 2), replay=BOLD),
    replace(recipes.spo(2, 2), replay=ALL),
    recipes.reinforce(2, 2, baseline="running"),
    replace(recipes.foresight(2, 2, replay=3), prompts=predictions.Foresight(pool=2, warm=4, predictor=QUICK)),
    replace(recipes.dapo(2, 2, 4, "carry"), replay=ALL),
    recipes.pilot_commit(3, 2, 2, 5, p_lower=0.0),
)
DRAWS = st.integers(0, 2**32).map(Random)
BUDGETS = (Budget(), Budget(), Budget(run_rollouts=37), Budget(batch_rollouts=19))


class Driver(RuleBasedStateMachine):
    """Tells and asks at random, and keeps books of its own."""

    @initialize(recipe=st.sampled_from(RECIPES), budget=st.sampled_from(BUDGETS), seed=st.integers(0, 5))
    def begin(self, recipe, budget, seed):
        self.recipe = replace(recipe, budget=budget)
        self.allocator = Allocator(self.recipe, PROMPTS, seed)
        self.running = set()
        self.ordered = {}  # rollout -> the version when it was handed out
        self.results = {}  # rollout -> Done, where it was wanted
        self.cancelled, self.released, self.trained = set(), set(), set()
        self.batch = None
        self.rows = {}  # rollout -> its row, as it was trained on last
        self.replayed = self.since_batch = 0
        self.finished = None

    @rule(capacity=st.one_of(st.none(), st.integers(0, 9)))
    def ask(self, capacity):
        actions = self.allocator.ask(capacity)
        handed = [rollout for order in actions.generate for rollout in order.rollouts]
        assert len(set(handed)) == len(handed)
        assert self.ordered.keys().isdisjoint(handed), "law 4: an id is used twice"
        assert capacity is None or len(handed) <= capacity, "law 4"
        for rollout in handed:
            self.ordered[rollout] = self.allocator.version
        self.running |= set(handed)
        self.since_batch += len(handed)
        budget = self.recipe.budget
        assert len(self.ordered) <= (budget.run_rollouts or len(self.ordered)), "law 7"
        assert self.since_batch <= (budget.batch_rollouts or self.since_batch), "law 7"

        self.take(actions)

    def take(self, actions):
        """Book everything of an answer but its orders."""
        assert set(actions.cancel) <= self.running - self.cancelled, "law 1: cancels what is over, or twice"
        self.cancelled |= set(actions.cancel)

        released = list(actions.release)
        assert len(set(released)) == len(released), "law 5: released twice in one answer"
        assert self.released.isdisjoint(released), "law 5: released again"
        assert self.running.isdisjoint(released), "law 5: released while it runs"
        assert self.batch is None or {row.rollout for row in self.batch.rows}.isdisjoint(released), "law 5: too early"
        self.released |= set(released)

        if actions.batch is not None:
            self.check_batch(actions.batch)
        if actions.finished is not None:
            assert not self.running, "law 4: finished while a rollout runs"
            assert self.ordered.keys() == self.released, "law 2: the end has lost a rollout"
        self.finished = actions.finished

    def check_batch(self, batch):
        assert self.batch is None, "law 2: a batch before the one before was trained"
        assert batch.rows
        assert batch.version == self.allocator.version
        rollouts = [row.rollout for row in batch.rows]
        fresh = [row for row in batch.rows if not row.replays]
        assert len(set(rollouts)) == len(rollouts), "law 2: twice in a batch"
        assert self.trained.isdisjoint(row.rollout for row in fresh), "law 2: trained again"
        assert self.released.isdisjoint(rollouts), "law 2: trained although released"
        groups = {row.group for row in fresh}
        assert (len(groups) == self.recipe.groups) == (batch.short_because is None), "law 2"
        for row in batch.rows[len(fresh) :]:
            assert row == self.rows[row.rollout]._replace(replays=row.replays), "law 12: not what was trained"
            assert row.replays == self.rows[row.rollout].replays + 1, "law 12: not counted"
            assert self.may_return(self.rows[row.rollout]), "law 12: too often, too old, or not worth it"
        self.replayed += len(batch.rows) - len(fresh)
        due = [row for row in self.rows.values() if row.rollout not in self.released and self.may_return(row)]
        limit = 0 if self.recipe.replay is None else self.recipe.replay.rows
        assert len(batch.rows) - len(fresh) == min(limit, len(due)), "law 12: as many as asked, or all that are kept"
        self.rows |= {row.rollout: row for row in batch.rows}
        for row in fresh:
            assert row.version == self.results[row.rollout].version
            assert batch.version - row.version <= self.recipe.max_staleness, "law 2: too old"
        self.trained |= set(rollouts)
        self.batch, self.since_batch = batch, 0

    def may_return(self, row):
        replay = self.recipe.replay
        return (
            replay is not None
            and row.advantage > replay.above
            and (replay.times is None or row.replays < replay.times)
            and self.allocator.version - row.version <= replay.max_staleness
        )

    def end(self, event):
        """Tell a terminal event."""
        self.allocator.tell([event])
        self.running.remove(event.rollout)
        if isinstance(event, Done) and event.rollout not in self.cancelled:
            self.results[event.rollout] = event

    def done(self, rollout, draw):
        """A result; its first token may be as old as its order."""
        reward = draw.choice((0.0, 0.0, 1.0, 1.0, 0.3))
        version = draw.choice((self.ordered[rollout], self.allocator.version))
        tokens = draw.randint(0, 9)
        self.end(Done(rollout, reward, float(reward > 0.5), tokens, version, truncated=tokens == 9))

    @precondition(lambda self: self.running)
    @rule(draw=DRAWS, share=st.sampled_from([0.2, 0.6, 1.0]))
    def some_are_done(self, draw, share):
        for rollout in sorted(self.running, key=lambda _: draw.random()):
            if draw.random() < share:
                self.done(rollout, draw)

    @precondition(lambda self: self.running)
    @rule(draw=DRAWS)
    def one_has_trouble(self, draw):
        rollout = draw.choice(sorted(self.running))
        match draw.randrange(4):
            case 0:
                self.end(Failed(rollout, "engine died"))
            case 1:
                self.end(Cancelled(rollout, 2))
            case _:
                self.allocator.tell([Progress(rollout, draw.randint(0, 50))])

    @precondition(lambda self: self.cancelled & self.running)
    @rule(draw=DRAWS)
    def one_obeys_its_cancellation(self, draw):
        self.end(Cancelled(draw.choice(sorted(self.cancelled & self.running)), 1))

    @precondition(lambda self: self.ordered.keys() - self.running)
    @rule(draw=DRAWS, kind=st.sampled_from([Done, Failed, Cancelled]))
    def a_second_terminal_event_is_refused(self, draw, kind):
        rollout = draw.choice(sorted(self.ordered.keys() - self.running))
        event = {Done: Done(rollout, 1, 1, 1, 0), Failed: Failed(rollout, "x"), Cancelled: Cancelled(rollout, 1)}[kind]
        with pytest.raises(EventError, match="already had its terminal event"):
            self.allocator.tell([event])

    @precondition(lambda self: self.batch is not None)
    @rule()
    def update_after_a_batch(self):
        self.update()

    @rule(draw=DRAWS)
    def update_at_any_time(self, draw):
        if draw.random() < 0.15:
            self.update()

    def update(self):
        held = {rollout for rollout in self.rows if rollout not in self.released}
        version = self.allocator.version + 1
        self.allocator.tell([Updated(version, (None, 0.0, 0.01, 3.0)[version % 4])])
        self.batch = None
        actions = self.allocator.ask(0)
        over = {rollout for rollout in held if actions.finished or not self.may_return(self.rows[rollout])}
        assert over == held & set(actions.release), (
            "law 5: trained rows are released when they are not replayed any more"
        )
        assert actions.generate == ()
        self.take(actions)

    @rule()
    def reload(self):
        copy = Allocator(self.recipe, PROMPTS, self.allocator.seed)
        copy.load_state_dict(json.loads(json.dumps(self.allocator.state_dict())))
        repeated = copy.outstanding()
        ordered = {rollout for order in repeated.generate for rollout in order.rollouts}
        assert ordered | set(repeated.cancel) <= self.running
        unknown = self.running - ordered - self.cancelled  # their stop was decided and not yet answered
        assert set(repeated.cancel) == self.cancelled & self.running, "law 4: cancellations are not repeated"
        assert repeated.batch == self.batch, "law 4: the batch is not repeated"
        self.allocator = copy
        actions = self.allocator.ask(0)
        assert unknown <= set(actions.cancel), "law 4: an order in flight is not repeated"
        self.take(actions)

    @invariant()
    def causes_sum_to_what_was_ordered(self):
        if not hasattr(self, "allocator"):
            return
        accounts = self.allocator.accounts()
        assert sum(accounts.values()) == len(self.ordered) == self.allocator.paid, "law 8"
        assert min(accounts.values()) >= 0, "law 8"
        assert accounts["trained"] <= len(self.trained) <= accounts["trained"] + accounts["zero_variance"], "law 8"
        assert accounts["open"] >= len(self.running), "law 8: what runs is open"
        assert self.allocator.replayed == self.replayed, "law 12: not counted"

    def teardown(self):
        """Let everything end: nothing may be left over."""
        if not hasattr(self, "allocator"):
            return
        self.recipe = replace(self.recipe, budget=Budget(run_rollouts=len(self.ordered) + 1))
        last = Allocator(self.recipe, PROMPTS, self.allocator.seed)
        last.load_state_dict(self.allocator.state_dict(), accept_recipe=True)
        self.allocator, self.finished, self.since_batch = last, None, 0
        for _ in range(200):
            self.ask(None)
            for rollout in sorted(self.running):
                right = float(rollout % 2)
                self.end(Done(rollout, right, right, 1, self.allocator.version))
            if self.batch is not None:
                self.update()
            if self.finished is not None:
                break
        assert self.finished is not None, "the run does not end"
        assert self.allocator.accounts()["open"] == 0, "law 8: something is open at the end"


TestDriver = Driver.TestCase
TestDriver.settings = settings(
    max_examples=80, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
