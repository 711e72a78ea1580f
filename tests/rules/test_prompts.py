"""Prompt rules: which prompts are drawn before any rollout."""

# pyright: reportArgumentType=false, reportCallIssue=false

from collections import Counter

import numpy as np
import pytest

from rollalloc import Allocator, PromptTable, recipes
from rollalloc.core.events import Done, Updated
from rollalloc.core.group import GroupView
from rollalloc.core.prompts import PromptStatistics
from rollalloc.core.rule import View
from rollalloc.core.seeds import rng
from rollalloc.recipes.cgrpo import FirstSuccesses
from rollalloc.recipes.greso import Selective
from rollalloc.recipes.mopps import Posterior
from rollalloc.recipes.vcrl import Banked
from rollalloc.rules import prompts

VIEW = View.of()


def picks(rule, table, k, times):
    """The picks of an epoch or more; what is picked stays taken until nothing is left, then all is free again."""
    memory, free_N, drawn = rule.init(table), np.ones(len(table), bool), []
    for call in range(times):
        picked = list(rule.pick(memory, k, free_N, VIEW, rng(0, "pick", call)))
        drawn.append(picked)
        free_N[picked] = False
        if len(picked) < k:
            free_N[:] = True
    return drawn


def test_shuffled_gives_each_prompt_once_an_epoch():
    first, second, rest, *_ = picks(prompts.Shuffled(), PromptTable(10), 4, 3)
    assert sorted(first + second + rest) == list(range(10))
    assert len(rest) == 2  # fewer than asked says that the epoch is over


def test_shuffled_draws_a_prompt_that_was_freed_after_its_turn_before_the_epoch_ends():
    rule, table = prompts.Shuffled(), PromptTable(4)
    memory, free_N = rule.init(table), np.ones(4, bool)
    early = rule.pick(memory, 2, free_N, VIEW, rng(0, "pick", 0))
    free_N[early] = False
    late = rule.pick(memory, 1, free_N, VIEW, rng(0, "pick", 1))
    free_N[late] = False
    free_N[early[0]] = True  # e.g. surplus: it may be drawn again now
    assert len(rule.pick(memory, 3, free_N, VIEW, rng(0, "pick", 2))) == 2
    assert rule.pick(memory, 1, np.zeros(4, bool), VIEW, rng(0, "pick", 3)) == []


def test_few_free_prompts_of_many_are_shuffled_alone_with_the_same_distribution(monkeypatch):
    monkeypatch.setattr(prompts, "_LARGE", 0)
    rule, table, free, orders = prompts.Shuffled(), PromptTable(100), [2, 3, 41, 99], Counter()
    for seed in range(480):
        memory, free_N = rule.init(table), np.isin(np.arange(100), free)
        picked = rule.pick(memory, 4, free_N, VIEW, rng(seed, "pick", 0))
        assert sorted(picked) == free
        assert sorted(memory["order"].tolist()) == list(range(100))
        orders[tuple(picked)] += 1
        free_N[:] = False
        free_N[7] = True  # what comes back after its turn is drawn before the pass ends
        assert rule.pick(memory, 1, free_N, VIEW, rng(seed, "pick", 1)) == [7]
    assert len(orders) == 24  # each order of four is expected 20 times
    assert max(orders.values()) <= 40


@pytest.mark.parametrize(("groups", "count"), [(4, 5), (3, 8), (5, 5), (1, 3)])
def test_each_prompt_is_visited_once_an_epoch_across_the_batches_that_straddle_two(groups, count):
    """An epoch's last prompts, drawn together with the first of the next, belong to the epoch they were drawn from."""
    allocator = Allocator(recipes.raft(groups, 1), count, 0)
    visits = []
    while len(visits) < 20 * count:
        orders = allocator.ask().generate
        visits += [order.prompt for order in orders]
        allocator.tell([Done(r, 0, 0, 1, allocator.version) for order in orders for r in order.rollouts])
        assert allocator.ask().batch is not None
        allocator.tell([Updated(allocator.version + 1)])
    for epoch in range(20):
        assert sorted(visits[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_in_order_gives_the_data_sets_order_epoch_after_epoch():
    first, second, rest, again, *_ = picks(prompts.InOrder(), PromptTable(10), 4, 6)
    assert (first, second, rest, again) == ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3])
    assert picks(prompts.InOrder(), PromptTable(1000), 999, 2) == [list(range(999)), [999]]


