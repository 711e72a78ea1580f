"""Results as sentences, for readers who do not know the methods. Losses are stated as clearly as wins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from rollalloc.compare.summary import Interval, RecipeSummary, Summary
from rollalloc.files.text import one_line, visible
from rollalloc.runs.learning_signal import share_taught
from rollalloc.runs.recorded import RecordedRun

Sentence = tuple[str, str]  # the main point, and the rest


def findings(summary: Summary) -> dict[str, Sentence]:
    """A sentence for each method, by its label. The baseline comes first."""
    aim = f"held-out {summary.measure} {summary.target}"
    return {recipe.label: _finding(recipe, summary.recipes[0], summary.target, aim) for recipe in summary.recipes}


def _finding(method: RecipeSummary, baseline: RecipeSummary, target: float | None, aim: str) -> Sentence:
    name, first, seeds = one_line(method.label), one_line(baseline.label), len(method.seeds)
    taught = _taught(_share(method.accounts), method.grouped, method.recipe, method.parameters)
    cost, ratio = method.costs["rollouts"], method.ratios["rollouts"]
    if target is None or cost is None:
        why = "No target was set" if target is None else "It was not evaluated"
        paid = f"{name} paid {method.rollouts_paid / seeds:,.0f} rollouts per run"
        return paid, f"; {taught}. {why}, so costs are not compared."
    if method.reached < seeds:
        paid = f" and paid {method.rollouts_paid / seeds:,.0f} rollouts per run{_bound(ratio, first)}; {taught}."
        return f"{name} reached {aim} in {method.reached} of {_counted(seeds, 'run')}", paid
    needed = f"{name} needed {cost.point:,.0f} rollouts"
    if method is baseline or ratio is None:
        return needed, f"{_between(cost)} for {aim}; {taught}."
    if method.grouped and baseline.grouped:
        taught = f"{taught}, {first}'s {_share(baseline.accounts)}"
    if ratio.bound:
        return needed, f"{_between(cost)} for {aim}{_bound(ratio, first)}; {taught}."
    times = 1 / ratio.point
    than = "than" if _more(times).endswith(("more", "fewer")) else "as"
    return f"{name} needed {_more(times)} rollouts {than} {first}", f" for {aim} ({_certainty(ratio)}); {taught}."


def _more(times: float) -> str:
    """A ratio in words, such as "5% more" for 1.05; from 2 on, "N times as many"."""
    percent = round(100 * (times - 1))
    if times >= 2:
        return f"{times:.1f} times as many"
    return f"{abs(percent)}% {'fewer' if percent < 0 else 'more'}" if percent else "as many"


def _certainty(ratio: Interval) -> str:
    """The interval of the method's cost relative to the baseline, from the interval of the inverse ratio."""
    if ratio.low is None or ratio.high is None:
        return f"{_counted(len(ratio.values), 'seed')}, too few for an interval"
    interval = f"95% interval: {_more(1 / ratio.high)} to {_more(1 / ratio.low)}"
    return f"{interval}, so no clear difference" if ratio.low <= 1 <= ratio.high else interval


def _bound(ratio: Interval | None, baseline: str) -> str:
    """The bound on the ratio to the baseline if some runs are censored; otherwise empty."""
    if ratio is None or not ratio.bound:
        return ""
    at_least = "at least" if ratio.bound == "<" else "at most"
    return f", {at_least} {1 / ratio.point:.2f} times what {baseline} paid"


def _between(cost: Interval) -> str:
    return "" if cost.low is None or cost.high is None else f" (95% interval {cost.low:,.0f} to {cost.high:,.0f})"


_ALONE = {  # the baseline of a recipe without groups
    "foresight": "the pass rate that was predicted for its prompt",
    "spo": "the tracked pass rate of its prompt",
    "raft": "0, so that only right answers are trained on",
}


def _taught(share: str, grouped: bool, recipe: object, parameters: Mapping[str, Any]) -> str:
    taught = f"{share} of its rollouts taught something"
    if grouped:
        return taught
    baseline = _ALONE.get(str(recipe), "a baseline of its recipe")
    if recipe == "reinforce":
        running = parameters.get("baseline") == "running"
        baseline = "the mean of all rewards so far" if running else "the mean of the batch's other rewards"
    return f"{taught}, each compared with {baseline}, not with a group"


