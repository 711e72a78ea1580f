"""Outcomes of simulated rollouts: length and success, by prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from math import exp, log, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple, Protocol

import numpy as np

from rollalloc.core.recipe import at_least
from rollalloc.core.seeds import rng
from rollalloc.data.jsonl import Unreadable, read_lines
from rollalloc.lab.simulate.cost import at_most, positive
from rollalloc.runs.values import COUNT, NUMBER, TEXT, Field, expect, take

_BLOCK = 4096  # rollouts whose random numbers are drawn together
_BLOCKS = 8  # blocks kept in memory
_WIDEST = 10  # standard deviation of a logarithm; then a tenth of the lengths exceed 300,000 times the median
_LONGEST, _PROMPTS = 100_000_000, 10_000_000  # tokens of a rollout, prompts
_NORMAL, _LEAST = NormalDist(), 1e-16
_MOST_LOG = 100.0  # logarithm of length over median, at most: longer rollouts hit the limit anyway
_RIGHT = 0.5  # a logged rollout with at least this metric counts as right


class SimulatedOutcome(NamedTuple):
    """A rollout's outcome if nobody stops it: tokens (at least 1), whether the limit cut it, whether it is right."""

    tokens: int
    truncated: bool
    right: bool


class SimulatedWorld(Protocol):
    """One random draw of all prompts; a rollout's outcome is a function of (prompt, rollout, version)."""

    prompts: int

    def outcome(self, prompt: int, rollout: int, version: int) -> SimulatedOutcome: ...


class Workload(Protocol):
    """A distribution from which worlds are drawn; no rollout is longer than `longest` tokens."""

    @property
    def longest(self) -> int: ...

    def world(self, seed: int) -> SimulatedWorld: ...

    def describe(self) -> dict[str, Any]: ...


def _says(default: Any, says: str) -> Any:
    return field(default=default, metadata={"says": says})


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Rollout lengths: log-normal within each prompt, with log-normal medians over prompts; some rollouts run to the limit.

        tokens = median · exp(between · z_prompt + within · z_rollout), at most `limit`; `limit` with probability `runaway`

    Attributes:
        median: tokens, above 0.
        between: standard deviation of the logarithm of the prompts' medians, in [0, 10].
        within: standard deviation of the logarithm of a prompt's lengths, in [0, 10].
        runaway: share of rollouts that never end by themselves, in [0, 1].
        limit: maximum tokens of a rollout, at least 1.
        drift: added to the logarithm of lengths with each update, in [-1, 1]; below 0 answers get shorter. An assumption,
            since a simulation cannot know what a recipe teaches.

    Raises:
        ValueError: a number out of its range.
    """

    median: float = _says(1500.0, "Median over prompts of each prompt's median length in tokens.")
    between: float = _says(0.5, "Standard deviation of log(median length) between prompts.")
    within: float = _says(0.5, "Standard deviation of log(length) within a prompt.")
    runaway: float = _says(0.01, "Share of rollouts that run to the limit, whatever the prompt.")
    limit: int = _says(8192, "Maximum tokens per rollout.")
    drift: float = _says(0.0, "Assumed change of log(length) per update; below 0, rollouts get shorter.")

    def __post_init__(self) -> None:
        positive("median", self.median)
        positive("between", self.between, zero=True)
        positive("within", self.within, zero=True)
        for name in ("between", "within"):
            at_most(name, getattr(self, name), _WIDEST)
        share("runaway", self.runaway)
        within_one("drift", self.drift)
        at_least("limit", self.limit, 1)
        at_most("limit", self.limit, _LONGEST)


@dataclass(frozen=True, kw_only=True)
class Success:
    """Success rates of prompts: some are never solved, some always; the others' rates follow a Beta distribution.

    Attributes:
        hopeless: share of prompts that are never solved.
        solved: share that are always solved.
        alpha: first parameter of Beta(alpha, beta) for the other prompts, above 0.
        beta: second parameter, above 0.
        learning: rise of each rate's logit per update. An assumption, since a simulation cannot know how fast a policy
            learns.
        correlation: between a rollout's length and its success within a prompt, in [-1, 1]. It is the correlation of two
            normal variables (a Gaussian copula), so it leaves the distributions of rates and lengths unchanged. Below 0,
            right answers are shorter.
        correlation_between: the same between a prompt's median length and its success rate.

    Raises:
        ValueError: a number out of its range.
    """

    hopeless: float = _says(0.25, "Share of prompts that are never solved.")
    solved: float = _says(0.25, "Share of prompts that are always solved.")
    alpha: float = _says(1.0, "Other prompts' success rates follow Beta(alpha, beta).")
    beta: float = _says(1.0, "See --alpha.")
    learning: float = _says(0.0, "Assumed rise of each success rate's logit per update.")
    correlation: float = _says(
        0.0, "Correlation of length and success within a prompt; below 0, right answers are shorter."
    )
    correlation_between: float = _says(
        0.0, "Correlation of median length and success rate over prompts; below 0, hard prompts have longer answers."
    )

    def __post_init__(self) -> None:
        share("hopeless", self.hopeless)
        share("solved", self.solved)
        if self.hopeless + self.solved > 1:
            raise ValueError(f"hopeless + solved must be at most 1, got {self.hopeless} + {self.solved}")
        positive("alpha", self.alpha)
        positive("beta", self.beta)
        positive("learning", self.learning, zero=True)
        within_one("correlation", self.correlation)
        within_one("correlation_between", self.correlation_between)


def within_one(name: str, value: Any) -> None:
    """Refuse anything but a number in [-1, 1].

    Raises:
        ValueError: says what was expected and what came.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not -1 <= value <= 1:
        raise ValueError(f"{name} must be a number in [-1, 1], got {value!r}")


