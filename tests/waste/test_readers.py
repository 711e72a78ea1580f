"""Readers: each on a sample of its format, and what they say of files that are none.

The samples: `trl` was written by GRPOTrainer of TRL 1.16 (6 generation batches of a tiny model, each logged twice; 2 reward
functions, of which one has weight 0); `verl` by the dump functions of both trainers of verl 0.9.1, given made-up rollouts;
`verifiers` by `vf-eval` of verifiers 0.4.0 (6 sums × 4, answered by SmolLM2-135M under vLLM 0.31; in `verifiers_failed`
another server ended two streams too early); `prime-rl` by `Episode.to_record` of verifiers 0.4.0, laid out as prime-rl's
file monitor does, with made-up episodes; `prime-rl-0.8` the same with verifiers at a60a606, which prime-rl 0.8.1 at 559b447
has as a submodule, stamped as its dispatcher does; `prime-rl-0.9` the same episodes by verifiers 0.4.0, stamped and laid out
as prime-rl 0.9.1 does since 1 September 2026 (`monitors/file/traces` at 551bfc3: chunks packed by pyzstd as its `seal` does,
the last one open), with annotations and indices beside them;
`rollalloc` by a Pilot-Commit run of its own trainer.
"""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportOptionalSubscript=false

import shutil
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from logged import each, lines, rewards

from rollalloc.waste.readers import FORMATS, Options, read_log
from rollalloc.waste.readers.verl import group_and_session
from rollalloc.waste.shares import shares_of

SAMPLES = Path(__file__).parent / "samples"


