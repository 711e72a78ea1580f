"""The update's loss and gradient against those of TRL's own GRPOTrainer on the same tokens."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from arithmetic import assert_same_gradients
from rollalloc.core.events import Batch, Row
from rollalloc.generate.sampler import Generation
from rollalloc.models.likelihood import padded
from rollalloc.models.settings import Clip, Loss, Sampling
from rollalloc.tasks.tiny import PAD_ID
from rollalloc.train.config import Config
from rollalloc.train.update import Updater

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

ROWS, LONGEST, TEMPERATURE = 8, 7, 0.8
CLIP = Clip(low=0.2, high=0.28)


@pytest.fixture
def case(request, policy_of, prompts_of):
    """(policy, prompts, batch, generations, reference): rows of unequal length whose ratios spread about 1."""
    family = getattr(request, "param", "llama")
    rng = np.random.default_rng(0)
    policy, prompts = policy_of(family=family), prompts_of(ROWS).tokens
    # Of unequal length too, so that padding on the left is part of the agreement.
    prompts = tuple(tokens[: 2 + number % 3] for number, tokens in enumerate(prompts))
    generations = {}
    for rollout in range(ROWS):
        tokens = tuple(rng.integers(2, policy.vocabulary, rng.integers(1, LONGEST + 1)).tolist())
        generations[rollout] = Generation(rollout, tokens, np.zeros(len(tokens), np.float32), False)
    # Two rows of a group without variance; the ratios of the others reach both limits and the dual clip.
    advantages = [1.3, -0.7, 0.0, 0.0, -2.0, 0.4, -1.1, 0.9]
    rows = tuple(Row(rollout, rollout, rollout // 2, advantages[rollout], 1.0, 0) for rollout in range(ROWS))
    batch = Batch(rows, 0)
    for example, logprobs_T in judged(policy, prompts, batch, generations):
        old_T = logprobs_T.numpy() + rng.normal(0, 0.6, len(logprobs_T)).astype(np.float32)
        generations[example.row.rollout] = replace(generations[example.row.rollout], logprobs=old_T)
    reference, noise = policy_of(family=family), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in reference.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise), alpha=0.05)
    return policy, prompts, batch, generations, reference


def settings_of(loss):
    return Config(
        sampling=Sampling(LONGEST, temperature=TEMPERATURE),
        loss=loss,
        max_grad_norm=1e9,
        averaging=0,
        tokens_per_forward=30,
    )


def judged(policy, prompts, batch, generations):
    updater = Updater(policy, prompts, settings_of(Loss()))
    return updater._judged(policy.model, updater._examples(batch, generations))


def ours(case, loss):
    """Loss, and gradient by parameter; the passes are smaller than the batch."""
    policy, prompts, batch, generations, reference = case
    updater = Updater(policy, prompts, settings_of(loss))
    if loss.kl:
        updater.reference = reference.model
    before = {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}
    figures = updater.update(batch, generations)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            parameter.copy_(before[name])
    return figures, gradients(policy.model)


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def trls(case, folder, *, accumulated=1, corrected=False, **settings):
    """What TRL adds up over an accumulation window of that many forward passes."""
    policy, prompts, batch, generations, reference = case
    policy.save(folder / "model")  # with a beta TRL loads a reference of its own from there; ours is put in its place
    per_pass = ROWS // accumulated
    trainer = trl.GRPOTrainer(
        str(folder / "model"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=trl.GRPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=per_pass,
            gradient_accumulation_steps=accumulated,
            num_generations=2,
            max_completion_length=LONGEST,
            temperature=TEMPERATURE,
            epsilon=CLIP.low,
            epsilon_high=CLIP.high,
            bf16=False,
            use_bias_correction_kl=True,
            use_cpu=True,
            report_to=[],
            **settings,
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": "k0 ="}] * ROWS),
        processing_class=policy.tokenizer,
    )
    trainer.current_gradient_accumulation_steps = accumulated
    model = trainer.model.train()
    rows = batch.rows
    completions = [generations[row.rollout] for row in rows]
    prompt_ids, prompt_mask = padded([prompts[row.prompt] for row in rows], PAD_ID, side="left")
    completion_ids, completion_mask = padded([made.tokens for made in completions], PAD_ID, side="right")
    old_BT = torch.zeros(completion_ids.shape)
    reference_BT = torch.zeros(completion_ids.shape)
    for at, made in enumerate(completions):
        old_BT[at, : len(made.tokens)] = torch.from_numpy(made.logprobs)
    for example, logprobs_T in judged(reference, prompts, batch, generations):
        reference_BT[example.row.rollout, : len(logprobs_T)] = logprobs_T
    importance_BT = torch.ones(completion_ids.shape)
    if corrected:  # TRL's name for what the weights of our stale rows are: of a sampler that is not the trainer
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
        sampled_BT, old_BT = old_BT, torch.zeros(completion_ids.shape)
        for example, logprobs_T in judged(policy, prompts, batch, generations):
            old_BT[example.row.rollout, : len(logprobs_T)] = logprobs_T
        importance_BT = (old_BT - sampled_BT).exp().clamp(max=CLIP.stale)
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask.long(),
        "completion_ids": completion_ids,
        "completion_mask": completion_mask.long(),
        "advantages": torch.tensor([row.advantage for row in rows]),
        "old_per_token_logps": old_BT,
        "ref_per_token_logps": reference_BT,
        "importance_sampling_ratio": importance_BT,
    }
    total = 0.0
    for start in range(0, ROWS, per_pass):
        part = {name: tensor[start : start + per_pass] for name, tensor in inputs.items()}
        loss = trainer._compute_loss(model, part | {"num_items_in_batch": completion_mask.sum()})
        loss.backward()
        total += loss.item()
    return total, gradients(model)


def assert_equal(found, expected):
    figures, ours_by_name = found
    loss, trls_by_name = expected
    assert figures["loss"] == pytest.approx(loss, abs=1e-5)
    assert abs(loss) > 1e-2
    assert max(gradient.abs().max() for gradient in trls_by_name.values()) > 1e-2
    assert_same_gradients([trls_by_name], [ours_by_name], 1e-4)


@pytest.mark.parametrize(
    ("aggregation", "loss_type"),
    [("token_mean", "dapo"), ("token_mean", "bnpo"), ("sequence_mean", "grpo"), ("dr_grpo", "dr_grpo")],
)
@pytest.mark.parametrize(("dual", "kl"), [(None, 0.0), (1.5, 0.0), (None, 0.3), (1.5, 0.3)])
def test_loss_and_gradient_are_trls(case, tmp_path, aggregation, loss_type, dual, kl):
    loss = Loss(clip=replace(CLIP, dual=dual), aggregation=aggregation, kl=kl)
    assert_equal(ours(case, loss), trls(case, tmp_path, loss_type=loss_type, delta=dual, beta=kl))


@pytest.mark.parametrize("case", ["gemma3"], indirect=True)
def test_loss_and_gradient_of_a_model_with_sliding_windows_are_trls(case, tmp_path):
    loss = Loss(clip=CLIP, kl=0.3)
    assert_equal(ours(case, loss), trls(case, tmp_path, loss_type="dapo", beta=0.3))


@pytest.mark.parametrize(
    ("aggregation", "loss_type"), [("token_mean", "dapo"), ("sequence_mean", "grpo"), ("dr_grpo", "dr_grpo")]
)
def test_an_accumulated_mini_batch_is_trls_accumulation_window(case, tmp_path, aggregation, loss_type):
    loss = Loss(clip=CLIP, aggregation=aggregation, kl=0.3)
    assert_equal(ours(case, loss), trls(case, tmp_path, accumulated=4, loss_type=loss_type, beta=0.3))


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_stale_rows_are_corrected_as_trl_corrects_for_another_sampler(case, tmp_path, loss_type):
    policy, prompts, batch, generations, reference = case
    case = policy, prompts, replace(batch, version=batch.version + 1), generations, reference
    loss = Loss(clip=CLIP, aggregation="token_mean" if loss_type == "dapo" else "sequence_mean")
    assert_equal(ours(case, loss), trls(case, tmp_path, corrected=True, loss_type=loss_type))
