"""Reinforce-Ada: rollouts in rounds until a prompt has successes and failures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from rollalloc.core.group import GroupView
from rollalloc.core.recipe import Recipe, Stage, at_least, one_of
from rollalloc.core.rule import Act, JudgeRule, JudgeTraits, Verdict, View, rows_of
from rollalloc.recipes.grpo import grpo
from rollalloc.recipes.shapes import sized
from rollalloc.rules import advantages, promote, rows, sizes
from rollalloc.rules.judges import SUCCESS_ABOVE

_MOST_ROUNDS = 1000  # more would fill the memory before anything is said


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
    """Train on a complete group as soon as it has enough successes and failures for its rows; until then it goes on.

    Of m rows, as the recipe's row rule says, m // 2 successes and as many failures as are lacking to m; or one success,
    whatever the failures. Reinforce-Ada's exits, "balanced" and "positive-focused", arXiv 2510.04996.

    Attributes:
        half: whether half of the rows must be successes; else one success is enough.
        above: a metric above it is a success.

    Raises:
        ValueError: `above` outside [0, 1).
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
        successes, failures = self._least(view)
        won = int((group.metrics_G > self.above).sum())
        return Verdict(Act.TRAIN if won >= successes and group.scored - won >= failures else Act.NEXT)

    def _least(self, view: View) -> tuple[int, int]:
        if not self.half:
            return 1, 0
        m = rows_of(view)
        return m // 2, m - m // 2

    def promises(self, verdict: Verdict | None, group: GroupView, view: View) -> dict[str, bool]:
        won = [metric > self.above for metric in group.metrics_G.tolist()].count(True)
        m = rows_of(view) if self.half else 0
        enough = (2 * won >= m - 1 and 2 * (group.scored - won) >= m) if self.half else won > 0
        return {
            "it decides just when all rollouts ended": (verdict is None) == (group.unfinished > 0),
            "just the groups that have enough are trained on, the others go on": (
                verdict is None or verdict.act is (Act.TRAIN if enough else Act.NEXT)
            ),
        }
