"""Scoring in processes that hang, crash and flood, none of which reaches the parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollalloc.rewards.function import Sample, Scored, Unscored, load_reward
from rollalloc.rewards.scorers import InlineScorer, WorkerScorer

SAMPLES = Path(__file__).with_name("reward_samples.py")
BROKEN = Path(__file__).with_name("reward_broken.py")
GOOD = Scored(1.0, 1.0)
TIMED_OUT = Unscored("timed out after 1 s")


def samples(*completions, ground_truth="4"):
    return [Sample("test", completion, ground_truth, {"index": index}) for index, completion in enumerate(completions)]


def worker_scorer(name, workers=1, limit_s=10.0):
    return WorkerScorer(f"{SAMPLES}:{name}", workers=workers, limit_s=limit_s)


def is_running(process_id):
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(process_id):
    for _ in range(1000):
        if not is_running(process_id):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("name", ["equals", "equals_later", "echo"])
def test_workers_and_inline_agree(name):
    batch = samples("4", "5", "", "\ud800 lone", "a\0b", "é🙂", "x" * 300_000)
    with InlineScorer(load_reward(f"{SAMPLES}:{name}")) as inline, worker_scorer(name) as worker:
        assert worker.score(batch) == inline.score(batch)


def test_many_samples_over_two_workers_keep_their_order():
    completions = [str(number % 7) for number in range(500)]
    with worker_scorer("equals", workers=2) as scorer:
        expected = [Scored(float(text == "4"), float(text == "4")) for text in completions]
        assert scorer.score(samples(*completions)) == expected
        assert scorer.score([]) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_samples_cost_nothing_but_themselves(workers):
    batch = samples("fine", "hang", "fine", "exit", "raise", "spin", "abort", "none", "fine", "fine")
    with worker_scorer("obey", workers=workers, limit_s=1.0) as scorer:
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


def test_the_samples_after_a_bad_one_in_its_chunk_go_on():
    batch = samples(*["fine"] * 3, "exit", *["fine"] * 60)
    with worker_scorer("obey") as scorer:
        outcomes = scorer.score(batch)
    assert [index for index, outcome in enumerate(outcomes) if outcome != GOOD] == [3]


def test_prints_and_long_results_stay_in_the_worker(capfd):
    with worker_scorer("obey") as scorer:
        assert scorer.score(samples("flood", "much", "fine")) == [GOOD, Scored(0.25, 0.25), GOOD]
    assert capfd.readouterr() == ("", "")


def test_what_a_sample_started_dies_with_its_worker(tmp_path):
    note = tmp_path / "child"
    with worker_scorer("obey", limit_s=1.0) as scorer:
        (outcome,) = scorer.score(samples("leave a child and hang", ground_truth=str(note)))
    assert outcome == TIMED_OUT
    assert wait_until_gone(int(note.read_text()))


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
        pytest.raises(RuntimeError, match=r"died \(exit code 3\) at its start"),
    ):
        scorer.score(samples("4"))


def test_importing_does_not_count_against_the_limit(tmp_path):
    (tmp_path / "slow.py").write_text("import time; time.sleep(1.5)\ndef score(**sample): return 1")
    with WorkerScorer(f"{tmp_path}/slow.py:score", limit_s=1.0) as scorer:
        assert scorer.score(samples("4")) == [GOOD]


def test_a_worker_imports_what_its_parent_can(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def score(**sample): return 1")
    monkeypatch.syspath_prepend(tmp_path)
    with WorkerScorer("only_here:score") as scorer:
        assert scorer.score(samples("4")) == [GOOD]


def test_workers_start_late_stay_and_end_with_close():
    scorer = worker_scorer("process_id")
    scorer.close()
    first, second = (scorer.score(samples("4"))[0].reward for _ in range(2))
    assert first == second != os.getpid()
    scorer.close()
    assert wait_until_gone(int(first))
    assert scorer.score(samples("4"))[0].reward != first
    scorer.close()


def test_a_worker_that_died_between_calls_is_replaced():
    with worker_scorer("process_id") as scorer:
        first = int(scorer.score(samples("4"))[0].reward)
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)  # leaves the exit code to the scorer
        (outcome,) = scorer.score(samples("4"))
        assert isinstance(outcome, Scored)
        assert outcome.reward != first


def test_an_error_in_the_parent_leaves_no_answer_for_the_next_call():
    unsendable = Sample("test", "4", lambda: None, {})
    with worker_scorer("equals") as scorer:
        with pytest.raises(Exception, match="pickle"):
            scorer.score([*samples("4", "4"), unsendable])
        assert scorer.score(samples("5")) == [Scored(0.0, 0.0)]


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


def test_the_kernel_ends_a_worker_that_spins_after_its_parent_died():
    with worker_scorer("processor_limit") as scorer:
        (outcome,) = scorer.score(samples("4"))
    assert isinstance(outcome, Scored)
    assert outcome.reward > 0  # no limit would be RLIM_INFINITY, -1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"workers": 0}, "workers must be at least 1"), ({"limit_s": 0}, "limit_s must be a pos")],
)
def test_settings_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        WorkerScorer("module:function", **arguments)
