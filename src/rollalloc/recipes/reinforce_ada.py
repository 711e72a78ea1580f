"""Reinforce-Ada, arXiv 2510.04996: generate in rounds until a prompt has both successes and failures.

For runs in which many groups of a fixed size are all right or all wrong. Hard and easy prompts get more rollouts.

This is the sequential method of the released code and of the paper's first two versions. A variant in the third version,
based on estimation, is not implemented. The baseline is the mean reward of the prompt. The released code
computes the mean from counts of successes; for rewards of 0 and 1, the result is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from rollalloc.core.group import GroupView
from rollalloc.core.recipe import Recipe, Stage, at_least, one_of
from rollalloc.core.rule import Act, JudgeRule, JudgeTraits, Verdict, View, rows_of
from rollalloc.recipes.grpo import grpo
from rollalloc.recipes.shapes import Sizes, groups_of, sized
from rollalloc.rules import advantages, promote, rows, sizes
from rollalloc.rules.judges import SUCCESS_ABOVE

_MOST_ROUNDS = 1000  # each round is a stage of the recipe; more stages would exhaust the memory


def shape(rows: int = 64, group_rows: int = 4, n: int | None = None) -> Sizes:
    """Rounds of twice the rows of a group, as published (8 for n = 4).

    Args:
        rows: rows of a batch, at least 1.
        group_rows: n, unless the user set it.
        n: rows of a group, if the user set it.
    """
    n = group_rows if n is None else n
    return {"groups": groups_of(rows, group_rows), "n": n, "round_n": 2 * n}


@sized(shape)
def reinforce_ada(
    groups: int = 16,
    n: int = 4,
    round_n: int = 8,
    rounds: int = 4,
    stop: Literal["balanced", "positive"] = "balanced",
) -> Recipe:
    """Reinforce-Ada: generate in rounds until a prompt has successes and failures, train on n. arXiv 2510.04996.

        A_i = r_i - mean reward of all rollouts of the prompt, including those that are not trained on

    1. Generate `round_n` rollouts of each prompt.
    2. If the prompt has enough successes and failures (`stop`), it is complete. Otherwise repeat step 1, up to
       `rounds` rounds.
    3. Choose n rollouts and train on them: half successes and half failures. If there are too few successes or failures,
       take more of the other kind.

    Args:
        groups: prompts in a batch, at least 1.
        n: rollouts of each prompt to train on, at least 2.
        round_n: rollouts per round, at least 1.
        rounds: maximum number of rounds, in [1, 1000]. All rounds together must have at least n rollouts.
        stop: when a prompt is complete. "balanced": with n // 2 successes and n - n // 2 failures. "positive": with one
            success.

    Raises:
        ValueError: a number is out of its range, or all rounds have fewer rollouts than n.
    """
    at_least("n", n, 2, "so that half of the rows can be successes")
    at_least("round_n", round_n, 1)
    at_least("rounds", rounds, 1)
    if rounds > _MOST_ROUNDS:
        raise ValueError(f"rounds must be at most {_MOST_ROUNDS}, because each is a stage of the recipe, got {rounds}")
    one_of("stop", stop, ("balanced", "positive"))
    if round_n * rounds < n:
        raise ValueError(
            f"{rounds} rounds of {round_n} rollouts give fewer than n={n}, the number of rollouts to train on"
        )
    size, enough = sizes.Fixed(round_n), Collected(half=stop == "balanced")
    stages = tuple(Stage(f"round {at + 1}", size, enough, None, promote.Oldest()) for at in range(rounds - 1))
    base = grpo(groups, round_n)
    return replace(
        base,
        stages=(*stages, replace(base.stages[0], name=f"round {rounds}")),
        rows=rows.Balanced(n),
        advantage=advantages.OverGroup(advantages.dr_grpo),
    )


@dataclass(frozen=True, slots=True)
class Collected(JudgeRule):
    """Train on a group that has enough successes and failures; otherwise continue with the next stage.

    If `half` is True, a group needs m // 2 successes and m - m // 2 failures. m is the number of rows that the recipe's
    row rule takes. If `half` is False, one success is enough. The judge decides when all rollouts of a round have ended.
    These are the exit conditions "balanced" and "positive-focused" of Reinforce-Ada, arXiv 2510.04996.

    Attributes:
        half: True: half of the rows must be successes. False: one success is enough.
        above: a metric above this is a success, in [0, 1).

    Raises:
        ValueError: `above` is outside [0, 1).
    """

    half: bool = True
    above: float = SUCCESS_ABOVE

    def __post_init__(self) -> None:
        if not 0 <= self.above < 1:
            raise ValueError(f"above must be in [0, 1), got {self.above!r}")

    @property
    def traits(self) -> JudgeTraits:
        return JudgeTraits(reads=("metrics_G",), reads_rate=True, reads_rows=self.half, waits_for_all=True)

    def __call__(self, group: GroupView, view: View) -> Verdict | None:
        if group.unfinished:
            return None
        m = rows_of(view) if self.half else 1
        successes, failures = (m // 2, m - m // 2) if self.half else (1, 0)
        won = int((group.metrics_G > self.above).sum())
        return Verdict(Act.TRAIN if won >= successes and group.scored - won >= failures else Act.NEXT)

    def promises(self, verdict: Verdict | None, group: GroupView, view: View) -> dict[str, bool]:
        won = [metric > self.above for metric in group.metrics_G.tolist()].count(True)
        m = rows_of(view) if self.half else 0
        enough = (2 * won >= m - 1 and 2 * (group.scored - won) >= m) if self.half else won > 0
        return {
            "the judge decides exactly when all rollouts have ended": (verdict is None) == (group.unfinished > 0),
            "exactly the groups with enough successes and failures are trained on; the others go on": (
                verdict is None or verdict.act is (Act.TRAIN if enough else Act.NEXT)
            ),
        }
