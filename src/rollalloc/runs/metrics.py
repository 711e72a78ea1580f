"""The table of all metrics that runs write and drivers log. It is used to read metrics, to write the guide, and in tests.

In `metrics.jsonl`, metrics are nested, as in `{"accounts": {"trained": 64}}`. Trackers, TRL and verl get numbers named by
their paths, as in `rollalloc/accounts/trained`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.allocator import Allocator
from rollalloc.core.events import Batch
from rollalloc.core.teaching import WINDOW
from rollalloc.runs.values import (
    AMOUNT,
    COUNT,
    COUNTS,
    FIGURES,
    LENGTHS,
    MEASURED,
    NUMBER,
    SHARES,
    TEXT,
    Field,
)

_RIGHT = 1 - 1e-6  # an answer with at least this metric is right
PREFIX = "rollalloc"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric.

    Attributes:
        name: path of the metric. A part in capitals stands for any name.
        unit: unit of its value.
        meaning: what the metric measures, in words.
        where: where it occurs: kinds of lines of `metrics.jsonl` ("every line", "batch", "eval" ...), or "TRL", "verl",
            "Tinker".
        read: check of the value under the first part of the path. None: the reader ignores the metric.
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
    "Totals of the run": (
        Metric("kind", "text", "kind of the line: `batch`, `eval`, `end` and so on", _EVERY, TEXT, needed=True),
        Metric("rollouts_paid", "rollouts", "all rollouts ordered so far", _ALL, COUNT, needed=True),
        Metric("tokens_paid", "tokens", "tokens of all rollouts that have ended so far", _ALL, COUNT, needed=True),
        Metric(
            "accounts/CAUSE",
            "rollouts",
            "rollouts ordered so far, by cause (see above); they sum to `rollouts_paid`",
            _ALL,
            COUNTS,
            True,
        ),
        Metric(
            "unscored/REASON",
            "rollouts",
            "rollouts without a score so far, by reason; after twenty different reasons, further ones are counted together",
            _EVERY,
            COUNTS,
        ),
        Metric(
            "prompts/STATUS",
            "prompts",
            "prompts by the result of their last visit; `new`: not visited yet",
            _ALL,
            COUNTS,
        ),
        Metric("epoch", "passes", "number of the current pass over the prompts, from 0", _ALL),
        Metric("optimizer_steps", "steps", "optimizer steps so far", _EVERY, COUNT),
        Metric("version", "updates", "updates of the weights so far", _EVERY, COUNT),
        Metric(
            "seconds",
            "s",
            "time of generation, scoring and updates so far, without evaluation",
            _EVERY,
            AMOUNT,
            needed=True,
        ),
    ),
    "A batch": (
        Metric("batch", "batches", "batches trained so far, including this one", _BATCH, COUNT),
        Metric("rows", "rows", "rows in the batch, including replayed rows", _BATCHES, COUNT),
        Metric("groups", "groups", "groups in the batch, without replayed rows", _BATCHES, COUNT),
        Metric("replayed", "rows", "rows in the batch that are replayed from earlier batches", _BATCHES, COUNT),
        Metric(
            "moved",
            "share",
            "with a gate: share of the tokens of the rows to be replayed that have moved; null if there are no such rows",
            _BATCHES,
        ),
        Metric("left_out", "rows", "with a gate: rows to be replayed that it has left out so far", _BATCHES),
        Metric(
            "limit",
            "tokens",
            "with `limit_at`: length at which rollouts are stopped now; null if too few right rollouts are known",
            _BATCHES,
        ),
        Metric("short", "0 or 1", "1 if the batch has fewer groups than the recipe asks for", _BATCHES),
        Metric("short_because", "text", "why the batch is short; null if it is not", _BATCH),
        Metric(
            "staleness_mean",
            "updates",
            "updates between a row's first token and the batch, mean over rows",
            _BATCHES,
        ),
        Metric("staleness_max", "updates", "the same for the oldest row", _BATCHES),
        Metric("staleness_min", "updates", "the same for the newest row", _BATCHES),
        Metric("staleness_std", "updates", "the same, standard deviation over rows", _BATCHES),
        Metric("off_policy_rows", "rows", "rows that were generated by older weights", _BATCHES),
        Metric(
            "negative_weight",
            "",
            "absolute sum of the negative advantages, divided by the sum of the positive advantages, without replayed "
            "rows: 1 for GRPO, 0 for RAFT, the weight of failures for REINFORCE; null if no advantage is positive",
            _BATCHES,
        ),
        Metric("ages/AGE", "rows", "rows of the batch whose first token is AGE updates old", _BATCH),
        Metric(
            "reward_mean",
            "reward",
            "mean reward of all rollouts scored since the last batch, trained on or not",
            _BATCH,
            NUMBER,
        ),
        Metric("metric_mean", "metric", "mean metric of the same rollouts", _BATCH),
        Metric(
            "truncated", "share", "share of the same rollouts that reached a length limit, also the recipe's", _BATCH
        ),
        Metric("lengths/count", "rollouts", "number of the same rollouts", _BATCH, LENGTHS),
        Metric(
            "lengths/truncated",
            "rollouts",
            "number of the same rollouts that reached a length limit, also the recipe's",
            _BATCH,
        ),
        Metric(
            "lengths/quantiles",
            "tokens",
            "lengths of the same rollouts: minimum, 10, 25, 50, 75, 90% quantiles and maximum",
            _BATCH,
        ),
        Metric("evicted", "prompts", "prompts set aside for more than one epoch", (*_AWAY, "verl"), COUNT),
        Metric("evicted_share", "share", "share of all prompts that are evicted now", ("verl",)),
        Metric("revived", "visits", "visits so far to prompts that had been evicted", (*_AWAY, "verl"), COUNT),
        Metric(
            "quarantined",
            "prompts",
            "prompts that are not drawn again because none of their rollouts got a score",
            (*_AWAY, "verl"),
            COUNT,
        ),
        Metric("loss", "", "mean loss over the optimizer steps of the batch", _BATCH, MEASURED),
        Metric(
            "grad_norm",
            "",
            "mean gradient norm before clipping, over the optimizer steps of the batch",
            (*_BATCH, "Tinker"),
            MEASURED,
        ),
        Metric("clip_fraction", "share", "share of tokens whose ratio was clipped", _BATCH),
        Metric("kl", "nats per token", "KL divergence to the reference policy, with `--kl`", _BATCH),
        Metric("approx_kl", "nats per token", "how far the update moved the policy, measured on 16 rows (SPO)", _BATCH),
        Metric("steps_in_batch", "steps", "optimizer steps on this batch", ("batch", "verl")),
        Metric("learning_rate", "", "learning rate of the last optimizer step", _BATCH),
        Metric("update_seconds", "s", "time of this update", _BATCH),
    ),
    "Trained rows compared with all rollouts": (
        Metric(
            "selection/tokens_sampled",
            "tokens",
            "mean length of all rollouts in groups that ended since the last update",
            _BATCHES,
        ),
        Metric(
            "selection/tokens_trained",
            "tokens",
            "mean length of the rows of the batch, without replayed rows",
            _BATCHES,
        ),
        Metric(
            "selection/difficulty_sampled",
            "0 to 1",
            "mean of 1 − pass rate over all rollouts in groups that ended; if no pass rate was predicted, the group's own "
            "pass rate is used",
            _BATCHES,
        ),
        Metric(
            "selection/difficulty_trained",
            "0 to 1",
            "the same for the rows of the batch, without replayed rows",
            _BATCHES,
        ),
        Metric(
            "teaching/OUTCOME",
            "share",
            f"share of the last {WINDOW:,} rollouts with this OUTCOME; outcomes are explained below the tables",
            (*_BATCHES, "end", "failed"),
            SHARES,
        ),
    ),
    "Recipes that predict (foresight, SPO, MoPPS)": (
        Metric(
            "prediction/rollouts", "rollouts", "rollouts that were predicted between the last two fits", _PREDICTION
        ),
        Metric("prediction/log_loss", "nats per rollout", "log-loss of these predictions", _PREDICTION),
        Metric(
            "prediction/constant_log_loss",
            "nats per rollout",
            "log-loss of the running mean on the same rollouts, for comparison",
            _PREDICTION,
        ),
        Metric("prediction/auc", "0 to 1", "AUC of these predictions", _PREDICTION),
        Metric("prediction/calibration_error", "probability", "calibration error of these predictions", _PREDICTION),
        Metric("prediction/drift", "logit", "rise of all logits between the last two fits", _PREDICTION),
        Metric("prediction/drift_offset", "logit", "rise of all logits since the last fit", _PREDICTION),
        Metric("prediction/weight/EXPERT", "share", "weight of EXPERT in the mixture of predictors", _BATCH),
    ),
    "Rollouts that continue across an update (asynchronous)": (
        Metric("streaming/in_flight", "rollouts", "rollouts that are running now", ("batch", "verl")),
        Metric(
            "streaming/straddled", "rollouts", "rollouts that continued across an update, since the last batch", _BATCH
        ),
        Metric("streaming/rows_mean", "rows", "mean number of rollouts in a decoding step", _BATCH),
        Metric("streaming/step_seconds", "s", "mean time of a decoding step", _BATCH),
        Metric("streaming/restarts", "restarts", "restarts of the generator process so far", _BATCH),
    ),
    "An evaluation": (
        Metric(
            "at",
            "rollouts",
            "rollouts at this point of the evaluation grid, a multiple of `--eval-every`; null: the final weights",
            _EVAL,
            COUNT,
        ),
        Metric("accuracy", "0 to 1", "held-out accuracy; null if no sample has a score", _EVAL, NUMBER),
        Metric(
            "standard_error",
            "0 to 1",
            "standard error of the accuracy over prompts; 0 if the accuracy is exact",
            _EVAL,
            AMOUNT,
        ),
        Metric("breadth/k", "attempts", "attempts per prompt in the following metrics", _EVAL, FIGURES),
        Metric("breadth/pass_at_k", "metric", "best metric of k attempts, mean over prompts", ("eval", "TRL")),
        Metric("breadth/full_marks", "share", "share of attempts with a metric of 1", ("eval", "TRL")),
        Metric(
            "breadth/distinct_right", "answers", "number of different right answers among k attempts", ("eval", "TRL")
        ),
        Metric(
            "breadth/right_pairs_differ",
            "probability",
            "probability that two right answers to a prompt differ",
            ("eval", "TRL"),
        ),
        Metric("breadth/entropy", "nats", "entropy of the next token", _EVAL),
        Metric("breadth/tokens", "tokens", "mean length of an attempt", _EVAL),
        Metric("eval_unscored", "samples", "samples without a score in this evaluation", _EVAL),
        Metric("eval_seconds", "s", "time of this evaluation", _EVAL),
    ),
    "Other lines": (
        Metric("why", "text", "why the run ended or failed", ("end", "failed"), TEXT),
        Metric("quarantined_keys", "keys", "keys of quarantined prompts, at most twenty", ("end", "failed")),
        Metric("lost", "prompts", "prompts of the checkpoint that are missing from the data", ("resume",)),
        Metric("new", "prompts", "prompts that are not in the checkpoint", ("resume",)),
        Metric("features_prompts", "prompts", "prompts whose features were computed", ("features",)),
        Metric("features_tokens", "tokens", "tokens of the forward passes for features", ("features",)),
        Metric("features_seconds", "s", "time of computing features; included in `seconds`", ("features",)),
    ),
    "Tinker": (
        Metric(
            "cost/KIND",
            "tokens",
            "tokens billed so far, including repeated work, by KIND: `prefill`, `cached`, `sampled`, `trained`",
            ("Tinker",),
        ),
        Metric("money", "`currency`", "cost so far according to `prices`", ("Tinker",)),
        Metric("currency", "text", "currency of `prices`", ("Tinker",)),
        Metric(
            "sampler_kl",
            "nats per token",
            "KL divergence from the sampling weights to the trained weights",
            ("Tinker",),
        ),
        Metric("loss_sum", "", "the service's loss, summed over tokens", ("Tinker",)),
        Metric("tinker/NAME", "", "other metrics that the service's trainer returns", ("Tinker",)),
    ),
    "A step of TRL": (
        Metric("generated", "rollouts", "rollouts generated since the last batch", ("TRL",)),
        Metric(
            "masked",
            "rows",
            "with `mask_truncated_completions`: rows of the batch that reached the length limit, so that the loss leaves "
            "them out",
            ("TRL",),
        ),
        Metric("stopped", "rollouts", "generated rollouts that the recipe stopped", ("TRL",)),
        Metric("failed", "rollouts", "generated rollouts without a score", ("TRL",)),
        Metric("entropy", "nats per token", "mean of −log π over all sampled tokens", ("TRL",)),
        Metric("held/rollouts", "rollouts", "rollouts that are kept for this batch and later ones", ("TRL",)),
    ),
    "A step of verl": (
        Metric("stage/NAME/groups", "groups", "groups that entered the stage NAME in this step", ("verl",)),
        Metric("stage/NAME/rollouts", "rollouts", "rollouts ordered in the stage", ("verl",)),
        Metric("stage/NAME/passed", "groups", "groups that passed the stage, including surplus groups", ("verl",)),
        Metric("stage/NAME/pass_rate", "share", "groups that passed, divided by groups that left the stage", ("verl",)),
        Metric(
            "stage/NAME/dropped/REASON",
            "share",
            "groups dropped for REASON (`too_easy`, `too_hard`, `solved`, `zero_variance` and so on), divided by groups "
            "that left the stage",
            ("verl",),
        ),
        Metric("stage/NAME/mean", "metric", "mean metric of the rollouts in the groups that left the stage", ("verl",)),
        Metric(
            "stage/NAME/deviation",
            "metric",
            "standard deviation of the metric within a group, mean over these groups",
            ("verl",),
        ),
        Metric(
            "groups_table",
            "table",
            "a table of these groups: stage, prompt, rollouts, mean and deviation of the metric, tokens, share of"
            " truncated rollouts, and what became of the group; needs `wandb` in `trainer.logger`",
            ("verl",),
        ),
        Metric("rounds", "rounds", "number of times that rollouts were ordered in this step", ("verl",)),
        Metric("held/groups", "groups", "groups that wait for a later batch", ("verl",)),
        Metric("held/in", "groups", "waiting groups that began to wait in this step", ("verl",)),
        Metric(
            "held/out", "groups", "groups of earlier steps that waited, and were trained on in this step", ("verl",)
        ),
        Metric("held/lost", "groups", "groups of earlier steps that waited, and were dropped in this step", ("verl",)),
        Metric("padding_rows", "rows", "padding rows in the batch, from which nothing is learned", ("verl",)),
        Metric(
            "requests_left",
            "requests",
            "requests on the servers after a batch, for recipes that stop rollouts",
            ("verl",),
        ),
        Metric("driver_seconds", "s", "time of the driver's own work", ("verl",)),
    ),
}
METRICS = tuple(metric for metrics in TABLE.values() for metric in metrics)


def fields_of(*where: str, needed: bool = False) -> dict[str, Field]:
    """The checks of the fields in the given kinds of lines, by field name.

    Args:
        where: kinds of lines.
        needed: True: only the fields that a line must have. False: only the optional fields.
    """
    return {
        metric.name.partition("/")[0]: metric.read
        for metric in METRICS
        if metric.read is not None and metric.needed == needed and not set(where).isdisjoint(metric.where)
    }


def undeclared(names: Iterable[str], *where: str) -> list[str]:
    """The names in `names` that are not metrics of these kinds of lines."""
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
    """The run's rollouts and tokens so far, rollouts by cause, and the state of its prompts."""
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
    """The quality of the recipe's predictions, without the weights of the experts."""
    figures = core.prompt_figures().items()
    return {"prediction": {name: value for name, value in figures if not name.startswith("weight/")}}


