"""Questions and answers in columns of any name become prompts in verl's schema, or an error that names the row."""

import json
import math
from decimal import Decimal
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from rollalloc.data._files import write_rows
from rollalloc.data.convert import Converted, convert
from rollalloc.data.prompts import load_prompts

GSM8K = [
    {"question": "How many clips?", "answer": "48 / 2 = <<48/2=24>>24, and 1,234 in all.\n#### 1,234"},
    {"question": "Who knows?", "answer": None},
    {"question": "And now?", "answer": "#### -5"},
]
TRL = [
    {
        "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": "1+1"}],
        "solution": r"so $\boxed{2}$.",
    },
    {"prompt": [{"role": "user", "content": "2+2"}], "solution": "4"},
]


@pytest.fixture
def run(tmp_path):
    """Convert these rows, and read what came of it."""

    def converted(rows, question, answer, suffix=".jsonl", **how):
        file, out = tmp_path / f"mine{suffix}", tmp_path / f"out{suffix}"
        write_rows(file, rows)
        made = convert(file, out, question=question, answer=answer, **how)
        return made, load_prompts(out)

    return converted


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_gsm8ks_columns_become_prompts_and_ground_truths(run, suffix):
    made, prompts = run(GSM8K, "question", "answer", suffix, system="Be brief.")
    assert made == Converted(prompts=2, unanswered=1)
    assert prompts.keys == ("mine/0", "mine/2")
    assert prompts.ground_truths == ("1234", "-5")
    assert prompts.prompts[1] == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "And now?"})


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_trls_messages_and_any_column_of_answers_are_converted(run, suffix):
    made, prompts = run(TRL, "prompt", "solution", suffix, source="maths")
    assert made == Converted(prompts=2, unanswered=0)
    assert prompts.keys == ("maths/0", "maths/1")
    assert prompts.ground_truths == ("2", "4")
    assert prompts.prompts == tuple(tuple(row["prompt"]) for row in TRL)


@pytest.mark.parametrize(
    ("given", "truth"),
    [(4, "4"), (4.0, "4"), (0.5, "0.5"), (" x, y ", "x, y"), ("#### 1,2", "1,2"), ("1,234", "1,234")],
)
def test_numbers_and_texts_become_ground_truths(run, given, truth):
    assert run([{"q": "?", "a": given}], "q", "a")[1].ground_truths == (truth,)


def test_numbers_keep_their_digits_and_nan_is_no_answer(run):
    answers = [Decimal("1.50"), Decimal("1200.00"), Decimal("0.001"), None]
    made, prompts = run([{"q": str(row), "a": answer} for row, answer in enumerate(answers)], "q", "a", ".parquet")
    assert (made.unanswered, prompts.ground_truths) == (1, ("1.5", "1200", "0.001"))
    made, prompts = run([{"q": "0", "a": math.nan}, {"q": "1", "a": 1.0}], "q", "a", ".jsonl")
    assert (made.unanswered, prompts.ground_truths) == (1, ("1",))


PLACEHOLDERS = ["proof", "notfound", "Not found", "None", "N/A", "null", r"\boxed{proof}", "We show it.\n#### N/A"]


def test_placeholders_are_no_ground_truths_and_are_counted(run):
    answers = ["7", *PLACEHOLDERS, "proof", "none", "proof by induction"]
    made, prompts = run([{"q": str(row), "a": answer} for row, answer in enumerate(answers)], "q", "a")
    assert prompts.ground_truths == ("7", "none", "proof by induction")
    assert (made.prompts, made.unanswered) == (3, 0)
    assert made.placeholders == {"proof": 3, "N/A": 2, "notfound": 1, "Not found": 1, "None": 1, "null": 1}


@pytest.mark.parametrize(
    "answer", [r"so \fbox{11}, in 3 steps", r"$\boxed 11$, in 3 steps", r"not \boxed{3} but \fbox{11}"]
)
def test_an_answer_is_read_from_boxes_of_other_kinds(run, answer):
    assert run([{"q": "5+6?", "a": answer}], "q", "a")[1].ground_truths == ("11",)


