"""The allocator by tables: each law, each defect that was published elsewhere, bad input and bad rules."""

import json
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest

from rollalloc import Allocator, Budget, EventError, MetricError, NoProgress, PromptTable, RuleError, Stage, recipes
from rollalloc.core.events import Actions, Cancelled, Done, Failed, Offered, Order, Updated
from rollalloc.core.prompts import NEVER, Epochs, PromptPool
from rollalloc.core.rule import (
    Act,
    AdvantageRule,
    IntakeRule,
    JudgeRule,
    PromoteRule,
    RowRule,
    RowTraits,
    SizeRule,
    StopRule,
    Verdict,
    called,
)
from rollalloc.recipes.mopps import Posterior
from rollalloc.rules import judges, promote, prompts, rows, sizes
from rollalloc.rules.advantages import OverGroup, Rewards
from updates import update

NAN, INF = float("nan"), float("inf")

# Pilot-Commit's eviction as published: one visit that is all right, for ever.
ONE_VISIT = {"p_solve": 1.0, "confidence": None, "reprobe_every": None}


def ids(orders):
    return [rollout for order in orders for rollout in order.rollouts]


def stages(orders):
    return sorted({order.stage for order in orders})


def nonzero(accounts):
    return {cause: count for cause, count in accounts.items() if count}


def with_judge(recipe, judge):
    return replace(recipe, stages=(*recipe.stages[:-1], replace(recipe.stages[-1], judge=judge)))


def with_promote(recipe, rule, stage=-1):
    changed = list(recipe.stages)
    changed[stage] = replace(changed[stage], promote=rule)
    return replace(recipe, stages=tuple(changed))


# ------------------------------------------------------------------------------------------------- one batch, by hand


def test_grpo_by_hand(drive):
    driver = drive(recipes.grpo(2, 4), prompts=8)
    first = driver.ask()
    assert [len(order.rollouts) for order in first.generate] == [4, 4]
    assert ids(first.generate) == list(range(8))
    assert (first.cancel, first.release, first.batch, first.finished) == ((), (), None, None)
    assert driver.ask() == Actions()  # each action is handed out once
    driver.answer(first.generate)
    second = driver.ask()
    assert [row.rollout for row in second.batch.rows] == list(range(8))
    assert {row.weight for row in second.batch.rows} == {1.0}
    assert [round(row.advantage, 4) for row in second.batch.rows] == [1, -1, 1, -1] * 2
    assert (second.batch.version, second.batch.short_because, second.generate) == (0, None, ())
    assert driver.ask() == Actions()  # without staleness nothing can be begun before the update
    driver.update()
    third = driver.ask()
    assert sorted(third.release) == list(range(8))
    assert ids(third.generate) == list(range(8, 16))
    assert nonzero(driver.allocator.accounts()) == {"trained": 8, "open": 8}


def test_groups_without_variance_stay_in_grpos_batch_with_zero_advantage(drive):
    driver = drive(recipes.grpo(2, 4), prompts=2, rewards={0: [0.1]})
    batch = driver.until_batch().batch
    assert len(batch.rows) == 8
    assert [row.advantage for row in batch.rows if row.prompt == 0] == [0.0] * 4
    assert all(row.advantage for row in batch.rows if row.prompt == 1)
    assert nonzero(driver.allocator.accounts()) == {"trained": 4, "zero_variance": 4}


def test_dapo_discards_what_it_does_not_need(drive):
    driver = drive(recipes.dapo(2, 2, 4), prompts=12)
    batch = driver.until_batch().batch
    assert len({row.group for row in batch.rows}) == 2
    assert nonzero(driver.allocator.accounts()) == {"trained": 4, "surplus": 4}
    driver.update()
    released = driver.ask().release
    assert sorted({*released, *driver.log[-2].release}) == list(range(8))


def test_dapo_carries_what_it_does_not_need_into_the_next_batch(drive):
    driver = drive(recipes.dapo(2, 2, 4, "carry"), prompts=12)
    driver.until_batch()
    assert nonzero(driver.allocator.accounts()) == {"trained": 4, "open": 4}
    driver.update()
    actions = driver.ask()
    assert {row.version for row in actions.batch.rows} == {0}
    assert actions.batch.version == 1
    assert nonzero(driver.allocator.accounts()) == {"trained": 8}


def test_dapo_with_max_candidates_gives_a_short_batch_that_says_why(drive):
    driver = drive(recipes.dapo(4, 2, 4, max_candidates=8), prompts=40, rewards={p: [0.0] for p in range(1, 40)})
    seen = []
    for _ in range(10):
        actions = driver.until_batch()
        if actions.batch is None:
            break
        seen.append(actions.batch)
        driver.update()
    assert seen
    assert all({row.prompt for row in batch.rows} == {0} for batch in seen)
    assert seen[0].short_because == "max_candidates: 8 prompts tried, 1 of 4 groups ready"


def test_pilot_commit_by_hand(drive):
    rewards = {0: [1.0], 1: [0.0], 2: [1.0, 1.0, 1.0, 0.0, 0.0, 0.0], 3: [1.0, 0.0]}
    recipe = recipes.pilot_commit(1, 4, 2, 4, p_lower=0.25, p_upper=0.25, max_staleness=0, **ONE_VISIT)
    driver = drive(recipe, prompts=4, rewards=rewards)
    pilots = driver.ask().generate
    assert sorted(order.prompt for order in pilots) == [0, 1, 2, 3]
    assert stages(pilots) == [0]
    driver.answer(pilots)
    commits = driver.ask().generate
    assert [(order.prompt, order.stage, len(order.rollouts)) for order in commits] == [
        (3, 1, 2)
    ]  # the highest variance
    driver.answer(commits)
    batch = driver.ask().batch
    assert [row.rollout for row in batch.rows] == sorted(
        ids([order for order in pilots if order.prompt == 3]) + ids(commits)
    )
    assert nonzero(driver.allocator.accounts()) == {"trained": 6, "out_of_band": 8, "surplus": 4}
    fates = [driver.allocator.statistics.record(prompt).fate for prompt in range(4)]
    assert fates == ["out_of_band/solved", "out_of_band/too_hard", "surplus", "trained"]


# --------------------------------------------------------------------------------------------------------------- laws


def test_law_1_a_second_terminal_event_is_refused_and_changes_nothing(drive):
    driver = drive(recipes.grpo(1, 2), prompts=2)
    rollout, _ = ids(driver.ask().generate)
    for terminal in (Done(rollout, 1, 1, 5, 0), Failed(rollout, "x"), Cancelled(rollout, 5)):
        if isinstance(terminal, Done):
            driver.allocator.tell([terminal])
        before = driver.allocator.state_dict()
        with pytest.raises(EventError, match=f"rollout {rollout}: already had its terminal event"):
            driver.allocator.tell([terminal])
        assert driver.allocator.state_dict() == before


