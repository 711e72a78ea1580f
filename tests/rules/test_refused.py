"""Numbers out of range: each rule and recipe refuses them when it is made, and says what was expected."""

# pyright: reportArgumentType=false

from dataclasses import replace
from functools import partial

import pytest

from rollalloc import recipes
from rollalloc.core.recipe import Gate, Replay
from rollalloc.core.rule import Act, Verdict
from rollalloc.recipes.cgrpo import FirstSuccesses, Resolved
from rollalloc.recipes.darts import Priced, Redundant, SampledTail, ShortestAndLongest
from rollalloc.recipes.foresight import Foresight
from rollalloc.recipes.greso import Estimated, Selective
from rollalloc.recipes.knapsack import Knapsack
from rollalloc.recipes.mopps import Posterior
from rollalloc.recipes.pilot_commit import Band, EveryRound
from rollalloc.recipes.reinforce import RunningMean
from rollalloc.recipes.reinforce_ada import Collected
from rollalloc.recipes.spo import Tracker
from rollalloc.recipes.vcrl import Banked, Varied
from rollalloc.rules.advantages import GRPO, BatchMean, BatchNormalised
from rollalloc.rules.intake import KeepInFlight
from rollalloc.rules.rows import Balanced, max_variance_subset
from rollalloc.rules.sizes import Fixed

NAN, INF = float("nan"), float("inf")
band = partial(Band, p_lower=0.1, p_upper=0.3, p_solve=1.0)
changed = partial(replace, recipes.raft(1, 1))
darts = partial(recipes.darts, groups=4, shortest=3, longest=1)
drop = partial(Verdict, Act.DROP)
estimated = partial(Estimated, groups=2)
knapsack = partial(Knapsack, mean_n=4)
most_variance = partial(max_variance_subset, [0.0, 1.0])
pilot_commit = partial(recipes.pilot_commit, groups=2, n_pilot=2, n_commit=2, gen_groups=6)
price = partial(Priced, max_factor=2.0, latency=((1, 1.0), (100, 1.0)), longest=0)
reinforce_ada = partial(recipes.reinforce_ada, 4, n=4)
replay = partial(Replay, rows=9, max_staleness=9)
tail = partial(SampledTail, longest=1)
LATENCIES = [(), ((0, 1.0),), ((2, 1.0), (1, 1.0)), ((1, 0.0),), ((1, 1.0), (1, 2.0)), ((1, 0.1), (8, INF)), "fast", 3]


def each(name, *values):
    """A case for each value of one argument."""
    return [{name: value} for value in values]


