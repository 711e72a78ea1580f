"""`rollalloc-lab simulate`: what it writes, and that a mistake is one message and exit code 2 before anything runs."""

import json

import pytest
from test_workload import line

from rollalloc_lab.simulate import simulation

SMALL = ("--matched", "groups=4,n=4", "--batches", 2, "--warmup", 1, "--gpus", "2,4", "--prompts", 64)
ONE_RECIPE = ("--recipes", "grpo", "--matched", "groups=4,n=4", "--gpus", 2, "--seeds", 0)


@pytest.fixture
def call(rollalloc_lab):
    """Call `rollalloc-lab simulate` with these arguments: (exit code, standard output, standard error)."""
    return lambda *arguments, columns=200: rollalloc_lab("simulate", *arguments, columns=columns)


def test_a_table_compares_recipes_on_each_cluster(call):
    code, out, _ = call(*SMALL)
    assert code == 0
    lines = [words for words in map(str.split, out.splitlines()) if words]
    assert lines[0][:4] == ["GPUs", "recipe", "faster", "s/batch"]
    named = [words for words in lines if {"grpo", "darts", "pilot_commit"} & set(words[:2])]
    assert [words[:2] for words in named[::3]] == [["2", "grpo"], ["4", "grpo"]]
    assert [words[0] for words in named if words[0].isalpha() or "_" in words[0]] == ["darts", "pilot_commit"] * 2
    assert "[" in out  # an interval over five seeds
    assert "arithmetic for qwen2.5-7b on h100; 990,164 tokens fit into the key-value cache of a replica" in " ".join(
        out.split()
    )


@pytest.mark.parametrize(("columns", "there"), [(80, False), (120, True)])
def test_no_figure_is_cut_however_narrow_the_terminal(columns, there, call):
    """Columns that do not fit are left out whole, and so is what explains them."""
    small = ("--matched", "groups=16,n=8", "--batches", 2, "--warmup", 1, "--seeds", "0,1")
    code, out, _ = call(*small, "--gpus", "8,512", columns=columns)
    assert code == 0
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= columns
    assert ("decoding, training, idle" in " ".join(out.split())) == ("decoding" in out.splitlines()[1]) == there


@pytest.mark.parametrize(
    "absurd",
    [("--batches", 10**12), ("--median", 1e300), ("--train", 1e308), ("--prompts", 10**14), ("--limit", 10**15)],
)
def test_what_can_only_be_a_typing_error_is_refused_by_name(call, absurd):
    code, out, err = call(*SMALL, *absurd)
    assert (code, out) == (2, "")
    assert f"{absurd[0][2:]} must be at most " in err


def test_json_says_what_was_simulated_and_every_seed(call):
    recipes = ("--recipes", "grpo,mine=darts", "--set", "mine.tail=none")
    cluster = ("--schedule", "async", "--overlap", "--train", 0.5, "--staleness", 2)
    code, out, _ = call(*SMALL, *recipes, *cluster, "--seeds", "3,5", "--json")
    assert code == 0
    said = json.loads(out)
    assert said["recipes"]["mine"] == {"recipe": "darts", "groups": 4, "shortest": 3, "longest": 1, "tail": "none"}
    assert (said["cluster"]["schedule"], said["cluster"]["overlap"], said["staleness"]) == ("async", True, 2)
    assert (said["costs"]["train"], said["batches"]) == (0.5, 2)
    assert [(each["label"], each["gpus"]) for each in said["priced"]] == [
        ("grpo", 2),
        ("mine", 2),
        ("grpo", 4),
        ("mine", 4),
    ]
    assert said["priced"][0]["faster"]["values"] == [1.0, 1.0]
    for each in said["priced"]:
        assert [seed["seed"] for seed in each["seeds"]] == [3, 5]
        for seed, value in zip(each["seeds"], each["per_batch"]["seconds"]["values"], strict=True):
            assert sum(seed["gpu_seconds"].values()) == pytest.approx(seed["seconds"] * each["gpus"])
            assert value == seed["seconds"] / seed["batches"]


