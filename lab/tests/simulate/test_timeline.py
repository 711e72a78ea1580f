"""When things happen: timelines written by hand, closed forms, and a simulation token by token."""

from __future__ import annotations

from dataclasses import fields, replace
from math import inf

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulated import FREE, Given

from rollalloc import recipes
from rollalloc.rules.sizes import Fixed
from rollalloc_lab.simulate.cluster import Cluster, Scenario
from rollalloc_lab.simulate.cost import Latency, Pace
from rollalloc_lab.simulate.fleet import Fleet
from rollalloc_lab.simulate.simulation import simulate

STEPS = Latency((1, 2, 3), (1.0, 2.0, 4.0))  # seconds per token alone, of two, of three


def ends_of(fleet):
    """(when, which) until nothing runs."""
    ended = []
    while (moment := fleet.next_end()) < inf:
        fleet.pass_to(moment)
        ended.append((moment, fleet.end()))
    return ended


def test_three_rollouts_on_one_replica():
    fleet = Fleet(1, Pace(STEPS.table(3)))
    for rollout, tokens in enumerate((2, 3, 5)):
        fleet.start(rollout, tokens, 0)
    # Two tokens of three rollouts, then one of two, then two of one.
    assert ends_of(fleet) == [(8.0, [0]), (10.0, [1]), (12.0, [2])]
    assert fleet.free == 3
    assert fleet.slot_seconds == 3 * 8 + 2 * 2 + 2


def test_one_that_joins_later_slows_the_others_from_then_on():
    fleet = Fleet(1, Pace(STEPS.table(2)))
    fleet.start(0, 4, 0)
    fleet.pass_to(2.0)
    fleet.start(1, 1, 0)
    assert ends_of(fleet) == [(4.0, [1]), (5.0, [0])]


def test_a_stop_frees_its_slot_and_the_others_go_faster():
    fleet = Fleet(1, Pace(STEPS.table(3)))
    for rollout in range(3):
        fleet.start(rollout, 10, 0)
    fleet.pass_to(14.0)
    assert fleet.stop(1) == 3  # of 3.5: half a token is none
    assert fleet.free == 1
    assert ends_of(fleet) == [(14.0 + 6.5 * 2, [0, 2])]


def test_what_rounding_takes_of_a_token_is_no_token_less():
    fleet = Fleet(1, Pace([0.0, 0.1]))
    fleet.start(0, 10, 0)
    fleet.pass_to(0.3)
    assert 0.3 / 0.1 < 3
    assert fleet.stop(0) == 3


def test_a_pause_delays_what_runs_and_pauses_add_up():
    fleet = Fleet(2, Pace(STEPS.table(1)))
    fleet.start(0, 3, 0)
    fleet.start(1, 3, 1)
    fleet.pass_to(1.0)
    fleet.pause(0, 5.0)
    fleet.pause(0, 2.0)
    assert ends_of(fleet) == [(3.0, [1]), (10.0, [0])]
    fleet.advance()
    one, other = fleet.replicas
    assert (one.decoding, one.paused, one.empty) == (3.0, 7.0, 0.0)
    assert (other.decoding, other.paused, other.empty) == (3.0, 0.0, 7.0)


# ------------------------------------------------------------------------------------------------------------- context

HOLDS = Pace([0.0, 1.0, 1.0, 1.0], per_held=0.5)  # a second a token, and half a second for each token that is held


def test_what_is_held_slows_each_token():
    fleet = Fleet(1, HOLDS)
    fleet.start(0, 2, 0, prompt=4)
    # Two tokens while 4 to 6 are held, 5 on average.
    assert ends_of(fleet) == [(2 * (1 + 0.5 * 5), [0])]


def test_those_that_hold_more_slow_the_others_until_they_end():
    fleet = Fleet(1, HOLDS)
    fleet.start(0, 2, 0)
    fleet.start(1, 4, 0)
    # Two tokens of two, 2 held on average; then the second alone, which holds 2 to 4.
    assert ends_of(fleet) == [(2 * (1 + 0.5 * 2), [0]), (4 + 2 * (1 + 0.5 * 3), [1])]