def test_law_1_a_done_that_comes_after_its_cancellation_is_legal_and_counted(drive):
    driver = drive(recipes.darts(1, 1, 0, tail="none").replace(advantage=Rewards()), prompts=2)
    orders = driver.ask().generate
    first, *rest = ids(orders)
    assert rest
    driver.allocator.tell([Done(first, 1, 1, 5, 0)])
    actions = driver.ask()
    assert sorted(actions.cancel) == rest
    assert [row.rollout for row in actions.batch.rows] == [first]
    driver.allocator.tell([Done(rest[0], 1, 1, 7, 0)])
    assert driver.allocator.accounts()["cancelled"] == 1
    assert driver.ask().release == (rest[0],)
    assert driver.allocator.tokens_paid == 12


@dataclass(frozen=True)
class FirstTwo(JudgeRule):
    """Trains on a group when two of its rollouts have ended."""

    def __call__(self, group, view):
        return Verdict(Act.TRAIN) if group.scored >= 2 else None


@pytest.mark.parametrize("event", [Done(2, 1, 1, 1, 0), Failed(2, "no score", 1), Cancelled(2, 1)])
def test_a_stopped_rollout_that_ended_before_the_next_ask_is_not_cancelled(drive, event):
    """The second of four rollouts ends the group, and the third ends before `ask`: only the fourth is left to cancel."""
    driver = drive(with_judge(recipes.grpo(1, 4), FirstTwo()))
    driver.ask()
    driver.allocator.tell([Done(0, 1, 1, 1, 0), Done(1, 0, 0, 1, 0), event])
    assert driver.ask().cancel == (3,)


def test_law_2_staleness_counts_the_first_token_of_the_oldest_row(drive):
    driver = drive(recipes.dapo(1, 2, 1, "carry"), prompts=4)
    allocator = driver.allocator
    first, second = ids(driver.ask().generate)
    update(allocator)
    allocator.tell([Done(first, 1, 1, 5, 0, last_version=1)])
    update(allocator)
    allocator.tell([Done(second, 0, 0, 5, 2)])
    assert driver.ask().batch is None
    assert nonzero(allocator.accounts()) == {"stale": 1, "cancelled": 1, "open": 2}


@pytest.mark.parametrize("capacity", [1, 3, 7])
def test_law_4_too_little_capacity_splits_orders_and_loses_none(drive, capacity):
    driver = drive(recipes.grpo(2, 4), prompts=4)
    handed = []
    while len(handed) < 8:
        orders = driver.ask(capacity).generate
        assert 0 < len(ids(orders)) <= capacity
        assert all(order.rollouts for order in orders)
        handed += ids(orders)
    assert handed == list(range(8))
    assert driver.ask(capacity) == driver.ask(0) == Actions()
    with pytest.raises(ValueError, match="capacity must be 0 or more"):
        driver.ask(-1)


def test_law_4_the_furthest_stage_is_served_first(drive):
    driver = drive(recipes.pilot_commit(1, 2, 2, 2, p_lower=0.0, promote="oldest"), prompts=50)
    pilots = driver.ask().generate
    driver.answer(pilots[:1])
    orders = driver.ask(2).generate
    assert stages(orders) == [1]
    assert stages(driver.ask(2).generate) == [0]


def test_law_5_rows_are_released_after_the_update_and_not_before(drive):
    driver = drive(recipes.pods(1, 4, 2), prompts=4)
    actions = driver.until_batch()
    kept = {row.rollout for row in actions.batch.rows}
    assert kept.isdisjoint(actions.release)
    assert driver.ask().release == ()
    driver.update()
    assert set(driver.ask().release) == kept


def test_law_6_a_batch_does_not_depend_on_which_rollout_ends_first(drive):
    """More groups than a batch needs: it waits for the round's last rollout before it chooses among them."""
    batches = []
    for last in (0, -1):
        driver, running = drive(recipes.dapo(2, 4, 6), prompts=40), []
        while (actions := driver.ask()).batch is None:
            running += driver.results(actions.generate)
            driver.allocator.tell([running.pop(last)])
        batches.append(actions.batch)
    assert batches[0] == batches[1]


@pytest.mark.parametrize("limit", [1, 7, 8, 9, 30])
def test_law_7_a_budget_is_never_exceeded_and_ends_the_run_with_a_reason(drive, limit):
    driver = drive(replace(recipes.grpo(2, 4), budget=Budget(run_rollouts=limit)), prompts=20)
    reason = driver.until_end()
    assert driver.allocator.paid == limit // 4 * 4
    left = f"has {limit % 4} rollouts left, too few for another group" if limit % 4 else "is spent"
    assert reason == f"the budget of {limit} rollouts {left}"
    assert driver.allocator.accounts()["open"] == 0
    assert driver.ask() == Actions(finished=reason)


def test_law_7_rollouts_decided_but_not_handed_out_count_as_spent(drive):
    driver = drive(replace(recipes.dapo(4, 4, 8), budget=Budget(run_rollouts=20)), prompts=50)
    while not (actions := driver.ask(1)).finished:
        driver.answer(actions.generate)
        if actions.batch:
            driver.update()
    assert driver.allocator.paid == 20


def test_law_7_a_spent_token_budget_withholds_what_was_not_handed_out(drive):
    driver = drive(replace(recipes.grpo(1, 4), budget=Budget(run_tokens=15)), prompts=20)
    first = driver.ask(1)
    driver.answer(first.generate)
    driver.answer(driver.ask(2).generate)  # 30 tokens: over by no more than what was running
    actions = driver.ask()
    assert actions.generate == ()
    assert [row.rollout for row in actions.batch.rows] == [0, 1, 2]
    driver.update()
    assert driver.ask().finished.startswith("the budget of ")
    assert (driver.allocator.paid, driver.allocator.tokens_paid) == (3, 30)


# ------------------------------------------------------------------------------------- failures, cancellations, outages


def test_a_group_lives_on_when_one_of_its_rollouts_fails(drive):
    driver = drive(recipes.grpo(1, 3), prompts=2)
    first, second, third = ids(driver.ask().generate)
    driver.allocator.tell([Failed(first, "engine died", 7), Done(second, 1, 1, 5, 0), Done(third, 0, 0, 5, 0)])
    actions = driver.ask()
    assert [row.rollout for row in actions.batch.rows] == [second, third]
    assert actions.release == (first,)
    assert nonzero(driver.allocator.accounts()) == {"trained": 2, "failed": 1}
    assert driver.allocator.statistics.record(actions.batch.rows[0].prompt).attempts == 2  # unscored is not wrong
    assert driver.allocator.statistics.record(actions.batch.rows[0].prompt).tokens == 17


def test_a_group_of_which_all_failed_ends_and_its_prompt_comes_back_next_epoch(drive):
    driver = drive(recipes.grpo(1, 2), prompts=2)
    orders = driver.ask().generate
    driver.allocator.tell([Failed(rollout, "x") for rollout in ids(orders)])
    again = driver.ask().generate
    assert again[0].prompt != orders[0].prompt
    assert driver.allocator.statistics.record(orders[0].prompt).fate == "failed"
    driver.allocator.tell([Failed(rollout, "x") for rollout in ids(again)])
    assert driver.ask().generate
    assert driver.allocator.epoch == 1


