"""Profiles of the user's own model, sampled here: what is in the folder, that a killed one goes on, and what is refused.

A profile is a folder with some rollouts of each of some prompts, drawn once, of which `rollalloc advise` makes its verdict.
"""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from stand_in_server import logged

from rollalloc.advise.profile_folder import refuse_changed
from rollalloc.advise.sampled_profile import sample_profile
from rollalloc.core.events import NoScores
from rollalloc.data.feature_file import read_features
from rollalloc.files.stamps import GrowingStamp
from rollalloc.models.settings import Sampling
from rollalloc.waste.readers import read_log

REWARD = """
import time

def half(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str) % 2)

def poor(data_source, solution_str, ground_truth, extra_info):
    if "s1" in solution_str:
        time.sleep(3600)
    if "s2" in solution_str:
        raise KeyError("no such answer")
    return 1.0

def never(data_source, solution_str, ground_truth, extra_info):
    raise KeyError("no such column")
"""


@pytest.fixture(scope="module")
def rewarded(run_of, tmp_path_factory):
    """(name of a reward, **changes of the source) → a run that is scored by it."""
    file = tmp_path_factory.mktemp("rewards") / "rewards.py"
    file.write_text(REWARD)
    return lambda name, **changes: run_of(reward=f"{file}:{name}", **changes)


@pytest.fixture(scope="module")
def sampled(rewarded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampled") / "profile"
    sample_profile(rewarded("half"), folder, prompts=40, n=3, seed=5)
    return folder


@pytest.fixture
def profile(sampled, tmp_path):
    """A profile of 40 prompts of 80, three rollouts each: its folder."""
    return shutil.copytree(sampled, tmp_path / "profile")


def test_prompts_are_drawn_without_replacement_and_each_gets_its_rollouts(profile):
    rows = logged(profile)
    assert [row["rollout"] for row in rows] == list(range(120))
    assert set(Counter(row["key"] for row in rows).values()) == {3}
    assert {row["metric"] for row in rows} == {0.0, 1.0}
    assert all(isinstance(row["text"], str) and row["tokens"] > 0 and row["truncated"] in (False, True) for row in rows)
    groups = read_log(profile).groups
    assert (len(groups), set(groups.size_V.tolist())) == (40, {3})


def kill_after(profile, prompts, torn):
    """Leave of a profile what a kill does: the rollouts of so many prompts, and `torn` bytes that no stamp answers for."""
    log, description = profile / "rollouts.jsonl", profile / "profile.json"
    whole = sum(map(len, log.read_bytes().splitlines(keepends=True)[: 3 * prompts]))
    os.truncate(log, whole + torn)
    described = json.loads(description.read_text())
    description.write_text(json.dumps(described | {"log": GrowingStamp(log).renewed(whole)}))


@pytest.mark.parametrize(("prompts", "torn"), [(0, 0), (0, 1), (2, 100), (16, 3000), (32, 0), (40, 0)])
def test_a_profile_that_was_killed_goes_on_to_the_same_rollouts(rewarded, profile, prompts, torn):
    log = profile / "rollouts.jsonl"
    whole, described = log.read_bytes(), json.loads((profile / "profile.json").read_text())
    kill_after(profile, prompts, torn)
    if torn:
        with pytest.raises(ValueError, match="sampling was interrupted, run the same command again"):
            refuse_changed(profile)
    sample_profile(rewarded("half"), profile, prompts=40, n=3, seed=5)
    assert log.read_bytes() == whole
    assert json.loads((profile / "profile.json").read_text()) == described
    refuse_changed(log)  # raises no error: it is whole again


def test_more_prompts_are_added_to_those_that_are_there(rewarded, profile):
    before = logged(profile)
    sample_profile(rewarded("half"), profile, prompts=50, n=3, seed=5)
    after = logged(profile)
    assert after[:120] == before
    assert len({row["key"] for row in after}) == 50
    assert len(read_features(profile / "features.safetensors", [row["key"] for row in after[::3]])) == 50


def test_other_settings_are_refused_by_name(rewarded, profile):
    run = rewarded("half")
    warmer = replace(run, sampling=Sampling(3, temperature=0.5))
    for changed, how, named in (
        (run, {"seed": 6}, "profile.seed: saved 5, given 6"),
        (run, {"n": 4}, "profile.n: saved 3, given 4"),
        (run, {"prompts": 39}, "profile.prompts: saved 40, given 39"),
        (warmer, {}, "profile.sampling.temperature: saved 1.0, given 0.5"),
        (rewarded("poor"), {}, "profile.source.reward"),
    ):
        with pytest.raises(ValueError, match=r"made with other settings.*--overwrite") as refused:
            sample_profile(changed, profile, **{"prompts": 40, "n": 3, "seed": 5} | how)
        assert named in str(refused.value)
    file = Path(run.reward.rpartition(":")[0])
    file.write_text(REWARD + "\n")
    try:
        with pytest.raises(ValueError, match=r"profile\.digests\..*rewards\.py"):
            sample_profile(run, profile, prompts=40, n=3, seed=5)
    finally:
        file.write_text(REWARD)


def test_where_it_is_computed_and_how_much_at_once_may_change(rewarded, profile):
    run = rewarded("half", reward_workers=1)
    run = replace(run, sampling=replace(run.sampling, max_rows=2))
    sample_profile(run, profile, prompts=40, n=3, seed=5)  # is not refused


def test_what_is_not_ours_is_neither_overwritten_nor_removed(rewarded, profile, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "rollouts.jsonl").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match=r"mine holds rollouts\.jsonl, which was not written by rollalloc"):
            sample_profile(rewarded("half"), mine, overwrite=overwrite)
    assert [path.name for path in mine.rglob("*")] == ["rollouts.jsonl"]
    (profile / "notes.txt").write_text("mine")
    sample_profile(rewarded("half"), profile, prompts=2, n=2, overwrite=True)
    assert (len(logged(profile)), (profile / "notes.txt").read_text()) == (4, "mine")


