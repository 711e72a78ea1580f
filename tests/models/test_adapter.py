"""LoRA, sampling in half precision and gradient checkpointing: what is trained, what is saved, and what stays the same."""

import json
import shutil
import sys
import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from arithmetic import assert_same_gradients, gradients_of, tokens_by_key
from rollalloc import recipes
from rollalloc.core.events import Batch, Row
from rollalloc.generate import engine
from rollalloc.generate.outcomes import tell
from rollalloc.generate.sampler import Generation
from rollalloc.models.likelihood import cache_argument, completion_logprobs, recomputing
from rollalloc.models.policy import Adapter, Behaviour, Policy, digest_of, plain_weights
from rollalloc.models.settings import Lora, Loss, Sampling
from rollalloc.tasks.tiny import PAD_ID
from rollalloc.train import evaluation
from rollalloc.train.config import Config
from rollalloc.train.evaluation import HeldOut
from rollalloc.train.update import Updater
from tiny_policy import lines_of, resumed_is_unbroken

IDS = torch.tensor([[3, 4, 5, 6, 2], [7, 8, 2, 9, 10]])
HALF = ["bfloat16", "float16"]
SMALL = Lora(2)
RECIPE = recipes.dapo(4, 4, 8, surplus="carry")


def trained_adapters(policy, value=0.05):
    """The policy with adapters that are not zero."""
    adapted = policy.with_lora(Lora(2), seed=0)
    with torch.no_grad():
        for name, parameter in adapted.model.named_parameters():
            if ".lora_B." in name:
                parameter.add_(value * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
    return adapted


def test_a_cache_goes_by_the_name_that_the_model_below_the_adapters_has_for_it(policy_of):
    """PEFT's own `forward` names no cache, so transformers warned of `past_key_values` at each pass."""
    policy = policy_of()
    adapted = get_peft_model(policy.model, LoraConfig(r=2, target_modules="all-linear"))
    assert cache_argument(adapted, None) == cache_argument(policy.model, None)


def all_weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


# Adapters


def test_a_policy_with_adapters_begins_as_the_base_model_and_trains_them_alone(policy_of):
    base = policy_of().model(IDS).logits
    adapted = policy_of().with_lora(Lora(2), seed=0)
    assert torch.equal(adapted.model(IDS).logits, base)
    assert not adapted.model.training
    assert not any(module.training for module in adapted.model.modules())
    names = {name for name, parameter in adapted.model.named_parameters() if parameter.requires_grad}
    assert names
    assert all(".lora_" in name for name in names)
    assert {name.split(".")[-4] for name in names} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }


def test_the_head_gets_adapters_only_where_it_is_named_and_not_the_embeddings(policy_of):
    model = policy_of().with_lora(Lora(2, targets=("lm_head",)), seed=0).model
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        "lm_head.lora_A.default.weight",
        "lm_head.lora_B.default.weight",
    }
    tied = policy_of()
    tied.model.config.tie_word_embeddings = True
    tied.model.tie_weights()
    with pytest.raises(ValueError, match="lm_head is the head, and its weights are tied to the embeddings"):
        tied.with_lora(Lora(2, targets=("lm_head",)), seed=0)


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        (Lora(2, targets=("q_prj",)), "no linear layer 'q_prj'; it has down_proj, gate_proj, k_proj"),
        (Lora(2, targets=("proj",)), "no linear layer 'proj'"),
        (Lora(2, targets=("embed_tokens",)), "no linear layer 'embed_tokens'"),
        (Lora(17), r"rank 17 is larger than 16, the smaller side of model\.layers\.0\..*; give a smaller rank"),
    ],
)
def test_adapters_that_do_not_go_with_the_model_are_refused_and_nothing_is_changed(policy, lora, said):
    before = all_weights(policy.model)
    with pytest.raises(ValueError, match=said):
        policy.with_lora(lora, seed=0)
    assert all_weights(policy.model).keys() == before.keys()
    assert all(parameter.requires_grad for parameter in policy.model.parameters())
    assert policy.with_lora(Lora(16), seed=0).adapter is not None


def test_without_peft_it_is_said_what_to_install(policy, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"pip install 'rollalloc\[lora\]'"):
        policy.with_lora(Lora(2), seed=0)