def test_a_driver_may_cancel_on_its_own_and_the_tail_is_still_sampled(drive):
    """Only what the stop rule stopped stands behind the tail's weight."""
    driver = drive(recipes.darts(1, 2, 1, tail="sampled"), prompts=2)
    running = ids(driver.ask().generate)
    assert len(running) == 4  # mean redundancy 1.5: round(4.5)
    driver.allocator.tell([Cancelled(running[0], 3), Done(running[1], 1, 1, 5, 0)])
    assert driver.ask().cancel == ()
    driver.allocator.tell([Done(running[2], 0, 0, 6, 0), Done(running[3], 1, 1, 9, 0)])
    assert [row.weight for row in driver.ask().batch.rows] == [1.0, 1.0, 1.0]


def test_a_late_result_that_makes_a_waiting_group_too_old_ends_it_before_more_is_paid_for_it(drive):
    """Racing lets a group pass while rollouts still run; one of them may have begun under much older weights."""
    driver = drive(recipes.racing(2, (3, 6), 2, max_staleness=1), prompts=9)
    allocator = driver.allocator
    first, _ = driver.ask().generate
    update(allocator, None, None)
    one, two, three = first.rollouts
    allocator.tell([Done(one, 1, 1, 5, 2), Done(two, 0, 0, 5, 2), Done(three, 0, 0, 5, 0)])
    assert allocator.accounts()["stale"] == 3
    assert stages(driver.ask().generate) == [0]


# ------------------------------------------- the published Pilot-Commit's defects that concern the core (docs: PAPERS.md)


@pytest.mark.parametrize(("age", "trained"), [(3, True), (4, True), (5, False)])
def test_defect_4_a_group_of_age_max_staleness_is_trained_on_and_an_older_one_is_not(drive, age, trained):
    driver = drive(recipes.pilot_commit(1, 2, 2, 1, p_lower=0.0, max_staleness=4), prompts=1)
    allocator = driver.allocator
    pilots = driver.ask().generate
    driver.answer(pilots)
    commits = driver.ask().generate
    update(allocator, *[None] * age)
    if trained:
        driver.answer(commits)
        batch = driver.ask().batch
        assert max(batch.version - row.version for row in batch.rows) == age
    else:
        assert set(driver.ask().cancel) == set(ids(commits))
        allocator.tell([Cancelled(rollout, 0) for rollout in ids(commits)])
        assert nonzero(allocator.accounts()) | {"open": 0} == {"stale": 2, "cancelled": 2, "open": 0}


@pytest.mark.parametrize("order", ["top_variance", "random", "oldest"])
def test_defect_10_the_buffer_is_bounded_and_survivors_do_not_starve(drive, order):
    """Every prompt survives and variances differ: what was paid for pilots must not expire in bulk."""
    rewards = {p: [1.0] + [0.0] * (1 + p % 4) for p in range(400)}
    driver = drive(recipes.pilot_commit(4, 4, 4, 12, p_lower=0.0, promote=order), prompts=400, rewards=rewards)
    for _ in range(40):
        driver.until_batch()
        driver.update()
        assert driver.allocator.accounts()["open"] <= 4 * (2 * 4 + 12)
    accounts = driver.allocator.accounts()
    assert accounts["stale"] <= 0.05 * driver.allocator.paid


def test_defect_10_no_commits_are_paid_for_groups_that_the_awaited_update_makes_stale(drive):
    driver = drive(recipes.pilot_commit(1, 2, 2, 3, p_lower=0.0, max_staleness=1), prompts=40)
    for _ in range(30):
        driver.until_batch()
        beside = driver.ask().generate  # the engine does not wait for the trainer
        held_back = driver.results(beside)
        driver.update()
        after = driver.ask()
        assert after.cancel == ()  # none of these was begun in vain
        driver.allocator.tell(held_back)
        driver.answer(after.generate)
    assert driver.allocator.accounts()["cancelled"] == 0


def test_defect_12_selection_looks_at_the_metric_and_training_at_the_reward(drive):
    driver = drive(recipes.dapo(1, 2, 1), prompts=4)
    first, second = ids(driver.ask().generate)
    driver.allocator.tell([Done(first, 0.4, 1, 5, 0), Done(second, 1.0, 1, 5, 0)])  # shaped apart, equally right
    assert nonzero(driver.allocator.accounts()) == {"zero_variance": 2}
    first, second = ids(driver.ask().generate)
    driver.allocator.tell([Done(first, 0.5, 1, 5, 0), Done(second, 0.5, 0, 5, 0)])
    batch = driver.ask().batch
    assert [row.advantage for row in batch.rows] == [0.0, 0.0]
    assert nonzero(driver.allocator.accounts()) == {"zero_variance": 4}


# ------------------------------------------------------------------------------------------- the end of data, re-probing


@pytest.mark.parametrize(
    "recipe",
    [
        recipes.dapo(4, 4, 8),
        recipes.dapo(4, 4, 8, "carry"),
        recipes.dapo(4, 4, 8, max_candidates=16),
        recipes.pilot_commit(4, 4, 4, 8),
        recipes.pilot_commit(4, 4, 4, 8, reprobe_every=2),
        recipes.pilot_commit(4, 4, 4, 8, max_candidates=16, max_staleness=0),
        recipes.racing(4, (2, 4), 8),
        replace(recipes.pilot_commit(4, 4, 4, 8), prompts=Posterior()),
    ],
)
@pytest.mark.parametrize("rate", ["solved", "impossible", "both"])
def test_a_solved_or_impossible_data_set_ends_with_a_plain_statement(drive, recipe, rate):
    values = {"solved": ([1.0], [1.0]), "impossible": ([0.0], [0.0]), "both": ([1.0], [0.0])}[rate]
    driver = drive(recipe, prompts=20, rewards={p: values[p % 2] for p in range(20)})
    reason = driver.until_end()
    assert not any(actions.batch for actions in driver.log)
    assert reason.startswith(("barren: none of the last", "prompts: none of 20 may be drawn"))
    assert "20 zero_variance" in reason or "out_of_band" in reason
    assert driver.allocator.accounts()["open"] == 0


def test_a_batch_resets_the_count_of_prompts_that_gave_no_group(drive):
    """A round of 100 prompts, the first of them mixed; then none. 256 are tried under the new weights, in rounds of 100."""
    driver = drive(recipes.dapo(1, 2, 100), prompts=200, default=(0.0,))
    orders = driver.ask().generate
    driver.rewards[orders[0].prompt] = [1.0, 0.0]
    driver.answer(orders)
    assert driver.ask().batch is not None
    driver.rewards.clear()
    driver.update()
    assert driver.until_end().startswith("barren: none of the last 300 prompts")
    assert sum(driver.allocator.accounts().values()) == 2 * (100 + 300)


# ---------------------------------------------------------------------------------------------------------- quarantine


def visits(driver, prompt):
    return sum(order.prompt == prompt for actions in driver.log for order in actions.generate)