def table(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


@pytest.mark.parametrize("format", FORMATS)
def test_a_sample_is_told_by_itself_and_its_rollouts_are_all_read(format):
    log = read_log(SAMPLES / format)
    assert log.format == format
    assert log.bad == 0
    first, rollouts = {
        "trl": (4, 96),
        "verl": (4, 96),
        "verifiers": (4, 24),
        "prime-rl": (4, 24),
        "rollalloc": (2, 96),
    }[format]
    assert {group.first for group in each(log.groups)} == {first}
    assert sum(shares_of(log.groups).rollouts.values()) == rollouts


# TRL


def test_trl_waste_is_what_trl_itself_said():
    """TRL's advantages are 0 in exactly the groups that taught nothing."""
    log = read_log(SAMPLES / "trl", options=Options(weights=(1.0, 0.0)))
    assert not any("disagree" in note for note in log.notes)
    assert any("6 files repeat" in note for note in log.notes)
    zero = 0
    for file in (SAMPLES / "trl").glob(
        "*[13579].parquet"
    ):  # two steps a generation batch: the even files repeat the odd
        advantages = pyarrow.parquet.read_table(file)["advantage"].to_numpy().reshape(-1, 4)
        zero += int((np.abs(advantages).max(1) < 1e-6).sum())
    shares = shares_of(log.groups)
    assert 0 < zero < len(log.groups)
    assert sum(len(set(group)) == 1 for group in rewards(log)) == zero
    assert shares.groups == 24


@pytest.mark.parametrize(
    ("advantage", "options", "reward", "note"),
    [
        ([1.0, -1.0, 0.0], Options(), [2, 0, 1], "reward: right + short"),
        (
            [0.5, -1.0, 0.5],
            Options(),
            [2, 0, 1],
            "in 1 of 1 groups the logged advantages do not follow the reward: name",
        ),
        ([0.5, -1.0, 0.5], Options(reward="right"), [1, 0, 1], "reward: right"),
        ([1.0, -0.5, -0.5], Options(weights=(0, 1)), [1, 0, 0], "reward: short"),
        ([0.6, -0.8, 0.2], Options(weights=(1, 0.4)), [1.4, 0, 1], "reward: right + 0.4 × short"),
        (
            [0.0, 0.0, 0.0],
            Options(),
            [2, 0, 1],
            "in 1 of 1 groups the logged advantages do not follow the reward: name",
        ),
        ([None] * 3, Options(), [2, 0, 1], "the log does not tell which columns are rewards, so all are added"),
    ],
)
def test_trl_leading_columns_are_added_and_a_reward_that_contradicts_the_advantages_is_reported(
    tmp_path, advantage, options, reward, note
):
    columns = {
        "right": [1.0, 0.0, 1.0],
        "short": [1.0, 0.0, 0.0],
        "advantage": pyarrow.array(advantage, pyarrow.float64()),
    }
    table(tmp_path / "c.parquet", prompt=list("aaa"), **columns)
    log = read_log(tmp_path, options=options)
    assert rewards(log) == [pytest.approx(reward)]
    assert any(line.startswith(note) for line in log.notes)
    contradicted = "do not follow" in note
    assert any("do not follow" in line for line in log.notes) == contradicted


@pytest.mark.parametrize("kind", [pyarrow.float32(), pyarrow.float64()])
def test_trl_sums_that_differ_only_by_rounding_are_equal_rewards(tmp_path, kind):
    columns = {"a": [0.1, 0.3], "b": [0.2, 0.0]}
    table(tmp_path / "c.parquet", prompt=list("aa"), **{name: pyarrow.array(of, kind) for name, of in columns.items()})
    assert not read_log(tmp_path).groups.mixed_V.any()


@pytest.mark.parametrize(
    ("advantage", "options", "groups"),
    [
        ([0.7, -0.7, 0.0, 0.0, -0.7, 0.7], Options(), [[1, 0], [1, 1], [0, 1]]),
        ([0.0] * 6, Options(), [[1], [0], [1], [1], [0], [1]]),  # nothing shows the groups
        ([0.0] * 6, Options(group_size=3), [[1, 0, 1], [1, 0, 1]]),
        ([0.5, -1.0, 0.5, 0.25, -0.5, 0.25], Options(), [[1, 0, 1], [1, 0, 1]]),
        ([0.5, -1.0, 0.5, 0.5, -1.0, 0.5], Options(), [[1], [0], [1], [1], [0], [1]]),  # the batch's baseline
    ],
)
def test_trl_groups_whose_prompts_differ_are_found_by_their_advantages(tmp_path, advantage, options, groups):
    """An environment that adds, for example, the path of a workspace to its prompt makes each prompt another one."""
    table(tmp_path / "c.parquet", prompt=list("abcdef"), r=[1.0, 0.0, 1.0, 1.0, 0.0, 1.0], advantage=advantage)
    log = read_log(tmp_path, options=options)
    assert rewards(log) == groups
    assert len(log.groups.keys) == len(groups)


def test_trl_a_batch_logged_twice_counts_once(tmp_path):
    for step, completion in ((1, "x"), (2, "x"), (3, "z")):
        table(
            tmp_path / f"{step}.parquet", step=[step] * 2, prompt=["a"] * 2, completion=[completion, "y"], r=[0.0, 1.0]
        )
    log = read_log(tmp_path)
    assert [group.step for group in each(log.groups)] == [1, 3]
    assert any("1 files repeat" in note for note in log.notes)


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        (
            {"prompt": ["a"], "text": ["b"]},
            Options(),
            "expected the column prompt and a column of numbers.*found prompt, text",
        ),
        ({"question": ["a"], "r": [1.0]}, Options(), "expected the column prompt and .*found question, r"),
        ({"prompt": ["a"], "r": [1.0]}, Options(reward="s"), "column s is missing, found prompt, r"),
        ({"prompt": ["a"], "r": [1.0]}, Options(weights=(1, 2)), "--weights: expected one for each of r, got 2"),
    ],
)
def test_trl_columns_that_do_not_fit_are_named(tmp_path, columns, options, said):
    table(tmp_path / "c.parquet", **columns)
    with pytest.raises(ValueError, match=said):
        read_log(tmp_path, options=options)


def trl_rows(*groups, **more):
    """Columns as TRL writes them: groups of (prompt, rewards), advantages of the first reward, and further columns."""
    prompts = [prompt for prompt, rewards in groups for _ in rewards]
    rewards = [reward for _, row in groups for reward in row]
    advantages = [reward - sum(row) / len(row) for _, row in groups for reward in row]
    return {"step": [1] * len(prompts), "prompt": prompts, "right": rewards, **more, "advantage": advantages}


