"""The predictor: experts on features, a record of each prompt and a running mean, mixed by what they got wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollalloc.predict import drift, quality, ridge, ring
from rollalloc.predict.ridge import Features, rows_of

Memory = dict[str, Any]  # numpy arrays, numbers, strings and lists of them

SILENT = 1e-4  # a block whose experts all weigh less is not asked for a draw
_LEAST_RIDGE = 1e-4  # with less, columns that are nearly equal could not be told from singular ones
FADED = 0.03  # a weight below it: the event is not fitted to


def mixture(loss_E: NDArray[np.float64]) -> NDArray[np.float64]:
    """w ∝ exp(−L), of losses in nats; shape (E,), sum 1."""
    weight_E = np.exp(loss_E.min() - loss_E)
    return weight_E / weight_E.sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictor:
    """A prompt's success rate before a rollout of it, p̂ = Σ_e w_e p_e, w_e ∝ exp(−L_e).

    The experts: for each block of features and each ridge λ a logistic regression with a Laplace posterior,
    p_e = σ(κ(μ + δ)), κ = 1/√(1 + πv/8), on events weighted by 2^(−age/half_life), where δ is the drift of all logits
    since the parameters were fitted; the running mean c; and the prompt's record, p = (h + aB) / (n + a), where h successes
    in n rollouts are faded by age and B is the mixture of all other experts. L_e is the log-loss of what an expert said
    before it knew, faded by 2^(−rollouts/loss_half_life). Before the first fit only the record and the mean are mixed.

    An event's logit is φθ + D(its time) − D(now) in a fit, where D is the path of the drift, so that what the parameters
    take in of the drift is taken out of δ, which begins at 0 after each fit.

    State is a flat dictionary that the caller owns and saves; nothing is random. Lengths of time are numbers of rollouts.

    Attributes:
        ridges: λ, each .0001 or more, at least one.
        half_life: of an event's weight in a fit, and of a prompt's record.
        loss_half_life: of the experts' losses.
        mean_half_life: of the running mean.
        record_weight: a, the rollouts that B counts for beside a prompt's own.
        prior_weight: the rollouts that a prompt's prior counts for in its record, where it has one.
        drift_rate: q, variance of the drift's step a rollout, logits²; 0: no drift is followed.
        events: the newest visits that are kept.
        first_fits: rollouts after which the parameters are fitted at first, ascending.
        fit_every: rollouts between two fits after those.
        track_every: rollouts after which losses and drift are brought up to date.

    Raises:
        ValueError: a value out of range.
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
        if not (self.ridges and all(_LEAST_RIDGE <= each < math.inf for each in self.ridges)):
            raise ValueError(f"ridges must be finite, {_LEAST_RIDGE} or more, and at least one, got {self.ridges}")
        if list(self.first_fits) != sorted({*self.first_fits} - {0}) or min(self.first_fits, default=1) < 0:
            raise ValueError(f"first_fits must ascend from 1 or more, got {self.first_fits}")
        if not 0 <= self.drift_rate < math.inf:
            raise ValueError(f"drift_rate must be 0 or more and finite, got {self.drift_rate!r}")

    def _next_fit(self, paid: int) -> int:
        """The number of rollouts at which the next fit is due, after so many."""
        return next((each for each in self.first_fits if each > paid), paid + self.fit_every)

    def init(
        self,
        prompts: int,
        widths: Mapping[str, int],
        prior_N: ArrayLike | None = None,
    ) -> Memory:
        """The memory before the first rollout.

        Args:
            prompts: N, at least 1.
            widths: the number of columns of each block of features, at least 1; no block at all is fine.
            prior_N: success rate of each prompt in [0, 1] believed before, NaN where unknown; shape (N,). In its record it
                counts for `prior_weight` rollouts.

        Raises:
            ValueError: an argument out of its range.
        """
        if prompts < 1 or any(width < 1 for width in widths.values()):
            raise ValueError(
                f"expected a prompt and a column a block or more, got {prompts} prompts, widths {dict(widths)}"
            )
        given_N = np.full(prompts, np.nan) if prior_N is None else np.asarray(prior_N, np.float64)
        known_N = ~np.isnan(given_N)
        if given_N.shape != (prompts,) or not ((given_N[known_N] >= 0) & (given_N[known_N] <= 1)).all():
            raise ValueError(f"prior_N must hold {prompts} rates in [0, 1], or NaN where unknown")
        count_N = known_N * self.prior_weight
        hits_N = np.where(known_N, given_N, 0) * count_N
        memory: Memory = {
            "hits_N": hits_N.astype(np.float32),
            "count_N": count_N.astype(np.float32),
            "last_N": np.zeros(prompts, np.int64),  # rollouts observed when the record was last brought up to date
            "blocks": sorted(widths),
            "widths": [int(widths[name]) for name in sorted(widths)],
            "loss_E": np.zeros(len(widths) * len(self.ridges) + 2),
            "paid": 0,
            "mean_hits": 0.5,
            "mean_count": 1.0,
            "drift": 0.0,  # D, now
            "drift_variance": 0.0,
            "drift_fits": [0.0, 0.0],  # D at the last fit but one, and at the last
            "event_fits": [0, 0],  # events seen then
            "fits": 0,
            "tracked": 0,  # events whose losses are counted
            "fit_at": self._next_fit(0),
            "track_at": self.track_every,
        }
        for name in memory["blocks"]:
            width, several = widths[name], len(self.ridges)
            memory[f"centre/{name}"], memory[f"scale/{name}"] = np.zeros(width, np.float32), np.ones(width, np.float32)
            memory[f"theta/{name}"] = np.zeros((several, width + 1))
            memory[f"basis/{name}"] = np.eye(width + 1, dtype=np.float32)
            memory[f"spread/{name}"] = np.zeros((several, width + 1), np.float32)
        return memory | ring.empty(self.events)

    def __call__(self, memory: Memory, features: Features, prompts_K: ArrayLike) -> NDArray[np.float64]:
        """p̂ of the prompts asked for, in [.001, .999]; reads no other rows of the features.

        Args:
            memory: left as it is.
            features: each block's shape (N, D).
            prompts_K: indices in [0, N), in any order.

        Returns:
            Shape (K,).

        Raises:
            ValueError: an index out of range; a block that is missing, of another shape, or not finite for one of them.
        """
        asked_K = np.asarray(prompts_K, np.int64).reshape(-1)
        if asked_K.size and not 0 <= asked_K.min() <= asked_K.max() < len(memory["hits_N"]):
            raise ValueError(f"prompts must be in [0, {len(memory['hits_N'])}), got {asked_K.min()} to {asked_K.max()}")
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
        """A visit was scored.

        Args:
            memory: written to.
            prompt: in [0, N).
            predicted: the p̂ that it was drawn with, in (0, 1); None where there was none. `figures` judges it.
            hits: sum of its metrics, each in [0, 1].
            count: its scored rollouts, 0 or more; nothing is learned from 0.

        Raises:
            ValueError: an argument out of its range.
        """
        if not (
            0 <= prompt < len(memory["hits_N"]) and 0 <= hits <= count and (predicted is None or 0 < predicted < 1)
        ):
            raise ValueError(
                f"expected a prompt in [0, {len(memory['hits_N'])}), hits in [0, count] and a predicted rate in (0, 1) "
                f"or none, got prompt {prompt}, hits {hits}, count {count}, predicted {predicted}; hits are the sum of "
                "metrics in [0, 1]"
            )
        hits, count = float(hits), index(count)
        if count == 0:
            return
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
        """Whether enough rollouts came since the last `refit` for another."""
        return memory["paid"] >= min(memory["track_at"], memory["fit_at"])

    def refit(self, memory: Memory, features: Features) -> None:
        """Bring losses and drift up to date, and the parameters where their time has come.

        Args:
            memory: written to, or left as it is where an error is raised.
            features: each block's shape (N, D); only rows of prompts in the ring are read.

        Raises:
            ValueError: a block that is missing, of another shape, or not finite for a prompt that was visited.
        """
        fitting = memory["paid"] >= memory["fit_at"]
        rows = self._rows(memory, features, self._fitted_to(memory)) if fitting else {}
        self._track(memory, features)
        if fitting:
            self._fit(memory, rows)
        memory["track_at"] = memory["paid"] + self.track_every

    def figures(self, memory: Memory) -> dict[str, float]:
        """What the predictions were worth between the last two fits, and what is mixed now.

        Returns:
            rollouts that were predicted, in that interval; auc, calibration_error and log_loss (nats per rollout) of these,
            and constant_log_loss of the running mean beside them, those that are defined; drift, the rise of all logits in
            it; drift_offset, δ now; weight/… of each expert.
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
        own, constant = quality.log_losses(both_KE, hits_K, count_K) / count_K.sum()
        shown |= {"log_loss": float(own), "constant_log_loss": float(constant)}
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
        """The memory for another data set: records go with their prompts; parameters, losses and drift stay.

        Events of prompts that left are forgotten in fits. Features of the same widths must be made by the same means; of
        other widths, parameters are fitted at the next `refit`, to the events that are kept, and losses begin anew.

        Args:
            memory: left as it is.
            source_N: for each prompt of the new data set its index in the old one, each at most once, −1 where it is new.
            widths: the number of columns of each block of the new data set's features; None: they are as they were.
            prior_N: as in `init`; looked at for new prompts, whose records it fills.

        Raises:
            ValueError: an index that the old data set does not have, or has been given twice; or as in `init`.
        """
        from_N = np.asarray(source_N, np.int64).reshape(-1)
        known_N, old = from_N >= 0, len(memory["hits_N"])
        if from_N.size < 1 or from_N.max() >= old or len(np.unique(from_N[known_N])) != known_N.sum():
            raise ValueError(f"source_N must give each prompt an index of its own below {old}, or -1")
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
        """The records and events of a memory, with the parameters of a fresh one, to be fitted at once."""
        seen = memory["seen"]
        memory["event_drift"] = np.zeros_like(memory["event_drift"])
        fitted = ("blocks", "widths", "loss_E", "drift", "drift_variance", "drift_fits", "fits", "fit_at")
        whole = {name: value for name, value in memory.items() if "/" not in name}
        of_blocks = {name: value for name, value in fresh.items() if "/" in name}
        changed = {name: fresh[name] for name in fitted} | {"event_fits": [seen, seen], "tracked": seen}
        return whole | of_blocks | changed

    @staticmethod
    def _weights(memory: Memory) -> NDArray[np.float64]:
        """Weight of every expert: on features by block and ridge, the mean, the record; shape (E,)."""
        if memory["fits"]:
            return mixture(memory["loss_E"])
        return np.concatenate([np.zeros(memory["loss_E"].size - 2), mixture(memory["loss_E"][-2:])])

    def _logits(
        self, memory: Memory, features: Features, prompts_K: NDArray[np.int64], least: float
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """μ and v of the experts on features, shape (K, blocks · ridges).

        They are 0 for those of a block none of whose experts weighs `least` beside the mean and each other.
        """
        several, blocks = len(self.ridges), memory["blocks"]
        flat = (prompts_K.size, len(blocks) * several)
        mean_KBR = np.zeros((prompts_K.size, len(blocks), several))
        variance_KBR = np.zeros_like(mean_KBR)
        weight_BR = mixture(memory["loss_E"][:-1])[:-1].reshape(len(blocks), several)
        for at, name in enumerate(blocks if memory["fits"] else ()):
            if weight_BR[at].max() < least:
                continue
            rows_KD = self._rows_of(memory, features, at, prompts_K)
            phi_KF = ridge.design(rows_KD, memory[f"centre/{name}"], memory[f"scale/{name}"])
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
        """What every expert says, shape (K, E)."""
        mu_KE, v_KE = logits
        delta = memory["drift"] - memory["drift_fits"][1]
        said_KE = np.column_stack([ridge.sigmoid(ridge.flatness(v_KE) * (mu_KE + delta)), mean_K])
        others_K = said_KE @ mixture(memory["loss_E"][:-1]) if memory["fits"] else mean_K
        record_K = (hits_K + self.record_weight * others_K) / (count_K + self.record_weight)
        return np.column_stack([said_KE, record_K])

    def _track(self, memory: Memory, features: Features) -> None:
        """Count the losses of what is new, and follow the drift."""
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
            memory["event_drift"][at] = memory["drift"]  # what was estimated is the drift up to these events
        memory["tracked"] = memory["seen"]

    def _fitted_to(self, memory: Memory) -> NDArray[np.int64]:
        """Slots of the events that still weigh something."""
        at = ring.slots(memory, 0, memory["seen"])
        return at[0.5 ** ((memory["paid"] - memory["event_paid"][at]) / self.half_life) >= FADED]

    def _fit(self, memory: Memory, rows: dict[str, NDArray[np.float32]]) -> None:
        """New parameters from the events of `_fitted_to`."""
        at = self._fitted_to(memory)
        weight_K = 0.5 ** ((memory["paid"] - memory["event_paid"][at]) / self.half_life)
        offset_K = memory["event_drift"][at] - memory["drift"]
        hits_K, count_K = memory["event_hits"][at], memory["event_count"][at].astype(np.float64)
        for name, rows_KD in rows.items() if at.size else ():
            if not memory["fits"]:
                memory[f"centre/{name}"], memory[f"scale/{name}"] = ridge.measure(rows_KD)
            phi_KF = ridge.design(rows_KD, memory[f"centre/{name}"], memory[f"scale/{name}"]).astype(np.float64)
            found = [
                ridge.fit(phi_KF, hits_K, count_K, weight_K, offset_K, penalty, theta_F)
                for penalty, theta_F in zip(self.ridges, memory[f"theta/{name}"], strict=True)
            ]
            memory[f"theta/{name}"] = np.array([theta_F for theta_F, _ in found])
            memory[f"basis/{name}"], memory[f"spread/{name}"] = ridge.spread(np.array([each for _, each in found]))
        memory["fits"] += bool(at.size)
        memory["drift_fits"] = [memory["drift_fits"][1], memory["drift"]]
        memory["event_fits"] = [memory["event_fits"][1], memory["seen"]]
        memory["fit_at"] = self._next_fit(memory["paid"])

    def _rows(self, memory: Memory, features: Features, at: NDArray[np.int64]) -> dict[str, NDArray[np.float32]]:
        """The rows of every block for some events."""
        prompts_K = memory["event_prompt"][at]
        return {name: self._rows_of(memory, features, block, prompts_K) for block, name in enumerate(memory["blocks"])}

    @staticmethod
    def _rows_of(memory: Memory, features: Features, block: int, prompts_K: NDArray[np.int64]) -> NDArray[np.float32]:
        """The rows of a block for some prompts, shape (K, D)."""
        name, shape = memory["blocks"][block], (len(memory["hits_N"]), memory["widths"][block])
        return rows_of(features, name, shape, prompts_K)
