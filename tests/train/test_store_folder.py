"""A run's folder: what is not ours is never overwritten or removed, and one trainer at a time writes there."""

# pyright: reportOptionalMemberAccess=false

import shutil
import signal
import subprocess
import sys

import pytest
from safetensors import SafetensorError

from rollalloc import recipes
from rollalloc.files.claims import InUse, Lock
from rollalloc.train.store import RunFolder

GRPO = recipes.grpo(4, 4)


def contents(folder):
    """Path → bytes of every file, those of rollalloc's own bookkeeping aside."""
    files = (path for path in folder.rglob("*") if path.is_file() and ".rollalloc" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def finished(trainer_of, tmp_path):
    """The folder of a run that has ended."""
    trainer_of(GRPO, 64, folder=tmp_path / "run").run()
    return tmp_path / "run"


# What somebody else wrote


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "theirs",
    [
        "metrics.jsonl",
        "rollouts.jsonl",
        "decisions.jsonl",
        "rewards.json",
        "run.json",
        "allocator.json",
        "model/model.safetensors",
        "model/thesis.txt",
        "checkpoints/last.pt",
        "checkpoints/3/state.json",
        "checkpoints/.unfinished-1/notes.txt",
        ".unfinished-model/notes.txt",
        "thesis.txt",
        "checkpoint-500/trainer_state.json",  # TRL's
        ".git/HEAD",
    ],
)
def test_a_folder_with_files_of_the_users_own_is_refused_and_left_as_it_is(trainer_of, tmp_path, theirs, overwrite):
    (tmp_path / theirs).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / theirs).write_text("months of work")
    before = contents(tmp_path)
    said = f"holds {theirs.partition('/')[0]}, which was not written by rollalloc.* give a new or empty folder"
    with pytest.raises(FileExistsError, match=said):
        trainer_of(GRPO, 32, folder=tmp_path).run(overwrite=overwrite)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("theirs", ["model/README.md", "model/sub/card.md", "checkpoints/{newest}/notes.txt"])
def test_what_the_user_put_into_a_runs_folders_is_not_removed_with_them(trainer_of, finished, theirs):
    [newest] = [path.name for path in (finished / "checkpoints").iterdir()]
    theirs = theirs.format(newest=newest)
    (finished / theirs).parent.mkdir(exist_ok=True)
    (finished / theirs).write_text("mine")
    before = contents(finished)
    with pytest.raises(FileExistsError, match=theirs.rpartition("/")[2]):
        trainer_of(GRPO, 32, folder=finished).run(overwrite=True)
    assert contents(finished) == before
    shutil.move(finished / theirs, finished / "approx_kl")
    trainer_of(GRPO, 32, folder=finished).run(overwrite=True)
    assert (finished / "approx_kl").read_text() == "mine"


def test_a_model_that_the_user_puts_there_meanwhile_is_not_overwritten(trainer_of, tmp_path):
    def listen(line):
        if line["kind"] == "batch" and line["batch"] == 1:
            (tmp_path / "model").mkdir()
            (tmp_path / "model/config.json").write_text("mine")

    with pytest.raises(FileExistsError, match=r"model/config\.json"):
        trainer_of(GRPO, max_batches=2, folder=tmp_path, listener=listen).run()
    assert contents(tmp_path / "model") == {"config.json": b"mine"}
    (tmp_path / "model/config.json").unlink()
    again = trainer_of(GRPO, max_batches=2, folder=tmp_path)
    assert again.resume() == 2  # nothing was lost
    again.run()


@pytest.mark.parametrize(
    "damage", ["", "{}", "[]", '{"schema": 1, "claims": ["../precious"]}', '{"schema": 9, "claims": []}']
)
def test_a_manifest_that_is_damaged_claims_nothing(trainer_of, finished, damage):
    (finished.parent / "precious").write_text("mine")
    (finished / ".rollalloc/run-manifest.json").write_text(damage)
    before = contents(finished)
    with pytest.raises(ValueError, match="is not a manifest of rollalloc"):
        trainer_of(GRPO, 32, folder=finished).run(overwrite=True)
    assert contents(finished) == before
    assert (finished.parent / "precious").read_text() == "mine"


# Ours


def test_overwriting_removes_what_the_run_before_wrote(trainer_of, finished, tmp_path):
    trainer_of(recipes.dapo(4, 4, 8), 48, folder=finished).run(overwrite=True)
    trainer_of(recipes.dapo(4, 4, 8), 48, folder=tmp_path / "new").run()
    timed = ("metrics.jsonl", "rewards.json")
    old, new = ({name: held for name, held in contents(each).items() if name not in timed and "state.json" not in name
                 and "manifest" not in name} for each in (finished, tmp_path / "new"))  # fmt: skip
    assert old == new


