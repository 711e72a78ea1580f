"""The update of a batch: forward passes, the reference, precision. Its loss and gradient are in test_trl_agreement."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollalloc.core.events import Batch, Row
from rollalloc.generate.sampler import Generation
from rollalloc.models.settings import Loss, Sampling, has_moved
from rollalloc.train.config import Config
from rollalloc.train.update import Example, Updater, passes
from tiny_policy import flat

SETTINGS = Config(sampling=Sampling(8), max_grad_norm=1e9, averaging=0, learning_rate=1e-4)


@pytest.fixture
def updater_of(policy_of, prompts_of):
    """(**changes of the settings) → an updater of a fresh policy with 30 prompts."""
    return lambda **changes: Updater(policy_of(), prompts_of(30).tokens, replace(SETTINGS, **changes))


def batch_of(lengths, advantages, *, age=0, noise=0.3, seed=0):
    """A row of each length, with log-probabilities near those of a uniform policy; (batch, generations)."""
    rng = np.random.default_rng(seed)
    generations = {
        rollout: Generation(
            rollout,
            tuple(rng.integers(2, 13, length).tolist()),
            (-2.4 + noise * rng.standard_normal(length)).astype(np.float32),
            False,
        )
        for rollout, length in enumerate(lengths)
    }
    rows = tuple(
        Row(rollout, rollout, rollout // 2, advantage, 1.0 + rollout % 3, 5 - age)
        for rollout, advantage in enumerate(advantages)
    )
    return Batch(rows, 5), generations


def gradient(updater):
    parameters = updater.policy.model.parameters()
    return torch.cat([torch.zeros(each.numel()) if each.grad is None else each.grad.flatten() for each in parameters])


# Forward passes


def example(prompt, completion):
    nothing_T = torch.zeros(completion)
    return Example(Row(0, 0, 0, 1.0, 1.0, 0), (2,) * prompt, (3,) * completion, nothing_T, nothing_T)


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), max_size=40), st.integers(1, 400))
def test_every_row_is_in_one_pass_and_no_pass_is_larger_than_it_may_be(lengths, tokens_per_forward):
    examples = [example(*each) for each in lengths]
    parts = list(passes(examples, tokens_per_forward))
    assert sorted(map(id, (each for part in parts for each in part))) == sorted(map(id, examples))
    for part in parts:
        padded = len(part) * (max(len(each.prompt) for each in part) + max(len(each.tokens) for each in part))
        assert padded <= tokens_per_forward or len(part) == 1
    if sum(map(sum, lengths)) <= tokens_per_forward and len(set(lengths)) == 1:
        assert len(parts) == 1


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "dr_grpo"])
@pytest.mark.parametrize("kl", [0.0, 0.2])
def test_the_passes_do_not_change_the_gradient(updater_of, aggregation, kl):
    loss = Loss(aggregation=aggregation, kl=kl)

    def updated(lengths, advantages, tokens_per_forward):
        updater = updater_of(loss=loss, tokens_per_forward=tokens_per_forward)
        if kl:
            with torch.no_grad():  # the policy has moved
                updater.policy.model.lm_head.weight.mul_(0.9)
        return updater.update(*batch_of(lengths, advantages)), gradient(updater)

    @settings(max_examples=15, deadline=None)
    @given(
        st.lists(st.tuples(st.integers(1, 8), st.sampled_from([0.0, -1.5, 0.5, 1.0])), min_size=1, max_size=10),
        st.integers(1, 100),
    )
    def law(rows, tokens_per_forward):
        lengths, advantages = zip(*rows, strict=True)
        whole, expected = updated(lengths, advantages, 10_000)
        parted, found = updated(lengths, advantages, tokens_per_forward)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * max(1.0, float(expected.abs().max())))
        assert parted == pytest.approx(whole, abs=1e-4, rel=1e-4)

    law()


# The reference


def test_the_reference_is_the_initial_policy_and_stays(updater_of, policy_of):
    updater = updater_of(loss=Loss(kl=0.1), learning_rate=0.01)
    digest = updater.reference_digest()
    figures = [updater.update(*batch_of([3, 4, 5, 2], [1.0, -1.0, 0.5, 0.0])) for _ in range(3)]
    assert [step["kl"] for step in figures] == sorted(step["kl"] for step in figures)
    assert figures[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert figures[-1]["kl"] > 1e-4
    assert torch.equal(flat(updater.reference), flat(policy_of().model))
    assert not torch.equal(flat(updater.policy.model), flat(policy_of().model))
    assert updater.reference_digest() == digest
    assert not any(parameter.requires_grad for parameter in updater.reference.parameters())


def test_rows_without_advantage_pay_the_divergence_and_nothing_else(updater_of):
    silent = batch_of([3, 4, 5], [0.0, 0.0, 0.0])
    for kl, pulls in ((0.0, False), (0.5, True)):
        updater = updater_of(loss=Loss(kl=kl))
        with torch.no_grad():
            updater.policy.model.lm_head.weight.mul_(0.5)
        figures = updater.update(*silent)
        assert figures["clip_fraction"] == 0
        assert (figures["grad_norm"] > 1e-3) == pulls


# Precision


def test_bf16_computes_in_half_and_keeps_everything_else_in_full(updater_of):
    """On a CPU, which has it too. The rows are stale, so that either takes their ratios from its own forward pass."""
    batch = batch_of([3, 4, 5, 6], [1.0, -1.0, 0.5, 0.3], age=1)
    seen, found = set(), {}
    for precision in ("fp32", "bf16"):
        updater = updater_of(precision=precision, loss=Loss(kl=0.1))
        layer = updater.policy.model.model.layers[0].mlp.up_proj
        layer.register_forward_hook(lambda _, inputs, output, name=precision: seen.add((name, output.dtype)))
        figures = updater.update(*batch)
        found[precision] = gradient(updater)
        assert all(each.dtype == each.grad.dtype == torch.float32 for each in updater.policy.model.parameters())
        assert {tensor.dtype for state in updater.optimizer.state.values() for tensor in state.values()} == {
            torch.float32
        }
        assert np.isfinite(list(figures.values())).all()
    assert seen == {("fp32", torch.float32), ("bf16", torch.bfloat16)}
    assert not torch.equal(found["fp32"], found["bf16"])
    assert torch.nn.functional.cosine_similarity(found["fp32"], found["bf16"], dim=0) > 0.98


class AllBefore(Updater):
    """Judges every old row in a pass of its own, before the first step."""

    def _examples(self, *given, **more):
        examples = super()._examples(*given, **more)
        self._judge(examples)
        return examples


@pytest.mark.parametrize(("steps", "saved"), [(1, 4), (2, 3)])
@pytest.mark.parametrize(("measured", "precision"), [(False, "fp32"), (True, "fp32"), (True, "bf16")])
@pytest.mark.parametrize("together", [1, 8192], ids=["alone", "padded"])
def test_old_rows_of_the_first_step_need_no_pass_of_their_own(
    policy_of, prompts_of, steps, saved, measured, precision, together
):
    """Weights, figures and movement are as if each had one, and it is saved for those that have an advantage."""
    found, passed = [], []
    for kind in (Updater, AllBefore):
        given = replace(SETTINGS, optimizer_steps_per_batch=steps, precision=precision, tokens_per_forward=together)
        updater = kind(policy_of(), prompts_of(30).tokens, given)
        rows = []
        updater.policy.model.lm_head.register_forward_hook(
            lambda head, inputs, output, rows=rows: rows.append(len(output))
        )
        batch, generations = batch_of([3, 4, 5, 6, 7, 8], [1.0, -1.0, 0.0, 0.5, -0.5, 0.0], age=2)
        figures = updater.update(batch, generations, measure_kl=measured)
        found.append((figures, flat(updater.policy.model)))
        passed.append(sum(rows))
    assert passed[1] - passed[0] == saved
    (figures, weights_P), (expected, expected_P) = found
    assert figures == pytest.approx(expected, rel=0.02 if precision == "bf16" else 1e-4, abs=1e-6)
    torch.testing.assert_close(weights_P, expected_P, rtol=0, atol=2e-4 if precision == "bf16" else 2e-5)


# How far replayed rows have moved


def test_the_moved_share_is_that_of_the_replayed_rows_tokens_under_what_is_trained(updater_of):
    """By hand: tokens of the replayed rows whose ratio is beyond 1.28 or below 0.8; the rows that are new do not count."""
    updater = updater_of(averaging=64)
    batch, generations = batch_of([3, 5, 2, 8], [1.0, 1.0, 1.0, 1.0], age=1)
    batch = Batch(tuple(row._replace(replays=int(row.rollout > 1)) for row in batch.rows), batch.version)
    with torch.no_grad():  # what is trained is not what samples
        for parameter in updater.model.parameters():
            parameter.mul_(1.1)
    ratios = []
    for rollout in (2, 3):
        prompt, tokens = updater.prompts[rollout], generations[rollout].tokens
        logits_TV = updater.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        now_T = logits_TV.log_softmax(dim=-1)[range(len(tokens)), tokens].detach().numpy()
        ratios += np.exp(now_T - generations[rollout].logprobs).tolist()
    moved = [ratio > 1.28 or ratio < 0.8 for ratio in ratios]
    assert 0 < sum(moved) < 10
    assert updater.moved(batch, generations) == pytest.approx(sum(moved) / 10)


def test_measuring_what_has_moved_calls_nothing_that_an_earlier_update_was_given(updater_of):
    updater, called = updater_of(), []
    batch, generations = batch_of([3, 5], [1.0, 1.0], age=1)
    updater.update(batch, generations, between_passes=lambda: called.append(None))
    passes_of_update = len(called)
    updater.moved(Batch(tuple(row._replace(replays=1) for row in batch.rows), batch.version), generations)
    assert len(called) == passes_of_update > 0


def test_measuring_what_has_moved_needs_no_pass_of_the_reference(updater_of):
    updater = updater_of(loss=Loss(kl=0.1))
    batch, generations = batch_of([3, 5], [1.0, 1.0], age=1)
    batch = Batch(tuple(row._replace(replays=1) for row in batch.rows), batch.version)
    passed = []
    updater.reference.register_forward_hook(lambda *given: passed.append(given))
    updater.moved(batch, generations)
    assert not passed
    updater.update(batch, generations)
    assert passed


@pytest.mark.parametrize(
    ("ratio", "moved"), [(0.79, True), (0.81, False), (1.0, False), (1.27, False), (1.29, True), (float("nan"), False)]
)
def test_a_token_has_moved_where_the_loss_would_clip_its_ratio(ratio, moved):
    assert has_moved(np.log(np.float32(ratio))) == moved
    assert has_moved(torch.tensor(ratio).log()) == moved


# Averaged weights


@pytest.mark.parametrize("steps", [1, 2])
def test_the_policy_is_the_mean_over_the_steps_and_the_next_gradient_is_of_what_is_trained(updater_of, steps):
    batch, generations = batch_of([3, 5, 4, 6], [1.0, -1.0, 0.5, -0.5])
    how = {"learning_rate": 0.01, "optimizer_steps_per_batch": steps}
    averaged, plain = updater_of(**how, averaging=8), updater_of(**how)
    mean, step = flat(averaged.policy.model), 0
    plain.optimizer.register_step_post_hook(lambda *_: seen.append(flat(plain.model)))
    for _ in range(6):  # a plain updater takes the same steps, since the rows' log-probabilities are as given
        seen: list[torch.Tensor] = []
        averaged.update(batch, generations)
        plain.update(batch, generations)
        for each in seen:
            step += 1
            since = step - 4 * steps  # by then two windows of 8 rows are trained
            kept = since / (since + 9) if since > 0 else 0
            mean = kept * mean + (1 - kept) * each
        assert len(seen) == steps
        torch.testing.assert_close(flat(averaged.model), flat(plain.model))
        torch.testing.assert_close(flat(averaged.policy.model), mean)
    assert not torch.allclose(flat(averaged.model), mean)


@pytest.mark.parametrize(("age", "precision"), [(0, "fp32"), (2, "fp32"), (0, "bf16"), (2, "bf16")])
def test_how_far_the_mean_moved_is_measured_between_two_means(updater_of, age, precision):
    """Of stale rows and in half precision, too, where no sampler's log-probabilities are the mean's."""
    updater = updater_of(averaging=16, learning_rate=3e-3, precision=precision)
    for seed in range(20):
        updater.update(*batch_of([3, 5, 4, 6], [1.0, -1.0, 0.5, -0.5], seed=seed))
    batch, generations = batch_of([3, 5, 4, 6], [1.0, -1.0, 0.5, -0.5], age=age)
    examples = updater._examples(batch, generations)
    before = [now_T for _, now_T in updater._judged(updater.policy.model, examples)]
    figures = updater.update(batch, generations, measure_kl=True)
    after = [now_T for _, now_T in updater._judged(updater.policy.model, examples)]
    ways = torch.cat([(a - b).exp() - (a - b) - 1 for b, a in zip(before, after, strict=True)])
    assert figures["approx_kl"] == pytest.approx(float(ways.mean()), rel=0.05)
    assert figures["approx_kl"] > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_clip_bounds_how_far_what_is_trained_goes_from_the_mean_in_any_precision(updater_of, precision):
    updater = updater_of(averaging=640, precision=precision)
    batch, generations = batch_of([3, 5, 4, 6], [1.0, -1.0, 0.5, -0.5])
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in updater.model.parameters():  # the mean is left behind
            parameter.add_(0.1 * torch.randn_like(parameter))
        # as if the mean had sampled them
        sampled = {
            e.row.rollout: l_T
            for e, l_T in updater._judged(updater.policy.model, updater._examples(batch, generations))
        }
    fresh = {rollout: replace(made, logprobs=sampled[rollout].numpy()) for rollout, made in generations.items()}
    assert updater.update(batch, fresh)["clip_fraction"] > 0.1
