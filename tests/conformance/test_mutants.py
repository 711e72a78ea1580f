"""The kit through its mutants: each law, and each rule's promise, broken on purpose.

A kit that passes one of them is broken itself. Every mutant goes through what is public: an allocator that bends what it is
asked, told or given, or a rule that inherits a promise and breaks it. So a change inside the core makes none of them
harmless.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIncompatibleVariableOverride=false

from dataclasses import dataclass, fields, replace
from importlib import import_module
from math import inf
from pkgutil import iter_modules

import numpy as np
import pytest
from cases import QUICK, RECIPES, visited

from rollalloc import PromptTable, recipes, rules
from rollalloc.core.allocator import Allocator
from rollalloc.core.events import Offered
from rollalloc.core.group import GroupView
from rollalloc.core.recipe import Budget, Gate, Limit, Replay
from rollalloc.core.rule import Act, AdvantageRule, IntakeRule, JudgeTraits, Rule, Verdict
from rollalloc.recipes.cgrpo import FirstSuccesses, Resolved, first_success
from rollalloc.recipes.darts import Priced, Redundant, SampledTail, ShortestAndLongest, longest_rows
from rollalloc.recipes.foresight import Foresight
from rollalloc.recipes.greso import Estimated, Selective
from rollalloc.recipes.knapsack import Knapsack, LastVisit
from rollalloc.recipes.mopps import Posterior
from rollalloc.recipes.pilot_commit import Band, EveryRound, SubsampledPilots
from rollalloc.recipes.reinforce import RunningMean
from rollalloc.recipes.reinforce_ada import Collected
from rollalloc.recipes.spo import Tracker
from rollalloc.recipes.vcrl import Banked, Varied
from rollalloc.rules import advantages, intake, judges, promote, prompts, rows, sizes
from rollalloc.testing import ConformanceError, check_recipe

# --------------------------------------------------------------------------------------------- allocators that break a law


def bent(told, **changes):
    """What the core told, otherwise."""
    return type(told)(**{name: getattr(told, name) for name in type(told).__annotations__} | changes)


def bending(**changes):
    """An allocator that decides by a recipe with other fields than it was given."""

    class Bends(Allocator):
        def __init__(self, recipe, table, seed):
            super().__init__(replace(recipe, **changes), table, seed)

    return Bends


def asking(name, change):
    """An allocator that changes what it is asked for."""

    def ask(self, capacity=None):
        return change(Allocator.ask(self, capacity))

    return type(name, (Allocator,), {"ask": ask})


def batching(name, change):
    """An allocator that changes the rows of each batch."""

    def changed(actions):
        if actions.batch is None:
            return actions
        return bent(actions, batch=bent(actions.batch, rows=tuple(change(actions.batch.rows))))

    return asking(name, changed)


def changing_replays(**changes):
    """An allocator whose replayed rows differ from those that were trained: (row) → the new value of each field."""

    def change(row):
        return row._replace(**{name: value(row) for name, value in changes.items()}) if row.replays else row

    return batching("ChangesReplays", lambda rows: map(change, rows))


def limiting(name, change):
    """An allocator that gives each order another limit."""

    def changed(actions):
        return bent(actions, generate=tuple(order._replace(limit=change(order)) for order in actions.generate))

    return asking(name, changed)


class ForgetsTheLimitOnLoad(Allocator):
    def load_state_dict(self, state, **how):
        super().load_state_dict(state, **how)
        self._run.right_lengths.clear()


class ForgetsThePauseOnLoad(Allocator):
    def load_state_dict(self, state, **how):
        super().load_state_dict(state | {"replay_from": 0}, **how)


class CancelsTwice(Allocator):
    named = ()

    def ask(self, capacity=None):
        actions = super().ask(capacity)
        again, self.named = self.named, actions.cancel
        return bent(actions, cancel=(*actions.cancel, *again))


class CancelsWhatEnded(Allocator):
    def tell(self, events):
        events = list(events)
        super().tell(events)
        self.ended = [event.rollout for event in events if hasattr(event, "rollout")][:1]

    def ask(self, capacity=None):
        actions = super().ask(capacity)
        return bent(actions, cancel=(*actions.cancel, *getattr(self, "ended", ())))


def forget_in_flight(allocator, groups):
    """Drop groups, by the way that a data set which lost their prompts takes."""
    gone = {group["drawn"][0] for group in groups}
    if gone:
        kept = [-1 if prompt in gone else prompt for prompt in range(len(allocator.table))]
        Allocator.load_state_dict(allocator, allocator.state_dict(), remap=kept)


class DropsAtAnOfferedEpoch(Allocator):
    """Everything held or running is dropped when a loader's epoch begins."""

    def tell(self, events):
        for event in events:
            if isinstance(event, Offered) and event.epoch > self.epoch:
                forget_in_flight(self, self.state_dict()["groups"])
            super().tell([event])


class DropsHeldAtAnEpoch(Allocator):
    """What waits is dropped when the core's own epoch begins."""

    def ask(self, capacity=None):
        epoch = self.epoch
        actions = super().ask(capacity)
        if self.epoch > epoch:
            state = self.state_dict()
            running = {order.group for order in self.outstanding().generate}
            forget_in_flight(self, [group for group in state["groups"] if group["id"] not in running])
        return actions


class Deaf(Allocator):
    def ask(self, capacity=None):
        return super().ask(None)