@pytest.mark.parametrize("scale", [lambda a: a, lambda a: a / (a.std(1, ddof=1, keepdims=True) + 1e-4)])
def test_trl_advantages_may_be_scaled_by_a_standard_deviation(tmp_path, scale):
    right, short = np.random.default_rng(0).integers(0, 3, (2, 12, 4)).astype(float)
    reward = right + 0.2 * short
    advantage = scale(reward - reward.mean(1, keepdims=True))
    prompts = [f"p{row}" for row in range(12) for _ in range(4)]
    columns = {"right": right.ravel(), "short": short.ravel(), "advantage": advantage.ravel()}
    table(tmp_path / "c.parquet", prompt=prompts, **columns)
    log = read_log(tmp_path, options=Options(weights=(1.0, 0.2)))
    assert np.array(rewards(log)) == pytest.approx(reward)
    assert not any("do not follow" in note for note in log.notes)
    assert any("do not follow" in note for note in read_log(tmp_path).notes)


def trl_run(folder, evaluated=(), steps=6, own=4):
    """Files of steps: the last rows of each generation batch of `own` prompts; where evaluated, those of an evaluation."""
    random = np.random.default_rng(0)
    for step in range(1, steps + 1):
        drawn = [f"train {prompt}" for prompt in random.permutation(12)[:own]]
        if step in evaluated:
            drawn = [f"eval {prompt}" for prompt in range(own)]
        groups = [(prompt, random.permutation([0.0, 1.0])) for prompt in drawn]
        columns = trl_rows(*groups) | {"step": [step] * 2 * own, "completion": [str(random.random())] * 2 * own}
        table(folder / "completions" / f"completions_{step:05d}.parquet", **columns)


def state_of(folder, *evaluated, until=6):
    """A trainer's state, by which these steps were evaluated."""
    history = [{"step": step, "eval_reward": 0.5} for step in evaluated] + [{"step": 1, "reward": 0.5}]
    lines(folder / "trainer_state.json", [{"global_step": until, "log_history": history}])


@pytest.mark.parametrize("place", [".", "checkpoint-6"])
def test_trl_steps_with_an_evaluation_are_left_out_and_counted(tmp_path, place):
    """An evaluation writes the file of its step anew; nothing in it says so, but the trainer's state does."""
    trl_run(tmp_path, evaluated=(2, 4, 6))
    assert any("no trainer_state.json beside the log" in note for note in read_log(tmp_path).notes)
    state_of(tmp_path / place, 2, 4, 6)
    state_of(tmp_path / "checkpoint-2", 2, until=2)
    lines(tmp_path / "checkpoint-1" / "trainer_state.json", ['{"global_step": 1, "log_hist'])
    log = read_log(tmp_path)
    assert [group.step for group in each(log.groups)] == [1] * 4 + [3] * 4 + [5] * 4
    assert any(note.startswith("24 rows are of steps with an evaluation") for note in log.notes)
    assert len(read_log(tmp_path, options=Options(rows="all")).groups) == 24


def test_trl_a_log_of_evaluations_alone_is_refused_with_what_to_do(tmp_path):
    """`eval_steps=1` and `logging_steps=1`: each evaluation overwrites what training logged at its step."""
    trl_run(tmp_path, evaluated=(1, 2), steps=2, own=8)
    state_of(tmp_path, 1, 2)
    with pytest.raises(
        ValueError,
        match=r"all 32 rows are of steps with an evaluation .* log at steps without an evaluation.* --rows all",
    ):
        read_log(tmp_path)


@pytest.mark.parametrize("format", ["trl", "verl/v1", "prime-rl", "rollalloc"])
def test_a_file_that_is_there_twice_counts_once_and_is_said(tmp_path, format):
    whole = read_log(SAMPLES / format)
    for copy in ("a", "b"):
        shutil.copytree(SAMPLES / format, tmp_path / copy)
    log = read_log(tmp_path)
    assert rewards(log) == rewards(whole)
    assert any("files are copies of others" in note for note in log.notes)


# verl


@pytest.mark.parametrize("trainer", ["legacy", "v1"])
def test_verl_groups_of_both_trainers(trainer):
    log = read_log(SAMPLES / "verl" / trainer)
    assert len(log.groups) == 12
    assert [group.step for group in each(log.groups)] == [9] * 6 + [10] * 6  # 9.jsonl before 10.jsonl
    assert not log.complete
    assert any("the true waste may be higher" in note for note in log.notes)
    # acc is preferred where it is logged; the V1 trainer logs the shaped score alone, 0.1 less for the first of each group
    assert {reward for group in rewards(log) for reward in group} <= (
        {0, 1} if trainer == "legacy" else {-0.1, 0, 0.9, 1}
    )