def test_the_last_to_begin_is_put_back_where_memory_is_full_and_its_context_is_computed_again():
    fleet = Fleet(1, Pace([0.0, 1.0, 1.0], room=6, prefill=2.0))
    fleet.start(0, 5, 0, prompt=1)
    fleet.start(1, 3, 0, prompt=1)
    # Full after 2 tokens of each; the first makes 3 more; the second has 3 of context to compute, and a token to make.
    assert ends_of(fleet) == [(2.0, []), (5.0, [0]), (5.0 + 2.0 * 3 + 1, [1])]
    assert (fleet.preemptions, fleet.free) == (1, 2)
    replica = fleet.replicas[0]
    assert (replica.decoding, replica.paused, replica.empty, replica.held) == (6.0, 6.0, 0.0, 0.0)


def test_what_was_put_back_goes_on_in_the_order_in_which_it_began_and_before_what_is_new():
    fleet = Fleet(1, Pace([0.0] + [1.0] * 4, room=12))
    for rollout in range(3):
        fleet.start(rollout, 9, 0, prompt=0)
    fleet.pass_to(fleet.next_end())
    assert fleet.end() == []  # 4 tokens of each: the third is put back
    fleet.pass_to(fleet.next_end())
    assert fleet.end() == []  # 6 of the first two: the second is put back
    assert not fleet.fits(0, 0)
    assert list(fleet.replicas[0].preempted) == [2, 1]
    assert ends_of(fleet)[0] == (9.0, [0])
    assert fleet.preemptions >= 2


def test_one_that_is_put_back_can_be_stopped_and_keeps_what_it_made():
    fleet = Fleet(1, Pace([0.0, 1.0, 1.0], room=6))
    fleet.start(0, 5, 0, prompt=1)
    fleet.start(1, 3, 0, prompt=1)
    fleet.pass_to(fleet.next_end())
    fleet.end()
    fleet.pass_to(3.0)
    assert fleet.stop(1) == 2
    assert ends_of(fleet) == [(5.0, [0])]
    assert fleet.free == 2


def test_nothing_begins_where_there_is_no_room_for_its_prompt():
    fleet = Fleet(2, Pace([0.0, 1.0, 1.0], room=10))
    fleet.start(0, 2, 0, prompt=5)
    assert fleet.fits(0, 3)  # and a token of each
    assert not fleet.fits(0, 4)
    assert fleet.fits(1, 10)


@given(st.floats(0.1, 1e5), st.integers(1, 3), st.floats(0, 1e6), st.sampled_from([0.0, 1e-8, 0.5]))
def test_seconds_and_tokens_are_each_other_s_inverse(tokens, rollouts, held, per_held):
    pace = Pace([0.0, 1.0, 1.5, 4.0], per_held=per_held)
    assert pace.tokens(pace.seconds(tokens, rollouts, held), rollouts, held) == pytest.approx(tokens, rel=1e-9)


@given(st.integers(1, 500), st.integers(1, 3), st.integers(0, 1000))
def test_tokens_are_taken_as_continuous_which_is_half_a_token_off(tokens, rollouts, held):
    pace = Pace([0.0, 1.0, 1.5, 4.0], per_held=0.5)
    steps = sum(pace.seconds_N[rollouts] + 0.5 * (held + rollouts * at) for at in range(tokens))
    assert pace.seconds(tokens, rollouts, held) - steps == pytest.approx(0.5 * rollouts * tokens / 2)


def test_each_begins_where_fewest_run():
    fleet = Fleet(3, Pace(STEPS.table(3)))
    places = []
    for rollout in range(6):
        places.append(fleet.least_loaded())
        fleet.start(rollout, 5, places[-1])
    assert places == [0, 1, 2, 0, 1, 2]
    fleet.stop(4)
    assert fleet.least_loaded() == 1


def run(recipe, tokens, **changes):
    """A simulation of rollouts given by hand, by default of one batch on one GPU with three slots."""
    names = {field.name for field in fields(Cluster)}
    cluster = {"gpus": 1, "slots": 3} | {name: value for name, value in changes.items() if name in names}
    others = {name: value for name, value in changes.items() if name not in names}
    plain = {"batches": 1, "warmup": 0, "latency": STEPS, "prompt_tokens": 0, "costs": FREE}
    return simulate(recipe, Scenario(cluster=Cluster(**cluster), workload=Given(tokens), **(plain | others)), 0)


