"""Tests of `Rounds`, without verl: orders, outcomes, stops, replay, a loader's epochs, metrics, and resumes."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from made_up_crew import RECIPES, by_quarter, figures, mixed, scored

from rollalloc import Allocator, EventError, MetricError
from rollalloc.core.events import NoScores
from rollalloc.core.recipe import Gate
from rollalloc.drivers.verl.rounds import Finished, Rounds, SessionOutcome
from rollalloc.drivers.verl.step_metrics import COLUMNS
from rollalloc.runs.metrics import undeclared
from rollalloc.waste.readers.verl import group_and_session

# Pilot-Commit's eviction as published: one visit that is all right, for ever.
ONE_VISIT = {"p_solve": 1.0, "confidence": None, "reprobe_every": None}


def taken(rounds, batches):
    """Batches, each before it is trained; verl frees its rows."""
    for _ in range(batches):
        rows = rounds.next_batch()
        assert set(rows.keys) <= rounds.crew.rows
        yield rows
        rounds.trained(rounds.allocator.version + 1)
        rounds.crew.rows -= set(rows.keys)


def train(rounds, batches):
    """Batches, trained one after the other."""
    return list(taken(rounds, batches))


def gone_on_with(rounds, made, rows=()):
    """What a run left, as rounds that were just made go on with it; `rows` are there beside those that it held."""
    made.crew.rows = {*rounds.crew.rows, *rows}
    made.crew.release(made.load_state_dict(json.loads(json.dumps(rounds.state_dict())), made.crew.rows))
    if rounds.loader is not None:  # else the recipe draws for itself
        made.loader.at, made.loader.epoch = rounds.loader.at, rounds.loader.epoch
    return made


@pytest.mark.parametrize("section", RECIPES.values(), ids=RECIPES)
def test_every_recipe_gives_full_batches_and_holds_no_row_that_it_does_not_need(make_rounds, section):
    rounds = make_rounds(section, prompts=256, at_once=3)
    for rows in train(rounds, 4):  # nothing expires in the last of these, whose release would come with the next batch
        assert len({row.group for row in rows.rows}) == 4
        assert rows.batch.short_because is None
        assert [key.rsplit("_", 2)[0] for key in rows.keys] == [_uid_of(rounds, row.rollout) for row in rows.rows]
        # `rollalloc waste` and `report` find the groups in verl's dump by these keys.
        assert [group_and_session(key)[0] for key in rows.keys] == [f"g{row.group}" for row in rows.rows]
        assert rounds.crew.rows == rounds.held()
    assert rounds.allocator.accounts()["open"] == len(rounds.held())
    assert not rounds.crew.waiting


def _uid_of(rounds, rollout):
    return next(s.uid for s in rounds.crew.submitted if rollout in s.rollouts)


def test_grpo_submits_the_loaders_batches_in_its_order(make_rounds):
    rounds = make_rounds({"recipe": "grpo"}, prompts=10)
    train(rounds, 4)
    assert [(s.prompt, len(s.rollouts)) for s in rounds.crew.submitted] == [
        (prompt, 4)
        for prompt in [0, 1, 2, 3, 4, 5, 6, 7] * 2  # verl drops the last two of an epoch
    ]


def test_a_failed_session_costs_itself_and_not_its_group(make_rounds):
    def outcome(submission, session):
        if session == 1:
            return SessionOutcome(submission.uid, session, tokens=2, reason="its agent loop worker died")
        return mixed(submission, session)

    rounds = make_rounds({"recipe": "grpo"}, outcome)
    rows = rounds.next_batch()
    assert len(rows.rows) == 4 * 3
    assert rounds.reasons == {"its agent loop worker died": 4}
    assert rounds.allocator.accounts()["failed"] == 4


@pytest.mark.parametrize("scored", [0, 40])
def test_a_run_whose_rollouts_all_fail_does_not_pass_for_one_that_ended(make_rounds, scored):
    def dies(submission, session):
        nonlocal scored
        scored -= 1
        if scored >= 0:
            return mixed(submission, session)
        return SessionOutcome(submission.uid, session, tokens=0, reason="the engine died")

    rounds = make_rounds({"recipe": "grpo"}, dies, prompts=256)
    with pytest.raises(NoScores, match=r"the engine died.*resume"):
        train(rounds, 100)


def test_a_session_of_several_outputs_is_one_rollout_and_all_its_rows_are_trained(make_rounds):
    rows = make_rounds({"recipe": "grpo"}, lambda *each: replace(mixed(*each), rows=2)).next_batch()
    assert len(rows.keys) == 2 * 16
    assert [key[-4:] for key in rows.keys[:2]] == ["_0_0", "_0_1"]
    assert rows.rows[0] is rows.rows[1]


def test_an_outcome_of_a_session_given_up_before_frees_its_rows(make_rounds):
    late = SessionOutcome("g99s0r990", 0, reward=1.0, rows=1)

    def outcomes():
        rounds.crew.rows |= set(late.keys)
        return [late, *one_wave()]

    rounds = make_rounds({"recipe": "grpo"})
    one_wave, rounds.crew.outcomes = rounds.crew.outcomes, outcomes
    rows = rounds.next_batch()
    assert rounds.crew.rows == set(rows.keys)


def test_a_stopped_tail_is_cancelled_counted_and_waited_for(make_rounds):
    rounds = make_rounds(RECIPES["darts"], prompts=256, at_once=1)
    train(rounds, 3)
    accounts = rounds.allocator.accounts()
    assert accounts["cancelled"] == len(rounds.crew.cancelled) > 0
    assert not rounds.crew.waiting
    assert not rounds.reasons  # what the recipe stops has not failed


def test_submissions_have_the_limit_of_their_order(make_rounds):
    """Right rollouts have 7 and 9 tokens: after the first batch the limit is known."""

    def within(submission, session):
        return scored(submission, session, float(session % 2), tokens=min(6 + session, submission.limit or 9))

    rounds = make_rounds({"recipe": "grpo", "limit_at": 0.5}, within, groups=16)
    train(rounds, 3)
    assert [submission.limit for submission in rounds.crew.submitted] == [None] * 16 + [7] * 32


def test_solved_prompts_end_the_run_and_say_so(make_rounds):
    rounds = make_rounds(RECIPES["pilot_commit"] | ONE_VISIT, unsolved(0))
    with pytest.raises(Finished, match="64 are evicted"):
        rounds.next_batch()
    assert not rounds.crew.rows


@pytest.mark.parametrize("section", RECIPES.values(), ids=RECIPES)
def test_a_run_that_is_saved_and_loaded_goes_on_as_the_one_that_was_not(make_rounds, section):
    straight, first = make_rounds(section), make_rounds(section)
    expected = train(straight, 6)
    train(first, 3)
    second = gone_on_with(first, make_rounds(section), ["g0s0r0_0_0"])  # a row of a batch that was trained
    assert [rows.batch for rows in train(second, 3)] == [rows.batch for rows in expected[3:]]


def test_a_checkpoint_without_its_rows_is_refused_and_nothing_is_changed(make_rounds):
    first, second = make_rounds(RECIPES["pilot_commit"]), make_rounds(RECIPES["pilot_commit"])
    train(first, 1)
    before = second.state_dict()
    with pytest.raises(ValueError, match="corrupt"):
        second.load_state_dict(first.state_dict(), set())
    assert second.state_dict() == before


@pytest.mark.parametrize("metric", [-1.0, 1.5])
def test_a_metric_that_is_no_success_rate_is_one_error_that_names_the_key(make_rounds, metric):
    def outcome(submission, session):
        return scored(submission, session, metric)

    with pytest.raises(
        MetricError, match=rf"Band\(.*in \[0, 1\], got {metric}.*\"acc\": 1.0 if right.*`acc` is the metric"
    ):
        make_rounds(RECIPES["pilot_commit"] | ONE_VISIT, outcome).next_batch()
    assert make_rounds(RECIPES["grpo"], outcome).next_batch()  # whose rules read no success rate


def test_metrics_say_what_foresights_predictions_were_worth(make_rounds):
    rounds = make_rounds(RECIPES["foresight"], by_quarter)
    train(rounds, 4)
    metrics = rounds.metrics(rounds.next_batch().batch)
    assert not undeclared((key.removeprefix("rollalloc/") for key in metrics), "verl")
    assert metrics["rollalloc/prediction/rollouts"] > 0
    assert 0 < metrics["rollalloc/prediction/log_loss"] < 2
    assert not any("weight/" in name for name in metrics)
    grpo = make_rounds(RECIPES["grpo"])
    assert not any("prediction" in name for name in grpo.metrics(grpo.next_batch().batch))


def test_a_rollout_left_alone_in_its_group_teaches_nothing_to_an_estimator_that_compares(make_rounds):
    def outcome(submission, session):
        if session and submission.prompt == 0:
            return SessionOutcome(submission.uid, session, reason="its agent loop worker died")
        return scored(submission, session, float(session % 2), rows=2)

    rows = make_rounds({"recipe": "grpo"}, outcome).next_batch()
    alone = {key for key, row in zip(rows.keys, rows.rows, strict=True) if row.prompt == 0}
    assert len(alone) == 2  # of one rollout
    compared = rows.factors(own=False, within_group=True)
    assert {key for key, factor in compared.items() if factor == 0} == alone
    assert set(rows.factors(own=False, within_group=False).values()) == {1.0}


def unsolved(few):
    """Prompts below `few` are mixed, all others right."""

    def outcome(submission, session):
        return scored(submission, session, float(session % 2) if submission.prompt < few else 1.0)

    return outcome


def test_with_fewer_unsolved_prompts_than_groups_each_pass_of_a_loader_without_end_gives_a_short_batch(make_rounds):
    rounds = make_rounds(RECIPES["pilot_commit"] | ONE_VISIT, unsolved(2), prompts=16)
    batches = [rows.batch for rows in train(rounds, 20)]
    assert all({row.prompt for row in batch.rows} == {0, 1} for batch in batches)
    assert all("16 may be drawn" in batch.short_because for batch in batches)
    assert len(rounds.crew.submitted) == 16 + 2 + 19 * (2 + 2)  # the solved ones are piloted once


def test_a_run_that_gave_up_a_pass_of_its_loader_goes_on_from_its_checkpoint_as_the_one_that_was_not_saved(make_rounds):
    """The loader leaves out prompts 16 and 17, which may still be drawn.

    Too few of the prompts that it offers are unsolved: it is said to have ended for the batch, and read again for the next.
    """
    section = RECIPES["pilot_commit"] | ONE_VISIT
    straight, first, second = (make_rounds(section, unsolved(2), prompts=18) for _ in range(3))
    expected = train(straight, 6)
    train(first, 3)
    assert first.state_dict()["gave_up"]
    gone_on_with(first, second)
    assert [rows.batch for rows in train(second, 3)] == [rows.batch for rows in expected[3:]]


def test_failures_weigh_as_the_uncertainty_of_each_rollout_says(make_rounds):
    """Successes of uncertainty .2 over failures of .8: a weight of 1/4. Without log-probabilities it is 0.1."""

    def outcomes(right, wrong):
        def outcome(submission, session):
            won = float(submission.prompt % 2)
            return scored(submission, session, won, uncertainty=right if won else wrong)

        return outcome

    for (right, wrong), weight in {(0.2, 0.8): 0.25, (None, None): 0.1}.items():
        rows = make_rounds({"recipe": "reinforce"}, outcomes(right, wrong), n=1).next_batch().rows
        expected = [2 / 3 if row.prompt % 2 else -2 / 3 * weight for row in rows]
        assert [row.advantage for row in rows] == pytest.approx(expected)


def test_the_core_is_told_the_weights_of_the_first_token_and_of_the_last(make_rounds):
    def outcome(submission, session):
        return scored(submission, session, 1.0, version=0, last_version=7)

    with pytest.raises(EventError, match="versions 0 to 7 must lie between 0 and 0, the version of the weights"):
        make_rounds({"recipe": "grpo"}, outcome).next_batch()


def by_prompt(submission, session):
    return scored(submission, session, float((submission.prompt * 7 + session) % 5) / 4)


def test_a_lone_rollout_of_a_prompt_is_multiplied_by_the_cores_advantage(make_rounds):
    """Over the whole batch, before it is cut into mini-batches; nothing is left for verl's estimator to say."""
    for name in ("reinforce", "raft", "spo", "foresight"):
        rounds = make_rounds(RECIPES[name], by_prompt, groups=8, n=1)
        for rows in train(rounds, 4):
            assert len(rows.keys) == len({row.prompt for row in rows.rows}) == 8
            factors = rows.factors(own=True, within_group=True)
            assert [factors[key] for key in rows.keys] == [row.advantage for row in rows.rows]


