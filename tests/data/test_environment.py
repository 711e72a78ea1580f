"""Environments of verifiers: prompts and rubric of a single-turn one; what cannot be used is refused by name."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("verifiers.v1", reason="needs pip install 'rollalloc[environments]'")

from rollalloc.data.prompts import load_prompts
from rollalloc.rewards import environment
from rollalloc.rewards.environment import REWARD
from rollalloc.rewards.function import Sample, Scored, Unscored, load_reward, score_sample
from rollalloc.rewards.scorers import WorkerScorer

HERE = Path(__file__).parent / "environments"


@pytest.fixture
def make(rollalloc, tmp_path, monkeypatch):
    """Call `rollalloc data environment vf_kinds` in an empty folder: (exit code, what was said)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(HERE))  # of the processes that score
    monkeypatch.syspath_prepend(HERE)

    def called(*more, name="vf_kinds", out="sums.jsonl"):
        code, _, said = rollalloc("data", "environment", name, "--out", out, *more)
        return code, " ".join(said.split())

    return called


def samples(completion, path="sums.jsonl"):
    prompts = load_prompts(path)
    columns = zip(prompts.sources, prompts.ground_truths, prompts.extra_infos, strict=True)
    return [Sample(source, completion, truth, info) for source, truth, info in columns]


@pytest.mark.parametrize("out", ["sums.jsonl", "sums.parquet"])
def test_an_environments_prompts_are_scored_by_its_own_rubric(make, out):
    code, said = make(out=out)
    assert code == 0
    assert f"6 prompts are in {out}; score them with --reward {REWARD}" in said
    prompts = load_prompts(out)
    assert prompts.prompts[0] == (
        {"role": "system", "content": "Give the number."},
        {"role": "user", "content": "What is 1 + 1?"},
    )
    assert prompts.ground_truths == tuple(str(2 * n) for n in range(1, 7))
    assert len(set(prompts.keys)) == 6
    reward = load_reward(REWARD)
    assert [score_sample(reward, sample) for sample in samples("6", out)[1:4]] == [
        Scored(0.5, 0.5),
        Scored(1.5, 1.5),
        Scored(0.5, 0.5),
    ]
    assert score_sample(reward, samples("a long one", out)[0]) == Scored(0.0, 0.0)


def test_a_rubric_that_raises_gives_no_score(make):
    make()
    outcome = score_sample(load_reward(REWARD), samples("crash")[0])
    assert isinstance(outcome, Unscored)
    assert "crash" in outcome.reason


@pytest.mark.parametrize(("given", "expected"), [({"a": None, "b": None}, None), ({"a": None, "b": 0.0}, 0.0)])
def test_where_no_reward_has_a_value_there_is_no_score(monkeypatch, given, expected):
    """verifiers' own sum is 0 in both cases."""

    async def score(trace, runtime):
        rewards = {name: value if value is None else SimpleNamespace(score=value) for name, value in given.items()}
        trace.rewards, trace.metrics, trace.reward = rewards, {"length": 3.0}, 0.0

    monkeypatch.setattr(environment, "_task", lambda *of: SimpleNamespace(score=score))
    monkeypatch.setattr(environment, "_trace", lambda task, completion: SimpleNamespace())
    sample = Sample("rubric", "an answer", "", {environment.NAME: "any", environment.TASK: "{}"})
    outcome = score_sample(load_reward(REWARD), sample)
    assert (outcome.reward if isinstance(outcome, Scored) else None) == expected


def test_an_environment_is_scored_in_the_workers(make):
    make()
    with WorkerScorer(REWARD, limit_s=120) as scorer:
        assert scorer.score(samples("2")[:2]) == [Scored(1.5, 1.5), Scored(0.5, 0.5)]