def test_a_batch_of_three_rollouts_and_where_its_time_goes():
    costs = replace(FREE, prefill=0.5, logprob=0.25, train=0.5, train_row=1.0, update=2.0, weight_sync=3.0)
    result = run(recipes.grpo(1, 3), (2, 3, 5), costs=costs, prompt_tokens=2)
    # Prefill of one prompt, decoding as above, log-probabilities and update of 10 tokens and three prompts of 2.
    training = 16 * 0.25 + 16 * 0.5 + 3 * 1.0 + 2.0
    assert result.seconds == 1 + 12 + training + 3
    assert result.gpu_seconds == {"decoding": 12, "pausing": 4, "training": training, "idle": 0, "unused": 0}
    assert (result.paid, result.rows, result.tokens, result.row_tokens, result.stopped) == (3, 3, 10, 10, 0)
    assert result.busy_slots == pytest.approx((3 * 9 + 2 * 2 + 2) / (3 * result.seconds))


def two_of_three(tail):
    darts = recipes.darts(1, 2, 0, tail=tail)
    return replace(darts, stages=(replace(darts.stages[0], size=Fixed(3)),))


def test_the_third_of_three_is_stopped_when_two_are_there():
    result = run(two_of_three("none"), (2, 3, 5), costs=replace(FREE, abort=0.5))
    # Both are there after 10 seconds; the third has then 3 tokens and decodes alone for another half second.
    assert result.seconds == 10.5
    assert (result.paid, result.rows, result.stopped, result.tokens) == (3, 2, 1, 8)
    assert result.accounts["cancelled"] == 1
    assert result.gpu_seconds["decoding"] == 10.5


def test_one_that_ends_before_its_stop_takes_effect_is_paid_in_full():
    result = run(two_of_three("none"), (2, 3, 5), costs=replace(FREE, abort=30.0))
    assert (result.seconds, result.stopped, result.tokens) == (12.0, 0, 10)
    assert result.accounts["cancelled"] == 1


def test_one_that_never_began_is_stopped_for_nothing():
    result = run(two_of_three("none"), (2, 3, 5), slots=1, costs=replace(FREE, abort=0.5))
    assert (result.seconds, result.stopped, result.tokens, result.accounts["cancelled"]) == (5.0, 1, 5, 1)


def test_a_stop_that_came_too_late_is_not_the_end_of_a_training():
    costs = replace(FREE, abort=30.0, train=20.0)
    result = run(two_of_three("none"), (2, 3, 5), costs=costs, schedule="async", gpus=2)
    assert result.seconds == 10 + 5 * 20


def test_an_exact_tail_waits_for_all():
    result = run(two_of_three("exact"), (2, 3, 5))
    assert (result.seconds, result.stopped, result.tokens) == (12.0, 0, 10)


def test_the_tail_is_the_time_in_which_a_tenth_runs_and_none_waits():
    flat = Latency((64,), (1.0,))
    result = run(recipes.grpo(20, 2), (2,) * 39 + (10,), latency=flat, slots=64)
    assert (result.seconds, result.tail) == (10.0, 0.8)
    waiting = run(recipes.grpo(20, 2), (2,) * 39 + (10,), latency=flat, slots=20)
    assert (waiting.seconds, waiting.tail) == (12.0, 8 / 12)


@pytest.mark.parametrize(("train", "sync", "period"), [(0.6, 0.0, 5.0), (1.6, 0.0, 8.0), (0.6, 1.0, 6.0)])
def test_one_batch_is_made_while_another_trains(train, sync, period):
    costs = replace(FREE, train=train, weight_sync=sync)
    result = run(recipes.raft(1, 1), (5,), costs=costs, schedule="async", gpus=2, batches=4, warmup=2)
    # The longer of making 5 tokens, new weights among them, and training them; the trainer waits for the rest.
    assert result.batch_seconds == pytest.approx([period] * 4)
    assert result.gpu_seconds["training"] == pytest.approx(4 * 5 * train)
    assert result.gpu_seconds["pausing"] == pytest.approx(4 * sync)
    assert result.gpu_seconds["idle"] == pytest.approx(4 * (2 * period - 5 * train - 5 - sync))


