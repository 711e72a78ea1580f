"""Replay: what is dealt is what was logged, each rollout once, and what the log cannot answer is said."""

from __future__ import annotations

import numpy as np
import pytest

from rollalloc import recipes
from rollalloc.waste.groups import Gathering
from rollalloc.waste.replay import replay


def log(visits, tokens=10):
    """Visits of (prompt, metrics)."""
    gathering = Gathering()
    for group, (prompt, metrics) in enumerate(visits):
        for metric in metrics:
            gathering.add(group, prompt, 0, metric, tokens=tokens)
    return gathering.groups()


HALF = log([(f"p{at}", [1.0, 0, 1, 0] if at % 2 else [0.0] * 4) for at in range(40)])


def value(found, name):
    return found.measures[name].value


def test_grpo_pays_what_it_paid_and_half_of_it_teaches():
    found = replay(HALF, recipes.grpo(20, 4), batches=2, resamples=2)
    assert value(found, "rollouts_per_batch") == 80
    assert value(found, "tokens_per_batch") == 800
    assert value(found, "rollouts_per_row") == 2  # a pass over all prompts: every other has rewards that differ
    assert value(found, "tokens_per_row") == 20
    assert (found.support, found.orders, found.batches, found.prompts) == (1, 1, 2, 40)


def test_dapo_pays_twice_for_a_batch_that_teaches():
    found = replay(HALF, recipes.dapo(5, 4, 10, surplus="carry"), batches=4, resamples=2)
    assert value(found, "rollouts_per_row") == pytest.approx(2, rel=0.35)


def test_what_the_log_cannot_answer_is_said():
    found = replay(HALF, recipes.grpo(20, 6), batches=2, resamples=2)
    assert found.support == pytest.approx(4 / 6)
    assert found.orders == 0
    again = replay(HALF, recipes.grpo(20, 4), batches=4, resamples=2)  # a second pass has nothing left
    assert (again.support, again.orders) == (0.5, 0.5)


def test_the_same_seed_says_the_same_and_intervals_hold_the_value():
    first, again = (replay(HALF, recipes.grpo(10, 4), batches=4, resamples=30, seed=3) for _ in range(2))
    assert first == again
    low, high = first.measures["rollouts_per_row"].interval
    assert low < value(first, "rollouts_per_row") < high


def test_a_log_without_tokens_has_no_price_in_them():
    found = replay(log([(f"p{at}", [1.0, 0]) for at in range(20)], tokens=None), recipes.grpo(10, 2), resamples=2)
    assert found.measures["tokens_per_batch"] is None
    assert value(found, "rollouts_per_batch") == 20


@pytest.mark.parametrize(
    ("groups", "recipe", "said"),
    [
        (log([(f"p{at}", [2.0, -1.0]) for at in range(20)]), recipes.grpo(4, 2), "--threshold"),
        (log([("p", [1.0, 0.0])]), recipes.grpo(4, 2), "at least 10 prompts"),
        (log([(f"p{at}", [np.nan]) for at in range(20)]), recipes.grpo(4, 2), "the log has 0"),
        (log([(f"p{at}", [0.0, 0.0]) for at in range(20)]), recipes.dapo(4, 2, 4, max_candidates=None), "no batch"),
    ],
)
def test_what_cannot_be_replayed_is_refused_and_nothing_hangs(groups, recipe, said):
    if said == "no batch":
        groups = log([(f"p{at}", [0.0] * 5000) for at in range(20)])
    with pytest.raises(ValueError, match=said):
        replay(groups, recipe, resamples=2)