def test_verl_without_uid_a_prompt_is_one_group_within_a_step_and_its_rows_may_lie_anywhere(tmp_path):
    for step in (1, 2):
        rows = [{"input": prompt, "output": "", "score": step, "step": step} for prompt in "abab"]
        lines(tmp_path / f"{step}.jsonl", rows)
    assert rewards(read_log(tmp_path)) == [[1, 1], [1, 1], [2, 2], [2, 2]]
    (tmp_path / "1.jsonl").write_text("".join(file.read_text() for file in sorted(tmp_path.glob("*.jsonl"))))
    assert rewards(read_log(tmp_path / "1.jsonl")) == [[1, 1], [1, 1], [2, 2], [2, 2]], "two steps in one file"


@pytest.mark.parametrize(
    ("uid", "group", "session"),
    [
        ("c0ffee-1_3_0", "c0ffee-1", "c0ffee-1_3"),
        ("g5s0r12_1_0", "g5", "g5s0r12_1"),  # of rollalloc's driver: a pilot,
        ("g5s1r40a3_1_2", "g5", "g5s1r40a3_1"),  # and the third output of a commit, ordered again after a resume
        ("g5", "g5", None),
        ("a_b", "a_b", None),
    ],
)
def test_verls_uid_names_the_group_and_the_session(uid, group, session):
    assert group_and_session(uid) == (group, session)


def test_verl_lines_that_cannot_be_used_are_counted_and_the_first_is_told(tmp_path):
    good = {"input": "a", "output": "b", "score": 1, "step": 1}
    lines(tmp_path / "1.jsonl", [good, '{"input": "corrupt', "[1]", {"input": "a"}, "", good, "[" * 100_000])
    log = read_log(tmp_path)
    assert rewards(log) == [[1, 1]]
    assert log.bad == 4
    assert log.first_bad.endswith("1.jsonl:2: not JSON")


def verl_rows(*groups):
    """Rows of verl's dump: groups of (input, values of acc, values of score); without acc if it is None."""
    row = {"output": "o", "gts": "1", "step": 1}
    return [
        row | {"input": asked, "score": score} | ({} if acc is None else {"acc": acc[at]})
        for asked, acc, scores in groups
        for at, score in enumerate(scores)
    ]


@pytest.mark.parametrize("null", [None, [None, None, 0], ["?", "?", 0]])
def test_verl_one_field_counts_in_the_whole_log_and_acc_only_where_all_have_it(tmp_path, null):
    """Values of acc and of score are not compared: q1 is all wrong, though some of its rows have no acc."""
    lines(tmp_path / "1.jsonl", verl_rows(("q0", [0, 1, 0], [-1, 1, -1])))
    lines(tmp_path / "2.jsonl", verl_rows(("q1", null, [-1, -1, -1])))
    log = read_log(tmp_path)
    assert rewards(log) == [[-1, 1, -1], [-1, -1, -1]]
    assert log.odd == 0
    assert any(note.startswith("reward: score (6 of 6 rollouts)") for note in log.notes)
    lacks = 3 if null is None else 2
    assert any(note.startswith(f"acc is missing or invalid in {lacks} of 6 rollouts, so score") for note in log.notes)
    chosen = read_log(tmp_path, options=Options(reward="acc"))
    assert rewards(chosen)[1][:2] == [None, None] if lacks == 2 else len(chosen.groups) == 1
    assert chosen.odd == 2 * (null == ["?", "?", 0])


def test_verl_numbers_and_truth_values_written_as_text_are_read(tmp_path):
    """`json.dumps(default=str)` writes NumPy's numbers so."""
    rows = verl_rows(("q0", ["0.0", "1.0"], [-2, 3]), ("q1", ["False", "True"], [-2, 3]))
    log = read_log(lines(tmp_path / "1.jsonl", rows))
    assert rewards(log) == [[0, 1], [0, 1]]
    assert log.odd == 0


