"""The predictor: a mixture of regressions on features, the prompt's record and a running mean, weighted by past losses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollalloc.predict import drift, quality, ridge, ring
from rollalloc.predict.ridge import Features

Memory = dict[str, Any]  # the state: numpy arrays, numbers, strings and lists of them

SILENT = 1e-4  # predictions for draws skip a block of features if all its experts have smaller weights than this
_LEAST_RIDGE = 1e-4  # with a smaller ridge, nearly equal columns would make the fit numerically singular
WIDEST = 1024  # maximum number of columns of a block; the time of a fit grows with the square and more
FADED = 0.03  # a fit leaves out events with a smaller weight than this


def mixture(loss_E: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weights w ∝ exp(−L) for losses in nats; shape (E,), sum 1."""
    weight_E = np.exp(loss_E.min() - loss_E)
    return weight_E / weight_E.sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictor:
    """Predicts a prompt's success rate before its rollouts: p̂ = Σ_e w_e p_e with w_e ∝ exp(−L_e).

    The experts e are:

    - For each block of features and each ridge λ, a logistic regression with a Laplace posterior. It predicts p_e = σ(κ(μ
      + δ)) with κ = 1/√(1 + πv/8). μ and v are the mean and the variance of the logit, and δ is the drift of all logits
      since the last fit. Events are weighted by 2^(−age/half_life).
    - The running mean c of all metrics.
    - The prompt's own record: p = (h + aB) / (n + a), for h successes in n rollouts. h and n decay by
      2^(−age/half_life). B is the mixture of all other experts.

    L_e is the log-loss of the predictions that expert e made before the outcomes were known. L_e decays by
    2^(−rollouts/loss_half_life). Before the first fit, only the record and the mean are mixed.

    In a fit, the logit of an event at time t is φθ + D(t) − D(now), where D(t) is the drift up to time t. The fitted
    parameters include the drift up to now, so δ starts at 0 again after each fit.

    The state is a flat dictionary. The caller keeps and saves it. Nothing is random. Durations are counted in rollouts.

    Attributes:
        ridges: λ of each regression, at least one; each 0.0001 or more.
        half_life: half-life of an event's weight in a fit, and of the counts in a prompt's record.
        loss_half_life: half-life of the experts' losses.
        mean_half_life: half-life of the running mean.
        record_weight: a. In the prediction from a prompt's record, B has the weight of this many rollouts.
        prior_weight: number of rollouts that a prior rate counts for in a prompt's record.
        drift_rate: q, the variance of the drift per rollout, in logits². 0: no drift.
        events: number of newest visits to keep.
        first_fits: the first fits happen after these numbers of rollouts, ascending.
        fit_every: number of rollouts between later fits.
        track_every: number of rollouts between updates of losses and drift.

    Raises:
        ValueError: a value is out of its range.
    """

    ridges: tuple[float, ...] = (0.1, 1.0, 10.0)
    half_life: float = 2000.0
    loss_half_life: float = 600.0
    mean_half_life: float = 500.0
    record_weight: float = 2.0
    prior_weight: float = 8.0
    drift_rate: float = 2e-4
    events: int = 8192
    first_fits: tuple[int, ...] = (64, 128, 192, 256, 384, 512)
    fit_every: int = 640
    track_every: int = 64

    def __post_init__(self) -> None:
        object.__setattr__(self, "ridges", tuple(self.ridges))
        object.__setattr__(self, "first_fits", tuple(self.first_fits))
        for name in ("half_life", "loss_half_life", "mean_half_life", "record_weight", "prior_weight"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {getattr(self, name)!r}")
        for name in ("events", "fit_every", "track_every"):
            if not (isinstance(getattr(self, name), int) and getattr(self, name) >= 1):
                raise ValueError(f"{name} must be a whole number of 1 or more, got {getattr(self, name)!r}")
        if not (self.ridges and all(_LEAST_RIDGE <= strength < math.inf for strength in self.ridges)):
            raise ValueError(
                f"ridges must contain at least one number, each finite and {_LEAST_RIDGE} or more, got {self.ridges}"
            )
        if list(self.first_fits) != sorted({*self.first_fits} - {0}) or min(self.first_fits, default=1) < 0:
            raise ValueError(f"first_fits must be 1 or more, each larger than the one before, got {self.first_fits}")
        if not 0 <= self.drift_rate < math.inf:
            raise ValueError(f"drift_rate must be 0 or more and finite, got {self.drift_rate!r}")

    def _next_fit(self, paid: int) -> int:
        """The total number of rollouts at which the next fit is due, after `paid` rollouts so far."""
        return next((fit for fit in self.first_fits if fit > paid), paid + self.fit_every)

    def init(
        self,
        prompts: int,
        widths: Mapping[str, int],
        prior_N: ArrayLike | None = None,
    ) -> Memory:
        """Return the memory before the first rollout.

        Args:
            prompts: N, at least 1.
            widths: number of columns of each block of features, in [1, `WIDEST`]. Empty: there are no features.
            prior_N: prior success rate of each prompt, in [0, 1], NaN if unknown; shape (N,). A prior counts for
                `prior_weight` rollouts in the prompt's record.

        Raises:
            ValueError: a block has more than `WIDEST` columns.
        """
        for name, width in widths.items():
            if width > WIDEST:
                raise ValueError(
                    f"features {name!r}: expected at most {WIDEST:,} columns, got {width:,}, with which a fit takes many "
                    "seconds; project them to 256, for example: "
                    f"rollalloc.data.feature_blocks.own_features({{{name!r}: array}})"
                )
        given_N = np.full(prompts, np.nan) if prior_N is None else np.asarray(prior_N, np.float64)
        known_N = ~np.isnan(given_N)
        count_N = known_N * self.prior_weight
        hits_N = np.where(known_N, given_N, 0) * count_N
        memory: Memory = {
            "hits_N": hits_N.astype(np.float32),
            "count_N": count_N.astype(np.float32),
            "last_N": np.zeros(prompts, np.int64),  # number of rollouts observed at the last update of the record
            "blocks": sorted(widths),
            "widths": [int(widths[name]) for name in sorted(widths)],
            "loss_E": np.zeros(len(widths) * len(self.ridges) + 2),
            "paid": 0,
            "mean_hits": 0.5,
            "mean_count": 1.0,
            "drift": 0.0,  # D now
            "drift_variance": 0.0,
            "drift_fits": [0.0, 0.0],  # D at the last two fits, the older fit first
            "event_fits": [0, 0],  # number of events at these fits
            "fits": 0,
            "tracked": 0,  # number of events that are included in the losses
            "fit_at": self._next_fit(0),
            "track_at": self.track_every,
        }
        for name in memory["blocks"]:
            width, ridge_count = widths[name], len(self.ridges)
            memory[f"centre/{name}"], memory[f"scale/{name}"] = np.zeros(width, np.float32), np.ones(width, np.float32)
            memory[f"theta/{name}"] = np.zeros((ridge_count, width + 1))
            memory[f"basis/{name}"] = np.eye(width + 1, dtype=np.float32)
            memory[f"spread/{name}"] = np.zeros((ridge_count, width + 1), np.float32)
        return memory | ring.empty(self.events)

    def __call__(self, memory: Memory, features: Features, prompts_K: ArrayLike) -> NDArray[np.float64]:
        """Predict the success rate p̂ of each of these prompts, in [0.001, 0.999]. The arguments are not checked.

        Args:
            memory: not changed.
            features: the blocks by name, each of shape (N, D). Only rows of these prompts are read.
            prompts_K: indices in [0, N), in any order.

        Returns:
            Shape (K,).
        """
        asked_K = np.asarray(prompts_K, np.int64).reshape(-1)
        weight_E = self._weights(memory)
        age_K = np.maximum(memory["paid"] - memory["last_N"][asked_K], 0)
        kept_K = 0.5 ** (age_K / self.half_life)
        said_KE = self._said(
            memory,
            self._logits(memory, features, asked_K, SILENT),
            np.full(asked_K.size, memory["mean_hits"] / memory["mean_count"]),
            kept_K * memory["hits_N"][asked_K],
            kept_K * memory["count_N"][asked_K],
        )
        return np.clip(said_KE @ weight_E, quality.LEAST, 1 - quality.LEAST)

    def observe(self, memory: Memory, prompt: int, predicted: float | None, hits: float, count: int) -> None:
        """Learn from a visit that was scored.

        Args:
            memory: changed in place.
            prompt: in [0, N).
            predicted: the p̂ with which the prompt was drawn, in (0, 1), for `figures`; None without a prediction.
            hits: sum of the visit's metrics, each in [0, 1].
            count: number of the visit's scored rollouts, at least 1.
        """
        hits_N, count_N, last_N, paid = memory["hits_N"], memory["count_N"], memory["last_N"], memory["paid"]
        kept = 0.5 ** (max(paid - int(last_N[prompt]), 0) / self.half_life)
        record_hits, record_count = kept * float(hits_N[prompt]), kept * float(count_N[prompt])
        mean_hits, mean_count = memory["mean_hits"], memory["mean_count"]
        paid = memory["paid"] = paid + count
        ring.append(
            memory, prompt, hits, count, paid, math.nan if predicted is None else predicted, mean_hits / mean_count,
            record_hits, record_count, memory["drift"],
        )  # fmt: skip
        faded = 0.5 ** (count / self.half_life)
        hits_N[prompt], count_N[prompt], last_N[prompt] = faded * record_hits + hits, faded * record_count + count, paid
        faded = 0.5 ** (count / self.mean_half_life)
        memory["mean_hits"], memory["mean_count"] = faded * mean_hits + hits, faded * mean_count + count

    def due(self, memory: Memory) -> bool:
        """Whether enough rollouts have been observed for the next `refit`."""
        return memory["paid"] >= min(memory["track_at"], memory["fit_at"])

    def refit(self, memory: Memory, features: Features) -> None:
        """Update losses and drift. If a fit is due, fit the parameters too.

        Args:
            memory: changed in place.
            features: the blocks by name, each of shape (N, D). Only rows of prompts with kept events are read.
        """
        self._track(memory, features)
        if memory["paid"] >= memory["fit_at"]:
            self._fit(memory, features)
        memory["track_at"] = memory["paid"] + self.track_every

    def figures(self, memory: Memory) -> dict[str, float]:
        """Return measures of the predictions between the last two fits, and the current weights of the experts.

        Returns:
            rollouts: number of rollouts predicted between these fits.
            auc, calibration_error, log_loss: measures of the predictions; log_loss in nats per rollout.
            constant_log_loss: log_loss of the running mean, for comparison.
            drift: rise of all logits between the fits. drift_offset: δ now.
            weight/…: weight of each expert. Undefined numbers are left out.
        """
        weight_E = self._weights(memory)
        names = [f"{name}/{penalty:g}" for name in memory["blocks"] for penalty in self.ridges] + ["mean", "record"]
        before, after = memory["drift_fits"]
        shown = {"drift": after - before, "drift_offset": memory["drift"] - after}
        shown |= {f"weight/{name}": float(weight) for name, weight in zip(names, weight_E, strict=True)}
        at = ring.slots(memory, *memory["event_fits"])
        at = at[~np.isnan(memory["event_belief"][at])]
        hits_K, count_K = memory["event_hits"][at], memory["event_count"][at].astype(np.float64)
        shown["rollouts"] = float(count_K.sum())
        if not at.size:
            return shown
        belief_K = memory["event_belief"][at]
        both_KE = np.stack([belief_K, memory["event_constant"][at]], 1)
        log_loss, constant = quality.log_losses(both_KE, hits_K, count_K) / count_K.sum()
        shown |= {"log_loss": float(log_loss), "constant_log_loss": float(constant)}
        shown["calibration_error"] = quality.calibration_error(belief_K, hits_K, count_K)
        area = quality.auc(belief_K, hits_K, count_K)
        return shown if area is None else shown | {"auc": area}

    def remap(
        self,
        memory: Memory,
        source_N: ArrayLike,
        widths: Mapping[str, int] | None = None,
        prior_N: ArrayLike | None = None,
    ) -> Memory:
        """Return the memory for another data set. It keeps the records and events of prompts that are in both data sets.

        If no width changes, parameters, losses and drift are kept, so the new features must have the same meaning as the
        old. If a width changes, all parameters are fitted to the kept events at the next `refit`, and losses and drift
        start again.

        Args:
            memory: not changed.
            source_N: index of each new prompt in the old data set, each index at most once; −1 if not in the old data set.
            widths: number of columns of each block of the new features. None: unchanged.
            prior_N: prior success rates of the new data set, used for new prompts; see `init`.
        """
        from_N = np.asarray(source_N, np.int64).reshape(-1)
        known_N, old = from_N >= 0, len(memory["hits_N"])
        out = {
            name: value.copy() if isinstance(value, np.ndarray) else list(value) if isinstance(value, list) else value
            for name, value in memory.items()
        }
        before = dict(zip(memory["blocks"], memory["widths"], strict=True))
        fresh = self.init(from_N.size, before if widths is None else widths, prior_N)
        for name in ("hits_N", "count_N", "last_N"):
            out[name] = np.where(known_N, memory[name][from_N], fresh[name]).astype(memory[name].dtype)
        out["last_N"] = np.where(known_N, out["last_N"], memory["paid"])
        out["event_prompt"] = ring.renumbered(memory["event_prompt"], from_N, old)
        return out if widths is None or dict(widths) == before else self._unfitted(out, fresh)

    @staticmethod
    def _unfitted(memory: Memory, fresh: Memory) -> Memory:
        """Keep the records and events of `memory`, and take the parameters of `fresh`. The next fit is due at once."""
        seen = memory["seen"]
        memory["event_drift"] = np.zeros_like(memory["event_drift"])
        fitted = ("blocks", "widths", "loss_E", "drift", "drift_variance", "drift_fits", "fits", "fit_at")
        kept = {name: value for name, value in memory.items() if "/" not in name}
        of_blocks = {name: value for name, value in fresh.items() if "/" in name}
        changed = {name: fresh[name] for name in fitted} | {"event_fits": [seen, seen], "tracked": seen}
        return kept | of_blocks | changed

    @staticmethod
    def _weights(memory: Memory) -> NDArray[np.float64]:
        """The weight of every expert, shape (E,).

        The order is: the regressions, sorted by block and then by ridge; the mean; the record.
        """
        if memory["fits"]:
            return mixture(memory["loss_E"])
        return np.concatenate([np.zeros(memory["loss_E"].size - 2), mixture(memory["loss_E"][-2:])])

    def _logits(
        self, memory: Memory, features: Features, prompts_K: NDArray[np.int64], least: float
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """μ and v of the regressions, shape (K, blocks · ridges).

        Blocks are skipped if all their experts have weights below `least`. The entries of skipped blocks are 0.
        """
        ridge_count, blocks = len(self.ridges), memory["blocks"]
        flat = (prompts_K.size, len(blocks) * ridge_count)
        mean_KBR = np.zeros((prompts_K.size, len(blocks), ridge_count))
        variance_KBR = np.zeros_like(mean_KBR)
        weight_BR = mixture(memory["loss_E"][:-1])[:-1].reshape(len(blocks), ridge_count)
        for at, name in enumerate(blocks if memory["fits"] else ()):
            if weight_BR[at].max() < least:
                continue
            phi_KF = ridge.design(features[name][prompts_K], memory[f"centre/{name}"], memory[f"scale/{name}"])
            mean_KBR[:, at], variance_KBR[:, at] = ridge.moments(
                phi_KF, memory[f"theta/{name}"], memory[f"basis/{name}"], memory[f"spread/{name}"]
            )
        return mean_KBR.reshape(flat), variance_KBR.reshape(flat)

    def _said(
        self,
        memory: Memory,
        logits: tuple[NDArray[np.float64], NDArray[np.float64]],
        mean_K: NDArray[np.float64],
        hits_K: NDArray[np.float64],
        count_K: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """The prediction of every expert, shape (K, E)."""
        mu_KE, v_KE = logits
        delta = memory["drift"] - memory["drift_fits"][1]
        said_KE = np.column_stack([ridge.sigmoid(ridge.flatness(v_KE) * (mu_KE + delta)), mean_K])
        others_K = said_KE @ mixture(memory["loss_E"][:-1]) if memory["fits"] else mean_K
        record_K = (hits_K + self.record_weight * others_K) / (count_K + self.record_weight)
        return np.column_stack([said_KE, record_K])

    def _track(self, memory: Memory, features: Features) -> None:
        """Add the losses of new events, and update the drift."""
        at = ring.slots(memory, memory["tracked"], memory["seen"])
        if memory["fits"] and at.size:
            hits_K, count_K = memory["event_hits"][at], memory["event_count"][at].astype(np.float64)
            mu_KE, v_KE = self._logits(memory, features, memory["event_prompt"][at], 0.0)
            held = [memory[f"event_{name}"][at] for name in ("constant", "record_hits", "record_count")]
            said_KE = self._said(memory, (mu_KE, v_KE), *held)
            kept = 0.5 ** (count_K.sum() / self.loss_half_life)
            before_E = memory["loss_E"]
            memory["loss_E"] = kept * before_E + quality.log_losses(said_KE, hits_K, count_K)
            if mu_KE.size:
                weight_E = mixture(before_E[:-2])
                rate_KE = np.clip(said_KE[:, :-2], quality.LEAST, 1 - quality.LEAST)
                slope_K = (ridge.flatness(v_KE) * rate_KE * (1 - rate_KE)) @ weight_E
                memory["drift"], memory["drift_variance"] = drift.step(
                    memory["drift"],
                    memory["drift_variance"],
                    rate_KE @ weight_E,
                    slope_K,
                    hits_K,
                    count_K,
                    self.drift_rate,
                )
            memory["event_drift"][at] = memory["drift"]  # D at these events
        memory["tracked"] = memory["seen"]

    def _fit(self, memory: Memory, features: Features) -> None:
        """Fit new parameters to the events that have not faded."""
        at = ring.slots(memory, 0, memory["seen"])
        weight_K = 0.5 ** ((memory["paid"] - memory["event_paid"][at]) / self.half_life)
        at, weight_K = at[weight_K >= FADED], weight_K[weight_K >= FADED]
        offset_K = memory["event_drift"][at] - memory["drift"]
        hits_K, count_K = memory["event_hits"][at], memory["event_count"][at].astype(np.float64)
        for name in memory["blocks"] if at.size else ():
            rows_KD = features[name][memory["event_prompt"][at]]
            if not memory["fits"]:
                memory[f"centre/{name}"], memory[f"scale/{name}"] = ridge.measure(rows_KD)
            phi_KF = ridge.design(rows_KD, memory[f"centre/{name}"], memory[f"scale/{name}"]).astype(np.float64)
            memory[f"theta/{name}"], memory[f"basis/{name}"], memory[f"spread/{name}"] = ridge.fit(
                phi_KF, hits_K, count_K, weight_K, offset_K, self.ridges, memory[f"theta/{name}"]
            )
        memory["fits"] += bool(at.size)
        memory["drift_fits"] = [memory["drift_fits"][1], memory["drift"]]
        memory["event_fits"] = [memory["event_fits"][1], memory["seen"]]
        memory["fit_at"] = self._next_fit(memory["paid"])