def test_what_the_driver_cancels_is_no_failure_of_the_prompt(drive):
    driver = drive(recipes.grpo(1, 2), prompts=1)
    for _ in range(9):
        driver.allocator.tell([Cancelled(rollout, 1) for rollout in ids(driver.ask().generate)])
    assert driver.allocator.quarantined() == []
    assert driver.allocator.statistics.record(0).failures == 0


def test_a_reward_that_never_scores_ends_the_run_long_before_the_data_do(drive):
    driver = drive(recipes.dapo(8, 4, 8), prompts=10_000, default=(None,))
    reason = driver.until_end()
    assert reason.startswith("failed: the last 64 prompts tried gave no score")
    assert "64 failed" in reason
    assert driver.allocator.paid == 64 * 4


def test_a_run_in_which_something_scores_now_and_then_goes_on(drive):
    driver = drive(recipes.grpo(8, 2), prompts=640, default=(None,), rewards={p: [1, 0] for p in range(0, 640, 8)})
    for _ in range(20):
        assert driver.until_batch().batch is not None
        driver.update()


def test_quarantine_survives_a_load_and_moves_with_the_prompts(drive):
    driver = drive(recipes.grpo(1, 2), PromptTable(("a", "b", "c")), rewards={0: [None], 1: [None]})
    driver.allocator.statistics.failures_N[1] = 1
    for _ in range(12):
        driver.until_batch()
        driver.update()
    assert driver.allocator.quarantined() == [0, 1]
    moved = Allocator(recipes.grpo(1, 2), PromptTable(("d", "c", "b", "a")), 0)
    moved.load_state_dict(driver.allocator.state_dict(), remap="keys")
    assert moved.quarantined() == [2, 3]
    again = type(driver)(moved)
    for _ in range(9):
        again.until_batch()
        again.update()
    assert {order.prompt for actions in again.log for order in actions.generate} == {0, 1}


def test_prompts_that_are_evicted_and_come_back_are_counted(drive):
    recipe = recipes.pilot_commit(2, 2, 2, 2, p_lower=0.0, max_staleness=0, **ONE_VISIT | {"reprobe_every": 2})
    driver = drive(recipe, prompts=6, rewards={0: [1.0]})
    seen = set()
    while driver.allocator.epoch < 9:
        driver.until_batch()
        driver.update()
        away = driver.allocator.prompt_counts()
        seen.add(away["evicted"])
        assert away["revived"] == max(0, visits(driver, 0) - 1)
    assert seen == {0, 1} or seen == {1}
    assert away["revived"] >= 3
    recipe = recipes.pilot_commit(2, 2, 2, 2, p_lower=0.0, **ONE_VISIT)
    never = drive(recipe, prompts=6, rewards={0: [1.0], 1: [1.0]})
    for _ in range(20):
        never.until_batch()
        never.update()
    assert never.allocator.prompt_counts() == {"evicted": 2, "revived": 0, "quarantined": 0}


# --------------------------------------------------------------------------------------------------- a framework's loader


def offered(recipe):
    return replace(recipe, prompts=prompts.AsOffered())


def test_as_offered_takes_the_loaders_prompts_in_its_order_and_says_how_many_it_wants():
    allocator = Allocator(offered(recipes.grpo(2, 2)), 10, 0)
    assert allocator.wanted() == 2
    with pytest.raises(NoProgress, match=r"tell Offered with more of them \(Allocator.wanted\(\) says how many\)"):
        allocator.ask()
    allocator.tell([Offered((7, 3, 5), 0)])
    assert allocator.wanted() == 0
    orders = allocator.ask().generate
    assert [order.prompt for order in orders] == [7, 3]
    allocator.tell([Done(r, r % 2, r % 2, 1, 0) for r in ids(orders)])
    assert allocator.ask().batch is not None
    assert allocator.wanted() == 0  # before the update nothing may be begun
    allocator.tell([Updated(1)])
    assert allocator.wanted() == 1  # 5 is still there


def test_as_offered_ends_after_an_empty_offer_with_what_is_there():
    allocator = Allocator(offered(recipes.grpo(2, 2)), 10, 0)
    allocator.tell([Offered((4,), 0), Offered((), 0)])
    assert allocator.wanted() == 0  # a driver that loops while prompts are wanted gets out
    orders = allocator.ask().generate
    allocator.tell([Done(r, r % 2, r % 2, 1, 0) for r in ids(orders)])
    batch = allocator.ask().batch
    assert batch.short_because.startswith("prompts: the loader has ended")
    allocator.tell([Updated(1)])
    assert allocator.ask().finished.startswith("prompts: the loader has ended")


def with_quarantined_0_and_1(drive):
    """A driver of batches of 2 groups, whose loader has offered prompts 0 and 1; both failed and are quarantined."""
    driver = drive(offered(replace(recipes.grpo(2, 2), quarantine_after=1)), 6, {0: [None], 1: [None]})
    driver.allocator.tell([Offered((0, 1), 0)])
    driver.answer(driver.ask().generate)
    assert driver.allocator.quarantined() == [0, 1]
    return driver


def test_offers_of_quarantined_prompts_leave_as_many_wanted_as_before(drive):
    """A batch lacks 2 groups: each quarantined prompt that the loader offers is passed over, and another is wanted."""
    driver = with_quarantined_0_and_1(drive)
    wanted = [driver.allocator.wanted()]
    for prompts_offered in [(0, 2), (1,), (3,)]:
        driver.allocator.tell([Offered(prompts_offered, 1)])
        wanted.append(driver.allocator.wanted())
    assert wanted == [2, 1, 1, 0]
    assert [order.prompt for order in driver.ask().generate] == [2, 3]


def test_a_loader_that_begins_again_with_quarantined_prompts_has_not_ended(drive):
    driver = with_quarantined_0_and_1(drive)
    driver.allocator.tell([Offered((), 0), Offered((0, 1), 1)])
    with pytest.raises(NoProgress, match="tell Offered with more of them"):  # and the run is not over
        driver.ask()
    driver.allocator.tell([Offered((4, 5), 1)])
    assert [order.prompt for order in driver.ask().generate] == [4, 5]


def test_as_offered_takes_its_epochs_from_the_loader():
    allocator = Allocator(offered(recipes.raft(1, 1)), 3, 0)
    for epoch in (0, 1):
        allocator.tell([Offered((2,), epoch)])
        orders = allocator.ask().generate
        assert [order.prompt for order in orders] == [2]
        allocator.tell([Done(r, 1, 1, 1, epoch) for r in ids(orders)])
        assert allocator.ask().batch is not None
        allocator.tell([Updated(epoch + 1)])
    assert allocator.epoch == 1
    with pytest.raises(EventError, match=r"an epoch of at least 1, got epoch 0"):
        allocator.tell([Offered((2,), 0)])
    with pytest.raises(EventError, match=r"prompts below 3 .* prompts \[3\]"):
        allocator.tell([Offered((3,), 1)])