def test_a_log_that_was_changed_is_refused(rewarded, profile):
    """One score turned by hand changes what is advised, and every line still is a rollout of the profile."""
    log = profile / "rollouts.jsonl"
    whole = log.read_text()
    for changed in (whole.replace('"metric": 1.0', '"metric": 0.0', 1), whole.split("\n", 1)[1], whole[:-20]):
        assert changed != whole
        log.write_text(changed)
        with pytest.raises(
            ValueError, match=r"the log was modified after sampling. Restore it from a copy.*--overwrite"
        ):
            sample_profile(rewarded("half"), profile, prompts=40, n=3, seed=5)
        with pytest.raises(ValueError, match="the log was modified after sampling"):
            refuse_changed(log)
    log.write_text(whole)
    sample_profile(rewarded("half"), profile, prompts=40, n=3, seed=5)  # put back, it is accepted


@pytest.mark.e2e
def test_a_reward_that_hangs_or_raises_leaves_rollouts_unscored(rewarded, tmp_path):
    run = rewarded("poor", reward_workers=1, reward_limit_s=0.5)
    sample_profile(run, tmp_path / "poor", prompts=8, n=2)
    rows = logged(tmp_path / "poor")
    hung = [row for row in rows if "s1" in row["text"]]
    raised = [row for row in rows if "s2" in row["text"] and "s1" not in row["text"]]
    assert hung
    assert raised
    assert all(row["metric"] is None and row["unscored"] for row in hung + raised)
    assert all(row["metric"] == 1.0 for row in rows if row not in hung + raised)
    assert json.loads((tmp_path / "poor" / "rewards.json").read_text())["lost"]


def test_a_reward_that_never_scores_ends_it(rewarded, tmp_path):
    with pytest.raises(NoScores, match=r"none of 64 rollouts has a score, .*no such column.*--overwrite"):
        sample_profile(rewarded("never"), tmp_path / "never", prompts=80, n=4)
    sample_profile(rewarded("half"), tmp_path / "never", prompts=8, n=4, overwrite=True)


@pytest.mark.parametrize(("name", "value"), [("prompts", 0), ("n", 0), ("seed", -1), ("n", 1.5)])
def test_numbers_out_of_range_are_refused(run_of, tmp_path, name, value):
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least"):
        sample_profile(run_of(), tmp_path / "new", **{name: value})
    assert not (tmp_path / "new").exists()
