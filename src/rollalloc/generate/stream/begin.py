"""Which back-end generates for a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from rollalloc.generate.sampling import Sampling
from rollalloc.generate.stream.backend import Backend
from rollalloc.generate.stream.blueprint import Blueprint
from rollalloc.generate.stream.local import LocalBackend, refuse_unstreamable, slots_of
from rollalloc.generate.stream.process import ProcessBackend
from rollalloc.generate.stream.settings import Streaming, refuse_missing
from rollalloc.models.behaviour import Behaviour
from rollalloc.models.likelihood import Tokens


def begin(
    behaviour: Behaviour,
    prompts: Sequence[Tokens],
    sampling: Sampling,
    streaming: Streaming,
    *,
    seed: int,
    limit_s: float,
) -> Callable[[int], Backend]:
    """Makes the back-end that the settings name, with the weights that the policy has when it is called.

    It has a model of its own, whose weights change only where it is told.

    Args:
        behaviour: gives the policy that samples; without adapters.
        prompts: token ids of each prompt.
        sampling: how rollouts are sampled.
        streaming: which back-end, and whether it has a process of its own.
        seed: of all draws.
        limit_s: seconds without a sign of life after which a process that generates is given up.

    Returns:
        version of the weights → back-end; see `LocalBackend` for what may be wrong.

    Raises:
        ImportError: the settings name vLLM, and it is not installed.
        ValueError: the back-end cannot generate with the model, or has no room for one rollout.
    """
    longest = max(map(len, prompts))
    refuse_unfit_model(behaviour.policy().model, prompts, sampling, streaming)
    if streaming.backend == "vllm":
        return _with_vllm(behaviour, sampling, longest, seed, limit_s)

    def made(version: int) -> Backend:
        policy = behaviour.policy()
        options: dict[str, Any] = {
            "eos_ids": policy.eos_ids,
            "pad_id": policy.pad_id,
            "seed": seed,
            "longest_prompt": longest,
            "version": version,
        }
        if streaming.overlap:
            return ProcessBackend(policy.model, sampling, limit_s=limit_s, **options)
        return LocalBackend(deepcopy(policy.model), sampling, **options)

    return made


def refuse_unfit_model(
    model: PreTrainedModel, prompts: Sequence[Tokens], sampling: Sampling, streaming: Streaming
) -> None:
    """Refuse a model with which the back-end that the settings name cannot generate, before anything is made of it.

    Args:
        model: without adapters, or before it has them.
        prompts: token ids of each prompt.
        sampling: how rollouts are sampled.
        streaming: which back-end.

    Raises:
        ImportError, ValueError: as `begin`.
    """
    refuse_missing(streaming)
    slots_of(sampling, max(map(len, prompts)))
    if streaming.backend == "vllm":
        from rollalloc.generate.stream.vllm_engine import refuse_unservable

        refuse_unservable(model)
        return
    refuse_unstreamable(model)
    if streaming.overlap:
        Blueprint.of(model)


def _with_vllm(
    behaviour: Behaviour, sampling: Sampling, longest: int, seed: int, limit_s: float
) -> Callable[[int], Backend]:
    from rollalloc.generate.stream.vllm_backend import VllmBackend  # takes seconds, and is not there for most
    from rollalloc.generate.stream.vllm_engine import Engine

    policy = behaviour.policy()
    ends, slots = (*policy.eos_ids, *sampling.stop_ids), slots_of(sampling, longest)

    def made(version: int) -> Backend:
        model = behaviour.policy().model
        serve = partial(Engine, model, sampling=sampling, ends=ends, longest_prompt=longest, slots=slots)
        return VllmBackend(
            serve,
            sampling,
            slots=slots,
            seed=seed,
            longest_prompt=longest,
            version=version,
            limit_s=limit_s,
        )

    return made
