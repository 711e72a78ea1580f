"""A curriculum from a profile: a row for each prompt, with its success rate and its sampling weight.

| column | |
|---|---|
| `key` | the prompt's key in the log |
| `rollouts`, `right` | number of scored rollouts; number of right rollouts |
| `rate`, `rate_low`, `rate_high` | posterior mean and 95% interval of the success rate, given the fitted mixture |
| `tokens` | mean rollout length; empty if not logged |
| `predicted` | success rate predicted from the prompt's features, by a model fitted to other prompts; may be empty |
| `weight` | probability of drawing the prompt under the mix; all weights sum to 1 |
| `pool` | the prompt's pool in prime-rl: hard, normal or easy. It follows from `rate` and the defaults of prime-rl |

For a profile sampled by `rollalloc advise`, the columns of verl's schema are added (`data_source`, `prompt`,
`reward_model`, `extra_info`). Such a file can be used as the training prompts of verl (`data.train_files`), of TRL (a data
set with `prompt`) and of `rollalloc train`.

As of November 2026, verl, TRL and prime-rl cannot sample prompts by individual weights. verl 0.9.1 shuffles the prompts or
keeps their order; its `trainer.v1.sampler.custom_sampler` is a replay buffer class. TRL 1.16 repeats a permutation. The
`DifficultyPoolSampler` of prime-rl weights pools, and sorts tasks into pools by their latest mean reward. For verl and TRL,
sample rows with probability `weight` beforehand. For prime-rl, give each pool its mean `weight` times its number of prompts,
and put the `rate` of each `key` into `task_rewards` of the sampler's state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollalloc.advise.predictability import LEAST_PROMPTS, predicted_rates
from rollalloc.advise.rates import Floats, Ints, RateMixture
from rollalloc.data._files import write_rows
from rollalloc.files.claims import claim_files, refuse_foreign_files
from rollalloc.recipes.foresight import Foresight
from rollalloc.waste.groups import NOT_SAID, Groups

MIXES = "variance, uniform, gaussian:MEAN,DEVIATION or foresight"
_POOLS = {"hard": 0.25, "normal": 0.75, "easy": 1.0}  # prime-rl's defaults: the largest rate of each pool
_BINS = 10  # number of bins of rates; the uniform mix draws from each bin equally often


def curriculum_of(
    judged: Groups,
    rates: RateMixture,
    mix: str,
    *,
    features_PD: NDArray[np.float32] | None = None,
    prompts: Mapping[str, Mapping[str, Any]] | None = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """A row for each prompt that has rollouts, sorted by key.

    Args:
        judged: groups whose rewards are 0, 1 or NaN.
        rates: the mixture of rates fitted to the groups.
        mix: name of the mix, see `weights_of`.
        features_PD: features of each prompt. None: the features in the log.
        prompts: further columns of each prompt, by key.
        seed: seed of the cross-validation that predicts rates from features, at least 0.

    Raises:
        ValueError: the mix is unknown or has invalid numbers, or no prompt would be drawn.
    """
    visited = judged.visited
    hits_P, count_P, tokens_P = _sums(judged, visited)
    features_PD = judged.features_PD if features_PD is None else features_PD
    rate_P = rates.posterior_mean(hits_P, count_P)
    columns = {
        "key": [judged.keys[prompt] for prompt in visited],
        "rollouts": count_P.tolist(),
        "right": hits_P.tolist(),
        "rate": rate_P.tolist(),
        "rate_low": np.minimum(rates.quantile(0.025, hits_P, count_P), rate_P).tolist(),
        "rate_high": np.maximum(rates.quantile(0.975, hits_P, count_P), rate_P).tolist(),
        "tokens": [None if np.isnan(tokens) else tokens for tokens in tokens_P.tolist()],
        "predicted": _predicted(hits_P, count_P, features_PD[visited], seed),
        "weight": weights_of(mix, rates, hits_P, count_P).tolist(),
        "pool": [next(name for name, most in _POOLS.items() if rate <= most) for rate in np.minimum(rate_P, 1.0)],
    }
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return [dict((prompts or {}).get(row["key"], {})) | row for row in rows]


def weights_of(mix: str, rates: RateMixture, hits_P: Ints, count_P: Ints) -> Floats:
    """The probability of drawing each prompt, shape (P,), sum 1.

        variance: w ∝ E[p(1 − p)];  gaussian:μ,σ: w ∝ E[exp(−(p − μ)² / 2σ²)]; E is over the posterior of p;
        uniform: [0, 1] is cut into ten bins of E[p], and all bins that have prompts are drawn equally often;
        foresight: w ∝ .9 p(1 − p)³ + .1 uniform, with E[p] as p, as in `foresight.Foresight`

    Args:
        mix: one of the four names above.
        rates: the mixture fitted to the counts.
        hits_P: number of right rollouts of each prompt, in [0, count].
        count_P: number of rollouts of each prompt.

    Raises:
        ValueError: the mix is unknown or has invalid numbers, or no prompt would be drawn.
    """
    name, (mean, deviation) = _mixed(mix)
    rate_K, mean_P = rates.rate_K, rates.posterior_mean(hits_P, count_P)
    if name == "foresight":
        return Foresight().chances(mean_P)
    if name == "uniform":
        bin_P = np.minimum((mean_P * _BINS).astype(np.int64), _BINS - 1)
        weight_P = 1 / np.bincount(bin_P)[bin_P]
    elif name == "variance":
        weight_P = rates.expected(rate_K * (1 - rate_K), hits_P, count_P)
    else:
        with np.errstate(over="ignore"):  # for rates far from the mean, the square overflows; their weight is 0
            density_K = np.exp(-(((rate_K - mean) / deviation) ** 2) / 2)
        weight_P = rates.expected(density_K, hits_P, count_P)
    if not weight_P.sum() > 0:
        raise ValueError(f"{mix}: no prompt has a rate near the mean, so none would be drawn; give a larger deviation")
    return weight_P / weight_P.sum()


def check_export(path: Path, mix: str, log: Path | None) -> None:
    """Raise an error for an invalid mix, or for a path to which a curriculum cannot be written. Nothing is changed.

    Args:
        path: path of the file.
        mix: name of the mix, see `weights_of`.
        log: the log from which the curriculum will be computed. The file must be outside the log's folder: a Parquet file
            in this folder would be read as a log of TRL. None: the log is not known yet.

    Raises:
        ValueError: the suffix is not .parquet, the path is in the log's folder, or there is no such mix.
        FileExistsError: the file exists, and is not a curriculum that we wrote.
    """
    _mixed(mix)
    if path.suffix != ".parquet":
        raise ValueError(
            f"expected the name of a file that ends in .parquet, got {str(path)!r}; e.g. curriculum.parquet"
        )
    if log is not None and not log.is_file() and path.resolve().is_relative_to(log.resolve()):
        raise ValueError(f"{path} is in the folder of the log, and would be read as a log of TRL; give another place")
    refuse_foreign_files([path])


def write_curriculum(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as Parquet, completely or not at all. Only an earlier curriculum is replaced.

    Raises:
        FileExistsError: the file exists, and is not a curriculum.
        ValueError: Parquet cannot store the prompts.
        OSError: the file cannot be written.
    """
    claim_files([path])
    # Parquet cannot store a column in which all dictionaries are empty.
    known = {name for row in rows for name, value in row.items() if value != {}}
    write_rows(path, [{name: value for name, value in row.items() if name in known} for row in rows])