def test_offers_to_a_recipe_that_draws_its_own_prompts_are_refused():
    allocator = Allocator(recipes.raft(1, 1), 3, 0)
    assert allocator.wanted() == 0
    with pytest.raises(EventError, match=r"Offered: the recipe draws its own prompts .*use the prompt rule as_offered"):
        allocator.tell([Offered((1,), 0)])


# ----------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (
            Done(0, NAN, 1, 5, 0),
            "reward nan and metric 1 must be finite numbers within ±1e\\+30; scale them, and tell Failed for a rollout",
        ),
        (Done(0, INF, 1, 5, 0), "reward inf and metric 1 must be finite"),
        (Done(0, 1, NAN, 5, 0), "reward 1 and metric nan must be finite"),
        (Done(0, -1e38, 1, 5, 0), "reward -1e.38 and metric 1 must be finite numbers within"),
        (Done(0, [1, 2], 1, 5, 0), r"reward \[1, 2\] and metric 1 must be finite numbers"),
        (Done(0, 1, np.ones(2), 5, 0), "metric array.* must be finite numbers"),
        (Done(0, 1, 1, 2**31, 0), "tokens must be a whole number of 0 or more, at most 2147483647, got 2147483648"),
        (Updated(2**31), "Updated: version must be a whole number of 0 or more, at most 2147483647"),
        (Done(99, 1, 1, 5, 0), "rollout 99: was never ordered; tell exactly one of Done, Failed and Cancelled"),
        (Done(0, 1, 1, -5, 0), "rollout 0: tokens must be a whole number of 0 or more, .* got -5"),
        (
            Done(0, 1, 1, 5, 4),
            "versions 4 to 4 must lie between 0 and 3, the version of the weights; tell Updated before",
        ),
        (Done(0, 1, 1, 5, 2, last_version=1), "versions 2 to 1 must lie between 0 and 3, the version of the weights"),
        (Done(0, 1, 1, 5, -1), "versions -1 to -1 must lie between 0"),
        (Done(0, 1, 1, 5, 0, uncertainty=NAN), "uncertainty nan must be the sum of .* or None if it is unknown"),
        (Done(0, 1, 1, 5, 0, uncertainty=-0.5), "uncertainty -0.5 must be the sum of .*, 0 or more"),
        (Done(0, 1, 1, 5, 0, uncertainty=np.ones(2)), "uncertainty array.* must be the sum of"),
        (Failed(99, "x"), "rollout 99: was never ordered"),
        (Failed(0, "x", -1), "tokens must be a whole number of 0 or more"),
        (Cancelled(-1, 0), "rollout -1: was never ordered"),
        (Updated(4), r"Updated\(4\): no batch is out; tell one Updated for each batch that `ask` returns"),
        (Updated(1.5), "Updated: version must be a whole number of 0 or more, .* got 1.5"),
        (Updated(None), "Updated: version must be a whole number of 0 or more, .* got None"),
        (Done(0, 1, 1, None, 0), "rollout 0: tokens must be a whole number of 0 or more, .* got None"),
        (Done(0, 1, 1, 1, None), "versions None to None must lie between 0 and 3"),
        ("done", "expected an event of rollalloc.core.events, got str"),
    ],
)
def test_an_impossible_event_is_refused_with_what_was_expected_and_what_came(event, message):
    allocator = Allocator(recipes.grpo(1, 4), 3, 0)
    update(allocator, None, None, None)
    allocator.ask()
    before = allocator.state_dict()
    with pytest.raises(EventError, match=f"event 0, .*{message}"):
        allocator.tell([event])
    assert allocator.state_dict() == before


@pytest.mark.parametrize("version", [0, 1, 3, 6])
def test_versions_count_batches_one_by_one(drive, version):
    """A trainer that counts its optimizer steps would make every row older than it is."""
    driver = drive(recipes.grpo(1, 2))
    for _ in range(2):
        driver.until_batch()
        if driver.allocator.version < 1:
            driver.update()
    with pytest.raises(EventError, match=rf"Updated\({version}\): the version must be 2, .* not optimizer steps"):
        driver.allocator.tell([Updated(version)])
    driver.allocator.tell([Updated(2)])
    with pytest.raises(EventError, match=r"Updated\(3\): no batch is out"):
        driver.allocator.tell([Updated(3)])


@pytest.mark.parametrize("recipe", [recipes.grpo(2, 2), recipes.dapo(2, 2, 4, "carry")], ids=["fresh", "carry"])
def test_a_loop_that_forgets_updated_is_told_at_its_second_empty_ask(drive, recipe):
    driver = drive(recipe)
    driver.until_batch()
    for _ in range(10):  # a recipe with staleness has more to do first
        if (actions := driver.ask()) == Actions():
            break
        driver.answer(actions.generate)
    assert actions == Actions()
    with pytest.raises(
        NoProgress, match=r"tell Updated\(1\). To poll while another thread trains, ask with a capacity"
    ):
        driver.ask()
    assert [driver.ask(capacity) for capacity in (0, 7, 7)] == [Actions()] * 3
    driver.update()
    assert driver.until_batch().batch


def test_a_loop_that_is_told_something_between_two_empty_asks_waits_for_its_update(drive):
    driver = drive(offered(recipes.grpo(1, 2)), prompts=9)
    driver.allocator.tell([Offered((0, 1, 2), 0)])
    driver.until_batch()
    for prompt in (3, 4, 5):
        assert driver.ask() == Actions()
        driver.allocator.tell([Offered((prompt,), 0)])
    assert driver.ask() == Actions()
    driver.update()
    assert driver.ask().generate


def test_polling_while_stopped_rollouts_have_not_ended_is_no_error(drive):
    driver = drive(recipes.darts(1, 2, 0, tail="none"), prompts=2)
    [order] = driver.ask().generate
    driver.allocator.tell([Done(rollout, rollout % 2, rollout % 2, 5, 0) for rollout in order.rollouts[:2]])
    actions = driver.ask()
    assert actions.batch
    assert actions.cancel
    assert [driver.ask() for _ in range(3)] == [Actions()] * 3
    driver.allocator.tell([Cancelled(rollout, 1) for rollout in actions.cancel])
    assert driver.ask().release == actions.cancel
    driver.ask()
    with pytest.raises(NoProgress, match="tell Updated"):
        driver.ask()


def test_the_events_before_a_bad_one_are_taken():
    allocator = Allocator(recipes.grpo(1, 4), 3, 0)
    allocator.ask()
    with pytest.raises(EventError, match=r"event 1, rollout 1: reward nan"):
        allocator.tell([Done(0, 1, 1, 5, 0), Done(1, NAN, 1, 5, 0), Done(2, 1, 1, 5, 0)])
    assert allocator.tokens_paid == 5


