"""Costs of the simulated work: decoding by concurrency, prefill, training, weight synchronization."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from math import inf, isfinite, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from rollalloc.core.recipe import at_least
from rollalloc.files.opening import read_text

_FIELDS = ("concurrency", "seconds_per_token")
_FORMS = (
    'CSV with the header "concurrency,seconds_per_token", or JSON {"concurrency": [1, 8], "seconds_per_token": '
    "[0.006, 0.007]}"
)

_MOST = 1_000_000_000  # seconds, tokens
_MOST_SCORERS = 1_000_000


def positive(name: str, value: Any, *, zero: bool = False) -> None:
    """Refuse anything but a finite number above 0, or from 0 if `zero`.

    Raises:
        ValueError: says what was expected and what came.
    """
    number = isinstance(value, (int, float, np.floating, np.integer)) and not isinstance(value, bool)
    if not number or not isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} must be a finite number {'of at least' if zero else 'above'} 0, got {value!r}")
    at_most(name, float(value), _MOST)


def at_most(name: str, value: float, most: float) -> None:
    """Refuse absurdly large numbers, which would fill the memory or sum to infinity.

    Raises:
        ValueError: the value is above `most`.
    """
    if value > most:
        raise ValueError(f"{name} must be at most {most:,}, got {value:,}")


@dataclass(frozen=True)
class Latency:
    """Seconds per token of each rollout on a replica, by the number decoded at once and the context that they hold.

        t(c, K) = t(c) + per_held · K   for c rollouts that hold K tokens of context together

    t(c) is linear between the points, and constant below the first. Beyond the last point nothing was measured, so asking
    for it is an error.

    Attributes:
        concurrency: rollouts decoded at once, increasing whole numbers from 1.
        seconds_per_token: of a decoding step at each concurrency, above 0.
        source: where the curve comes from, for the result.
        per_held: further seconds for each token of context held, at least 0; 0 for measured curves, whose points include
            the context at which they were measured.

    Raises:
        ValueError: wrong numbers, or lists of different lengths.
    """

    concurrency: tuple[int, ...]
    seconds_per_token: tuple[float, ...]
    source: str = "given"
    per_held: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "concurrency", tuple(self.concurrency))
        object.__setattr__(self, "seconds_per_token", tuple(self.seconds_per_token))
        if not self.concurrency or len(self.concurrency) != len(self.seconds_per_token):
            raise ValueError(
                f"{self.source}: expected as many seconds_per_token as concurrency, at least one, got "
                f"{len(self.seconds_per_token)} and {len(self.concurrency)}"
            )
        for at, (rollouts, seconds) in enumerate(zip(self.concurrency, self.seconds_per_token, strict=True)):
            where = f"{self.source}: point {at + 1}"
            if type(rollouts) is not int or rollouts < 1:
                raise ValueError(f"{where}: concurrency must be a whole number of at least 1, got {rollouts!r}")
            if at and rollouts <= self.concurrency[at - 1]:
                raise ValueError(f"{where}: concurrency must grow, got {rollouts} after {self.concurrency[at - 1]}")
            positive(f"{where}: seconds_per_token", seconds)
        positive(f"{self.source}: per_held", self.per_held, zero=True)

    def table(self, slots: int) -> list[float]:
        """Seconds per token for 0 (nothing decodes) to `slots` rollouts that hold no context.

        Raises:
            ValueError: `slots` is beyond the last point.
        """
        if slots > self.concurrency[-1]:
            raise ValueError(
                f"{self.source} ends at a concurrency of {self.concurrency[-1]}, --slots is {slots}: measure further, or "
                f"give --slots {self.concurrency[-1]}"
            )
        seconds = np.interp(np.arange(slots + 1), self.concurrency, self.seconds_per_token)
        return seconds.tolist()


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a replica decodes, and how much context it can hold.

    With c rollouts that hold K tokens of context, the next x tokens of each rollout take

        s(x) = x · (seconds_N[c] + per_held · (K + c · x / 2))

    seconds, since each step adds c tokens of context. Tokens are treated as continuous, an error of half a token.

    Attributes:
        seconds_N: seconds per token for 0 to `slots` rollouts, without context.
        per_held: further seconds for each token held.
        room: tokens of context that a replica can hold.
        prefill: seconds to recompute one token of context.
    """

    seconds_N: Sequence[float]
    per_held: float = 0.0
    room: float = inf
    prefill: float = 0.0

    def seconds(self, tokens: float, rollouts: int, held: float) -> float:
        """s(x) as in the class's equation."""
        return tokens * (self.seconds_N[rollouts] + self.per_held * (held + rollouts * tokens / 2))

    def tokens(self, seconds: float, rollouts: int, held: float) -> float:
        """The x with s(x) = `seconds`: the root of a quadratic, in a form that stays exact when `per_held` is 0."""
        first = self.seconds_N[rollouts] + self.per_held * held
        return 2 * seconds / (first + sqrt(first * first + 2 * self.per_held * rollouts * seconds))


