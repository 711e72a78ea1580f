"""Loading, naming, writing and tokenizing prompts."""

# pyright: reportArgumentType=false

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollalloc.data._files import read_rows
from rollalloc.data.prompts import PromptSet, encode_prompts, load_prompts, load_unless_loaded, write_prompts


def row(content="2+2=", ground_truth="4", source="sums", **extra_info):
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": "train", **extra_info},
    }


@pytest.fixture
def save(tmp_path):
    """Writes rows, whatever they are, as JSON lines."""

    def save_rows(*rows, name="train.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(entry) + "\n" for entry in rows))
        return path

    return save_rows


@pytest.mark.parametrize(
    ("truths", "says"),
    [
        (["4", "proof", "N/A"], "2 of 3 ground truths are placeholders, for example 'proof'"),
        (["N/A"] * 3, None),
        (["4"], None),
    ],
)
def test_placeholders_among_ground_truths_are_counted(save, caplog, truths, says):
    load_prompts(save(*(row(content=str(number), ground_truth=truth) for number, truth in enumerate(truths))))
    assert (says in caplog.text) if says else "placeholders" not in caplog.text


# Keys


def test_the_key_is_source_and_index_where_unique(save):
    path = save(row("a", index=0), row("b", index=1), row("c", source="products", index=0), row("d", index="uuid-7"))
    assert load_prompts(path).keys == ("sums/0", "sums/1", "products/0", "sums/uuid-7")


def test_an_index_that_restarts_in_a_second_file_names_nobody(save):
    first = save(row("a", index=0), row("b", index=1), name="first.jsonl")
    second = save(row("c", index=0), row("d", index=2), name="second.jsonl")
    keys = load_prompts(first, second).keys
    assert keys[1::2] == ("sums/1", "sums/2")
    assert keys[0].startswith("sums/#")
    assert keys[2].startswith("sums/#")
    assert load_prompts(second, first).keys == (keys[2], keys[3], keys[0], keys[1])


def test_duplicates_are_dropped_before_the_index_is_judged(save):
    prompts = load_prompts(save(row("a", index=0), row("b", index=1), row("a", index=0), row("a", index=5)))
    assert prompts.keys == ("sums/0", "sums/1")
    assert prompts.dropped == {"duplicate": 2}


def test_one_prompt_with_two_ground_truths_is_refused(save):
    first, second = save(row("a", "4"), name="first.jsonl"), save(row("b"), row("a", "5"), name="second.jsonl")
    with pytest.raises(ValueError, match=rf"{first}:1 and {second}:2 .* different ground truths, '4' and '5'"):
        load_prompts(first, second)


# The table


def test_the_table_has_no_priors_if_no_prompt_has_one(save):
    table = load_prompts(save(row("a", source="z"), row("b", source="a"), row("c", source="z"))).table()
    assert table.prior_N is None
    assert len(table) == 3


def test_the_table_has_priors_where_any_prompt_has_one(save):
    table = load_prompts(save(row("a", prior=0.25), row("b"), row("c", prior=None), row("d", prior=1))).table()
    assert np.array_equal(table.prior_N, [0.25, np.nan, np.nan, 1.0], equal_nan=True)


# Files


@pytest.mark.parametrize("name", ["data.parquet", "new/folder/data.jsonl", "data.json"])
def test_what_is_written_is_read(tmp_path, name):
    rows = [row("a", index=0), row("b", index=1, prior=0.5), row("c", ground_truth="7")]
    del rows[0]["ability"], rows[2]["extra_info"]
    write_prompts(tmp_path / name, rows)
    prompts = load_prompts(tmp_path / name)
    assert prompts.keys[:2] == ("sums/0", "sums/1")
    assert prompts.prompts[0] == ({"role": "user", "content": "a"},)
    assert prompts.ground_truths == ("4", "4", "7")
    assert prompts.extra_infos == ({"split": "train", "index": 0}, {"split": "train", "index": 1, "prior": 0.5}, {})


text = st.text(max_size=5)
random_rows = st.lists(
    st.builds(row, text, source=st.sampled_from("ab"), index=st.integers(0, 3) | st.none()), min_size=1, max_size=8
)


def test_kept_prompts_are_taken_once(tmp_path):
    file = tmp_path / "data.jsonl"
    write_prompts(file, [row("2+2=", index=0)])
    first = load_unless_loaded(file, keep=True)
    assert first.keys == load_prompts(file).keys
    assert load_unless_loaded(str(file), keep=True) is first
    assert load_unless_loaded(file) is first
    assert load_unless_loaded(file) is not first  # a reward may have written into what the first run trained on


def test_a_file_that_changed_after_its_prompts_were_kept_is_read_again(tmp_path):
    file = tmp_path / "data.jsonl"
    write_prompts(file, [row("2+2=", index=0)])
    load_unless_loaded(file, keep=True)
    write_prompts(file, [row("2+2=", index=0), row("2+3=", "5", index=1)])
    assert load_unless_loaded(file).prompts == load_prompts(file).prompts


def test_kept_prompts_are_missed_when_their_file_is_gone(tmp_path):
    file = tmp_path / "data.jsonl"
    write_prompts(file, [row("2+2=", index=0)])
    load_unless_loaded(file, keep=True)
    file.unlink()
    with pytest.raises(FileNotFoundError):
        load_unless_loaded(file)


@settings(max_examples=15)
@given(random_rows)
def test_keys_are_unique_and_the_same_in_both_formats(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("formats")
    write_prompts(folder / "data.parquet", rows)
    write_prompts(folder / "data.jsonl", rows)
    prompts = load_prompts(folder / "data.parquet")
    assert prompts == load_prompts(folder / "data.jsonl")
    assert len(set(prompts.keys)) == len(prompts)
    assert len(prompts) + prompts.dropped.get("duplicate", 0) == len(rows)


@given(random_rows, st.randoms())
def test_keys_outlive_a_re_ordering(tmp_path_factory, rows, random):
    # Duplicates may differ in their index, and the first one's counts: without them the order means nothing.
    rows = list({(entry["data_source"], entry["prompt"][0]["content"]): entry for entry in rows}.values())
    path = tmp_path_factory.mktemp("order") / "data.jsonl"
    write_prompts(path, rows)
    before = load_prompts(path)
    write_prompts(path, random.sample(rows, len(rows)))
    after = load_prompts(path)
    identify = zip(before.sources, map(str, before.prompts), before.keys, strict=True)
    assert set(identify) == set(zip(after.sources, map(str, after.prompts), after.keys, strict=True))


# Bad input


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.parquet: no such file; prompts are read from [^;]*$"):
        load_prompts(tmp_path / "absent.parquet")
    with pytest.raises(
        FileNotFoundError, match=r"openai.gsm8k: no such file; .*; if it is a name on the Hugging Face hub, `"
    ):
        load_prompts(Path("openai/gsm8k"))


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        ("dataset_info.json", r"saved is a folder of .*load_from_disk\('.*saved'\)\.to_parquet\('saved\.parquet'\)`$"),
        ("dataset_dict.json", r"load_from_disk\('.*saved'\)\[\"train\"\]\.to_parquet"),
        ("data.arrow", "saved is a folder$"),
    ],
)
def test_a_folder_is_named_and_how_to_write_a_saved_data_set_as_a_file(tmp_path, beside, said):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / beside).touch()
    with pytest.raises(ValueError, match=said):
        load_prompts(tmp_path / "saved")