def share(name: str, value: Any) -> None:
    """Refuse anything but a number in [0, 1].

    Raises:
        ValueError: says what was expected and what came.
    """
    positive(name, value, zero=True)
    if value > 1:
        raise ValueError(f"{name} must be a share in [0, 1], got {value!r}")


class _Draws:
    """Random numbers for each rollout, a function of its id: one normal and three uniform."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._blocks: dict[int, list[tuple[float, ...]]] = {}

    def __call__(self, rollout: int) -> tuple[float, ...]:
        block, at = divmod(rollout, _BLOCK)
        draws = self._blocks.get(block)
        if draws is None:
            if len(self._blocks) >= _BLOCKS:
                del self._blocks[min(self._blocks)]
            random = rng(self._seed, "simulate rollouts", block)
            columns = [random.standard_normal(_BLOCK), *random.random((3, _BLOCK))]
            draws = self._blocks[block] = list(zip(*(column.tolist() for column in columns), strict=True))
        return draws[at]


class _Rates:
    """Success rates that rise with the version."""

    def __init__(self, rates: Sequence[float], learning: float) -> None:
        self._rates, self._learning = rates, learning

    def __call__(self, prompt: int, version: int) -> float:
        rate = self._rates[prompt]
        if not self._learning or not version or rate in (0.0, 1.0):
            return rate
        return 1 / (1 + (1 - rate) / rate * exp(-self._learning * version))


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Lengths and success rates from distributions, independent except for the given correlations.

    Attributes:
        prompts: number in the data set, at least 1.
        lengths: of rollouts.
        success: of prompts.
        source: where they come from, for the result.
    """

    prompts: int = 8192
    lengths: Lengths = field(default_factory=Lengths)
    success: Success = field(default_factory=Success)
    source: str = "from distributions"

    def __post_init__(self) -> None:
        at_least("prompts", self.prompts, 1)
        at_most("prompts", self.prompts, _PROMPTS)

    @property
    def longest(self) -> int:
        """Maximum tokens of a rollout."""
        return self.lengths.limit

    def world(self, seed: int) -> SimulatedWorld:
        """Prompts drawn from the distributions."""
        random, success = rng(seed, "simulate prompts"), self.success
        score_N = random.standard_normal(self.prompts)
        median_N = self.lengths.median * np.exp(self.lengths.between * score_N)
        kind_N = random.random(self.prompts)
        rate_N = random.beta(success.alpha, success.beta, self.prompts)
        rate_N = np.where(kind_N < success.hopeless, 0.0, np.where(kind_N >= 1 - success.solved, 1.0, rate_N))
        if correlation := success.correlation_between:  # the same rates, sorted by a score correlated with length
            own_N = correlation * score_N + sqrt(1 - correlation**2) * random.standard_normal(self.prompts)
            rate_N = np.sort(rate_N)[np.argsort(np.argsort(own_N))]
        rates = _Rates(rate_N.tolist(), success.learning)
        return _FittedWorld(self.lengths, success.correlation, median_N.tolist(), rates, _Draws(seed))

    def describe(self) -> dict[str, Any]:
        """Plain data for the result."""
        values = {each.name: getattr(of, each.name) for of in (self.lengths, self.success) for each in fields(of)}
        return {"source": self.source, "prompts": self.prompts, **values}


