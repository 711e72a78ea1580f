"""Methods as values: each function returns a `Recipe`, and `mix` composes two of them.

Every field of a recipe is filled here; change one with `dataclasses.replace`. A recipe is closed: no field copies another,
so that `replace(pilot_commit(...), max_staleness=0)` is `pilot_commit(..., max_staleness=0)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from rollalloc.core.prompt_pool import NEXT_EPOCH, NOW
from rollalloc.core.recipe import Act, Budget, PromoteRule, PromptRule, Recipe, Replay, SizeRule, Stage, at_least
from rollalloc.rules import advantages, intake, judges, predictions, promote, prompts, rows, sizes, stops

_PROMOTE: Mapping[str, PromoteRule] = {
    "top_variance": promote.TopVariance(),
    "random": promote.RandomOrder(),
    "oldest": promote.Oldest(),
    "most_recent": promote.MostRecent(),
}
_MOST_ROUNDS = 1000  # more would fill the memory before anything is said
_QUARANTINE_AFTER = 3  # one visit without a score may be an outage, three are the prompt's own fault


def grpo(groups: int, n: int, deviation: advantages.Deviation | None = None) -> Recipe:
    """GRPO: n rollouts for each of `groups` prompts, all trained on. The baseline.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 1.
        deviation: what advantages are divided by: the "population"'s standard deviation of the group's rewards, or the
            "sample"'s. None: that of what trains: the population's in rollalloc's own trainer, the sample's in TRL and verl.

    Raises:
        ValueError: a number out of its range, or another deviation.
    """
    return Recipe(
        groups=groups,
        stages=(Stage("rollout", sizes.Fixed(n), judges.Complete(), None, promote.Oldest()),),
        prompts=prompts.Shuffled(),
        intake=intake.Fill(),
        rows=rows.Everything(),
        advantage=advantages.OverGroup(advantages.kernel_of(deviation)),
        max_staleness=0,
        max_candidates=None,
        budget=Budget(),
        quarantine_after=_QUARANTINE_AFTER,
    )


def reinforce(
    groups: int,
    n: int = 1,
    baseline: Literal["batch", "running"] = "batch",
    neg: float = 0.1,
    replay: int = 0,
    replay_staleness: int = 12,
) -> Recipe:
    """REINFORCE: one rollout for each of many prompts, and one baseline for all of them. The plainest estimator there is.

        A = r - b, times `neg` where that is below 0

    Williams 1992. At the price of `grpo(groups // n, n)` it sees n times as many prompts, and no rollout is spent on a
    baseline of its prompt's own.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 1.
        baseline: "batch": the mean reward of the batch's other rollouts; "running": the mean of all rewards so far, the
            newest counting most, and the batch's where a prompt was drawn before the first reward.
        neg: weight of what did worse than the baseline, 0 or more; at 1 runs fell below where they began.
        replay: as for `foresight`.
        replay_staleness: as for `foresight`.

    Raises:
        ValueError: a number out of its range, or another baseline.
    """
    _one_of("baseline", baseline, ("batch", "running"))
    base = replace(grpo(groups, n), replay=_replay_of(replay, replay_staleness))
    prompts = predictions.RunningMean() if baseline == "running" else base.prompts
    return replace(base, prompts=prompts, advantage=advantages.Rewards(), over_batch=advantages.BatchMean(neg))


def rloo(groups: int, n: int) -> Recipe:
    """RLOO: n rollouts per prompt, each against the mean of the others of its prompt. arXiv 2402.14740.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 2.

    Raises:
        ValueError: a number out of its range.
    """
    at_least("n", n, 2, "a rollout alone has no others")
    return replace(grpo(groups, n), advantage=advantages.OverGroup(advantages.rloo))


def dr_grpo(groups: int, n: int) -> Recipe:
    """Dr. GRPO: n rollouts per prompt, each against the group's mean, not divided by its deviation. arXiv 2503.20783.

    The paper's other half, a loss that is not divided by a rollout's length, is the trainer's: `aggregation="dr_grpo"`
    (`loss_type="dr_grpo"` in TRL).

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 2.

    Raises:
        ValueError: a number out of its range.
    """
    at_least("n", n, 2, "a rollout alone is its own mean")
    return replace(grpo(groups, n), advantage=advantages.OverGroup(advantages.dr_grpo))


def raft(groups: int, n: int = 1) -> Recipe:
    """RAFT: only what was rewarded is learned from, A = max(r, 0). arXiv 2304.06767, as in 2504.11343.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 1.

    Raises:
        ValueError: a number out of its range.
    """
    return replace(grpo(groups, n), advantage=advantages.Successes())


def mopps(groups: int, n: int, target: float = 0.5, decay: float = 0.5, pool: int = 8) -> Recipe:
    """MoPPS: prompts whose success rate, drawn from what is known of each, lies nearest to a target. arXiv 2507.04632.

        rate ~ Beta(α, β);  after s successes in n rollouts  α ← λα + (1 - λ)α₀ + s,  β ← λβ + (1 - λ)β₀ + n - s

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 1.
        target: the success rate looked for, in (0, 1).
        decay: λ in [0, 1]; the past fades by it at every visit.
        pool: candidates for each prompt drawn, at random, at least 1.

    Raises:
        ValueError: a number out of its range.
    """
    base = grpo(groups, n)
    return replace(
        base,
        stages=(replace(base.stages[0], judge=judges.Complete(NOW)),),
        prompts=prompts.Posterior(target=target, decay=decay, pool=pool),
    )


def spo(groups: int, n: int = 1, half_way: float = 0.06, spread: float = 0.05) -> Recipe:
    """SPO: each prompt's tracked success rate is its baseline, advantages are normalised over the batch. arXiv 2509.13232.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 1.
        half_way: how far, in nats per token, the weights move until half of a prompt's record is forgotten; above 0.
        spread: share of every prompt in the draw ∝ √(v(1 - v)) + spread; above 0.

    Raises:
        ValueError: a number out of its range.
    """
    base = grpo(groups, n)
    return replace(
        base,
        stages=(replace(base.stages[0], judge=judges.Complete(NOW)),),
        prompts=predictions.Tracker(half_way=half_way, spread=spread),
        advantage=advantages.AgainstBaseline(),
        over_batch=advantages.BatchNormalised(),
    )


def foresight(
    groups: int,
    n: int = 1,
    exponent: float | None = 3.0,
    neg: float = 0.1,
    floor: float = 0.1,
    once: bool = True,
    replay: int = 0,
    replay_staleness: int = 12,
    weigh_draw: float | None = None,
) -> Recipe:
    """Foresight: each prompt's success rate is predicted before it is paid for; it is the baseline, and says what to draw.

        prompts drawn ∝ p̂(1 - p̂)^exponent, `floor` of them uniformly;  A = r - b(p̂), times `neg` where that is below 0

    Ours; see docs/foresight.md. What the predictor knows are the table's features, each prompt's own record, and the mean.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 1.
        exponent: the larger, the more hard prompts; None: drawn uniformly, once an epoch, only the baseline is predicted.
        neg: weight of what did worse than expected, 0 or more.
        floor: share of uniform draws, in [0, 1].
        once: no prompt is drawn a second time before all were; False: each may come again at once.
        replay: rows of earlier batches, of rollouts that did better than expected, trained on again in each batch, at most.
        replay_staleness: updates of the weights after which they are not, at least 1.
        weigh_draw: each rollout counts for the inverse of its prompt's sampling ratio, at most for this, 1 or more, so
            that prompts count as if they were drawn uniformly; None: each counts once.

    Raises:
        ValueError: a number out of its range.
    """
    base = grpo(groups, n)
    return replace(
        base,
        stages=(replace(base.stages[0], judge=judges.Complete(NEXT_EPOCH if once or exponent is None else NOW)),),
        prompts=predictions.Foresight(exponent, floor),
        rows=rows.Everything() if weigh_draw is None else rows.AsIfUniform(weigh_draw),
        advantage=advantages.AgainstBaseline(neg),
        replay=_replay_of(replay, replay_staleness),
    )


def dapo(
    groups: int,
    n: int,
    gen_groups: int,
    surplus: Literal["discard", "carry"] = "discard",
    max_candidates: int | None = None,
    deviation: advantages.Deviation | None = None,
) -> Recipe:
    """DAPO's dynamic sampling: keep generating until `groups` groups have rewards that differ. arXiv 2503.14476.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 2.
        gen_groups: prompts generated at a time, at least 1.
        surplus: what becomes of more such groups than needed: "discard" as published, or "carry" into the next batch.
        max_candidates: prompts tried for one batch at most; then it is short. None: no limit.
        deviation: as for `grpo`.

    Raises:
        ValueError: a number out of its range.
    """
    at_least("n", n, 2, "the rewards of one rollout cannot differ")
    at_least("gen_groups", gen_groups, 1)
    _one_of("surplus", surplus, ("discard", "carry"))
    base = grpo(groups, n, deviation)
    return replace(
        base,
        stages=(replace(base.stages[0], judge=judges.NonzeroVariance()),),
        intake=intake.KeepInFlight(gen_groups),
        max_staleness=1 if surplus == "carry" else 0,
        max_candidates=max_candidates,
    )


def greso(
    groups: int,
    n: int,
    gen_groups: int,
    zero_share: float = 0.25,
    max_candidates: int | None = None,
    deviation: advantages.Deviation | None = None,
) -> Recipe:
    """GRESO: DAPO that passes over prompts which taught nothing when last visited, before any rollout. arXiv 2506.02177.

        drawn at its turn with probability max(p^z, 0.01);  z: its last visits in a row that were all solved, or all failed

    and, once it is known how many prompts teach, as many are generated at a time as should fill the batch, with a quarter to
    spare.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 2.
        gen_groups: prompts generated at a time at most, at least 1.
        zero_share: share of prompts without variance that is aimed at, by adapting p, in (0, 1).
        max_candidates: as for `dapo`.
        deviation: as for `grpo`.

    Raises:
        ValueError: a number out of its range.
    """
    return replace(
        dapo(groups, n, gen_groups, max_candidates=max_candidates, deviation=deviation),
        prompts=prompts.Selective(zero_share),
        intake=intake.Estimated(gen_groups),
    )


def knapsack(
    groups: int,
    n: int,
    least: int = 2,
    most: int = 128,
    deviation: advantages.Deviation | None = None,
) -> Recipe:
    """Knapsack RL: GRPO with n rollouts per prompt on average, most where they are worth most. arXiv 2509.25849.

        maximise Σ (1 - p^N - (1 - p)^N) · p (1 - p)²;  p: the prompt's success rate at its last visit

    Mixed with a method that expects a success rate of each prompt, `foresight` or `spo`, it allocates by that.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt on average, at least `least`; in its first visit exactly so many.
        least: rollouts per prompt at least, 1 or more; what solved ones get.
        most: rollouts per prompt at most, at least n.
        deviation: as for `grpo`.

    Raises:
        ValueError: a number out of its range.
    """
    size = sizes.Knapsack(n, least, most)
    base = grpo(groups, n, deviation)
    return replace(base, stages=(replace(base.stages[0], size=size),), prompts=predictions.LastVisit())


def reinforce_ada(
    groups: int,
    n: int,
    round_n: int = 8,
    rounds: int = 4,
    stop: Literal["balanced", "positive"] = "balanced",
) -> Recipe:
    """Reinforce-Ada: rollouts in rounds until a prompt has successes and failures, n of which are trained. arXiv 2510.04996.

        A = r - mean of all rollouts of the prompt, whichever are trained on

    n rows, half of them right and half wrong where there are as many. A prompt that has not got there after the last round
    is trained on with what it has.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts trained on of each prompt, at least 2.
        round_n: rollouts per round, at least 1.
        rounds: at most, from 1 to 1,000; together they have at least n rollouts.
        stop: a prompt has enough with half of n right and the rest wrong ("balanced"), or with one right ("positive").

    Raises:
        ValueError: a number out of its range, or fewer rollouts than are trained on.
    """
    at_least("n", n, 2, "half of the rows are successes")
    at_least("round_n", round_n, 1)
    at_least("rounds", rounds, 1)
    if rounds > _MOST_ROUNDS:
        raise ValueError(f"rounds must be at most {_MOST_ROUNDS}, for each is a stage of the recipe, got {rounds}")
    _one_of("stop", stop, ("balanced", "positive"))
    if round_n * rounds < n:
        raise ValueError(f"{rounds} rounds of {round_n} rollouts are fewer than the n={n} to train on")
    size, enough = sizes.Fixed(round_n), judges.Collected(half=stop == "balanced")
    stages = tuple(Stage(f"round {at + 1}", size, enough, None, promote.Oldest()) for at in range(rounds - 1))
    base = grpo(groups, round_n)
    return replace(
        base,
        stages=(*stages, replace(base.stages[0], name=f"round {rounds}")),
        rows=rows.Balanced(n),
        advantage=advantages.OverGroup(advantages.dr_grpo),
    )


def vcrl(
    groups: int,
    n: int,
    kappa: float = 0.8,
    kappa_first: float = 0.3,
    first: int = 20,
    replays: int = 2,
    max_candidates: int | None = None,
    deviation: advantages.Deviation | None = None,
) -> Recipe:
    """VCRL: groups whose metrics vary enough are trained on, prompts that did so replace the others. arXiv 2509.19803.

        trained on where  G Σ (m_i - mean)² / (⌊G/2⌋ ⌈G/2⌉) ≥ kappa

    The prompts that replace them are rolled out anew.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt, at least 2.
        kappa: in (0, 1].
        kappa_first: instead, in the first `first` updates of the weights, in (0, 1].
        first: 0 or more.
        replays: times that a prompt replaces another one after it was trained on, at least 1.
        max_candidates: as for `dapo`.
        deviation: as for `grpo`.

    Raises:
        ValueError: a number out of its range.
    """
    at_least("n", n, 2, "one rollout does not vary")
    base = grpo(groups, n, deviation)
    return replace(
        base,
        stages=(replace(base.stages[0], judge=judges.Varied(kappa, kappa_first, first)),),
        prompts=prompts.Banked(replays),
        max_candidates=max_candidates,
    )


def cgrpo(
    groups: int,
    sizes_S: tuple[int, ...] = (2, 4, 8, 16, 32),
    delta: float | None = None,
    visits: int = 200,
    deviation: advantages.Deviation | None = None,
) -> Recipe:
    """C-GRPO: growing numbers of rollouts, until a success comes as early as a conformal bound says. trl-cgrpo 0.2.0.

        a prompt stops at k rollouts where its first success, at place j, has  j / k ≤ q̂_k
        q̂_k: the ⌈(n + 1)(1 - delta)⌉-th smallest j / k of the last n visits, 1 where there was no success among the first k

    Its score "first_success". The one by answers ("aps") needs their text, which no rule sees.

    Args:
        groups: prompts in a batch, at least 1.
        sizes_S: rollouts a prompt has after each stage, growing; two stages at least.
        delta: in (0, 1); None: the share of visits without a success, plus 0.05.
        visits: n at most, at least 1.
        deviation: as for `grpo`.

    Raises:
        ValueError: a number out of its range.
    """
    more = _increments(sizes_S)
    if len(more) < 2:
        raise ValueError(f"sizes_S must have two numbers of rollouts at least, to stop at the first, got {sizes_S}")
    last = len(more) - 1
    stages = tuple(
        Stage(
            f"to {sizes_S[at]}",
            sizes.Fixed(size),
            judges.Resolved(delta) if at < last else judges.Complete(),
            None,
            promote.Oldest(),
        )
        for at, size in enumerate(more)
    )
    return replace(grpo(groups, sizes_S[-1], deviation), stages=stages, prompts=prompts.FirstSuccesses(visits))


def pilot_commit(
    groups: int,
    n_pilot: int,
    n_commit: int,
    gen_groups: int,
    p_lower: float = 0.125,
    p_upper: float = 0.25,
    p_solve: float = 1.0,
    max_staleness: int = 4,
    promote: Literal["top_variance", "random", "oldest", "most_recent"] = "top_variance",
    max_candidates: int | None = None,
    reprobe_every: int | None = None,
    deviation: advantages.Deviation | None = None,
) -> Recipe:
    """Pilot-Commit: a few pilots estimate each prompt, the rest goes to prompts with variance. arXiv 2605.26606.

    Pilots and commits of a prompt train as one group of n_pilot + n_commit. Where staleness is allowed, the pilots for the
    next batch are generated together with the commits for this one.

    Args:
        groups: prompts in a batch, at least 1.
        n_pilot: rollouts that estimate a prompt, at least 1.
        n_commit: rollouts for a prompt in the window, at least 1.
        gen_groups: prompts piloted at a time, at least 1.
        p_lower: pilot means below it are deferred to the next epoch.
        p_upper: pilot means above 1 - p_upper are skipped until the next epoch.
        p_solve: pilot means of at least this evict the prompt; above 1 none is evicted.
        max_staleness: updates of the weights after which a pilot is too old to train on.
        promote: which prompts in the window get commits when there are more than needed: "top_variance", "random", "oldest"
            or "most_recent", by their pilots. The newest first let the others grow old until their pilots are stale.
        max_candidates: prompts piloted for one batch at most; then it is short. None: no limit.
        reprobe_every: epochs after which an evicted prompt is piloted again; None: never.
        deviation: as for `grpo`.

    Raises:
        ValueError: a number out of its range, or an empty window.
    """
    at_least("n_pilot", n_pilot, 1, "a prompt without pilots has no estimate")
    at_least("n_commit", n_commit, 1)
    at_least("gen_groups", gen_groups, 1)
    _one_of("promote", promote, tuple(_PROMOTE))
    base = grpo(groups, n_pilot, deviation)
    window = judges.Band(p_lower, p_upper, p_solve, reprobe_every)
    return replace(
        base,
        stages=(
            Stage("pilot", sizes.Fixed(n_pilot), window, None, _PROMOTE[promote]),
            replace(base.stages[0], name="commit", size=sizes.Fixed(n_commit)),
        ),
        intake=intake.KeepInFlight(gen_groups, ahead=True),
        max_staleness=max_staleness,
        max_candidates=max_candidates,
    )


def pods(
    groups: int,
    n: int,
    m: int,
    rule: Literal["max_variance", "max_reward", "random", "percentile"] = "max_variance",
) -> Recipe:
    """PODS: roll out n, train on the m of largest reward variance, statistics after the choice. arXiv 2504.13818.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt.
        m: rollouts trained on, in [1, n].
        rule: which m: "max_variance", or one of those that the paper compares it with, "max_reward", "random" and
            "percentile". Under "max_reward" a prompt with m or more right answers of n teaches nothing.

    Raises:
        ValueError: m out of its range, or a rule that there is not.
    """
    at_least("n", n, 1)
    at_least("m", m, 1)
    _one_of("rule", rule, tuple(_row_rules(1)))
    if m > n:
        raise ValueError(f"m must be at most n={n}, the rollouts there are to choose from, got {m}")
    return replace(grpo(groups, n), rows=_row_rules(m)[rule], advantage=advantages.OverChosen(advantages.pods))


def darts(
    groups: int,
    shortest: int,
    longest: int,
    max_redundancy: float = 2.0,
    tail: Literal["exact", "sampled", "none"] = "exact",
    deviation: advantages.Deviation | None = None,
    latency: tuple[tuple[int, float], ...] | None = None,
    solved: float | None = None,
    share: float = 0.1,
) -> Recipe:
    """DARTS: redundant rollouts, train on the shortest and the longest, stop what is not needed. arXiv 2605.30859.

    Args:
        groups: prompts in a batch, at least 1.
        shortest: K, at least 1.
        longest: L, 0 or more. K + L rollouts of each group are trained on.
        max_redundancy: rollouts for each one trained on, at most; half of the redundancy is given on average, most to
            prompts whose lengths vary most. At least 1.
        tail: "exact" lets every rollout end, since any that runs may become the longest. "sampled" keeps L random ones of
            those running once K ended, stops the rest, and weights each of the L by the inverse of that probability: the
            longest are no longer sought, a random late one stands for all late ones. "none", for prompts that are nearly
            solved, trains on the K + L shortest and stops the rest as soon as they are there: only short answers are learned
            from.
        deviation: as for `grpo`.
        latency: seconds for a token by how many rollouts are decoded at once, (1, 0.002), (64, 0.004), ...: how many
            rollouts there are in all is then what makes generation shortest; see `sizes.Priced`. None: half the redundancy.
        solved: with tail="sampled", prompts that succeeded so often in the visits before, or of which a method that this is
            mixed with expects it before the first, have no tail, but for `share` of their visits, which stand for all; in
            (0, 1]. None: all have one.
        share: in (0, 1].

    Raises:
        ValueError: a number out of its range.
    """
    at_least("shortest", shortest, 1)
    at_least("longest", longest, 0)
    _one_of("tail", tail, ("exact", "sampled", "none"))
    if solved is not None and tail != "sampled":
        raise ValueError(
            f'solved leaves out the tail of a sampled one only; give tail="sampled", got {tail!r}, or no solved'
        )
    size = sizes.Redundant(mean_factor=(1 + max_redundancy) / 2, max_factor=max_redundancy)
    if latency is not None:
        size = sizes.Priced(max_redundancy, latency)
    if tail == "none":
        shortest, longest = shortest + longest, 0
    base = grpo(groups, shortest + longest)
    stop = None if tail == "exact" else stops.SampledTail(solved, share)
    return replace(
        base,
        stages=(replace(base.stages[0], size=size, stop=stop),),
        rows=rows.ShortestAndLongest(shortest, longest),
        advantage=advantages.OverChosen(advantages.kernel_of(deviation)),
    )


def racing(
    groups: int,
    sizes_S: tuple[int, ...],
    gen_groups: int,
    max_staleness: int = 0,
    deviation: advantages.Deviation | None = None,
) -> Recipe:
    """Racing: a prompt gets more rollouts, stage by stage, while its results so far are mixed.

    A stage's verdict falls as soon as two results differ, without waiting for the rest. So in an asynchronous run what is
    in a batch depends on what finished first.

    Args:
        groups: prompts in a batch, at least 1.
        sizes_S: rollouts a prompt has after each stage, growing, e.g. (4, 8, 16).
        gen_groups: prompts in the first stage at a time, at least 1.
        max_staleness: updates of the weights after which a rollout is too old to train on.
        deviation: as for `grpo`.

    Raises:
        ValueError: a number out of its range.
    """
    at_least("gen_groups", gen_groups, 1)
    more = _increments(sizes_S)
    last = len(more) - 1
    stages = tuple(
        Stage(
            f"to {sizes_S[index]}",
            sizes.Fixed(size),
            judges.Complete()
            if index == last and last
            else judges.NonzeroVariance(Act.TRAIN if index == last else Act.NEXT, early=index < last),
            None,
            promote.Oldest(),
        )
        for index, size in enumerate(more)
    )
    return replace(
        grpo(groups, sizes_S[-1], deviation),
        stages=stages,
        intake=intake.KeepInFlight(gen_groups),
        max_staleness=max_staleness,
    )


Side = Literal["first", "second"]

# The slots that `mix` joins and, for each, what passes for saying nothing there. Of the stages it is those of the last one.
_PLAIN: Mapping[str, Any] = {
    "prompts": prompts.Shuffled(),
    "intake": intake.Fill(),
    "rows": rows.Everything(),
    "max_staleness": 0,
    "max_candidates": None,
    "budget": Budget(),
    "quarantine_after": _QUARANTINE_AFTER,
    "over_batch": None,
    "replay": None,
}
_PLAIN_STAGE: Mapping[str, Any] = {"judge": judges.Complete(), "stop": None, "promote": promote.Oldest()}
SLOTS = (*_PLAIN, "advantage", "size", *_PLAIN_STAGE)


def mix(first: Recipe, second: Recipe, take: Mapping[str, Side] | None = None) -> Recipe:
    """Both methods at once: each slot from the one of the two that says something there.

    | slot | what says nothing |
    |---|---|
    | `prompts` | in random order, each once an epoch; Knapsack's record beside a method that expects a success rate |
    | `intake` | just as many groups as the batch needs |
    | `rows` | all of a group |
    | `max_staleness`, `max_candidates`, `budget`, `over_batch`, `replay` | 0, or none |
    | `quarantine_after` | 3 |
    | `advantage` | GRPO's kernel; what is over the chosen rows goes with any other kernel |
    | `size` | a fixed number, beside a method that has its own way to size groups; and beside one of several stages |
    | `judge` | every group is trained on, and its prompt comes back in the next epoch |
    | `stop`, `promote` | none, the oldest |

    `mix(pilot_commit(...), pods(...))` takes the stages of the first and the rows *and* the advantage of the second;
    `mix(dapo(...), darts(...))` takes the judge and the intake of the first, the sizes, the stop and the rows of the second.
    A single stage of one method applies to the last stage of the other, whose judges say when a prompt comes back: under
    `mix(pilot_commit(...), foresight(...))` each prompt once an epoch, in foresight's order. What is known of a prompt
    without its other rollouts, foresight's advantage say, is not replaced by PODS's or DARTS's over the chosen rows: of
    those methods only the rows, the sizes and the stops are taken then.

    Where both say something else, they cannot be joined without your word: `mix(pilot_commit(...), darts(...),
    take={"size": "first"})` has Pilot-Commit's numbers of rollouts, and DARTS's rows.

    Args:
        first: says how many rollouts a prompt gets where both only fix a number.
        second: another method with the same number of groups.
        take: which of the two holds in a slot of the table, whatever the other one says; by default none is named.

    Raises:
        ValueError: batches of different size, two methods of several stages, a slot in which both say something else, a
            slot that there is not: it names the slot and the remedy; or a mixture that could never train: fewer rollouts
            than are chosen, or one alone that is to differ from itself.
    """
    take = _checked_take(take)
    if first.groups != second.groups:
        raise ValueError(
            f"both recipes must train on the same number of groups, got {first.groups} and {second.groups}; give one of "
            f"them the other's, dataclasses.replace(recipe, groups={first.groups})"
        )
    if len(first.stages) < len(second.stages):
        first, second = second, first
        take = {slot: "second" if side == "first" else "first" for slot, side in take.items()}
    *before, last = first.stages
    single, *others = second.stages
    if others:
        raise ValueError(
            f"both recipes have several stages, {_names(first)} and {_names(second)}; write one recipe with both"
        )
    mixed: dict[str, Any] = {
        slot: _either(slot, getattr(first, slot), getattr(second, slot), plain, take)
        for slot, plain in _PLAIN.items()
        if slot not in ("prompts", "intake")
    }
    mixed["prompts"] = _mix_prompts(first.prompts, second.prompts, take)
    mixed["intake"] = _mix_intakes(first.intake, second.intake, take)
    mixed["advantage"] = _mix_advantages(first.advantage, second.advantage, take)
    last = _mix_stages(last, single, take, staged=bool(before))
    recipe = Recipe(groups=first.groups, stages=(*before, last), **mixed)
    _refuse_too_few_rollouts(recipe)
    return recipe


def _mix_intakes(first: Any, second: Any, take: Mapping[str, Side]) -> Any:
    # To order ahead is for several stages, and the first recipe is the one that has them.
    both = isinstance(first, intake.KeepInFlight) and isinstance(second, intake.KeepInFlight)
    if both and first.groups == second.groups and "intake" not in take:
        return first
    return _either("intake", first, second, _PLAIN["intake"], take)


def _checked_take(take: Mapping[str, Side] | None) -> Mapping[str, Side]:
    for slot, side in (take or {}).items():
        if slot not in SLOTS:
            raise ValueError(f"take names the slot {slot!r}; there are {', '.join(SLOTS)}")
        _one_of(f"take[{slot!r}]", side, ("first", "second"))
    return take or {}


def _mix_stages(first: Stage, second: Stage, take: Mapping[str, Side], *, staged: bool) -> Stage:
    made: dict[str, Any] = {
        slot: _either(slot, getattr(first, slot), getattr(second, slot), plain, take)
        for slot, plain in _PLAIN_STAGE.items()
        # A judge that trains on all says nothing but when a prompt comes back, which the stages before have a mind of.
        if slot in take or not (staged and slot == "judge" and isinstance(second.judge, judges.Complete))
    }
    return replace(first, size=_mix_sizes(first.size, second.size, take, staged), **made)


def _mix_sizes(first: SizeRule, second: SizeRule, take: Mapping[str, Side], staged: bool) -> SizeRule:
    # A number of rollouts is not a method: a way to size groups goes before it, but not before the number of a last stage,
    # which was chosen with those of the stages before.
    if "size" not in take and isinstance(second, sizes.Fixed):
        return first
    if "size" not in take and isinstance(first, sizes.Fixed) and not staged:
        return second
    return _either("size", first, second, None, take)


def _mix_prompts(first: PromptRule, second: PromptRule, take: Mapping[str, Side]) -> PromptRule:
    # What Knapsack RL expects of a prompt, how it went last, gives way to a method that has expectations of its own.
    others = [rule for rule in (first, second) if rule != predictions.LastVisit()]
    if "prompts" not in take and len(others) == 1 and getattr(others[0], "predicts", False):
        return others[0]
    return _either("prompts", first, second, _PLAIN["prompts"], take)


def _mix_advantages(first: Any, second: Any, take: Mapping[str, Side]) -> Any:
    """Over the chosen rows where one of the two is, with the kernel that is not the plain one.

    A rule that compares no rollouts of a prompt goes before the statistics that PODS and DARTS bring along, but not before
    a kernel that the user named.
    """
    plain = advantages.OverGroup(advantages.grpo)
    along = (advantages.OverChosen(advantages.grpo), advantages.OverChosen(advantages.pods))
    over = {type(rule) for rule in (first, second)}
    if "advantage" in take:
        return _either("advantage", first, second, plain, take)
    if not over <= {advantages.OverGroup, advantages.OverChosen}:
        others = [rule for rule in (first, second) if rule not in along]
        return others[0] if len(others) == 1 else _either("advantage", first, second, plain, take)
    kind = advantages.OverChosen if advantages.OverChosen in over else advantages.OverGroup
    return kind(_either("advantage", first.kernel, second.kernel, plain.kernel, take))


def _either(slot: str, first: Any, second: Any, plain: Any, take: Mapping[str, Side]) -> Any:
    """What holds in a slot: what the user takes, else the one of the two that is not the plain one."""
    if slot in take:
        return first if take[slot] == "first" else second
    if first == second or second == plain:
        return first
    if first == plain:
        return second
    said = [getattr(value, "__name__", repr(value)) for value in (first, second)]
    raise ValueError(
        f"both recipes change {slot}: {said[0]} and {said[1]}; name the one that holds, 'first' or 'second', in mix(..., "
        f"take={{{slot!r}: ...}}), or make one plain with dataclasses.replace before mixing"
    )


def _refuse_too_few_rollouts(recipe: Recipe) -> None:
    total, m = 0, recipe.group_rows
    for stage in recipe.stages:
        if not isinstance(stage.size, sizes.Fixed):
            return
        total += stage.size.n
        if total < 2 and isinstance(stage.judge, judges.NonzeroVariance):
            raise ValueError(
                f"{stage.judge!r} waits for results that differ, and a group has {total} rollout by then; give the recipe "
                "that says how many, the first of the two, n of at least 2"
            )
    if m is not None and m > total:
        raise ValueError(
            f"{recipe.rows!r} trains on {m} rollouts but the stages give only {total}; give the recipe that says how many, "
            f"the first of the two, n of at least {m}"
        )


def _replay_of(rows: int, staleness: int) -> Replay | None:
    """Rows that did better than expected, as often as they are young enough; None for none."""
    at_least("replay", rows, 0)
    at_least("replay_staleness", staleness, 1)
    return Replay(rows=rows, max_staleness=staleness) if rows else None


def _increments(sizes_S: tuple[int, ...]) -> list[int]:
    """Rollouts that each stage adds to those of the stages before."""
    more = [after - before for before, after in zip((0, *sizes_S), sizes_S, strict=False)]
    if not more or min(more) < 1:
        raise ValueError(f"sizes_S must be growing numbers of rollouts, got {sizes_S}")
    return more


def _row_rules(m: int) -> dict[str, Any]:
    return {
        "max_variance": rows.MaxVariance(m),
        "max_reward": rows.MaxReward(m),
        "random": rows.Random(m),
        "percentile": rows.Percentile(m),
    }


def _names(recipe: Recipe) -> list[str]:
    return [stage.name for stage in recipe.stages]


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
