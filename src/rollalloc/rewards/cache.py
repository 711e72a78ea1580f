"""Outcomes that are known already."""

from __future__ import annotations

from collections import OrderedDict

from rollalloc.rewards.function import Scored


class OutcomeCache:
    """The scores of the samples used last, by their digest, so that its size does not depend on theirs.

    Args:
        entries: most scores to keep, at least 0.
    """

    def __init__(self, entries: int) -> None:
        self.entries = entries
        self._scores: OrderedDict[bytes, Scored] = OrderedDict()

    def get(self, digest: bytes) -> Scored | None:
        """The score, None where it is not known."""
        score = self._scores.get(digest)
        if score is not None:
            self._scores.move_to_end(digest)
        return score

    def put(self, digest: bytes, score: Scored) -> None:
        """Keeps a score, and drops the one that was not asked for the longest."""
        self._scores[digest] = score
        self._scores.move_to_end(digest)
        if len(self._scores) > self.entries:
            self._scores.popitem(last=False)
