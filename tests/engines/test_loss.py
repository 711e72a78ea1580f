"""The loss against tables worked out by hand, and its gradient against a formula of its own."""

from __future__ import annotations

import math

import pytest
import torch

from rollalloc.engines.loss import Clip, token_losses

CLIP = Clip(low=0.2, high=0.28, stale=2.0)


def loss_of(ratio: float, advantage: float, *, importance: float = 1.0, weight: float = 1.0, clip: Clip = CLIP):
    """Loss and gradient of one token: current / proximal is `ratio`, proximal / behaviour is `importance`."""
    behaviour = torch.tensor([[-1.3]], dtype=torch.float64)
    proximal = behaviour + math.log(importance)
    logprob = (proximal + math.log(ratio)).requires_grad_()
    advantages, weights = (torch.tensor([value], dtype=torch.float64) for value in (advantage, weight))
    loss = token_losses(logprob, proximal, behaviour, advantages, weights, clip)
    loss.sum().backward()
    assert loss.shape == (1, 1)
    assert logprob.grad is not None
    return loss.item(), logprob.grad.item()


# d(ratio)/d(logprob) is the ratio, so an unclipped token's gradient equals its loss.
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.0, -2.0, 2.0, 2.0),
        (1.1, 2.0, -2.2, -2.2),
        (0.9, -2.0, 1.8, 1.8),
        # A good token that grew likely enough, a bad one that shrank enough: no more gradient.
        (1.5, 2.0, -2.56, 0.0),
        (0.5, -2.0, 1.6, 0.0),
        # The other way round they are not clipped: what went wrong is put right.
        (0.5, 2.0, -1.0, -1.0),
        (1.5, -2.0, 3.0, 3.0),
        # Just inside either limit.
        (1.27, 2.0, -2.54, -2.54),
        (0.81, -2.0, 1.62, 1.62),
        (3.0, 0.0, 0.0, 0.0),
    ],
)
def test_a_fresh_row_is_clipped_ppo(ratio, advantage, loss, gradient):
    assert loss_of(ratio, advantage) == pytest.approx((loss, gradient))


def test_each_limit_belongs_to_one_sign_of_the_advantage():
    wide_above, wide_below = Clip(low=0.1, high=1.0), Clip(low=0.9, high=0.1)
    assert loss_of(1.5, 1.0, clip=wide_above) == pytest.approx((-1.5, -1.5))
    assert loss_of(1.5, 1.0, clip=wide_below) == pytest.approx((-1.1, 0.0))
    assert loss_of(0.5, -1.0, clip=wide_above) == pytest.approx((0.9, 0.0))
    assert loss_of(0.5, -1.0, clip=wide_below) == pytest.approx((0.5, 0.5))


@pytest.mark.parametrize(
    ("importance", "factor"), [(1.0, 1.0), (0.5, 0.5), (0.01, 0.01), (1.9, 1.9), (2.0, 2.0), (2.1, 2.0), (50.0, 2.0)]
)
def test_a_stale_row_is_weighed_by_a_truncated_ratio_that_has_no_gradient(importance, factor):
    for ratio, advantage in ((1.0, 1.5), (1.1, -1.5), (1.5, 1.5)):
        loss, gradient = loss_of(ratio, advantage)
        assert loss_of(ratio, advantage, importance=importance) == pytest.approx((factor * loss, factor * gradient))


def test_the_truncation_is_a_setting():
    assert loss_of(1.0, 1.0, importance=50.0, clip=Clip(stale=1.0))[0] == pytest.approx(-1.0)
    assert loss_of(1.0, 1.0, importance=50.0, clip=Clip(stale=100.0))[0] == pytest.approx(-50.0)


@pytest.mark.parametrize("weight", [0.0, 0.5, 3.0])
def test_a_rows_weight_multiplies_its_loss(weight):
    loss, gradient = loss_of(1.1, -1.5, importance=1.2)
    weighed = loss_of(1.1, -1.5, importance=1.2, weight=weight)
    assert weighed == pytest.approx((weight * loss, weight * gradient))


def test_the_gradient_of_random_rows_equals_an_independent_formula():
    """Token by token: -weight · iw · A · ratio where the token is inside its limit, else 0."""
    generator = torch.Generator().manual_seed(0)
    shape = (40, 25)
    logprobs, proximal, behaviour = (
        -1.5 + 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    advantages = torch.randn(shape[0], generator=generator, dtype=torch.float64)
    weights = torch.rand(shape[0], generator=generator, dtype=torch.float64) * 2
    logprobs.requires_grad_()
    token_losses(logprobs, proximal, behaviour, advantages, weights, CLIP).sum().backward()
    assert logprobs.grad is not None
    kinds = set()
    for row in range(shape[0]):
        advantage = advantages[row].item()
        for token in range(shape[1]):
            ratio = math.exp(logprobs[row, token].item() - proximal[row, token].item())
            importance = math.exp(proximal[row, token].item() - behaviour[row, token].item())
            outside = ratio > 1.28 if advantage > 0 else ratio < 0.8
            kinds.add((outside, advantage > 0, importance > 2))
            expected = 0.0 if outside else -weights[row].item() * min(importance, 2.0) * advantage * ratio
            assert logprobs.grad[row, token].item() == pytest.approx(expected, rel=1e-9)
    assert len(kinds) == 8  # every kind of token occurs, so that the loop says something


def test_the_importance_weight_has_no_gradient():
    logprobs, proximal, behaviour = (torch.full((1, 1), -1.0, requires_grad=True) for _ in range(3))
    token_losses(logprobs, proximal.detach(), behaviour, torch.ones(1), torch.ones(1), CLIP).sum().backward()
    assert logprobs.grad is not None
    assert behaviour.grad is None


@pytest.mark.parametrize(
    "limits",
    [{"low": 0.0}, {"low": 1.1}, {"low": -0.2}, {"high": 0.0}, {"stale": 0.9}]
    + [{name: math.nan} for name in ("low", "high", "stale")],
)
def test_limits_out_of_range_are_refused(limits):
    with pytest.raises(ValueError, match="expected low in"):
        Clip(**limits)


def test_the_limits_ends_are_allowed():
    assert loss_of(1e-6, -1.0, clip=Clip(low=1.0, high=10.0, stale=1.0)) == pytest.approx((1e-6, 1e-6))
