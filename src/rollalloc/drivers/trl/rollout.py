"""A generated rollout, as the driver keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollalloc.drivers.trl.chats import Tokens
from rollalloc.drivers.trl.rewards import Score
from rollalloc.generate.sampler import Generation


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Rollout:
    """The data of a rollout that the driver keeps until the core releases it.

    Attributes:
        prompt: index of the prompt in the data set.
        prompt_tokens: token ids of the prompt.
        made: the completion, with its log-probabilities under the weights that sampled it; answers of tools are part of it.
        texts: the prompt and the completion as reward functions get them: text or messages.
        own: for each completion token, True if the model generated it and False if it is part of a tool's answer. None: the
            model generated all of them.
        environment: the environment instance of a rollout that is not scored yet; None without environments.
        scores_F: score of each reward function, None where it gave none; empty before scoring.
        logged: values that reward functions logged for the table of completions, by column.
    """

    prompt: int
    prompt_tokens: Tokens
    made: Generation
    texts: tuple[Any, Any] = ("", "")
    own: tuple[bool, ...] | None = None
    environment: Any = None
    scores_F: list[Score] = field(default_factory=list[Score])
    logged: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def length(self) -> int:
        """Number of tokens that the model generated; tools' answers are not counted."""
        return len(self.made.tokens) if self.own is None else sum(self.own)


def idle_rollout(eos_ids: Tokens) -> Rollout:
    """A placeholder of one token, for a forward pass without anything to train on."""
    end = eos_ids[:1]
    made = Generation(-1, end, np.zeros(1, np.float32), truncated=False)
    return Rollout(prompt=0, prompt_tokens=end, made=made)
