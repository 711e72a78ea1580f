"""Rows and sizes: how many rollouts a prompt gets, and which of them are trained on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from rollalloc.core.recipe import Recipe, at_least, one_of
from rollalloc.core.rule import RowRule, StopRule
from rollalloc.recipes.groups import grpo
from rollalloc.recipes.shapes import sized
from rollalloc.rules import advantages, predictions, rows, sizes, stops


@sized
def knapsack(
    groups: int = 16,
    n: int = 4,
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
    """
    size = sizes.Knapsack(n, least, most)
    base = grpo(groups, n, deviation)
    return replace(base, stages=(replace(base.stages[0], size=size),), prompts=predictions.LastVisit())


@sized
def pods(
    groups: int = 16,
    n: int | None = None,
    m: int | None = None,
    rule: Literal["max_variance", "max_reward", "random", "percentile"] = "max_variance",
) -> Recipe:
    """PODS: roll out n, train on the m of largest reward variance, statistics after the choice. arXiv 2504.13818.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts per prompt; None: four times m, or 16.
        m: rollouts trained on, in [1, n]; None: a quarter of n.
        rule: which m: "max_variance", or one of those that the paper compares it with, "max_reward", "random" and
            "percentile". Under "max_reward" a prompt with m or more right answers of n teaches nothing.

    Raises:
        ValueError: m out of its range, or a rule that there is not.
    """
    if m is not None:
        at_least("m", m, 1)
    if n is None:
        n = 16 if m is None else 4 * m
    at_least("n", n, 1)
    m = max(1, n // 4) if m is None else m
    one_of("rule", rule, tuple(_row_rules(1)))
    if m > n:
        raise ValueError(f"m must be at most n={n}, the rollouts there are to choose from, got {m}")
    return replace(grpo(groups, n), rows=_row_rules(m)[rule], advantage=advantages.OverChosen(advantages.pods))


@sized
def darts(
    groups: int = 16,
    shortest: int = 7,
    longest: int = 1,
    max_redundancy: float = 2.0,
    tail: Literal["exact", "sampled", "none"] = "exact",
    deviation: advantages.Deviation | None = None,
    latency: tuple[tuple[int, float], ...] | Literal["measured"] | None = None,
    solved: float | None = None,
    share: float = 0.1,
    least: int | None = None,
    normalise: bool = False,
    longest_by: Literal["all", "size", "record"] = "all",
    price: float | None = None,
) -> Recipe:
    """DARTS: redundant rollouts, train on the shortest and the longest, stop what is not needed. arXiv 2605.30859.

    Args:
        groups: prompts in a batch, at least 1.
        shortest: K, at least 1.
        longest: L, 0 or more. K + L rollouts of each group are trained on.
        max_redundancy: rollouts for each one trained on, at most; half of the redundancy is given on average, most to
            prompts whose lengths vary most. In [1, 1024].
        tail: "exact" lets every rollout end, since any that runs may become the longest. "sampled" keeps L random ones of
            those running once K ended, stops the rest, and weights each of the L by the inverse of that probability: the
            longest are no longer sought, a random late one stands for all late ones. "none", for prompts that are nearly
            solved, trains on the K + L shortest and stops the rest as soon as they are there: only short answers are learned
            from.
        deviation: as for `grpo`.
        latency: seconds for a token by how many rollouts are decoded at once, (1, 0.002), (64, 0.004), ...: how many
            rollouts there are in all is then what makes generation shortest; see `sizes.Priced`. Seconds that fall are
            refused. "measured": those that the engine measures of itself, which the native trainer's asynchronous one
            does; half the redundancy until it has. None: half the redundancy.
        solved: with tail="sampled", prompts that succeeded so often in the visits before, or of which a method that this is
            mixed with expects it before the first, have no tail, but for `share` of their visits, which stand for all; in
            (0, 1]. None: all have one. With longest_by="record" the rate from which a prompt has none, whatever the tail.
        share: in (0, 1].
        least: rollouts of each group at least, in [K + L, (1 + max_redundancy) / 2 · (K + L)]; released: 10 for 8 rows.
            None: K + L.
        normalise: compare how lengths vary by (σ - min) / (max - min) of the groups ordered together, as released, not in
            tokens.
        longest_by: L is the number of "all" prompts; or "size" gives a prompt fewer, none in the end, the more rollouts it
            has, and as many more of the shortest, `rows.LongestBySize`, as released; "record" gives none to prompts that
            succeeded so often as `solved` says and whose lengths vary more than others', `rows.LongestByRecord`. A group
            without a longest is stopped once its rows are there, under tail="exact" too.
        price: with latency, what a batch's seconds count against the worth of more rollouts to choose from, above 0:
            `sizes.Priced`'s λ. None: seconds alone count.

    Raises:
        ValueError: a value out of its range, or two that do not go together.
    """
    at_least("shortest", shortest, 1)
    at_least("longest", longest, 0)
    if least is not None:
        _check_floor(least, shortest + longest, (1 + max_redundancy) / 2)
    if not 1 <= max_redundancy <= sizes.MOST_FACTOR:
        raise ValueError(
            f"max_redundancy: expected rollouts for each one trained on, from 1 to {sizes.MOST_FACTOR}, got {max_redundancy}"
        )
    if price is not None and latency is None:
        raise ValueError("price weighs seconds, which latency says; give latency, or leave price out")
    one_of("tail", tail, ("exact", "sampled", "none"))
    one_of("longest_by", longest_by, ("all", "size", "record"))
    if longest_by != "all" and (tail == "none" or not longest):
        raise ValueError(
            f"longest_by={longest_by!r}: of a recipe that trains on longest rollouts only, got longest={longest} and "
            f"tail={tail!r}; give longest of at least 1 and another tail, or leave longest_by out"
        )
    if longest_by == "record" and solved is None:
        raise ValueError(
            'longest_by="record" needs solved, the success rate from which a prompt has no longest; such as 0.9'
        )
    if solved is not None and tail != "sampled" and longest_by != "record":
        raise ValueError(
            f'solved leaves out the tail of a sampled one only; give tail="sampled", got {tail!r}, or no solved'
        )
    floor = 1 if least is None else least
    size = sizes.Redundant((1 + max_redundancy) / 2, max_redundancy, floor, normalise)
    if latency is not None:
        curve = None if latency == "measured" else latency
        size = sizes.Priced(max_redundancy, curve, price, floor, normalise)
    if tail == "none":
        shortest, longest = shortest + longest, 0
    base = grpo(groups, shortest + longest)
    stop = _stop(tail, solved if longest_by != "record" else None, share, longest_by == "all")
    return replace(
        base,
        stages=(replace(base.stages[0], size=size, stop=stop),),
        rows=_ends(shortest, longest, longest_by, solved),
        advantage=advantages.OverChosen(advantages.kernel_of(deviation)),
    )


def _stop(tail: str, solved: float | None, share: float, same_longest: bool) -> StopRule | None:
    """What is stopped of a group, by its tail; of one without a longest all that is not needed, in any case."""
    if tail != "exact":
        return stops.SampledTail(solved, share)
    return None if same_longest else stops.ShortestOnly()


def _ends(shortest: int, longest: int, longest_by: str, solved: float | None) -> RowRule:
    """The shortest and the longest, with as many of these as all groups have, or each by itself."""
    if longest_by == "size":
        return rows.LongestBySize(shortest, longest)
    if longest_by == "record" and solved is not None:
        return rows.LongestByRecord(shortest, longest, solved)
    return rows.ShortestAndLongest(shortest, longest)


def _check_floor(least: int, rows: int, mean_factor: float) -> None:
    """Refuse a floor of a group's rollouts that is none, or leaves nothing to be given by need."""
    at_least("least", least, rows, f"{rows} rollouts of each group are trained on")
    if least > mean_factor * rows:
        raise ValueError(
            f"least={least} is above the {mean_factor * rows:g} rollouts that a group has on average; give a lower floor, "
            "or a higher max_redundancy"
        )


def _row_rules(m: int) -> dict[str, Any]:
    return {
        "max_variance": rows.MaxVariance(m),
        "max_reward": rows.MaxReward(m),
        "random": rows.Random(m),
        "percentile": rows.Percentile(m),
    }
