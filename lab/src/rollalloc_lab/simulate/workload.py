"""Outcomes of simulated rollouts: length and success, by prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from math import exp
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from rollalloc.core.recipe import at_least
from rollalloc.core.seeds import rng
from rollalloc.data.jsonl import Unreadable, read_lines
from rollalloc.runs.values import COUNT, NUMBER, TEXT, Field, check
from rollalloc_lab.simulate.cost import at_most, option, positive

_BLOCK = 4096  # number of rollouts whose random numbers are drawn together
_BLOCKS = 8  # number of blocks kept in memory
# Maximum standard deviation of a logarithm. With this value, a tenth of the lengths exceed 300,000 times the median.
_WIDEST = 10
_LONGEST, _PROMPTS = 100_000_000, 10_000_000  # maximum tokens of a rollout, and maximum number of prompts
_RIGHT = 0.5  # a logged rollout with at least this metric is right


class SimulatedOutcome(NamedTuple):
    """The outcome of a rollout that is not stopped: tokens (at least 1), whether the limit cut it, whether it is right."""

    tokens: int
    truncated: bool
    right: bool


def within(outcome: SimulatedOutcome, limit: int | None) -> SimulatedOutcome:
    """The outcome of a rollout that is stopped at a limit: what is longer is wrong."""
    if limit is None or outcome.tokens <= limit:
        return outcome
    return outcome._replace(tokens=limit, truncated=True, right=False)


class SimulatedWorld(Protocol):
    """One random draw of all prompts. A rollout's outcome is a function of (prompt, rollout)."""

    prompts: int

    def outcome(self, prompt: int, rollout: int) -> SimulatedOutcome: ...


class Workload(Protocol):
    """A distribution from which worlds are drawn. No rollout is longer than `longest` tokens."""

    @property
    def longest(self) -> int: ...

    def world(self, seed: int) -> SimulatedWorld: ...

    def describe(self) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Rollout lengths: log-normal for each prompt, and the prompts' medians are log-normal too. Some rollouts never end.

        tokens = median · exp(between · z_prompt + within · z_rollout), at most `limit`; `limit` with probability `runaway`

    Attributes:
        median: median over prompts of the median length, in tokens, above 0.
        between: standard deviation of the logarithm of the prompts' medians, in [0, 10].
        within: standard deviation of the logarithm of a prompt's lengths, in [0, 10].
        runaway: share of rollouts that end only at the length limit, in [0, 1].
        limit: maximum number of tokens of a rollout, at least 1.

    Raises:
        ValueError: a number is out of its range.
    """

    median: float = option(1500.0, "Median over prompts of each prompt's median length in tokens.")
    between: float = option(0.5, "Standard deviation of log(median length) between prompts.")
    within: float = option(0.5, "Standard deviation of log(length) within a prompt.")
    runaway: float = option(0.01, "Share of rollouts that run to the limit, whatever the prompt.")
    limit: int = option(8192, "Maximum tokens per rollout.")

    def __post_init__(self) -> None:
        positive("median", self.median)
        positive("between", self.between, zero=True, most=_WIDEST)
        positive("within", self.within, zero=True, most=_WIDEST)
        positive("runaway", self.runaway, zero=True, most=1)
        at_least("limit", self.limit, 1)
        at_most("limit", self.limit, _LONGEST)


@dataclass(frozen=True, kw_only=True)
class Success:
    """Success rates of prompts: some prompts are never solved, some are always solved, and the rates of the others
    follow a Beta distribution.

    Attributes:
        hopeless: share of prompts that are never solved.
        solved: share of prompts that are always solved.
        alpha: first parameter of Beta(alpha, beta) for the other prompts, above 0.
        beta: second parameter, above 0.

    Raises:
        ValueError: a number is out of its range.
    """

    hopeless: float = option(0.25, "Share of prompts that are never solved.")
    solved: float = option(0.25, "Share of prompts that are always solved.")
    alpha: float = option(
        1.0, "First parameter, above 0, of the Beta(alpha, beta) distribution of the other prompts' success rates."
    )
    beta: float = option(1.0, "Second parameter of that distribution, above 0.")

    def __post_init__(self) -> None:
        positive("hopeless", self.hopeless, zero=True, most=1)
        positive("solved", self.solved, zero=True, most=1)
        if self.hopeless + self.solved > 1:
            raise ValueError(f"hopeless + solved must be at most 1, got {self.hopeless} + {self.solved}")
        positive("alpha", self.alpha)
        positive("beta", self.beta)


class _Draws:
    """Random numbers for each rollout, as a function of its id: one normal and three uniform numbers."""

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


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Lengths and success rates drawn independently from distributions.

    Attributes:
        prompts: number of prompts in the data set, at least 1.
        lengths: lengths of rollouts.
        success: success of prompts.
    """

    prompts: int = 8192
    lengths: Lengths = field(default_factory=Lengths)
    success: Success = field(default_factory=Success)

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
        median_N = self.lengths.median * np.exp(self.lengths.between * random.standard_normal(self.prompts))
        kind_N = random.random(self.prompts)
        rate_N = random.beta(success.alpha, success.beta, self.prompts)
        rate_N = np.where(kind_N < success.hopeless, 0.0, np.where(kind_N >= 1 - success.solved, 1.0, rate_N))
        return _FittedWorld(self.lengths, median_N.tolist(), rate_N.tolist(), _Draws(seed))

    def describe(self) -> dict[str, Any]:
        """Plain data for the result."""
        values = {each.name: getattr(of, each.name) for of in (self.lengths, self.success) for each in fields(of)}
        return {"source": "from distributions", "prompts": self.prompts, **values}


