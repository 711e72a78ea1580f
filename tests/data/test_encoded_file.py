"""Token ids that a run keeps: what is read back is what was encoded, and anything else is encoded again."""

from datetime import date

import numpy as np
import pytest
from safetensors.numpy import save_file

from rollalloc.data import prompts
from rollalloc.data.encoded_file import digest_of, encoder_digest, read_encoded, write_encoded
from rollalloc.data.prompts import encode_prompts, load_prompts, write_prompts
from rollalloc.tasks.tiny import word_tokenizer

CHATS = ["a b", [{"role": "user", "content": "b \U0001f600"}], [{"role": "user", "content": "b"}]]
IDS = [(3, 4), (2**31 - 1,), (0, 5, 5)]


@pytest.fixture
def file(tmp_path):
    write_encoded(tmp_path / "encoded.safetensors", "mine", CHATS, IDS)
    return tmp_path / "encoded.safetensors"


def test_ids_are_read_back_by_their_prompts(file):
    assert read_encoded(file, "mine") == dict(zip(map(digest_of, CHATS), IDS, strict=True))


def test_messages_with_values_that_json_has_not_are_told_apart(tmp_path):
    """Columns of a parquet file may be dates, and a chat template may show them."""
    chats = [[{"role": "user", "content": "a", "day": date(2026, 1, day)}] for day in (1, 2)]
    write_encoded(tmp_path / "file", "mine", chats, [(3,), (4,)])
    assert read_encoded(tmp_path / "file", "mine") == {digest_of(chats[0]): (3,), digest_of(chats[1]): (4,)}
    assert len({*map(digest_of, chats)}) == 2


@pytest.mark.parametrize("encoder", ["another", None])
def test_ids_of_another_encoder_are_not_used(file, encoder, caplog):
    assert read_encoded(file, encoder) == {}
    assert not caplog.records


def test_a_file_that_is_not_there_holds_nothing(tmp_path, caplog):
    assert read_encoded(tmp_path / "none", "mine") == {}
    assert not caplog.records


@pytest.mark.parametrize("at", [-1, -20, 4, 40])
def test_a_file_with_one_changed_byte_is_not_used_and_said_to_be_damaged(file, at, caplog):
    """The last bytes are of the ids, the first of the header."""
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    assert read_encoded(file, "mine") == {}
    assert "is damaged and is not used" in caplog.text


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\xff" * 100])
def test_a_file_of_another_program_is_not_used(file, content, caplog):
    file.write_bytes(content)
    assert read_encoded(file, "mine") == {}
    save_file({"ids": np.zeros(3, np.int32)}, file)
    assert read_encoded(file, "mine") == {}
    assert caplog.text.count("is damaged and is not used") == 2


def chatty(template="{{ messages[0].content }}"):
    tokenizer = word_tokenizer(["a", "b", "c"])
    tokenizer.chat_template = template
    return tokenizer


def test_an_encoder_is_known_by_its_words_its_template_and_the_arguments():
    digests = [
        encoder_digest(chatty(), {}),
        encoder_digest(word_tokenizer(["a", "b", "d"]), {}),
        encoder_digest(chatty("{{ messages[0].role }}"), {}),
        encoder_digest(chatty(), {"enable_thinking": False}),
    ]
    assert None not in digests
    assert len(set(digests)) == 4
    used = chatty()
    used(["a b", "a"], padding=True, truncation=True, max_length=1)
    assert encoder_digest(used, {}) == digests[0]


def test_a_template_that_reads_the_clock_is_rendered_every_time():
    assert encoder_digest(chatty("{{ strftime_now('%d') }} {{ messages[0].content }}"), {}) is None


def test_only_prompts_that_a_file_lacks_are_encoded(tmp_path, monkeypatch):
    """Of three prompts, in another order than before, one is new; an error names it by its own key."""
    rows = [
        {"data_source": "s", "prompt": text, "reward_model": {"ground_truth": "1"}, "extra_info": {"index": text}}
        for text in ("a", "b c", "c")
    ]
    write_prompts(tmp_path / "p.jsonl", rows)
    loaded, tokenizer = load_prompts(tmp_path / "p.jsonl"), chatty()
    whole = encode_prompts(loaded, tokenizer, context=None).tokens
    kept = tmp_path / "encoded.safetensors"
    write_encoded(kept, encoder_digest(tokenizer, {}), [loaded.prompts[2], loaded.prompts[0]], [whole[2], whole[0]])
    asked = []
    plain = prompts.encode_each
    monkeypatch.setattr(
        prompts,
        "encode_each",
        lambda made, texts, name_of, **more: asked.append((texts, name_of(0))) or plain(made, texts, name_of, **more),
    )
    assert encode_prompts(loaded, tokenizer, context=None, kept=kept).tokens == whole
    assert asked == [(["b c"], "prompt 's/b c'")]