def test_verl_ids_of_one_file_are_not_those_of_another_and_may_be_0(tmp_path):
    rows = [{"input": "a", "output": "b", "score": score, "uid": uid} for uid, score in ((0, 0.0), (1, 1.0), (0, 1.0))]
    for name in ("1", "2", "another/2"):
        lines(tmp_path / f"{name}.jsonl", [row | {"step": name} for row in rows])
    log = read_log(tmp_path)
    assert rewards(log) == [[0], [1]] * 3
    assert any(note.startswith("3 lines repeat the uid of another") for note in log.notes)


def test_verl_groups_that_only_the_trained_score_tells_apart_are_said(tmp_path):
    row = {"input": "q0", "output": "o", "gts": "1", "step": 1}
    penalised = [row | {"score": score, "acc": True} for score in (1.0, 0.5)]
    mixed = [row | {"input": "q1", "score": score, "acc": score > 0} for score in (-1.0, 1.0)]
    again = [each | {"step": 2} for each in penalised]
    flat = [row | {"input": "q2", "score": 1.0, "acc": True}] * 2
    said = "acc is equal but score differs"
    lines(tmp_path / "1.jsonl", [*penalised, *mixed])
    lines(tmp_path / "2.jsonl", [*again, *flat])
    [note] = [note for note in read_log(tmp_path).notes if said in note]
    assert note.startswith("in 2 of 4 groups, ")
    for reward in ("acc", "score"):  # a field that the user chose
        assert not any(said in note for note in read_log(tmp_path, options=Options(reward=reward)).notes)


def test_verl_rows_of_validation_are_left_out_and_said(tmp_path):
    """Both trainers give validation's rows the field reward, equal to the score, and training's none."""
    row = {"input": "a", "output": "b", "score": 1.0, "step": 1}
    lines(tmp_path / "train" / "1.jsonl", [row, row | {"score": 0.0}])
    lines(tmp_path / "val" / "1.jsonl", [row | {"input": "v", "reward": 1.0}] * 3)
    log = read_log(tmp_path)
    assert rewards(log) == [[1, 0]]
    assert any(note.startswith("3 rows are of validation and were left out") for note in log.notes)
    assert len(read_log(tmp_path, options=Options(rows="all")).groups) == 2
    with pytest.raises(ValueError, match=r"all 3 rows are of validation .* trainer\.rollout_data_dir"):
        read_log(tmp_path / "val")


# verifiers


def episode(number=0, *, run="r", **trace):
    """An episode of an evaluation, of the task with this number."""
    task = {"key": f"k{number}", "data": {"prompt": "How many?"}}
    run = {"type": "eval", "id": run}
    return {"task": task, "run": run, "traces": [{"task": task, "rewards": {"right": 1.0}, "ok": True} | trace]}


def turn(content, *, sampled=True):
    return {"message": {"role": "assistant", "content": content}, "sampled": sampled}


def test_verifiers_evaluation_has_a_group_for_each_task_with_texts_tokens_and_limits():
    log = read_log(SAMPLES / "verifiers")
    assert log.notes == [
        "reward: right + short, each times its weight",
        "other metrics, to choose with --reward NAME: length",
    ]
    first = next(each(log.groups))
    assert first.rewards == [0.0, 0.0, 0.0, 1.1]
    assert log.groups.tokens_R[:4].tolist() == [24, 24, 24, 8]
    assert log.groups.truncated_V[0] == 3
    assert log.groups.characters_R[0] == 75
    assert np.isfinite(log.groups.features_PD).all()


def test_verifiers_failures_are_counted_by_their_error_and_are_not_wrong():
    log = read_log(SAMPLES / "verifiers_failed")
    assert rewards(log) == [[None, None]]
    assert "2 traces failed and have no score: ProviderError (2)" in log.notes


def test_verifiers_turns_are_counted_and_groups_are_of_one_run(tmp_path):
    played = [turn("given", sampled=False), turn("first"), turn("second"), turn("last one")]
    rows = [episode(nodes=played), episode(nodes=[turn("last one")]), episode(run="another", nodes=[turn("x")])]
    log = read_log(lines(tmp_path / "traces.jsonl", rows))
    assert log.format == "verifiers"
    assert rewards(log) == [[1, 1], [1]]
    assert "turns of a rollout: 1.7 on average, 3 in the longest" in log.notes
    assert log.groups.answer_R[0] == log.groups.answer_R[1] != log.groups.answer_R[2]