class _FittedWorld:
    def __init__(self, lengths: Lengths, medians: Sequence[float], rates: Sequence[float], draws: _Draws) -> None:
        self.prompts = len(medians)
        self._lengths, self._medians, self._rates, self._draws = lengths, medians, rates, draws

    def outcome(self, prompt: int, rollout: int) -> SimulatedOutcome:
        """See `SimulatedWorld.outcome`."""
        normal, runaway, wins, _ = self._draws(rollout)
        limit, right = self._lengths.limit, wins < self._rates[prompt]
        tokens = self._medians[prompt] * exp(self._lengths.within * normal)
        if runaway < self._lengths.runaway or tokens > limit:
            return SimulatedOutcome(limit, True, right)
        return SimulatedOutcome(max(1, round(tokens)), False, right)


@dataclass(frozen=True, kw_only=True)
class Logged:
    """Rollouts drawn with replacement from those logged for the same prompt.

    Attributes:
        rollouts: the logged rollouts by prompt, at least one for each prompt.
        source: where the rollouts come from, to be shown with the result.
        stopped: number of logged rollouts that were left out because they were stopped or have no score.
    """

    rollouts: Sequence[Sequence[SimulatedOutcome]]
    source: str = "given"
    stopped: int = 0

    @property
    def longest(self) -> int:
        """Maximum tokens of a rollout."""
        return max(each.tokens for of in self.rollouts for each in of)

    def world(self, seed: int) -> SimulatedWorld:
        """The logged prompts, in the log's order."""
        return _LoggedWorld(self.rollouts, _Draws(seed))

    def describe(self) -> dict[str, Any]:
        """Plain data for the result."""
        logged = sum(map(len, self.rollouts))
        of = {"prompts": len(self.rollouts), "logged_rollouts": logged, "left_out": self.stopped}
        return {"source": self.source, **of}


class _LoggedWorld:
    def __init__(self, rollouts: Sequence[Sequence[SimulatedOutcome]], draws: _Draws) -> None:
        self.prompts = len(rollouts)
        self._right = [[each for each in of if each.right] for of in rollouts]
        self._wrong = [[each for each in of if not each.right] for of in rollouts]
        self._draws = draws

    def outcome(self, prompt: int, rollout: int) -> SimulatedOutcome:
        """See `SimulatedWorld.outcome`."""
        _, _, wins, which = self._draws(rollout)
        right, wrong = self._right[prompt], self._wrong[prompt]
        among = right if wins < len(right) / (len(right) + len(wrong)) else wrong
        return among[int(which * len(among))]


def read_rollouts(path: Path) -> Logged:
    """Read lengths and successes from a run's `rollouts.jsonl` (docs/metrics.md); a metric of at least 0.5 is a success.

    Rollouts that were stopped or have no score are left out and counted, because their outcome is unknown. If many were
    stopped, the simulated lengths are too short.

    Args:
        path: path of the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not a rollout (the message names the line and the field), or no rollout has a score.
    """
    by_prompt: dict[Any, list[SimulatedOutcome]] = {}
    left_out = 0
    for number, line in read_lines(path):
        try:
            if not isinstance(line, dict):
                found = f"{line.begins} ({line.why})" if isinstance(line, Unreadable) else f"{line!r:.60}"
                raise ValueError(f"expected an object, got {found}")
            wrong = check(line, _NEEDED, _KNOWN)
            if wrong or not line.keys() & {"key", "prompt"}:
                raise ValueError(wrong or "expected an object with key; key is missing")
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}; give a log of `train --log-rollouts`") from None
        if "metric" not in line:
            left_out += 1
            continue
        outcome = SimulatedOutcome(max(1, line["tokens"]), line["truncated"], line["metric"] >= _RIGHT)
        by_prompt.setdefault(line.get("key", line.get("prompt")), []).append(outcome)
    if not by_prompt:
        raise ValueError(f"{path}: expected rollouts with a score, found none; {left_out} lines have no score")
    return Logged(rollouts=list(by_prompt.values()), source=str(path), stopped=left_out)


_NEEDED = {"tokens": COUNT, "truncated": Field("true or false", lambda value: isinstance(value, bool))}
_KNOWN = {"key": TEXT, "prompt": COUNT, "metric": NUMBER}
