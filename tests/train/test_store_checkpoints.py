"""Checkpoints: a run that is stopped, killed or out of disk goes on as if nothing had been; what is not whole is refused."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from rollalloc import recipes
from rollalloc.models import checkpoint
from rollalloc.models.settings import Clip, Loss
from rollalloc.processes.stopping import ASKING, Stopped
from rollalloc.tasks.tiny import EOS_ID
from rollalloc.train.config import Schedule
from rollalloc.train.evaluation import HeldOut
from tiny_policy import RECIPES, checkpoints, killed_after, make_prompts, resumed_is_unbroken, untimed, weights

FILES = (
    "manifest.json",
    "state.json",
    "weights.safetensors",
    "optimizer.safetensors",
    "payloads.safetensors",
    "trained.safetensors",
)
HERE = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def run_of(trainer_of, prompts_of):
    """(folder, **changes) → a trainer of 6 batches with a checkpoint after each second."""

    def made(folder, recipe=RECIPES["pilot_commit"], **changes):
        settings = {"max_batches": 6, "checkpoint_every": 2, "heldout": HeldOut(prompts_of(6)), "eval_every": 30}
        settings |= {"averaging": 20}  # of batches of 16 rows, as GRPO's, the mean begins with the third
        return trainer_of(recipe, folder=folder, **settings | changes)

    return made


@pytest.fixture(scope="module")
def made_once(run_of, tmp_path_factory):
    """The folder of `whole` and of `broken`."""
    folder, threads = tmp_path_factory.mktemp("runs"), torch.get_num_threads()
    torch.set_num_threads(1)
    run_of(folder / "whole").run()
    with pytest.raises(KeyboardInterrupt):
        run_of(folder / "broken", listener=killed_after(5)).run()
    torch.set_num_threads(threads)
    assert checkpoints(folder / "broken") == [2, 4]
    return folder


@pytest.fixture
def whole(made_once):
    """What an unbroken run wrote."""
    return untimed(made_once / "whole")


@pytest.fixture
def broken(made_once, tmp_path):
    """The folder of a run that broke in its fifth batch, with checkpoints after 2 and 4."""
    return shutil.copytree(made_once / "broken", tmp_path / "broken")


# Resumed is unbroken

RESUMED = {
    f"{name}, {steps}": {"recipe": RECIPES[name], "optimizer_steps_per_batch": steps, "schedule": Schedule(warmup=9)}
    for name in ("grpo", "dapo_carry", "pilot_commit", "darts", "racing")
    for steps in (1, 3)
}
RESUMED["target"] = {"heldout": HeldOut(make_prompts(8), ((9, EOS_ID),) * 8), "eval_every": 200, "target": 1e-6}
RESUMED["target"] |= {"max_batches": None, "checkpoint_every": 1}
RESUMED["barren"] = {"recipe": RECIPES["grpo"], "reward": lambda **_: 0.0, "heldout": None, "max_batches": None}
BREAKS = {"target": (3,), "barren": (41,)}  # others right after a checkpoint, and one batch later
IN_FAST = ("grpo, 1", "dapo_carry, 3", "pilot_commit, 1")  # the tier `e2e` has the others


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.e2e] * (each not in IN_FAST)) for each in RESUMED]
)
def test_a_resumed_run_is_the_unbroken_one(run_of, tmp_path, name):
    for breaks in BREAKS.get(name, (3, 4)):
        resumed_is_unbroken(run_of, tmp_path / str(breaks), breaks, **RESUMED[name])
        why = untimed(tmp_path / str(breaks) / "unbroken")[-1]["why"]
        assert why.startswith(name if name in ("target", "barren") else "max_batches")


def test_a_resumed_run_of_a_model_with_sliding_windows_is_the_unbroken_one(run_of, policy_of, tmp_path):
    def run(folder, **changes):
        return run_of(folder, policy=policy_of(family="gemma3"), max_batches=4, **changes)

    resumed_is_unbroken(run, tmp_path, 3)


def test_a_rate_that_falls_over_the_budget_survives_a_resume(run_of, tmp_path, caplog):
    changes = {"schedule": Schedule(shape="linear", floor=0.1), "learning_rate": 0.01, "max_batches": None}
    changes |= {"recipe": RECIPES["dapo_carry"], "max_rollouts": 150}
    resumed_is_unbroken(run_of, tmp_path, 4, **changes)
    assert "learning rate" not in caplog.text
    batches = [line for line in untimed(tmp_path / "broken") if line["kind"] == "batch"]
    paid, rates = [line["rollouts_paid"] for line in batches], [line["learning_rate"] for line in batches]
    assert len(rates) > 4
    assert rates == pytest.approx([0.01 * (0.1 + 0.9 * (1 - before / 150)) for before in (0, *paid[:-1])])
    larger = run_of(tmp_path / "broken", **changes | {"max_rollouts": 300})
    after = larger.resume(accept_recipe=True)
    now = paid[after - 1] / 300
    assert f"{100 * now:.0f}% of it is spent instead of {200 * now:.0f}%" in caplog.text
    before, since = (0.01 * (1 - 0.9 * spent) for spent in (2 * now, now))
    assert f"the rate changes from {before:.3g} to {since:.3g}" in caplog.text


def test_the_reference_and_the_schedule_survive_a_resume(run_of, policy_of, tmp_path):
    """The reference is not in the checkpoint: it is the policy that the resumed trainer was made with."""
    changes = {
        "loss": Loss(kl=0.5, aggregation="sequence_mean", clip=Clip(dual=3.0)),
        "schedule": Schedule(warmup=3, shape="cosine", steps=15, floor=0.2),
        "optimizer_steps_per_batch": 2,
        "learning_rate": 0.01,
    }
    resumed_is_unbroken(run_of, tmp_path, 4, **changes)
    assert max(line["kl"] for line in untimed(tmp_path / "broken") if line["kind"] == "batch") > 1e-3
    with pytest.raises(ValueError, match="reference"):
        run_of(tmp_path / "broken", policy=policy_of(seed=2), **changes).resume()


def test_a_batch_without_advantage_right_after_a_resume_still_moves_the_weights(run_of, tmp_path):
    """By the optimizer's momentum: a parameter without a gradient would be left out of the step."""

    def reward_until(calls):
        left = [calls]

        def reward(*, solution_str, **_):
            left[0] -= 1
            return float(solution_str.startswith("a")) if left[0] >= 0 else 0.0

        return reward

    given = {"recipe": RECIPES["grpo"], "heldout": None, "checkpoint_every": 1, "max_batches": 4}
    unbroken = run_of(tmp_path / "a", reward=reward_until(32), **given)
    unbroken.run()
    with pytest.raises(KeyboardInterrupt):
        run_of(tmp_path / "b", reward=reward_until(32), listener=killed_after(3), **given).run()
    resumed = run_of(tmp_path / "b", reward=reward_until(0), **given)
    assert resumed.resume() == 2
    before = weights(resumed)
    resumed.run()
    assert not torch.equal(weights(resumed), before)
    assert torch.equal(weights(resumed), weights(unbroken))