def test_an_unknown_suffix_is_refused(save, tmp_path):
    message = r"ends in \.parquet, \.jsonl, \.json, \.csv, \.tsv, got '\.txt'"
    with pytest.raises(ValueError, match=message):
        load_prompts(save(row(), name="data.txt"))
    with pytest.raises(ValueError, match=message):
        write_prompts(tmp_path / "data.txt", [row()])
    with pytest.raises(ValueError, match=r"write a \.parquet or \.jsonl file"):
        write_prompts(tmp_path / "data.csv", [row()])


# Other forms of text


def read(path, content):
    path.write_bytes(content)
    return [row for _, row in read_rows(path)]


def test_a_json_file_may_hold_one_array(tmp_path):
    rows = [row("a"), row("b")]
    for indent in (None, 2):
        path = tmp_path / "data.json"
        path.write_text("\n " + json.dumps(rows, indent=indent))
        assert [place for place, _ in read_rows(path)] == [f"{path}:1", f"{path}:2"]
        assert len(load_prompts(path)) == 2


@pytest.mark.parametrize("name", ["data.csv", "data.tsv"])
def test_a_table_of_text_is_read_under_its_column_names(tmp_path, name):
    separator = {"data.csv": ",", "data.tsv": "\t"}[name]
    lines = [["q", "a"], ['"1+1=\n?"', "007"], ["é", ""], ["", "x"]]
    content = "\ufeff" + "\r\n".join(separator.join(line) for line in lines) + "\r\n\r\n"
    expected = [{"q": "1+1=\n?", "a": "007"}, {"q": "é", "a": None}, {"q": None, "a": "x"}]
    assert read(tmp_path / name, content.encode()) == expected


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (
            "a.csv",
            b"q,a\n1,2,3\n",
            "a.csv:2: expected 2 values, one for each column .q, a., got 3; put values that hold ','",
        ),
        ("a.csv", b"q,q\n1,2\n", "the column 'q' occurs twice"),
        ("a.csv", b"q;a\n1;2\n", "expected columns separated by ',', got the header 'q;a', separated by ';'"),
        ("a.tsv", b"q,a\n1,2\n", r"separated by '\\t', got the header 'q,a', separated by ','"),
        ("a.csv", b'q,a\n"1,2\n', "not a readable row"),
        ("a.csv", b"q,a\n", "expected at least one row"),
        ("a.csv", "q,a\né,2\n".encode("latin1"), "expected text in UTF-8.*iconv -f latin1 -t utf-8"),
        ("a.json", '["é"]'.encode("latin1"), "expected an array in UTF-8.*iconv"),
        ("a.json", b'[{"a": 1, "a": 2}]', "expected one JSON array of rows .the key 'a' occurs twice"),
        ("a.json", b'[{"a": 1}', "expected one JSON array of rows"),
        ("a.json", b"[]", "expected at least one row"),
        ("a.json", b"[" * 100_000, "expected one JSON array of rows"),
        ("a.jsonl", '{"q": "é"}'.encode("latin1"), "a.jsonl:1: expected one JSON object.*iconv"),
        ("a.jsonl", '{"q": 1}'.encode("utf-16"), "a.jsonl:1: expected one JSON object.*iconv -f utf-16"),
        ("a.jsonl", b'[\n{"q": 1}]', "a file that holds one array must end in .json"),
        (
            "a.jsonl",
            b'[{"q": 1}, {"q": 2}]',
            "a.jsonl:1: .* got an array; a file that holds one array must end in .json",
        ),
        ("a.jsonl", b'{\n"q": 1\n}\n', "a.jsonl:1: .*; write each row as one object on a line of its own"),
        ("a.jsonl", b'{"q": 1}\n{"q": ', "a.jsonl:2: .*; write each row as one object on a line of its own"),
        ("a.json", b'{\n"rows": [{"q": 1}]}', "a.json:1: .*; write one array of rows, or each row as one object"),
    ],
)
def test_text_that_cannot_be_read_is_refused_with_the_remedy(tmp_path, name, content, says):
    with pytest.raises(ValueError, match=says):
        read(tmp_path / name, content)


