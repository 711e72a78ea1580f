"""Costs of the simulated work: decoding by concurrency, prefill, training, weight synchronization."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from math import inf, isfinite, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from rollalloc.files.regular import read_text

_FIELDS = ("concurrency", "seconds_per_token")
_EXPECTED = f'CSV with the header "{",".join(_FIELDS)}"'
_MOST = 1_000_000_000  # seconds, tokens


def option(default: Any, says: str) -> Any:
    """A field of a dataclass that is an option of `rollalloc-lab simulate`, with its help."""
    return field(default=default, metadata={"says": says})


def positive(name: str, value: Any, *, zero: bool = False, most: float = _MOST) -> None:
    """Raise an error unless the value is a number above 0 and at most `most`. If `zero` is True, 0 is accepted too.

    Raises:
        ValueError: the value is anything else.
    """
    number = isinstance(value, (int, float, np.floating, np.integer)) and not isinstance(value, bool)
    if not number or not isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} must be a finite number {'of at least' if zero else 'above'} 0, got {value!r}")
    at_most(name, float(value), most)


def at_most(name: str, value: float, most: float) -> None:
    """Raise an error for a number so large that it would fill the memory or sum to infinity.

    Raises:
        ValueError: the value is above `most`.
    """
    if value > most:
        raise ValueError(f"{name} must be at most {most:,}, got {value:,}")


@dataclass(frozen=True)
class Latency:
    """Seconds per token of each rollout on a replica, by the number of rollouts decoded at once and by their context.

        t(c, K) = t(c) + per_held · K   for c rollouts that hold K tokens of context together

    t(c) is linear between the points, and constant below the first point. Beyond the last point nothing was measured, so a
    larger concurrency is an error.

    Attributes:
        concurrency: numbers of rollouts decoded at once: increasing whole numbers from 1.
        seconds_per_token: seconds per token of a decoding step at each concurrency, above 0.
        source: where the curve comes from, to be shown with the result.
        per_held: additional seconds for each token of context, at least 0. It is 0 for measured curves, because these
            include the context that they were measured with.

    Raises:
        ValueError: a number is out of its range, or the lists have different lengths.
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
                f"{self.source}: expected one value of seconds_per_token for each of concurrency, and at least one, got "
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
                f"{self.source} ends at a concurrency of {self.concurrency[-1]}, but --slots is {slots}: measure more, or "
                f"give --slots {self.concurrency[-1]}"
            )
        seconds = np.interp(np.arange(slots + 1), self.concurrency, self.seconds_per_token)
        return seconds.tolist()


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a replica decodes, and how much context it can hold.

    If c rollouts hold K tokens of context, the next x tokens of each rollout take

        s(x) = x · (seconds_N[c] + per_held · (K + c · x / 2))

    seconds, because each step adds c tokens of context. Tokens are treated as continuous; the error in the context
    is half a token per rollout.

    Attributes:
        seconds_N: seconds per token for 0 to `slots` rollouts, without context.
        per_held: additional seconds for each token held.
        room: tokens of context that a replica can hold.
        prefill: seconds to recompute one token of context.
    """

    seconds_N: Sequence[float]
    per_held: float = 0.0
    room: float = inf
    prefill: float = 0.0

    def seconds(self, tokens: float, rollouts: int, held: float) -> float:
        """s(x) of the class's equation: seconds for the next `tokens` of each rollout."""
        return tokens * (self.seconds_N[rollouts] + self.per_held * (held + rollouts * tokens / 2))

    def tokens(self, seconds: float, rollouts: int, held: float) -> float:
        """The x with s(x) = `seconds`. This form of a quadratic equation's root stays exact if `per_held` is 0."""
        first = self.seconds_N[rollouts] + self.per_held * held
        return 2 * seconds / (first + sqrt(first * first + 2 * self.per_held * rollouts * seconds))


def read_latency(path: Path) -> Latency:
    """Read a latency curve from a CSV file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file does not have a valid curve; the message names the line.
    """
    try:
        rows = csv.reader(io.StringIO(read_text(path)))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected {_EXPECTED}, got bytes that are not UTF-8: {error}") from None
    header = [name.strip() for name in next(rows, [])]
    if sorted(header) != sorted(_FIELDS):
        raise ValueError(f"{path}, line 1: expected {_EXPECTED}, got {','.join(header)!r:.80}")
    points: list[tuple[int, float]] = []
    for row in filter(None, rows):
        try:
            line = dict(zip(header, row, strict=True))
            points.append((int(line["concurrency"]), float(line["seconds_per_token"])))
        except ValueError:
            raise ValueError(
                f"{path}, line {rows.line_num}: expected a whole number of rollouts and a number of seconds, "
                f"got {','.join(row)!r:.80}"
            ) from None
    return Latency(tuple(at for at, _ in points), tuple(seconds for _, seconds in points), str(path))


_ARITHMETIC = " (default: estimated for --model on --gpu)."


@dataclass(frozen=True, kw_only=True)
class Costs:
    """All costs except decoding. `Hardware.costs` estimates those of forward and backward passes.

    Attributes:
        prefill: GPU-seconds per prompt token. The replica does not decode in this time. It is paid once for all rollouts
            of an order that start together on a replica, and again for the context of a preempted rollout.
        logprob: GPU-seconds per token for the forward pass that computes log-probabilities. Prompt tokens count too.
        train: GPU-seconds per trained token for the forward and backward pass. Prompt tokens count too.
        abort: seconds from the decision to stop a rollout until its slot is free. The rollout keeps decoding in this time.
        weight_sync: seconds that it takes to send new weights. The replicas do not decode in this time.
        train_row: additional GPU-seconds per trained row.
        update: seconds that an optimizer step takes on any number of GPUs.

    Raises:
        ValueError: a number is below 0 or not finite.
    """

    prefill: float = option(MISSING, f"GPU-seconds of prefill for a token of a prompt{_ARITHMETIC}")
    logprob: float = option(MISSING, f"GPU-seconds of the forward pass for a token's log-probability{_ARITHMETIC}")
    train: float = option(MISSING, f"GPU-seconds of forward and backward for a token{_ARITHMETIC}")
    abort: float = option(0.02, "Seconds from stopping a rollout until its slot is free.")
    weight_sync: float = option(2.0, "Seconds that it takes to send new weights to the replicas.")
    train_row: float = option(0.0, "Additional GPU-seconds for each rollout trained on.")
    update: float = option(1.0, "Seconds that an optimizer step takes.")

    def __post_init__(self) -> None:
        for each in fields(self):
            positive(each.name, getattr(self, each.name), zero=True)
