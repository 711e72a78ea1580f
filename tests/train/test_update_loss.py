"""The loss against tables worked out by hand, and its gradient against a formula of its own."""

import math

import pytest
import torch

from rollalloc.models.settings import Clip, Loss
from rollalloc.train.update import shares, token_losses

CLIP = Clip(low=0.2, high=0.28, stale=2.0)


def loss_of(
    ratio: float,
    advantage: float,
    *,
    importance: float = 1.0,
    weight: float = 1.0,
    clip: Clip = CLIP,
    kl: float = 0.0,
    from_reference: float = 1.0,
):
    """Loss and gradient of one token: current / proximal is `ratio`, proximal / behaviour is `importance`, and
    reference / current is `from_reference`."""
    behaviour = torch.tensor([[-1.3]], dtype=torch.float64)
    proximal = behaviour + math.log(importance)
    logprob = (proximal + math.log(ratio)).requires_grad_()
    advantages, weights = (torch.tensor([value], dtype=torch.float64) for value in (advantage, weight))
    reference = logprob.detach() + math.log(from_reference)
    loss = token_losses(logprob, proximal, behaviour, advantages, weights, Loss(clip=clip, kl=kl), reference)
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


@pytest.mark.parametrize(
    ("importance", "factor"), [(1.0, 1.0), (0.5, 0.5), (0.01, 0.01), (1.9, 1.9), (2.0, 2.0), (2.1, 2.0), (50.0, 2.0)]
)
def test_a_stale_row_is_weighed_by_a_truncated_ratio_that_has_no_gradient(importance, factor):
    for ratio, advantage in ((1.0, 1.5), (1.1, -1.5), (1.5, 1.5)):
        loss, gradient = loss_of(ratio, advantage)
        assert loss_of(ratio, advantage, importance=importance) == pytest.approx((factor * loss, factor * gradient))


# A dual clip of 3 bounds what one bad token may lose, and nothing else.
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (2.9, -2.0, 5.8, 5.8),
        (3.1, -2.0, 6.0, 0.0),
        (50.0, -2.0, 6.0, 0.0),
        (50.0, -0.1, 0.3, 0.0),
        (0.5, -2.0, 1.6, 0.0),
        (0.9, -2.0, 1.8, 1.8),
        (50.0, 2.0, -2.56, 0.0),
        (0.1, 2.0, -0.2, -0.2),
        (50.0, 0.0, 0.0, 0.0),
    ],
)
def test_the_dual_clip_bounds_a_bad_tokens_loss(ratio, advantage, loss, gradient):
    assert loss_of(ratio, advantage, clip=Clip(dual=3.0)) == pytest.approx((loss, gradient))


# k3 of a reference that is e times as likely: e - 1 - 1; half as likely: 1/2 + log 2 - 1. With the ratio before it, its
# gradient is log(policy / reference) times the ratio where the ratio is 1, and by the product rule elsewhere.
@pytest.mark.parametrize(
    ("ratio", "from_reference", "loss", "gradient"),
    [
        (1.0, 1.0, 0.0, 0.0),
        (1.0, math.e, math.e - 2, -1.0),
        (1.0, 0.5, math.log(2) - 0.5, math.log(2)),
        (1.0, 2.0, 1 - math.log(2), -math.log(2)),
        (1.1, 0.5, 1.1 * (math.log(2) - 0.5), 1.1 * math.log(2)),
        (3.0, 0.5, 3.0 * (math.log(2) - 0.5), 3.0 * math.log(2)),  # the clip is the surrogate's
    ],
)
def test_the_kl_term_is_k3_with_the_gradient_of_the_divergence(ratio, from_reference, loss, gradient):
    assert loss_of(ratio, 0.0, kl=1.0, from_reference=from_reference) == pytest.approx((loss, gradient))
    assert loss_of(ratio, 0.0, kl=0.1, from_reference=from_reference) == pytest.approx((0.1 * loss, 0.1 * gradient))
    surrogate = loss_of(ratio, -1.0)
    both = loss_of(ratio, -1.0, kl=1.0, from_reference=from_reference)
    assert both == pytest.approx((surrogate[0] + loss, surrogate[1] + gradient))
    stale = loss_of(ratio, -1.0, kl=1.0, from_reference=from_reference, importance=0.5, weight=3.0)
    assert stale == pytest.approx((1.5 * both[0], 1.5 * both[1]))


# Rows of 1, 2 and 5 tokens, at most 10.
@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [1 / 8, 1 / 8, 1 / 8]),
        ("sequence_mean", [1 / 3, 1 / 6, 1 / 15]),
        ("dr_grpo", [1 / 30, 1 / 30, 1 / 30]),
    ],
)
def test_aggregation_decides_how_much_the_tokens_of_a_row_count(aggregation, expected):
    assert shares(torch.tensor([1, 2, 5]), aggregation, 10).tolist() == pytest.approx(expected)