def test_an_empty_file_is_refused(save, tmp_path):
    pd.DataFrame({"data_source": []}).to_parquet(tmp_path / "empty.parquet")
    for path in (save(), tmp_path / "empty.parquet"):
        with pytest.raises(ValueError, match=rf"{path}: expected at least one row, but the file has none"):
            load_prompts(path)


def test_a_file_that_is_no_parquet_is_named(save):
    path = save(row(), name="data.parquet")
    with pytest.raises(ValueError, match=rf"{path}: not a readable parquet file"):
        load_prompts(path)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"text": "2+2=", "prompt": "2+2="}, "data_source, reward_model missing or null, found text, prompt; verl's"),
        ({}, "data_source, prompt, reward_model missing or null, found nothing; verl's schema is"),
        (row() | {"data_source": None}, "data_source missing or null, found data_source, prompt"),
        (row() | {"data_source": 3}, "data_source must be str, got 3 of type int; verl's schema is"),
        (row() | {"prompt": 3}, "prompt must be str or list, got 3 of type int"),
        (row() | {"prompt": []}, "prompt must hold at least one message, got an empty list"),
        (row() | {"prompt": ["2+2="]}, "each message must be dict, got '2[+]2=' of type str"),
        (row(content=["2+2="]), "content of each message must be str, got .* of type list"),
        (row(content=None), "content of each message must be str, got None"),
        (row() | {"prompt": [{"content": "2+2="}]}, "role of each message must be str, got None"),
        (row() | {"reward_model": "4"}, "reward_model must be dict, got '4' of type str"),
        (row(ground_truth=None), "reward_model.ground_truth missing or null, got {'style': 'rule'}"),
        (row() | {"extra_info": "train"}, "extra_info must be dict, got 'train'"),
        (row(index=1.0), "extra_info.index must be int or str, got 1.0 of type float"),
        (row(prior="0.5"), "extra_info.prior must be float or int, got '0.5' of type str"),
        (row(prior=7.5), r"extra_info.prior must be a success rate in \[0, 1\], got 7.5"),
        (["2+2="], "a row must be dict"),
    ],
)
def test_a_row_that_is_not_in_the_schema_is_named(save, tmp_path, bad, message):
    path = save(row("fine"), bad)
    with pytest.raises(ValueError, match=f"{path}:2: {message}"):
        load_prompts(path)
    target = tmp_path / "written.jsonl"
    with pytest.raises(ValueError, match=f"row 2 for {target}: {message}"):
        write_prompts(target, [row("fine"), bad])
    assert not target.exists()


