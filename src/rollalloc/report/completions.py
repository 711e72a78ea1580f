"""What the page shows of a run's rollouts: some groups with their texts, and the prompts over time.

A log is read once, as a stream. Of 10⁶ rollouts, a dozen bytes of each are kept, and the texts of a sample.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollalloc.files.text import one_line, visible
from rollalloc.report.charts import Cells, Chart, Panel
from rollalloc.report.rollouts import Decisions, LoggedRollout, LogState, decisions_of, rollouts_of
from rollalloc.report.style import by_status, cause
from rollalloc.report.wording import name_of
from rollalloc.runs.recorded import RecordedRun

SHOWN = 600  # rollouts of a page that are shown with their texts, at most
_OF_A_GROUP = 16  # rollouts of a group that are shown, at most
_BEGINNING, _END = 2_800, 1_200  # characters of a longer text that are shown; its end has the answer
_PROMPTS, _COLUMNS = 100, 50  # rows and columns of the prompts over time, at most
_RIGHT = 1 - 1e-6  # a metric from here on is right
_RECENT = 1 << 16  # groups whose numbers are remembered
_TEXTS = 20_000  # prompts whose texts are remembered while a log is read
_PREVIEW = 60  # characters of a prompt in a figure


@dataclass(frozen=True)
class LoggedRollouts:
    """The rollouts in the log of a run.

    Attributes:
        run: the run.
        reading: the log's name and problems.
        sample: rollouts of groups that are spread evenly over the log, in the order of the log.
        prompts: the keys of the prompts, in the order of their first rollout.
        prompt_R: index of each rollout's prompt.
        metric_R: each rollout's metric; NaN without a score.
        asked: the text of each prompt that is shown, by key, as far as the log has it.
        decisions: what became of the rollouts in `sample`.
    """

    run: RecordedRun
    reading: LogState
    sample: Sequence[tuple[int, LoggedRollout]]
    prompts: Sequence[str]
    prompt_R: NDArray[np.int32]
    metric_R: NDArray[np.float32]
    asked: Mapping[str, str]
    decisions: Decisions

    def __len__(self) -> int:
        return len(self.prompt_R)


@dataclass
class _Sample:
    """Whole groups, spread evenly: every `_each`-th group, where `_each` doubles whenever too many rollouts are kept."""

    most: int
    _each: int = 1
    _seen: int = 0  # number of different groups
    _numbers: dict[Hashable, int] = field(
        default_factory=dict[Hashable, int]
    )  # of recent groups, in order of appearance
    _kept: dict[int, list[tuple[int, LoggedRollout]]] = field(
        default_factory=dict[int, list[tuple[int, LoggedRollout]]]
    )
    _count: int = 0

    def add(self, at: int, rollout: LoggedRollout) -> None:
        number = self._numbered(rollout.group)
        if number % self._each:
            return
        kept = self._kept.setdefault(number, [])
        if len(kept) == _OF_A_GROUP:
            return
        kept.append((at, rollout))
        self._count += 1
        while self._count > 2 * self.most and len(self._kept) > 1:
            self._each *= 2
            self._kept = {number: kept for number, kept in self._kept.items() if number % self._each == 0}
            self._count = sum(map(len, self._kept.values()))

    def _numbered(self, group: Hashable) -> int:
        if isinstance(group, int):
            return group
        if group not in self._numbers:
            if len(self._numbers) == _RECENT:  # the rollouts of a group are close together in a log
                self._numbers.clear()
            self._numbers[group] = self._seen
            self._seen += 1
        return self._numbers[group]

    def prompts(self) -> set[str]:
        """The keys of the prompts in the sample."""
        return {rollout.prompt for kept in self._kept.values() for _, rollout in kept}

    def taken(self) -> list[tuple[int, LoggedRollout]]:
        """The sample, of at most `most` rollouts unless a single group is larger."""
        groups = list(self._kept.values())
        while len(groups) > 1 and sum(map(len, groups)) > self.most:
            del groups[1::2]
        return [entry for group in groups for entry in group]


def collected(run: RecordedRun, most: int = SHOWN) -> LoggedRollouts | None:
    """Read the rollouts in the log of a run. None: the run has no such log.

    Args:
        run: the run.
        most: number of rollouts to keep with their texts.
    """
    reading, sample = LogState(), _Sample(most)
    numbers: dict[str, int] = {}
    asked: dict[str, str] = {}
    prompt_R, metric_R = array("i"), array("f")
    for at, rollout in enumerate(rollouts_of(run, reading)):
        prompt = numbers.setdefault(rollout.prompt, len(numbers))
        prompt_R.append(prompt)
        metric_R.append(nan if rollout.metric is None else rollout.metric)
        if rollout.asked is not None and rollout.prompt not in asked:
            if len(asked) == _TEXTS:
                shown = sample.prompts()
                asked = {key: words for key, words in asked.items() if key in shown}
            asked[rollout.prompt] = cut(rollout.asked)
        sample.add(at, rollout._replace(asked=None, text=None if rollout.text is None else cut(rollout.text)))
    if not reading.source or (not prompt_R and not reading.bad):
        return None
    taken = sample.taken()
    decisions = decisions_of(run, {rollout.group for _, rollout in taken}, reading)
    prompts, metrics = np.array(prompt_R, np.int32), np.array(metric_R, np.float32)
    return LoggedRollouts(run, reading, taken, tuple(numbers), prompts, metrics, asked, decisions)


def cut(words: str) -> str:
    """A text, or the beginning and the end of a long one."""
    left = len(words) - _BEGINNING - _END
    return words if left <= 0 else f"{words[:_BEGINNING]}\n[… {left:,} characters …]\n{words[-_END:]}"


# ------------------------------------------------------------------------------------------------------ the table of texts

FIELDS = (
    "run",
    "at",
    "version",
    "prompt",
    "group",
    "reward",
    "score",
    "tokens",
    "cut",
    "outcome",
    "kind",
    "became",
    "asked",
    "text",
)


def as_rows(logs: Iterable[LoggedRollouts], every: int = 1) -> dict[str, Any]:
    """The sampled rollouts of a section as a table for the page. Every text is made visible; the page shows it as text.

    Args:
        logs: the logs of the section's runs.
        every: leave out all but every so many groups, for a shorter page.
    """
    asked: dict[str, int] = {}
    rows: list[list[Any]] = []
    for log in logs:
        name, groups = name_of(log.run), _groups(log.sample)
        for at, rollout in log.sample:
            if groups[rollout.group] % every:
                continue
            question = visible(log.asked.get(rollout.prompt, ""))
            rows.append(
                [
                    name,
                    at + 1,
                    rollout.version,
                    one_line(rollout.prompt, 80),
                    groups[rollout.group],
                    rollout.reward,
                    rollout.metric,
                    rollout.tokens,
                    rollout.cut,
                    outcome(rollout),
                    *became(rollout, log.decisions),
                    asked.setdefault(question, len(asked)),
                    None if rollout.text is None else visible(rollout.text),
                ]
            )
    return {"fields": FIELDS, "rows": rows, "asked": list(asked)}


def _groups(sample: Sequence[tuple[int, LoggedRollout]]) -> dict[Hashable, int]:
    return {group: at for at, group in enumerate(dict.fromkeys(rollout.group for _, rollout in sample), start=1)}


def outcome(rollout: LoggedRollout) -> str:
    """How a rollout was judged: "right", "partly right", "wrong" or "no score"."""
    if rollout.metric is None:
        return "no score"
    return "right" if rollout.metric >= _RIGHT else "wrong" if rollout.metric <= 0 else "partly right"


def became(rollout: LoggedRollout, decisions: Decisions) -> tuple[str, str]:
    """What became of a rollout, in a few words and in a sentence, as far as the log says."""
    if rollout.unscored == "stopped":
        return "stopped early", "stopped early by the recipe"
    if rollout.unscored is not None:
        return "not scored", f"not scored: {one_line(rollout.unscored, 120)}"
    fate = decisions.fates.get(rollout.group)
    if rollout.rollout is not None and rollout.rollout in decisions.advantages and fate != "zero_variance":
        batch, advantage = decisions.batches[rollout.rollout], decisions.advantages[rollout.rollout]
        return "trained on", f"trained on in batch {batch}, advantage {advantage:+.3g}"
    if fate is not None:
        kind = cause("unselected") if fate == "trained" else by_status({fate: 1})[0][0]
        return f"left out: {kind.words}", f"left out: {kind.words}" + (f" ({kind.means})" if kind.means else "")
    return "not logged", "" if rollout.advantage is None else f"advantage {rollout.advantage:+.3g}"


# -------------------------------------------------------------------------------------------------------- prompts × time


def prompts_over_time(log: LoggedRollouts, name: str) -> Chart | None:
    """Success rate and number of rollouts of the most visited prompts, over the run.

    Args:
        log: the rollouts.
        name: name of the run, for the heading.
    """
    if len(log) < 2:
        return None
    counts_P = np.bincount(log.prompt_R, minlength=len(log.prompts))
    shown = np.argsort(-counts_P, kind="stable")[:_PROMPTS]
    columns = min(_COLUMNS, len(log))
    row_P = np.full(len(log.prompts), -1)
    row_P[shown] = np.arange(len(shown))
    row_R, column_R = row_P[log.prompt_R], np.arange(len(log)) * columns // len(log)
    paid, scored, total = (np.zeros((len(shown), columns)) for _ in range(3))
    kept_R = row_R >= 0
    np.add.at(paid, (row_R[kept_R], column_R[kept_R]), 1)
    kept_R &= ~np.isnan(log.metric_R)
    np.add.at(scored, (row_R[kept_R], column_R[kept_R]), 1)
    np.add.at(total, (row_R[kept_R], column_R[kept_R]), log.metric_R[kept_R])
    with np.errstate(invalid="ignore"):
        rate, overall = total / scored, total.sum(1) / scored.sum(1)
    order = np.argsort(np.nan_to_num(overall, nan=-1), kind="stable")
    labels = [_label(log, int(shown[row]), overall[row], int(counts_P[shown[row]])) for row in order]
    edges = np.arange(columns + 1) * len(log) / columns
    paid[paid == 0] = np.nan
    most = max(1.0, float(np.nanmax(rate))) if scored.any() else 1.0
    several = (
        f"; the {len(shown)} most visited of {len(log.prompts):,} prompts" if len(shown) < len(log.prompts) else ""
    )
    return Chart(
        "prompts-over-time",
        f"Prompts over time: {one_line(name, 40)}",
        f"A row is a prompt{several}, the hardest at the top. A column is a fiftieth of the rollouts. Above: the mean "
        "score of the prompt's rollouts. Below: how many it got. No cell: not visited.",
        [
            Panel("rollouts", "prompt", [Cells("mean score", labels, edges, rate[order], most)], "Success rate"),
            Panel("rollouts", "prompt", [Cells("rollouts", labels, edges, paid[order])], "Rollouts"),
        ],
        wide=True,
    )


def _label(log: LoggedRollouts, prompt: int, rate: float, count: int) -> str:
    key = log.prompts[prompt]
    words = one_line(log.asked.get(key, ""), _PREVIEW)
    scored = "no score" if np.isnan(rate) else f"{rate:.0%}"
    return f"{one_line(key, 40)}{': ' if words else ''}{words} ({count:,} rollouts, {scored})"