def test_log_probabilities_of_what_ended_are_there_when_the_rest_ends():
    costs = replace(FREE, logprob=0.5)
    recipe = recipes.grpo(1, 3)
    assert run(recipe, (2, 3, 5), costs=costs).seconds == 12 + 5
    # The first two took 1 and 1.5 seconds, from 8 and from 10 on; what ends last is looked at then.
    assert run(recipe, (2, 3, 5), costs=costs, overlap=True).seconds == 12 + 2.5
    # What is looked at and not trained on is paid for too: 3 rollouts instead of 2.
    slow = replace(FREE, logprob=5.0)
    assert run(two_of_three("exact"), (2, 3, 5), costs=slow, overlap=True).seconds == 8 + 50
    assert run(two_of_three("exact"), (2, 3, 5), costs=slow).seconds == 12 + 25


# ------------------------------------------------------------------------------------------------------- other ways to it


def token_by_token(lengths, replicas, slots, pace):
    """Each replica's rollouts by tokens made; always the shortest time until one of them ends, or memory is full."""
    decoding, back = [[] for _ in range(replicas)], [[] for _ in range(replicas)]
    busy = [0.0] * replicas  # seconds until which its context is computed again
    waiting, now = list(lengths), 0.0

    def held(at):
        return sum(made for made, _ in decoding[at])

    def room_for(at, context):
        return not decoding[at] or held(at) + context + len(decoding[at]) + 1 <= pace.room

    while True:
        for at in range(replicas):
            while back[at] and room_for(at, back[at][-1][0]):
                decoding[at].append(back[at].pop())
                busy[at] = max(busy[at], now) + pace.prefill * decoding[at][-1][0]
        while waiting:
            least = min(range(replicas), key=lambda at: len(decoding[at]) + len(back[at]))
            if len(decoding[least]) + len(back[least]) == slots or back[least] or not room_for(least, 0):
                break
            decoding[least].append([0.0, waiting.pop(0)])
        if not any(decoding):
            return now
        steps = []
        for at in range(replicas):
            if count := len(decoding[at]):
                tokens = min(all_ - made for made, all_ in decoding[at])
                if count > 1:
                    tokens = min(tokens, (pace.room - held(at)) / count)
                steps.append(max(busy[at] - now, 0.0) + pace.seconds(tokens, count, held(at)))
        until = now + min(steps)
        for at in range(replicas):
            passed = until - max(now, min(busy[at], until))
            if count := len(decoding[at]):
                tokens = pace.tokens(passed, count, held(at))
                decoding[at] = [[made + tokens, all_] for made, all_ in decoding[at]]
                decoding[at] = [each for each in decoding[at] if each[1] - each[0] > 1e-7]
                while len(decoding[at]) > 1 and held(at) > pace.room - 1e-7 * count:
                    back[at].append(decoding[at].pop())
        now = until


curves = st.lists(st.floats(0.01, 5.0), min_size=1, max_size=6).map(
    lambda seconds: Latency(tuple(range(1, len(seconds) + 1)), tuple(seconds))
)


@settings(max_examples=60, deadline=None)
@example([14, 14, 15, 1, 1, 1, 11, 1], 2, Latency((1, 2), (1.0, 2.0)), 0.0, None, 0.0)
@given(
    st.lists(st.integers(1, 40), min_size=8, max_size=8),
    st.integers(1, 5),
    curves,
    st.sampled_from([0.0, 0.01]),
    st.sampled_from([None, 43, 61, 97]),
    st.sampled_from([0.0, 0.03]),
)
def test_a_wave_takes_as_long_as_token_by_token(lengths, gpus, curve, per_held, room, prefill):
    curve = replace(curve, per_held=per_held)
    slots = curve.concurrency[-1]
    cluster = Cluster(gpus=gpus, slots=slots)
    scenario = Scenario(
        cluster=cluster,
        costs=replace(FREE, prefill=prefill),
        latency=curve,
        workload=Given(lengths),
        batches=1,
        warmup=0,
        kv_tokens=room,
        prompt_tokens=0,
    )
    expected = token_by_token(lengths, gpus, slots, scenario.pace)
    assert simulate(recipes.grpo(2, 4), scenario, 0).seconds == pytest.approx(expected, rel=1e-6)