def test_questions_with_different_answers_are_left_out_and_counted(run):
    asked = [("1+1?", "2"), ("ratio?", "1 : 14"), ("ratio?", "\\frac{1}{14}"), ("ratio?", "1 : 14"), ("1+1?", "2")]
    made, prompts = run([{"q": question, "a": answer} for question, answer in asked], "q", "a")
    assert made == Converted(prompts=1, unanswered=0, repeated=1, contradicted=3)
    assert prompts.keys == ("mine/0",)


def test_questions_are_compared_in_every_letter(run):
    long = "Which is it? " * 40
    made, prompts = run([{"q": f"{long}{letter}{long}", "a": letter} for letter in "ab"], "q", "a")
    assert (made.prompts, made.contradicted, prompts.ground_truths) == (2, 0, ("a", "b"))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_messages_keep_their_tool_calls(run, suffix):
    calls = [{"id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    chat = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    _, prompts = run([{"q": chat, "a": "2"}], "q", "a", suffix)
    assert prompts.prompts[0] == (chat[0], {"role": "assistant", "content": "", "tool_calls": calls}, chat[2])


def test_an_answer_that_was_begun_is_kept_where_that_is_said(run):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Let me think.\n<think>"}]
    _, prompts = run([{"q": chat, "a": "1"}], "q", "a", prefill=True)
    assert prompts.prompts == (tuple(chat),)


@pytest.mark.parametrize("answer", ["reward_model", "reward_model.ground_truth", "answer"])
def test_a_file_in_verls_schema_needs_no_conversion(run, answer):
    row = {"data_source": "m", "prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2"}}
    with pytest.raises(
        ValueError, match=r"mine\.jsonl:1: the file has verl's schema already, .*; use the file as it is, as --prompts"
    ):
        run([row], "prompt", answer)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_the_answer_may_be_the_last_message_of_a_conversation(run, suffix):
    """As in data for supervised training. Earlier answers stay in the prompt."""
    chat = [{"role": role, "content": said} for role, said in (("user", "1+1?"), ("assistant", "2"), ("user", "+2?"))]
    answered = [*chat, {"role": "assistant", "content": "That is \\boxed{4}."}]
    made, prompts = run([{"messages": answered}, {"messages": answered[:2]}], "messages", "messages", suffix)
    assert made == Converted(prompts=2, unanswered=0)
    assert prompts.prompts == (tuple(chat), tuple(chat[:1]))
    assert prompts.ground_truths == ("4", "2")


@pytest.mark.parametrize(("solution", "prompts"), [("2", 1), (2, 1), (None, 0)])
def test_a_file_in_verls_schema_may_have_its_own_column_of_answers(run, solution, prompts):
    row = {"data_source": "m", "prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2"}}
    other = {"prompt": [{"role": "user", "content": "2+2?"}], "solution": "4"}
    made, _ = run([row | {"solution": solution}, other], "prompt", "solution")
    assert made == Converted(prompts=1 + prompts, unanswered=1 - prompts)


def test_a_table_of_text_is_converted(tmp_path):
    (tmp_path / "mine.csv").write_text("q,a\n1+1?,007\n2+2?,\n")
    made = convert(tmp_path / "mine.csv", tmp_path / "out.jsonl", question="q", answer="a")
    assert (made, load_prompts(tmp_path / "out.jsonl").ground_truths) == (Converted(1, 1), ("007",))


def test_a_column_that_is_there_twice_is_refused(tmp_path):
    columns = [pyarrow.array(["?"]), pyarrow.array(["1"]), pyarrow.array(["2"])]
    parquet.write_table(pyarrow.Table.from_arrays(columns, names=["q", "a", "a"]), tmp_path / "mine.parquet")
    with pytest.raises(ValueError, match=r"mine\.parquet: .*column 'a' occurs twice"):
        convert(tmp_path / "mine.parquet", tmp_path / "out.parquet", question="q", answer="a")