# ---------------------------------------------------------------------------------------------------------------- replay

REPLAYED = {
    "foresight": {"recipe": "foresight", "replay": 3, "replay_staleness": 2},
    "reinforce": {"recipe": "reinforce", "replay": 5, "replay_staleness": 4},
    "pilot_commit+foresight": RECIPES["pilot_commit+foresight"] | {"replay": 9, "replay_staleness": 3},
    "pilot_commit+reinforce+pods": {
        "recipe": "pilot_commit+reinforce+pods", "n_pilot": 2, "n_commit": 4, "gen_groups": 8, "m": 4, "replay": 9,
    },
}  # fmt: skip


def original(key):
    """The key under which a row was generated."""
    uid, session, row = key.rsplit("_", 2)
    return f"{uid.partition('x')[0]}_{session}_{row}"


@pytest.mark.parametrize("section", REPLAYED.values(), ids=REPLAYED)
def test_a_replayed_row_is_trained_from_a_copy_that_is_freed_after_its_last_replay(make_rounds, section):
    rounds = make_rounds(section, prompts=256, at_once=3)
    trained, copies = set(), rounds.crew.copies
    times = 0
    for _ in range(9):
        rows = rounds.next_batch()
        assert len(set(rows.keys)) == len(rows.keys)
        assert trained.isdisjoint(rows.keys), "a key is given to verl once"
        for key, row in zip(rows.keys, rows.rows, strict=True):
            assert key.rsplit("_", 2)[0].partition("x")[0] == _uid_of(rounds, row.rollout)
            if row.replays:
                times += 1
                assert original(key) in trained
                assert key in copies.values()
        factors = rows.factors(own=True, within_group=True)
        assert [factors[key] for key in rows.keys] == [row.advantage * row.weight for row in rows.rows]
        metrics = rounds.metrics(rows.batch)
        assert metrics["rollalloc/replayed"] == sum(row.replays > 0 for row in rows.rows)
        assert metrics["rollalloc/groups"] == 4
        trained |= set(rows.keys)
        rounds.trained(rounds.allocator.version + 1)
        rounds.crew.rows -= set(rows.keys)
        assert rounds.held() == rounds.crew.rows
    assert times == rounds.allocator.replayed > 5
    causes = rounds.allocator.accounts()
    assert sum(causes.values()) == rounds.allocator.paid == sum(len(s.rollouts) for s in rounds.crew.submitted)


