"""Random drivers under the kit's auditor: whatever is told in whatever order, the laws hold."""

from dataclasses import replace
from math import inf
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from rollalloc import Budget, EventError, PromptTable, recipes
from rollalloc.core.events import Cancelled, Done, Failed
from rollalloc.core.recipe import Replay
from rollalloc.predict.predictor import Predictor
from rollalloc.recipes.foresight import Foresight
from rollalloc.recipes.mopps import Posterior
from rollalloc.testing.feeder import AuditedRun
from rollalloc.testing.world import World

PROMPTS = PromptTable(
    [f"p{x}" for x in range(14)],
    prior_N=[0.5, float("nan")] * 7,
    features={"x": [[x / 7 - 1, x % 3] for x in range(14)]},
)
QUICK = Predictor(ridges=(1.0,), events=16, first_fits=(4, 8), fit_every=8, track_every=4)
ALL = Replay(rows=3, times=2, max_staleness=3, above=-inf)
RECIPES = (
    recipes.grpo(2, 3),
    recipes.dapo(2, 2, 4),
    recipes.dapo(2, 2, 4, "carry", max_candidates=6),
    recipes.pilot_commit(2, 2, 2, 5, p_lower=0.0),
    recipes.pilot_commit(2, 2, 2, 5, max_staleness=0, promote="random", reprobe_every=1),
    recipes.mix(recipes.pilot_commit(2, 2, 2, 4, p_lower=0.0), recipes.pods(2, 4, 2)),
    recipes.darts(2, 2, 1, tail="sampled"),
    recipes.racing(2, (2, 4), 3, 2),
    replace(recipes.pilot_commit(2, 2, 2, 4, p_lower=0.0), prompts=Posterior()),
    replace(recipes.dapo(2, 2, 4, "carry"), replay=ALL),
    replace(recipes.spo(2, 2), replay=ALL),
    replace(recipes.foresight(2, 2, replay=3), prompts=Foresight(pool=2, warm=4, predictor=QUICK)),
)
DRAWS = st.integers(0, 2**32).map(Random)
BUDGETS = (Budget(), Budget(), Budget(run_rollouts=37))


class Driver(RuleBasedStateMachine):
    """Tells and asks at random; the auditor keeps the books, and a second allocator is saved and loaded on the way."""

    @initialize(recipe=st.sampled_from(RECIPES), budget=st.sampled_from(BUDGETS), seed=st.integers(0, 5))
    def begin(self, recipe, budget, seed):
        self.budget = budget
        world = World(seed, rewards=(0.0, 1.0))
        self.under_audit = AuditedRun(replace(recipe, budget=budget), PROMPTS, world, seed=seed, reload=0.3)

    @property
    def running(self):
        return sorted(self.under_audit.running)

    @rule(capacity=st.one_of(st.none(), st.integers(0, 9)))
    def ask(self, capacity):
        self.answer(capacity)

    def answer(self, capacity):
        actions = self.under_audit.ask(capacity)
        assert len(self.under_audit.audit.order_of) <= (self.budget.run_rollouts or inf), "law 7"
        return actions

    @precondition(lambda self: self.running)
    @rule(draw=DRAWS, share=st.sampled_from([0.2, 0.6, 1.0]))
    def some_are_done(self, draw, share):
        for rollout in sorted(self.running, key=lambda _: draw.random()):
            if draw.random() < share:
                self.under_audit.tell([self.under_audit.end(rollout)])

    @precondition(lambda self: self.running)
    @rule(draw=DRAWS)
    def one_has_trouble(self, draw):
        rollout = draw.choice(self.running)
        event = draw.choice((Failed(rollout, "engine died"), Cancelled(rollout, 2)))
        del self.under_audit.running[rollout]
        self.under_audit.tell([event])

    @precondition(lambda self: self.under_audit.audit.order_of.keys() - self.under_audit.running)
    @rule(draw=DRAWS, kind=st.sampled_from([Done, Failed, Cancelled]))
    def a_second_terminal_event_is_refused(self, draw, kind):
        rollout = draw.choice(sorted(self.under_audit.audit.order_of.keys() - self.under_audit.running))
        event = {Done: Done(rollout, 1, 1, 1, 0), Failed: Failed(rollout, "x"), Cancelled: Cancelled(rollout, 1)}[kind]
        with pytest.raises(EventError, match="already had its terminal event"):
            self.under_audit.allocator.tell([event])

    @precondition(lambda self: self.under_audit.audit.in_batch)
    @rule()
    def update_after_a_batch(self):
        self.under_audit.tell([self.under_audit.update()])

    @rule(draw=DRAWS)
    def update_at_any_time(self, draw):
        if draw.random() < 0.15:
            self.under_audit.tell([self.under_audit.update()])

    def teardown(self):
        """Let everything end: nothing may be left over."""
        if not hasattr(self, "under_audit"):
            return
        for _ in range(10):
            actions = self.answer(None)
            self.under_audit.tell([self.under_audit.end(rollout) for rollout in self.running])
            if self.under_audit.audit.in_batch:
                self.under_audit.tell([self.under_audit.update()])
            if actions.finished:
                break


TestDriver = Driver.TestCase
TestDriver.settings = settings(max_examples=30, stateful_step_count=40, suppress_health_check=list(HealthCheck))
