"""Faults of the reward while a run goes on: late, hanging, dying, flooding, always failing.

Those of the disk and of the process itself are in test_store_checkpoints.py.
"""

import json
import os
import random
import resource
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from rollalloc import recipes
from rollalloc.core.events import NoScores
from rollalloc.models import checkpoint
from rollalloc.processes.stopping import Stopped
from rollalloc.rewards.scorers import InlineScorer, WorkerScorer
from rollalloc.train.evaluation import HeldOut
from tiny_policy import RECIPES, checkpoints, names_an_image, untimed, weights

REWARDS = """
import os, sys, time

def right(solution_str):
    return float(solution_str.startswith("a"))

def hangs_on_held_out(data_source, solution_str, ground_truth, extra_info):
    time.sleep(3600 * (extra_info["index"] < 6))
    return right(solution_str)

def dies(data_source, solution_str, ground_truth, extra_info):
    if extra_info["index"] == 0:
        os._exit(9)
    return right(solution_str)

def floods(data_source, solution_str, ground_truth, extra_info):
    line = "x" * (1 << 20)
    for _ in range(20):
        print(line)
        print(line, file=sys.stderr)
    if extra_info["index"] == 0:
        raise ValueError(line)
    return {"score": right(solution_str), "text": line}
"""


@pytest.fixture
def reward(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    return lambda name: f"{tmp_path / 'rewards.py'}:{name}"


@pytest.fixture
def run_of(trainer_of, prompts_of):
    """(folder, **changes) → a trainer of 5 batches, evaluated by samples."""

    def made(folder, recipe=RECIPES["pilot_commit"], **changes):
        settings = {"max_batches": 5, "heldout": HeldOut(prompts_of(6)), "eval_every": 40}
        return trainer_of(recipe, folder=folder, **settings | changes)

    return made


# Scores that come late


class Late(InlineScorer):
    """Each answer comes after a random while, so that later ones overtake earlier ones."""

    def submit(self, samples):
        def answer():
            time.sleep(random.random() / 100)
            return self.score(samples)

        return POOL.submit(answer)


POOL = ThreadPoolExecutor(8)


@pytest.mark.parametrize("name", ["grpo", "dapo_carry", "pilot_commit", "darts_stopped"])
def test_how_long_scores_take_changes_nothing(run_of, tmp_path, name):
    ended = []
    for folder, scorer in (("at once", InlineScorer), ("late", Late)):
        trainer = run_of(
            tmp_path / folder, RECIPES[name], scorer=scorer(names_an_image), log_rollouts=True, max_batches=3
        )
        trainer.run()
        ended.append(weights(trainer))
    assert torch.equal(*ended)
    assert untimed(tmp_path / "at once") == untimed(tmp_path / "late")
    logs = [(tmp_path / folder / "rollouts.jsonl").read_text() for folder in ("at once", "late")]
    assert logs[0] == logs[1]


def test_rollouts_are_scored_while_others_are_generated(run_of, tmp_path):
    """The first to end is answered only when others have been submitted: who waited for it would wait in vain."""
    first: list[Future] = []

    class Held(InlineScorer):
        def submit(self, samples):
            answer = super().submit(samples)
            if not first:
                first.extend((Future(), answer))
                return first[0]
            if not first[0].done():
                first[0].set_result(first[1].result())
            return answer

    in_vain = threading.Timer(30, lambda: first[0].set_exception(AssertionError("waited for the first")))
    in_vain.start()
    run_of(tmp_path, scorer=Held(names_an_image), max_batches=1, heldout=None).run()
    in_vain.cancel()
    assert first[0].done()


# SIGTERM while an evaluation hangs


class Hanging(InlineScorer):
    """Never answers the `hangs`-th evaluation of a run; SIGTERM comes while the run waits for it."""

    hangs = 1

    def submit(self, samples):
        if samples and samples[0].name == "test/0#0" and len(samples) == 24:
            Hanging.hangs -= 1
            if not Hanging.hangs:
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
                return Future()
        return super().submit(samples)


@pytest.mark.parametrize("checkpoint_every", [None, 1])
@pytest.mark.parametrize("hangs", [1, 3])
def test_sigterm_in_a_hanging_evaluation_saves_and_leaves(run_of, tmp_path, hangs, checkpoint_every):
    unbroken = run_of(tmp_path / "a")
    unbroken.run()
    Hanging.hangs = hangs
    with pytest.raises(Stopped, match=r"stopped by SIGTERM in an evaluation after batch \d; a checkpoint is in"):
        run_of(tmp_path / "b", scorer=Hanging(names_an_image), checkpoint_every=checkpoint_every).run()
    assert Hanging.hangs == 0
    assert checkpoint.newest(tmp_path / "b") is not None
    resumed = run_of(tmp_path / "b")
    resumed.resume()
    resumed.run()
    assert untimed(tmp_path / "b") == untimed(tmp_path / "a")
    assert torch.equal(weights(resumed), weights(unbroken))


def test_a_batch_of_prompts_that_are_gone_is_not_trained(run_of, tmp_path):
    Hanging.hangs = 2  # the evaluation before an update, so that a batch waits for it
    with pytest.raises(Stopped):
        run_of(tmp_path, scorer=Hanging(names_an_image)).run()
    with pytest.raises(
        ValueError, match="1 new, 40 kept by key, and a batch of the old prompts is still to be trained"
    ):
        run_of(tmp_path, prompts=41).resume(accept_data=True)


def test_a_run_that_was_barren_goes_on_with_other_prompts(trainer_of, tmp_path):
    barren = trainer_of(recipes.grpo(8, 2), folder=tmp_path, reward=lambda **_: 0.0)
    assert barren.run().startswith("barren")
    batches = untimed(tmp_path)[-2]["batch"]
    more = trainer_of(recipes.grpo(8, 2), folder=tmp_path, prompts=41, max_batches=batches + 2)
    assert more.resume(accept_data=True) == batches
    assert more.run() == f"max_batches: {batches + 2} batches are trained"


# Workers that die, flood, or never score


def test_a_reward_that_never_scores_ends_the_run_early_and_says_why(run_of, tmp_path):
    def broken(**_):
        raise ModuleNotFoundError("No module named 'sympy'")

    trainer = run_of(tmp_path, recipes.grpo(4, 2), reward=broken, prompts=1000, max_batches=None, heldout=None)
    with pytest.raises(NoScores, match=r"^failed: the last 64 prompts tried gave no score") as caught:
        trainer.run()
    assert (
        "mostly because: ModuleNotFoundError: No module named 'sympy'. Nothing after the newest checkpoint is saved"
        in str(caught.value)
    )
    last = untimed(tmp_path)[-1]
    assert (last["kind"], last["rollouts_paid"]) == ("failed", 128)
    assert not (tmp_path / "model").exists()
    assert checkpoints(tmp_path) == []


def test_what_the_scorer_raises_ends_the_run(run_of, tmp_path):
    class Broken(InlineScorer):
        def submit(self, samples):
            future = Future()
            future.set_exception(RuntimeError("reward 'x' could not be loaded in a worker"))
            return future

    with pytest.raises(RuntimeError, match="could not be loaded"):
        run_of(tmp_path, scorer=Broken(names_an_image), heldout=None).run()


@pytest.mark.e2e
def test_sigterm_does_not_wait_for_workers_that_hang(run_of, reward, tmp_path):
    class Stopping(WorkerScorer):
        def submit(self, samples):
            threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
            return super().submit(samples)

    with (
        Stopping(reward("hangs_on_held_out"), limit_s=600) as scorer,
        pytest.raises(Stopped, match="in an evaluation after batch 0"),
    ):
        run_of(tmp_path / "run", scorer=scorer).run()
    assert checkpoint.newest(tmp_path / "run") == 0


@pytest.mark.e2e
def test_a_reward_that_kills_its_worker_costs_its_prompt_only(run_of, reward, tmp_path):
    with WorkerScorer(reward("dies")) as scorer:
        trainer = run_of(tmp_path / "run", recipes.grpo(2, 2), scorer=scorer, prompts=4, max_batches=12, heldout=None)
        trainer.run()
    last = untimed(tmp_path / "run")[-1]
    assert last["unscored"] == {"worker died (exit code 9)": 6}  # three visits of two rollouts, then no more
    assert last["accounts"]["failed"] == 6
    assert (last["quarantined"], last["quarantined_keys"]) == (1, ["test/0"])
    report = json.loads((tmp_path / "run/rewards.json").read_text())
    assert report["quarantined"] == ["test/0"]
    assert {lost["name"].partition("#")[0] for lost in report["lost"]} == {"test/0"}


@pytest.mark.e2e
def test_a_reward_that_prints_without_end_costs_the_run_no_memory(run_of, reward, tmp_path, capfd):
    with WorkerScorer(reward("floods")) as scorer:
        trainer = run_of(tmp_path / "run", recipes.grpo(2, 4), scorer=scorer, prompts=4, max_batches=2, heldout=None)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        trainer.run()
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    written_mib = 40 * untimed(tmp_path / "run")[-1]["rollouts_paid"]
    assert written_mib >= 640
    assert grown_mib < written_mib / 4
    assert "xxxx" not in "".join(capfd.readouterr())
    assert (tmp_path / "run/metrics.jsonl").stat().st_size < 100_000