@pytest.mark.parametrize("section", REPLAYED.values(), ids=REPLAYED)
def test_what_may_be_replayed_survives_a_resume_as_data(make_rounds, section):
    straight, first, second = (make_rounds(section) for _ in range(3))
    expected = train(straight, 7)
    train(first, 3)
    saved = first.state_dict()
    assert gone_on_with(first, second, ["g0s0r0_0_0"]).crew.rows == first.held()
    resumed = train(second, 4)
    assert [(rows.batch, rows.keys) for rows in resumed] == [(rows.batch, rows.keys) for rows in expected[3:]]
    assert any(row.replays for row in resumed[0].rows)
    without = make_rounds(section)
    with pytest.raises(
        ValueError, match=r"rows that the checkpoint's state holds are not in its TransferQueue, e\.g\. g"
    ):
        without.load_state_dict(saved, first.held() - {next(key for key in sorted(first.held()) if "x" in key)})


@pytest.mark.parametrize("own", [True, False])
def test_rows_that_a_gate_leaves_out_stay_in_verls_batch_without_an_advantage(make_rounds, own):
    """They come back after the pause from copies with new keys, and no key is given to verl twice."""
    section = REPLAYED["reinforce"] | {"replay_moved": 0.2, "replay_pause": 1}
    rounds, seen, came_back = make_rounds(section, prompts=256), set[str](), False
    left_out = set[int]()
    for _ in range(8):
        rows = rounds.next_batch()
        again = [row for row in rows.rows if row.replays]
        assert seen.isdisjoint(rows.keys)
        seen |= set(rows.keys)
        if again:
            came_back |= bool(left_out.intersection(row.rollout for row in again))
            rows = rounds.admit(rows, 0.1 if left_out else 0.3)
            left_out |= {row.rollout for row in again} if rows.left_out else set()
        factors = rows.factors(own=own, within_group=False)
        for key, row in zip(rows.keys, rows.rows, strict=True):
            assert factors[key] == (0 if key in rows.left_out else row.advantage * row.weight if own else row.weight)
        assert {row for row in rows.rows if row.replays} == set(again), "verl has them in any case"
        rounds.trained(rounds.allocator.version + 1)
        rounds.crew.rows -= set(rows.keys)
        assert rounds.held() == rounds.crew.rows
    assert came_back
    assert rounds.allocator.left_out == len(left_out) > 0