class ForgetsWhatIsOutstanding(Allocator):
    def outstanding(self):
        return bent(super().outstanding(), generate=())


class ForgetsOnLoad(Allocator):
    def load_state_dict(self, state, **how):
        fresh = Allocator(self.recipe, self.table, self.seed).state_dict()
        super().load_state_dict(state | {"memory": fresh["memory"]}, **how)


class LosesHeldOnLoad(Allocator):
    def load_state_dict(self, state, **how):
        super().load_state_dict(state, **how)
        running = {order.group for order in self.outstanding().generate}
        forget_in_flight(self, [group for group in state["groups"] if group["id"] not in running])


class Unaccounted(Allocator):
    def accounts(self):
        return super().accounts() | {"open": 0}


class Misbooked(Allocator):
    """What was not chosen is booked as surplus."""

    def accounts(self):
        accounts = super().accounts()
        moved = accounts["unselected"] + accounts["zero_variance"]
        return accounts | {"unselected": 0, "zero_variance": 0, "surplus": accounts["surplus"] + moved}


class CountsEveryPrompt(Allocator):
    def ask(self, capacity=None):
        self.statistics.attempts_N.sum()  # in place: nothing is allocated
        return super().ask(capacity)


class ListsEveryPrompt(Allocator):
    def ask(self, capacity=None):
        self.all = set(range(len(self.table)))  # no array is looked at
        return super().ask(capacity)


class ReplaysWhatWasNotTrained(Allocator):
    """What a judge dropped is trained on after all."""

    def ask(self, capacity=None):
        actions = super().ask(capacity)
        if actions.batch is None or not actions.release:
            return actions
        never = actions.batch.rows[0]._replace(rollout=actions.release[0], replays=1)
        return bent(actions, batch=bent(actions.batch, rows=(*actions.batch.rows, never)))


class FreesWhatItReplays(Allocator):
    """Every row of a batch is released after its first update, and not again."""

    rows = freed = frozenset()

    def ask(self, capacity=None):
        actions = super().ask(capacity)
        due = self.rows if self.batch is None or actions.batch is not None else frozenset()
        free = tuple(rollout for rollout in dict.fromkeys((*actions.release, *due)) if rollout not in self.freed)
        self.freed |= set(free)
        if actions.batch is not None:
            self.rows = frozenset(row.rollout for row in actions.batch.rows)
        return bent(actions, release=free)


def frees_in_time(**changes):
    """An allocator that releases what may not be replayed, and replays it all the same."""
    return type("Frees", (bending(**changes), FreesWhatItReplays), {})


class KeepsWhatItReplayed(Allocator):
    """A row that was replayed is never released."""

    again = frozenset()

    def ask(self, capacity=None):
        actions = super().ask(capacity)
        self.again |= {row.rollout for row in (actions.batch.rows if actions.batch else ()) if row.replays}
        return bent(actions, release=tuple(rollout for rollout in actions.release if rollout not in self.again))


class DoesNotCountReplays(Allocator):
    @property
    def replayed(self):
        return 0


class CountsReplaysAsPaid(Allocator):
    def accounts(self):
        accounts = super().accounts()
        return accounts | {"trained": accounts["trained"] + self.replayed}


def without_samples(state):
    """A state in which no group knows what a stop rule kept."""
    return state | {"groups": [group | {"kept": []} for group in state["groups"]]}


class LosesTheSampleOnLoad(Allocator):
    def load_state_dict(self, state, **how):
        super().load_state_dict(without_samples(state), **how)


class DoesNotRecordTheSample(Allocator):
    """What a stop rule kept is not known any more when rows are chosen."""

    def ask(self, capacity=None):
        actions = super().ask(capacity)
        state = self.state_dict()
        if any(group["kept"] for group in state["groups"]):
            super().load_state_dict(without_samples(state))
        return actions


class LosesTheSizesOnLoad(Allocator):
    def load_state_dict(self, state, **how):
        super().load_state_dict(state, **how)
        for group in self._run.flight.groups.values():
            group.size += 1


class ForgetsTheLengthsOnLoad(Allocator):
    def load_state_dict(self, state, **how):
        super().load_state_dict(state, **how)
        for running_N in self._run.size_memory["0"].values():
            running_N[:] = np.nan


class ForgetsWhatItKeepsOnLoad(Allocator):
    def load_state_dict(self, state, **how):
        super().load_state_dict(state | {"kept": []}, **how)


def says_full(told):
    return told if told.batch is None else bent(told, batch=bent(told.batch, short_because=None))


def releases_early(told):
    return bent(told, release=told.release + tuple(row.rollout for row in (told.batch.rows if told.batch else ())))


def rows_of_now(told):
    """Rows carry the version of their batch, whatever they were sampled from."""
    if told.batch is None:
        return told
    rows = tuple(row._replace(version=told.batch.version) for row in told.batch.rows)
    return bent(told, batch=bent(told.batch, rows=rows))


def orders_at_random(told):
    order = np.random.default_rng().permutation(len(told.generate))
    return bent(told, generate=tuple(told.generate[at] for at in order))