def test_layers_of_gpt2_which_are_no_linear_layers_of_torch_are_adapted_and_merged_too():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2, n_positions=16)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapter = Adapter(model, Lora(2), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_()
    plain = adapter.plain_copy()
    merged = dict(plain_weights(model))
    assert merged.keys() == plain.state_dict().keys()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(merged[name], tensor)
    torch.testing.assert_close(plain(IDS).logits, model(IDS).logits)


# What is saved


def test_the_saved_model_is_plain_and_the_adapters_beside_it_are_pefts(policy_of, tmp_path):
    policy_of().save(tmp_path / "base")
    base = Policy.load(tmp_path / "base", device="cpu")
    digest = digest_of(base.model)
    adapted = trained_adapters(base)
    expected = adapted.model(IDS).logits
    adapted.save(tmp_path / "made")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)
    assert plain.state_dict().keys() == policy_of().model.state_dict().keys()
    torch.testing.assert_close(plain(IDS).logits, expected)
    assert not torch.allclose(expected, policy_of().model(IDS).logits, atol=1e-3)
    again = Policy.load(tmp_path / "made", device="cpu")
    assert all(parameter.requires_grad for parameter in again.model.parameters())
    by_peft = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "made" / "adapter")
    assert torch.equal(by_peft(IDS).logits, expected)
    said = json.loads((tmp_path / "made" / "adapter" / "base.json").read_text())
    assert said == {"model": str(tmp_path / "base"), "sha256": digest}
    assert not [path for path in (tmp_path / "made").rglob("*") if path.suffix in (".bin", ".pt", ".pkl")]


def test_a_folder_of_adapters_is_no_model(policy_of, tmp_path):
    policy_of().save(tmp_path / "base")
    Policy.load(tmp_path / "base", device="cpu").with_lora(SMALL, seed=0).save(tmp_path / "made")
    shutil.rmtree(tmp_path / "base")  # it is not looked for
    with pytest.raises(
        ValueError, match=r"adapter holds adapters of PEFT, not a model; give the folder of the merged model"
    ):
        Policy.load(tmp_path / "made" / "adapter", device="cpu")


# Runs


@pytest.fixture
def run_of(trainer_of, prompts_of, policy_of):
    """(folder, lora, **changes) → a trainer of 5 batches with a checkpoint after each second."""

    def made(folder, lora=SMALL, policy=None, recipe=RECIPE, **changes):
        policy = policy or policy_of()
        policy = policy if lora is None else policy.with_lora(lora, seed=3)
        settings = {"max_batches": 5, "checkpoint_every": 2, "heldout": HeldOut(prompts_of(6)), "eval_every": 30}
        return trainer_of(
            recipe,
            policy=policy,
            folder=folder,
            **settings | {"learning_rate": 0.02} | changes,
        )

    return made


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"loss": Loss(kl=0.3)}, marks=pytest.mark.e2e),
        pytest.param({"sampling_dtype": "bfloat16"}, marks=pytest.mark.e2e),
        pytest.param({"gradient_checkpointing": True}, marks=pytest.mark.e2e),
        {"sampling_dtype": "bfloat16", "lora": None, "optimizer_steps_per_batch": 2},
    ],
    ids=["lora", "lora and a reference", "lora and bf16", "lora and checkpointing", "bf16"],
)
def test_a_resumed_run_is_the_unbroken_one(run_of, tmp_path, changes):
    resumed_is_unbroken(run_of, tmp_path, 4, **changes)


def test_a_run_with_adapters_changes_them_alone_and_its_checkpoints_hold_them_alone(run_of, tmp_path, policy_of):
    trainer = run_of(tmp_path / "a")
    before = all_weights(trainer.policy.model)
    trainer.run()
    after = all_weights(trainer.policy.model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".lora_" in name}
    saved = (tmp_path / "a" / "checkpoints" / "5" / "weights.safetensors").stat().st_size
    assert saved < 4 * sum(p.numel() for p in trainer.policy.model.parameters() if p.requires_grad) + 3000
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "model", dtype=torch.float32)
    torch.testing.assert_close(plain(IDS).logits, trainer.policy.model(IDS).logits)


@pytest.mark.parametrize(
    ("lora", "said"),
    [(Lora(3), "shapes"), (Lora(2, targets=("q_proj",)), "parameters"), (None, "frozen")],
    ids=["another rank", "other targets", "none"],
)
def test_a_run_does_not_go_on_with_other_adapters(run_of, tmp_path, lora, said):
    run_of(tmp_path / "a").run()
    with pytest.raises(ValueError, match=said):
        run_of(tmp_path / "a", lora).resume()


def test_a_run_does_not_go_on_upon_another_base(run_of, policy_of, tmp_path):
    run_of(tmp_path / "a").run()
    with pytest.raises(ValueError, match="frozen"):
        run_of(tmp_path / "a", policy=policy_of(seed=2)).resume()


