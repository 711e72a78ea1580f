"""The ladder: questions that no model has seen answered, warm-ups that end in their band or say why not, rungs as files."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from rollalloc.data.prompts import load_prompts
from rollalloc.models.policy import Policy
from rollalloc.tasks.presets import planned_run
from rollalloc_lab.bench.plan import freeze, frozen_in, make_plan
from rollalloc_lab.bench.tiers import LADDER_METHODS, TIERS
from rollalloc_lab.tasks import ladder
from rollalloc_lab.tasks.ladder import FAMILIES, LEVELS, LONGEST, Mixture, compute_score, spread
from rollalloc_lab.tasks.rungs import RUNGS, Model, WarmedUp

SMALL = Mixture(train=300, heldout=60)
QUICK = replace(
    RUNGS["0.15m"],
    name="quick",
    model=Model(hidden=32, layers=1),
    warm_up=WarmedUp(steps=3, batch=4, learning_rate=1e-3, check_every=2, low=0.0, high=1.0, pass_at_8=0.0),
)


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    folder = ladder.questions(tmp_path_factory.mktemp("ladder") / "questions", SMALL)
    return load_prompts(folder / "train.parquet"), load_prompts(folder / "heldout.parquet")


def test_no_held_out_question_is_trained_on_or_shown_in_a_warm_up(asked):
    train, heldout = asked
    assert (len(train.keys), len(heldout.keys)) == (300, 60)
    held = frozenset(map(str, heldout.prompts))
    assert len(held) == 60
    assert not held & set(map(str, train.prompts))
    shown, _ = SMALL.examples(np.random.default_rng(0), 3000, held)
    assert not held & set(shown)


def test_every_family_has_every_level_and_they_are_told_to_nobody(asked):
    train, _ = asked
    found = {(each["family"], each["level"]) for each in train.extra_infos}
    assert found == {(family, level) for family in FAMILIES for level in range(1, LEVELS + 1)}
    assert train.table().prior_N is None
    assert all(set(each) == {"family", "level", "shown", "split", "index"} for each in train.extra_infos)


def test_answers_are_short_and_no_mistake_is_right():
    rng = np.random.default_rng(1)
    for _ in range(500):
        each = SMALL.drawn(rng)
        assert len(each.answer) <= LONGEST
        assert compute_score("ladder", f" {each.answer} ", each.answer) == 1.0
        for at, part in enumerate(each.parts):
            assert part.wrong
            for wrong in part.wrong:
                said = " ".join(wrong if at == other else one.right for other, one in enumerate(each.parts))
                assert compute_score("ladder", said, each.answer) == 0.0


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_by_another_way(family):
    rng = np.random.default_rng(2)
    for level in range(1, LEVELS + 1):
        asked, parts = FAMILIES[family](rng, level)
        words, said = asked.partition(": ")[2].split(), " ".join(part.right for part in parts).split()
        if family in ("add", "multiply"):
            pairs = [tuple(map(int, re.split(r"\W", each))) for each in words]
            assert said == [str(a + b if family == "add" else a * b)[-1] for a, b in pairs]
        elif family == "next":
            assert said == [{"z": "a"}.get(each) or chr(ord(each) + 1) for each in words]
        elif family == "keep":
            beyond = [
                int(each) > int(words[0]) if "above" in asked else int(each) < int(words[0]) for each in words[2:]
            ]
            assert said == [each for each, kept in zip(words[2:], beyond, strict=True) if kept]
        else:
            assert said == (words[::-1] if family == "reverse" else sorted(words))


def test_the_warm_up_shows_answers_as_often_right_as_is_written_down(asked):
    train, heldout = asked
    shown = [each["shown"] for each in train.extra_infos]
    assert min(shown) < 0.05
    assert max(shown) > 0.9
    held = frozenset(map(str, heldout.prompts))
    drawn = SMALL.examples(np.random.default_rng(3), 4000, held)
    assert drawn == SMALL.examples(np.random.default_rng(3), 4000, held)
    truth = {str(prompt): truth for prompt, truth in zip(train.prompts, train.ground_truths, strict=True)}
    found = [answer == truth[prompt] for prompt, answer in zip(*drawn, strict=True) if prompt in truth]
    assert np.mean(found) == pytest.approx(np.mean(shown), abs=5 * 0.5 / np.sqrt(len(found)))


def test_a_model_is_warmed_up_once_and_its_digest_names_the_folder(tmp_path):
    made = ladder.prepare(tmp_path, QUICK, SMALL)
    assert Policy.load(made.model).context == 48
    assert [each["step"] for each in json.loads((made.model / "warm_up.json").read_text())] == [2]
    written = (made.model / "model.safetensors").stat().st_mtime_ns
    assert ladder.prepare(tmp_path, replace(QUICK, parameters=1), SMALL) == made
    assert (made.model / "model.safetensors").stat().st_mtime_ns == written
    assert QUICK.warm_up is not None
    other = ladder.prepare(tmp_path, replace(QUICK, warm_up=replace(QUICK.warm_up, batch=5)), SMALL)
    assert other.model != made.model
    assert other.train == made.train


@pytest.mark.parametrize(
    ("band", "said"),
    [
        ({"low": 0.5, "pass_at_8": 0.7}, r"outside its band after 3 steps: 0\.\d+ of.*expected 0.5 to 1.*more steps"),
        ({"low": -0.0, "high": 1e-12}, r"outside its band after 2 steps.*a smaller learning_rate"),
    ],
)
def test_a_warm_up_that_ends_outside_its_band_says_where_and_leaves_nothing(tmp_path, band, said):
    assert QUICK.warm_up is not None
    with pytest.raises(ValueError, match=said):
        ladder.prepare(tmp_path, replace(QUICK, warm_up=replace(QUICK.warm_up, **band)), SMALL)
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith("quick")] == []


def test_what_chances_say_by_hand():
    found = spread(np.array([0.0, 0.5, 1.0, 0.5]))
    assert found == {
        "accuracy": 0.5,
        "pass_at_8": (1 + 2 * (1 - 0.5**8)) / 4,
        "below_0.01": 0.25,
        "above_0.9": 0.25,
    }


def test_a_rung_without_its_model_names_the_command(tmp_path):
    pretrained = replace(QUICK, model=Model(pretrained="smollm2"))
    with pytest.raises(FileNotFoundError, match=f"create it: rollalloc model smollm2 {tmp_path}/smollm2"):
        ladder.prepare(tmp_path, pretrained, SMALL)


@pytest.mark.parametrize("name", RUNGS)
def test_the_package_s_rungs(name):
    rung = RUNGS[name]
    ladder = TIERS["ladder"]
    assert ladder.seeds_of[rung.task] == (8 if rung.parameters < 5e6 else 5)
    assert planned_run(rung.task, "grpo", 0).max_rollouts == ladder.tasks[rung.task]


def test_the_plan_of_the_ladder_has_each_rung_s_own_seeds_and_rate(tmp_path):
    plan = make_plan("ladder")
    assert [each.label for each in plan.contestants] == list(LADDER_METHODS)
    assert [task.name for task in plan.tasks] == [rung.task for rung in RUNGS.values()]
    assert [len(plan.seeds_of(task)) for task in plan.tasks] == [8, 8, 5, 5]
    assert [plan.rate_of(task) for task in plan.tasks] == [6e-4, 6e-4, 3e-4, 2e-5]
    freeze(plan, tmp_path)
    assert frozen_in(tmp_path)[0] == plan
    some = make_plan("ladder", tasks=["ladder/1m"], recipes=["grpo", "reinforce"])
    assert [(each.label, each.recipe) for each in some.contestants] == [("grpo", "grpo"), ("reinforce", "reinforce")]
    assert some.runs == 2 * 8
