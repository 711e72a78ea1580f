"""`Allocator.rest`: long computations are done when the driver says so, and when they are done changes nothing."""

import json
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from rollalloc import Allocator, PromptTable, recipes
from rollalloc.core.events import Done, Updated
from rollalloc.core.rule import PromptRule
from rollalloc.predict.predictor import Predictor
from rollalloc.recipes.foresight import Foresight

QUICK = Predictor(ridges=(1.0, 10.0), events=64, first_fits=(4, 8), fit_every=12, track_every=4)
FEATURES = {"x": np.linspace(-2, 2, 48, dtype=np.float32).reshape(24, 2)}


def foresight():
    return replace(recipes.foresight(groups=4), prompts=Foresight(warm=4, predictor=QUICK))


def reloaded(allocator):
    copy = Allocator(allocator.recipe, allocator.table, allocator.seed)
    copy.load_state_dict(json.loads(json.dumps(allocator.state_dict())))
    return copy


def run(made, batches=8, after_ask=lambda allocator: allocator, before_update=lambda allocator: allocator):
    """Answers of a run: prompts in the upper half of the features are answered right, but for each third rollout."""
    allocator, answers = Allocator(*made), []
    while allocator.version < batches:
        answers.append(actions := allocator.ask())
        allocator = after_ask(allocator)
        told = [
            Done(rollout, right := float((order.prompt >= 12) != (rollout % 3 == 0)), right, 3, allocator.version)
            for order in actions.generate
            for rollout in order.rollouts
        ]
        allocator.tell(told)
        if actions.batch is not None:
            allocator = before_update(allocator)
            allocator.tell([Updated(allocator.version + 1)])
    return answers, allocator.state_dict()


def resting(allocator):
    allocator.rest()
    return allocator


def figures(allocator):
    allocator.prompt_figures()
    return allocator


@pytest.mark.parametrize(
    "moments",
    [
        {"after_ask": resting},
        {"before_update": resting},
        {"after_ask": resting, "before_update": resting},
        {"after_ask": reloaded},
        {"before_update": reloaded},
        {"before_update": figures},
    ],
    ids=["after ask", "before the update", "twice", "saved after ask", "saved before the update", "figures"],
)
def test_when_a_driver_rests_saves_or_looks_changes_no_decision(moments):
    made = foresight(), PromptTable(24, features=FEATURES), 5
    answers, state = run(made)
    assert state["memory"]["fits"] >= 3
    assert run(made, **moments) == (answers, state)


@dataclass(frozen=True)
class Counted(Foresight):
    """Notes when it prepares: by the calls of the allocator that were under way."""

    predictor: Predictor = QUICK
    notes: list = field(default_factory=list, compare=False, repr=False)

    def prepare(self, memory, view):
        self.notes.append(view.version)
        super().prepare(memory, view)


def test_a_rule_prepares_once_for_each_batch_and_not_in_ask_if_the_driver_rests():
    rule = Counted()
    made = replace(foresight(), prompts=rule), PromptTable(24, features=FEATURES), 5
    in_rest = []

    def rest(allocator):
        before = len(rule.notes)
        allocator.rest()
        in_rest.extend(rule.notes[before:])
        return allocator

    run(made, after_ask=rest)
    assert in_rest == rule.notes == list(range(8))


def test_without_rest_a_rule_prepares_before_the_update_changes_what_it_sees():
    rule = Counted()
    run((replace(foresight(), prompts=rule), PromptTable(24, features=FEATURES), 5))
    assert rule.notes == list(range(8))


def test_foresight_fits_in_prepare_and_never_in_a_draw():
    rule, table = Foresight(warm=4, predictor=QUICK), PromptTable(24, features=FEATURES)
    allocator = Allocator(replace(foresight(), prompts=rule), table, 0)
    memory = rule.init(table)
    for prompt in range(8):
        QUICK.observe(memory, prompt, 0.5, 1.0, 1)
    assert QUICK.due(memory)
    view = allocator._run.view()
    rule.pick(memory, 4, np.ones(24, bool), view, np.random.default_rng(0))
    assert memory["fits"] == 0
    rule.prepare(memory, view)
    assert memory["fits"] == 1
    assert not QUICK.due(memory)


def test_other_prompt_rules_prepare_nothing():
    made = recipes.reinforce(groups=4), 24, 0
    assert type(made[0].prompts).prepare is PromptRule.prepare
    assert run(made, after_ask=resting) == run(made)


def test_new_features_are_fitted_to_at_once_after_a_move():
    allocator = Allocator(foresight(), PromptTable(24, features=FEATURES), 5)
    state = run((foresight(), allocator.table, 5))[1]
    wide = PromptTable(24, features={"x": np.random.default_rng(0).standard_normal((24, 5)).astype(np.float32)})
    moved = Allocator(foresight(), wide, 5)
    moved.load_state_dict(state, remap=np.arange(24))
    moved.rest()
    assert moved.state_dict()["memory"]["fits"] == 1
