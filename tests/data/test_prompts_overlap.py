"""Prompts that have the same text."""

from contextlib import nullcontext

import pytest

from rollalloc.data.prompts import (
    load_prompts,
    normalised,
    refuse_trained_on,
    warn_of_copies,
    warn_of_shared,
    write_prompts,
)


@pytest.mark.parametrize(
    "other",
    [
        "WHAT is\n 1 + 1?  ",
        [{"role": "user", "content": "What is 1 + 1?"}],
        [{"role": "system", "content": "Think."}, {"role": "user", "content": "What is 1 + 1?"}],
        "What is 1 + 1\N{FULLWIDTH QUESTION MARK}",
        "What\N{NO-BREAK SPACE}is 1 + 1?",
    ],
)
def test_case_layout_and_system_messages_do_not_count(other):
    assert normalised(other) == normalised("What is 1 + 1?")


@pytest.mark.parametrize("other", ["What is 1 - 1?", "What is 1 + 11?", "What is 1 + 1", "", "Was ist 1 + 1?"])
def test_every_other_character_counts(other):
    assert normalised(other) != normalised("What is 1 + 1?")


def test_a_held_out_data_set_that_is_trained_on_is_said(caplog):
    datasets = pytest.importorskip("datasets")
    train = datasets.Dataset.from_dict({"prompt": ["a", "b", "c"]})
    chats = datasets.Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in ("x", "B")]})
    warn_of_shared(train, chats, "eval_dataset")
    assert (
        "1 of 2 prompts of eval_dataset (50%) are in the training set too, for example row 1 as row 1 of" in caplog.text
    )


@pytest.mark.parametrize("kind", ["nothing shared", "none", "other columns", "streamed"])
def test_other_data_sets_are_left_alone(caplog, kind):
    datasets = pytest.importorskip("datasets")
    train = datasets.Dataset.from_dict({"prompt": ["a"]})
    held = {
        "nothing shared": datasets.Dataset.from_dict({"prompt": ["b"]}),
        "none": None,
        "other columns": datasets.Dataset.from_dict({"question": ["a"]}),
        "streamed": train.to_iterable_dataset(),
    }[kind]
    warn_of_shared(train, held, "eval_dataset")
    assert not caplog.records


@pytest.mark.parametrize(("held", "is_refused"), [(19, True), (20, False), (21, False)])
def test_a_run_is_refused_from_more_than_five_percent_of_shared_prompts_on(tmp_path, held, is_refused):
    """One of them is shared: at 20 it is just 5%."""
    rows = [{"data_source": "m", "prompt": f"p{n}", "reward_model": {"ground_truth": "1"}} for n in range(held)]
    write_prompts(tmp_path / "held.jsonl", rows)
    write_prompts(tmp_path / "train.jsonl", [rows[3], rows[3] | {"prompt": "another"}])
    train, held_out = load_prompts(tmp_path / "train.jsonl"), load_prompts(tmp_path / "held.jsonl")
    with pytest.raises(ValueError, match="are refused") if is_refused else nullcontext():
        refuse_trained_on(train, held_out, accepted=False)
    refuse_trained_on(train, held_out, accepted=True)


def test_rows_with_the_prompt_of_an_earlier_row_are_counted(caplog):
    chats = [[{"role": "user", "content": said}] for said in ("1+1?", "2+2?", "1+1?", "2+2?", "2+2?")]
    warn_of_copies(chats, "train_dataset")
    assert (
        "3 of 5 rows of train_dataset have the prompt of an earlier row, for example row 2 that of row 0."
        in caplog.text
    )
    caplog.clear()
    warn_of_copies([*chats[:2], "1+1?", "1+1? "], "train_dataset")
    assert not caplog.records
