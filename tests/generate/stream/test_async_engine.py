"""The asynchronous trainer: staleness, stopping and resuming, faults."""

import json
import os
import signal
from dataclasses import replace

import pytest

from rollalloc import Limit, recipes
from rollalloc.models.settings import Sampling, Streaming
from rollalloc.recipes.streaming import streamed
from rollalloc.train.train import Stopped
from tiny_policy import lines_of, resumed_is_unbroken

STREAMS = {"engine": "async", "streaming": Streaming(overlap=False)}
AHEAD = replace(recipes.grpo(4, 4), max_staleness=1)
FEW = Sampling(8, max_rows=6)  # slots for less than a batch, so that rollouts straddle updates


def run(trainer):
    """The lines of a run's batches."""
    lines = []
    trainer.listener = lines.append
    trainer.run()
    return [line for line in lines if line["kind"] == "batch"]


def settled(trainer):
    """Nothing is lost: every rollout paid is accounted for or in flight, and payloads are those the core holds."""
    accounts = trainer.allocator.accounts()
    assert sum(accounts.values()) == trainer.allocator.paid
    held = {done.rollout for group in trainer.allocator._run.flight.groups.values() for done in group.done}
    trainer.engine.release(trainer.allocator.ask(capacity=0).release)
    assert set(trainer.engine.generations) == held


def test_what_comes_next_is_generated_while_a_batch_is_trained(trainer_of):
    trainer = trainer_of(AHEAD, max_batches=6, sampling=FEW, **STREAMS)
    lines = run(trainer)
    assert max(line["staleness_max"] for line in lines) == 1
    assert {line["rows"] for line in lines} == {16}
    assert sum(line["streaming"]["straddled"] for line in lines) > 0
    settled(trainer)


def test_commits_go_out_when_the_pilots_decide(trainer_of):
    recipe = recipes.pilot_commit(
        2, 2, 2, 8, promote="oldest"
    )  # "top_variance" waits for all pilots to choose among them
    trainer = trainer_of(recipe, max_batches=3, sampling=Sampling(20), **STREAMS)
    beside, submit = [], trainer.engine.submit

    def submitting(orders):
        """Pilots that still run where commits begin."""
        if any(order.stage == 1 for order in orders):
            stages = [trainer.engine._order_of[rollout].stage for rollout in trainer.engine._running]
            beside.append(stages.count(0))
        submit(orders)

    trainer.engine.submit = submitting
    run(trainer)
    assert max(beside) > 0
    settled(trainer)


def test_versions_are_logged(trainer_of, tmp_path):
    trainer = trainer_of(AHEAD, max_batches=5, sampling=FEW, folder=tmp_path / "run", log_rollouts=True, **STREAMS)
    run(trainer)
    lines = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    straddled = [line for line in lines if "versions" in line]
    assert straddled
    for line in straddled:
        assert sum(count for _, count in line["versions"]) == line["tokens"]
        assert line["version"] == line["versions"][0][0] < line["versions"][-1][0]


@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_that_is_asked_to_stop_goes_on_from_what_was_in_flight(trainer_of, tmp_path, overlap):
    made = {"engine": "async", "streaming": Streaming(overlap=overlap), "sampling": FEW, "folder": tmp_path / "run"}
    trainer = trainer_of(AHEAD, max_batches=6, **made)
    batches = []

    def listening(line):
        batches.append(line)
        if len(batches) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer.listener = listening
    with pytest.raises(Stopped):
        trainer.run()
    in_flight = {rollout for order in trainer.allocator.outstanding().generate for rollout in order.rollouts}
    assert in_flight
    resumed = trainer_of(AHEAD, max_batches=6, **made)
    assert resumed.resume() == 3
    returned, poll = set(), resumed.engine.poll

    def polling(*, wait=True):
        results = poll(wait=wait)
        returned.update(result.rollout for result in results)
        return results

    resumed.engine.poll = polling
    resumed.run()
    assert in_flight <= returned
    assert resumed.counters.batches == 6
    settled(resumed)


RESUMED = {
    "grpo": recipes.grpo(4, 4),
    "reinforce": recipes.reinforce(8, replay=4),
    "dapo": recipes.dapo(4, 4, 8, surplus="carry"),
    "pilot_commit": recipes.pilot_commit(4, 2, 6, 12),
    "darts": recipes.darts(4, 3, 1, tail="sampled"),  # stops rollouts that run
    "limited": recipes.raft(24).replace(limit=Limit(share=0.2, every=2, last=16)),
}
IN_TURN = {"sampling": Sampling(8, max_rows=20), "learning_rate": 0.02, "checkpoint_every": 1}


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.e2e] * (each not in ("grpo", "darts"))) for each in RESUMED]
)
def test_in_one_process_a_killed_run_is_the_unbroken_one_whatever_is_in_flight(trainer_of, tmp_path, name, staleness):
    recipe = streamed(RESUMED[name], staleness=staleness)

    def run_of(folder, **changes):
        return trainer_of(recipe, folder=folder, max_batches=5, **STREAMS, **IN_TURN, **changes)

    resumed_is_unbroken(run_of, tmp_path, 3)
    straddled = sum(line["streaming"]["straddled"] for line in lines_of(tmp_path / "unbroken") if "streaming" in line)
    assert (straddled > 0) == (staleness > 0)


def test_forward_passes_of_another_size_are_refused_where_rollouts_go_on_between_them(trainer_of, tmp_path):
    trainer_of(AHEAD, max_batches=2, folder=tmp_path, **STREAMS).run()
    with pytest.raises(ValueError, match="tokens_per_forward: saved 8192, given 64"):
        trainer_of(AHEAD, max_batches=4, folder=tmp_path, tokens_per_forward=64, **STREAMS).resume()


def test_the_synchronous_engine_does_not_resume_an_asynchronous_run(trainer_of, tmp_path):
    trainer_of(AHEAD, max_batches=2, folder=tmp_path / "run", **STREAMS).run()
    with pytest.raises(ValueError, match="engine"):
        trainer_of(AHEAD, max_batches=4, folder=tmp_path / "run").resume()


def test_a_generator_that_is_killed_costs_nothing_but_time(trainer_of, forked_generators):
    trainer = trainer_of(AHEAD, max_batches=6, sampling=FEW, engine="async")
    lines = []

    def listening(line):
        if line["kind"] == "batch":
            lines.append(line)
            if len(lines) == 2:
                os.kill(trainer.engine._backend._spawned.process.pid, signal.SIGKILL)

    trainer.listener = listening
    trainer.run()
    assert trainer.counters.batches == 6
    assert lines[-1]["streaming"]["restarts"] == 1
    settled(trainer)