def test_a_rollout_that_was_decided_but_not_handed_out_cannot_end():
    allocator = Allocator(recipes.grpo(1, 4), 3, 0)
    allocator.ask(capacity=2)
    with pytest.raises(EventError, match="rollout 3: already had its terminal event, or was not handed out"):
        allocator.tell([Done(3, 1, 1, 5, 0)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Allocator(recipes.grpo(4, 2), 3, 0), "4 groups per batch but there are only 3 prompts; use fewer"),
        (lambda: Allocator(recipes.grpo(1, 2), 3, -1), "seed must be 0 or more, got -1"),
        (lambda: Allocator(recipes.grpo(1, 2), 0, 0), "needs at least one prompt, got none"),
        (lambda: PromptTable(["a", "b", "a"]), "prompt key 'a' occurs at 0 and at 2; keys must be unique"),
        (lambda: PromptTable(3, prior_N=[0.5]), r"prior_N must have one entry per prompt, shape \(3,\), got \(1,\)"),
        (lambda: PromptTable(2, prior_N=[0.5, 1.5]), r"prior_N must contain success rates in \[0, 1\]"),
        (lambda: recipes.pilot_commit(4, 0, 4, 8), r"n_pilot must be .* at least 1 \(so that each prompt has an .* got 0"),
        (lambda: recipes.pilot_commit(4, 4, 0, 8), "n_commit must be a whole number of at least 1, got 0"),
        (lambda: recipes.pilot_commit(4, 4, 4, 0), r"gen_groups must be .* at least 1, got 0"),
        (lambda: recipes.pilot_commit(4, 4, 4, 8, promote="best"), "one of top_variance, expiring_first, .*, got 'best'"),
        (lambda: recipes.pilot_commit(4, 4, 4, 8, max_staleness=-1), "max_staleness must be"),
        (lambda: recipes.pods(4, 8, 9), "m must be at most n=8, the number of rollouts to choose from, got 9"),
        (lambda: recipes.pods(4, 8, 4, "best"), "rule must be one of max_variance, max_reward, .*, got 'best'"),
        (lambda: recipes.pods(4, 8, 1), r"m must be .* at least 2 \(so that their rewards can differ\), got 1"),
        (lambda: recipes.grpo(0, 4), "groups must be a whole number of at least 1, got 0"),
        (lambda: recipes.grpo(4, 2.0), "grpo: n must be a whole number, got 2.0"),
        (lambda: recipes.dapo(4, 1, 4), r"n must be .* at least 2 \(so that rewards can differ\), got 1"),
        (lambda: recipes.dapo(4, 4, 4, "keep"), "surplus must be one of discard, carry, got 'keep'"),
        (lambda: recipes.dapo(4, 4, 8, max_candidates=0), r"max_candidates must be .* at least 4 .*, got 0"),
        (lambda: recipes.darts(4, 0, 1), "shortest must be"),
        (lambda: recipes.darts(4, 3, 1, tail="all"), "tail must be one of exact, sampled, none, got 'all'"),
        (lambda: recipes.darts(4, 3, 1, max_redundancy=0.5), r"max_redundancy \(rollouts generated .* must be in"),
        (lambda: recipes.darts(4, 3, 1, max_redundancy=1e9), r"must be in \[1, 1024\], got 1000000000.0"),
        (lambda: recipes.darts(4, 3, 1, max_redundancy=float("nan")), r"must be in \[1, 1024\], got nan"),
        (lambda: recipes.mix(recipes.grpo(4, 4), recipes.grpo(5, 4)), "same number of groups, got 4 and 5"),
        (lambda: recipes.mix(recipes.pods(4, 8, 4), recipes.darts(4, 3, 1)), "both recipes change rows: .*plain value"),
        (lambda: recipes.mix(recipes.grpo(4, 2), recipes.pods(4, 8, 4)), "but the stages generate only 2"),
        (lambda: Budget(run_rollouts=0), "run_rollouts must be at least 1, or None for no limit, got 0"),
        (lambda: replace(recipes.raft(1, 1), stages=()), "a recipe needs at least one stage, got none"),
    ],
)  # fmt: skip
def test_bad_input_says_what_was_expected_and_what_came(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_other_types_are_refused():
    with pytest.raises(TypeError, match="prompts must be a number of prompts or a PromptTable, got str"):
        Allocator(recipes.raft(1, 1), "data.parquet", 0)
    with pytest.raises(
        TypeError, match=r"intake: expected a rule derived from .*IntakeRule, got .*; write your rule as a"
    ):
        replace(recipes.raft(1, 1), intake=lambda view, memory: 1)
    with pytest.raises(
        TypeError, match=r"stage 'rollout': judge: expected a rule derived from .*JudgeRule, got Oldest"
    ):
        recipes.raft(1, 1).replace(judge=promote.Oldest())
    with pytest.raises(TypeError, match="has no stable description, so its recipe cannot be compared"):
        replace(recipes.raft(1, 1), advantage=OverGroup(lambda rewards_G: rewards_G))


# ----------------------------------------------------------------------------------------------- rules that break their word


@dataclass(frozen=True)
class Returns(JudgeRule, IntakeRule, PromoteRule, SizeRule, AdvantageRule):
    """A rule that returns the same whatever it is asked."""

    value: object

    def __call__(self, *_):
        return self.value


@dataclass(frozen=True)
class ReturnsRows(RowRule):
    indices: tuple
    weights: tuple

    def __call__(self, *_):
        return np.array(self.indices), np.array(self.weights)


@dataclass(frozen=True)
class Twice(PromoteRule):
    """Promotes its first group twice."""

    def __call__(self, held, *_):
        return [held[0], held[0]]


@dataclass(frozen=True)
class StopsFinished(StopRule):
    def __call__(self, group, view, rng):
        return group.rollouts_G.tolist()[:1]


def test_an_intake_rule_that_opens_nothing_makes_no_progress_and_is_named(drive):
    with pytest.raises(NoProgress, match=r"Returns\(value=0\) opens no group"):
        drive(replace(recipes.raft(1, 1), intake=Returns(0))).ask()


def test_an_error_names_a_rule_by_its_class_where_its_parameters_would_fill_lines():
    assert called(Returns(0)) == "Returns(value=0)"
    assert called(recipes.foresight(4).prompts) == "Foresight"


@pytest.mark.parametrize("stage", [0, 1])
def test_a_promote_rule_that_promotes_none_makes_no_progress_and_is_named(drive, stage):
    driver = drive(with_promote(recipes.pilot_commit(1, 2, 2, 1, p_lower=0.0), Returns(()), stage), prompts=9)
    with pytest.raises(NoProgress, match=r"Returns\(value=\(\)\)"):
        driver.until_batch()


BASE = recipes.grpo(1, 2)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (with_judge(BASE, Returns(None)), "returned no verdict although all rollouts of the group have ended"),
        (with_judge(BASE, Returns(Verdict(Act.NEXT))), "returned NEXT in the last stage; expected TRAIN"),
        (with_promote(BASE, Twice()), "must choose at most 1 different groups"),
        (replace(BASE, rows=ReturnsRows((0, 0), (1.0, 1.0))), "must choose at least one index below 2, and no index twice"),
        (replace(BASE, rows=ReturnsRows((2,), (1.0,))), "must choose at least one index below 2"),
        (replace(BASE, rows=ReturnsRows((-1,), (1.0,))), "must choose at least one index below 2"),
        (replace(BASE, rows=ReturnsRows((), ())), "must choose at least one index"),
        (replace(BASE, rows=ReturnsRows((0.0, 1.0), (1.0, 1.0))), "no index twice, got"),
        (replace(BASE, rows=ReturnsRows((True, False), (1.0, 1.0))), "no index twice, got"),
        (replace(BASE, rows=ReturnsRows((0, 1), (1.0,))), "each row a finite weight"),
        (replace(BASE, rows=ReturnsRows((0, 1), (1.0, NAN))), "each row a finite weight"),
        (replace(BASE, rows=ReturnsRows((0, 1), (1.0, -1.0))), "each row a finite weight"),
        (replace(BASE, advantage=Returns((1.0,))), "must give 2 finite advantages"),
        (replace(BASE, advantage=Returns((1.0, NAN))), "must give 2 finite advantages"),
        (replace(BASE, stages=(Stage("x", Returns([0]), judges.Complete(), None, promote.Oldest()),)),
         "must give each of 1 groups at least 1 rollout"),
        (replace(BASE, stages=(Stage("x", Returns([1, 1]), judges.Complete(), None, promote.Oldest()),)),
         "must give each of 1 groups at least 1 rollout"),
        (replace(BASE, stages=(Stage("x", sizes.Fixed(2), judges.Complete(), StopsFinished(), promote.Oldest()),)),
         "a stop rule named rollout 0, which is not running"),
    ],
)  # fmt: skip
def test_a_rule_that_breaks_its_contract_is_named(drive, recipe, message):
    driver = drive(recipe, prompts=4)

    def run():
        for rollout in ids(driver.ask().generate):
            driver.allocator.tell([Done(rollout, rollout % 2, rollout % 2, 1, 0)])
            driver.ask()

    with pytest.raises(RuleError, match=message):
        run()