def test_in_order_passes_over_what_is_taken_and_gives_what_came_back_after_its_turn():
    rule, free_N = prompts.InOrder(), np.ones(400, bool)
    memory = rule.init(PromptTable(400))
    free_N[1:300] = False
    assert rule.pick(memory, 2, free_N, VIEW, rng(0, "pick", 0)) == [0, 300]
    free_N[:399] = False
    free_N[[5, 7]] = True  # e.g. surplus
    assert rule.pick(memory, 2, free_N, VIEW, rng(0, "pick", 1)) == [399, 5]
    free_N[[5, 399]] = False
    assert rule.pick(memory, 1, free_N, VIEW, rng(0, "pick", 2)) == [7]
    free_N[7] = False
    assert rule.pick(memory, 1, free_N, VIEW, rng(0, "pick", 3)) == []


def test_as_offered_keeps_the_loaders_order_and_passes_over_what_is_taken():
    rule = prompts.AsOffered()
    memory = rule.init(PromptTable(6))
    rule.offer(memory, (5, 3, 3, 1, 0))
    free_N = np.array([True, False, True, True, True, True])
    assert rule.waiting(memory) == 5
    assert rule.pick(memory, 2, free_N, VIEW, rng(0, "pick")) == [5, 3]
    free_N[[5, 3]] = False
    assert rule.pick(memory, 2, free_N, VIEW, rng(0, "pick")) == [0]
    assert rule.waiting(memory) == 0
    assert not rule.ended(memory)
    rule.offer(memory, ())
    assert rule.ended(memory)


def test_posterior_updates_as_by_hand():
    """α ← λα + (1 - λ)α₀ + s with λ = 1/2 and α₀ = β₀ = 1."""
    rule, view = Posterior(decay=0.5, prior_weight=2.0), View.of(3)
    memory = rule.init(PromptTable(3))
    assert memory["hits_N"].tolist() == memory["misses_N"].tolist() == [1, 1, 1]
    rule.observe(memory, GroupView.of([1, 1, 1, 0], rewards=[0.0, -1.0, 0.25, 1.0], prompt=1), view)  # by the metric
    assert (memory["hits_N"].tolist(), memory["misses_N"].tolist()) == ([1, 4, 1], [1, 2, 1])
    rule.observe(memory, GroupView.of([0, 0], prompt=1), view)
    assert (memory["hits_N"][1], memory["misses_N"][1]) == (2.5, 3.5)
    rule.observe(memory, GroupView.of([], prompt=1), view)  # every rollout failed: nothing is learned
    assert (memory["hits_N"][1], memory["misses_N"][1]) == (2.5, 3.5)


def test_posterior_fades_to_the_tables_prior_of_the_prompt():
    """With α₀ = 0.02 · 2 + 0.96 · 2 · 3/4 = 1.48 and β₀ = 0.52; before, it faded to α₀ = β₀ = 1 whatever the table said."""
    rule, table = Posterior(decay=0.5, prior_weight=2.0), PromptTable(2, prior_N=[float("nan"), 0.75])
    memory = rule.init(table)
    for prompt in (0, 1):
        rule.observe(memory, GroupView.of([1, 0, 0], prompt=prompt), View.of(table))
    np.testing.assert_allclose(memory["hits_N"], [1 + 1, 1.48 + 1], rtol=1e-6)
    np.testing.assert_allclose(memory["misses_N"], [1 + 2, 0.52 + 2], rtol=1e-6)


def test_posterior_begins_with_the_tables_priors_but_is_never_certain():
    memory = Posterior(prior_weight=10.0).init(PromptTable(3, prior_N=[0.0, float("nan"), 1.0]))
    np.testing.assert_allclose(memory["hits_N"], [0.2, 5.0, 9.8], rtol=1e-6)
    np.testing.assert_allclose(memory["misses_N"], [9.8, 5.0, 0.2], rtol=1e-6)


