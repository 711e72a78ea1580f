"""`rollalloc features`: from a user's model and prompts to a file; nonsense is refused before the model is loaded."""

import shutil

import pytest

from rollalloc.data.feature_file import read_features
from rollalloc.data.prompts import encode_prompts, load_prompts, write_prompts
from rollalloc.models.featurizer import features_of, weights_digest
from rollalloc.models.policy import Policy

OWN = ("--model", "model", "--prompts", "prompts.parquet", "--device", "cpu")


def test_the_file_holds_the_features_of_ones_own_prompts(call, own, tmp_path):
    out = tmp_path / "new" / "f.safetensors"
    code, output = call("features", *OWN, "--out", out)
    assert code == 0, output
    policy, prompts = Policy.load(own / "model", device="cpu"), load_prompts(own / "prompts.parquet")
    tokens = encode_prompts(prompts, policy.tokenizer, context=policy.context).tokens
    made = features_of(policy.model, tokens, pad_id=policy.pad_id)
    read = read_features(out, prompts.keys, weights=weights_digest(policy.model))
    assert list(read.blocks) == ["hidden", "tokens", "length"]
    for name, block_ND in made.blocks.items():
        assert read.blocks[name] == pytest.approx(block_ND, abs=1e-4)
    total = sum(map(len, tokens))
    assert (read.cost.prompts, read.cost.tokens) == (24, total)
    columns = {name: block_ND.shape[1] for name, block_ND in made.blocks.items()}
    blocks = ", ".join(f"{name} ({count})" for name, count in columns.items())
    assert f"features of 24 prompts: {blocks}; {total} tokens forwarded" in output
    assert f"they are in {out}" in output


def test_chats_go_through_the_models_template(call, own, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(own / "model", model)
    template = (
        "{% for message in messages %}{{ message['content'] }} {% endfor %}{% if add_generation_prompt %}= ={% endif %}"
    )
    (model / "chat_template.jinja").write_text(template)
    chats = [[{"role": "system", "content": "s0"}, {"role": "user", "content": f"s{n} s1"}] for n in range(4)]
    rows = [{"data_source": "chats", "prompt": chat, "reward_model": {"ground_truth": "s1"}} for chat in chats]
    write_prompts(tmp_path / "chats.parquet", rows)
    out = tmp_path / "f.safetensors"
    arguments = ("features", "--prompts", tmp_path / "chats.parquet", "--device", "cpu", "--out", out)
    code, output = call(*arguments, "--model", model)
    assert code == 0, output
    assert "20 tokens forwarded" in output  # s0, sn, s1 and two that the template adds
    code, output = call(*arguments, "--model", "model", "--overwrite")
    assert code == 2
    assert "messages (system, user) and the tokenizer has no chat template" in output
    assert read_features(out, load_prompts(tmp_path / "chats.parquet").keys).cost.tokens == 20


def test_prompts_that_do_not_fit_are_refused_or_left_out_and_counted(call, own, tmp_path):
    out = tmp_path / "f.safetensors"
    arguments = ("features", "--model", "model", "--prompts", "long.jsonl", "--out", out)
    code, output = call(*arguments)
    assert code == 2
    assert "1 of 6 prompts have more than 64 tokens (context 64), for example 'mine/" in output
    assert "; the longest has 71" in output
    assert "or use a model with a longer context" in output
    assert not out.exists()
    code, output = call(*arguments, "--drop-overlong")
    assert code == 0, output
    assert "1 prompts that do not fit the model are left out" in output
    with pytest.raises(ValueError, match=r"lacks the features of 1 prompts \(of 6\)"):
        read_features(out, load_prompts(own / "long.jsonl").keys)


def test_features_that_are_there_are_kept_unless_told(call, tmp_path):
    out = tmp_path / "f.safetensors"
    assert call("features", *OWN, "--out", out)[0] == 0
    before = out.read_bytes()
    write_prompts(
        tmp_path / "one.jsonl", [{"data_source": "m", "prompt": "s1 =", "reward_model": {"ground_truth": "s1"}}]
    )
    other = ("features", *OWN, "--prompts", tmp_path / "one.jsonl", "--out", out)
    code, output = call(*other)
    assert code == 2
    assert "holds features already; replace them (--overwrite)" in output
    assert out.read_bytes() == before
    assert call(*other, "--overwrite")[0] == 0
    assert out.read_bytes() != before
    assert {file.name for file in tmp_path.iterdir()} == {"f.safetensors", "one.jsonl", ".rollalloc"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*OWN[2:],), "Missing option '--model'"),
        (("--model", "./none", *OWN[2:]), "there is no such folder; give a model's folder"),
        ((*OWN[:3], "none.parquet"), "none.parquet: no such file"),
        ((*OWN[:4], "--device", ""), "device '' cannot be used here"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(call, tmp_path, monkeypatch, arguments, message):
    if "./none" not in arguments:
        monkeypatch.setattr(Policy, "load", staticmethod(lambda *_, **__: pytest.fail("the model was loaded")))
    code, output = call("features", *arguments, "--out", tmp_path / "f.safetensors")
    assert code == 2, output
    assert message in output
    assert "Traceback" not in output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("features.npz", "ends in .safetensors"),
        (
            "model/model.safetensors",
            "rollalloc; rollalloc does not mix its files with others: move it away",
        ),
        ("my_reward.py/f.safetensors", "my_reward.py is not a folder"),
    ],
)
@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)])
def test_no_file_of_the_users_is_touched(call, own, monkeypatch, out, message, overwrite):
    monkeypatch.setattr(Policy, "load", staticmethod(lambda *_, **__: pytest.fail("the model was loaded")))
    before = {file: file.read_bytes() for file in own.rglob("*") if file.is_file()}
    code, output = call("features", *OWN, "--out", out, *overwrite)
    assert code == 2
    assert message in output
    assert {file: file.read_bytes() for file in own.rglob("*") if file.is_file()} == before
