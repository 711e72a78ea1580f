"""The verdict: which recipe to train with, what it would save, and when it would be otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Literal

import numpy as np

from rollalloc.lab.advise.choices import BATCH, CHOICES, SIZES, Choice
from rollalloc.lab.advise.evidence import Evidence, evidence
from rollalloc.lab.advise.outcomes import Outcomes
from rollalloc.lab.advise.profile import Profile
from rollalloc.lab.advise.ranking import Ranked, fitted, rank

__all__ = ["CHOICES", "Choice", "Ranked", "Verdict", "judged", "verdict_of"]

_LEAST_SAVING = 1.1  # below which nobody should change anything
_ENOUGH, _ROUND = 1024, 100  # rollouts of a profile, and what a number of them is rounded up to
_STEPS = 21  # at which it is looked where another value of a signal would change the choice
_LARGE, _BARREN = 16, 0.95  # share of such groups without variance from which on no recipe has much to learn from
WORDS: Mapping[str, str] = {
    "zero_variance_4": "the share of groups of 4 without variance",
    "mean_rate": "the mean success rate",
    "spread": "the spread of the success rates",
    "auc": "the AUC of predicted success",
    "graded": "graded rewards",
    "many_answers": "the chance that two right answers of a prompt differ",
}
_GRADED_RAFT = "it trains on full marks alone; with graded rewards it learned nothing by its defaults"
_UNBOUNDED = "it predicts success rates, and these rewards are not within [0, 1]"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do.

    Attributes:
        kind: go over to another recipe, keep the present one, sample more first, or take other prompts: no recipe learns
            from these.
        sentence: the verdict in words.
        choice: what to train with; None where it is too early to tell, or nothing can be learned.
        present: the setting that savings are over.
        ranked: best first; what is ruled out comes last.
        otherwise: when it would be otherwise, in sentences.
        notes: what a reader should know of the evidence and of these prompts, in sentences.
        more: rollouts to sample before one can tell; 0: none.
    """

    kind: Literal["switch", "keep", "too few", "barren"]
    sentence: str
    choice: Choice | None
    present: Choice
    ranked: tuple[Ranked, ...]
    otherwise: tuple[str, ...]
    notes: tuple[str, ...]
    more: int = 0


def verdict_of(profile: Profile, *, present: Choice | None = None, known: Evidence | None = None) -> Verdict:
    """The verdict on a profile.

    Args:
        profile: of the model on the prompts.
        present: what is trained with now; by default GRPO with the log's own groups, as many as in a step of it;
            REINFORCE where they are of one.
        known: evidence to judge by, instead of this package's.

    Raises:
        ValueError: a present recipe that there is no evidence on.
    """
    if present is None:
        n = profile.n
        present = Choice("grpo" if n > 1 else "reinforce", profile.groups, n)
        present = present if profile.groups else present.with_rollouts(BATCH)
    if profile.too_few:
        more = _ROUND * max(1, ceil((_ENOUGH - profile.rollouts) / _ROUND))
        sentence = f"Too few to tell ({profile.too_few}): sample {more:,} rollouts more."
        return Verdict("too few", sentence, None, present, (), (), (), more)
    if not profile.reward.graded and profile.zero_variance[_LARGE].value >= _BARREN:
        return Verdict("barren", _barren(profile), None, present, (), (), ())
    ruled_out = {"raft": _GRADED_RAFT} if profile.reward.graded else {}
    ruled_out |= {"foresight": _UNBOUNDED} if profile.reward.outside else {}
    unknown = ("many_answers",) if profile.right_pairs_differ is None else ()
    return judged(profile.signals(), present, known or evidence(), ruled_out=ruled_out, unknown=unknown)


def _barren(profile: Profile) -> str:
    """What these prompts are like, and what would help, in a sentence or two."""
    mean = profile.mean.value
    if mean <= 1 - _BARREN:
        how = "hardly any is right"
        do = "Take easier prompts, train on demonstrations first, or see whether the reward finds a right answer right"
    elif mean >= _BARREN:
        how, do = "nearly all are right", "Take harder prompts"
    else:
        how, do = "each prompt is nearly always solved, or hardly ever", "Take prompts in between"
    return (
        f"No recipe learns much from these prompts: of {profile.rollouts:,} rollouts {how}, and of groups of {_LARGE} "
        f"{profile.zero_variance[_LARGE].value:.0%} would be alike. {do}."
    )