def test_a_link_to_nowhere_is_not_written_through(tmp_path):
    write_rows(tmp_path / "mine.jsonl", TRL)
    (tmp_path / "out.jsonl").symlink_to(tmp_path / "elsewhere.jsonl")
    with pytest.raises(FileExistsError):
        convert(tmp_path / "mine.jsonl", tmp_path / "out.jsonl", question="prompt", answer="solution")
    assert not (tmp_path / "elsewhere.jsonl").exists()


@pytest.mark.parametrize(
    ("rows", "how", "says"),
    [
        ([{"q": "?", "a": 1}, {"q": "?"}], {}, r"mine\.jsonl:2: expected a column 'a', found 'q'; name one"),
        ([{"q": "?", "a": 1}], {"question": "Q"}, r"mine\.jsonl:1: expected a column 'Q', found 'q', 'a'"),
        ([{"q": 7, "a": 1}], {}, r"mine\.jsonl:1: q must be text or messages \[.*, got 7"),
        ([{"q": [{"role": "user"}], "a": 1}], {}, "content of each message must be str, got None"),
        (
            [{"q": [*TRL[0]["prompt"], {"role": "assistant", "content": "Let me think."}], "a": 2}],
            {},
            r"mine\.jsonl:1: q must end with a question, got an assistant's message, .*Let me.*give --answer q .*--prefill",
        ),
        ([{"q": TRL[0]["prompt"], "a": 1}], {"system": "x"}, "has a system message of its own.*leave --system out"),
        ([{"q": "?", "a": [1, 2]}], {}, r"mine\.jsonl:1: a must be text or a number, got \[1, 2\]"),
        ([{"q": "?", "a": float("inf")}], {}, "a must be text or a number, got inf"),
        ([{"q": "   ", "a": 1}], {}, r"mine\.jsonl:1: q must be text or messages"),
        (
            [{"q": TRL[0]["prompt"]}],
            {"answer": "q"},
            r"mine\.jsonl:1: q holds questions and answers, so its messages must end with the assistant's, got \[.*--answer",
        ),
        ([{"q": "?"}], {"answer": "q"}, "so its messages must end with the assistant's, got '\\?'"),
        ([{"q": [{"role": "assistant", "content": "4"}]}], {"answer": "q"}, r"q must be text or messages .*got \[\]"),
        (
            [{"q": "?", "a": None}, {"q": "??", "a": " "}],
            {},
            "nothing to write: 2 rows have no answer in their column 'a'",
        ),
        (
            [{"q": "?", "a": "proof"}],
            {},
            "0 rows have no answer in their column 'a', 1 have a placeholder such as 'proof'",
        ),
        ([{"q": "?", "a": 1}, {"q": "?", "a": 2}], {}, "0 rows have no answer.*and 2 ask a question that another row"),
    ],
)
def test_what_cannot_be_a_prompt_is_refused_by_its_place(tmp_path, rows, how, says):
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=says):
        convert(tmp_path / "mine.jsonl", tmp_path / "out.jsonl", **{"question": "q", "answer": "a"} | how)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.jsonl"]


def test_the_command_says_what_it_wrote_and_replaces_nothing(rollalloc, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(Path("mine.parquet"), [*GSM8K, {"question": "Why?", "answer": "proof"}])
    command = (
        "data",
        "convert",
        "mine.parquet",
        "--question",
        "question",
        "--answer",
        "answer",
        "--out",
        "out.parquet",
    )
    code, _, said = rollalloc(*command)
    left_out = (
        "1 rows without an answer are left out; 1 rows with a placeholder as their answer ('proof': 1) are left out"
    )
    assert (code, " ".join(said.split())) == (0, f"2 prompts are in out.parquet; {left_out}")
    before = Path("out.parquet").read_bytes()
    code, _, said = rollalloc(*command)
    assert code == 2
    assert "error: out.parquet exists already" in said
    assert Path("out.parquet").read_bytes() == before
