"""Recipes in the order of what they are expected to pay, each with the saving over the present one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import log

import numpy as np

from rollalloc.lab.advise.choices import CHOICES, METHODS, Choice, mix_of
from rollalloc.lab.advise.evidence import Evidence
from rollalloc.lab.advise.outcomes import Outcomes, fit

SIGNALS = ("many_answers", "zero_variance_4")  # that the model has slopes for; docs/advise.md says what others did
# What a recipe must be expected to save over the others to come before them, for what it costs besides rollouts:
# prediction reads every prompt once, trains on seconds of its own, and is one thing more to understand.
_WORTH = {"foresight": 1.1}
TAILS = (0.1, 0.9)  # of the intervals that are stated


@dataclass(frozen=True, slots=True)
class Ranked:
    """A row of the verdict's table.

    Attributes:
        choice: in batches as large as the present ones.
        saving: rollouts to equal learning under the present setting over those under this one, expected; above 1 it is
            cheaper.
        interval: of the saving, 80%, between tasks and seeds.
        over_plain: the same over REINFORCE, with its interval: what it adds to one rollout per prompt.
        ruled_out: why it must not be used here; empty: it may be.
    """

    choice: Choice
    saving: float
    interval: tuple[float, float]
    over_plain: tuple[float, float, float]
    ruled_out: str = ""


@lru_cache(maxsize=4)
def fitted(evidence: Evidence, signals: tuple[str, ...] = SIGNALS) -> Outcomes:
    """The model of some evidence."""
    return fit(evidence, METHODS, signals)


def rank(
    outcomes: Outcomes, signals: Mapping[str, float], present: Choice, ruled_out: Mapping[str, str] | None = None
) -> tuple[Ranked, ...]:
    """The choices, cheapest first, foresight where it saves a tenth at least; what is ruled out comes last.

    Args:
        outcomes: the fitted model.
        signals: of a profile.
        present: what is trained with now; it is among the ranked.
        ruled_out: recipe → why it must not be used.

    Raises:
        ValueError: a present choice that there is no evidence on.
    """
    choices = {name: choice.with_rollouts(present.groups * present.n) for name, choice in CHOICES.items()}
    choices[present.name] = present
    drawn = outcomes.drawn(signals, {name: mix_of(choice) for name, choice in choices.items()})

    def over(one: str, other: str) -> tuple[float, float, float]:
        saving_D = drawn[one] - drawn[other]
        low, high = np.exp(np.quantile(saving_D, TAILS)).tolist()
        return float(np.exp(saving_D.mean())), low, high

    rows: list[tuple[bool, float, Ranked]] = []
    for name, choice in choices.items():
        saving, low, high = over(present.name, name)
        why_not = (ruled_out or {}).get(choice.recipe, "")
        row = Ranked(choice, saving, (low, high), over("reinforce", name), why_not)
        asked = log(_WORTH.get(choice.recipe, 1.0))
        rows.append((bool(why_not), float(drawn[name].mean()) + asked, row))
    return tuple(row for *_, row in sorted(rows, key=lambda one: one[:2]))
