"""Prompts that have the same text."""

import pytest

from rollalloc.data.overlap import normalised, warn_of_shared


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
