"""How well a rollout's success can be predicted from its prompt's features, from its prompt's record, or from both."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollalloc.advise.rates import Floats, Ints, fit_rates
from rollalloc.core.seeds import rng
from rollalloc.predict.quality import LEAST, auc, log_losses
from rollalloc.predict.ridge import design, fit, sigmoid
from rollalloc.waste.groups import Groups
from rollalloc.waste.shares import Share

LEAST_PROMPTS = 20  # with fewer prompts, folds are too small to learn from
_FOLDS = 5
_RIDGE = 16.0  # with this ridge, the prior standard deviation of a logit is 1
_NO_TEXT, _ALONE = "the prompts' texts are not in the log", "prompts with one rollout have no record"
_MOST = 2048  # maximum number of prompts to use; more would make the intervals only a little narrower


@dataclass(frozen=True, slots=True)
class Predicted:
    """Quality of cross-validated predictions.

    Attributes:
        auc: probability that a right rollout had a higher predicted rate than a wrong one.
        log_loss: log-loss in nats per rollout.
    """

    auc: Share
    log_loss: Share


@dataclass(frozen=True, slots=True)
class Predictability:
    """Quality of the predictions from each source of information. None: nothing can be predicted from this source.

    Attributes:
        features: predictions from features of the prompt's text.
        record: predictions from the success rate of the prompt's other rollouts.
        both: predictions from both.
        blind: log-loss of predicting the mean rate, in nats per rollout.
        prompts: number of prompts used.
        note: why a source could not be used; empty if all could be used.
    """

    features: Predicted | None
    record: Predicted | None
    both: Predicted | None
    blind: Share
    prompts: int
    note: str = ""

    @property
    def auc(self) -> float | None:
        """AUC of the predictions with the lowest log-loss; None if there are none."""
        known = [accuracy for accuracy in (self.both, self.record, self.features) if accuracy is not None]
        return min(known, key=lambda accuracy: accuracy.log_loss.value).auc.value if known else None


@dataclass(frozen=True, slots=True)
class _Events:
    """Rollouts of P prompts in 2P rows: first a row for the right rollouts of each prompt, then one for the wrong ones.

    A rollout's record is the results of its prompt's other rollouts. All right rollouts of a prompt have the same record:
    the prompt's counts with one success fewer. The record of all wrong rollouts has one failure fewer. So two rows per
    prompt are enough.
    """

    hits_P: Ints
    count_P: Ints
    fold_P: Ints

    @property
    def hits_E(self) -> Floats:
        return np.concatenate([self.hits_P, np.zeros_like(self.hits_P)]).astype(np.float64)

    @property
    def count_E(self) -> Floats:
        return np.concatenate([self.hits_P, self.count_P - self.hits_P]).astype(np.float64)


def predictability_of(
    judged: Groups, features_PD: NDArray[np.float32] | None = None, *, seed: int = 0, resamples: int = 200
) -> tuple[Predictability | None, str]:
    """Measure how well success is predicted, by cross-validation with five folds of prompts.

    Predictions are made by ridge logistic regression on the features, on the record, or on both. The record is the logit of
    E[p | s of n], the posterior mean under the fitted mixture of rates, where s and n count the prompt's other rollouts.
    Intervals are bootstrapped over prompts, without fitting again.

    Args:
        judged: groups whose rewards are 0, 1 or NaN.
        features_PD: features of each prompt, NaN if unknown. None: the features in the log.
        seed: seed of folds and resamples, at least 0.
        resamples: number of resamples of the bootstrap.

    Returns:
        The result and an empty text. If nothing could be predicted, None and a sentence that says why.
    """
    features_PD = judged.features_PD if features_PD is None else features_PD
    right_R, scored_R = np.nan_to_num(judged.rewards_R), ~np.isnan(judged.rewards_R)
    prompt_R = np.repeat(judged.prompt_V, judged.size_V)
    all_P = np.bincount(prompt_R[scored_R], minlength=len(judged.keys))
    random = rng(seed, "advise predictability")
    chosen_P = random.permutation(np.flatnonzero(all_P))[:_MOST]
    hits_P = np.bincount(prompt_R, right_R, len(judged.keys)).astype(np.int64)[chosen_P]
    events = _Events(hits_P, all_P[chosen_P], np.arange(len(chosen_P)) % _FOLDS)
    if len(chosen_P) < LEAST_PROMPTS:
        return None, f"success cannot be predicted from {len(chosen_P)} prompts, at least {LEAST_PROMPTS} are needed"
    if hits_P.sum() in (0, events.count_P.sum()):
        return None, "there is nothing to predict: all rollouts are right, or all are wrong"
    by_record, by_text = bool((events.count_P > 1).all()), bool(np.isfinite(features_PD[chosen_P]).all())
    columns = {
        "features": np.tile(features_PD[chosen_P], (2, 1)) if by_text else None,
        "record": _record(events) if by_record else None,
    }
    if by_text and by_record:
        columns["both"] = np.column_stack([columns["features"], columns["record"]])
    times_BP = random.multinomial(len(chosen_P), np.full(len(chosen_P), 1 / len(chosen_P)), resamples)
    said = {
        name: rows if rows is None else _judge(events, _said(events, rows), times_BP) for name, rows in columns.items()
    }
    blind_E = np.full(2 * len(chosen_P), hits_P.sum() / events.count_P.sum())
    missing = [*(() if by_text else (_NO_TEXT,)), *(() if by_record else (_ALONE,))]
    return (
        Predictability(
            features=said["features"],
            record=said["record"],
            both=said.get("both"),
            blind=_judge(events, blind_E, times_BP).log_loss,
            prompts=len(chosen_P),
            note="; ".join(missing),
        ),
        "",
    )


def predicted_rates(hits_P: Ints, count_P: Ints, features_PD: NDArray[np.float32], *, seed: int = 0) -> Floats:
    """Success rate of each prompt, predicted by ridge logistic regression fitted to the other folds; shape (P,).

    Args:
        hits_P: number of right rollouts of each prompt, in [0, count].
        count_P: number of scored rollouts of each prompt.
        features_PD: finite features of each prompt.
        seed: seed of the folds, at least 0.
    """
    fold_P = rng(seed, "advise predicted rates").permutation(len(hits_P)) % _FOLDS
    return _said(_Events(hits_P, count_P, fold_P), np.tile(features_PD, (2, 1)))[: len(hits_P)]


def _record(events: _Events) -> Floats:
    """Logits of the success rate predicted from a prompt's record, shape (2P, 1), in the order of `_Events`. The mixture of
    rates is fitted to the prompts of the other folds.
    """
    right_P, wrong_P = np.empty(len(events.hits_P)), np.empty(len(events.hits_P))
    for fold in range(_FOLDS):
        held_P = events.fold_P == fold
        others = fit_rates(events.hits_P[~held_P], events.count_P[~held_P], resamples=0)
        hits_H, count_H = events.hits_P[held_P], events.count_P[held_P]
        right_P[held_P] = others.posterior_mean(np.maximum(hits_H - 1, 0), count_H - 1)
        wrong_P[held_P] = others.posterior_mean(np.minimum(hits_H, count_H - 1), count_H - 1)
    rate_E = np.clip(np.concatenate([right_P, wrong_P]), LEAST, 1 - LEAST)
    return np.log(rate_E / (1 - rate_E))[:, None]


def _said(events: _Events, rows_ED: NDArray[np.floating]) -> Floats:
    """The rate of each row, predicted by a regression fitted to the other folds."""
    said_E, fold_E = np.empty(len(rows_ED)), np.tile(events.fold_P, 2)
    hits_E, count_E = events.hits_E, events.count_E
    spread_D = rows_ED.std(0)
    scaled_ED = ((rows_ED - rows_ED.mean(0)) / np.where(spread_D > 0, spread_D, 1.0)).astype(np.float32)
    width = scaled_ED.shape[1]
    phi_EF = design(scaled_ED, np.zeros(width, np.float32), np.ones(width, np.float32)).astype(np.float64)
    for fold in range(_FOLDS):
        held_E = fold_E == fold
        some_E = ~held_E & (count_E > 0)
        ones, offset = np.ones(some_E.sum()), np.zeros(some_E.sum())
        (theta_F,), *_ = fit(
            phi_EF[some_E], hits_E[some_E], count_E[some_E], ones, offset, [_RIDGE], np.zeros((1, width + 1))
        )
        said_E[held_E] = sigmoid(phi_EF[held_E] @ theta_F)
    return said_E


def _judge(events: _Events, said_E: Floats, times_BP: Ints) -> Predicted:
    """AUC and log-loss with their intervals.

    Only rollouts of the same fold are compared for the AUC. A model for a fold with few successes is fitted to folds with
    more successes, so it predicts higher rates. Across folds, the AUC of useless predictions would therefore be below 1/2.
    """
    fold_E = np.tile(events.fold_P, 2)

    def figures(times_P: NDArray[np.integer]) -> tuple[float, float]:
        hits_E, count_E = events.hits_E * np.tile(times_P, 2), events.count_E * np.tile(times_P, 2)
        ordered = pairs = 0.0
        for fold in range(_FOLDS):
            held_E = fold_E == fold
            hits_H, count_H = hits_E[held_E], count_E[held_E]
            pairs_here = float(hits_H.sum() * (count_H - hits_H).sum())
            ordered, pairs = ordered + pairs_here * (auc(said_E[held_E], hits_H, count_H) or 0.0), pairs + pairs_here
        loss = float(log_losses(said_E[:, None], hits_E, count_E)[0] / count_E.sum())
        return (ordered / pairs if pairs else 0.5), loss

    value = figures(np.ones(len(events.hits_P), np.int64))
    low_2, high_2 = np.quantile([figures(times_P) for times_P in times_BP], (0.025, 0.975), axis=0).tolist()
    shares = [Share(*interval) for interval in zip(value, zip(low_2, high_2, strict=True), strict=True)]
    return Predicted(*shares)
