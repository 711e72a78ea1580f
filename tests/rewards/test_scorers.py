"""Scoring in processes that hang, crash and flood, none of which reaches the parent."""

# pyright: reportAttributeAccessIssue=false

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path

import pytest

from rollalloc.rewards import _crew
from rollalloc.rewards.function import Sample, Scored, Unscored, load_reward
from rollalloc.rewards.scorers import InlineScorer, WorkerScorer

SAMPLES = Path(__file__).with_name("reward_samples.py")
BROKEN = Path(__file__).with_name("reward_broken.py")
GOOD = Scored(1.0, 1.0)
TIMED_OUT = Unscored("timed out after 1 s")


def samples(*completions, ground_truth="4"):
    return [Sample("test", completion, ground_truth, {"index": index}) for index, completion in enumerate(completions)]


def worker_scorer(name, workers=1, limit_s=10.0, **limits):
    return WorkerScorer(f"{SAMPLES}:{name}", workers=workers, limit_s=limit_s, **limits)


def is_running(process_id):
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or before it was read
        return False


def wait_until_gone(process_id):
    for _ in range(1000):
        if not is_running(process_id):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("name", ["equals_later", "echo"])
def test_workers_and_inline_agree(name):
    batch = samples("4", "5", "", "\ud800 lone", "a\0b", "é🙂", "x" * 300_000)
    with InlineScorer(load_reward(f"{SAMPLES}:{name}")) as inline, worker_scorer(name) as worker:
        assert worker.score(batch) == inline.score(batch)


def test_bad_samples_cost_nothing_but_themselves():
    batch = samples("fine", "hang", "fine", "exit", "raise", "spin", "abort", "none", "fine", "fine")
    with worker_scorer("obey", workers=2, limit_s=1.0) as scorer:
        assert scorer.score(batch) == [
            GOOD,
            TIMED_OUT,
            GOOD,
            Unscored("worker died (exit code 7)"),
            Unscored("KeyError: 'no such thing'"),
            TIMED_OUT,
            Unscored("worker died (exit code -6)"),
            Unscored("reward function returned None"),
            GOOD,
            GOOD,
        ]
        assert scorer.score(samples("fine")) == [GOOD]


def test_an_exception_is_believed_of_a_fresh_process_only():
    """Also after some samples have raised the same by themselves."""
    batch = samples(*["bad", "fine", "spoil", "fine", "fine", "bad"] * 4, "fine")
    with worker_scorer("spoil", workers=2) as scorer:
        outcomes = scorer.score(batch)
    assert outcomes == [Unscored("RuntimeError: bad") if each.completion == "bad" else GOOD for each in batch]


@pytest.mark.parametrize(
    ("completions", "processes"),
    [(["No answer"] * 200, 3), ([f"No answer {index}" for index in range(200)], 5)],
    ids=["the same words", "the same type"],
)
def test_what_fresh_processes_raise_again_and_again_costs_no_more_of_them(
    monkeypatch, tmp_path, completions, processes
):
    monkeypatch.setattr(_crew, "TRUSTED_TYPE", 4)
    note = tmp_path / "processes"
    with worker_scorer("raise_in") as scorer:
        outcomes = scorer.score(samples(*completions, ground_truth=str(note)))
    assert outcomes == [Unscored(f"No: {text}") for text in completions]
    assert len(set(note.read_text().split())) <= processes


def test_prints_and_long_results_stay_in_the_worker(capfd):
    with worker_scorer("obey") as scorer:
        assert scorer.score(samples("flood", "much", "fine")) == [GOOD, Scored(0.25, 0.25), GOOD]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (f"{BROKEN}:score", "RuntimeError: this module is broken on purpose"),
        ("no_such_module:score", "No module named 'no_such_module'"),
        (f"{SAMPLES}:equal", "did you mean equals"),
    ],
)
def test_a_reward_that_cannot_be_loaded_says_why(reward, message):
    with WorkerScorer(reward) as scorer, pytest.raises(RuntimeError, match="could not be loaded in a worker") as error:
        scorer.score(samples("4"))
    assert message in str(error.value)