REPLAY = RECIPES["foresight"].replay
GATED = RECIPES["gated"].replay
ALL_REPLAY = RECIPES["replay_all"].replay
ALLOCATORS = [
    # What may not be replayed and is kept for it is not released, which is seen first.
    (5, "foresight", bending(replay=replace(REPLAY, times=9, max_staleness=9))),
    (5, "foresight", bending(replay=replace(REPLAY, above=-inf))),
    (5, "replay_all", bending(replay=replace(ALL_REPLAY, times=2))),
    (12, "foresight", bending(replay=replace(REPLAY, rows=99))),
    (5, "grpo", bending(replay=Replay(rows=2, times=1, max_staleness=2))),
    (12, "replay_all", frees_in_time(replay=replace(ALL_REPLAY, times=2))),
    (12, "replay_all", frees_in_time(replay=replace(ALL_REPLAY, times=9, max_staleness=9))),
    (12, "foresight", frees_in_time(replay=replace(REPLAY, above=-inf))),
    (12, "foresight", changing_replays(advantage=lambda row: 2 * row.advantage)),
    (12, "foresight", changing_replays(version=lambda row: row.version + 1)),
    (2, "foresight", changing_replays(replays=lambda row: 0)),
    (12, "foresight", batching("ReplaysFirst", lambda rows: rows[::-1])),
    (12, "replay_all", ReplaysWhatWasNotTrained),
    (12, "foresight", FreesWhatItReplays),
    (5, "foresight", KeepsWhatItReplayed),
    (5, "foresight", asking("KeepsAtTheEnd", lambda told: bent(told, release=() if told.finished else told.release))),
    (12, "foresight", DoesNotCountReplays),
    (8, "foresight", CountsReplaysAsPaid),
    (6, "foresight", ForgetsWhatItKeepsOnLoad),
    (12, "gated", bending(replay=replace(GATED, gate=Gate(most=1)))),
    (12, "gated", bending(replay=replace(GATED, gate=Gate(most=0.5, pause=0)))),
    (6, "gated", ForgetsThePauseOnLoad),
    (9, "darts_sampled", LosesTheSampleOnLoad),
    (9, "darts_sampled", DoesNotRecordTheSample),
    (6, "darts_longest_by_size", LosesTheSizesOnLoad),
    (6, "darts_whole", ForgetsTheLengthsOnLoad),
    (6, "spo", ForgetsOnLoad),
    (13, "grpo", bending(limit=Limit(every=2, last=16))),
    (13, "limited", bending(limit=Limit(every=3))),
    (13, "limited", limiting("AToken", lambda order: order.limit and order.limit + 1)),
    (13, "limited_stages", limiting("PilotsOnly", lambda order: None if order.stage else order.limit)),
    (6, "limited", ForgetsTheLimitOnLoad),
    (1, "darts_sampled", CancelsTwice),
    (1, "darts_sampled", CancelsWhatEnded),
    (2, "grpo", batching("TrainsTwice", lambda rows: (*rows, rows[0]))),
    (2, "grpo", batching("LosesAGroup", lambda rows: (row for row in rows if row.group != rows[0].group))),
    (2, "dapo_max_candidates", asking("SaysFull", says_full)),
    (2, "pilot_commit", asking("YoungRows", rows_of_now)),
    (8, "pilot_commit_one_step_old", bending(max_staleness=9)),
    (2, "dapo_carry", bending(max_staleness=9)),
    (2, "offered_pilot_commit", DropsAtAnOfferedEpoch),
    (8, "dapo_carry", DropsHeldAtAnEpoch),
    (4, "grpo", asking("HandsOutTwice", lambda told: bent(told, generate=told.generate * 2))),
    (4, "grpo", Deaf),
    (4, "grpo", ForgetsWhatIsOutstanding),
    (5, "dapo", asking("ReleasesTwice", lambda told: bent(told, release=told.release * 2))),
    (5, "grpo", asking("ReleasesEarly", releases_early)),
    (
        5,
        "grpo",
        asking("ReleasesLess", lambda told: bent(told, release=tuple(each for each in told.release if each % 7))),
    ),
    (6, "grpo", ForgetsOnLoad),
    (6, "pilot_commit", LosesHeldOnLoad),
    (6, "grpo", asking("OrdersAtRandom", orders_at_random)),
    (7, "grpo", bending(budget=Budget())),
    (8, "grpo", Unaccounted),
    (8, "pods", Misbooked),
    (10, "grpo", bending(quarantine_after=None)),
    (10, "pilot_commit", bending(quarantine_after=1)),
    (11, "grpo", CountsEveryPrompt),
    (11, "pilot_commit", ListsEveryPrompt),
]


@pytest.mark.parametrize(
    ("law", "name", "allocator"),
    [pytest.param(*mutant, id=f"{mutant[1]}: {mutant[2].__name__}") for mutant in ALLOCATORS],
)
def test_the_kit_finds_every_broken_law(law, name, allocator):
    with pytest.raises(ConformanceError, match=rf"law {law}: "):
        check_recipe(RECIPES[name], allocator=allocator)


# -------------------------------------------------------------------------------------------------- rules that lie
# Each inherits the promise of the rule it stands for, so that only what it does is other.


class Swapped:
    """A group whose rewards stand where its metrics should, held to [0, 1] as metrics are, and the other way round."""

    def __init__(self, group):
        self.group = group

    def __getattr__(self, name):
        if name == "metrics_G":
            return np.clip(self.group.rewards_G, 0, 1)
        return getattr(self.group, "metrics_G" if name == "rewards_G" else name)


def misled(rule, method="__call__"):
    """The rule, whose method takes rewards for metrics and metrics for rewards."""

    def swapping(self, *given):
        return getattr(super(Misled, self), method)(
            *(Swapped(one) if isinstance(one, GroupView) else one for one in given)
        )

    Misled = type("Misled", (type(rule),), {method: swapping, "__module__": __name__})
    return Misled(**{field.name: getattr(rule, field.name) for field in fields(rule)})