# What is made, the message, and the arguments with which it is refused.
WRONG = [
    # advantages
    (GRPO, r"ddof must be 0 .* or 1 .* got 2", each("ddof", 2)),
    (GRPO, "eps must be above 0 and finite, got 0", [{"ddof": 1, "eps": 0}]),
    (BatchMean, "neg must be 0 or more and finite, or None", each("neg", -0.1, NAN, INF)),
    (BatchNormalised, "eps must be above 0 and finite", each("eps", 0.0, -1.0, INF, NAN)),
    # intake
    (KeepInFlight, "groups", each("groups", 0)),
    (KeepInFlight, "ahead must be True or False, not a number: the recipe .*; got 4", [{"groups": 1, "ahead": 4}]),
    (estimated, "groups must be", each("groups", 0)),
    (EveryRound, "groups must be a whole number of at least 1, got 0", each("groups", 0)),
    (estimated, "spare must be above 0 and finite", each("spare", 0.0, INF)),
    # judges
    (band, r"window from p_lower=0.8 to 1 - p_upper=0.7 is empty.*choose p_lower \+ p_upper <= 1", each("p_lower", 0.8)),
    (band, r"must lie in \[0, 1\]", [*each("p_lower", -0.1, NAN), *each("p_upper", 1.3)]),
    (band, "p_solve must be above 0", each("p_solve", 0.0)),
    (band, "reprobe_every must be a whole number of at least 1", each("reprobe_every", 0)),
    (band, r"confidence must be in \(0, 1\), or None, got 1.0", [{"p_solve": 0.9, "confidence": 1.0}]),
    (band, "p_solve=1 with confidence=0.95: no number of .*use p_solve=0.9, for example; or", each("confidence", 0.95)),
    (drop, "a DROP's reason must begin with one of zero_variance, out_of_band",
     each("reason", "", "boring", "trained", "open", "open/x")),
    (Collected, r"above must be in \[0, 1\), got 1.0", each("above", 1.0)),
    (Resolved, r"delta must be in \(0, 1\), or None", each("delta", 0.0, 1.0)),
    (Varied, r"kappa and kappa_first must be in \(0, 1\]", [*each("kappa", 0.0, 1.1), *each("kappa_first", 0.0)]),
    (Varied, "first must be", each("first", -1)),
    # prompts
    (RunningMean, "half_life must be above 0 and finite", each("half_life", 0.0, -1.0, INF, NAN)),
    (Tracker, "expected half_way and spread above 0 and 0 < least <= most < 1",
     [*each("half_way", 0.0, INF), *each("spread", 0.0, NAN), *each("least", 0.0, 0.97, NAN), *each("most", 1.0)]),
    (Tracker, "pool must be a whole number of at least 1", each("pool", 0, 1.5, True)),
    (Foresight, "pool must be a whole number of at least 1", each("pool", 0, 1.5, True)),
    (Foresight, r"floor must be in \[0, 1\], got .*; and exponent must be None",
     [*each("floor", -0.1, 1.1, NAN), *each("exponent", -1.0, INF)]),
    (Foresight, "warm must be a whole number of at least 0", each("warm", -1)),
    (Posterior, "expected target in", [*each("target", 1.0), *each("decay", 1.5), *each("prior_weight", 0.0)]),
    (Posterior, "pool", each("pool", 0)),
    (Selective, "expected zero_share in",
     [*each("zero_share", 0.0, 1.0), *each("start", 0.99), *each("step", -0.1), *each("least", 0.0)]),
    (FirstSuccesses, "visits must be", each("visits", 0)),
    (Banked, "replays must be", each("replays", 0)),
    (Banked, "capacity must be", each("capacity", 0)),
    (Banked, "momentum must be", each("momentum", 1.0)),
    # rows
    (most_variance, "m must be at most the number of rewards, 2, got 3", each("m", 3)),
    (most_variance, "m must be a whole number of at least 1, got", each("m", 0, 1.5)),
    (max_variance_subset, "must be finite, got nan at 1", [{"rewards_G": [0.0, NAN], "m": 1}]),
    (max_variance_subset, "one axis", [{"rewards_G": [[0.0, 1.0]], "m": 1}]),
    (ShortestAndLongest, "shortest must be", [{"shortest": 0, "longest": 1}]),
    (ShortestAndLongest, "longest must be", [{"shortest": 1, "longest": -1}]),
    (Balanced, "m must be", each("m", 0)),
    (Balanced, r"above must be in \[0, 1\)", [{"m": 4, "above": 1.0}]),
    # sizes
    (Fixed, "n must be a whole number of at least 1, got 0", each("n", 0)),
    (Redundant, "least must be a whole number of at least 1, got 0", [{"mean_factor": 1.5, "max_factor": 2.0, "least": 0}]),
    (Redundant, "expected 1 <= mean_factor <= max_factor",
     [{"mean_factor": 0.5, "max_factor": 2.0}, {"mean_factor": 2.5, "max_factor": 2.0}]),
    (knapsack, "mean_n must be a whole number of at least 2", each("mean_n", 1)),
    (knapsack, "least must be", each("least", 0)),
    (knapsack, "most must be a whole number of at least 4", each("most", 3)),
    (knapsack, "sure must be in", each("sure", 1.0)),
    (price, "latency must be pairs", each("latency", *LATENCIES)),
    (price, "latency falls from 0.2 s per token at 1 rollouts to 0.1 s at 8", each("latency", ((1, 0.2), (8, 0.1)))),
    (price, "max_factor must be at least 1", each("max_factor", 0.5)),
    (price, "least must be a whole number of at least 1, got 0", each("least", 0)),
    # stops
    (tail, "longest must be", each("longest", -1)),
    (tail, "solved must be", each("solved", 0, 1.1)),
    (tail, "share must be", [{"share": 0}, {"solved": 0.5, "share": 1.5}]),
    # recipes
    (changed, "quarantine_after must be", each("quarantine_after", 0, 256, 1.5)),
    (replay, "rows must be a whole number of at least 1", each("rows", 0, 1.5)),
    (replay, "times must be a whole number of at least 1", each("times", 0)),
    (replay, "max_staleness must be a whole number of at least 1", each("max_staleness", 0)),
    (replay, "above must be a number, got nan", each("above", NAN)),
    (Gate, r"most must be a share of tokens in \[0, 1\]", each("most", -0.1, 1.1, NAN)),
    (partial(Gate, most=0.5), "pause must be a whole number of at least 0", each("pause", -1, 0.5)),
    (recipes.grpo, r"replay_moved must be a share of tokens in \[0, 1\], or None", each("replay_moved", -0.1, 1.1, NAN)),
    (recipes.reinforce, "replay_moved=0.1 needs replay, the number of rows", each("replay_moved", 0.1)),
    (recipes.reinforce, "replay_pause must be a whole number of at least 0", each("replay_pause", -1)),
    (recipes.cgrpo, "at least two numbers of rollouts, so that", each("sizes_S", (2,))),
    (recipes.cgrpo, "sizes_S must be increasing", each("sizes_S", (4, 4))),
    (darts, r"least must be .* of at least 4 \(4 rollouts of each group are trained on\), got", each("least", 3)),
    (darts, "least=7 is above the 6 rollouts that a group has on average", each("least", 7)),
    (darts, "longest_by='size' needs a recipe that trains on longest rollouts", [{"longest_by": "size", "tail": "none"}]),
    (darts, "longest_by='size' needs .* got longest=0", [{"longest_by": "size", "longest": 0}]),
    (darts, "longest_by must be one of all, size, got 'length'", each("longest_by", "length")),
    (darts, "solved must be a success rate in", [{"tail": "sampled", "solved": 1.5}]),
    (darts, 'solved needs tail="sampled"', [{"longest_by": "size", "solved": 0.9}]),
    (darts, "lengths_of must be one of all, trained, got 'rows'", each("lengths_of", "rows")),
    (darts, "unseen must be one of batch, recorded, got 'all'", each("unseen", "all")),
    (darts, "latency predicts .* new prompts .*, got unseen", [{"unseen": "recorded", "latency": ((1, 1.0),)}]),
    (darts, "latency predicts the lengths of all .*, got", [{"lengths_of": "trained", "latency": ((1, 1.0),)}]),
    (recipes.dr_grpo, r"n must be .* at least 2 \(so that there is a mean to compare with\), got 1", each("n", 1)),
    (recipes.foresight, "exponent must be None", each("exponent", -1)),
    (recipes.foresight, r"floor must be in \[0, 1\]", each("floor", 2)),
    (recipes.foresight, "neg must be 0 or more", each("neg", NAN)),
    (recipes.foresight, "replay must be a whole number of at least 0", each("replay", -1)),
    (recipes.foresight, "replay_staleness must be a whole number of at least 1", each("replay_staleness", 0)),
    (recipes.greso, "n must be a whole number of at least 2", each("n", 1)),
    (recipes.greso, "gen_groups must be", each("gen_groups", 0)),
    (recipes.grpo, r"deviation must be population, sample or None .* got 'samples'", each("deviation", "samples")),
    (recipes.knapsack, "mean_n must be a whole number of at least 2", each("n", 1)),
    (recipes.mopps, "expected target in", each("target", 1.0)),
    (pilot_commit, "effective must be one of max_variance, first, got 'last'", [{"n_effective": 1, "effective": "last"}]),
    (pilot_commit, "pilots must be one of as_needed, every_round, got 'always'", each("pilots", "always")),
    (pilot_commit, "n_effective must be a whole number of at least 1", each("n_effective", 0)),
    (pilot_commit, "n_effective must be at most n_pilot=2, got 3", each("n_effective", 3)),
    (recipes.raft, "must be a whole number", each("n", 0.5)),
    (recipes.reinforce, "baseline", each("baseline", "group")),
    (recipes.reinforce, "neg must be 0 or more", each("neg", -1.0)),
    (recipes.reinforce, "must be a whole number of at least 1", each("n", 0)),
    (reinforce_ada, "n must be a whole number of at least 2", each("n", 1)),
    (reinforce_ada, "round_n must be", each("round_n", 0)),
    (reinforce_ada, "rounds must be", each("rounds", 0)),
    (reinforce_ada, "stop must be one of balanced, positive", each("stop", "early")),
    (reinforce_ada, "4 rounds of 2 rollouts give fewer than n=9", [{"n": 9, "round_n": 2, "rounds": 4}]),
    (recipes.rloo, r"n must be .* at least 2 \(so that there are other rollouts to compare with\)", each("n", 1)),
    (recipes.spo, "expected half_way and spread above 0", [*each("half_way", 0), *each("spread", 0)]),
    (recipes.vcrl, "n must be a whole number of at least 2", each("n", 1)),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message", "given"), [(*case[:2], given) for case in WRONG for given in case[2]])
def test_what_is_out_of_range_is_refused_and_what_was_expected_is_said(make, message, given):
    with pytest.raises(ValueError, match=message):
        make(**given)
