"""The policy that samples: the trained policy itself, or a copy in half precision or with merged adapters."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import torch

from rollalloc.models.adapter import plain_weights
from rollalloc.models.dtypes import SamplingDtype
from rollalloc.models.policy import Policy


class Behaviour:
    """The policy that samples, for rollouts and evaluations.

    In float32 this is the trained policy itself. In half precision it is a rounded copy with merged adapters. Each call of
    `policy` copies the current trained weights into it. `rollalloc.train.update` corrects for the rounding.

    Args:
        policy: the trained policy.
        dtype: number format of the weights and of the key-value cache during sampling.
        plain: if the policy has adapters, use a copy even in float32, because a generator in another process needs plain
            weights.

    Attributes:
        trained: the trained policy.
    """

    def __init__(self, policy: Policy, dtype: SamplingDtype, *, plain: bool = False) -> None:
        self.trained = policy
        self._copy: Policy | None = None
        if dtype == "float32" and (policy.adapter is None or not plain):
            return
        model = deepcopy(policy.model) if policy.adapter is None else policy.adapter.plain_copy()
        for parameter in model.parameters():  # buffers are not converted: rotary frequencies need full precision
            parameter.data = parameter.data.to(getattr(torch, dtype))
        model.requires_grad_(plain)  # `weights_of` returns the parameters that require gradients
        self._copy = replace(policy, model=model, adapter=None)

    def policy(self) -> Policy:
        """The sampling policy, with the current weights."""
        if self._copy is None:
            return self.trained
        own_weights = self._copy.model.state_dict()
        with torch.no_grad():
            for name, tensor in plain_weights(self.trained.model):
                own_weights[name].copy_(tensor)
        return self._copy