def test_verifiers_tasks_of_two_environments_with_one_key_are_two_prompts(tmp_path):
    rows = [episode() | {"env": {"id": name}} for name in ("gsm8k", "gsm8k", "sums", "sums")]
    log = read_log(lines(tmp_path / "traces.jsonl", rows))
    assert [(group.prompt, group.rewards) for group in each(log.groups)] == [("k0", [1, 1]), ("sums k0", [1, 1])]


def test_verifiers_with_one_rollout_a_task_says_how_to_get_groups(tmp_path):
    log = read_log(lines(tmp_path / "traces.jsonl", [episode(0), episode(1)]))
    assert "every task has a single rollout, so there are no groups; evaluate with, say, --num-rollouts 4" in log.notes


def test_verifiers_runs_without_an_id_are_told_apart_by_their_files(tmp_path):
    for name in ("a", "b"):
        lines(tmp_path / name / "traces.jsonl", [episode(run=None, id=f"{name}{at}") for at in range(2)])
    assert rewards(read_log(tmp_path)) == [[1, 1], [1, 1]]


def test_verifiers_an_episode_that_failed_before_a_trace_is_of_the_group_of_its_task(tmp_path):
    cancelled = episode(1) | {"traces": [], "ok": False, "errors": [{"type": "Cancelled"}]}
    log = read_log(lines(tmp_path / "traces.jsonl", [cancelled, episode(1), episode(2), episode(1), cancelled]))
    assert sorted(rewards(log), key=len) == [[1], [1, 1, None, None]]
    assert "2 traces failed and have no score: Cancelled (2)" in log.notes


def test_verifiers_results_of_before_0_4_and_traces_of_later_say_what_was_expected(tmp_path):
    older = lines(tmp_path / "results.jsonl", [{"example_id": 0, "prompt": [], "completion": [], "reward": 1.0}])
    with pytest.raises(
        ValueError, match=r"expected an episode of verifiers 0\.4 with traces and rewards, found example_id"
    ):
        read_log(older)
    later = lines(tmp_path / "later" / "traces.jsonl", [episode(version=2)])
    with pytest.raises(
        ValueError, match=r"trace of version 2, expected 1, as verifiers 0\.4 and prime-rl 0\.7 to 0\.9"
    ):
        read_log(later)


# prime-rl


def of_group(group, *scores, agent="solver", step=1, run="r"):
    """Episodes of prime-rl in one group; one without a trace where the score is None."""
    task = {"key": "k", "data": {"prompt": "How many?"}}
    about = {"task": task, "group": {"id": group}, "run": {"type": "train", "id": run, "work": {"step": step}}}
    return [
        about | ({"traces": [], "ok": False} if score is None else {"traces": [
            {"task": task, "agent": {"name": agent}, "rewards": {"right": score}, "ok": True}
        ]})
        for score in scores
    ]  # fmt: skip


def test_prime_rl_an_episode_that_failed_before_a_trace_is_of_every_agent_of_its_group(tmp_path):
    rows = [*of_group("g", None), *of_group("g", 0, 1), *of_group("g", 1, agent="critic"), *of_group("h", None, None)]
    log = read_log(lines(tmp_path / "t.jsonl", rows))
    assert rewards(log) == [[0, 1, None], [1, None], [None, None]]
    assert "3 traces failed and have no score: no reason given (3)" in log.notes


def test_prime_rl_a_group_is_of_one_agent_one_step_and_one_run_and_its_id_may_be_0(tmp_path):
    rows = [*of_group(0, 0, 1), *of_group(0, 1, agent="critic"), *of_group(0, 0, step=2), *of_group(0, 1, run="s")]
    assert rewards(read_log(lines(tmp_path / "t.jsonl", rows))) == [[0, 1], [1], [0], [1]]


def test_prime_rl_reads_all_traces_rather_than_the_effective_ones():
    log = read_log(SAMPLES / "prime-rl")
    counted = shares_of(log.groups).rollouts
    assert log.complete
    assert counted == {
        "taught": 6,
        "all_right": 8,
        "all_truncated": 8,
        "all_limited": 0,
        "unscored": 2,
        "all_wrong": 0,
        "all_alike": 0,
        "single": 0,
    }
    assert {group.prompt for group in each(log.groups)} == {"sum/0", "sum/1", "sum/2"}