def test_rows_that_cannot_be_written_are_refused(tmp_path):
    with pytest.raises(ValueError, match="expected at least one row to write, got none"):
        write_prompts(tmp_path / "data.jsonl", [])
    with pytest.raises(ValueError, match=r"parquet cannot hold these rows.*or write a \.jsonl file"):
        write_prompts(tmp_path / "data.parquet", [row("a", 4), row("b", "5")])


# Tokens

TEMPLATE = (
    "{% for message in messages %}<{{ message['content'] }}>{% endfor %}{% if add_generation_prompt %}!{% endif %}"
)


def prompt_set(*prompts):
    return PromptSet(
        keys=tuple(f"sums/{index}" for index in range(len(prompts))),
        sources=("sums",) * len(prompts),
        prompts=prompts,
        ground_truths=tuple(range(len(prompts))),
        extra_infos=tuple({"index": index} for index in range(len(prompts))),
    )


def user(content):
    return ({"role": "user", "content": content},)


def codes(text):
    return tuple(map(ord, text))


def test_text_is_tokenized_and_messages_go_through_the_template(tokenizer_of):
    chat = ({"role": "system", "content": "x"}, {"role": "user", "content": "1+1="})
    prompts = prompt_set("1+1=", chat)
    encoded = encode_prompts(prompts, tokenizer_of(TEMPLATE), context=32, max_new_tokens=8)
    assert encoded.tokens == (codes("1+1="), codes("<x><1+1=>!"))
    assert encoded.prompt_set is prompts


def test_without_a_template_a_single_user_message_is_text(tokenizer_of):
    prompts = prompt_set(user("1+1="), "2+2=")
    encoded = encode_prompts(prompts, tokenizer_of(), context=32, max_new_tokens=8)
    assert encoded.tokens == (codes("1+1="), codes("2+2="))
    assert encoded.prompt_set is prompts


def test_what_a_tokenizer_cannot_take_names_the_prompt(tokenizer_of):
    import tokenizers
    import transformers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}))  # nothing stands for other words
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    knows_little = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    for tokenizer, prompts, why in (
        (knows_little, ("a b", "a c"), r"cannot be tokenized \(Exception: WordLevel error: Missing \[UNK\]"),
        (
            tokenizer_of("{{ raise_exception('no tools') }}"),
            ("1", user("1")),
            r"cannot be tokenized \(\w+: no tools\)",
        ),
        (
            lambda text, **_: {"input_ids": [1, None if "c" in text else 2]},
            ("a b", "a c"),
            "has words that the tokenizer does",
        ),
    ):
        with pytest.raises(ValueError, match=f"prompt 'sums/1' {why}.*remove this text from the data, or"):
            encode_prompts(prompt_set(*prompts), tokenizer, context=32)


def test_overlong_prompts_may_be_dropped(tokenizer_of):
    prompts = prompt_set("1234", "12345", "1", "1234567")
    encoded = encode_prompts(prompts, tokenizer_of(), context=12, max_new_tokens=8, overlong="drop")
    assert encoded.tokens == (codes("1234"), codes("1"))
    assert encoded.prompt_set == PromptSet(
        keys=("sums/0", "sums/2"),
        sources=("sums", "sums"),
        prompts=("1234", "1"),
        ground_truths=(0, 2),
        extra_infos=({"index": 0}, {"index": 2}),
        dropped={"overlong": 2},
    )


def test_dropping_every_prompt_is_refused(tokenizer_of):
    with pytest.raises(ValueError, match="no prompt is left"):
        encode_prompts(prompt_set("12345"), tokenizer_of(), context=12, max_new_tokens=8, overlong="drop")


@pytest.mark.parametrize("most", [12, 10**30])
def test_more_new_tokens_than_the_context_holds_are_refused_as_such(tokenizer_of, most):
    with pytest.raises(ValueError, match="max_new_tokens must be less than the model's context of 12 tokens"):
        encode_prompts(prompt_set("1"), tokenizer_of(), context=12, max_new_tokens=most, overlong="drop")
