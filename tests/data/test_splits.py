"""Which files of a local folder are a split, in the layouts that the hub knows; the rows say what they are of."""

import pytest

from rollalloc.data._files import write_rows
from rollalloc.data.prepare import prepare
from rollalloc.data.prompts import load_prompts
from rollalloc.data.splits import Wanted, files_of_split

TEST = Wanted("owner/Set", "test")
TRAIN = Wanted("owner/Set", "train")
MAIN = Wanted("openai/gsm8k", "test", "main")


@pytest.fixture
def folder(tmp_path):
    """Makes empty files under these names."""

    def made(*names, readme=None):
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
        if readme is not None:
            (tmp_path / "README.md").write_text(f"---\n{readme}\n---\n# Set\n")
        return tmp_path

    return made


def names_of(folder, wanted):
    return [path.relative_to(folder).as_posix() for path in files_of_split(folder, wanted)]


SHARDS = ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet")
GSM8K = tuple(
    f"{config}/{split}-00000-of-00001.parquet" for config in ("main", "socratic") for split in ("train", "test")
)


@pytest.mark.parametrize(
    ("names", "wanted", "expected"),
    [
        (SHARDS, TRAIN, SHARDS[:2]),
        (SHARDS, TEST, SHARDS[2:]),
        (("train.jsonl", "test.jsonl"), TEST, ("test.jsonl",)),
        (("my_train_v2.jsonl", "my-dev.json", "my.eval.jsonl"), TEST, ("my.eval.jsonl",)),
        (("train/a.parquet", "train/b.parquet", "test/a.parquet"), TRAIN, ("train/a.parquet", "train/b.parquet")),
        (("data/train/0.jsonl", "data/test/0.jsonl"), TEST, ("data/test/0.jsonl",)),
        (("Test.jsonl", "TRAIN.jsonl"), TEST, ("Test.jsonl",)),
        (GSM8K, MAIN, ("main/test-00000-of-00001.parquet",)),
        (("train.jsonl", "test.jsonl"), MAIN, ("test.jsonl",)),
        (("v2/test.jsonl", "v2/train.jsonl"), TEST, ("v2/test.jsonl",)),
        (
            ("train_socratic-00000-of-00001.parquet", "train-00000-of-00001.parquet"),
            TRAIN,
            ("train-00000-of-00001.parquet",),
        ),
        # No name says a split.
        (("part1.parquet", "part2.parquet"), TEST, ("part1.parquet", "part2.parquet")),
        (("contest.jsonl",), TRAIN, ("contest.jsonl",)),
        # Files that hold no rows.
        (("test.jsonl", "dataset_info.json", ".cache/train.parquet", "notes.txt"), TEST, ("test.jsonl",)),
        (("test.jsonl", "extra.jsonl"), TEST, ("test.jsonl",)),
    ],
)
def test_the_names_of_files_and_folders_say_their_split(folder, names, wanted, expected):
    assert names_of(folder(*names), wanted) == list(expected)


@pytest.mark.parametrize(
    ("names", "wanted", "choices"),
    [
        (("train.jsonl",), TEST, r"train \(1 file\).*--split Set=train"),
        (("test.jsonl", "valid.jsonl"), TRAIN, r"test \(1 file\), validation \(1 file\)"),
        (("en/test.jsonl", "zh/test.jsonl"), TEST, r"en/test \(1 file\), zh/test \(1 file\)"),
        (("socratic/test.jsonl", "socratic/train.jsonl"), MAIN, r"'main/test'.*socratic/test \(1 file\)"),
        (("train_and_test.jsonl", "more_train.jsonl"), TEST, r"train \(1 file\), train\+test \(1 file\)"),
        (("a/x.jsonl", "b/x.jsonl", "b/y.jsonl"), TEST, r"a \(1 file\), b \(2 files\)"),
        (tuple(f"{number}/test.jsonl" for number in range(30)), TEST, "and 18 more"),
    ],
)
def test_what_cannot_be_told_is_refused_with_the_choices(folder, names, wanted, choices):
    with pytest.raises(ValueError, match=f"cannot tell which files are the split.*{choices}"):
        files_of_split(folder(*names), wanted)


def test_a_choice_decides(folder):
    place = folder("en/test.jsonl", "zh/test.jsonl", "zh/train.jsonl")
    chosen = {choice: names_of(place, Wanted("Set", "test", None, choice)) for choice in ("zh/test", "zh/train", "all")}
    assert chosen == {
        "zh/test": ["zh/test.jsonl"],
        "zh/train": ["zh/train.jsonl"],
        "all": ["en/test.jsonl", "zh/test.jsonl", "zh/train.jsonl"],
    }
    with pytest.raises(ValueError, match=r"has no split 'nl/test'.*en/test \(1 file\)"):
        files_of_split(place, Wanted("Set", "test", None, "nl/test"))