def test_a_module_that_kills_its_worker_is_no_respawn_loop(tmp_path):
    (tmp_path / "deadly.py").write_text("import os; os._exit(3)")
    with (
        WorkerScorer(f"{tmp_path}/deadly.py:score") as scorer,
        pytest.raises(RuntimeError, match=r"died \(exit code 3\) while it started"),
    ):
        scorer.score(samples("4"))


def test_importing_does_not_count_against_the_limit(tmp_path):
    """Neither before the first sample, nor before a sample that is tried again."""
    (tmp_path / "slow.py").write_text(
        "import os, time; time.sleep(1.5)\n"
        "def score(solution_str, **rest): return os._exit(3) if solution_str == 'exit' else 1\n"
    )
    with WorkerScorer(f"{tmp_path}/slow.py:score", limit_s=1.0) as scorer:
        outcomes = scorer.score(samples("4", "exit", "4"))
    assert outcomes == [GOOD, Unscored("worker died (exit code 3)"), GOOD]


def test_a_worker_imports_what_its_parent_can(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def score(**sample): return 1")
    monkeypatch.syspath_prepend(tmp_path)
    with WorkerScorer("only_here:score") as scorer:
        assert scorer.score(samples("4")) == [GOOD]


def test_a_worker_that_died_between_calls_is_replaced():
    with worker_scorer("process_id") as scorer:
        first = int(scorer.score(samples("4"))[0].reward)
        os.kill(first, signal.SIGKILL)
        assert wait_until_gone(first)
        (outcome,) = scorer.score(samples("4"))
        assert isinstance(outcome, Scored)
        assert outcome.reward != first


def test_an_error_in_the_parent_leaves_no_answer_for_the_next_call():
    unsendable = Sample("test", "4", lambda: None, {})
    with worker_scorer("equals") as scorer:
        with pytest.raises(Exception, match="pickle"):
            scorer.score([*samples("4", "4"), unsendable])
        assert scorer.score(samples("5")) == [Scored(0.0, 0.0)]


def test_answers_come_while_the_caller_goes_on(tmp_path):
    gate = tmp_path / "gate"
    with worker_scorer("obey", workers=2) as scorer:
        waiting = scorer.submit(samples("wait for the file", ground_truth=str(gate)))
        assert scorer.submit(samples("fine")).result() == [GOOD]  # does not queue behind the first
        assert not waiting.done()
        gate.touch()
        assert waiting.result() == [GOOD]


def test_close_cancels_what_is_under_way():
    scorer = worker_scorer("obey", limit_s=1000)
    under_way, queued = scorer.submit(samples("hang")), scorer.submit(samples("fine"))
    scorer.close()
    assert under_way.cancelled()
    assert queued.cancelled()
    with pytest.raises(CancelledError):
        under_way.result()
    assert scorer.score(samples("fine")) == [GOOD]
    scorer.close()


def test_what_runs_for_nobody_ends(tmp_path):
    note, other = tmp_path / "note", tmp_path / "other"
    with worker_scorer("note_process_id", limit_s=1000) as scorer:
        hanging = scorer.submit(samples("hang", "hang", ground_truth=str(note)))
        while not note.exists():
            assert not hanging.done(), hanging.exception()
            time.sleep(0.01)
        assert hanging.cancel()
        assert wait_until_gone(int(note.read_text()))
        assert scorer.score(samples("fine", ground_truth=str(other))) == [GOOD]
        assert (scorer.report()["scored"], scorer.report()["lost"]) == (1, [])


@pytest.mark.e2e
def test_what_an_earlier_sample_left_behind_is_not_blamed_on_a_later_one():
    with worker_scorer("obey", limit_s=6.0, memory_gb=0.5) as scorer:
        for leaving in ("exit soon", "stop soon", "hold memory"):
            assert scorer.score(samples(leaving, "nap", "nap", "need memory")) == [GOOD] * 4, leaving
        assert scorer.report()["lost"] == []


@pytest.mark.parametrize("how", ["", "sleep in a session of its own"])
@pytest.mark.parametrize("ends", ["exit", "kill the group", "hang", "fine"])
def test_what_a_sample_left_behind_ends_with_its_worker(tmp_path, how, ends):
    note = tmp_path / "child"
    with worker_scorer("leave_a_child", limit_s=1.0 if ends == "hang" else 10.0) as scorer:
        scorer.score([Sample("", ends, str(note), {"new_session": bool(how)})])
        if ends == "fine":
            assert is_running(int(note.read_text()))  # a pool may be kept between samples
    assert wait_until_gone(int(note.read_text()))


def test_a_sample_that_kills_its_parent_kills_not_the_scorer_s_process():
    with worker_scorer("kill_parent") as scorer:
        assert scorer.score(samples("4")) == [Unscored("worker died (exit code -9)")]


def test_a_forked_process_has_workers_of_its_own(forked):
    with worker_scorer("process_id") as scorer:
        ours = scorer.score(samples("4"))

        def act():
            theirs = scorer.score(samples("4"))
            scorer.close()
            return theirs == ours

        assert forked(act) == 0
        assert scorer.score(samples("4")) == ours


def test_memory_is_bounded_and_freed():
    with worker_scorer("obey", memory_gb=0.5) as scorer:
        grown, following = scorer.score(samples("grow", "fine"))
    assert grown == Unscored("worker ran out of memory (limit 0.5 GB)")
    assert following == GOOD


def test_the_report_names_what_was_slow_and_what_was_killed():
    batch = [replace(sample, name=f"test/{index}") for index, sample in enumerate(samples("nap", "hang", "exit"))]
    with worker_scorer("obey", limit_s=1.0) as scorer:
        scorer.score([*batch, *samples("fine")])
        report = json.loads(json.dumps(scorer.report()))
    assert report["scored"] == 2
    assert report["unscored"] == {"timed out after 1 s": 1, "worker died (exit code 7)": 1}
    assert [entry["name"] for entry in report["slowest"]] == ["test/0", "test that answers 'fine'"]
    assert report["slowest"][0]["seconds"] >= 0.3
    hung, exited = report["lost"]
    assert (hung["name"], hung["reason"]) == ("test/1", "timed out after 1 s")
    assert hung["seconds"] >= 1
    assert (exited["name"], exited["reason"]) == ("test/2", "worker died (exit code 7)")


@pytest.mark.parametrize("what", ["hang", "spin", "fine"])
def test_a_worker_ends_soon_after_its_parent_was_killed(tmp_path, what):
    note = tmp_path / "note"
    script = (
        "import os, time, pathlib\n"
        "from rollalloc.rewards.function import Sample\n"
        "from rollalloc.rewards.scorers import WorkerScorer\n"
        f"scorer = WorkerScorer('{SAMPLES}:note_process_id', limit_s=1000)\n"
        f"scorer.submit([Sample('', {what!r}, {str(note)!r}, {{}})])\n"
        f"while not pathlib.Path({str(note)!r}).exists(): time.sleep(0.01)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", script], timeout=60)
    assert wait_until_gone(int(note.read_text()))


@pytest.mark.parametrize("ending", ["", "import os; os.kill(os.getpid(), 9)"])
def test_a_script_needs_no_main_guard_and_its_end_ends_the_workers(tmp_path, ending):
    script = tmp_path / "script.py"
    script.write_text(
        "from rollalloc.rewards.function import Sample\n"
        "from rollalloc.rewards.scorers import WorkerScorer\n"
        f"scorer = WorkerScorer('{SAMPLES}:process_id')\n"
        "print(int(scorer.score([Sample('', '', '', {})])[0].reward), flush=True)\n"
        f"{ending}\n"
    )
    finished = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert finished.returncode == (-9 if ending else 0)
    assert wait_until_gone(int(finished.stdout))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, "workers must be at least 1"),
        ({"limit_s": 0}, "limit_s must be a pos"),
        ({"memory_gb": 0}, "memory_gb must be a pos"),
        ({"max_chars": 0}, "max_chars must be at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        WorkerScorer("module:function", **arguments)