def test_selective_counts_and_adapts_as_by_hand():
    rule, table = Selective(), PromptTable(4)
    memory = rule.init(table)
    visits = {0: ([1, 1], [1, 1, 1], [1, 1]), 1: ([0, 0], [0, 0]), 2: ([1, 1], [1, 0]), 3: ([0, 0], [1, 1])}
    rule.observe(low := rule.init(table), GroupView.of([0.3, 0.3], prompt=0), VIEW)
    assert low["run_N"].tolist() == [-1, 0, 0, 0]  # alike, and nearer to failed than to solved
    for prompt, seen in visits.items():
        for metrics in seen:
            rule.observe(memory, GroupView.of(metrics, prompt=prompt), VIEW)
    rule.observe(memory, GroupView.of([1], prompt=2), VIEW)  # one score alone cannot differ
    assert memory["run_N"].tolist() == [3, -2, 0, 1]
    assert [memory[fate] for fate in ("solved", "failed", "mixed")] == [5, 3, 1]
    memory["p_solved"], memory["p_failed"] = 0.5, 0.2
    np.testing.assert_allclose(rule.chances(memory, np.arange(4)), [0.125, 0.04, 1, 0.5])
    memory["run_N"][:] = [100, -100, 7, 0]
    np.testing.assert_allclose(rule.chances(memory, np.arange(4)), [0.01, 0.01, 0.01, 1])


@pytest.mark.parametrize(
    ("solved", "failed", "mixed", "p_solved", "p_failed"),
    [
        (1, 2, 9, 0.49, 0.49),
        (0, 1, 11, 0.51, 0.51),
        (1, 1, 10, 0.49, 0.51),
        (0, 2, 10, 0.51, 0.49),
        (0, 0, 0, 0.5, 0.5),
    ],
)
def test_selective_aims_at_a_third_solved_and_two_thirds_failed_of_its_share(solved, failed, mixed, p_solved, p_failed):
    """A quarter of twelve groups: one solved, two failed."""
    rule = Selective()
    memory = rule.init(PromptTable(3)) | {"solved": solved, "failed": failed, "mixed": mixed}
    for epoch in (0, 1):  # in the first epoch nothing is known of most prompts yet
        now = dict(memory)
        rule.observe(now, GroupView.of([1, 0]), View.of(3, version=1, epoch=epoch))
        expected = (p_solved, p_failed) if epoch else (0.5, 0.5)
        assert (now["p_solved"], now["p_failed"]) == pytest.approx(expected)
        assert [now[fate] for fate in ("solved", "failed", "mixed", "version")] == [0, 0, 1, 1]


def test_selective_keeps_its_probabilities_within_bounds():
    rule = Selective()
    memory = rule.init(PromptTable(3))
    for version in range(1, 200):
        for metrics in ([1, 1], [1, 0], [1, 0], [1, 0]):
            rule.observe(memory, GroupView.of(metrics), View.of(3, version=version, epoch=1))
    assert (memory["p_solved"], memory["p_failed"]) == pytest.approx((0.05, 0.95))


def test_selective_draws_each_prompt_by_its_run():
    """4,000 prompts of each kind, once each: within 5 standard deviations with probability above 1 - 1e-5."""
    rule, table = Selective(), PromptTable(16_000)
    memory, free_N = rule.init(table), np.ones(16_000, bool)
    memory["run_N"][:] = np.repeat([0, 1, -2, 90], 4000)
    drawn = np.zeros(16_000, bool)
    for call in range(1000):
        picked = rule.pick(memory, 20, free_N, VIEW, rng(0, "pick", call))
        assert not drawn[picked].any()
        drawn[picked], free_N[picked] = True, False
        if len(picked) < 20:
            break
    counts = drawn.reshape(4, 4000).sum(axis=1)
    for count, chance in zip(counts.tolist(), (1, 0.5, 0.25, 0.01), strict=True):
        assert abs(count - 4000 * chance) <= 5 * np.sqrt(4000 * chance * (1 - chance))
    assert rule.pick(memory, 20, free_N, VIEW, rng(0, "pick")) == []  # the pass is over until the epoch is


