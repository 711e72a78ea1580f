"""The table of all metrics that runs write and drivers log. The reader, the guide and the tests use it.

In `metrics.jsonl` metrics are nested, as `{"accounts": {"trained": 64}}`. Trackers, TRL and verl get the numbers by their
paths, as `rollalloc/accounts/trained`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Real
from typing import Any

import numpy as np

from rollalloc.core.allocator import Allocator
from rollalloc.core.events import Batch
from rollalloc.core.teaching import WINDOW
from rollalloc.runs.values import (
    AGES,
    AMOUNT,
    COUNT,
    COUNTS,
    FIGURES,
    KNOWN_FIGURES,
    LENGTHS,
    MEASURED,
    NUMBER,
    TEXT,
    Field,
)

PREFIX = "rollalloc"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric.

    Attributes:
        name: path of the metric; a part in capitals stands for any name.
        unit: unit of its value.
        meaning: description, which continues the unit: "rollouts" "ordered so far".
        where: where it occurs: kinds of lines of `metrics.jsonl` ("every line", "batch", "eval" ...), and "TRL", "verl",
            "Tinker".
        read: how the reader checks the value of the first part of the path; None: the reader ignores the metric.
        needed: whether a line without the metric is invalid.
    """

    name: str
    unit: str
    meaning: str
    where: tuple[str, ...]
    read: Field | None = None
    needed: bool = False


_ALL = ("every line", "TRL", "verl")
_EVERY = ("every line",)
_BATCH = ("batch",)
_BATCHES = ("batch", "TRL", "verl")
_EVAL = ("eval",)
_AWAY = ("batch", "end", "failed")
_PREDICTION = ("batch", "TRL", "verl")

