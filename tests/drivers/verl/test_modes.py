"""Rollouts that go on over an update, without verl: verl's asynchronous modes as the rounds see them."""

import json
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from made_up_crew import RECIPES, FakeCrew, FakeLoader, figures, mixed

from rollalloc import Allocator
from rollalloc.drivers.verl.modes import MODES, Overlap, verls_mode
from rollalloc.drivers.verl.rounds import Rounds
from rollalloc.drivers.verl.settings import read_settings
from rollalloc.rules.intake import Ahead, Fill, KeepInFlight

OVERLAP = Overlap(mode="colocate_async", max_versions=8, batches=1)
PILOTS = RECIPES["pilot_commit"]


# ------------------------------------------------------------------------------------------------- what a recipe becomes


def recipe_of(section, **overlap):
    return read_settings(section, 4, 4, replace(OVERLAP, **overlap)).recipe


def test_verls_own_keys_say_how_old_rollouts_may_be_and_how_many_run_ahead():
    recipe = recipe_of({"recipe": "grpo"})
    assert (recipe.max_staleness, recipe.intake) == (7, Ahead(Fill(), 4))
    assert recipe_of({"recipe": "grpo"}, max_versions=2).max_staleness == 1
    assert recipe_of({"recipe": "grpo"}, batches=1.6).intake == Ahead(Fill(), 6)
    assert recipe_of({"recipe": "grpo"}, batches=0.2).intake == Fill()
    assert recipe_of({"recipe": "dapo", "gen_groups": 8}).intake == Ahead(KeepInFlight(8), 4)


def test_a_recipes_own_staleness_and_intake_are_kept():
    recipe = recipe_of(PILOTS)
    assert (recipe.max_staleness, recipe.intake) == (4, KeepInFlight(8, ahead=True))
    assert recipe_of(PILOTS, max_versions=None) == recipe, "its own staleness needs no threshold of verl's"
    carry = recipe_of({"recipe": "dapo", "gen_groups": 8, "surplus": "carry"})
    assert carry.max_staleness == 1


@pytest.mark.parametrize("versions", [1, 0, None, True, 2.0, "8"])
def test_versions_that_leave_no_update_are_refused(versions):
    with pytest.raises(
        ValueError, match=r"max_off_policy_threshold must be .* at least 2 .*or use trainer_mode=rollalloc"
    ):
        recipe_of({"recipe": "grpo"}, max_versions=versions)


# ---------------------------------------------------------------------------------------------------------- the rounds


@dataclass
class Engine(FakeCrew):
    """A crew whose rollouts have the version of the weights with which they began, and where some end in an update."""

    meanwhile: int = 0
    began: dict = field(default_factory=dict)

    def submit(self, submissions):
        super().submit(submissions)
        sessions = [(s.uid, at) for s in submissions for at in range(len(s.rollouts))]
        assert self.began.keys().isdisjoint(sessions), "an id is used twice"
        self.began |= dict.fromkeys(sessions, self.version)

    def outcomes(self, wait=True):
        if wait:
            return super().outcomes()
        self.at_once, now = self.meanwhile, self.at_once
        try:
            return super().outcomes(wait=False)
        finally:
            self.at_once = now

    def _end(self, submission, session):
        outcome = super()._end(submission, session)
        return outcome if outcome.cancelled else replace(outcome, version=self.began[submission.uid, session])


def rounds_of(section, prompts=256, overlap=OVERLAP, engine=Engine, **crew):
    settings = read_settings(section, 4, 4, overlap)
    recipe = settings.recipe
    return Rounds(
        Allocator(recipe, prompts, settings.seed),
        engine(mixed, **crew),
        FakeLoader(prompts, 4) if settings.loader_draws else None,
        overlaps=overlap is not None,
        patience=overlap.patience(recipe) if overlap else None,
    )


def step(rounds, last=False):
    """A batch, trained, during which the crew goes on."""
    rows = rounds.next_batch(last)
    metrics = rounds.metrics(rows.batch)
    causes = figures(metrics, "rollalloc/accounts/")
    assert metrics["rollalloc/rollouts_paid"] == sum(causes.values())
    assert set(rows.keys) <= rounds.crew.rows
    rounds.attend(last)
    rounds.trained(rounds.allocator.version + 1)
    rounds.crew.version = rounds.allocator.version
    rounds.crew.rows -= set(rows.keys)
    assert rounds.held() <= rounds.crew.rows
    return rows, metrics


@pytest.mark.parametrize("at_once", [1, 1000])
@pytest.mark.parametrize("section", RECIPES.values(), ids=RECIPES)
def test_every_recipe_gives_full_batches_of_rollouts_that_are_each_trained_once(section, at_once):
    rounds = rounds_of(section, at_once=at_once, meanwhile=3)
    seen = Counter()
    for _ in range(6):
        rows, metrics = step(rounds)
        assert rows.batch.short_because is None
        assert len({row.group for row in rows.rows}) == 4
        assert metrics["rollalloc/staleness_max"] <= rounds.allocator.recipe.max_staleness
        seen.update(row.rollout for row in rows.rows)
    assert set(seen.values()) == {1}


