"""The ladder's U-shaped twins, in their smallest shape: sharper facts, pools by exact rates, two held-out sets, files."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from rollalloc.data.prompts import load_prompts
from rollalloc.models.policy import Policy
from rollalloc.tasks.files import unseen
from rollalloc.tasks.skills import Pool
from rollalloc_lab.tasks import ladder, twins
from rollalloc_lab.tasks.ladder import Mixture
from rollalloc_lab.tasks.rungs import RUNGS, Model, WarmedUp
from rollalloc_lab.tasks.twins import BALANCED, TWINS, U_SHAPED, Sharpened, Twin, balanced_of, name_of

RUNG = replace(
    RUNGS["0.15m"],
    name="quick",
    model=Model(hidden=32, layers=1),
    warm_up=WarmedUp(steps=3, batch=4, learning_rate=1e-3, check_every=2, low=0.0, high=1.0, pass_at_8=0.0),
)
ASKED = Mixture(train=300, heldout=60)
HOPELESS = Pool(edges=(0.5,), shares=(1.0, 0.0))  # a model that was hardly trained can answer nothing
QUICK = Twin(
    steps=4, learning_rate=1e-3, check_every=2, solved=0.0, train=48, heldout=20, shape=HOPELESS, balanced=HOPELESS
)  # fmt: skip


def test_sharper_facts_are_nearer_to_0_and_1_and_keep_their_order_and_their_mistakes():
    plain, sharp, same = Mixture(), Sharpened(), Sharpened(sharpness=1.0)
    rng = np.random.default_rng(0)
    parts = [part for _ in range(100) for part in plain.drawn(rng).parts]
    for part in parts:
        (rate, kind), (sharper, as_before) = plain._shown(part), sharp._shown(part)
        assert as_before == kind
        assert same._shown(part)[0] == pytest.approx(rate)
        # By hand: the odds of the sharper rate are the fourth power of the odds.
        assert sharper / (1 - sharper + 1e-300) == pytest.approx((rate / (1 - rate)) ** 4, rel=1e-3) or sharper == 1
        assert (sharper >= rate) if rate >= 0.5 else (sharper <= rate)


def test_a_twin_is_made_once_and_a_second_call_changes_nothing(tmp_path):
    made = twins.prepare(tmp_path, RUNG, QUICK, ASKED)
    looks = json.loads((made.model / "warm_up.json").read_text())
    assert [set(each) for each in looks] == [{"step", "accuracy", "pass_at_8", "hopeless", "solved"}]
    assert looks[0]["step"] == 2  # it is sure of enough at the first check, because nothing is asked of it
    assert Policy.load(made.model).context == 48
    written = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}
    assert twins.prepare(tmp_path, RUNG, QUICK, ASKED) == made
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()} == written
    splits = [load_prompts(file) for file in (made.train, made.heldout, balanced_of(made))]
    assert [len(each.prompts) for each in splits] == [48, 20, 20]
    assert len({str(text) for each in splits for text in each.prompts}) == 88  # no prompt is in two splits
    assert all(0 <= extra["exact_p"] < 0.5 for each in splits for extra in each.extra_infos)


def test_no_held_out_question_is_shown_when_a_twin_is_sharpened(tmp_path, monkeypatch):
    shown: set[str] = set()

    def supervise(model, tokenizer, warm_up, draw, **_):
        shown.update(draw(5000)[0])

    base = ladder.prepare(tmp_path, RUNG, ASKED)
    monkeypatch.setattr(twins, "supervise", supervise)
    twins._sharpen(tmp_path / "sharp", base.model, RUNG, QUICK, "cpu", unseen)
    candidates = {split: {each.prompt for each in found} for split, found in QUICK.candidates().items()}
    # Short questions come again and again, so that a held-out one would have been shown.
    assert shown & candidates["train"]
    assert not shown & (candidates["heldout"] | candidates["balanced"])


def test_a_twins_rates_are_those_of_its_own_model(tmp_path):
    made = twins.prepare(tmp_path, RUNG, QUICK, ASKED)
    policy, split = Policy.load(made.model), load_prompts(made.heldout)
    problems = [
        twins.Problem(str(asked), str(answer)) for asked, answer in zip(split.prompts, split.ground_truths, strict=True)
    ]
    np.testing.assert_allclose(
        twins.rates(policy, RUNG, problems), [extra["exact_p"] for extra in split.extra_infos], rtol=1e-4
    )


def test_a_folder_that_was_made_with_other_settings_is_refused(tmp_path):
    twins.prepare(tmp_path, RUNG, QUICK, ASKED)
    with pytest.raises(ValueError, match="delete it or choose another folder"):
        twins.prepare(tmp_path, RUNG, replace(QUICK, train=50), ASKED)


def test_a_warm_up_that_never_becomes_sure_says_so_and_leaves_no_model(tmp_path):
    with pytest.raises(
        ValueError, match=r"ladder/quick-u ended after 4 steps .* on 0.0% .* expected 11.0%.*more steps"
    ):
        twins.prepare(tmp_path, RUNG, replace(QUICK, solved=0.11), ASKED)
    assert not list(tmp_path.glob("*-u-model"))


def test_the_package_s_pools_are_u_shaped_and_balanced_by_exact_rates(tmp_path, monkeypatch):
    """In place of a model's rates: of three questions one is hopeless, one solved, one between."""

    def rates(policy, rung, problems):
        third_N = np.arange(len(problems)) % 3
        return np.choose(third_N, [0.019, 0.95, 0.02 + 0.93 * (np.arange(len(problems)) // 3 % 20) / 20])

    monkeypatch.setattr(twins, "rates", rates)
    small = replace(TWINS["0.15m"], train=90, heldout=60, steps=2, check_every=1, solved=0.1)
    made = twins.prepare(tmp_path, RUNG, small, ASKED)
    found = {
        split: np.array([extra["exact_p"] for extra in load_prompts(file).extra_infos])
        for split, file in (("train", made.train), ("heldout", made.heldout), ("balanced", balanced_of(made)))
    }
    assert np.bincount(np.digitize(found["train"], U_SHAPED.edges)).tolist() == [30, 30, 30]
    assert np.bincount(np.digitize(found["heldout"], U_SHAPED.edges)).tolist() == [20, 20, 20]
    assert np.bincount(np.digitize(found["balanced"], BALANCED.edges)).tolist() == [6] * 10


def test_no_candidate_is_in_two_splits():
    twin = replace(QUICK, train=100, heldout=50)
    candidates = twin.candidates()
    texts = {split: {each.prompt for each in found} for split, found in candidates.items()}
    assert [len(texts[split]) for split in ("train", "heldout", "balanced")] == [400, 200, 200]
    assert len(set.union(*texts.values())) == 800
    assert candidates == twin.candidates()


@pytest.mark.parametrize("name", TWINS)
def test_every_twin_is_of_a_rung(name):
    assert name_of(name) == f"{RUNGS[name].task}-u"