CONFIGS = """
configs:
- config_name: main
  data_files:
  - {split: train, path: "a/*"}
  - {split: test, path: ["b/*", "c"]}
- config_name: other
  default: true
  data_files: "d/*.jsonl"
"""


def test_the_readme_says_it_where_it_has_configurations(folder):
    place = folder("a/1.jsonl", "b/test-1.jsonl", "c/train-2.jsonl", "d/3.jsonl", readme=CONFIGS)
    assert names_of(place, MAIN) == ["b/test-1.jsonl", "c/train-2.jsonl"]
    assert names_of(place, TRAIN) == ["d/3.jsonl"]  # of the default configuration, whose files have no split
    with pytest.raises(ValueError, match=r"main/train \(1 file\), main/test \(2 files\), other/train"):
        files_of_split(place, Wanted("Set", "dev"))


@pytest.mark.parametrize(
    "readme",
    ["configs: 3", "configs: [1, {data_files: {x: 1}}]", "a: [", "configs: [{data_files: [{split: 1, path: [2]}]}]", "- x",
     "configs: [{config_name: default, data_files: [{split: test, path: ../other/*}]}]"],
)  # fmt: skip
def test_a_readme_that_says_nothing_usable_does_not_count(folder, readme):
    assert names_of(folder("train.jsonl", "test.jsonl", readme=readme), TEST) == ["test.jsonl"]


def test_a_readme_cannot_name_files_outside(folder, tmp_path):
    (tmp_path / "secret.jsonl").touch()
    place = tmp_path / "set"
    place.mkdir()
    (place / "test.jsonl").touch()
    for path in ("../secret.jsonl", str(tmp_path / "secret.jsonl"), "../*"):
        (place / "README.md").write_text(f"---\nconfigs:\n- data_files:\n  - split: test\n    path: {path!r}\n---\n")
        try:
            assert names_of(place, TEST) == ["test.jsonl"]
        except ValueError as error:
            assert "has an invalid path" in str(error)  # noqa: PT017


def test_links_are_followed_to_files_and_not_around_in_circles(folder, tmp_path):
    place = folder("blobs/abc")
    (place / "set/data").mkdir(parents=True)
    (place / "set/data/test-00000-of-00001.parquet").symlink_to(place / "blobs/abc")  # as the hub's cache has it
    (place / "set/data/train-00000-of-00001.parquet").symlink_to(place / "gone")
    (place / "set/again").symlink_to(place / "set")
    assert names_of(place / "set", TEST) == ["data/test-00000-of-00001.parquet"]


def test_a_folder_without_data_is_said(folder):
    with pytest.raises(FileNotFoundError, match=r"expected files of owner/Set \(\.parquet, .*found none"):
        files_of_split(folder("notes.txt"), TEST)


def test_a_snapshot_of_the_hub_does_not_put_held_out_rows_into_training(tmp_path):
    """Each file of the set took every file of its folder, MATH-500's own test rows among those to train on."""
    rows = {
        "train": [{"problem": "Train?", "solution": "$\\boxed{1}$"}],
        "test": [{"problem": "Test?", "solution": "$\\boxed{2}$"}],
    }
    for split, given in rows.items():
        write_rows(tmp_path / f"sets/MATH-lighteval/data/{split}-00000-of-00001.parquet", given)
    (file,) = prepare(["math"], tmp_path / "out", local=tmp_path / "sets")
    assert load_prompts(file.path).ground_truths == ("1",)
    assert list(file.read) == ["MATH-lighteval/data/train-00000-of-00001.parquet"]
    (file,) = prepare(["math"], tmp_path / "out", local=tmp_path / "sets", splits={"math": "test"})
    assert (load_prompts(file.path).ground_truths, file.reused) == (("2",), False)


def test_both_splits_of_a_set_come_from_one_folder(tmp_path):
    for name in GSM8K:
        write_rows(tmp_path / f"sets/gsm8k/{name}", [{"question": f"{name}?", "answer": "#### 1"}])
    train, test = prepare(["gsm8k"], tmp_path / "out", local=tmp_path / "sets")
    assert [list(file.read) for file in (train, test)] == [[f"gsm8k/{GSM8K[0]}"], [f"gsm8k/{GSM8K[1]}"]]


@pytest.mark.parametrize(
    ("splits", "local", "says"),
    [({"math": "test"}, True, "--split names 'math', but this command does not prepare it; name one of gsm8k, gsm8k_test"),
     ({"gsm8k_train": "test"}, True, r"gsm8k_train.jsonl is one file, without splits to choose from"),
     ({"gsm8k": "test"}, False, "add --from-local FOLDER")],
)  # fmt: skip
def test_a_choice_that_would_do_nothing_is_refused(tmp_path, splits, local, says):
    (tmp_path / "gsm8k_train.jsonl").touch()
    with pytest.raises(ValueError, match=says):
        prepare(["gsm8k"], tmp_path / "out", local=tmp_path if local else None, splits=splits)