def test_a_batch_does_not_wait_for_the_others_which_go_on_over_the_update():
    rounds = rounds_of({"recipe": "grpo"}, at_once=4)
    first, metrics = step(rounds)
    assert {row.group for row in first.rows} == {0, 1, 2, 3}
    assert metrics["rollalloc/streaming/in_flight"] == 2 * 16, "the next batch, and the one ordered beside this one"
    assert len(rounds.crew.waiting) == 2 * 16
    second, metrics = step(rounds)
    assert {row.group for row in second.rows} == {4, 5, 6, 7}
    assert {row.version for row in second.rows} == {0}, "of the first token, before the update"
    assert metrics["rollalloc/staleness_max"] == 1
    assert len(rounds.crew.submitted) == 4 * 4


def test_what_is_too_old_after_an_update_is_stopped_and_not_trained():
    slow = Overlap(mode="colocate_async", max_versions=2, batches=3)
    rounds = rounds_of({"recipe": "grpo"}, at_once=4, overlap=slow)
    for _ in range(8):
        _, metrics = step(rounds)
        assert metrics["rollalloc/staleness_max"] <= 1
    assert metrics["rollalloc/accounts/stale"] > 0


def test_what_ends_while_a_batch_is_trained_is_told_and_stops_are_carried_out():
    rounds = rounds_of({"recipe": "darts", "shortest": 1, "longest": 1, "tail": "sampled"}, at_once=2)
    rounds.next_batch()
    stopped, ordered, rounds.crew.meanwhile = set(rounds.crew.cancelled), len(rounds.crew.submitted), 1
    rounds.attend()
    assert rounds.crew.cancelled > stopped
    rounds.crew.meanwhile = 1000
    rounds.attend(last=True)
    assert len(rounds.crew.submitted) == ordered
    rounds.attend()  # with nothing told, nothing is asked


@pytest.mark.parametrize("overlaps", [False, True])
def test_updates_are_told_between_batches_and_in_order(overlaps):
    rounds = rounds_of({"recipe": "grpo"}, at_once=4, overlap=OVERLAP if overlaps else None)
    rounds.next_batch()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"still to be trained: call trained\(version\)"):
            rounds.next_batch()
    before = rounds.state_dict()
    for version in (3, 0, -1):
        with pytest.raises(ValueError, match="version must"):
            rounds.trained(version)
    assert rounds.state_dict() == before
    rounds.trained(1)
    rounds.crew.version = 1
    with pytest.raises(ValueError, match="no batch is out"):
        rounds.trained(2)
    assert {row.group for row in rounds.next_batch().rows} == {4, 5, 6, 7}


# -------------------------------------------------------------------------------------------- prompts with long rollouts


@dataclass
class Slow(Engine):
    """An engine on which every eighth prompt has rollouts of `long` calls of `outcomes`; the others take 1 to 3."""

    long: int = 20
    calls: int = 0
    ends: dict = field(default_factory=dict)

    def submit(self, submissions):
        super().submit(submissions)
        for submission in submissions:
            for at in range(len(submission.rollouts)):
                is_long = submission.prompt % 8 == 0 and at > 0
                self.ends[submission.uid, at] = self.calls + (self.long if is_long else 1 + submission.prompt % 3)

    def outcomes(self, wait=True):
        self.calls += 1
        ended = [
            (s, at) for s, at in self.waiting if self.ends[s.uid, at] <= self.calls or (s.uid, at) in self.cancelled
        ]
        for each in ended:
            self.waiting.remove(each)
        outcomes = [self._end(*each) for each in ended]
        self.rows |= {key for outcome in outcomes for key in outcome.keys}
        return outcomes


def share_of_long(mode, versions, batches, strategy, long=20, steps=40):
    """Share of long prompts among the trained groups over their share among the begun ones, and the rollouts too old.

    Groups that were begun in the last `versions` steps are not counted.
    """
    overlap = Overlap(mode=mode, max_versions=versions, batches=batches, strategy=strategy)
    rounds = rounds_of({"recipe": "grpo"}, 512, overlap, Slow, long=long)
    crew, allocator = rounds.crew, rounds.allocator
    trained = set()
    for _ in range(steps):
        rows, metrics = step(rounds)
        trained |= {row.group for row in rows.rows}
        assert metrics["rollalloc/staleness_max"] <= allocator.recipe.max_staleness
    of_group = {int(s.uid[1 : s.uid.index("s")]): s for s in crew.submitted}
    counted = {group: s for group, s in of_group.items() if crew.began[s.uid, 0] < steps - versions}
    begun = [s.prompt % 8 == 0 for s in counted.values()]
    learned = [s.prompt % 8 == 0 for group, s in counted.items() if group in trained]
    share = sum(learned) / len(learned) / (sum(begun) / len(begun))
    return round(share, 2), allocator.accounts()["stale"], len(counted) - len(learned)


