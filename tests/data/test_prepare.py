"""Public sets, from small files in each set's own columns."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rollalloc.data._files import read_rows, write_rows
from rollalloc.data.prepare import prepare
from rollalloc.data.prompts import load_prompts
from rollalloc.data.public import INSTRUCTION, SETS, TAGS, can_be_guessed

ROWS: dict[str, list[dict[str, Any]]] = {
    "deepmath": [
        {"question": "Find $2+2$.", "final_answer": "4", "difficulty": 4.5, "original_index": 7},
        {"question": "Find the limit.", "final_answer": "\\infty", "difficulty": 8.0, "original_index": 9},
    ],
    "polaris": [{"problem": "Count.", "answer": "12", "difficulty": "3/8"}],
    "deepscaler": [{"problem": "Ratio?", "answer": "-\\frac{2}{3}", "solution": "Work."}],
    "dapo17k": [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": "Solve it. Answer: $Answer"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": "9a9b6eb4"},
        }
    ]
    * 3,
    "gsm8k_train": [{"question": "How many?", "answer": "Some work.\n#### 1,080"}],
    "gsm8k_test": [{"question": "How much?", "answer": "More work.\n#### -3"}],
    "math_train": [
        {"problem": "Volume?", "solution": "First $\\boxed{1}$, so $\\boxed{\\frac{1}{3}}$."},
        {"problem": "Sides?", "solution": "Not $\\boxed{4}$, so $\\boxed 3$."},
        {"problem": "Corners?", "solution": "Not $\\boxed{4}$, so \\fbox{5}."},
    ],
    "math500": [{"problem": "Area?", "expected_answer": "\\frac{1}{2}"}],
    "aime24": [{"id": 60, "problem": "Every morning...", "answer": "204"}],
    "aime25": [{"id": "0", "problem": "Find the sum.", "answer": "70"}],
    "amc23": [{"id": 0, "question": "Cities A and B.", "answer": 27.0}],
    "minerva": [{"question": "Mass?", "answer": "4.5e33"}],
    "olympiadbench": [{"question": "Xenia?", "final_answer": ["2", "3"]}],
}

ANSWERS = {
    "deepmath": ["4", "\\infty"],
    "polaris": ["12"],
    "deepscaler": ["-\\frac{2}{3}"],
    "dapo17k": ["34"],
    "gsm8k_train": ["1080"],
    "gsm8k_test": ["-3"],
    "math_train": ["\\frac{1}{3}", "3", "5"],
    "math500": ["\\frac{1}{2}"],
    "aime24": ["204"],
    "aime25": ["70"],
    "amc23": ["27"],
    "minerva": ["4.5e33"],
    "olympiadbench": ["2"],
}


@pytest.fixture
def local(tmp_path: Path) -> Path:
    for name, rows in ROWS.items():
        write_rows(tmp_path / "sets" / f"{name}.jsonl", rows)
    return tmp_path / "sets"


@pytest.mark.parametrize("name", SETS)
def test_a_set_in_its_own_columns_is_read_back_as_prompts(name: str, local: Path, tmp_path: Path) -> None:
    for file in prepare([name], tmp_path / "out", local=local):
        loaded = load_prompts(file.path)
        assert list(loaded.ground_truths) == ANSWERS[file.part.original]
        assert set(loaded.sources) == {file.part.hub}


def test_the_prompt_asks_for_a_boxed_answer_after_an_empty_system_message(local: Path, tmp_path: Path) -> None:
    (file,) = prepare(["polaris"], tmp_path / "out", local=local)
    (prompt,) = load_prompts(file.path).prompts
    assert prompt == (
        {"role": "system", "content": ""},
        {"role": "user", "content": f"Count. {INSTRUCTION}"},
    )


def test_a_set_that_brings_its_own_prompt_keeps_it(local: Path, tmp_path: Path) -> None:
    (file,) = prepare(["dapo17k"], tmp_path / "out", local=local)
    assert load_prompts(file.path).prompts == (({"role": "user", "content": "Solve it. Answer: $Answer"},),)
    assert file.dropped == {"duplicate": 2}


def test_a_pass_rate_is_a_prior_and_a_rating_is_not(local: Path, tmp_path: Path) -> None:
    polaris, deepmath = prepare(["polaris", "deepmath"], tmp_path / "out", local=local)
    assert load_prompts(polaris.path).extra_infos[0]["prior"] == 0.375
    info = load_prompts(deepmath.path).extra_infos[0]
    assert info["rating"] == "4.5/9.0"
    assert "prior" not in info


def test_a_set_with_samples_has_each_question_once_with_verls_column(local: Path, tmp_path: Path) -> None:
    once, often = prepare(["aime24", "aime24x32"], tmp_path / "out", local=local)
    (row,) = [row for _, row in read_rows(once.path)]
    assert [row for _, row in read_rows(often.path)] == [row | {"__rollout_n__": 32}]
    assert (often.path.name, often.rows) == ("aime24x32.parquet", 1)


GUESSED = [
    "Yes",
    "no",
    "\\text{True}",
    "$\\text{False}$.",
    "B",
    "(C)",
    "\\text{(D)}",
    "\\textbf{E}",
    "(B) 12",
    "diverges",
    "Even",
]


@pytest.mark.parametrize("answer", GUESSED)
def test_an_answer_that_can_be_guessed_is_one_of_two_words_or_a_letter(answer: str) -> None:
    assert can_be_guessed(answer)


def test_a_filter_leaves_out_training_questions_and_says_how_many(tmp_path: Path) -> None:
    answers = ["4", "Yes", "(B)", "7"]
    of_set = {"deepmath": "final_answer", "math500": "answer"}
    for name, column in of_set.items():
        asked = "question" if name == "deepmath" else "problem"
        rows = [{asked: f"Question {number}?", column: answer} for number, answer in enumerate(answers)]
        write_rows(tmp_path / "sets" / f"{name}.jsonl", rows)
    train, held = prepare([*of_set], tmp_path / "out", local=tmp_path / "sets", leave_out="guessable")
    assert list(load_prompts(train.path).ground_truths) == ["4", "7"]
    assert train.dropped == {"guessable": 2}
    assert (held.rows, held.dropped) == (4, {})


def test_a_filter_that_leaves_no_row_is_refused_by_name(tmp_path: Path) -> None:
    write_rows(tmp_path / "deepmath.jsonl", [{"question": "Is it?", "final_answer": "Yes"}])
    with pytest.raises(ValueError, match=r"no row of deepmath is left, because --filter guessable leaves out 1 rows;"):
        prepare(["deepmath"], tmp_path / "out", local=tmp_path, leave_out="guessable")
    assert not (tmp_path / "out" / "deepmath.parquet").exists()


@pytest.mark.parametrize(
    ("sets", "name", "says"),
    [
        (["deepmath"], "gessable", "--filter must be one of guessable, got 'gessable'"),
        (["math500"], "guessable", "--filter guessable is for training sets, and no training set is given"),
    ],
)
def test_a_filter_that_would_do_nothing_is_refused(
    sets: list[str], name: str, says: str, local: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=says):
        prepare(sets, tmp_path / "out", local=local, leave_out=name)


def test_rows_without_an_answer_or_with_two_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [
        {"problem": "Kept?", "answer": "1"},
        {"problem": "Empty?", "answer": " "},
        {"problem": "Null?", "answer": None},
        {"problem": "Which?", "answer": "1"},
        {"problem": " Which? ", "answer": "2"},
        {"problem": "Kept?", "answer": "1"},
    ]
    write_rows(tmp_path / "sets" / "math500.jsonl", rows)
    (file,) = prepare(["math500"], tmp_path / "out", local=tmp_path / "sets")
    assert (file.rows, file.dropped) == (1, {"no answer": 2, "duplicate": 1, "contradicted": 2})


@pytest.mark.parametrize("answer", [float("nan"), float("inf"), [float("-inf")], "NaN", None, [], "proof", "N/A"])
def test_what_is_no_number_or_a_placeholder_is_no_answer(tmp_path: Path, answer: Any) -> None:
    rows = [{"problem": "Sum?", "answer": answer}, {"problem": "Limit?", "answer": "\\infty"}]
    (tmp_path / "math500.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (file,) = prepare(["math500"], tmp_path / "out", local=tmp_path)
    assert (file.rows, file.dropped) == (1, {"no answer": 1})


def test_files_that_are_there_are_replaced_only_if_asked(local: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (first, _) = prepare(["gsm8k"], out, local=local)
    write_rows(local / "gsm8k_train.jsonl", [{"question": "Another?", "answer": "#### 2"}])
    with pytest.raises(FileExistsError, match=r"gsm8k_test.parquet exists already; replace it \(--overwrite\)"):
        prepare(["math500", "gsm8k"], out, local=local)
    assert not (out / "math500.parquet").exists(), "nothing is written"
    assert load_prompts(first.path).ground_truths == ("1080",)
    prepare(["gsm8k"], out, local=local, overwrite=True)
    assert load_prompts(first.path).ground_truths == ("2",)


def test_a_file_of_somebody_else_is_refused_before_any_file_is_written(local: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_rows(out / "gsm8k_test.parquet", [{"notes": "mine"}])
    with pytest.raises(FileExistsError, match=r"gsm8k_test\.parquet"):
        prepare(["math500", "gsm8k"], out, local=local, overwrite=True)
    assert [file.name for file in out.iterdir()] == ["gsm8k_test.parquet"]


def write_split(folder: Path, files: dict[str, Any], readme: str = "") -> None:
    """A folder of a set as the hub has it; each file has one question, with this answer."""
    for name, answer in files.items():
        rows = [
            {
                "problem": f"{name}?",
                "question": f"{name}?",
                "solution": f"\\boxed{{{answer}}}",
                "answer": f"#### {answer}",
            }
        ]
        write_rows(folder / name, rows)
    if readme:
        (folder / "README.md").write_text(f"---\n{readme}\n---\n")


def test_a_snapshot_of_the_hub_does_not_put_held_out_rows_into_training(tmp_path: Path) -> None:
    names = {"data/train-00000-of-00001.parquet": 1, "data/test-00000-of-00001.parquet": 2}
    write_split(
        tmp_path / "sets/MATH-lighteval",
        names,
        "configs: [{config_name: default, data_files: [{split: train, path: data/train-*}]}]",
    )
    (file,) = prepare(["math"], tmp_path / "out", local=tmp_path / "sets")
    assert load_prompts(file.path).ground_truths == ("1",)
    assert list(file.read) == ["MATH-lighteval/data/train-00000-of-00001.parquet"]


def test_both_splits_of_a_set_come_from_one_folder_and_other_configurations_stay_out(tmp_path: Path) -> None:
    names = {
        f"{config}/{split}-00000-of-00001.jsonl": len(config + split)
        for config in ("main", "socratic")
        for split in ("train", "test")
    }
    configs = ", ".join(
        f"{{config_name: {config}, data_files: [{{split: train, path: {config}/train-*}}, "
        f"{{split: test, path: {config}/test-*}}]}}"
        for config in ("main", "socratic")
    )
    write_split(tmp_path / "sets/gsm8k", names, f"configs: [{configs}]")
    files = prepare(["gsm8k"], tmp_path / "out", local=tmp_path / "sets")
    assert [list(file.read) for file in files] == [
        [f"gsm8k/main/{split}-00000-of-00001.jsonl"] for split in ("train", "test")
    ]


@pytest.mark.parametrize(
    ("name", "files", "why"),
    [
        ("math500", {"part-0.jsonl": 1}, "its splits are train"),
        ("math500", {"train.jsonl": 1}, "its splits are train"),
        ("gsm8k", {"main/train.jsonl": 1, "socratic/train.jsonl": 2}, "BuilderConfig 'main' not found"),
        ("math500", {}, "doesn't contain any data"),
    ],
)
def test_what_cannot_be_told_is_refused_with_a_way_out(
    name: str, files: dict[str, Any], why: str, tmp_path: Path
) -> None:
    (tmp_path / name).mkdir()
    write_split(tmp_path / name, files)
    with pytest.raises(ValueError, match=rf"but .*{why}.*; put them into one file, {name}.*parquet or .jsonl, beside"):
        prepare([name], tmp_path / "out", local=tmp_path)


def test_a_folder_without_datasets_installed_is_an_error_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "math500").mkdir()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'rollalloc\[data\]'"):
        prepare(["math500"], tmp_path / "out", local=tmp_path)


def test_a_set_is_prepared_from_the_hub_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[Any] = []

    def load_dataset(*named: Any, split: str) -> list[dict[str, Any]]:
        asked.append((*named, split))
        return ROWS["gsm8k_train" if split == "train" else "gsm8k_test"]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert [file.rows for file in prepare(["gsm8k"], tmp_path)] == [1, 1]
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("gsm9k", [], "unknown set 'gsm9k' .did you mean 'gsm8k'"),
        ("aime25", [], "expected aime25.parquet or .jsonl"),
        (
            "polaris",
            [{"question": "Q?", "answer": "1"}],
            "polaris.jsonl:1: not a row of POLARIS-Project.*question, answer",
        ),
        ("polaris", [{"problem": "Q?", "answer": "1", "difficulty": "9/8"}], "pass rate such as 3/8, got '9/8'"),
    ],
)
def test_a_set_that_cannot_be_prepared_is_named(
    name: str, rows: list[dict[str, Any]], message: str, tmp_path: Path
) -> None:
    if rows:
        write_rows(tmp_path / f"{name}.jsonl", rows)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        prepare([name], tmp_path / "out", local=tmp_path)


def test_the_command_says_what_was_written(local: Path, tmp_path: Path, rollalloc: Any) -> None:
    out = tmp_path / "out"
    code, _, said = rollalloc("data", "prepare", "gsm8k", "math500", "--out", out, "--from-local", local)
    assert code == 0
    assert "gsm8k_train.parquet" in said
    assert {path.stem for path in out.glob("*.parquet")} == {"gsm8k_train", "gsm8k_test", "math500"}


def test_system_messages_are_left_out_for_models_that_refuse_them(local: Path, tmp_path: Path, rollalloc: Any) -> None:
    command = ("data", "prepare", "math500", "--out", tmp_path, "--from-local", local, "--overwrite")
    for options, roles in (([], ["system", "user"]), (["--no-system"], ["user"]), ([], ["system", "user"])):
        assert rollalloc(*command, *options)[0] == 0
        (prompt,) = load_prompts(tmp_path / "math500.parquet").prompts
        assert [message["role"] for message in prompt] == roles


def test_nothing_is_written_where_one_of_the_files_is_not_ours(local: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "aime24.parquet").write_text("mine")
    with pytest.raises(FileExistsError, match=r"aime24\.parquet"):
        prepare(["polaris", "aime24"], out, local=local, overwrite=True)
    assert [file.name for file in out.iterdir()] == ["aime24.parquet"]
    assert (out / "aime24.parquet").read_text() == "mine"


def test_prompts_can_ask_for_tags_in_a_system_message(local: Path, tmp_path: Path, rollalloc: Any) -> None:
    command = ("data", "prepare", "--out", tmp_path, "--from-local", local, "--ask", "tags")
    assert rollalloc(*command, "polaris")[0] == 0
    (prompt,) = load_prompts(tmp_path / "polaris.parquet").prompts
    assert prompt == ({"role": "system", "content": TAGS}, {"role": "user", "content": "Count."})
    assert [tag for tag in ("<think>\n", "\n</think>\n<answer>\n", "\n</answer>") if tag not in TAGS] == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["dapo17k", "--ask", "tags"], "--ask tags: dapo17k has prompts of its own; prepare it without --ask"),
        (["polaris", "--ask", "tags", "--no-system"], "--ask tags asks in a system message; leave --no-system out"),
        (["polaris", "--ask", "xml"], "--ask must be one of box, tags, got 'xml'"),
    ],
)
def test_what_prompts_cannot_ask_for_is_refused(
    options: list[str], says: str, local: Path, tmp_path: Path, rollalloc: Any
) -> None:
    code, _, said = rollalloc("data", "prepare", *options, "--out", tmp_path / "out", "--from-local", local)
    assert code != 0
    assert says in " ".join(said.split())
    assert not list(tmp_path.glob("out/*"))