@dataclass(frozen=True)
class LeastScoredOf(StopsFinished):
    least: object

    def least_scored(self, view):
        return self.least


@pytest.mark.parametrize(
    ("least", "message"),
    [(None, "must be a whole number of at least 0, got None"), (-1, "must be a whole number of at least 0, got -1")],
)
def test_a_stop_rule_that_does_not_say_when_it_is_asked_is_named(least, message):
    with pytest.raises(ValueError, match=message):
        Allocator(replace(BASE, stages=(replace(BASE.stages[0], stop=LeastScoredOf(least)),)), 1, 0)


@dataclass(frozen=True)
class Says(ReturnsRows):
    rows: object = 2

    @property
    def traits(self):
        return RowTraits(rows=self.rows)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"rows": 0}, "its trait `rows` must be a whole number of at least 1"),
        ({"rows": rows.Everything()}, "its trait `rows` must be a whole number"),
    ],
)
def test_a_row_rule_with_an_impossible_number_of_rows_is_named(said, message):
    with pytest.raises(ValueError, match=message):
        replace(BASE, rows=Says((0, 1), (1.0, 1.0), **said))


# ------------------------------------------------------------------------------------------------------------ after a load


def test_outstanding_repeats_what_is_in_flight_after_a_load(drive):
    driver = drive(recipes.darts(2, 1, 0, 3.0, tail="none").replace(advantage=Rewards()), prompts=6)
    first, second = driver.ask().generate
    driver.allocator.tell([Done(first.rollouts[0], 1, 1, 5, 0)])
    cancelled = driver.ask().cancel
    assert set(cancelled) == set(first.rollouts[1:])
    copy = Allocator(driver.allocator.recipe, 6, 0)
    copy.load_state_dict(driver.allocator.state_dict())
    outstanding = copy.outstanding()
    assert outstanding.generate == (Order(second.group, second.prompt, 0, second.rollouts),)
    assert set(outstanding.cancel) == set(cancelled)
    assert (outstanding.release, outstanding.batch) == ((), None)
    copy.tell([Done(second.rollouts[0], 1, 1, 5, 0)])
    batch = copy.ask().batch
    assert copy.outstanding().batch == batch
    assert copy.outstanding() == copy.outstanding()
    copy.tell([Updated(1)])
    assert copy.outstanding().batch is None


@pytest.mark.parametrize("capacity", [None, 6, 3, 2])
def test_a_sampled_tail_is_weighted_by_its_probability_whatever_the_capacity(capacity):
    """One of the two shortest is there, one of the four others is kept: weight 4, also where some were never handed out."""
    recipe = recipes.darts(1, 2, 1, max_redundancy=3, tail="sampled")
    recipe = replace(recipe, stages=(replace(recipe.stages[0], size=sizes.Fixed(6)),))
    allocator = Allocator(recipe, 1, 0)
    running: list[int] = []
    while not (actions := allocator.ask(None if capacity is None else capacity - len(running))).batch:
        allocator.tell([Cancelled(rollout, 1) for rollout in actions.cancel])
        running = [rollout for rollout in running if rollout not in actions.cancel]
        running += [rollout for order in actions.generate for rollout in order.rollouts]
        if running:
            rollout = running.pop(0)
            allocator.tell([Done(rollout, float(rollout % 2), float(rollout % 2), 10 + rollout, 0)])
    assert [row.weight for row in actions.batch.rows] == [1.0, 1.0, 4.0]


@dataclass(frozen=True)
class StopsTheRest(StopRule):
    """Stops every rollout that is to come once two have ended."""

    def least_scored(self, view):
        return 2

    def __call__(self, group, view, rng):
        return group.running


@pytest.mark.parametrize("capacity", [2, 3, None])
def test_a_tail_that_is_stopped_before_it_is_ordered_is_as_stopped_as_one_that_runs(capacity):
    """DARTS stops all but the first two of six rollouts: only the shortest is a row, not the longer one as "the longest"."""
    recipe = recipes.darts(1, 1, 1, max_redundancy=3, tail="sampled")
    recipe = replace(recipe, stages=(replace(recipe.stages[0], size=sizes.Fixed(6), stop=StopsTheRest()),))
    allocator = Allocator(recipe, 1, 0)
    allocator.ask(capacity)
    allocator.tell([Done(0, 1, 1, 10, 0), Done(1, 0, 0, 11, 0)])
    actions = allocator.ask(0)
    assert actions.cancel == tuple(range(2, 6 if capacity is None else capacity))
    assert [row.rollout for row in actions.batch.rows] == [0]


@pytest.mark.parametrize("metric", [2.0, -1.0, 1.001])
def test_a_metric_outside_0_and_1_is_refused_where_a_rule_takes_it_for_a_success_rate(drive, metric):
    driver = drive(recipes.pilot_commit(2, 2, 2, gen_groups=4), rewards={}, default=(metric,))
    orders = driver.ask().generate
    with pytest.raises(
        MetricError, match=r"event 0, rollout 0: Band\(.*success rate in \[0, 1\], got .*a metric for selection"
    ):
        driver.answer(orders)
    assert driver.allocator.accounts()["open"] == driver.allocator.paid  # the event was not taken