def test_prime_rl_at_the_commit_that_was_read_has_groups_steps_tokens_and_failures():
    """2 right and 2 wrong; 3 right and one that failed; an episode that failed before a trace; a judge, not trained."""
    log = read_log(SAMPLES / "prime-rl-0.8")
    assert (log.format, log.bad, log.complete) == ("prime-rl", 0, True)
    groups = list(each(log.groups))
    assert [(group.prompt, group.step, group.rewards) for group in groups] == [
        ("sum/0", 3, [1.5, 1.5, 0.5, 0.5]),
        ("sum/1", 3, [1.5, 1.5, 1.5, None]),
        ("sum/2", 3, [None]),
    ]
    assert log.groups.tokens_R.tolist()[:4] == [4, 8, 4, 4]
    assert log.groups.truncated_V.tolist() == [1, 0, 0]
    assert "2 traces failed and have no score: ProviderError (1), SandboxError (1)" in log.notes
    assert "turns of a rollout: 1.1 on average, 2 in the longest" in log.notes


def test_prime_rl_0_9_writes_a_stream_of_chunks_packed_but_for_the_last():
    """Each episode once, evaluations among them; annotations and indices beside the stream are no traces."""
    log = read_log(SAMPLES / "prime-rl-0.9")
    assert (log.format, log.bad, log.complete) == ("prime-rl", 0, True)
    assert [(group.prompt, group.step, group.rewards) for group in each(log.groups)] == [
        ("sum/0", 4, [1.5, 1.5, 0.5, 0.5]),  # where it came back, not where it was dispatched
        ("sum/1", 4, [1.5, 1.5, 1.5, None]),
        ("sum/2", 3, [None]),  # it failed before there was a trace to stamp
    ]
    assert log.groups.tokens_R.tolist()[:4] == [4, 8, 4, 4]
    assert "1 traces are of evaluations and were left out; --rows all counts them as training" in log.notes


def test_prime_rl_stream_that_is_written_while_it_is_read(tmp_path):
    """A chunk is there twice while it is packed, and the last line of the open one is half a line."""
    folder = tmp_path / "stream"
    shutil.copytree(SAMPLES / "prime-rl-0.9" / "monitors" / "file" / "traces" / "stream", folder)
    with pyarrow.input_stream(str(folder / "00000.jsonl.zst"), compression="zstd") as packed:
        (folder / "00000.jsonl").write_bytes(packed.read())
    (folder / "00001.jsonl.zst.tmp").write_bytes(b"begun")
    whole = (folder / "00003.jsonl").read_bytes()
    (folder / "00003.jsonl").write_bytes(whole + whole[:100])
    log = read_log(folder)
    assert rewards(log) == rewards(read_log(SAMPLES / "prime-rl-0.9"))
    assert (log.bad, log.first_bad) == (1, f"{folder / '00003.jsonl'}:{whole.count(10) + 1}: not JSON")


def test_prime_rl_effective_traces_alone_are_not_complete():
    log = read_log(str(SAMPLES / "prime-rl" / "**" / "effective" / "*.jsonl"))
    assert not log.complete
    assert any("effective" in note for note in log.notes)


@pytest.mark.parametrize(
    "stamp",
    [{"group_id": "g", "kind": "train"}, {"info": {"group_id": "g"}, "run": {"type": "train", "id": "r"}}],
    ids=["0.7", "0.8"],
)
def test_prime_rl_traces_of_older_versions_are_lines_of_their_own(tmp_path, stamp):
    trace = {"task": {"type": "T", "data": {"idx": 3}}, "errors": [], "stop_condition": None} | stamp
    scored = [{"right": 1.0}, {"right": {"score": 0.5, "weight": 2.0}, "n": None}, {}]
    path = tmp_path / "rollouts" / "step_4" / "train" / "all" / "traces.jsonl"
    rows = [trace | {"rewards": rewards} for rewards in scored] + [trace | {"rewards": {"right": 1.0}, "errors": [{}]}]
    log = read_log(lines(path, rows))
    assert rewards(log) == [[1, 1, None, None]]
    assert next(each(log.groups)).step == 4


