"""Pilots: a prompt gets more rollouts stage by stage, by how those before went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from rollalloc.core.recipe import Recipe, Stage, at_least, one_of
from rollalloc.core.rule import Act, PromoteRule
from rollalloc.recipes.groups import batches_ahead, grpo
from rollalloc.recipes.shapes import sized
from rollalloc.rules import advantages, intake, judges, promote, prompts, rows, sizes

_Promote = Literal["top_variance", "random", "oldest", "most_recent"]
_PROMOTE: Mapping[str, PromoteRule] = {
    "top_variance": promote.TopVariance(always=True),
    "random": promote.RandomOrder(),
    "oldest": promote.Oldest(),
    "most_recent": promote.MostRecent(),
}
_IN_WAVES = promote.TopVariance()
_MOST_ROUNDS = 1000  # more would fill the memory before anything is said


@sized
def pilot_commit(
    groups: int = 16,
    n_pilot: int = 4,
    n_commit: int = 12,
    gen_groups: int | None = None,
    p_lower: float = 0.125,
    p_upper: float = 0.25,
    p_solve: float = 0.9,
    max_staleness: int = 4,
    promote: _Promote | None = None,
    pilots: Literal["as_needed", "every_round"] = "as_needed",
    n_effective: int | None = None,
    max_candidates: int | None = None,
    reprobe_every: int | None = 4,
    confidence: float | None = 0.95,
    deviation: advantages.Deviation | None = None,
) -> Recipe:
    """Pilot-Commit: a few pilots estimate each prompt, the rest goes to prompts with variance. arXiv 2605.26606.

    Pilots and commits of a prompt train as one group of n_pilot + n_commit. Where staleness is allowed, the pilots for the
    next batch are generated together with the commits for this one.

    Args:
        groups: prompts in a batch, at least 1.
        n_pilot: rollouts that estimate a prompt, at least 1.
        n_commit: rollouts for a prompt in the window, at least 1.
        gen_groups: prompts piloted at a time, at least 1; None: three times `groups`.
        p_lower: pilot means below it are deferred to the next epoch.
        p_upper: pilot means above 1 - p_upper are skipped until the next epoch.
        p_solve: a prompt is evicted whose pilots' mean is at least this and whose success rate is, with `confidence`, by all
            its rollouts so far; above 1 none is evicted. Published: 1.0, with confidence=None and reprobe_every=None.
        max_staleness: updates of the weights after which a pilot is too old to train on.
        promote: which prompts in the window get commits when there are more than needed: "top_variance", "random", "oldest"
            or "most_recent", by their pilots. The newest first let the others grow old until their pilots are stale. None:
            "top_variance" in waves; where rollouts stream "oldest", since the highest is known only when all pilots are in.
        pilots: "as_needed": none while those that passed suffice for this batch and the next; "every_round": gen_groups new
            prompts beside the commits of each round, as published, and the next round when all of it is over.
        n_effective: pilots of a prompt that are trained on, those of largest variance, in [1, n_pilot]; advantages are then
            over the rows that are. None: all.
        max_candidates: prompts piloted for one batch at most; then it is short. None: no limit.
        reprobe_every: epochs after which an evicted prompt is piloted again, at least 1; None: never.
        confidence: of the lower bound on a prompt's success rate, in (0, 1), `judges.surely_at_least`: .9 at .95 takes 29
            rollouts that are all right, of which one weighs half after every 64 later ones of its prompt. None: the pilots
            of one visit decide, of which two out of two are all right for every fourth prompt of rate .5.
        deviation: as for `grpo`.

    Raises:
        ValueError: a number out of its range, or an empty window.
    """
    at_least("n_pilot", n_pilot, 1, "a prompt without pilots has no estimate")
    at_least("n_commit", n_commit, 1)
    gen_groups = batches_ahead(groups, gen_groups)
    if promote is not None:
        one_of("promote", promote, tuple(_PROMOTE))
    one_of("pilots", pilots, ("as_needed", "every_round"))
    base = grpo(groups, n_pilot, deviation)
    if n_effective is not None:
        at_least("n_effective", n_effective, 1, "without pilots in it a group is the commits alone")
        if n_effective > n_pilot:
            raise ValueError(f"n_effective must be at most n_pilot={n_pilot}, got {n_effective}")
        kernel = advantages.kernel_of(deviation)
        base = replace(base, rows=rows.SubsampledPilots(n_effective), advantage=advantages.OverChosen(kernel))
    window = judges.Band(p_lower, p_upper, p_solve, reprobe_every, confidence)
    return replace(
        base,
        stages=(
            Stage("pilot", sizes.Fixed(n_pilot), window, None, _PROMOTE[promote] if promote else _IN_WAVES),
            replace(base.stages[0], name="commit", size=sizes.Fixed(n_commit)),
        ),
        intake=intake.EveryRound(gen_groups)
        if pilots == "every_round"
        else intake.KeepInFlight(gen_groups, ahead=True),
        max_staleness=max_staleness,
        max_candidates=max_candidates,
    )


@sized
def racing(
    groups: int = 16,
    sizes_S: tuple[int, ...] = (4, 8, 16),
    gen_groups: int | None = None,
    max_staleness: int = 0,
    deviation: advantages.Deviation | None = None,
) -> Recipe:
    """Racing: a prompt gets more rollouts, stage by stage, while its results so far are mixed.

    A stage's verdict falls as soon as two results differ, without waiting for the rest. So in an asynchronous run what is
    in a batch depends on what finished first.

    Args:
        groups: prompts in a batch, at least 1.
        sizes_S: rollouts a prompt has after each stage, growing, e.g. (4, 8, 16).
        gen_groups: prompts in the first stage at a time, at least 1; None: three times `groups`.
        max_staleness: updates of the weights after which a rollout is too old to train on.
        deviation: as for `grpo`.
    """
    gen_groups = batches_ahead(groups, gen_groups)
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


@sized
def cgrpo(
    groups: int = 16,
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


@sized
def reinforce_ada(
    groups: int = 16,
    n: int = 4,
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
    one_of("stop", stop, ("balanced", "positive"))
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


def _increments(sizes_S: tuple[int, ...]) -> list[int]:
    """Rollouts that each stage adds to those of the stages before."""
    more = [after - before for before, after in zip((0, *sizes_S), sizes_S, strict=False)]
    if not more or min(more) < 1:
        raise ValueError(f"sizes_S must be growing numbers of rollouts, got {sizes_S}")
    return more