# The lock


HOLDER = """
import sys, time, os
from pathlib import Path
from rollalloc.files.claims import Lock
with Lock(Path(sys.argv[1]), "run"):
    if sys.argv[2] == "fork" and os.fork() == 0:
        os.close(1)
        time.sleep(30)
        os._exit(0)
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("how", ["alone", "fork"])
def test_a_second_trainer_is_refused_and_a_stale_lock_is_none(trainer_of, tmp_path, monkeypatch, how):
    monkeypatch.setattr("rollalloc.files.claims.PATIENCE_S", 0.2)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path, how], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        for act in ("run", "resume"):
            with pytest.raises(InUse, match=f"is in use by process {holder.pid} on "):
                getattr(trainer_of(GRPO, 32, folder=tmp_path), act)()
        assert contents(tmp_path) == {}
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    trainer_of(GRPO, 32, folder=tmp_path).run()  # whatever the file says, and although a child of the killed one lives


def test_a_lock_is_free_once_its_run_is_over_however_it_ended(trainer_of, tmp_path):
    def fails(line):
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        trainer_of(GRPO, 32, folder=tmp_path, listener=fails).run()
    with pytest.raises(FileNotFoundError):
        trainer_of(GRPO, 32, folder=tmp_path).resume()
    with Lock(tmp_path, "run"):
        pass


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("rollalloc.files.claims.os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(PermissionError, match="cannot be created; give another folder"):
        RunFolder(tmp_path / "a" / "b").check()
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_with_a_file_of_the_users_is_kept_when_others_go(trainer_of, tmp_path):
    def listen(line):
        if line["kind"] == "batch" and line["batch"] == 2:
            (tmp_path / "checkpoints/1/notes.txt").write_text("mine")

    trainer_of(GRPO, max_batches=5, checkpoint_every=1, keep_checkpoints=1, folder=tmp_path, listener=listen).run()
    assert (tmp_path / "checkpoints/1/notes.txt").read_text() == "mine"
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["1", "5"]


def test_overwriting_that_is_killed_half_way_may_be_repeated(trainer_of, finished, monkeypatch):
    def killed(folder):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("rollalloc.models.checkpoint.remove_all", killed)
        with pytest.raises(KeyboardInterrupt):
            trainer_of(GRPO, 32, folder=finished).run(overwrite=True)
    assert not (finished / "metrics.jsonl").exists()
    with pytest.raises(FileExistsError, match="--overwrite"):
        trainer_of(GRPO, 32, folder=finished).run()
    trainer_of(GRPO, 32, folder=finished).run(overwrite=True)


def test_a_disk_that_is_full_when_the_model_is_saved_is_said_with_its_folder(trainer_of, tmp_path, monkeypatch):
    trainer = trainer_of(GRPO, 32, folder=tmp_path)

    def full(folder):
        folder.mkdir()
        (folder / "model.safetensors").write_text("half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patched:
        patched.setattr(type(trainer.model), "save", lambda _, folder: full(folder))
        with pytest.raises(OSError, match=r"No space left on device; free some space, then .* resume: '.*model'"):
            trainer.run()
    again = trainer_of(GRPO, 32, folder=tmp_path)
    again.resume()
    again.run()
    assert (tmp_path / "model/model.safetensors").stat().st_size > 100
    assert not (tmp_path / ".unfinished-model").exists()


def test_what_a_kill_left_half_written_goes_when_the_run_resumes(trainer_of, finished):
    for folder in (finished, finished / ".rollalloc"):
        (folder / ".partial-0123456789abcdef.json").write_text("half")
    again = trainer_of(GRPO, 64, folder=finished)
    again.resume()
    assert not list(finished.rglob(".partial-*"))


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_that_ended_between_check_and_lock_is_not_removed(trainer_of, tmp_path, overwrite):
    """Both found no folder. The other trainer made it, ran and let it go before this one took the lock."""
    place, lock = RunFolder(tmp_path / "run"), RunFolder.lock
    other: list[dict[str, bytes]] = []

    def late():
        if not other:
            trainer_of(GRPO, 32, folder=place.path).run()
            other.append(contents(place.path))
        lock(place)

    place.lock = late
    with place:
        if overwrite:
            place.begin(overwrite=True)
        else:
            with pytest.raises(FileExistsError, match="holds a run that has ended"):
                place.begin()
    assert (contents(place.path) == other[0]) is not overwrite