def _share(*accounts: Mapping[str, int]) -> str:
    """The share of the rollouts of several runs that taught something, in percent."""
    total = sum(map(Counter, accounts), Counter[str]())
    return f"{share_taught(total) or 0:.0%}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def story(runs: Sequence[RecordedRun], label: str) -> Sentence:
    """A sentence or two about a single run, or about the mean over the seeds of one method."""
    paid, name = fmean(run.paid for run in runs), one_line(label)
    if not paid:
        return f"{name} has not paid a rollout yet", "."
    per_run = f" per run, mean of {len(runs)} seeds" if len(runs) > 1 else ""
    described = runs[0].description
    grouped = any(run.grouped for run in runs)
    taught = _taught(
        _share(*(run.accounts for run in runs)), grouped, described.get("recipe"), described.get("parameters") or {}
    )
    curves = [run.curve.accuracy for run in runs if run.curve.accuracy]
    learned = ""
    if curves:
        first, last = (fmean(accuracy[at] for accuracy in curves) for at in (0, -1))
        learned = f" Its held-out accuracy went from {first:.3f} to {last:.3f}."
    unit = runs[0].unit.removesuffix(" paid")
    verb = "made" if unit != "rollouts" else "paid"
    lead = f"{name} {verb if all(run.why for run in runs) else f'has so far {verb}'} {paid:,.0f} {unit}{per_run}"
    return lead, f"; {taught}.{learned}" if unit == "rollouts" else f".{learned}"


def damage(runs: Sequence[RecordedRun]) -> list[str]:
    """Sentences that say which parts of the runs could not be read."""
    return [f"{name_of(run)} cannot be read in full: {visible(run.problem)}" for run in runs if run.problem]


def graded(summary: Summary | None) -> list[str]:
    """A note for tasks whose scores can lie between wrong and right."""
    if summary is None or summary.measure == "accuracy":
        return []
    meant = "accuracy in the figures is the mean score, and best of k is the mean over prompts of the best of k scores"
    return [f"Scores are graded: {meant}. A group counts as having a learning signal if its scores are not all equal."]


def odd_targets(runs: Sequence[RecordedRun]) -> list[str]:
    """Warnings about runs with an unconfirmed evaluation at the target, and about runs that started at or above it."""
    sentences: list[str] = []
    for run in runs:
        if run.target is None or run.cost is None:
            continue
        if run.cost.at == 0:
            sentences.append(
                f"{name_of(run)} was at the target {run.target:g} before any training: set a higher --target."
            )
        elif run.cost.censored and max(run.curve.accuracy) >= run.target:
            sentences.append(
                f"{name_of(run)} was at the target {run.target:g} in some evaluation, but not in two in a row, so it "
                "does not count as reached. A longer run, or more frequent evaluations (--eval-every), would show more."
            )
    return sentences


def caveats(runs: Sequence[RecordedRun]) -> list[str]:
    """Warnings to read before trusting the figures: runs that are unfinished, damaged, unscored or not evaluated."""
    sentences: list[str] = []
    for run in runs:
        name = name_of(run)
        sentences += damage([run])
        if run.note:
            sentences.append(f"{name}: {visible(run.note)}.")
        if not run.metrics:
            sentences.append(f"{name} has written no metrics: it is about to start, or it failed.")
        elif run.failed:
            sentences.append(f"{name} failed: {visible(run.why or '')}")
        elif run.why is None:
            sentences.append(
                f"{name} has not ended: it is still running, was stopped or failed. Its figures may still change."
            )
        elif not run.curve.accuracy:
            sentences.append(f"{name} was not evaluated on held-out prompts, so its accuracy is not known.")
        sentences += odd_targets([run])
        if unscored := sum(run.unscored.values()):
            sentences.append(
                f"{name}: {unscored:,} of {run.paid:,} rollouts have no score; they count as paid, not as wrong. "
                + "; ".join(f"{one_line(why, 90)} ({count:,})" for why, count in run.unscored.items())
            )
        if run.batches and (quarantined := run.batches[-1].get("quarantined")):
            sentences.append(
                f"{name}: {_counted(quarantined, 'prompt')} set aside, because none of their rollouts could be scored."
            )
    return sentences


def silences(methods: Mapping[str, Sequence[RecordedRun]]) -> list[str]:
    """For each method, a warning if the latest rollouts of some of its runs had no effect on training."""
    sentences: list[str] = []
    for label, runs in methods.items():
        if silent := [run.silence for run in runs if run.silence]:
            among = f" in {len(silent)} of {len(runs)} runs" if len(runs) > 1 else ""
            sentences.append(f"{one_line(label)}{among}: {silent[0]}.")
    return sentences


def name_of(run: RecordedRun) -> str:
    """A run's name: its label, or else its folder, because separate runs may have the same recipe."""
    return one_line(run.name) + ("" if run.seed is None else f", seed {run.seed}")