TABLE: Mapping[str, tuple[Metric, ...]] = {
    "What the run paid, and for what": (
        Metric("kind", "text", "of the line", _EVERY, TEXT, needed=True),
        Metric("rollouts_paid", "rollouts", "ordered so far, whatever became of them", _ALL, COUNT, needed=True),
        Metric("tokens_paid", "tokens", "of the rollouts that ended", _ALL, COUNT, needed=True),
        Metric("accounts/CAUSE", "rollouts", "paid so far, by cause; they sum to `rollouts_paid`", _ALL, COUNTS, True),
        Metric("unscored/REASON", "rollouts", "without a score, the first twenty reasons apart", _EVERY, COUNTS),
        Metric("prompts/STATUS", "prompts", "by what became of their last visit; `new`: never visited", _ALL, COUNTS),
        Metric("epoch", "passes", "over the prompts begun, from 0", _ALL),
        Metric("optimizer_steps", "steps", "of the optimizer so far", _EVERY, COUNT),
        Metric("version", "updates", "of the weights so far", _EVERY, COUNT),
        Metric("seconds", "s", "of generation, scoring and updates; not of evaluation", _EVERY, AMOUNT, needed=True),
    ),
    "A batch": (
        Metric("batch", "batches", "trained, this one included", _BATCH, COUNT),
        Metric("rows", "rows", "of the batch, replayed ones included", _BATCHES, COUNT),
        Metric("groups", "groups", "of its fresh rows", _BATCHES, COUNT),
        Metric("replayed", "rows", "of earlier batches", _BATCHES, COUNT),
        Metric("short", "0 or 1", "it has fewer groups than the recipe asks for", _BATCHES),
        Metric("short_because", "text", "why; null where it is not short", _BATCH),
        Metric("staleness_mean", "updates", "between a row's first token and the batch", _BATCHES, AMOUNT),
        Metric("staleness_max", "updates", "the same, of the oldest row", _BATCHES, COUNT),
        Metric("staleness_min", "updates", "the same, of the newest row", _BATCHES, COUNT),
        Metric("staleness_std", "updates", "standard deviation of the same over the rows", _BATCHES, AMOUNT),
        Metric("off_policy_rows", "rows", "of them that earlier weights generated", _BATCHES, COUNT),
        Metric(
            "negative_weight",
            "",
            "negative advantages over positive ones, sums of its fresh rows: 1 in GRPO, 0 in RAFT, in REINFORCE the weight "
            "of failures; null where none is positive",
            _BATCHES,
        ),
        Metric("ages/AGE", "rows", "by that number of updates", _BATCH, AGES),
        Metric(
            "reward_mean", "reward", "of all rollouts scored since the last batch, trained on or not", _BATCH, NUMBER
        ),
        Metric("metric_mean", "metric", "of the same", _BATCH),
        Metric("truncated", "share", "of the same that hit the length limit", _BATCH),
        Metric("lengths/count", "rollouts", "the same", _BATCH, LENGTHS),
        Metric("lengths/truncated", "rollouts", "of them that hit the length limit", _BATCH),
        Metric("lengths/quantiles", "tokens", "minimum, 10, 25, 50, 75, 90 % and maximum of their lengths", _BATCH),
        Metric("evicted", "prompts", "away for longer than an epoch", (*_AWAY, "verl"), COUNT),
        Metric("evicted_share", "share", "of all prompts that are evicted now", ("verl",)),
        Metric("revived", "visits", "so far to prompts that had been evicted", (*_AWAY, "verl"), COUNT),
        Metric(
            "quarantined",
            "prompts",
            "not drawn again: their rollouts always failed to be scored",
            (*_AWAY, "verl"),
            COUNT,
        ),
        Metric("loss", "", "mean over the batch's optimizer steps", _BATCH, MEASURED),
        Metric("grad_norm", "", "before clipping, likewise", (*_BATCH, "Tinker"), MEASURED),
        Metric("clip_fraction", "share", "of tokens whose ratio was clipped", _BATCH),
        Metric("kl", "nats per token", "to the reference policy, with `--kl`", _BATCH),
        Metric("approx_kl", "nats per token", "how far the update moved the policy, by 16 rows (SPO)", _BATCH),
        Metric("steps_in_batch", "steps", "of the optimizer", ("batch", "verl")),
        Metric("learning_rate", "", "of the last one", _BATCH),
        Metric("update_seconds", "s", "of this update", _BATCH),
    ),
    "What is trained on beside what was sampled": (
        Metric(
            "selection/tokens_sampled", "tokens", "mean length of all rollouts of groups that ended", _BATCHES, FIGURES
        ),
        Metric("selection/tokens_trained", "tokens", "the same of the batch's fresh rows", _BATCHES),
        Metric(
            "selection/difficulty_sampled",
            "0 to 1",
            "mean of 1 - predicted pass rate, or 1 - their group's",
            _BATCHES,
            FIGURES,
        ),
        Metric("selection/difficulty_trained", "0 to 1", "the same of the batch's fresh rows", _BATCHES),
        Metric(
            "teaching/OUTCOME",
            "share",
            f"of the last {WINDOW:,} rollouts, or of fewer that were all the same, in groups `all_wrong`, `all_right`, "
            "`all_alike`, `mixed`; "
            "of those not compared within one, `wrong`, `right`, `between`",
            (*_BATCHES, "end", "failed"),
            FIGURES,
        ),
    ),
    "A recipe that predicts (foresight, SPO, MoPPS)": (
        Metric("prediction/rollouts", "rollouts", "predicted between the last two fits", _PREDICTION),
        Metric("prediction/log_loss", "nats per rollout", "of these predictions", _PREDICTION),
        Metric("prediction/constant_log_loss", "nats per rollout", "of the running mean instead", _PREDICTION),
        Metric("prediction/auc", "0 to 1", "of these predictions", _PREDICTION),
        Metric("prediction/calibration_error", "probability", "of these predictions", _PREDICTION),
        Metric("prediction/drift", "logit", "rise of all logits in that time", _PREDICTION),
        Metric("prediction/drift_offset", "logit", "now, against the fit", _PREDICTION),
        Metric("prediction/weight/EXPERT", "share", "of an expert in the mixture", _BATCH),
    ),
    "Rollouts that go on over an update (asynchronous)": (
        Metric("streaming/in_flight", "rollouts", "running now", ("batch", "verl")),
        Metric("streaming/straddled", "rollouts", "that went on over an update, since the last batch", _BATCH),
        Metric("streaming/rows_mean", "rows", "of a decoding step", _BATCH),
        Metric("streaming/step_seconds", "s", "of a decoding step", _BATCH),
        Metric("streaming/restarts", "restarts", "of the generator so far", _BATCH),
    ),
    "An evaluation": (
        Metric("at", "rollouts", "the point of the grid of `--eval-every`; null: the final weights", _EVAL, COUNT),
        Metric("accuracy", "0 to 1", "held out; null where no sample has a score", _EVAL, NUMBER),
        Metric("standard_error", "0 to 1", "of the accuracy, over prompts; 0 where it is exact", _EVAL, AMOUNT),
        Metric("breadth/k", "attempts", "per prompt", _EVAL, KNOWN_FIGURES),
        Metric("breadth/pass_at_k", "metric", "best of k attempts, mean over prompts", ("eval", "TRL")),
        Metric("breadth/full_marks", "share", "of attempts with full marks", ("eval", "TRL")),
        Metric("breadth/distinct_right", "answers", "different right ones of k attempts", ("eval", "TRL")),
        Metric("breadth/right_pairs_differ", "probability", "that two right answers differ", ("eval", "TRL")),
        Metric("breadth/entropy", "nats", "of the next token", _EVAL),
        Metric("breadth/tokens", "tokens", "of an attempt", _EVAL),
        Metric("narrower", "text", "where breadth fell while accuracy did not; else null", _EVAL),
        Metric("eval_unscored", "samples", "without a score", _EVAL),
        Metric("eval_seconds", "s", "of the evaluation", _EVAL),
    ),
    "Other lines": (
        Metric("why", "text", "the run ended, or failed", ("end", "failed"), TEXT),
        Metric("quarantined_keys", "keys", "of quarantined prompts, at most twenty", ("end", "failed")),
        Metric("lost", "prompts", "gone from the data since the checkpoint", ("resume",)),
        Metric("new", "prompts", "new in it", ("resume",)),
        Metric("features_prompts", "prompts", "of which features were made", ("features",)),
        Metric("features_tokens", "tokens", "forwarded for them", ("features",)),
        Metric("features_seconds", "s", "it took; they are in `seconds`", ("features",)),
    ),
    "At a service (Tinker)": (
        Metric("cost/KIND", "tokens", "billed so far: `prefill`, `cached`, `sampled`, `trained`", ("Tinker",)),
        Metric("cost_lost/KIND", "tokens", "of these, paid and done again after a kill", ("Tinker",)),
        Metric("money", "`currency`", "by `prices`, lost tokens included", ("Tinker",)),
        Metric("currency", "text", "of `prices`", ("Tinker",)),
        Metric("sampler_kl", "nats per token", "from the weights that sampled to those that are trained", ("Tinker",)),
        Metric("loss_sum", "", "the service's loss, a sum over tokens", ("Tinker",)),
        Metric("tinker/NAME", "", "other figures of the service's trainer", ("Tinker",)),
    ),
    "A step of TRL": (
        Metric("generated", "rollouts", "since the last batch", ("TRL",)),
        Metric("stopped", "rollouts", "of them that the recipe stopped", ("TRL",)),
        Metric("failed", "rollouts", "of them without a score", ("TRL",)),
        Metric("entropy", "nats per token", "of all that was generated, −log π of what was sampled", ("TRL",)),
        Metric("held/rollouts", "rollouts", "kept for this batch and later ones", ("TRL",)),
    ),
    "A step of verl": (
        Metric("stage/NAME/groups", "groups", "that entered the recipe's stage", ("verl",)),
        Metric("stage/NAME/rollouts", "rollouts", "ordered in it", ("verl",)),
        Metric("stage/NAME/passed", "groups", "that passed it, those left over as surplus included", ("verl",)),
        Metric("stage/NAME/pass_rate", "share", "of the groups that left it", ("verl",)),
        Metric(
            "stage/NAME/dropped/REASON",
            "share",
            "of the groups that left it, by why they did not pass: `too_easy`, `too_hard`, `solved`, `zero_variance`, …",
            ("verl",),
        ),
        Metric("stage/NAME/mean", "metric", "mean of these groups over their rollouts of the stage", ("verl",)),
        Metric("stage/NAME/deviation", "metric", "within such a group, mean over the groups", ("verl",)),
        Metric(
            "groups_table",
            "table",
            "of these groups: stage, prompt, rollouts, mean and deviation of the metric, tokens, share truncated, what "
            "became of it; with `wandb` in `trainer.logger`",
            ("verl",),
        ),
        Metric("rounds", "rounds", "in which rollouts were ordered", ("verl",)),
        Metric("held/groups", "groups", "held for a later batch", ("verl",)),
        Metric("held/in", "groups", "of them new in this step", ("verl",)),
        Metric("held/out", "groups", "held before it and trained in it", ("verl",)),
        Metric("held/lost", "groups", "held before it and dropped", ("verl",)),
        Metric("padding_rows", "rows", "added, without a token to learn from", ("verl",)),
        Metric("requests_left", "requests", "on the servers after a batch of a recipe that stops rollouts", ("verl",)),
        Metric("driver_seconds", "s", "of the driver's own work", ("verl",)),
    ),
}
METRICS = tuple(metric for metrics in TABLE.values() for metric in metrics)