def test_an_environment_gives_the_tasks_and_settings_that_were_asked_for(make):
    assert make("--tasks", 2, "--skip", 3, "--set", "number=9", "--set", "hint=Only digits.")[0] == 0
    rows = [json.loads(line) for line in Path("sums.jsonl").read_text().splitlines()]
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["8", "10"]
    assert rows[0]["prompt"][0]["content"] == "Only digits."
    assert score_sample(load_reward(REWARD), samples("8")[0]) == Scored(1.5, 1.5)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("tool", "ToolTask gives the model tools, so its rollouts have several turns; train it with TRL's"),
        ("stop", "StopTask stops a conversation by rules of its own"),
        ("user", "lets a user open the conversation"),
        ("sandbox", "SandboxTask needs a sandbox, for ran"),
        ("setup", "SetupTask needs a sandbox, for setup"),
        ("verifier", "VerifierTask needs a sandbox, for stage_verifier"),
        ("container", "ContainerTask needs a sandbox, for its container"),
        ("no reward", "NoRewardTask has no reward"),
        ("other", "OtherTask is not the class that the taskset declares, SumTask: the rubric of that class"),
        ("image", "has a prompt that is empty or not text"),
        ("no messages", "has a prompt that is empty or not text"),
        ("broken", "fails while it generates tasks (OSError: no network)"),
    ],
)
def test_what_is_no_single_answer_is_refused_by_name(make, kind, message):
    code, said = make("--set", f"kind={kind}")
    assert code == 2
    assert "environment 'vf_kinds'" in said
    assert message in said
    assert not Path("sums.jsonl").exists()


def test_an_environment_with_a_harness_of_its_own_is_refused(make, tmp_path, monkeypatch):
    """vf-eval runs a package's own harness by default, and that one decides about the turns."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "vf_harness.py").write_text(
        "import verifiers.v1 as vf\n"
        "from vf_kinds import SumTaskset\n\n\n"
        "class Turns(vf.Harness):\n    pass\n\n\n"
        "class Harnessed(SumTaskset):\n    pass\n\n\n"
        '__all__ = ["Harnessed", "Turns"]\n'
    )
    code, said = make(name="vf_harness")
    assert code == 2
    assert "environment 'vf_harness' has a harness of its own, so its rollouts can have several turns" in said


@pytest.mark.parametrize(("how", "reason"), [("key", "KeyError: 'SOME_API_KEY'"), ("exit", "SystemExit: 3")])
def test_a_package_that_raises_when_it_is_imported_is_a_sentence(make, monkeypatch, how, reason):
    monkeypatch.setenv("RAISES_AT_IMPORT", how)
    monkeypatch.delitem(sys.modules, "vf_kinds", raising=False)
    code, said = make()
    assert code == 2
    assert "environment 'vf_kinds' is not a taskset" in said
    assert reason in said


@pytest.mark.e2e
def test_a_rubric_that_gives_no_number_prints_megabytes_or_hangs_costs_its_own_samples(make):
    make("--tasks", 1)
    with WorkerScorer(REWARD, workers=1, limit_s=120) as scorer:
        outcomes = [scorer.score(samples(completion))[0] for completion in ("no number", "loud", "2")]
    assert isinstance(outcomes[0], Unscored)
    assert "nan" in outcomes[0].reason
    assert outcomes[1:] == [Scored(0.0, 0.0), Scored(1.5, 1.5)]
    with WorkerScorer(REWARD, workers=1, limit_s=3) as scorer:
        (hanging,) = scorer.score(samples("hang"))
    assert isinstance(hanging, Unscored)


def test_an_impossible_environment_is_refused_in_a_sentence(make):
    assert "environment 'not_there': taskset 'not_there' not found" in make(name="not_there")[1]
    assert "is not a taskset of verifiers 0.4" in make(name="json")[1]
    assert "is not a taskset of verifiers 0.4, or its config is wrong" in make("--set", "numbr=3")[1]
    assert "expected 9 tasks after the first 0, found 6" in make("--tasks", 9)[1]
    assert "--tasks must be at least 1" in make("--tasks", 0)[1]
    assert make()[0] == 0
    assert "sums.jsonl exists already" in make()[1]


def test_prompts_that_the_command_did_not_make_are_unscored_with_a_remedy(make):
    outcome = score_sample(load_reward(REWARD), Sample("mine", "2", "2", {}))
    assert isinstance(outcome, Unscored)
    assert "make the prompts with `rollalloc data environment NAME`" in outcome.reason


def test_without_verifiers_it_says_what_to_install(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    for module in ("rollalloc.rewards.environment", "rollalloc.data.environment"):
        monkeypatch.delitem(sys.modules, module)
    code, said = make()
    assert code == 2
    assert "pip install 'rollalloc[environments]'" in said