# Changes of log-probabilities, far from the limits log 0.8 and log 1.28 at which a token has moved; two of six have.
CHANGES = (0.0, 0.4, -0.1, -0.5, 0.1, 0.05)


def test_the_moved_share_under_adapters_is_that_of_the_merged_weights(policy_of, prompts_of):
    """The rows are made so that it is 1/3 by hand under the merged weights, which a plain model has."""
    adapted, plain, prompts = trained_adapters(policy_of(), 0.5), policy_of(), prompts_of(4).tokens
    plain.model.load_state_dict(dict(plain_weights(adapted.model)))
    tokens = [(3, 4, 5), (6, 7, 2)]
    with torch.no_grad():
        now_BT, _ = completion_logprobs(plain.model, prompts[:2], tokens, pad_id=PAD_ID, temperature=1.0)
    sampled_BT = now_BT.numpy() - np.array(CHANGES, np.float32).reshape(2, 3)
    generations = {at: Generation(at, tokens[at], sampled_BT[at], truncated=False) for at in range(2)}
    batch = Batch(tuple(Row(at, at, at, 1.0, 1.0, 4, replays=1) for at in range(2)), 5)
    config = Config(sampling=Sampling(3), learning_rate=1e-3, averaging=0)
    shares = [Updater(policy, prompts, config).moved(batch, generations) for policy in (adapted, plain, policy_of())]
    assert shares[:2] == pytest.approx([1 / 3, 1 / 3])
    assert shares[2] != shares[0], "the weights without the adapters would not show it"


@pytest.mark.parametrize(("most", "steps"), [(0.0, 1), (1.0, 2)], ids=["shut", "open, two steps"])
def test_a_run_with_adapters_behind_a_gate_resumes_as_if_unbroken(run_of, tmp_path, most, steps):
    """Rows are kept across the resume: at bound 0 they wait for the end of a pause, at bound 1 all are trained on."""
    recipe = recipes.reinforce(8, replay=4, replay_moved=most, replay_pause=1)
    unbroken, _ = resumed_is_unbroken(run_of, tmp_path, 4, recipe=recipe, optimizer_steps_per_batch=steps)
    batches = [line for line in lines_of(tmp_path / "unbroken") if line["kind"] == "batch"]
    assert [line["moved"] is None for line in batches] == [True, False, most == 0, False, most == 0]
    assert all(line["moved"] for line in batches[3:] if line["moved"] is not None)
    core = unbroken.allocator
    assert (core.replayed > 0, core.left_out > 0) == (most == 1, most == 0)


# Half precision


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("dtype", HALF)
def test_a_copy_in_half_precision_follows_the_weights(policy_of, dtype, adapters):
    policy = policy_of().with_lora(Lora(2), seed=0) if adapters else policy_of()
    behaviour = Behaviour(policy, dtype)
    for _ in range(2):
        copy = behaviour.policy()
        assert copy.model is not policy.model
        assert copy.adapter is None  # they are in its weights
        assert {parameter.dtype for parameter in copy.model.parameters()} == {getattr(torch, dtype)}
        assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.float32}
        assert {buffer.dtype for buffer in copy.model.buffers()} == {torch.float32}
        merged = dict(plain_weights(policy.model))
        assert copy.model.state_dict().keys() == merged.keys()
        for name, tensor in copy.model.state_dict().items():
            assert torch.equal(tensor, merged[name].to(tensor.dtype)), name
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.add_(0.1)


@pytest.mark.parametrize("dtype", HALF)
def test_rollouts_and_evaluations_are_sampled_by_the_copy(run_of, monkeypatch, dtype):
    used = []

    def noted(of, model, *rest, **more):
        used.append((of.__name__, model.dtype))
        return of(model, *rest, **more)

    for module, name in ((engine, "stream"), (evaluation, "generate")):
        monkeypatch.setattr(module, name, partial(noted, getattr(module, name)))
    trainer = run_of(None, max_batches=2, sampling_dtype=dtype)
    trainer.run()
    assert set(used) == {("stream", getattr(torch, dtype)), ("generate", getattr(torch, dtype))}
    assert {parameter.dtype for parameter in trainer.policy.model.parameters()} == {torch.float32}


def first_examples(trainer):
    while (actions := trainer.allocator.ask()).batch is None:
        trainer.engine.submit(actions.generate)
        tell(trainer.allocator, trainer.engine.poll())
    examples = trainer.updater._examples(actions.batch, trainer.engine.generations)
    trainer.updater._judge(examples)
    return examples


