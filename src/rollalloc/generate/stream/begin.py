"""Creates the back-end that generates a run's rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

from transformers import PreTrainedModel

from rollalloc.generate.stream.backend import Backend, Decoding
from rollalloc.generate.stream.blueprint import Blueprint
from rollalloc.generate.stream.local import LocalBackend, refuse_unstreamable
from rollalloc.generate.stream.process import ProcessBackend
from rollalloc.models.likelihood import Tokens
from rollalloc.models.policy import Behaviour
from rollalloc.models.settings import Sampling, Streaming


def begin(
    behaviour: Behaviour,
    prompts: Sequence[Tokens],
    sampling: Sampling,
    streaming: Streaming,
    *,
    seed: int,
    limit_s: float,
) -> Callable[[int], Backend]:
    """Return a function that creates the back-end, with the weights that the policy has when the function is called.

    The back-end has its own copy of the model. Only `load_weights` changes its weights.

    Args:
        behaviour: provides the policy that samples, without adapters.
        prompts: token ids of each prompt.
        sampling: how rollouts are sampled.
        streaming: whether the back-end runs in its own process.
        seed: seed of all random draws.
        limit_s: number of seconds without a sign of life after which a generating process is killed.

    Returns:
        A function that takes the version of the weights and returns the back-end. It raises the errors of `LocalBackend`.

    Raises:
        ValueError: the back-end cannot generate with the model, or has no room for one rollout.
    """
    policy = behaviour.policy()
    refuse_unfit_model(policy.model, prompts, sampling, streaming)
    longest = max(map(len, prompts))
    decoding = Decoding(
        sampling=sampling, eos_ids=policy.eos_ids, pad_id=policy.pad_id, seed=seed, longest_prompt=longest
    )

    def made(version: int) -> Backend:
        model = behaviour.policy().model
        if streaming.overlap:
            return ProcessBackend(model, decoding, version=version, limit_s=limit_s)
        return LocalBackend(deepcopy(model), decoding, version=version, repeatable=True)

    return made


def refuse_unfit_model(
    model: PreTrainedModel, prompts: Sequence[Tokens], sampling: Sampling, streaming: Streaming
) -> None:
    """Check that a back-end with these settings (see `begin`) can generate with a model. Nothing is created.

    Raises:
        ValueError: the back-end cannot generate with the model, or has no room for one rollout.
    """
    sampling.refuse_small_cache(max(map(len, prompts)) + sampling.max_new_tokens)
    refuse_unstreamable(model)
    if streaming.overlap:
        Blueprint.of(model)