def test_selective_draws_one_of_prompts_that_all_teach_nothing():
    """Chances 1/100 and 1/20: the second at its turn, else in 5 of 6 passes: 83.4% of 200, within 5 standard deviations."""
    rule = Selective()
    memory, free_N = rule.init(PromptTable(2)), np.ones(2, bool)
    memory["run_N"][:], memory["p_solved"] = [100, 1], 0.05
    drawn = [rule.pick(memory, 2, free_N, View.of(2, epoch=epoch), rng(0, "pick", epoch)) for epoch in range(200)]
    assert all(drawn)
    assert abs(sum(1 in picked for picked in drawn) - 200 * 0.834) < 5 * np.sqrt(200 * 0.834 * 0.166)
    assert rule.pick(memory, 2, np.zeros(2, bool), View.of(2, epoch=200), rng(0, "pick", 200)) == []


def visit(memory, rule, prompt, metrics):
    rule.observe(memory, GroupView.of(metrics, prompt=prompt), VIEW)


def known(fates):
    """A view, of a batch of two groups, of prompts whose last visits ended so."""
    statistics = PromptStatistics(len(fates))
    for prompt, fate in enumerate(fates):
        if fate:
            statistics.close_visit(prompt, fate, 0, [1.0])
    return View.of(len(fates), groups=2, statistics=statistics)


def test_vcrls_bank_by_hand():
    """P: 1; 0.9 · 1 + 0.1 · 3/4; out when its draws are used up; those dropped last and those in flight are passed over."""
    rule = Banked()
    memory = rule.init(PromptTable(6))
    for prompt, metrics in ((0, [1, 1, 0, 0]), (0, [1, 0, 0, 0]), (1, [1, 0, 0, 0]), (2, [1, 1, 0, 0]), (3, [1, 1])):
        visit(memory, rule, prompt, metrics)
    assert memory["bank"] == [[0, pytest.approx(0.975), 2], [1, 0.75, 2], [2, 1.0, 2]]
    visit(memory, rule, 1, [1])  # one score alone says nothing
    view = known(["trained", "trained", "out_of_band/low_variance", "zero_variance", "", ""])
    memory["new"] = 2  # a batch of new prompts has been drawn
    free_N = np.ones(6, bool)
    assert rule.pick(memory, 1, free_N, view, rng(0, "pick", 0)) == [0]
    assert memory["bank"] == [[0, pytest.approx(0.975), 1], [1, 0.75, 2]]
    assert rule.pick(memory, 2, np.array([0, 1, 0, 0, 1, 0], bool), view, rng(0, "pick", 1)) == [1, 4]
    assert rule.pick(memory, 1, free_N, view, rng(0, "pick", 2)) == [0]
    assert rule.pick(memory, 1, free_N, view, rng(0, "pick", 3)) == [1]
    visit(memory, rule, 0, [1, 1, 0, 0])  # drawn twice
    visit(memory, rule, 1, [1, 1, 0, 0])
    assert memory["bank"] == []
    visit(memory, rule, 0, [1, 1, 0, 0])  # as a new prompt, it enters anew
    assert memory["bank"] == [[0, 1.0, 2]]


def test_the_bank_holds_the_highest_and_moves_with_its_prompts():
    rule = Banked(capacity=2)
    memory = rule.init(PromptTable(3))
    for prompt, metrics in ((0, [1, 1, 0, 0]), (1, [1, 0, 0, 0]), (2, [1, 1, 0, 0])):
        visit(memory, rule, prompt, metrics)
    assert memory["bank"] == [[0, 1.0, 2], [2, 1.0, 2]]
    moved = rule.remap(memory | {"new": 1, "version": 5}, np.array([2, -1]), PromptTable(2))
    assert moved["bank"] == [[0, 1.0, 2]]
    assert (moved["new"], moved["version"], len(moved["order"])) == (1, 5, 2)


def test_first_successes_are_kept_of_the_last_visits():
    rule = FirstSuccesses(visits=3)
    memory = rule.init(PromptTable(5))
    for metrics in ([1, 1], [0, 0], [], [0, 0, 1], [0, 1]):
        visit(memory, rule, 0, metrics)
    assert memory["places"] == [0, 3, 2]
    assert rule.remap(memory, np.array([1]), PromptTable(1))["places"] == [0, 3, 2]
