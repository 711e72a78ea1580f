"""What a run teaches, by figures that have no influence on it.

`Selection` compares trained rows with all rollouts, by mean length and difficulty. The difference shows whether long or hard
rollouts are left out, by a filter, a stop rule, aborts or the staleness limit. `Teaching` says whether recent rollouts still
give a learning signal, and when to warn that they do not. Both are saved, so that a resumed run gives the same figures.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from rollalloc.core.group import Group
from rollalloc.core.packing import amount, exact_keys, is_rate, natural, naturals, number

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


WINDOW = 2048  # number of recent rollouts that are considered
FIRST = 64  # if all outcomes since the start are the same, warn after this many rollouts
_SILENT = ("all_wrong", "all_right", "all_alike")  # outcomes of groups whose rewards were equal
_ALONE = ("wrong", "right", "between")  # outcomes of rollouts that were not compared within a group
# Outcomes of groups whose rewards were equal, and that were dropped before their last stage.
_PILOTS = ("pilots_wrong", "pilots_right", "pilots_alike")
OUTCOMES = (*_SILENT, "mixed", *_ALONE, *_PILOTS)  # states are saved in this order, so new names come last
_FORMERLY = len(OUTCOMES) - len(_PILOTS)  # number of outcomes in states that were saved before `_PILOTS` existed
_AGAIN = 16 * WINDOW  # repeat a warning after this many rollouts even if nothing got worse
SAME = 1e-9  # rewards or metrics are equal if they differ by at most this number, for judges and logs too
_ROUNDING = 1e-6  # tolerance for means of float32 scores near 0 or 1


class Limits(NamedTuple):
    """Thresholds for warnings about a share, see `Teaching.after_batch`."""

    begin: float
    end: float
    worse: float


_OF_GROUPS, _OF_ALONE = Limits(0.5, 0.4, 0.15), Limits(0.95, 0.9, 0.03)


def are_alone(shares: Mapping[str, float]) -> bool:
    """Whether most rollouts were not compared with other rollouts of their group."""
    return sum(shares.get(name, 0) for name in _ALONE) > 0.5


def silent(shares: Mapping[str, float]) -> tuple[float, Limits]:
    """The share of rollouts without a learning signal, and the thresholds for warnings about this share.

    Rollouts in groups with equal rewards give no signal. If most rollouts are alone (`are_alone`), the function returns
    the share of the more frequent of two outcomes, right and wrong.

    Pilots are there to find prompts that are not worth more rollouts, and of two pilots at least half agree at every
    success rate. So if most rollouts without a signal were pilots, the higher thresholds apply.
    """
    if are_alone(shares):
        return max(shares.get("right", 0), shares.get("wrong", 0)), _OF_ALONE
    whole, pilots = (sum(shares.get(name, 0) for name in names) for names in (_SILENT, _PILOTS))
    return whole + pilots, _OF_ALONE if pilots > whole else _OF_GROUPS


def never_differed(shares: Mapping[str, float]) -> str | None:
    """The one outcome that all rollouts had, "wrong", "right" or "alike"; None if outcomes differed.

    If all outcomes are the same, a wrong reward function is more likely than unsuitable prompts.
    """
    kinds = {name.rpartition("_")[2] for name in OUTCOMES if shares.get(name, 0)}
    return kinds.pop() if len(kinds) == 1 and kinds <= {"wrong", "right", "alike"} else None


def outcomes(group: Group, fate: str, *, pilots: bool = False) -> Mapping[str, int]:
    """Number of a group's scored rollouts by outcome.

    Args:
        group: a group that is over.
        fate: how the visit ended. "trained" means that at least one rollout had a nonzero advantage.
        pilots: whether the group was dropped before its last stage.
    """
    done = group.done
    if len(done) == 1:  # fast path for one rollout per prompt
        return {_kind(done[0].metric) or "between": 1}
    rewards = [each.reward for each in done]
    if rewards and max(rewards) - min(rewards) > (0 if fate == "trained" else SAME):
        return {"mixed": len(done)}
    if fate == "trained":
        return Counter(_kind(each.metric) or "between" for each in done)
    kinds = set(map(_kind, set(map(_metric, done))))
    kind = kinds.pop() if len(kinds) == 1 else None
    return {f"{'pilots' if pilots else 'all'}_{kind or 'alike'}": len(done)} if done else {}


def _kind(metric: float) -> str | None:
    return "wrong" if metric <= _ROUNDING else "right" if abs(metric - 1) <= _ROUNDING else None


class Teaching:
    """Counts the outcomes of at least the last `WINDOW` rollouts, batch by batch.

    Attributes:
        should_warn: whether drivers should warn after this batch that rollouts give little learning signal.
    """

    def __init__(self) -> None:
        self.should_warn = False
        self._now = Counter[str]()  # outcomes since the last batch
        self._before = deque[Counter[str]]()  # one counter for each earlier batch
        self._said: float | None = None  # share at the last warning; None after the share fell below `Limits.end`
        self._since = 0  # rollouts since the last warning

    def add(self, ended: Mapping[str, int]) -> None:
        """Add rollouts that ended, by outcome."""
        for name, count in ended.items():
            self._now[name] += count

    def shares(self) -> dict[str, float]:
        """The share of each outcome among the rollouts of the window.

        Empty if there are too few rollouts: fewer than `WINDOW`, or fewer than `FIRST` if all had the same outcome.
        """
        return self._shares(sum(self._before, Counter[str]()))

    def final_shares(self) -> dict[str, float]:
        """The shares at the end of a run. They include rollouts that ended after the last batch."""
        return self._shares(sum(self._before, self._now))

    def _shares(self, total: Counter[str]) -> dict[str, float]:
        count = total.total()
        shares = {name: total[name] / count for name in OUTCOMES} if count else {}
        return shares if count >= WINDOW or (count >= FIRST and never_differed(shares)) else {}

    def after_batch(self) -> None:
        """Move the window forward after a batch, and set `should_warn`.

        A warning is due when the share without a learning signal reaches `Limits.begin`. It is repeated when the share has
        grown by `Limits.worse`, or after `_AGAIN` further rollouts. The warnings start over when the share falls
        below `Limits.end`.
        """
        self._since += self._now.total()
        self._before.append(self._now)
        self._now = Counter[str]()
        # Batches leave whole, so at least `WINDOW` rollouts stay.
        while sum(each.total() for each in self._before) - self._before[0].total() >= WINDOW:
            self._before.popleft()
        share, limits = silent(self.shares())
        if share < limits.end:
            self._said = None
        news = self._said is None or share >= self._said + limits.worse or self._since >= _AGAIN
        self.should_warn = share >= limits.begin and news
        if self.should_warn:
            self._said, self._since = share, 0

    def state_dict(self) -> dict[str, Any]:
        """The complete state as JSON data."""
        return {
            "now": [self._now[name] for name in OUTCOMES],
            "before": [[each[name] for name in OUTCOMES] for each in self._before],
            "said": self._said,
            "since": self._since,
            "speaks": self.should_warn,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            ValueError: the state is not a state of this class.
        """
        exact_keys(state, self.state_dict(), "keys")
        self._now = _counted(state["now"])
        self._before = deque(map(_counted, state["before"]))
        self._said, self._since = amount(state["said"], "said", "in [0, 1]", is_rate), natural(state["since"], "since")
        if not isinstance(state["speaks"], bool):
            raise ValueError(f"speaks: expected true or false, got {state['speaks']!r}; the state is corrupt")
        self.should_warn = state["speaks"]


def _counted(saved: Any) -> Counter[str]:
    counts = naturals(saved, "outcomes")
    if len(counts) not in (_FORMERLY, len(OUTCOMES)):
        raise ValueError(f"outcomes: expected {len(OUTCOMES)} counts, got {len(counts)}; the state is corrupt")
    return Counter({name: count for name, count in zip(OUTCOMES, counts, strict=False) if count})