@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_prompts_with_long_rollouts_are_dropped_at_a_low_limit_and_trained_on_if_updates_wait_for_them(mode):
    dropped, stale, lost = share_of_long(mode, versions=3, batches=1, strategy="drop")
    assert dropped == 0.0
    assert stale > 0
    assert lost > 0
    assert share_of_long(mode, versions=3, batches=1, strategy="wait") == (1.0, 0, 0)
    assert share_of_long(mode, versions=30, batches=1, strategy="drop") == (1.0, 0, 0), "a limit above their length"


@pytest.mark.parametrize("long", [2, 9, 100])
@pytest.mark.parametrize(("versions", "batches"), [(3, 0.5), (3, 1), (8, 1), (4, 2), (6, 2.5), (5, 3), (8, 3)])
def test_no_group_gets_too_old_if_updates_wait_for_old_groups(versions, batches, long):
    assert share_of_long("colocate_async", versions, batches, "wait", long) == (1.0, 0, 0)


def test_a_resumed_run_waits_for_the_groups_that_were_begun_before():
    overlap = Overlap(mode="colocate_async", max_versions=3, batches=1, strategy="wait")
    how = {"section": {"recipe": "grpo"}, "prompts": 512, "overlap": overlap, "engine": Slow}
    rounds = rounds_of(**how)
    for _ in range(5):
        step(rounds)
        rounds = resumed(rounds, **how)
    for _ in range(5):
        step(rounds)
    assert rounds.allocator.accounts()["stale"] == 0


# ----------------------------------------------------------------------------------------------------------- resuming


def resumed(rounds, section, **how):
    """The run in a new process: what is left is the state and the rows, those of late finishers among them."""
    made = rounds_of(section, **how)
    made.crew.version, made.crew.rows = rounds.crew.version, set(rounds.crew.rows)
    unneeded = made.load_state_dict(json.loads(json.dumps(rounds.state_dict())), made.crew.rows)
    made.crew.release(sorted(unneeded))
    if made.loader:
        made.loader.at, made.loader.epoch = rounds.loader.at, rounds.loader.epoch
    assert made.crew.rows == made.held()
    return made


@pytest.mark.parametrize("section", RECIPES.values(), ids=RECIPES)
def test_what_ran_at_a_checkpoint_is_generated_again_and_paid_once(section):
    rounds = rounds_of(section, at_once=3, meanwhile=3)
    for _ in range(3):
        step(rounds)
    running = {s.rollouts[at] for s, at in rounds.crew.waiting} - rounds._stopped
    paid = rounds.allocator.paid
    for _ in range(2):  # a kill before the first batch, and after it
        again = resumed(rounds, section, at_once=3, meanwhile=3)
    assert again.allocator.paid == paid
    rows, _ = step(again)
    restarted = {rollout for s in again.crew.submitted if "a" in s.uid for rollout in s.rollouts}
    assert restarted <= running
    assert (running - restarted).isdisjoint(row.rollout for row in rows.rows)  # what the update made too old
    for _ in range(4):
        rows, _ = step(again)
        assert rows.batch.short_because is None
        assert len({row.group for row in rows.rows}) == 4
    again = resumed(again, section, at_once=3, meanwhile=3)
    step(again)


def test_a_rollout_that_is_generated_again_does_not_take_the_key_of_a_row_that_is_held():
    rounds = rounds_of({"recipe": "grpo"}, at_once=4)
    step(rounds)
    crew = rounds.crew
    crew.waiting.rotate(-1)  # session 0 goes to the end, where it was the next
    crew.at_once = 3
    rounds.attend()
    crew.meanwhile = 3
    rounds.attend()
    held = rounds.held()
    assert {key.split("_")[0][:2] for key in held} == {"g4"}
    again = resumed(rounds, {"recipe": "grpo"}, at_once=1000)
    rows = again.next_batch()
    assert held <= set(rows.keys)
    of_group = [key for key, row in zip(rows.keys, rows.rows, strict=True) if row.group == 4]
    assert len(of_group) == len(set(of_group)) == 4
    assert again.crew.submitted[0].uid == "g4s0r16a1"


@pytest.mark.parametrize("batches", [-1, float("nan"), float("inf"), None, True, "1"])
def test_batches_ahead_that_are_no_number_are_refused(batches):
    with pytest.raises(ValueError, match=r"colocate_async.num_warmup_batches must be a number of 0 or more"):
        recipe_of({"recipe": "grpo"}, batches=batches)


def test_an_unknown_mode_is_refused_with_the_known_ones():
    assert [verls_mode(mode) for mode in MODES] == ["sync", "colocate_async", "separate_async"]
    with pytest.raises(ValueError, match=r"one of rollalloc, rollalloc_colocate_async, .* got 'rollalloc_async'"):
        verls_mode("rollalloc_async")