class _FittedWorld:
    def __init__(
        self, lengths: Lengths, correlation: float, medians: Sequence[float], rates: _Rates, draws: _Draws
    ) -> None:
        self.prompts = len(medians)
        self._drift, self._correlation, self._rest = lengths.drift, correlation, sqrt(1 - correlation**2)
        self._medians, self._rates, self._draws = medians, rates, draws
        self._within, self._runaway, self._limit = lengths.within, lengths.runaway, lengths.limit

    def outcome(self, prompt: int, rollout: int, version: int) -> SimulatedOutcome:
        """See `SimulatedWorld.outcome`."""
        normal, runaway, wins, _ = self._draws(rollout)
        if self._correlation:  # 1 - wins is uniform too, and smaller values mean success
            score = self._correlation * normal + self._rest * _NORMAL.inv_cdf(min(max(1 - wins, _LEAST), 1 - _LEAST))
            wins = 1 - _NORMAL.cdf(score)
        right = wins < self._rates(prompt, version)
        drifted = exp(min(self._within * normal + self._drift * version, _MOST_LOG))
        tokens = self._limit + 1 if runaway < self._runaway else self._medians[prompt] * drifted
        return (
            SimulatedOutcome(self._limit, True, right)
            if tokens > self._limit
            else SimulatedOutcome(max(1, round(tokens)), False, right)
        )


@dataclass(frozen=True, kw_only=True)
class Logged:
    """Rollouts drawn with replacement from those logged for the same prompt.

    Attributes:
        rollouts: by prompt, at least one each.
        learning: as in `Success`; additional successes get lengths of successful logged rollouts.
        source: where they come from, for the result.
        stopped: logged rollouts that were stopped or have no score, and are left out.
    """

    rollouts: Sequence[Sequence[SimulatedOutcome]]
    learning: float = 0.0
    source: str = "given"
    stopped: int = 0

    @property
    def longest(self) -> int:
        """Maximum tokens of a rollout."""
        return max(each.tokens for of in self.rollouts for each in of)

    def world(self, seed: int) -> SimulatedWorld:
        """The logged prompts, in the log's order."""
        return _LoggedWorld(self.rollouts, self.learning, _Draws(seed))

    def describe(self) -> dict[str, Any]:
        """Plain data for the result."""
        logged = sum(map(len, self.rollouts))
        of = {"prompts": len(self.rollouts), "logged_rollouts": logged, "left_out": self.stopped}
        return {"source": self.source, **of, "learning": self.learning}

    def fitted(self) -> Fitted:
        """Fit `Lengths` and `Success` to the log, by moments.

        Standard deviations are of the logarithm of lengths that were not truncated. The one within prompts is pooled over
        prompts; the one between prompts is that of the prompts' means, less what `within` contributes. The share of
        truncated rollouts beyond what the log-normal has above the limit is `runaway`. Since lengths are cut off at the
        limit, the deviations come out slightly low.

        Raises:
            ValueError: fewer than 2 prompts, or no prompt with 2 rollouts that were not truncated.
        """
        whole = [np.log([each.tokens for each in of if not each.truncated]) for of in self.rollouts]
        whole = [logs for logs in whole if logs.size]
        freedom = sum(logs.size - 1 for logs in whole)
        if len(whole) < 2 or not freedom:
            raise ValueError(
                f"{self.source}: a fit needs 2 prompts with rollouts that were not truncated, one of them with 2; got "
                f"{len(whole)} prompts; leave --fit out"
            )
        within_2 = sum(float(((logs - logs.mean()) ** 2).sum()) for logs in whole) / freedom
        means = np.array([logs.mean() for logs in whole])
        noise = within_2 * float(np.mean([1 / logs.size for logs in whole]))
        between = sqrt(max(0.0, float(means.var(ddof=1)) - noise))
        every = [each for of in self.rollouts for each in of]
        cut = sum(each.truncated for each in every) / len(every)
        limit = max(each.tokens for each in every)
        deviation = sqrt(between**2 + within_2)
        beyond = 1 - NormalDist().cdf((log(limit) - means.mean()) / deviation) if deviation else 0.0
        runaway = min(1.0, max(0.0, (cut - beyond) / (1 - beyond)) if cut and beyond < 1 else 0.0)
        lengths = Lengths(
            median=exp(means.mean()), between=between, within=sqrt(within_2), runaway=runaway, limit=limit
        )
        source = f"fitted to {self.source}"
        return Fitted(prompts=len(self.rollouts), lengths=lengths, success=self._success(), source=source)

    def _success(self) -> Success:
        """Logged shares of prompts never and always solved, and a Beta distribution for the rest by moments."""
        rates = np.array([np.mean([each.right for each in of]) for of in self.rollouts])
        between = rates[(rates > 0) & (rates < 1)]
        mean, variance = (float(between.mean()), float(between.var())) if between.size > 1 else (0.5, 1 / 12)
        size = max(0.1, mean * (1 - mean) / variance - 1) if variance else 1e6
        ends = {"hopeless": float(np.mean(rates == 0)), "solved": float(np.mean(rates == 1))}
        return Success(**ends, alpha=mean * size, beta=(1 - mean) * size, learning=self.learning)


