"""Compare trained rows with all rollouts, by mean length and difficulty.

The difference shows whether long or hard rollouts are left out, by a filter, a stop rule, aborts or the staleness limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from rollalloc.core.group import Group
from rollalloc.core.packing import exact_keys, number

_metric = attrgetter("metric")
_SUMS = ("rollouts", "tokens", "rated", "difficulty")


class _Sums:
    """Number of rollouts, sum of their tokens, number of rollouts with an expected difficulty, and sum of difficulties."""

    def __init__(self) -> None:
        self.rollouts = self.tokens = self.rated = 0
        self.difficulty = 0.0

    def add(self, lengths: Sequence[int], difficulty: float | None) -> None:
        count = len(lengths)
        self.rollouts += count
        self.tokens += sum(lengths)
        if difficulty is not None:
            self.rated += count
            self.difficulty += difficulty * count


class Selection:
    """Sums over the rollouts that ended since the last update of the weights."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Reset the sums after an update of the weights."""
        self._sampled, self._trained = _Sums(), _Sums()

    def end(self, group: Group) -> None:
        """Add a group that is over. The length of a stopped rollout is the number of tokens generated before the stop."""
        self._sampled.add(group.lengths, expected_difficulty(group))

    def end_late(self, group: Group, tokens: int) -> None:
        """Add a stopped rollout that ended after its group, if it had generated tokens."""
        if tokens:
            self._sampled.add([tokens], expected_difficulty(group))

    def train(self, group: Group, lengths: Sequence[int]) -> None:
        """Add the rows of a group that go into the batch."""
        self._trained.add(lengths, expected_difficulty(group))

    def figures(self) -> dict[str, float | None]:
        """Means over all sampled rollouts and over the new rows of the batch; None for a mean over nothing."""
        return {
            f"{what}_{which}": value / count if count else None
            for which, sums in (("sampled", self._sampled), ("trained", self._trained))
            for what, value, count in (
                ("tokens", sums.tokens, sums.rollouts),
                ("difficulty", sums.difficulty, sums.rated),
            )
        }

    def state_dict(self) -> dict[str, Any]:
        """The complete state as JSON data."""
        parts = {"sampled": self._sampled, "trained": self._trained}
        return {which: [getattr(sums, name) for name in _SUMS] for which, sums in parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            ValueError: the state is not a state of this class.
        """
        exact_keys(state, ("sampled", "trained"), "keys")
        for which, sums in (("sampled", self._sampled), ("trained", self._trained)):
            for name, value in zip(_SUMS, state[which], strict=True):
                setattr(sums, name, number(value, name))


def expected_difficulty(group: Group) -> float | None:
    """1 - the predicted pass rate; without a prediction, 1 - the group's mean metric; None if both are unknown."""
    if group.drawn.predicted is not None:
        return 1 - group.drawn.predicted
    done = group.done
    return 1 - sum(map(_metric, done)) / len(done) if done else None