def test_a_finished_run_goes_on_with_more_batches(run_of, whole, tmp_path):
    run_of(tmp_path / "b", max_batches=3, checkpoint_every=None).run()
    assert checkpoints(tmp_path / "b") == [3]
    longer = run_of(tmp_path / "b", max_batches=6)
    longer.resume()
    longer.run()
    assert untimed(tmp_path / "b") == whole


def test_a_run_whose_budget_is_spent_goes_on_under_a_larger_one(run_of, tmp_path, caplog):
    run_of(tmp_path, RECIPES["grpo"], max_rollouts=48, max_batches=None).run()
    larger = run_of(tmp_path, RECIPES["grpo"], max_rollouts=96, max_batches=None)
    with pytest.raises(ValueError, match=r"another budget, .*: saved 48, given 96; .* --accept-recipe, continues with"):
        larger.resume()
    larger.resume(accept_recipe=True)
    assert "recipe.budget.run_rollouts: saved 48, given 96" in caplog.text
    assert larger.run().startswith("the budget of ")
    assert untimed(tmp_path)[-1]["rollouts_paid"] == 96


# Which are kept


@pytest.mark.parametrize(("keep", "left"), [(1, [6]), (2, [5, 6]), (4, [3, 4, 5, 6])])
def test_the_newest_checkpoints_are_kept(run_of, tmp_path, keep, left):
    run_of(tmp_path, checkpoint_every=1, keep_checkpoints=keep).run()
    assert checkpoints(tmp_path) == left
    assert sorted(path.name for path in (tmp_path / "checkpoints/6").iterdir()) == sorted(FILES)