def of_batch(core: Allocator, batch: Batch) -> dict[str, Any]:
    """Metrics of a batch. Call this before the core is told `Updated`. Replayed rows are not counted as groups."""
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
        **({} if core.recipe.limit is None else {"limit": core.limit}),
    }


def _negative_weight(batch: Batch) -> float | None:
    """Σ |A| over A < 0, divided by Σ A over A > 0, without replayed rows; None if no row has a positive advantage."""
    advantages = [row.advantage for row in batch.rows if not row.replays]
    positive = sum(advantage for advantage in advantages if advantage > 0)
    return sum(-advantage for advantage in advantages if advantage < 0) / positive if positive > 0 else None


def pass_at_k(answers_NE: NDArray[np.int64], metrics_NE: NDArray[np.float64]) -> dict[str, float | None]:
    """Success and diversity of E attempts at each of N prompts, by the names of `Breadth`. Right answers have the metric 1.

    Equal answers have equal numbers in `answers_NE`. The metric of an attempt without a score is NaN. Each prompt has at
    least one score.
    """
    right_NE = metrics_NE >= _RIGHT
    right = [row_E[right_E] for row_E, right_E in zip(answers_NE, right_NE, strict=True)]
    times = [np.unique(row_R, return_counts=True)[1] for row_R in right]
    differ = [1 - float(n @ (n - 1)) / (n.sum() * (n.sum() - 1)) for n in times if n.sum() > 1]
    return {
        "pass_at_k": float(np.nanmax(metrics_NE, axis=1).mean()),
        "full_marks": float(np.nanmean(np.where(np.isnan(metrics_NE), np.nan, right_NE), axis=1).mean()),
        "distinct_right": float(np.mean([len(n) for n in times])),
        "right_pairs_differ": float(np.mean(differ)) if differ else None,
    }
