"""`rollalloc advise LOG`: what it writes of logs of every kind, and that a mistake is one message and exit code 2."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from logged import lines

SAMPLES = Path(__file__).parents[1] / "waste" / "samples"


@pytest.fixture
def call(rollalloc):
    """Call `rollalloc advise` with these arguments: (exit code, standard output, standard error)."""
    return lambda *arguments: rollalloc("advise", *arguments, columns=100)


def verl(prompts=80, n=4, score=None):
    """Rows of verl's dump; prompts' texts want to be markup and to move the cursor."""
    random = np.random.default_rng(0)
    return [
        {
            "input": f"[red]{prompt}[/] \x1b[31m",
            "output": "[bold]4",
            "score": float(random.random() < prompt % 5 / 4) if score is None else score,
            "step": 1 + prompt // 8,
        }
        for prompt in range(prompts)
        for _ in range(n)
    ]


def said(output):
    return " ".join(output.split())


def test_a_log_is_profiled_and_no_text_of_it_is_shown(call, tmp_path):
    code, out, _ = call(lines(tmp_path / "1.jsonl", verl()))
    assert code == 0
    for words in (
        *("320 rollouts that were trained on, of 80 prompts", "mean success rate", "groups of 32 without variance"),
        *("its other rollouts", "characters of a rollout", "verl dumps what it trains on"),
    ):
        assert words in said(out)
    assert "[red]" not in out
    assert "[bold]" not in out
    assert "\x1b[31m" not in out
    assert "…" not in out  # nothing is cut


def test_the_verdict_stands_first_then_why_then_the_profile_then_what_to_paste(call, tmp_path):
    code, out, _ = call(lines(tmp_path / "1.jsonl", verl(prompts=400)), "--present", "grpo:n=16")
    order = ("of groups of 4 all rewards are equal", "mean success rate", "trainer.v1.trainer_mode=rollalloc")
    places = [out.index(words) for words in order]
    assert code == 0
    assert out.startswith("Begin with REINFORCE: one rollout per prompt, 64 prompts per batch.")
    assert places == sorted(places)
    assert "Assumed present setting" not in out  # the user said


def test_a_narrow_terminal_cuts_no_figure(rollalloc, tmp_path):
    _, out, _ = rollalloc("advise", lines(tmp_path / "1.jsonl", verl()), columns=72)
    assert "…" not in out


def test_what_is_pasted_is_for_the_framework_that_is_asked_for(call, tmp_path):
    log = lines(tmp_path / "1.jsonl", verl(prompts=160))
    assert "AllocatedGRPOTrainer" in call(log, "--framework", "trl", "--present", "grpo:n=16")[1]
    assert "rollalloc train --model MODEL" in call(log, "--framework", "rollalloc", "--present", "grpo:n=16")[1]


def test_the_present_setting_is_what_is_said_or_what_the_log_has(call, tmp_path):
    log = lines(tmp_path / "1.jsonl", verl(prompts=160))
    said_so = json.loads(call(log, "--present", "grpo:n=16,groups=8", "--json")[1])
    assert said_so["verdict"]["present"] == {"recipe": "grpo", "groups": 8, "n": 16}
    assert said_so["assumed"] == ""
    own = json.loads(call(log, "--json")[1])
    assert own["verdict"]["present"] == {"recipe": "grpo", "groups": 8, "n": 4}  # as many as in a step of the log
    assert own["assumed"].startswith("Assumed present setting: GRPO n = 4, because the log has groups of 4")


@pytest.mark.parametrize(
    ("format", "which"), [("verl/v1", "rollouts that were trained on, of"), ("rollalloc", "rollouts of")]
)
def test_a_table_of_a_log_that_has_only_trained_rollouts_says_so(call, format, which):
    _, out, _ = call(SAMPLES / format)
    assert re.search(rf"{which} \d+ prompts", said(out))


def test_too_few_is_a_verdict(call, tmp_path):
    code, out, _ = call(lines(tmp_path / "1.jsonl", verl(prompts=3)))
    assert code == 0
    assert said(out).startswith("Too few to tell (3 prompts, at least 10 are needed): sample")


@pytest.mark.parametrize(
    ("prompts", "given", "why"),
    [
        (3, ["--framework", "trl"], "Nothing to paste for --framework trl: there is no advice."),
        (80, ["--framework", "verl", "--present", "reinforce:n=1"], "for --framework verl: the advice is your present"),
        (3, [], ""),
    ],
)
def test_a_framework_for_which_there_is_nothing_to_paste_is_answered(call, tmp_path, prompts, given, why):
    code, out, _ = call(lines(tmp_path / "1.jsonl", verl(prompts=prompts)), *given)
    assert code == 0
    assert why in said(out)
    assert bool(why) == ("Nothing to paste" in out)


def test_json_has_all_of_it(call, tmp_path):
    found = json.loads(call(lines(tmp_path / "1.jsonl", verl()), "--json")[1])["profile"]
    assert (found["prompts"], found["rollouts"], found["n"], found["too_few"]) == (80, 320, 4, "")
    low, high = found["mean"]["interval"]
    assert 0 < low < found["mean"]["value"] < high < 1


@pytest.mark.parametrize("format", ["trl", "prime-rl", "rollalloc", "verl/v1", "verl/legacy"])
def test_every_format_is_read(call, format):
    code, out, error = call(SAMPLES / format)
    assert (code, "mean success rate" in out) == (0, True), error


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (verl(prompts=1), "success cannot be predicted from 1 prompts"),
        (verl(n=1), "groups have one rollout"),
        (verl(score=1.0), "100.0% of the rewards are the same"),
        (
            [*verl(), *[{"input": "a", "output": "b", "score": float("nan")}] * 40],
            "fields are invalid and count as missing",
        ),
    ],
)
def test_little_is_said_of_logs_that_tell_little_and_why(call, tmp_path, rows, words):
    code, out, error = call(lines(tmp_path / "1.jsonl", rows))
    assert (code, words in said(out)) == (0, True), out + error


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("1.jsonl", b"", "expected a log of one of these"),
        ("1.jsonl", b"\x00\xff\xfe" * 999, "expected a log of one of these"),
        ("1.parquet", b"\x00\xff\xfe" * 999, "not a readable parquet file"),
        ("1.jsonl", b'{"input": "a", "output": "b", "score": null}\n' * 9, "no rollout of the log has one"),
        ("1.jsonl", b'{"input": "a", "output": "b", "score": NaN}\n' * 9, "no rollout of the log has one"),
        ("metrics.jsonl", b'{"kind": "end", "accounts": {"trained": 30}}\n', "the log has only totals"),
    ],
)
def test_a_log_that_cannot_be_used_is_one_message_and_exit_code_2(call, tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    code, _, error = call(tmp_path)
    assert (code, words in said(error)) == (2, True), error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--from-step", "99"), "--from-step 99: no group was logged at or after this step"),
        (("--threshold", "nan"), "--threshold: expected a finite number"),
        (("--reward", "reward_of_mine"), "expected JSON lines of trainer.rollout_data_dir"),
        (("--present", "grpo:n=x"), "--present: expected RECIPE:n=N,groups=G, such as grpo:n=8,groups=16"),
        (("--present", "grpo:m=4"), "--present: expected RECIPE:n=N"),
        (("--present", "grpo:n=8,n=9"), "expected RECIPE:n=N,groups=G"),
        (("--present", "grpo:n=8,groups=99999999999"), "with n × groups at most 1,000,000, got"),
        (("--present", "grpo:n=0"), "--present: expected RECIPE:n=N"),
        (("--present", "grpo:n=true"), "--present: expected RECIPE:n=N"),
        (("--present", "grpo:n=8.0"), "--present: expected RECIPE:n=N"),
        (("--present", "grop:n=4"), "--present: expected one of grpo, "),
        (("--present", "grpo"), "--present: GRPO needs at least 2 rollouts per group, got n = 1"),
        (("--framework", "slime"), "--framework: expected one of rollalloc, trl, verl"),
        (("--seed", "-1"), "--seed"),
    ],
)
def test_options_that_mean_nothing_are_refused(call, tmp_path, options, words):
    code, _, error = call(lines(tmp_path / "1.jsonl", verl()), *options)
    assert (code, words in said(error)) == (2, True), error
