"""DARTS with as many longest rollouts of each prompt as it decides, from its sizes to its rows."""

import json

import numpy as np
import pytest

from rollalloc import Allocator, recipes
from rollalloc.core.events import Done
from rollalloc.core.group import GroupView
from rollalloc.core.prompts import PromptTable
from rollalloc.recipes.darts import Redundant


def test_a_size_rule_learns_from_each_visit_and_its_memory_is_saved_and_follows_the_prompts():
    recipe = recipes.darts(2, 2, 0)
    allocator = Allocator(recipe, 2, 0)
    for order in allocator.ask().generate:
        allocator.tell([Done(each, 1.0, 1.0, 10 + at, 0) for at, each in enumerate(order.rollouts)])
        last = order
    assert allocator.ask().batch is not None
    memory = allocator._run.size_memory["0"]
    assert memory["mean_N"].tolist() == [11.0, 11.0]
    state = json.loads(json.dumps(allocator.state_dict()))
    copy = Allocator(recipe, 2, 0)
    copy.load_state_dict(state)
    assert copy._run.size_memory["0"]["std_N"].tolist() == memory["std_N"].tolist()
    moved = Allocator(recipe, 3, 0)
    moved.load_state_dict(state, remap=[-1, last.prompt, -1])
    assert np.isnan(moved._run.size_memory["0"]["mean_N"]).tolist() == [True, False, True]
    wider = Allocator(recipes.grpo(2, 4), 2, 0)
    wider.load_state_dict(state, accept_recipe=True)
    assert wider._run.size_memory == {"0": {}}
    del state["size_memory"]["0"]["std_N"]
    with pytest.raises(ValueError, match=r"size_memory: .* the state is corrupt"):
        Allocator(recipe, 2, 0).load_state_dict(state)


def test_a_size_rule_that_keeps_no_dict_is_refused_by_name():
    class Wrong(Redundant):
        def init(self, table):
            return []

    with pytest.raises(TypeError, match=r"Wrong.* must keep its memory in a dict"):
        Allocator(recipes.darts(2, 2, 0).replace(size=Wrong(1.5, 2.0)), 2, 0)


def test_lengths_that_a_limit_has_cut_are_not_learned():
    rule = Redundant(1.5, 2.0)
    memory = rule.init(PromptTable(2))
    rule.observe(memory, GroupView.of([1, 0], tokens=[4, 8], limit=8))
    rule.observe(memory, GroupView.of([1, 0], tokens=[4, 20], prompt=1))
    assert memory["mean_N"].tolist() == pytest.approx([np.nan, 12], nan_ok=True)
    assert memory["std_N"].tolist() == pytest.approx([np.nan, 8], nan_ok=True)