def test_a_row_whose_last_replay_the_gate_left_out_still_has_its_rows(make_rounds):
    """With one replay for each row, and a gate that is shut in every other batch that asks it."""
    made = make_rounds(REPLAYED["reinforce"], prompts=256)
    recipe = made.allocator.recipe
    replay = replace(recipe.replay, times=1, gate=Gate(most=0.2, pause=0))
    rounds = Rounds(Allocator(replace(recipe, replay=replay), 256, 0), made.crew, made.loader)
    left_out, again = set(), Counter()
    for batch in range(8):
        rows = rounds.next_batch()
        assert set(rows.keys) <= rounds.crew.rows
        replayed = {row.rollout for row in rows.rows if row.replays}
        if replayed:
            rows = rounds.admit(rows, 0.3 if batch % 2 else 0.1)
            left_out |= replayed if rows.left_out else set()
            again.update(set() if rows.left_out else replayed)
        rounds.trained(rounds.allocator.version + 1)
        rounds.crew.rows -= set(rows.keys)
    assert left_out.intersection(again), "a row that was left out was trained on again later"
    assert set(again.values()) == {1}


def test_the_budget_ends_the_run(make_rounds):
    rounds = make_rounds({"recipe": "grpo", "max_rollouts": 32})
    train(rounds, 2)
    with pytest.raises(Finished, match="budget"):
        rounds.next_batch()