def lying(rule, does, method="__call__"):
    """The class of this rule, one of whose methods does something else; what it promises stays."""
    return type(f"Lying{rule.__name__}", (rule,), {method: does, "__module__": __name__})


def altering(rule, change, method="__call__"):
    """The class of this rule, one of whose methods gives something else than it made; what it promises stays."""
    return lying(rule, lambda self, *given: change(getattr(rule, method)(self, *given)), method)


@dataclass(frozen=True)
class Impatient(judges.Complete):
    @property
    def traits(self):
        return JudgeTraits()  # it is asked before all is in

    def __call__(self, group, view):
        return Verdict(Act.TRAIN)


@dataclass(frozen=True)
class Drops(judges.Complete):
    def __call__(self, group, view):
        equal = len(set(group.metrics_G.tolist())) == 1
        return None if group.unfinished else Verdict(Act.DROP, "zero_variance") if equal else Verdict(Act.TRAIN)


LetsAllThrough = lying(
    judges.NonzeroVariance, lambda self, group, view: None if group.unfinished else Verdict(self.act)
)
AnyVariance = lying(Varied, lambda self, group, view: Varied(1e-6, 1e-6)(group, view))
FirstKappaForEver = lying(Varied, lambda self, group, view: Varied(self.kappa_first, self.kappa_first)(group, view))
AnySuccess = lying(Resolved, lambda self, group, view: Resolved(self.delta)(group, view._replace(memory={})))
OneOfEach = lying(Collected, lambda self, group, view: Collected()(group, view._replace(rows=2)))
OpenBand = lying(Band, lambda self, group, view: None if group.unfinished else Verdict(Act.NEXT))
Overfull = lying(intake.Fill, lambda self, view, memory: intake.Fill.__call__(self, view, memory) + (view.need > 0))
Hoards = lying(intake.KeepInFlight, lambda self, view, memory: 0 if view.running_S[0] else self.groups)


@dataclass(frozen=True)
class HoardsWithoutAPromise(IntakeRule):
    groups: int

    def __call__(self, view, memory):
        return 0 if view.running_S[0] else self.groups


OnlyAsNeeded = lying(EveryRound, lambda self, view, memory: intake.KeepInFlight(self.groups, ahead=True)(view, memory))
RoundsOverlap = lying(EveryRound, lambda self, view, memory: 0 if view.running_S[0] else self.groups)
Dribbles = lying(
    intake.KeepInFlight, lambda self, view, memory: min(1, intake.KeepInFlight.__call__(self, view, memory))
)
OneGroupFurther = lying(intake.Ahead, lambda self, view, memory: intake.Ahead(self.of, self.groups + 1)(view, memory))
NoneAhead = lying(intake.Ahead, lambda self, view, memory: self.of(view, memory))
EstimatesNothing = lying(Estimated, lambda self, view, memory: max(0, self.groups - view.running_S[0]))
NothingToSpare = lying(Estimated, lambda self, view, memory: Estimated(self.groups, spare=0.5)(view, memory))
OneTooMany = altering(sizes.InAll, lambda made: [size + 1 for size in made])
OneMore = lying(sizes.Fixed, lambda self, groups, view, memory: [self.n + (group.prompt % 2) for group in groups])
NoRedundancy = lying(Redundant, lambda self, groups, view, memory: [view.rows] * len(groups))


