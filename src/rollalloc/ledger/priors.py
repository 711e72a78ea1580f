"""What a new run may believe of its prompts, from what earlier runs saw: faded by distance, and never trusted blindly."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.table import Priors
from rollalloc.ledger.records import written_key
from rollalloc.ledger.store import reading
from rollalloc.waste.groups import NO_STEP

_COLUMNS = "SELECT prompt, step, scored, successes FROM records WHERE run = ? AND successes IS NOT NULL AND scored > 0"


@dataclass(frozen=True, slots=True)
class Trust:
    """How much of what another run saw counts.

        n_i = Σ_v n_iv · m · 2^(-d_v / half_life),  s_i likewise;  prior of prompt i: rate s_i / n_i, min(n_i, most) rollouts

    Over the records v of a prompt: n_iv scored rollouts and s_iv successes. d_v is the number of steps between the weights
    of the record and those that the new run starts from, and m = 1, where the record's run began or ended with these; else
    m = `other` and d_v = 0. Under a Beta prior that is s_i and n_i - s_i beside what the rule believes without it.

    Attributes:
        half_life: steps after which a rollout counts half, above 0. The default is foresight's half-life of 2,000 rollouts
            at 64 in a batch.
        other: what a rollout of another model, or of unknown weights, counts; in [0, 1].
        most: rollouts that the prior of a prompt counts for at most, above 0.

    Raises:
        ValueError: a number out of its range.
    """

    half_life: float = 32.0
    other: float = 0.1
    most: float = 8.0

    def __post_init__(self) -> None:
        if not (0 < self.half_life < inf and 0 <= self.other <= 1 and 0 < self.most < inf):
            raise ValueError(f"expected half_life and most above 0 and finite, other in [0, 1], got {self}")


@dataclass(frozen=True, slots=True)
class Found:
    """Priors, and what they are of.

    Attributes:
        priors: of the prompts asked for.
        prompts: that have one.
        same: rollouts of the same model that count in them, before they fade.
        other: rollouts of other models.
        without: runs that have no success rates.
    """

    priors: Priors
    prompts: int
    same: int
    other: int
    without: int


def priors_of(
    path: Path, names: Sequence[Sequence[str]], model: str, weights: str | None, trust: Trust | None = None
) -> Found:
    """The priors of some prompts.

    Args:
        path: of the ledger.
        names: of each prompt, all that a log may call it; a name that two prompts have names neither.
        model: name or folder that the new run starts from.
        weights: digest of these weights (`rollalloc.ledger.sources.weights_in`); None: not known, then names are compared.
        trust: how much counts.

    Raises:
        OSError: as `rollalloc.ledger.store.reading`.
        NotALedger: likewise.
        InUse: likewise.
    """
    trust = trust or Trust()
    hits_N, count_N = np.zeros(len(names)), np.zeros(len(names))
    same = other = without = 0
    with reading(path) as connection:
        index_P = _index(connection, _by_name(names))
        runs = connection.execute("SELECT id, model, weights, weights_after FROM runs ORDER BY id").fetchall()
        for run, *identity in runs:
            rows = np.array(connection.execute(_COLUMNS, (run,)).fetchall(), np.float64).reshape(-1, 4)
            without += not len(rows)
            at_K = index_P[rows[:, 0].astype(np.int64)]
            counts_K, step_K = rows[:, 2], rows[:, 1]
            faded_K = _faded(step_K, identity, model, weights, trust)
            known_K = (at_K >= 0) & (faded_K > 0)
            np.add.at(hits_N, at_K[known_K], (faded_K * rows[:, 3])[known_K])
            np.add.at(count_N, at_K[known_K], (faded_K * counts_K)[known_K])
            paid = int(counts_K[known_K].sum())
            is_same = _is_same(identity[:2], model, weights) or _is_same((None, identity[2]), model, weights)
            same, other = same + paid * is_same, other + paid * (not is_same)
    known_N = count_N > 0
    rate_N = np.where(known_N, hits_N / np.where(known_N, count_N, 1), np.nan)
    priors = Priors(np.clip(rate_N, 0, 1), np.minimum(count_N, trust.most))
    return Found(priors, int(known_N.sum()), same, other, without)


def _by_name(names: Sequence[Sequence[str]]) -> dict[str, int]:
    """Prompts by what they are called; names that several have left out."""
    found: dict[str, int] = {}
    ambiguous: set[str] = set()
    for prompt, called in enumerate(names):
        for name in {written_key(each) for each in called}:
            ambiguous.update({name} if found.setdefault(name, prompt) != prompt else ())
    return {name: prompt for name, prompt in found.items() if name not in ambiguous}


def _index(connection: sqlite3.Connection, by_name: Mapping[str, int]) -> NDArray[np.int64]:
    """For each prompt of the ledger its index among those asked for, -1 where it is none of them."""
    (last,) = connection.execute("SELECT coalesce(max(id), 0) FROM prompts").fetchone()
    index_P = np.full(last + 1, -1)
    for number, key in connection.execute("SELECT id, key FROM prompts"):
        index_P[number] = by_name.get(key, -1)
    return index_P


def _is_same(identity: Sequence[str | None], model: str, weights: str | None) -> bool:
    """Whether a model is the one started from: by its weights where both are known, else by its name."""
    name, digest = identity
    return digest == weights if digest is not None and weights is not None else name is not None and name == model


def _faded(
    step_K: NDArray[np.float64], identity: Sequence[str | None], model: str, weights: str | None, trust: Trust
) -> NDArray[np.float64]:
    """What a rollout of each record counts."""
    name, before, after = identity
    said_K = step_K != NO_STEP
    distance_K = np.full(len(step_K), inf)
    if said_K.any():
        if _is_same((name, before), model, weights):
            distance_K = np.minimum(distance_K, step_K - step_K[said_K].min())
        if _is_same((None, after), model, weights):
            distance_K = np.minimum(distance_K, step_K[said_K].max() - step_K)
    near_K = np.where(said_K, np.exp2(-distance_K / trust.half_life), 0.0)
    # Beyond that distance a record of the same model is worth no more than one of another.
    return np.maximum(near_K, trust.other)
