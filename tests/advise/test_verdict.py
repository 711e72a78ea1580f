"""The rule of docs/advise.md, branch by branch, on profiles that were made up; and that its figures stand in the guides."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_profile import drawn, profiled

from rollalloc.advise import verdict as rule
from rollalloc.advise.profile import SIZES, Profile
from rollalloc.advise.verdict import Choice, present_of, verdict_of
from rollalloc.waste.shares import Share

ROOT = Path(__file__).parents[2]
GRPO = Choice("grpo", 16, 4)


def like(auc=0.7, alike=0.5, differ=0.0, profile=None) -> Profile:
    """A profile with these figures: AUC, share of groups of 4 without variance, right answers that differ."""
    profile = profile or profiled(drawn())
    told = Share(auc, None)
    predicted = replace(profile.predictability.record, auc=told)
    return replace(
        profile,
        predictability=replace(profile.predictability, features=None, record=predicted, both=None),
        zero_variance={**profile.zero_variance, 4: Share(alike, None)},
        right_pairs_differ=None if differ is None else Share(differ, None),
    )


@pytest.mark.parametrize(
    ("profile", "present", "kind", "recipe", "because"),
    [
        (like(), GRPO, "switch", "reinforce", "In 50% of groups of 4 all rewards are equal"),
        (like(differ=None), GRPO, "switch", "reinforce", "In 50% of groups of 4"),
        (like(differ=0.49), GRPO, "switch", "reinforce", "In 50% of groups of 4"),
        (
            like(differ=0.5),
            GRPO,
            "switch",
            "reinforce",
            "Two right answers to a prompt differ with a probability of 50%",
        ),
        (like(auc=0.95, alike=0.8), GRPO, "switch", "reinforce", "In 80% of groups of 4"),
        (
            like(auc=0.95, alike=0.8),
            Choice("foresight", 32, 1),
            "keep",
            "foresight",
            "has one rollout per prompt already",
        ),
        (like(), Choice("reinforce", 32, 1), "keep", "reinforce", "REINFORCE has one rollout per prompt already"),
        (like(), Choice("raft", 32, 1), "keep", "raft", "RAFT has one rollout per prompt already"),
        (like(), Choice("dapo", 16, 4), "switch", "reinforce", "In 50% of groups of 4"),
    ],
)
def test_each_branch_of_the_rule(profile, present, kind, recipe, because):
    verdict = verdict_of(profile, present)
    assert (verdict.kind, verdict.choice.recipe) == (kind, recipe)
    assert because in verdict.because[0]
    assert verdict.because[1].startswith("Measured")
    assert verdict.sentence.startswith("Keep " if kind == "keep" else "Begin with ")
    assert verdict.choice == present if kind == "keep" else verdict.choice.rows == present.rows


@pytest.mark.parametrize(
    ("profile", "present", "compared"),
    [
        (like(auc=0.9, alike=0.7), GRPO, "foresight"),
        (like(auc=0.9, alike=0.7), Choice("reinforce", 32, 1), "foresight"),
        (like(auc=0.9, alike=0.7), Choice("foresight", 32, 1), "REINFORCE"),
        (like(auc=0.89, alike=0.7), GRPO, None),
        (like(auc=0.9, alike=0.69), GRPO, None),
    ],
)
def test_foresight_is_a_recipe_to_compare_where_it_can_predict_and_never_the_first(profile, present, compared):
    """What was measured of it is mixed, and the figures that speak against it are quoted."""
    verdict = verdict_of(profile, present)
    assert verdict.choice.recipe != "foresight" or present.recipe == "foresight"
    said = [note for note in verdict.notes if note.startswith("Compare ")]
    assert len(said) == (compared is not None)
    if compared is not None:
        assert said[0].startswith(
            f"Compare {compared} with it: success can be predicted with an AUC of 0.90, and 70% of "
        )
        assert verdict.notes[0] == said[0]
        assert rule.PREDICTION in said[0]


GRADED = [[0.1, 0.5, 0.9, 0.3]] * 20 + [[0.2] * 4] * 40


def test_of_graded_rewards_reinforce_is_the_recipe_though_no_one_is_right():
    """All of them are wrong by the threshold; a third of the groups differ, and teaches."""
    nearly_alike = replace(profiled(GRADED), zero_variance={n: Share(0.99, None) for n in SIZES})
    for present in (GRPO, Choice("raft", 64, 1)):
        verdict = verdict_of(nearly_alike, present)
        assert (verdict.kind, verdict.choice.recipe) == ("switch", "reinforce")
        assert not any(note == rule.RAFT_IS_LEVEL for note in verdict.notes)


def test_rewards_beyond_rates_rule_out_what_predicts_rates():
    profile = like(auc=0.95, alike=0.8, profile=profiled(np.where(drawn() > 0, 3.0, -1.0)))
    for present in (GRPO, Choice("foresight", 64, 1)):
        verdict = verdict_of(profile, present)
        assert verdict.choice.recipe == "reinforce"
        assert any("Foresight is ruled out" in note for note in verdict.notes)
        assert not any(note.startswith("Compare ") for note in verdict.notes)


@pytest.mark.parametrize(
    ("rewards", "says"),
    [
        (np.zeros((64, 4)), "hardly any are right"),
        (np.ones((64, 4)), "Use harder prompts"),
        (np.repeat([[0.0] * 8, [1.0] * 8], 32, axis=0), "nearly always solved, or hardly ever"),
        (-np.ones((64, 4)), "hardly any are right"),
    ],
)
def test_no_recipe_is_recommended_for_prompts_that_teach_nothing(rewards, says):
    verdict = verdict_of(profiled(rewards), GRPO)
    assert (verdict.kind, verdict.choice) == ("barren", None)
    assert verdict.sentence.startswith("No recipe learns much from these prompts")
    assert says in verdict.sentence


@pytest.mark.parametrize(("prompts", "groups"), [(None, 64), (1000, 64), (64, 64), (63, 56), (10, 8), (3, 1)])
def test_a_batch_has_no_more_prompts_than_there_are(prompts, groups):
    """Fewer than the rows of a batch are rounded to a multiple of 8, which micro-batches and processes divide."""
    assert verdict_of(like(), GRPO, prompts).choice == Choice("reinforce", groups, 1)


@pytest.mark.parametrize(("prompts", "more"), [(3, 1100), (9, 1000)])
def test_so_much_is_to_be_sampled_that_a_thousand_are_there(prompts, more):
    """1,024 less 3 × 4 rollouts, 9 × 4: in hundreds."""
    found = verdict_of(profiled([[0, 1, 0, 1]] * prompts), GRPO)
    assert (found.kind, found.more) == ("too few", more)


@pytest.mark.parametrize(
    ("n", "sampled", "present"),
    [(4, False, GRPO), (1, False, Choice("reinforce", 64, 1)), (4, True, Choice("grpo", 8, 8))],
)
def test_what_is_not_said_is_taken_from_a_log_and_never_from_what_was_sampled_here(n, sampled, present):
    taken, why = present_of(profiled(drawn(n=n)), sampled=sampled)
    assert taken == present
    assert why.startswith(f"Assumed present setting: {present.words}, because ")
    assert "Use --present to name another" in why


LEADERBOARD, SCALE, LOG = "lab/docs/leaderboard.md", "lab/docs/scale.md", "lab/log/*.md"
SOURCES = {
    "ONE_PER_PROMPT": (LEADERBOARD, SCALE),
    "GRADED": (LEADERBOARD,),
    "DIFFERENT_ANSWERS": (LOG, "README.md"),
    "PREDICTION": (LEADERBOARD, "lab/docs/foresight.md"),
    "RAFT_IS_LEVEL": (LEADERBOARD, SCALE),
    "NO_GAIN": (LOG,),
    "FIXED_GROUPS": (SCALE,),
}


@pytest.mark.parametrize("name", SOURCES)
def test_each_figure_stands_in_the_guide_that_it_is_quoted_from(name):
    text = "".join(file.read_text("utf-8") for pattern in SOURCES[name] for file in ROOT.glob(pattern))
    figures = re.findall(r"\d\.\d\d? \[[^\]]+\]|> \d\.\d\d|\b\d\.\d{1,2}\b(?!M)", getattr(rule, name))
    assert figures
    for figure in figures:
        assert figure in text, figure
    for model in re.findall(r"\b(?:8M|135M)\b", getattr(rule, name)):
        assert model.lower() in text.lower()


def test_the_guide_states_the_thresholds_of_the_rule():
    guide = (ROOT / "docs" / "advise.md").read_text(encoding="utf-8")
    for words in (
        f"AUC of success is {rule.PREDICTABLE} or more, and {rule.FEW_MIXED:.0%} or more of groups of 4",
        f"{rule.BARREN:.0%} or more of groups of {rule.LARGE_GROUP}",
        f"differ with a probability of {rule.MANY_ANSWERS:.0%} or more",
    ):
        assert words in guide