EvenRedundancy = altering(
    Redundant, lambda made: [sum(made) // len(made) + (g < sum(made) % len(made)) for g in range(len(made))]
)


# More rollouts than there may be.
PaysNoHeed = altering(Priced, lambda made: [size + 4 for size in made])


@dataclass(frozen=True)
class PricedUpsideDown(Priced):
    """Most rollouts where lengths vary least."""

    def __call__(self, groups, view, memory):
        std = [memory["std_N"][group.prompt] for group in groups]
        falling = sorted(Redundant(1.5, self.max_factor)(groups, view, memory), reverse=True)
        return [falling[at] for at in np.argsort(np.argsort(std))]


Uniform = lying(Knapsack, lambda self, groups, view, memory: [self.mean_n] * len(groups))


Overspends = altering(Knapsack, lambda made: [made[0] + 1, *made[1:]])


NeverStops = lying(SampledTail, lambda self, group, view, rng: ())


@dataclass(frozen=True)
class StopsAtOnce(SampledTail):
    def least_scored(self, view):
        return 0  # it is asked before anything is in

    def __call__(self, group, view, rng):
        return [] if group.cancelled or not group.scored else sorted(group.running)[self.longest :]


StopsBySizeOfNone = lying(SampledTail, lambda self, group, view, rng: SampledTail(self.longest)(group, view, rng))
StopsAll = lying(
    SampledTail,
    lambda self, group, view, rng: sorted(group.running) if SampledTail.__call__(self, group, view, rng) else [],
)
Newest = lying(
    promote.Oldest,
    lambda self, held, k, view, rng: sorted(held, key=lambda group: (-group.first_version, -group.group))[:k],
)
OldestAfterAll = lying(
    promote.MostRecent,
    lambda self, held, k, view, rng: sorted(held, key=lambda group: (group.first_version, group.group))[:k],
)
OtherDeviation = lying(
    advantages.GRPO, lambda self, rewards_G: advantages.grpo(rewards_G, eps=self.eps, ddof=1 - self.ddof)
)
HalfOfThem = lying(
    promote.RandomOrder,
    lambda self, held, k, view, rng: promote.RandomOrder.__call__(self, held, max(1, k // 2), view, rng),
)
FavoursHits = lying(
    promote.RandomOrder, lambda self, held, k, view, rng: sorted(held, key=lambda group: -group.metrics_G.mean())[:k]
)


def by_variance(held, k, sign=-1, of="metrics_G"):
    return sorted(held, key=lambda group: (sign * np.var(getattr(group, of)), -group.group))[:k]


# Highest variance first, although the rule says that groups at their last chance go before.
Starves = lying(
    promote.TopVariance, lambda self, held, k, view, rng: () if view.running_S[held[0].stage] else by_variance(held, k)
)
# Groups at their last chance first, although the rule says highest variance.
Queues = lying(
    promote.TopVariance, lambda self, held, k, view, rng: promote.TopVariance(expiring_first=True)(held, k, view, rng)
)
LowestVariance = lying(
    promote.TopVariance,
    lambda self, held, k, view, rng: () if view.running_S[held[0].stage] else by_variance(held, k, 1),
)


AllButOne = altering(rows.Everything, lambda made: tuple(each[: max(1, len(each) - 1)] for each in made))


HalfWeight = altering(rows.Everything, lambda made: (made[0], made[1] / 2))


@dataclass(frozen=True)
class SubsamplesCommits(SubsampledPilots):
    def __call__(self, group, view, rng):
        chosen_M = rows.max_variance_subset(group.metrics_G, min(group.scored, self.n + 3))
        return chosen_M, np.ones(chosen_M.size)


MinReward = lying(rows.MaxReward, lambda self, group, rng: np.sort(np.argsort(group.rewards_G)[: self.m]), "choose")
NotAtRandom = lying(rows.Random, lambda self, group, rng: np.sort(np.argsort(-group.rewards_G)[: self.m]), "choose")


@dataclass(frozen=True)
class Middle(rows.Percentile):
    def choose(self, group, rng):
        first = (group.scored - self.m) // 2
        return np.sort(np.argsort(group.rewards_G)[first : first + self.m])


@dataclass(frozen=True)
class LastToFinish(ShortestAndLongest):
    def __call__(self, group, view, rng):
        chosen = np.arange(group.scored)[-(self.shortest + self.longest) :]
        return chosen, np.ones(chosen.size)


SameRowsForAllSizes = lying(
    ShortestAndLongest, lambda self, group, view, rng: ShortestAndLongest(self.shortest, self.longest)(group, view, rng)
)


@dataclass(frozen=True)
class MoreOfMore(ShortestAndLongest):
    """Most longest where most rollouts are."""

    def __call__(self, group, view, rng):
        fewer = self.longest - longest_rows(self.longest, True, self.rows, group.size)
        return ShortestAndLongest(self.rows - fewer, fewer)(group, view, rng)


@dataclass(frozen=True)
class KeepsTruncated(ShortestAndLongest):
    def __call__(self, group, view, rng):
        order = np.lexsort((group.rollouts_G, group.tokens_G))
        tail = order[max(self.shortest, order.size - self.longest) :]
        chosen = np.sort(np.concatenate([order[: self.shortest], tail]))
        return chosen, np.ones(chosen.size)


UnitTail = altering(ShortestAndLongest, lambda made: (made[0], np.ones(made[1].size)))


Flipped = altering(advantages.OverGroup, lambda made: -made)
# Statistics before the choice, where they are promised of what was chosen.
GroupForChosen = lying(advantages.OverChosen, lambda self, group, chosen_M: self.kernel(group.rewards_G)[chosen_M])
NotScaled = lying(advantages.GRPO, lambda self, rewards_G: advantages.dr_grpo(rewards_G))
Stingy = lying(
    prompts.Shuffled,
    lambda self, memory, k, free_N, view, rng: prompts.Shuffled.pick(self, memory, max(1, k - 1), free_N, view, rng),
    "pick",
)


_draws = [0]


@dataclass(frozen=True)
class HiddenMemory(prompts.Shuffled):
    def pick(self, memory, k, free_N, view, rng):
        _draws[0] += 1
        return super().pick(memory, k, free_N, view, np.random.default_rng(_draws[0]))


SearchesAll = lying(
    prompts.Shuffled, lambda self, memory, k, free_N, view, rng: np.flatnonzero(free_N)[:k].tolist(), "pick"
)
OwnOrder = altering(prompts.AsOffered, lambda picked: sorted(picked, reverse=True), "pick")


@dataclass(frozen=True)
class ForgetsItsTurn(prompts.InOrder):
    def pick(self, memory, k, free_N, view, rng):
        memory["next"] = 0
        return super().pick(memory, k, free_N, view, rng)


DrawsItsOwn = lying(
    prompts.AsOffered,
    lambda self, memory, k, free_N, view, rng: np.flatnonzero(free_N)[
        -len(prompts.AsOffered.pick(self, memory, k, free_N, view, rng)) or free_N.size :
    ].tolist(),
    "pick",
)


@dataclass(frozen=True)
class DrawsTheFarthest(Posterior):
    def pick(self, memory, k, free_N, view, rng):
        pool = prompts.some_free(free_N, self.pool * k, rng)
        rate = rng.beta(memory["hits_N"][pool], memory["misses_N"][pool])
        return pool[np.argsort(-np.abs(rate - self.target))[:k]].tolist()


LooksAtAll = lying(
    Posterior,
    lambda self, memory, k, free_N, view, rng: (
        Posterior.pick(self, memory, k, np.array(free_N), view, rng) if memory["hits_N"].max() > 0 else []
    ),
    "pick",
)


NoBank = lying(Banked, staticmethod(lambda memory, count, free_N: []), "_best")


@dataclass(frozen=True)
class LowestFirst(Banked):
    @staticmethod
    def _best(memory, count, free_N):
        there = [entry for entry in memory["bank"] if entry[2] > 0 and free_N[entry[0]]]
        return sorted(there, key=lambda entry: entry[1])[: max(0, count)]


@dataclass(frozen=True)
class KeepsAllPlaces(FirstSuccesses):
    def observe(self, memory, group, view):
        memory["places"] = [*memory["places"], first_success(group.metrics_G)]


PassesOverAnyone = lying(Selective, lambda self, memory, prompts_K: np.full(prompts_K.size, 0.5), "chances")


@dataclass(frozen=True)
class TwoPassesAnEpoch(Selective):
    def pick(self, memory, k, free_N, view, rng):
        memory["pass"] = -1
        return super().pick(memory, k, free_N, view, rng)


# A baseline for each prompt, where one for all is promised.
OwnBaselines = altering(
    RunningMean,
    lambda picked: [each._replace(baseline=each.baseline and each.baseline + 1e-3 * each.prompt) for each in picked],
    "pick",
)


ExpectsAlways = altering(
    LastVisit, lambda picked: [each._replace(predicted=each.predicted or 0.25) for each in picked], "pick"
)


ExpectsHalf = altering(Tracker, lambda picked: [each._replace(predicted=0.5, baseline=0.5) for each in picked], "pick")


# The reward is taken for the metric.
ExpectsTheMetric = altering(
    Foresight, lambda picked: [each._replace(baseline=each.predicted) for each in picked], "pick"
)
DrawsTheEasy = lying(Foresight, lambda self, belief_K: Foresight.chances(self, 1 - belief_K), "chances")


@dataclass(frozen=True)
class PredictsAll(Foresight):
    def pick(self, memory, k, free_N, view, rng):
        self.predictor(memory, view.table.features, np.arange(free_N.size))
        return super().pick(memory, k, free_N, view, rng)


CentredReward = lying(
    advantages.Rewards, lambda self, group, chosen_M: (group.rewards_G - group.rewards_G.mean())[chosen_M]
)
FailuresToo = lying(advantages.Successes, lambda self, group, chosen_M: group.rewards_G[chosen_M])
AllSuccessesAlike = lying(advantages.Successes, lambda self, group, chosen_M: (group.rewards_G[chosen_M] > 0) * 1.0)
# neg is not heeded.
FullFailures = lying(
    advantages.BatchMean, lambda self, made, groups, chosen, view: advantages.BatchMean(1.0)(made, groups, chosen, view)
)


@dataclass(frozen=True)
class WeighedByFirstRows(advantages.BatchMean):
    """How uncertain the first rows of each group were, whichever are trained on."""

    def __call__(self, made, groups, chosen, view):
        first = [np.arange(len(chosen_M)) for chosen_M in chosen]
        return advantages.BatchMean(self.neg)(made, groups, first, view)


# The group's own mean, whatever was expected.
AgainstItself = lying(
    advantages.AgainstBaseline, lambda self, group, chosen_M: (group.rewards_G - group.rewards_G.mean())[chosen_M]
)


MeanWithItself = lying(
    advantages.BatchMean, lambda self, made, *more: [each - np.concatenate(made).mean() for each in made]
)


ScaledOnly = lying(
    advantages.BatchNormalised,
    lambda self, made, *more: [each / (np.concatenate(made).std() + self.eps) for each in made],
)


@dataclass(frozen=True)
class SampleDeviation(advantages.BatchNormalised):
    def __call__(self, made, groups, chosen, view):
        every = np.concatenate(made)
        return [(each - every.mean()) / (every.std(ddof=1) + self.eps) for each in made]


def staged(name, stage=-1, **changes):
    """A recipe with other rules in one of its stages."""
    recipe = RECIPES[name]
    stages = list(recipe.stages)
    stages[stage] = replace(stages[stage], **changes)
    return replace(recipe, stages=tuple(stages))


def other(name, **changes):
    return replace(RECIPES[name], **changes)


GRPO, PODS = advantages.grpo, advantages.OverChosen(advantages.pods)
WINDOW = (0.125, 0.25, 1.0)
QUICKLY = {"pool": 4, "warm": 8, "predictor": QUICK}
RULES = [
    (9, "Complete", staged("grpo", judge=Impatient())),
    (9, "Complete", staged("grpo", judge=Drops())),
    (9, "NonzeroVariance", staged("dapo", judge=LetsAllThrough())),
    (9, "NonzeroVariance", staged("dapo", judge=misled(judges.NonzeroVariance()))),
    (9, "Band", staged("pilot_commit", 0, judge=OpenBand(*WINDOW))),
    (9, "Band", staged("pilot_commit", 0, judge=misled(Band(*WINDOW)))),
    (9, "Varied", staged("vcrl", judge=AnyVariance(0.8, 0.8))),
    (9, "Varied", staged("vcrl", judge=FirstKappaForEver(0.8, 0.3, 2))),
    (9, "Banked", other("vcrl", prompts=NoBank())),
    (9, "Banked", other("vcrl", prompts=LowestFirst())),
    (9, "Resolved", staged("cgrpo", 1, judge=AnySuccess(0.5))),
    (9, "FirstSuccesses", other("cgrpo", prompts=misled(FirstSuccesses(9), "observe"))),
    (9, "FirstSuccesses", other("cgrpo", prompts=KeepsAllPlaces(9))),
    (9, "Collected", staged("reinforce_ada", 0, judge=OneOfEach())),
    (9, "Collected", staged("reinforce_ada", 0, judge=misled(Collected()))),
    (9, "Fill", other("grpo", intake=Overfull())),
    (9, "Ahead", other("grpo", intake=OneGroupFurther(intake.Fill(), 4), max_staleness=2)),
    (9, "Ahead", other("grpo", intake=NoneAhead(intake.Fill(), 4), max_staleness=2)),
    (9, "KeepInFlight", other("dapo", intake=Hoards(12))),
    (9, "EveryRound", other("pilot_commit_every_round", intake=OnlyAsNeeded(6))),
    (9, "EveryRound", other("pilot_commit_every_round", intake=RoundsOverlap(6))),
    (9, "KeepInFlight", other("pilot_commit", intake=Dribbles(12, ahead=True))),
    (3, "no promise", other("pilot_commit", intake=HoardsWithoutAPromise(12), max_staleness=9)),
    (9, "Fixed", staged("grpo", size=OneMore(4))),
    (9, "InAll", staged("pilot_commit", 1, size=OneTooMany(sizes.Fixed(8)))),
    (9, "Redundant", staged("darts_exact", size=NoRedundancy(1.5, 2.0))),
    (9, "Redundant", staged("darts_exact", size=EvenRedundancy(1.5, 2.0))),
    (9, "Priced", staged("darts_whole", size=PaysNoHeed(2.0, ((1, 1.0), (64, 3.0)), 1))),
    (9, "Priced", staged("darts_whole", size=PricedUpsideDown(2.0, ((1, 1.0), (64, 3.0)), 1))),
    (9, "Knapsack", staged("knapsack", size=Uniform(5, most=16))),
    (9, "Knapsack", staged("knapsack", size=Overspends(5, most=16))),
    (9, "LastVisit", other("knapsack", prompts=ExpectsAlways())),
    (9, "LastVisit", other("knapsack", prompts=misled(LastVisit(), "observe"))),
    (9, "SampledTail", staged("darts_sampled", stop=NeverStops(1))),
    (9, "SampledTail", staged("darts_sampled", stop=StopsAtOnce(1))),
    (9, "SampledTail", staged("darts_sampled", stop=StopsAll(1))),
    (9, "SampledTail", staged("darts_longest_by_size", stop=StopsBySizeOfNone(2, True))),
    (9, "Oldest", staged("pilot_commit_oldest", 0, promote=Newest())),
    (9, "RandomOrder", staged("pilot_commit_random", 0, promote=HalfOfThem())),
    (9, "RandomOrder", staged("pilot_commit_random", 0, promote=FavoursHits())),
    (9, "TopVariance", staged("pilot_commit_expiring_first", 0, promote=Starves(expiring_first=True))),
    (9, "TopVariance", staged("pilot_commit", 0, promote=Queues())),
    (9, "TopVariance", staged("pilot_commit", 0, promote=LowestVariance())),
    (9, "MostRecent", staged("pilot_commit_most_recent", 0, promote=OldestAfterAll())),
    (9, "OverGroup", other("grpo_sample", advantage=advantages.OverGroup(OtherDeviation(ddof=1)))),
    (9, "Everything", other("grpo", rows=AllButOne())),
    (9, "Everything", other("grpo", rows=HalfWeight())),
    (9, "MaxVariance", other("pods", rows=misled(rows.MaxVariance(4), "choose"))),
    (9, "SubsampledPilots", other("pilot_commit_n_effective", rows=misled(SubsampledPilots(2)))),
    (9, "SubsampledPilots", other("pilot_commit_n_effective", rows=SubsamplesCommits(2))),
    (9, "MaxReward", other("pods", rows=MinReward(4))),
    (9, "Balanced", other("reinforce_ada", rows=misled(rows.Balanced(4), "choose"))),
    (9, "Random", other("pods", rows=NotAtRandom(4))),
    (9, "Percentile", other("pods", rows=Middle(4))),
    (9, "ShortestAndLongest", other("darts_exact", rows=LastToFinish(3, 1))),
    (9, "ShortestAndLongest", other("darts_exact", rows=KeepsTruncated(3, 1))),
    (9, "ShortestAndLongest", other("darts_sampled", rows=UnitTail(3, 1))),
    (9, "ShortestAndLongest", other("darts_longest_by_size", rows=SameRowsForAllSizes(3, 2, True))),
    (9, "ShortestAndLongest", other("darts_longest_by_size", rows=MoreOfMore(3, 2, True))),
    (9, "OverGroup", other("grpo", advantage=Flipped(GRPO))),
    (9, "OverGroup", other("grpo", advantage=misled(advantages.OverGroup(GRPO)))),
    (9, "OverGroup", other("grpo", advantage=advantages.OverGroup(NotScaled(ddof=0)))),
    (9, "OverChosen", other("pods", advantage=GroupForChosen(advantages.pods))),
    (9, "Rewards", other("reinforce", advantage=misled(advantages.Rewards()))),
    (9, "Rewards", other("reinforce_neg", advantage=CentredReward())),
    (9, "Successes", other("raft", advantage=FailuresToo())),
    (9, "Successes", other("raft", advantage=AllSuccessesAlike())),
    (9, "BatchMean", other("foresight", over_batch=FullFailures(0.3))),
    (9, "AgainstBaseline", other("spo", advantage=AgainstItself())),
    (9, "BatchMean", other("reinforce", over_batch=MeanWithItself())),
    (9, "BatchMean", other("reinforce_by_variance", over_batch=FullFailures(None))),
    (9, "BatchMean", other("reinforce_by_variance_of_chosen", over_batch=WeighedByFirstRows(None))),
    (9, "BatchNormalised", other("spo", over_batch=ScaledOnly())),
    (9, "BatchNormalised", other("spo", over_batch=SampleDeviation())),
    (9, "RunningMean", other("reinforce_running", prompts=OwnBaselines())),
    (9, "RunningMean", other("reinforce_running", prompts=misled(RunningMean(), "observe"))),
    (9, "Tracker", other("spo", prompts=misled(Tracker(), "observe"))),
    (9, "Tracker", other("spo", prompts=ExpectsHalf())),
    (9, "Foresight", other("foresight", prompts=ExpectsTheMetric(**QUICKLY))),
    (9, "Foresight", other("foresight", prompts=DrawsTheEasy(**QUICKLY))),
    (11, "Foresight", other("foresight", prompts=PredictsAll(**QUICKLY))),
    (9, "Shuffled", other("grpo", prompts=Stingy())),
    (6, "Shuffled", other("grpo", prompts=HiddenMemory())),
    (11, "Shuffled", other("grpo", prompts=SearchesAll())),
    (9, "AsOffered", other("offered_pilot_commit", prompts=OwnOrder())),
    (9, "AsOffered", other("offered", prompts=DrawsItsOwn())),
    (9, "InOrder", other("in_order", prompts=ForgetsItsTurn())),
    (9, "Estimated", other("greso", intake=EstimatesNothing(12))),
    (9, "Estimated", other("greso", intake=NothingToSpare(12))),
    (9, "Selective", other("greso", prompts=PassesOverAnyone())),
    (9, "Selective", other("greso", prompts=TwoPassesAnEpoch())),
    (9, "Posterior", other("posterior_and_pilot_commit", prompts=misled(Posterior(), "observe"))),
    (9, "Posterior", other("posterior_and_pilot_commit", prompts=DrawsTheFarthest())),
    (11, "Posterior", other("posterior_and_pilot_commit", prompts=LooksAtAll())),
]


def liar(recipe):
    """The name that the rule of a mutated recipe has in this file."""
    slots = [*vars(recipe).values(), *(getattr(stage, name) for stage in recipe.stages for name in stage.__slots__)]
    kinds = {type(rule) for slot in slots for rule in (slot, getattr(slot, "kernel", None))}
    (found,) = (kind for kind in kinds if kind.__module__ == __name__)
    return next((name for name, each in globals().items() if each is found), found.__name__)


@pytest.mark.parametrize(
    ("law", "recipe"), [pytest.param(law, recipe, id=f"{of}: {liar(recipe)}") for law, of, recipe in RULES]
)
def test_the_kit_finds_every_broken_promise(law, recipe):
    table = visited if isinstance(recipe.prompts, LastVisit) else PromptTable.of
    with pytest.raises(ConformanceError, match=rf"law {law}: "):
        check_recipe(recipe, table=table)


def test_the_kit_finds_a_grpo_that_calls_itself_dapo():
    with pytest.raises(ConformanceError, match=r"law 9: .* a group goes on only if its metrics differ"):
        check_recipe(RECIPES["grpo"], like=staged("grpo", judge=judges.NonzeroVariance()))


def test_every_rule_has_a_mutant():
    """A new rule states its promise, and has a mutant here that breaks it."""
    modules = [
        import_module(f"{package.__name__}.{module.name}")
        for package in (rules, recipes)
        for module in iter_modules(package.__path__)
    ]
    public = {
        kind.__name__: kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type) and hasattr(kind, "promises") and kind.__module__ == module.__name__
        if not kind.__name__.startswith("_")
    }
    assert not [name for name, kind in public.items() if kind.promises is Rule.promises]
    assert public.keys() == {of for _, of, _ in RULES} - {"no promise"}


def test_a_rule_without_a_promise_is_put_through_the_laws_only():
    """Flipped advantages are nobody's business where nobody promised otherwise."""
    check_recipe(other("grpo", advantage=Unpromised()), seeds=(0,), batches=2)


@dataclass(frozen=True)
class Unpromised(AdvantageRule):
    def __call__(self, group, chosen_M):
        return -advantages.grpo(group.rewards_G)[chosen_M]


def positive(rewards_G):
    """A kernel of advantages that takes no negative rewards."""
    if min(rewards_G) < 0:
        raise ValueError("expected rewards of 0 or more")
    return advantages.grpo(rewards_G)


def test_rewards_are_of_the_range_that_a_rule_takes():
    recipe = replace(recipes.grpo(4, 4), advantage=advantages.OverGroup(positive))
    check_recipe(recipe, rewards=(0.0, 1.0), seeds=(0,), batches=2)
    with pytest.raises(ValueError, match="expected rewards of 0 or more"):
        check_recipe(recipe)