def _mixed(mix: str) -> tuple[str, tuple[float, float]]:
    """Return the name of a mix and its mean and standard deviation. The two numbers matter only for a Gaussian."""
    if mix in ("variance", "uniform", "foresight"):
        return mix, (0.0, 1.0)
    name, _, parameters = mix.partition(":")
    try:
        mean, deviation = map(float, parameters.split(","))
    except ValueError:
        mean, deviation = np.nan, np.nan
    if name != "gaussian" or not (0 <= mean <= 1 and 0 < deviation < np.inf):
        within = "with a mean in [0, 1] and a deviation above 0"
        raise ValueError(f"expected a mix of {MIXES} {within}, got {mix!r}; e.g. gaussian:0.5,0.15")
    return name, (mean, deviation)


def _sums(judged: Groups, visited: Ints) -> tuple[Ints, Ints, Floats]:
    """For each visited prompt: right rollouts, scored rollouts, and the mean of the known numbers of tokens."""
    prompt_R = np.repeat(judged.prompt_V, judged.size_V)
    said_R = judged.tokens_R != NOT_SAID

    def total(value_R: NDArray[Any]) -> Floats:
        return np.bincount(prompt_R, value_R, len(judged.keys))[visited].astype(np.float64)

    with np.errstate(invalid="ignore"):  # 0/0 for a prompt without known numbers
        tokens_P = total(np.where(said_R, judged.tokens_R, 0)) / total(said_R)
    hits_P, count_P = total(np.nan_to_num(judged.rewards_R)), total(~np.isnan(judged.rewards_R))
    return hits_P.astype(np.int64), count_P.astype(np.int64), tokens_P


def _predicted(hits_P: Ints, count_P: Ints, features_PD: NDArray[np.float32], seed: int) -> list[float | None]:
    """Rates predicted from features. None for all prompts if there are too few, if all rollouts have the same result, or if
    features are missing.
    """
    differ = 0 < hits_P.sum() < count_P.sum()
    if len(hits_P) < LEAST_PROMPTS or not differ or not features_PD.size or not np.isfinite(features_PD).all():
        return [None] * len(hits_P)
    return predicted_rates(hits_P, count_P, features_PD, seed=seed).tolist()