def judged(
    signals: Mapping[str, float],
    present: Choice,
    known: Evidence,
    *,
    ruled_out: Mapping[str, str] | None = None,
    unknown: tuple[str, ...] = (),
) -> Verdict:
    """The verdict on a profile's signals.

    Args:
        signals: as `Profile.signals` has them.
        present: what is trained with now.
        known: evidence to judge by.
        ruled_out: recipe → why it must not be used.
        unknown: signals that nothing is known of, and that stand at what says nothing.

    Raises:
        ValueError: a present recipe that there is no evidence on.
    """
    outcomes = fitted(known)
    ranked = rank(outcomes, signals, present, ruled_out)
    best = ranked[0]
    gains = best.interval[0] > 1 and best.saving >= _LEAST_SAVING
    if gains or best.choice.name == present.name or present.recipe in (ruled_out or {}):
        choice = best.choice
    else:
        choice = present
    kind: Literal["switch", "keep"] = "keep" if choice.name == present.name else "switch"
    return Verdict(
        kind=kind,
        sentence=_sentence(kind, ranked, present),
        choice=choice,
        present=present,
        ranked=ranked,
        otherwise=_otherwise(outcomes, signals, present, ruled_out, best.choice.name),
        notes=(_why(signals, unknown), *_notes(outcomes, signals, known, present, unknown)),
    )


def _sentence(kind: str, ranked: tuple[Ranked, ...], present: Choice) -> str:
    best = ranked[0]
    low, high = best.interval
    if kind == "keep" and (best.choice.name == present.name or best.saving <= 1):
        return f"Keep {present.words}: nothing is expected to need fewer rollouts here."
    if kind == "keep":
        return (
            f"Keep {present.words}: no saving is shown. The likeliest is {best.choice.words}, {best.saving:.1f} × "
            f"({low:.1f}–{high:.1f})."
        )
    shape = "One rollout" if best.choice.n == 1 else f"{best.choice.n} rollouts"
    saves = "no figure is shown to be better" if low < 1 else "fewer rollouts"
    expected = f"expect {low:.1f}–{high:.1f} × {saves} than {present.words}"
    said = f"{shape} per prompt, {best.choice.groups} prompts a batch, {best.choice.words}; {expected}."
    return f"{said} {_drawing(ranked)}".strip()


def _drawing(ranked: tuple[Ranked, ...]) -> str:
    """What drawing by prediction adds."""
    row = next(row for row in ranked if row.choice.recipe == "foresight")
    if row.ruled_out:
        return ""
    saving, low, high = row.over_plain
    if low > 1:
        return f"Drawing by prediction: {low:.1f}–{high:.1f} × fewer than REINFORCE."
    if high < 1:
        return f"Drawing by prediction: {1 / high:.1f}–{1 / low:.1f} × more than REINFORCE."
    likely = "likelier to help than not, which is not shown" if ranked[0] is row else "not shown to help here"
    return f"Drawing by prediction: {likely} ({saving:.1f} ×, {low:.1f}–{high:.1f}, of REINFORCE)."


def _otherwise(
    outcomes: Outcomes,
    signals: Mapping[str, float],
    present: Choice,
    ruled_out: Mapping[str, str] | None,
    first: str,
) -> tuple[str, ...]:
    """For each signal the nearest value, within what tasks had, at which another choice would come first."""
    said: list[str] = []
    for name, low, high in zip(outcomes.signals, outcomes.low_K, outcomes.high_K, strict=True):
        for value in sorted(np.linspace(low, high, _STEPS), key=lambda value: abs(value - signals[name])):
            other = rank(outcomes, {**signals, name: float(value)}, present, ruled_out)[0].choice
            if other.name != first:
                how = "at most" if value < signals[name] else "at least"
                said.append(f"If {WORDS[name]} were {how} {value:.2f} (here {signals[name]:.2f}): {other.words}.")
                break
    return tuple(said)


def _why(signals: Mapping[str, float], unknown: tuple[str, ...]) -> str:
    """What the ranking goes by, on these prompts."""
    alike = f"{signals['zero_variance_4']:.0%} of groups of 4 have rewards that are all alike and teach GRPO nothing"
    many = f"two right answers of a prompt differ with a chance of {signals['many_answers']:.0%}, where groups pay more"
    graded = "rewards are graded, so that most groups differ" if signals["graded"] else ""
    return f"Why: {'; '.join(filter(None, (alike, graded, '' if unknown or signals['graded'] else many)))}."


def _notes(
    outcomes: Outcomes, signals: Mapping[str, float], known: Evidence, present: Choice, unknown: tuple[str, ...]
) -> tuple[str, ...]:
    of_evidence = (
        f"Learned from {len(known.tasks)} tasks with models of 0.15 to 135 million parameters, every method by its "
        "defaults at one learning rate a size; one of them, SmolLM2-135M, is pretrained (docs/scale.md). Try it beside what "
        "you have."
    )
    notes = [of_evidence]
    ranges = zip(outcomes.signals, outcomes.low_K, outcomes.high_K, outcomes.beyond(signals), strict=True)
    for name, low, high, beyond in ranges:
        if beyond > 0:
            notes.append(
                f"{WORDS[name].capitalize()} is {signals[name]:.2f}, and was {low:.2f} to {high:.2f} in the evidence: the "
                "intervals are wider for it."
            )
    for name in unknown:
        if name in outcomes.signals:
            notes.append(f"{WORDS[name].capitalize()} is not known, and is taken as {signals[name]:.1f}.")
    if present.recipe == "grpo" and present.n > SIZES[-1]:
        notes.append(f"Groups of {present.n} were not run; they are taken as no better than groups of {SIZES[-1]}.")
    return tuple(notes)
