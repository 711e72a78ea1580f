"""Statistics of a scorer."""

from __future__ import annotations

from collections import Counter
from reprlib import repr as short
from threading import Lock
from typing import Any

from rollalloc.rewards.function import Outcome, Sample, Scored

_NAMED = 20  # maximum number of slow samples, and of lost samples, in a report
_REASONS = 50  # maximum number of reasons to count separately; an exception's text may differ for every sample


class Tally:
    """Counts outcomes. Keeps the 20 slowest samples, and the 20 slowest samples whose worker died or was killed."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._scored = 0
        self._seconds = 0.0
        self._discarded = 0
        self._unscored: Counter[str] = Counter()
        self._slowest: list[dict[str, Any]] = []
        self._lost: list[dict[str, Any]] = []

    def add(self, sample: Sample, outcome: Outcome, seconds: float, lost: bool = False) -> None:
        """Count a sample.

        Args:
            sample: the sample.
            outcome: its outcome.
            seconds: time that the sample took.
            lost: whether the sample's worker died or was killed.
        """
        name = sample.name or f"{sample.data_source or 'a sample'} that answers {short(sample.completion)}"
        entry = {"name": name, "seconds": round(seconds, 3)}
        with self._lock:
            self._seconds += seconds
            if isinstance(outcome, Scored):
                self._scored += 1
            else:
                known = outcome.reason in self._unscored or len(self._unscored) < _REASONS
                self._unscored[outcome.reason if known else "other reasons"] += 1
                entry["reason"] = outcome.reason
            _keep_slowest(self._lost if lost else self._slowest, entry)

    def add_discarded(self, answers: int) -> None:
        """Count messages of workers that did not answer a request, or had a wrong form."""
        with self._lock:
            self._discarded += answers

    def report(self) -> dict[str, Any]:
        """The counts and names as plain JSON data; see `Scorer.report`."""
        with self._lock:
            return {
                "scored": self._scored,
                "discarded": self._discarded,
                "seconds": round(self._seconds, 3),
                "unscored": dict(self._unscored.most_common()),
                "slowest": [dict(entry) for entry in self._slowest],
                "lost": [dict(entry) for entry in self._lost],
            }


def _keep_slowest(entries: list[dict[str, Any]], entry: dict[str, Any]) -> None:
    if len(entries) < _NAMED or entry["seconds"] > entries[-1]["seconds"]:
        entries.append(entry)
        entries.sort(key=lambda entry: -entry["seconds"])
        del entries[_NAMED:]