@pytest.mark.parametrize("recipe", [recipes.dapo(2, 2, 2), recipes.pods(2, 4, 2), recipes.racing(2, (2, 4), 4)])
def test_a_recipe_that_reads_no_success_rate_takes_any_metric(drive, recipe):
    driver = drive(recipe, rewards={}, default=(-1.0, 2.0))
    driver.until_batch()
    assert driver.allocator.accounts()["trained"] == len(driver.allocator.batch.rows)


@pytest.mark.parametrize("recipe", [recipes.grpo(2, 2), recipes.dapo(2, 2, 2), recipes.pilot_commit(2, 2, 2, 4)])
@pytest.mark.parametrize("after", [1, 3])
def test_a_prompt_that_always_fails_is_drawn_so_many_times_and_no_more(drive, recipe, after):
    driver = drive(replace(recipe, quarantine_after=after), prompts=6, rewards={0: [None], 5: [None]})
    for _ in range(40):
        driver.until_batch()
        driver.update()
    assert (visits(driver, 0), visits(driver, 5)) == (after, after)
    assert driver.allocator.quarantined() == [0, 5]
    assert driver.allocator.statistics.record(0).fate == "quarantined"
    assert driver.allocator.prompt_counts() == {"evicted": 0, "revived": 0, "quarantined": 2}
    assert driver.allocator.accounts()["failed"] == 2 * 2 * after


# ----------------------------------------------------------------------------------------------- eviction by evidence


def first_evicted(visits, **changes):
    """The number of a visit, from 1, after which a prompt is evicted whose pilots go so; None: after none of them."""
    recipe = recipes.pilot_commit(
        **{"groups": 1, "n_pilot": 4, "n_commit": 4, "gen_groups": 1, "max_staleness": 0} | changes
    )
    allocator, visit = Allocator(recipe, 1, 0), 0
    while allocator.prompt_counts()["evicted"] == 0:
        actions = allocator.ask()
        if actions.batch:
            allocator.tell([Updated(allocator.version + 1)])
        for order in actions.generate:
            if order.stage == 0 and visit == len(visits):
                return None
            right = visits[visit] if order.stage == 0 else len(order.rollouts) // 2
            visit += order.stage == 0
            scores = [float(g < right) for g in range(len(order.rollouts))]
            allocator.tell([Done(r, s, s, 1, allocator.version) for r, s in zip(order.rollouts, scores, strict=True)])
    return visit


@pytest.mark.parametrize(
    ("visits", "recipe", "expected"),
    [
        ([2] * 40, {"n_pilot": 2}, 18),  # a rate of .5 is two of two in every fourth visit: far too little
        ([4] * 40, {}, 9),
        ([16] * 40, {"n_pilot": 16}, 2),
        ([32] * 40, {"n_pilot": 32}, 1),  # .9^32 = .034
        ([29] * 40, {"n_pilot": 29}, 1),  # .9^29 = .047
        ([28] * 40, {"n_pilot": 28}, 2),  # .9^28 = .052
        ([4] * 40, {"p_solve": 0.8, "confidence": 0.9}, 3),  # .8^11 = .086
        ([2] * 40, {"n_pilot": 2, "p_solve": 1.0, "confidence": None}, 1),  # as published
        ([4] * 40, {"p_solve": 2.0}, None),
        ([3] * 40, {}, None),
        # Failures of a policy that had not learnt yet do not stand against the prompt for ever.
        ([0] * 20 + [4] * 100, {}, 20 + 61),
        ([4, 4, 3] * 40, {}, None),  # a rate of .92, where .9 at .95 leaves no room
    ],
)
def test_a_prompt_is_evicted_where_all_its_visits_show_that_it_is_solved(visits, recipe, expected):
    assert first_evicted(visits, **recipe) == expected


def left_after_batches(recipe, rewards, batches):
    """How many prompts of 64 may still be drawn after each batch, and what is said of it."""
    driver_rewards = dict.fromkeys(range(60), rewards)
    allocator, said = Allocator(recipe, 64, 0), []
    while len(said) < batches:
        actions = allocator.ask()
        if actions.finished:
            return said, actions.finished
        if actions.batch:
            said.append(allocator.few_prompts())
            allocator.tell([Updated(allocator.version + 1)])
        for order in actions.generate:
            scores = [driver_rewards.get(order.prompt, (1.0, 0.0))[g % 2] for g in range(len(order.rollouts))]
            allocator.tell([Done(r, s, s, 1, allocator.version) for r, s in zip(order.rollouts, scores, strict=True)])
            allocator.load_state_dict(json.loads(json.dumps(allocator.state_dict())))  # a resumed run says the same
    return said, None


@pytest.mark.parametrize("reprobe_every", [None, 50])
def test_a_shrinking_pool_is_reported_at_a_quarter_and_at_each_half_of_that(reprobe_every):
    recipe = recipes.pilot_commit(1, 2, 2, 1, max_staleness=0, **ONE_VISIT | {"reprobe_every": reprobe_every})
    said, _ = left_after_batches(recipe, (1.0, 1.0), 8)
    lines = [line for line in said if line]
    assert 1 <= len(lines) <= 3
    last = re.match(r"only (\d+) of 64 prompts can still be drawn .*\. (\d+) are evicted as solved: ", lines[-1])
    assert last
    left, evicted = map(int, last.groups())
    assert left + evicted == 64
    assert left < 16
    assert "confidence=0.95" in lines[-1]
    assert "reprobe_every" in lines[-1]
    assert left_after_batches(recipes.grpo(1, 2), (1.0, 0.0), 100) == ([None] * 100, None)


@pytest.mark.parametrize(("until", "later"), [(Epochs(2), {1: 16}), (Epochs(5), {3: 3, 4: 16, 5: 16}), (NEVER, {5: 3})])
def test_an_evicted_prompt_is_not_counted_as_left_in_the_same_epoch(until, later):
    pool = PromptPool(16)
    for prompt in range(13):
        pool.take(prompt)
        pool.give_back(prompt, until, drawn_epoch=0, version=0)
    assert pool.left == 3
    pool.after_batch()
    assert pool.should_warn
    for epoch, left in later.items():
        pool.begin(epoch)
        assert pool.left == left


@dataclass(frozen=True)
class DropsPrompt1(JudgeRule):
    """Drops prompt 1 until a version of the weights, and trains on every other prompt."""

    until: int

    def __call__(self, group, view):
        return Verdict(Act.DROP, "out_of_band", self.until) if group.prompt == 1 else Verdict(Act.TRAIN)


@pytest.mark.parametrize(("until", "drawn"), [(0, 1), (1, 1), (2, 0)])
def test_a_prompt_that_waits_for_a_version_that_is_there_is_free_at_once(drive, until, drawn):
    """Prompt 0 is trained on, so the version is 1. Prompt 1 is dropped: it is drawn again unless it waits for version 2."""
    recipe = with_judge(recipes.raft(1, 1), DropsPrompt1(until))
    driver = drive(replace(recipe, prompts=prompts.InOrder()), prompts=2)
    driver.until_batch()
    driver.update()
    driver.answer(driver.ask().generate)
    assert [order.prompt for order in driver.ask().generate] == [drawn]