def test_prime_rl_leaves_out_evaluation_and_agents_that_are_not_trained(tmp_path):
    trace = {"group_id": "g", "task": {"data": {}, "key": "k"}, "rewards": {"r": 1.0}}
    kinds = [{"kind": "eval"}, {"agent": {"trainable": False}}, {"kind": "train"}]
    assert rewards(read_log(lines(tmp_path / "traces.jsonl", [trace | kind for kind in kinds]))) == [[1]]


def test_prime_rl_says_which_rewards_count_and_takes_those_that_are_named(tmp_path):
    trace = {"group_id": "g", "task": {"data": {}, "key": "k"}, "rewards": {"right": 1.0, "short": 0.5}}
    traces = [trace | {"id": "t1"}, trace | {"id": "t1"}, trace | {"id": "t2", "kind": "eval"}]
    path = lines(tmp_path / "traces.jsonl", traces)
    log = read_log(path)
    assert rewards(log) == [[1.5]]
    assert log.notes[:3] == [
        "reward: right + short, each times its weight",
        "1 traces are of evaluations and were left out; --rows all counts them as training",
        "1 traces repeat the id of another and were left out",
    ]
    assert rewards(read_log(path, options=Options(reward="short"))) == [[0.5]]


def test_prime_rl_sums_that_differ_only_by_rounding_are_equal_rewards(tmp_path):
    trace = {"group_id": "g", "task": {"data": {}, "key": "k"}}
    made = [{"a": 0.1, "b": 0.2, "c": 0.3}, {"a": 0.3, "b": 0.2, "c": 0.1}]
    path = lines(tmp_path / "traces.jsonl", [trace | {"id": f"t{at}", "rewards": of} for at, of in enumerate(made)])
    assert not read_log(path).groups.mixed_V.any()


# ours


def ours(rollout, group, metric, stage=0, **more):
    return {
        "rollout": rollout,
        "group": group,
        "key": f"k{group}",
        "version": 2,
        "stage": stage,
        "metric": metric,
    } | more


def test_ours_knows_which_rollouts_were_ordered_first(tmp_path):
    rows = [
        ours(0, 0, 1.0),
        ours(1, 0, 0.0),
        ours(2, 0, 1.0, stage=1),
        ours(3, 1, None, unscored="timeout", truncated=True),
    ]
    log = read_log(lines(tmp_path / "rollouts.jsonl", rows))
    assert rewards(log) == [[1, 0, 1], [None]]
    assert [(group.first, group.truncated, group.step) for group in each(log.groups)] == [(2, 0, 2), (1, 1, 2)]


def test_ours_rollouts_and_accounts_of_a_run_agree():
    log = read_log(SAMPLES / "rollalloc")
    taught = shares_of(log.groups).rollouts
    assert sum(log.accounts.values()) == sum(taught.values())
    assert (taught["taught"], taught["unscored"]) == (log.accounts["trained"], log.accounts["failed"])
    assert {len(group.rewards) for group in each(log.groups)} == {
        2,
        4,
    }  # pilots that were dropped, and those with commits


# what is no log


def test_a_path_without_a_log_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_log(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        read_log(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_log(str(tmp_path / "*.jsonl"))


def test_files_of_no_known_format_are_named_with_what_was_expected(tmp_path):
    lines(tmp_path / "x.jsonl", [{"a": 1}])
    with pytest.raises(
        ValueError, match=r"expected a log of one of these \(trl: .*found x.jsonl; write the log of another"
    ):
        read_log(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"found no rollout in x\.jsonl; the first of 1 lines.*expected the fields input and acc or score",
    ):
        read_log(tmp_path, "verl")
    with pytest.raises(ValueError, match=r"expected parquet files.*found x\.jsonl"):
        read_log(tmp_path, "trl")


def test_names_out_of_a_file_cannot_move_the_cursor(tmp_path):
    lines(
        tmp_path / "x.jsonl",
        [{"input": 1, "output": 1, "\x1b[2Jsc\u202eore" * 9: 1} | {str(key): 1 for key in range(20)}],
    )
    with pytest.raises(ValueError, match=r"found input, output, .* and 15 more") as caught:
        read_log(tmp_path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500