def fields_of(*where: str, needed: bool = False) -> dict[str, Field]:
    """The fields of some kinds of lines, by name, with their checks.

    Args:
        where: kinds of lines.
        needed: True: only the fields that a line must have. False: only the others.
    """
    return {
        metric.name.partition("/")[0]: metric.read
        for metric in METRICS
        if metric.read is not None and metric.needed == needed and not set(where).isdisjoint(metric.where)
    }


def undeclared(names: Iterable[str], *where: str) -> list[str]:
    """The names that are not metrics of these kinds of lines."""
    known = [_pattern(metric.name) for metric in METRICS if not set(where).isdisjoint(metric.where)]
    return [name for name in names if not any(pattern.fullmatch(name) for pattern in known)]


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile("/".join(".+" if part.isupper() else re.escape(part) for part in name.split("/")), re.DOTALL)


def paths(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in nested mappings, each with its path."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from paths(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers in nested mappings, by their paths under `rollalloc/`, for trackers and frameworks."""
    return {name: float(value) for name, value in paths(values, f"{PREFIX}/") if isinstance(value, Real)}


def totals(core: Allocator) -> dict[str, Any]:
    """The run's rollouts and tokens so far, by cause, and the state of its prompts."""
    return {
        "rollouts_paid": core.paid,
        "tokens_paid": core.tokens_paid,
        "epoch": core.epoch,
        "accounts": core.accounts(),
        "prompts": core.statistics.counts(),
    }


def away(core: Allocator) -> dict[str, Any]:
    """Numbers of prompts that are evicted, revived and quarantined, and the share of evicted prompts."""
    away = core.prompt_counts()
    return away | {"evicted_share": away["evicted"] / len(core.table)}


def prediction(core: Allocator) -> dict[str, Any]:
    """The quality of the recipe's predictions. The weights of the experts, which are many, are left out."""
    figures = core.prompt_figures().items()
    return {"prediction": {name: value for name, value in figures if not name.startswith("weight/")}}


def of_batch(core: Allocator, batch: Batch) -> dict[str, Any]:
    """Metrics of a batch. Call it before the core is told `Updated`. Groups are those of fresh rows, without replays."""
    ages = [batch.version - row.version for row in batch.rows]
    return {
        "rows": len(batch.rows),
        "groups": len({row.group for row in batch.rows if not row.replays}),
        "replayed": sum(row.replays > 0 for row in batch.rows),
        "short": batch.short_because is not None,
        "staleness_mean": float(np.mean(ages)),
        "staleness_max": max(ages),
        "staleness_min": min(ages),
        "staleness_std": float(np.std(ages)),
        "off_policy_rows": sum(age > 0 for age in ages),
        "negative_weight": _negative_weight(batch),
        "selection": core.selection.figures(),
        "teaching": core.teaching.shares(),
    }


def _negative_weight(batch: Batch) -> float | None:
    """Σ |A| over A < 0, divided by Σ A over A > 0, for fresh rows; None if no row has a positive advantage."""
    advantages = [row.advantage for row in batch.rows if not row.replays]
    positive = sum(advantage for advantage in advantages if advantage > 0)
    return sum(-advantage for advantage in advantages if advantage < 0) / positive if positive > 0 else None
