"""For tests of two ways to compute the same: tokens that no rounding changes, and the gradient of every step.

Batches of two shapes, one process or two, TRL's loss or ours: each rounds otherwise, and on another processor otherwise
again. Where tokens are sampled from the weights, a draw falls between two roundings sooner or later; then a rollout, and
whatever comes after it, is another one. So what must be equal is compared: decisions, on tokens of which rounding decides
none, and gradients, each of one batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rollalloc.generate import sampler

Gradients = list[dict[str, Tensor]]


def _by_key(logits_BV: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """`sampler.draw` from a distribution that knows no weights, with the log-probabilities that the model gives."""
    token_B1 = (uniforms_B * logits_BV.shape[-1]).long()[:, None]
    return token_B1[:, 0], logits_BV.double().log_softmax(-1).gather(-1, token_B1)[:, 0]


@contextmanager
def tokens_by_key() -> Iterator[None]:
    """Rollouts whose tokens their number says and nothing else, every token as likely; so rewards and decisions, too."""
    with patch.object(sampler, "draw", _by_key):
        yield


@contextmanager
def gradients_of(model: torch.nn.Module) -> Iterator[Gradients]:
    """The gradient that each optimizer step takes, by parameter, for as long as the context lasts."""
    found: Gradients = []
    named = dict(model.named_parameters())
    here = {id(parameter) for parameter in named.values()}

    def before_a_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(id(parameter) in here for group in optimizer.param_groups for parameter in group["params"]):
            found.append({name: each.grad.detach().clone() for name, each in named.items() if each.grad is not None})

    hook = register_optimizer_step_pre_hook(before_a_step)
    try:
        yield found
    finally:
        hook.remove()


def assert_same_gradients(
    one: Sequence[Mapping[str, Tensor]], other: Sequence[Mapping[str, Tensor]], tolerance: float = 1e-3
) -> None:
    """Step by step the same, to a share of the step's greatest entry; and there was something to compare."""
    assert len(one) == len(other)
    assert any(_greatest(step) > 0 for step in one)
    for at, (ours, theirs) in enumerate(zip(one, other, strict=True)):
        assert ours.keys() == theirs.keys()
        allowed = tolerance * _greatest(ours)
        for name, gradient in ours.items():
            apart = float((gradient - theirs[name]).abs().max())
            assert apart <= allowed, f"step {at}, {name}: {apart:.3g} apart, {allowed:.3g} allowed"


def _greatest(step: Mapping[str, Tensor]) -> float:
    return max((float(gradient.abs().max()) for gradient in step.values()), default=0.0)