def test_fresh_rows_are_corrected_for_the_samplers_precision(run_of):
    """Proximal log-probabilities are the update's, behaviour ones the sampler's: the importance weight is their ratio."""
    trainer = run_of(None, sampling_dtype="bfloat16", averaging=0)
    examples = [each for each in first_examples(trainer) if each.row.advantage]
    assert examples
    for each in examples:
        with torch.no_grad():
            now, _ = trainer.updater._logprobs(trainer.policy.model, [each])
        torch.testing.assert_close(each.proximal_T, now[0])
        assert not torch.equal(each.proximal_T, each.behaviour_T)
    for plain in (
        run_of(None, averaging=0),
        run_of(None, sampling_dtype="bfloat16"),
    ):  # a mean's ratio is to the sampler
        assert all(each.proximal_T is each.behaviour_T for each in first_examples(plain))


def test_weights_that_overflow_half_precision_are_said(run_of, policy_of):
    policy = policy_of()
    with torch.no_grad():
        policy.model.lm_head.weight.fill_(1e6)
    with pytest.raises(FloatingPointError, match="overflow their dtype"):
        run_of(None, None, policy=policy, sampling_dtype="float16", heldout=None).run()


# Gradient checkpointing


def kept_bytes(model, *, again):
    """Bytes that a forward pass keeps for the backward pass, and the gradients."""
    kept = 0

    def pack(tensor):
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    model.zero_grad()
    prompts, completions = [(2, 3, 4)] * 8, [(5, 6, 7, 8, 1)] * 8
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if again:
            with recomputing(model):
                found, _ = completion_logprobs(model, prompts, completions, pad_id=PAD_ID, share=False)
        else:
            found, _ = completion_logprobs(model, prompts, completions, pad_id=PAD_ID, share=False)
    found.sum().backward()
    return kept, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("adapters", [False, True])
def test_layers_that_are_computed_again_keep_less_and_give_the_same_gradient(policy_of, adapters):
    policy = trained_adapters(policy_of()) if adapters else policy_of()
    all_of_it, expected = kept_bytes(policy.model, again=False)
    less, found = kept_bytes(policy.model, again=True)
    assert less < 0.7 * all_of_it
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name
    assert kept_bytes(policy.model, again=False)[0] == all_of_it  # afterwards all is as it was


def test_a_model_whose_layers_cannot_be_computed_again_is_refused(policy_of, monkeypatch, trainer_of):
    policy = policy_of()
    monkeypatch.setattr("rollalloc.models.likelihood.GradientCheckpointingLayer", torch.nn.Conv3d)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no layers that can be computed again; train it without"):
        trainer_of(recipes.grpo(4, 4), policy=policy, gradient_checkpointing=True)


def test_the_scale_is_alpha_over_rank_and_twice_the_rank_by_default(policy_of):
    for lora, scale in ((Lora(2), 2.0), (Lora(4, 2.0), 0.5)):
        model = policy_of().with_lora(lora, seed=0).model
        assert model.model.layers[0].mlp.up_proj.scaling == {"default": scale}
        assert model.model.layers[0].mlp.up_proj.lora_A["default"].weight.shape == (lora.rank, 16)


def test_targets_may_be_named_by_their_last_parts(policy_of):
    model = policy_of().with_lora(Lora(2, targets=("self_attn.q_proj", "up_proj")), seed=0).model
    adapted = {name.partition(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert adapted == {"model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"}


def test_a_second_set_of_adapters_is_refused(policy):
    with pytest.raises(ValueError, match="already has adapters"):
        policy.with_lora(Lora(2), seed=0).with_lora(Lora(2), seed=0)


def test_in_single_precision_the_policy_itself_samples(policy):
    assert Behaviour(policy, "float32").policy() is policy


def test_the_trainer_computes_again_what_all_prompts_begin_with_too(trainer_of, policy_of, prompts_of):
    """A header shared by all prompts is read through a cache, which a layer that is computed again must not see."""
    header = (2, 3, 4, 5) * 5
    prompts = prompts_of(8)
    prompts = replace(prompts, tokens=tuple(header[: 24 - len(each)] + each for each in prompts.tokens))

    def trained(**changes):
        trainer = trainer_of(recipes.grpo(4, 4), 64, prompts=prompts, sampling=Sampling(3), **changes)
        with tokens_by_key(), gradients_of(trainer.updater.model) as gradients:
            trainer.run()
        return gradients

    assert_same_gradients(trained(gradient_checkpointing=True), trained())