def test_a_log_and_a_curve_of_ones_own(call, tmp_path):
    log, curve = tmp_path / "rollouts.jsonl", tmp_path / "curve.csv"
    rollouts = [line(key=str(at % 8), tokens=4 + at, metric=at % 3 / 2) for at in range(64)]
    log.write_text("\n".join([*rollouts, line(metric=None)]))
    curve.write_text("concurrency,seconds_per_token\n1,0.5\n8,0.5\n")
    code, out, _ = call("--log", log, "--latency", curve, "--slots", 8, *ONE_RECIPE, "--batches", 1)
    assert code == 0
    said = " ".join(out.split())
    assert "curve.csv; without --kv-tokens, there is no limit on the key-value cache of a replica. Rollouts: " in said
    assert "8 prompts" in said
    assert "1 logged rollouts were stopped or have no score and were left out" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--recipes", "grpo,nothing"), "unknown recipe 'nothing'"),
        (("--set", "dart.groups=4"), "expected LABEL.key with one of grpo"),
        (("--matched", "groups=4"), "--matched expects groups=G,n=N"),
        (("--gpus", "two"), "--gpus: expected whole numbers separated by commas, got 'two'"),
        (("--seeds", "-1"), "--seeds: expected distinct numbers, each at least 0"),
        (("--schedule", "later"), "--schedule must be one of sync, async, got 'later'"),
        (("--batches", "0"), "batches must be a whole number of at least 1"),
        (("--train", "nan"), "train must be a finite number of at least 0"),
        (("--prompts", "3"), "4 groups per batch but there are only 3 prompts"),
        (("--staleness", "-1"), "staleness must be a whole number of at least 0"),
        (("--ahead", "2"), "ahead: with schedule sync, nothing is generated while a batch is trained; use async"),
        (("--schedule", "async", "--ahead", "0"), "ahead must be a whole number of at least 1"),
        (
            ("--schedule", "async", "--ahead", "3", "--staleness", "2"),
            "ahead=3: a batch would be trained",
        ),
        (("--latency", "nothing.csv"), "nothing.csv"),
        (("--log", "nothing.jsonl", "--prompts", "8192"), "--prompts: --log already sets these"),
        (("--model", "gpt"), "model must be one of qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b,"),
        (("--gpu", "h1"), "gpu must be one of a100, h100, h200, got 'h1'"),
        (("--memory-share", "1.5"), "memory_share must be at most 1"),
        (
            ("--model", "qwen2.5-32b", "--limit", "30000"),
            "qwen2.5-32b on 1 h100: keys and values of 26,702 tokens fit, but a rollout may need 30,200",
        ),
        (("--model", "qwen2.5-32b", "--memory-share", "0.5"), "of 0 tokens fit, but a rollout may need 8,392"),
        (("--kv-tokens", "8391"), "--kv-tokens: keys and values of 8,391 tokens fit, but a rollout may need 8,392"),
    ],
)
def test_a_mistake_is_one_message_before_anything_runs(call, monkeypatch, tmp_path, arguments, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(simulation.Simulation, "run", lambda self: pytest.fail("it ran"))
    plain = [each for each in SMALL if "--prompts" not in arguments or each not in ("--prompts", 64)]
    code, out, err = call(*plain, *arguments)
    assert code == 2
    assert not out
    assert says in " ".join(err.split())
    assert "Traceback" not in err


def test_what_a_log_says_of_itself_does_not_reach_the_terminal(call, tmp_path):
    (tmp_path / "rollouts.jsonl").write_text(line(tokens="\x1b[2J"))
    code, _, err = call("--log", tmp_path / "rollouts.jsonl")
    assert code == 2
    assert "\x1b[2J" not in err
    assert "line 1: tokens: expected a whole number" in " ".join(err.split())


def test_a_memory_that_is_full_is_said(call):
    code, out, _ = call(*SMALL, "--recipes", "grpo", "--kv-tokens", 9000, "--median", 3000)
    assert code == 0
    said = " ".join(out.split())
    assert "preemptions per batch, because the key-value cache of a replica, 9,000 tokens" in said
    assert "preemptions" not in call(*SMALL, "--recipes", "grpo")[1]


def test_costs_are_the_hardware_s_where_none_is_given(call):
    code, out, _ = call(
        *SMALL, "--recipes", "grpo", "--json", "--model", "qwen2.5-14b", "--gpu", "a100", "--logprob", 0.5
    )
    assert code == 0
    said = json.loads(out)
    assert said["costs"]["train"] == pytest.approx(6 * 14.7e9 / (0.4 * 312e12))
    assert said["costs"]["logprob"] == 0.5
    assert said["kv_tokens"] == 216_674  # (0.9 * 80 GB - 29.4 GB) / 196,608 bytes
    assert all(each in str(said["hardware"]["sources"]) for each in ("Qwen/Qwen2.5-14B", "A100 data sheet"))
