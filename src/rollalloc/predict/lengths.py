"""The length predictor: how long a prompt's rollouts will be, said from its features before one of them is paid for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.packing import exact_keys, natural
from rollalloc.predict import linear, ridge, ring
from rollalloc.predict.blocks import Features, rows_of
from rollalloc.predict.cadence import check_settings, next_fit
from rollalloc.predict.predictor import FADED, SILENT, Memory, mixture

_VISITS: Mapping[str, type] = {
    "event_prompt": np.int64,
    "event_paid": np.int64,  # rollouts observed up to and with it
    "event_first": np.bool_,  # whether nothing was known of the prompt's lengths before
}
_FITTED = ("fits", "loss_E", "missed_2", "mean_2", "spread_2", "least_2", "most_2")
_COUNTS = ("prompts", "paid", "fitted_at", "counted", "fits", "fit_at", "seen")
_LEAST_SPREAD = 0.01  # of a law's mean or variance between prompts: with less, nothing is worth predicting

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPredictor:
    """Mean and variance of the logarithms of a prompt's lengths, before a rollout of it: ŷ = Σ_e w_e y_e, w_e ∝ exp(−L_e).

    The experts: for each block of features and each ridge λ a regression y_e = c + σφθ, θ the least of
    Σ w |(y − c) / σ − φθ|² + λ|θ|² over the newest visits, w = 2^(−age/half_life), and their mean c alone. y of a visit is
    what the ledger believes of its prompt by now, where rollouts that were stopped stand for what they are known to exceed
    (`rollalloc.core.lengths`); σ is the deviation of y about c. L_e = Σ |(y − y_e) / σ|² / 2 over the prompts that were new,
    by the parameters from before their visit, faded by 2^(−rollouts/loss_half_life). No y_e is beyond the y fitted to.

    State is a flat dictionary that the caller owns and saves; nothing is random. Lengths of time are numbers of rollouts.

    Attributes:
        ridges: λ, each .0001 or more, at least one.
        half_life: of a visit's weight in a fit.
        loss_half_life: of the experts' losses.
        record_weight: the rollouts that ŷ counts for beside a prompt's own record.
        events: the newest visits that are kept.
        first_fits: rollouts after which the parameters are fitted at first, ascending.
        fit_every: rollouts between two fits after those.

    Raises:
        ValueError: a value out of range.
    """

    ridges: tuple[float, ...] = (0.03, 0.3, 3.0)
    half_life: float = 2000.0
    loss_half_life: float = 600.0
    record_weight: float = 2.0
    events: int = 8192
    first_fits: tuple[int, ...] = (64, 128, 192, 256, 384, 512)
    fit_every: int = 640

    def __post_init__(self) -> None:
        check_settings(self, ("half_life", "loss_half_life", "record_weight"), ("events", "fit_every"))

    def init(self, prompts: int, widths: Mapping[str, int]) -> Memory:
        """The memory before the first rollout.

        Args:
            prompts: N, at least 1.
            widths: the number of columns of each block of features; no block at all is fine.
        """
        several = len(self.ridges)
        memory: Memory = {
            "prompts": prompts,
            "blocks": sorted(widths),
            "widths": [int(widths[name]) for name in sorted(widths)],
            "record_weight": float(self.record_weight),
            "loss_E": np.zeros(len(widths) * several + 1),
            "missed_2": np.zeros(2),  # squares of what ŷ, and c, missed of the means of prompts new before the last fit
            "paid": 0,
            "fitted_at": 0,
            "fit_at": next_fit(0, self.first_fits, self.fit_every),
            "fits": 0,
            "counted": 0,  # visits whose losses are counted
            # Of mean and variance of the log-lengths: c, σ, and the least and the most fitted to.
            "mean_2": np.zeros(2),
            "spread_2": np.ones(2),
            "least_2": np.zeros(2),
            "most_2": np.zeros(2),
        }
        for name in memory["blocks"]:
            width = widths[name]
            memory[f"centre/{name}"], memory[f"scale/{name}"] = np.zeros(width, np.float32), np.ones(width, np.float32)
            memory[f"theta/{name}"] = np.zeros((several, width + 1, 2))
        return memory | ring.empty(self.events, _VISITS)

    def observe(self, memory: Memory, prompt: int, count: int, first: bool) -> None:
        """A visit ended; how long its rollouts were may still be open.

        Args:
            memory: written to.
            prompt: in [0, N).
            count: its scored rollouts; nothing is learned from 0.
            first: whether nothing was known of the prompt's lengths before.
        """
        if count:
            memory["paid"] += int(count)
            ring.append(memory, prompt, memory["paid"], first, columns=_VISITS)

    def due(self, memory: Memory) -> bool:
        """Whether enough rollouts came since the last `refit` for another."""
        return memory["paid"] >= memory["fit_at"]

    def refit(self, memory: Memory, features: Features, laws_2N: NDArray[Any] | None) -> None:
        """Count what was missed since the last fit, and fit anew.

        Args:
            memory: written to, or left as it is where an error is raised.
            features: each block's shape (N, D); only rows of prompts in the ring are read.
            laws_2N: mean and variance of each prompt's log-lengths, NaN where unknown; None: all are.

        Raises:
            ValueError: a block that is missing, of another shape, or not finite for a prompt that was visited.
        """
        known_2N = np.broadcast_to(np.nan, (2, memory["prompts"])) if laws_2N is None else laws_2N
        at = _known(memory, known_2N, ring.slots(memory, 0, memory["seen"]))
        at = at[self._weights(memory, at) >= FADED]
        rows = {name: _rows(memory, features, name, memory["event_prompt"][at]) for name in memory["blocks"]}
        missed_E2 = self._missed(memory, features, known_2N)
        if at.size:
            self._fit(memory, rows, law_of(known_2N, memory["event_prompt"][at]), at)
        kept = 0.5 ** ((memory["paid"] - memory["fitted_at"]) / self.loss_half_life)
        # By the newest deviations: those of a first few prompts may be nearly nothing.
        memory["loss_E"] = kept * memory["loss_E"] + (missed_E2 / memory["spread_2"] ** 2).sum(1) / 2
        memory["record_weight"] = float(self.record_weight)  # this one's, where a saved memory was another's
        memory["fitted_at"] = memory["paid"]
        memory["fit_at"] = next_fit(memory["paid"], self.first_fits, self.fit_every)

    def _weights(self, memory: Memory, at: NDArray[np.int64]) -> Floats:
        return 0.5 ** ((memory["paid"] - memory["event_paid"][at]) / self.half_life)

    def _missed(self, memory: Memory, features: Features, laws_2N: NDArray[Any]) -> Floats:
        """Σ (y − y_e)² over the prompts that were new since the last fit, of which no expert knew anything; shape (E, 2)."""
        new = ring.slots(memory, memory["counted"], memory["seen"])
        new = _known(memory, laws_2N, new[memory["event_first"][new]])
        memory["counted"] = memory["seen"]
        if not memory["fits"]:
            return np.zeros((memory["loss_E"].size, 2))
        prompts_K = memory["event_prompt"][new]
        law_K2 = law_of(laws_2N, prompts_K)
        missed_E2 = ((law_K2[:, None] - _said(memory, features, prompts_K, 0.0)) ** 2).sum(0)
        missed_2 = ((law_K2 - expected(memory, features, prompts_K)) ** 2).sum(0)
        memory["missed_2"] = np.array([missed_2[0], missed_E2[-1, 0]])  # the last expert is the mean
        return missed_E2

    def _fit(self, memory: Memory, rows: dict[str, NDArray[np.float32]], law_K2: Floats, at: NDArray[np.int64]) -> None:
        """New parameters from these visits, of which the rows and the laws are given."""
        weight_K = self._weights(memory, at)
        mean_2 = np.average(law_K2, axis=0, weights=weight_K)
        variance_2 = np.average((law_K2 - mean_2) ** 2, axis=0, weights=weight_K)
        spread_2 = np.maximum(np.sqrt(variance_2), _LEAST_SPREAD)
        for name, rows_KD in rows.items():
            if not memory["fits"]:
                memory[f"centre/{name}"], memory[f"scale/{name}"] = ridge.measure(rows_KD)
            phi_KF = ridge.design(rows_KD, memory[f"centre/{name}"], memory[f"scale/{name}"]).astype(np.float64)
            memory[f"theta/{name}"] = linear.fit(phi_KF, (law_K2 - mean_2) / spread_2, weight_K, self.ridges)
        memory |= {"mean_2": mean_2, "spread_2": spread_2, "fits": memory["fits"] + 1}
        memory |= {"least_2": law_K2.min(axis=0), "most_2": law_K2.max(axis=0)}

    def figures(self, memory: Memory) -> dict[str, float]:
        """What the predictions were worth between the last two fits: `length_explained`, 1 − Σ (m − m̂)² / Σ (m − c)².

        m are the means of the log-lengths of the prompts that were new; without any there is no figure.
        """
        missed, of_mean = memory["missed_2"].tolist()
        return {"length_explained": 1 - missed / of_mean} if of_mean > 0 else {}

    def moved(self, memory: Memory, source_N: NDArray[np.int64], widths: Mapping[str, int]) -> Memory:
        """The memory for another data set, whose ledger has the records; parameters stay where the features are as wide.

        Args:
            memory: left as it is.
            source_N: for each prompt of the new data set its index in the old one, each at most once, −1 where it is new.
            widths: the number of columns of each block of the new data set's features, made by the same means.
        """
        fresh = self.init(len(source_N), widths)
        of_blocks = [name for name in fresh if "/" in name]
        of_data = ["prompts", "blocks", "widths"]
        if any(fresh[name] != memory[name] for name in ("blocks", "widths")):
            of_data += [*of_blocks, *_FITTED]
            memory = memory | {"fit_at": memory["paid"]}
        prompt_M = ring.renumbered(memory["event_prompt"], source_N, memory["prompts"])
        kept = {name: memory[name] for name in fresh if name not in of_data}
        return fresh | kept | {"event_prompt": prompt_M}

    def check(self, memory: Memory, prompts: int, widths: Mapping[str, int]) -> None:
        """Refuse a saved memory that is none of this predictor.

        Raises:
            ValueError: keys, shapes or numbers that it cannot have written.
        """
        fresh = self.init(prompts, widths)
        exact_keys(memory, fresh, "lengths")
        for name in _COUNTS:
            natural(memory[name], name)
        for name in ("prompts", "blocks", "widths"):
            if memory[name] != fresh[name]:
                raise ValueError(f"lengths, {name}: expected {fresh[name]}, got {memory[name]}; the state is torn")
        for name, value in fresh.items():
            if isinstance(value, np.ndarray) and not _is_alike(memory[name], value):
                raise ValueError(f"lengths, {name}: expected {value.dtype} of {value.shape}, finite; the state is torn")
        event_M = memory["event_prompt"]
        if event_M.min() < ring.GONE or event_M.max() >= prompts or memory["spread_2"].min() < _LEAST_SPREAD:
            raise ValueError(f"lengths: a visit of none of {prompts} prompts, or no deviation; the state is torn")
        if not _agrees(memory):
            raise ValueError("lengths: counts, bounds or scales that contradict each other; the state is torn")
        weight = memory["record_weight"]
        if type(weight) is not float or not 0 < weight < inf:
            raise ValueError(f"lengths, record_weight: expected a number above 0, got {weight!r}; the state is torn")


def expected(memory: Memory, features: Features, prompts_K: NDArray[np.int64]) -> Floats:
    """ŷ of the prompts asked for, mean and variance of their log-lengths, shape (K, 2), after a first fit.

    Args:
        memory: of a `LengthPredictor`; left as it is.
        features: each block's shape (N, D); no other rows are read.
        prompts_K: indices in [0, N).

    Raises:
        ValueError: a block that is missing, of another shape, or not finite for one of them.
    """
    return np.einsum("ket,e->kt", _said(memory, features, prompts_K, SILENT), mixture(memory["loss_E"]))


def law_of(laws_2N: NDArray[Any], prompts_K: NDArray[np.int64]) -> Floats:
    """Mean and variance of these prompts' log-lengths, shape (K, 2); looks at no other prompt's."""
    return np.column_stack([laws_2N[at][prompts_K] for at in (0, 1)]).astype(np.float64)


def _said(memory: Memory, features: Features, prompts_K: NDArray[np.int64], least: float) -> Floats:
    """What every expert says, shape (K, E, 2); the mean, where no expert of a block weighs `least`."""
    blocks, experts = memory["blocks"], memory["loss_E"].size
    several = (experts - 1) // max(1, len(blocks))
    weight_E = mixture(memory["loss_E"])
    said_KE2 = np.zeros((prompts_K.size, experts, 2))
    for at, name in enumerate(blocks):
        own = slice(at * several, (at + 1) * several)
        if weight_E[own].max() >= least:
            rows_KD = _rows(memory, features, name, prompts_K)
            phi_KF = ridge.design(rows_KD, memory[f"centre/{name}"], memory[f"scale/{name}"]).astype(np.float64)
            said_KE2[:, own] = np.einsum("kf,rft->krt", phi_KF, memory[f"theta/{name}"])
    return np.clip(memory["mean_2"] + memory["spread_2"] * said_KE2, memory["least_2"], memory["most_2"])


def _is_alike(given: Any, like: NDArray[Any]) -> bool:
    """Whether something is an array as that one, of finite numbers."""
    made = isinstance(given, np.ndarray) and (given.shape, given.dtype) == (like.shape, like.dtype)
    return made and bool(np.isfinite(given).all())


def _agrees(memory: Memory) -> bool:
    """Whether nothing is ahead of what it follows: weights of visits to come, or of negative age, have no bound."""
    paid_M, least_2 = memory["event_paid"], memory["least_2"]
    return bool(
        memory["fitted_at"] <= memory["paid"]
        and memory["counted"] <= memory["seen"]
        and paid_M.min() >= 0
        and paid_M.max() <= memory["paid"]
        and least_2[1] >= 0
        and (least_2 <= memory["most_2"]).all()
        and all((memory[name] > 0).all() for name in memory if name.startswith("scale/"))
    )


def _known(memory: Memory, laws_2N: NDArray[Any], at: NDArray[np.int64]) -> NDArray[np.int64]:
    """Those of the visits of whose prompts' lengths something is known."""
    return at[~np.isnan(law_of(laws_2N, memory["event_prompt"][at])[:, 0])]


def _rows(memory: Memory, features: Features, name: str, prompts_K: NDArray[np.int64]) -> NDArray[np.float32]:
    width = memory["widths"][memory["blocks"].index(name)]
    return rows_of(features, name, (memory["prompts"], width), prompts_K)
