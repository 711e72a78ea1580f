"""Which back-end generates for a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

from rollalloc.engines.likelihood import Tokens
from rollalloc.engines.policy import Policy
from rollalloc.engines.settings import Settings
from rollalloc.engines.streaming.backend import Backend
from rollalloc.engines.streaming.local import LocalBackend
from rollalloc.engines.streaming.process import ProcessBackend


def begin(policy: Policy, prompts: Sequence[Tokens], settings: Settings) -> Callable[[int], Backend]:
    """Makes the back-end that the settings name, with the weights that the policy has when it is called.

    It has a model of its own, whose weights change only where it is told.

    Args:
        policy: the model.
        prompts: token ids of each prompt.
        settings: of the trainer.

    Returns:
        version of the weights → back-end; see `LocalBackend` for what may be wrong.
    """
    sampling, longest = settings.sampling, max(map(len, prompts))

    def made(version: int) -> Backend:
        kind, model = ProcessBackend, policy.model
        if not settings.streaming.overlap:
            kind, model = LocalBackend, deepcopy(policy.model)
        return kind(
            model,
            sampling,
            eos_ids=policy.eos_ids,
            pad_id=policy.pad_id,
            seed=settings.seed,
            longest_prompt=longest,
            version=version,
        )

    return made
