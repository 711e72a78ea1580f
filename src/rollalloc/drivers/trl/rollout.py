"""The data that the driver keeps of a generated rollout."""

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
        made: the completion, including the answers of tools, with log-probabilities under the weights that sampled it.
        texts: the prompt and the completion as reward functions get them: text or messages.
        own: for each token of the completion, True if the model generated it, False if it is part of a tool's answer. None:
            the model generated all tokens.
        environment: the environment instance, until the rollout is scored; None without environments.
        scores_F: score of each reward function; None if the function gave no score. Empty before scoring.
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
        """Number of tokens that the model generated, without tools' answers."""
        return len(self.made.tokens) if self.own is None else sum(self.own)


def idle_rollout(eos_ids: Tokens) -> Rollout:
    """A placeholder of one token, for a forward pass that has no rows to train on."""
    end = eos_ids[:1]
    made = Generation(-1, end, np.zeros(1, np.float32), truncated=False)
    return Rollout(prompt=0, prompt_tokens=end, made=made)
