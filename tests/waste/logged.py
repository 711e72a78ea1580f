"""Groups one by one, as tests write them down and look at them."""

import json
from typing import Any, NamedTuple

import numpy as np

from rollalloc.waste.groups import NO_STEP, NOT_SAID, Gathering


def lines(path, rows):
    """Write a file of these rows, or of text as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


class Group(NamedTuple):
    prompt: str
    step: int | None
    rewards: list[Any]
    truncated: int | None = None
    first: int | None = None  # all by default


def columns(groups):
    """As the readers put them together; NaN is no score, the first `truncated` rollouts hit the limit."""
    gathering = Gathering()
    for number, (prompt, step, rewards, truncated, first) in enumerate(groups):
        for at, reward in enumerate(rewards):
            cut, late = None if truncated is None else at < truncated, first is not None and at >= first
            gathering.add(number, prompt, step, float(reward), truncated=cut, stage=int(late))
    return gathering.groups()


def each(groups):
    """The groups out of their columns; None where a rollout has no score."""
    for at, rewards in enumerate(np.split(groups.rewards_R, groups.begin_V[1:])):
        step, truncated = int(groups.step_V[at]), int(groups.truncated_V[at])
        yield Group(
            groups.keys[groups.prompt_V[at]],
            None if step == NO_STEP else step,
            [None if np.isnan(reward) else reward for reward in rewards.tolist()],
            None if truncated == NOT_SAID else truncated,
            int(groups.first_V[at]),
        )


def rewards(log):
    return [group.rewards for group in each(log.groups)]
