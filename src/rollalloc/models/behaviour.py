"""The policy that samples: the trained one itself, or a copy of it, in half precision or without adapters."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import torch

from rollalloc.models.adapter import plain_weights
from rollalloc.models.dtypes import SamplingDtype
from rollalloc.models.policy import Policy


class Behaviour:
    """The policy that samples, rollouts and evaluations alike.

    In float32 it is the trained policy itself. Else it is a copy, which is given the trained weights, rounded, each time
    that it is asked for; adapters are in its weights. `rollalloc.train.update` corrects for the rounding.

    Args:
        policy: that is trained.
        dtype: of the weights and the key-value cache while sampling.
        plain: let a policy with adapters be sampled from through a copy in any case, as what generates elsewhere needs it.

    Attributes:
        trained: the policy that is trained.
    """

    def __init__(self, policy: Policy, dtype: SamplingDtype, *, plain: bool = False) -> None:
        self.trained = policy
        self._copy: Policy | None = None
        if dtype == "float32" and (policy.adapter is None or not plain):
            return
        model = deepcopy(policy.model) if policy.adapter is None else policy.adapter.plain_copy()
        for parameter in model.parameters():  # no buffers: frequencies of rotary positions need all their digits
            parameter.data = parameter.data.to(getattr(torch, dtype))
        model.requires_grad_(plain)  # by which `weights_of` knows what to hand on
        self._copy = replace(policy, model=model, adapter=None)

    def policy(self) -> Policy:
        """The policy with the weights as they are now."""
        if self._copy is None:
            return self.trained
        here = self._copy.model.state_dict()
        with torch.no_grad():
            for name, tensor in plain_weights(self.trained.model):
                here[name].copy_(tensor)
        return self._copy
