"""Tests of what size rules learn about a prompt's lengths if some of its rollouts are stopped."""

import json
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest

from rollalloc import Allocator, recipes
from rollalloc.core.events import Cancelled, Done, RuleError
from rollalloc.core.rule import SampledStops, StopRule


def std_of(allocator):
    """What the size rule has learned of the deviation of each prompt's lengths."""
    return allocator._run.size_memory["0"]["std_N"]


@dataclass(frozen=True)
class Keeps(StopRule):
    """Stops the last rollout, and says this of the rollouts that it kept."""

    kept: ClassVar[object] = None

    def __call__(self, group, view, rng):
        return SampledStops([max(group.running)], self.kept)


@pytest.mark.parametrize(
    "kept",
    [
        *({9: 0.5}, {2: 0.5}, {0: 0.5}),  # it never was; it is stopped; it has ended
        *({1: share} for share in (0.0, 1.5, float("nan"), None, "half")),
        *([1], None, {1.5: 0.5}, {"1": 0.5}),
    ],
)
def test_an_impossible_sample_of_a_stop_rule_is_refused(kept, monkeypatch):
    """Rollout 0 has ended, 1 goes on, 2 is stopped, 9 never was."""
    monkeypatch.setattr(Keeps, "kept", kept)
    plain = recipes.grpo(1, 3)
    allocator = Allocator(replace(plain, stages=(replace(plain.stages[0], stop=Keeps()),)), 1, 0)
    allocator.ask()
    allocator.tell([Done(0, 1, 1, 40, 0)])
    with pytest.raises(
        RuleError, match="`kept` must map rollouts that are unfinished and not cancelled to probabilities in"
    ):
        allocator.ask()


def test_a_visit_is_learned_from_when_its_last_stopped_rollout_has_ended():
    """Two of four are stopped: the visit is learned from once, when both have ended, loaded or not."""
    allocator = Allocator(recipes.darts(1, 2, 0, 3.0, tail="none"), 1, 0)
    first, second, *stopped = allocator.ask().generate[0].rollouts
    allocator.tell([Done(first, 1, 1, 40, 0), Done(second, 0, 0, 60, 0)])
    actions = allocator.ask()
    assert actions.cancel == tuple(stopped)
    assert len(stopped) == 2
    assert actions.batch is not None
    copy = Allocator(allocator.recipe, 1, 0)
    copy.load_state_dict(json.loads(json.dumps(allocator.state_dict())))
    for each in (allocator, copy):
        each.tell([Cancelled(stopped[0], 61)])
        assert np.isnan(std_of(each)).all()  # the visit is over, the last rollout is not
        each.tell([Cancelled(stopped[1], 62)])
        assert std_of(each) == np.float32(np.std([40, 60, 61, 62]))
        assert each.state_dict()["trailing"] == []
    assert copy.state_dict() == allocator.state_dict()
