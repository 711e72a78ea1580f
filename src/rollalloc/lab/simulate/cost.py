"""What work costs: seconds per token by concurrency, prefill, training, the weights' way to the replicas."""

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
    """Refuse what is no finite number above 0, or of 0 or more.

    Raises:
        ValueError: says what was expected and what came.
    """
    number = isinstance(value, (int, float, np.floating, np.integer)) and not isinstance(value, bool)
    if not number or not isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} must be a finite number {'of at least' if zero else 'above'} 0, got {value!r}")
    at_most(name, float(value), _MOST)


def at_most(name: str, value: float, most: float) -> None:
    """Refuse what can only be a typing error, and would fill the memory or add up to infinity.

    Raises:
        ValueError: it is above.
    """
    if value > most:
        raise ValueError(f"{name} must be at most {most:,}, got {value:,}")


@dataclass(frozen=True)
class Latency:
    """Seconds that a replica needs for a token of each of its rollouts, by how many it decodes at once and what these hold.

        t(c, K) = t(c) + per_held · K,  of c rollouts that hold K tokens of context together

    t(c) is linear between the points, and below the first as at the first. Beyond the last nothing is known, so nothing is
    said.

    Attributes:
        concurrency: rollouts, whole numbers of at least 1, growing.
        seconds_per_token: of a decoding step there, above 0.
        source: where it is from, for the result.
        per_held: seconds more for each token that is held, at least 0; of a measured curve 0: the context at which it was
            measured is in its points.

    Raises:
        ValueError: not such numbers, or not as many of one as of the other.
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
        """Seconds per token at 0 (where nothing is decoded) to `slots` rollouts that hold nothing.

        Raises:
            ValueError: more than the last point.
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
    """How fast a replica decodes, and how much it can hold.

    With c rollouts and K tokens of context held, the next x tokens of each take

        s(x) = x · (seconds_N[c] + per_held · (K + c · x / 2))

    seconds: each step adds c tokens to what is held. Tokens are taken as continuous, which is half a token off.

    Attributes:
        seconds_N: seconds per token at 0 to as many rollouts as a replica has slots, nothing being held.
        per_held: seconds more for each token held.
        room: tokens that a replica can hold.
        prefill: seconds to compute a token of context again.
    """

    seconds_N: Sequence[float]
    per_held: float = 0.0
    room: float = inf
    prefill: float = 0.0

    def seconds(self, tokens: float, rollouts: int, held: float) -> float:
        """s(x), see above."""
        return tokens * (self.seconds_N[rollouts] + self.per_held * (held + rollouts * tokens / 2))

    def tokens(self, seconds: float, rollouts: int, held: float) -> float:
        """x for a given s(x): the root of a quadratic, written so that it is exact where nothing grows."""
        first = self.seconds_N[rollouts] + self.per_held * held
        return 2 * seconds / (first + sqrt(first * first + 2 * self.per_held * rollouts * seconds))


def read_latency(path: Path) -> Latency:
    """A latency curve from a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: what is in it is no curve; says in which line or field.
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


_ARITHMETIC = "; by default arithmetic for --model on --gpu."


def _cost(says: str, default: Any = MISSING) -> Any:
    return field(default=default, metadata={"says": says})


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What everything but decoding costs. What is a forward or backward pass, `Hardware.costs` knows by arithmetic.

    Attributes:
        prefill: GPU-seconds for a token of a prompt; its replica decodes nothing meanwhile. Paid once for the rollouts of
            an order that begin on one replica together, and for the context of one that was preempted.
        logprob: GPU-seconds of the forward pass over a token, prompts included, for its log-probability.
        train: GPU-seconds of forward and backward over a token trained on, prompts included.
        abort: seconds from the decision to stop a rollout until its slot is free; it goes on decoding meanwhile.
        weight_sync: seconds in which new weights reach the replicas, which decode nothing.
        train_row: GPU-seconds more for each row.
        update: seconds of the optimizer's step, on whatever number of GPUs.
        score: seconds from a rollout's end until its reward is known; its slot is free meanwhile.
        scorers: rollouts that are scored at a time at most; 0: all that ended.

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