class _LoggedWorld:
    def __init__(self, rollouts: Sequence[Sequence[SimulatedOutcome]], learning: float, draws: _Draws) -> None:
        self.prompts = len(rollouts)
        self._right = [[each for each in of if each.right] for of in rollouts]
        self._wrong = [[each for each in of if not each.right] for of in rollouts]
        rates = [len(right) / len(of) for right, of in zip(self._right, rollouts, strict=True)]
        self._rates, self._draws = _Rates(rates, learning), draws

    def outcome(self, prompt: int, rollout: int, version: int) -> SimulatedOutcome:
        """See `SimulatedWorld.outcome`."""
        _, _, wins, which = self._draws(rollout)
        among = (self._right if wins < self._rates(prompt, version) else self._wrong)[prompt]
        return among[int(which * len(among))]


def read_rollouts(path: Path, learning: float = 0.0) -> Logged:
    """Read lengths and successes from a run's `rollouts.jsonl` (docs/metrics.md); a metric of at least 0.5 is a success.

    Rollouts that were stopped or have no score have no known outcome; they are left out and counted. If many were stopped,
    lengths therefore come out too short.

    Args:
        path: of the file.
        learning: as in `Success`.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line that is not a rollout, by number and field; or no rollout with a score.
    """
    by_prompt: dict[Any, list[SimulatedOutcome]] = {}
    left_out = 0
    for number, line in read_lines(path):
        try:
            if not isinstance(line, dict):
                found = f"{line.begins} ({line.why})" if isinstance(line, Unreadable) else f"{line!r:.60}"
                raise ValueError(f"expected an object, got {found}")
            taken, wrong = take(line, _NEEDED, _KNOWN)
            if wrong or not taken.keys() & {"key", "prompt"}:
                raise ValueError(wrong or "expected an object with its key, got none with key")
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}; give a log of `train --log-rollouts`") from None
        if "metric" not in taken:
            left_out += 1
            continue
        outcome = SimulatedOutcome(max(1, taken["tokens"]), taken["truncated"], taken["metric"] >= _RIGHT)
        by_prompt.setdefault(taken.get("key", taken.get("prompt")), []).append(outcome)
    if not by_prompt:
        raise ValueError(f"{path}: expected rollouts with a score, found none; {left_out} lines have no score")
    return Logged(rollouts=list(by_prompt.values()), learning=learning, source=str(path), stopped=left_out)


def _truth(value: Any) -> bool:
    expect(isinstance(value, bool))
    return value


_NEEDED = {"tokens": COUNT, "truncated": Field("true or false", _truth)}
_KNOWN = {"key": TEXT, "prompt": COUNT, "metric": NUMBER}
