"""Loading and saving a policy: what is read, what is refused, and what ends a rollout."""

import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    GenerationConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    PreTrainedTokenizerFast,
)

from rollalloc.models.policy import Policy


@pytest.fixture
def folder(policy, tmp_path):
    policy.save(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_policy_survives_saving_and_loading(policy, folder, tmp_path):
    loaded = Policy.load(folder, device="cpu")
    assert (loaded.eos_ids, loaded.pad_id, loaded.context, loaded.vocabulary) == ((1,), 0, 32, policy.vocabulary)
    assert not loaded.model.training
    for one, other in zip(policy.model.parameters(), loaded.model.parameters(), strict=True):
        assert other.dtype == torch.float32
        assert torch.equal(one, other)
    assert loaded.tokenizer("k3 a1 =")["input_ids"] == policy.tokenizer("k3 a1 =")["input_ids"]
    loaded.save(tmp_path / "again")
    again = Policy.load(str(tmp_path / "again"), device="cpu")
    assert torch.equal(again.model.lm_head.weight, policy.model.lm_head.weight)


def test_a_model_the_sampler_cannot_generate_with_is_refused_with_what_can(policy, folder):
    config = Lfm2Config(
        vocab_size=policy.vocabulary,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
    )
    Lfm2ForCausalLM(config).save_pretrained(folder)
    with pytest.raises(ValueError, match=r"Lfm2ForCausalLM.*LinearAttentionLayer.*train it through TRL"):
        Policy.load(folder, device="cpu")


@pytest.mark.parametrize("name", ["./none", "../none", "/none", "~/none", "a/b/none", Path("none")])
def test_a_path_without_a_folder_is_not_asked_of_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    with pytest.raises(FileNotFoundError, match="there is no such folder") as caught:
        Policy.load(name)
    assert "none" in str(caught.value)


def save_tokenizer(folder, **special):
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "k0": 2}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def save_without_eos(policy, folder):
    policy.model.config.eos_token_id = None
    policy.model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    shutil.rmtree(folder)
    policy.model.save_pretrained(folder)


def test_a_model_without_end_of_sequence_is_refused(policy, folder):
    save_without_eos(policy, folder)
    save_tokenizer(folder, pad_token="<pad>")
    with pytest.raises(ValueError, match="has no end-of-sequence token; set eos_token"):
        Policy.load(folder, device="cpu")


def test_the_tokenizers_end_of_sequence_suffices_and_pads_where_there_is_no_padding(policy, folder):
    save_without_eos(policy, folder)
    save_tokenizer(folder, eos_token="<eos>")
    loaded = Policy.load(folder, device="cpu")
    assert (loaded.eos_ids, loaded.pad_id) == ((1,), 1)


def test_pickled_weights_are_refused(policy, folder):
    """Unpickling runs whatever code the file holds."""
    (folder / "model.safetensors").unlink()
    torch.save(policy.model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        Policy.load(folder, device="cpu")


def test_code_that_comes_with_a_model_is_not_run(folder, tmp_path):
    """A configuration that names code of its own is read as the plain model it also is, or refused; never executed."""
    trace = tmp_path / "executed"
    (folder / "evil.py").write_text(
        f"import pathlib\npathlib.Path({str(trace)!r}).touch()\n"
        "from transformers import LlamaConfig as C, LlamaForCausalLM as M\n"
    )
    config = (folder / "config.json").read_text()
    named = '{"auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"},' + config.lstrip()[1:]
    (folder / "config.json").write_text(named)
    try:
        Policy.load(folder, device="cpu")
    except ValueError as error:
        assert "trust_remote_code" in str(error)  # noqa: PT017
    assert not trace.exists()


def test_a_model_that_hides_its_context_is_refused(policy, folder):
    bloom = BloomForCausalLM(BloomConfig(vocab_size=16, hidden_size=8, n_layer=1, n_head=2, eos_token_id=1))
    bloom.save_pretrained(folder)
    with pytest.raises(ValueError, match="max_position_embeddings"):
        Policy.load(folder, device="cpu")


def test_half_precision_weights_are_trained_in_full(policy, folder):
    policy.model.to(torch.bfloat16).save_pretrained(folder)
    assert {parameter.dtype for parameter in Policy.load(folder, device="cpu").model.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["gpt2", "owner/model"])
def test_a_name_that_is_no_folder_is_looked_up_on_the_hub(name, tmp_path, monkeypatch):
    asked = []

    def from_hub(name, **_):
        asked.append(name)
        raise OSError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_hub)
    with pytest.raises(OSError):
        Policy.load(name)
    assert asked == [name]


def test_special_tokens_stay_in_a_text_but_those_that_end_it(policy):
    """A reward function may look for `<answer>`, which `skip_special_tokens` would take out of its sight."""
    policy.tokenizer.add_special_tokens({"extra_special_tokens": ["a0"]})
    ids = policy.tokenizer.convert_tokens_to_ids(["a0", "a1", "<eos>", "<pad>"])
    assert policy.text(ids) == "a0 a1"


def test_a_text_with_tokens_that_the_model_does_not_know_is_refused(policy):
    policy.tokenizer.add_tokens(["new"])
    with pytest.raises(ValueError, match=r"the answer to x has token \d+ \('new'\).*model's own tokenizer"):
        policy.answer("a1 new", to="x")


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises((OSError, ValueError), match=r"config\.json"):
        Policy.load(tmp_path, device="cpu")


def test_an_answer_ends_with_the_tokenizers_end_of_sequence(policy, folder):
    """A chat model names several; the first of its own list need not be the one that ends its answers."""
    policy.model.generation_config.eos_token_id = [0, 1]
    policy.model.save_pretrained(folder)
    loaded = Policy.load(folder, device="cpu")
    assert loaded.eos_ids == (1, 0)
    assert loaded.answer("a1")[-1] == 1