def test_metrics_by_stage_by_hand(make_rounds):
    rounds = make_rounds(RECIPES["pilot_commit"], by_quarter, at_once=1000)
    first, second = (rounds.metrics(rows.batch) for rows in taken(rounds, 2))
    # Eight pilots of which four pass; commits for those, beside eight pilots more of which four are held.
    pilots = {"groups": 16, "rollouts": 32, "passed": 8, "pass_rate": 0.5, "mean": 0.5, "deviation": 0.25}
    assert figures(first, "rollalloc/stage/pilot/") == pilots | {"dropped/too_hard": 0.25, "dropped/too_easy": 0.25}
    commits = {"groups": 4, "rollouts": 16, "passed": 4, "pass_rate": 1.0, "mean": 0.5, "deviation": 0.5}
    assert figures(first, "rollalloc/stage/commit/") == commits
    assert figures(first, "rollalloc/held/") == {"groups": 4, "in": 4, "out": 0, "lost": 0}
    assert first["rollalloc/rounds"] == 2
    assert figures(second, "rollalloc/stage/commit/") == commits
    assert figures(second, "rollalloc/held/") == {"groups": 4, "in": 4, "out": 4, "lost": 0}
    assert second["rollalloc/rounds"] == 1


def test_the_table_of_groups_has_a_row_for_each_that_left_a_stage(make_rounds):
    rounds = make_rounds(RECIPES["pilot_commit"], by_quarter, at_once=1000)
    rounds.next_batch()
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in rounds.groups_table()]
    pilots, commits = ([row for row in rows if row["stage"] == stage] for stage in ("pilot", "commit"))
    became = {0: "too_easy", 1: "too_hard"}  # of every four prompts; the other two are mixed
    for row in pilots:
        mixed = row["prompt"] % 4 > 1
        assert row["became"] in (("next stage", "held") if mixed else (became[row["prompt"] % 4],))
        assert (row["rollouts"], row["deviation"]) == (2, 0.5 if mixed else 0)
    assert sorted(row["prompt"] for row in pilots) == list(range(16))
    assert Counter(row["became"] for row in pilots)["held"] == 4
    assert [(row["became"], row["rollouts"], row["mean"]) for row in commits] == 4 * [("trained", 4, 0.5)]