# CorruptCheckpoint and foreign checkpoints


def tear(file, how):
    if how == "missing":
        file.unlink()
    elif how == "short":
        os.truncate(file, file.stat().st_size // 2)
    else:
        changed = bytearray(file.read_bytes())
        changed[-1] ^= 1
        file.write_bytes(changed)


@pytest.mark.parametrize(
    ("file", "how"),
    [
        *((file, "changed") for file in FILES),
        *((file, how) for file in ("manifest.json", "weights.safetensors") for how in ("missing", "short")),
    ],
)
def test_a_torn_checkpoint_is_named_and_the_one_before_is_taken(run_of, broken, whole, caplog, file, how):
    if (file, how) == ("manifest.json", "changed"):
        (broken / "checkpoints/4/manifest.json").write_text("{")
    else:
        tear(broken / "checkpoints/4" / file, how)
    trainer = run_of(broken)
    assert trainer.resume() == 2
    assert f"4 is corrupt: {file} " in caplog.text
    trainer.run()
    assert untimed(broken) == whole
    assert checkpoints(broken) == [4, 6]


def test_a_run_whose_checkpoints_are_all_corrupt_is_not_resumed(run_of, broken):
    for number in (2, 4):
        tear(broken / f"checkpoints/{number}/state.json", "short")
    with pytest.raises(checkpoint.CorruptCheckpoint, match=r"none of the checkpoints \[4, 2\]"):
        run_of(broken).resume()


def test_without_a_checkpoint_there_is_nothing_to_resume(run_of, tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint to resume from"):
        run_of(tmp_path).resume()


@pytest.mark.parametrize("form", [{}, {"files": "in another form"}])
def test_a_checkpoint_of_another_schema_is_refused(run_of, broken, form):
    manifest = broken / "checkpoints/4/manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"schema": 99} | form))
    with pytest.raises(ValueError, match="schema 4, got 99"):
        run_of(broken).resume()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, r"run\.config\.seed: saved 0, given 1"),
        ({"learning_rate": 2e-3}, r"run\.config\.learning_rate"),
        ({"schedule": Schedule(warmup=1)}, r"run\.config\.schedule\.warmup: saved 0, given 1"),
        ({"loss": Loss(aggregation="dr_grpo")}, r"run\.config\.loss\.aggregation"),
        ({"loss": Loss(clip=Clip(dual=10.0))}, r"run\.config\.loss\.clip\.dual"),
        ({"loss": Loss(kl=0.1)}, r"run\.config\.loss\.kl"),
        ({"eval_every": 31}, r"run\.config\.eval_every"),
        ({"averaging": 0}, r"run\.config\.averaging: saved 20, given 0"),
        ({"prompts": 41}, r"run\.prompts"),
        ({"heldout": None}, r"run\.heldout"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_name(run_of, broken, changes, named):
    before = untimed(broken)
    trainer = run_of(broken, **changes)
    start = weights(trainer)
    with pytest.raises(ValueError, match=named):
        trainer.resume()
    assert torch.equal(weights(trainer), start)
    assert untimed(broken) == before


def test_a_checkpoint_of_another_kind_of_trainer_is_refused(run_of, broken):
    checkpoint.save(broken, 5, {"identity": {}, "tinker": {}}, {}, keep=9)
    with pytest.raises(
        ValueError, match=r"after batch 5 in .* is not of this kind of trainer: expected .* got .*tinker"
    ):
        run_of(broken).resume()


def test_a_changed_recipe_is_refused_or_accepted(run_of, broken, caplog):
    other = recipes.pilot_commit(5, 2, 6, 12)
    with pytest.raises(ValueError, match=r"recipe\.groups: saved 4, given 5"):
        run_of(broken, other).resume()
    trainer = run_of(broken, other)
    assert trainer.resume(accept_recipe=True) == 4
    assert "recipe.groups: saved 4, given 5" in caplog.text
    trainer.run()
    batches = [line for line in untimed(broken) if line["kind"] == "batch"]
    assert [line["groups"] for line in batches] == [4, 4, 4, 4, 5, 5]


def refused_by_name(run_of, folder, match):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=match):
        run_of(folder, log_rollouts=True).resume()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_log_that_was_cut_is_named_and_an_earlier_checkpoint_may_be_gone_on_from(run_of, tmp_path):
    for folder in ("whole", "cut"):
        run_of(tmp_path / folder, log_rollouts=True, keep_checkpoints=3).run()
    cut = tmp_path / "cut"
    log = cut / "rollouts.jsonl"
    log.write_bytes(log.read_bytes()[:-1])
    refused_by_name(
        run_of, cut, r"rollouts\.jsonl has [\d,]+ bytes, but had .* remove .*checkpoints/6 to go on from an ear"
    )
    shutil.rmtree(cut / "checkpoints/6")
    again = run_of(cut, log_rollouts=True, keep_checkpoints=3)
    assert again.resume() == 4
    again.run()
    assert untimed(cut) == untimed(tmp_path / "whole")
    for name in ("rollouts.jsonl", "decisions.jsonl"):
        assert (cut / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


# Full disks


@pytest.mark.parametrize("call", [0, 3, 6])
def test_a_full_disk_leaves_the_one_before_and_says_so(run_of, broken, whole, monkeypatch, call):
    trainer = run_of(broken)
    trainer.resume()
    fsync, calls = os.fsync, []

    def full(opened):
        calls.append(opened)
        if len(calls) > call:
            raise OSError(28, "No space left on device")
        fsync(opened)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"No space left|after batch 6 could not be written.*newest is .* batch 4"):
            trainer.run()
    assert [path.name for path in (broken / "checkpoints").glob(".*")] == []
    assert checkpoints(broken) == [2, 4]
    again = run_of(broken)
    assert again.resume() == 4
    again.run()
    assert untimed(broken) == whole


# Asked to stop


@pytest.mark.parametrize("by", ASKING)
def test_a_run_that_is_asked_to_stop_saves_and_leaves(run_of, whole, tmp_path, by):
    def listen(line):
        if line["kind"] == "batch" and line["batch"] == 3:
            os.kill(os.getpid(), by)

    before = {each: signal.getsignal(each) for each in ASKING}
    with pytest.raises(Stopped, match=f"stopped by {by.name} after batch 3; a checkpoint is in") as caught:
        run_of(tmp_path / "b", checkpoint_every=None, listener=listen).run()
    assert caught.value.by == by
    assert {each: signal.getsignal(each) for each in ASKING} == before
    assert checkpoints(tmp_path / "b") == [3]
    assert "end" not in {line["kind"] for line in untimed(tmp_path / "b")}
    resumed = run_of(tmp_path / "b")
    resumed.resume()
    resumed.run()
    assert untimed(tmp_path / "b") == whole


def test_checkpoints_by_time_change_nothing(run_of, tmp_path, monkeypatch):
    """A clock that goes two minutes a batch; the other run has no checkpoint before its end."""
    now = [0.0]
    monkeypatch.setattr("rollalloc.train.train.time.monotonic", lambda: now[0])
    saved = []

    def listen(line):
        now[0] += 120 * (line["kind"] == "batch")
        saved.append(checkpoint.newest(tmp_path / "often"))

    often = run_of(tmp_path / "often", checkpoint_every=None, checkpoint_minutes=4.0, listener=listen)
    often.run()
    assert list(dict.fromkeys(saved)) == [None, 2, 4, 6]
    never = run_of(tmp_path / "never", checkpoint_every=None, checkpoint_minutes=None)
    never.run()
    assert checkpoints(tmp_path / "never") == [6]
    assert untimed(tmp_path / "often") == untimed(tmp_path / "never")
    assert torch.equal(weights(often), weights(never))


# kill -9


@pytest.mark.parametrize("corrupt", [False, True])
def test_a_save_that_ends_at_any_of_its_steps_leaves_a_whole_checkpoint(tmp_path, monkeypatch, corrupt):
    """Every sync, rename and removal in turn is the last thing that happens; what is done then is not undone."""

    def write(batches):
        tensors = {"weights": {"w": torch.full((3,), float(batches))}}
        checkpoint.save(tmp_path / "run", batches, {"batches": batches}, tensors, keep=2)

    def dying(do, left):
        def called(*arguments, **options):
            left[0] -= 1
            if left[0] < 0:
                if do.__name__ == "save_file":  # which writes beside the file and renames
                    (arguments[1].parent / ".tmpESNrY6").touch()
                raise KeyboardInterrupt
            return do(*arguments, **options)

        return called

    steps, found = 0, set()
    while True:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        (tmp_path / "run").mkdir()
        for batches in (1, 2, 3) if corrupt else (1, 2):
            write(batches)
        if corrupt:
            tear(tmp_path / "run/checkpoints/3/state.json", "short")
        left = [steps]
        with monkeypatch.context() as patched:
            steps_of = ((os, "fsync"), (Path, "rename"), (Path, "unlink"), (Path, "rmdir"), (checkpoint, "save_file"))
            for owner, name in steps_of:
                patched.setattr(owner, name, dying(getattr(owner, name), left))
            try:
                write(3)
            except KeyboardInterrupt:
                pass
            else:
                break
        saved = checkpoint.load_newest(tmp_path / "run")
        assert saved.batches == saved.state["batches"] == float(saved.tensors["weights"]["w"][0]) in (2, 3)
        found.add(saved.batches)
        write(4)  # and the next one clears away what was left
        assert checkpoints(tmp_path / "run")[-1] == 4
        assert len(checkpoints(tmp_path / "run")) == 2
        assert not list((tmp_path / "run/checkpoints").glob(".unfinished-*"))
        steps += 1
    assert steps > 8
    assert found == {2, 3}


CHILD = """
import os, signal, sys, time, torch, traceback
from pathlib import Path
sys.path.insert(0, {here!r})
from tiny_policy import *
from rollalloc import recipes
from rollalloc.models import checkpoint
from rollalloc.train.evaluation import HeldOut
torch.set_num_threads(1)

def trainer(folder):
    settings = replace(SETTINGS, max_batches=12, checkpoint_every=1, eval_every=60)
    return Trainer(make_policy(), recipes.pilot_commit(4, 2, 6, 12), make_prompts(40), InlineScorer(names_an_image),
                   settings, heldout=HeldOut(make_prompts(6)), folder=folder)

for line in sys.stdin:  # a folder and seconds; each run in a process of its own that has its imports done
    name, seconds = line.split()
    folder = Path(name)
    if (child := os.fork()) == 0:
        try:
            made = trainer(folder)
            if checkpoint.newest(folder) is not None:
                made.resume()
            made.run(overwrite=True)  # of a run that was killed before its first checkpoint
        except BaseException:  # and at once: while the interpreter ends, the kill comes, and the error would pass for it
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if seconds != "never":
        time.sleep(float(seconds))
        os.kill(child, signal.SIGKILL)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.mark.e2e
def test_a_run_killed_again_and_again_equals_an_unbroken_one(tmp_path):
    """A run is killed again and again, and is what an unbroken one is in the end; one that ends too soon is begun anew."""
    unbroken, killed, draw, kills = tmp_path / "unbroken", tmp_path / "killed", random.Random(0), 0
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", CHILD.format(here=str(HERE))]
    runner = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes)

    def go(folder, kill_after="never"):
        """Start or resume the run in this folder; the signal that ended it, 0 where it ended by itself."""
        runner.stdin.write(f"{folder} {kill_after}\n")
        runner.stdin.flush()
        return int(runner.stdout.readline())

    try:
        assert go(tmp_path / "first") == 0  # and its imports are done
        started = time.monotonic()
        assert go(unbroken) == 0
        whole = time.monotonic() - started
        while kills < 5:
            shutil.rmtree(killed, ignore_errors=True)
            while go(killed, kill_after=draw.uniform(0, whole / 2)) == signal.SIGKILL:
                kills += 1
            assert go(killed) == 0  # whatever the last moment was, it can be resumed and ends
            assert untimed(killed) == untimed(unbroken)
            for file in ("model/model.safetensors", "allocator.json"):
                assert (killed / file).read_bytes() == (unbroken / file).read_bytes()
            assert checkpoints(killed)[-1] == checkpoints(unbroken)[-1]
    finally:
        runner.stdin.close()
        runner.wait(60)


def test_a_run_that_is_not_resumed_starts_afresh_where_that_is_wished(run_of, broken, tmp_path):
    before = {path: path.read_bytes() for path in broken.rglob("*") if path.is_file() and path.suffix != ".lock"}
    with pytest.raises(
        FileExistsError, match="a run that has not ended, with a checkpoint after batch 4; go on with it"
    ):
        run_of(broken, max_batches=3, checkpoint_every=None).run()
    assert {path: path.read_bytes() for path in before} == before
    run_of(broken, max_batches=3, checkpoint_every=None).run(overwrite=True)
    assert checkpoints(broken) == [3]
    assert untimed(broken)[-1]["why"].startswith("max_batches: 3")