def read_latency(path: Path) -> Latency:
    """Read a latency curve from a CSV or JSON file.

    Raises:
        OSError: the file cannot be read.
        ValueError: not a valid curve; names the line or field.
    """
    try:
        text = read_text(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected {_FORMS}, got bytes that are not UTF-8: {error}") from None
    columns = _columns_of_json(text, path) if path.suffix == ".json" else _columns_of_csv(text, path)
    return Latency(tuple(columns[0]), tuple(columns[1]), str(path))


def _columns_of_json(text: str, path: Path) -> list[Sequence[Any]]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected {_FORMS}; {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected {_FORMS}, got {type(found).__name__}")
    for name in _FIELDS:
        if not isinstance(found.get(name), list):
            raise ValueError(f"{path}: field {name}: expected a list of numbers, got {found.get(name)!r:.80}")
    return [found[name] for name in _FIELDS]


def _columns_of_csv(text: str, path: Path) -> list[Sequence[Any]]:
    rows = csv.reader(io.StringIO(text))
    header = [name.strip() for name in next(rows, [])]
    if sorted(header) != sorted(_FIELDS):
        raise ValueError(f"{path}, line 1: expected {_FORMS}, got {','.join(header)!r:.80}")
    concurrency: list[int] = []
    seconds: list[float] = []
    for row in rows:
        if not row:
            continue
        if len(row) != len(header):
            raise ValueError(f"{path}, line {rows.line_num}: expected {len(header)} fields, got {len(row)}")
        line = dict(zip(header, row, strict=True))
        concurrency.append(_read(int, line, "concurrency", "a whole number", f"{path}, line {rows.line_num}"))
        seconds.append(_read(float, line, "seconds_per_token", "a number", f"{path}, line {rows.line_num}"))
    return [concurrency, seconds]


def _read(kind: Any, line: dict[str, str], name: str, expected: str, where: str) -> Any:
    try:
        return kind(line[name])
    except ValueError:
        raise ValueError(f"{where}: {name}: expected {expected}, got {line[name]!r:.80}") from None


_ARITHMETIC = " (default: estimated for --model on --gpu)."


def _cost(says: str, default: Any = MISSING) -> Any:
    return field(default=default, metadata={"says": says})


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of everything but decoding. `Hardware.costs` estimates those of forward and backward passes.

    Attributes:
        prefill: GPU-seconds per prompt token, during which the replica does not decode. Paid once for all rollouts of an
            order that start on a replica together, and again for the context of a preempted rollout.
        logprob: GPU-seconds per token, prompts included, of the forward pass that computes log-probabilities.
        train: GPU-seconds per trained token, prompts included, of forward and backward pass.
        abort: seconds from the decision to stop a rollout until its slot is free; it keeps decoding meanwhile.
        weight_sync: seconds in which new weights reach the replicas, which do not decode meanwhile.
        train_row: further GPU-seconds per trained row.
        update: seconds of the optimizer step, whatever the number of GPUs.
        score: seconds from a rollout's end until its reward is known; its slot is free meanwhile.
        scorers: rollouts scored at once, at most; 0: no limit.

    Raises:
        ValueError: a number below 0, or not finite.
    """

    prefill: float = _cost(f"GPU-seconds of prefill for a token of a prompt{_ARITHMETIC}")
    logprob: float = _cost(f"GPU-seconds of the forward pass for a token's log-probability{_ARITHMETIC}")
    train: float = _cost(f"GPU-seconds of forward and backward for a token{_ARITHMETIC}")
    abort: float = _cost("Seconds from stopping a rollout until its slot is free.", default=0.02)
    weight_sync: float = _cost("Seconds in which new weights reach the replicas.", default=2.0)
    train_row: float = _cost("GPU-seconds more for each row trained on.", default=0.0)
    update: float = _cost("Seconds of the optimizer's step.", default=1.0)
    score: float = _cost("Seconds from a rollout's end until its reward is known.", default=0.0)
    scorers: int = _cost("Rollouts that are scored at a time at most; 0: all that ended.", default=0)

    def __post_init__(self) -> None:
        for each in fields(self):
            positive(each.name, getattr(self, each.name), zero=True)
        at_least("scorers", self.scorers, 0)
        at_most("scorers", self.scorers, _MOST_SCORERS)


def measured_curve(steps: Sequence[tuple[int, float]], points: int = 8) -> tuple[tuple[int, float], ...]:
    """How long a decoding step takes, by how many rollouts are in it: a curve through an engine's own steps.

    The steps are sorted by rollouts and cut into groups of equal size. Each group gives a point: its mean number of
    rollouts, rounded, and its median seconds. Neighbouring points are pooled until seconds increase with rollouts
    (isotonic regression), since a step of more rollouts is not cheaper.

    Args:
        steps: (rollouts, seconds) of each step; at least one step, rollouts at least 1.
        points: the most that the curve may have.
    """
    found: dict[int, tuple[float, int]] = {}
    for part in np.array_split(np.array(sorted(steps), np.float64), min(points, len(steps))):
        at = max(1, round(float(part[:, 0].mean())))
        seconds, count = found.get(at, (0.0, 0))
        both = count + len(part)
        found[at] = (seconds * count + float(np.median(part[:, 1])) * len(part)) / both, both
    pooled: list[tuple[list[int], float, int]] = []
    for at, (seconds, count) in sorted(found.items()):
        pooled.append(([at], seconds, count))
        while len(pooled) > 1 and pooled[-2][1] >= pooled[-1][1]:
            there, more, many = pooled.pop()
            before, earlier, few = pooled.pop()
            pooled.append((before + there, (earlier * few + more * many) / (few + many), few + many))
    return tuple((at, seconds) for places, seconds, _ in pooled for at in places)
