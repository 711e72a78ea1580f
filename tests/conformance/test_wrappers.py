"""What a rule says of itself, and rules around others."""

from dataclasses import replace

import pytest
from cases import RECIPES

from rollalloc import recipes
from rollalloc.core import rule
from rollalloc.rules.intake import Ahead, Fill, KeepInFlight
from rollalloc.testing import promises

WRAPPERS = {
    rule.PromptRule: promises.WatchedPrompts,
    rule.OfferedPromptRule: promises.WatchedOffered,
    rule.IntakeRule: promises.WatchedIntake,
    rule.SizeRule: promises.WatchedSize,
    rule.StopRule: promises.WatchedStop,
    rule.JudgeRule: promises.WatchedJudge,
    rule.PromoteRule: promises.WatchedPromote,
    rule.RowRule: promises.WatchedRows,
    rule.AdvantageRule: promises.WatchedAdvantage,
    rule.BatchRule: promises.WatchedBatch,
}


def test_each_kind_of_rule_has_its_wrapper():
    kinds = {kind for kind in vars(rule).values() if isinstance(kind, type) and issubclass(kind, rule.Rule)}
    assert WRAPPERS.keys() == kinds - {rule.Rule}


@pytest.mark.parametrize(("kind", "wrapper"), WRAPPERS.items(), ids=lambda kind: kind.__name__)
def test_a_wrapper_answers_whatever_its_kind_is_asked(kind, wrapper):
    """Nothing of it is a default of the base class: what a rule says, by a trait or a method, is handed on."""
    asked = {name for of in kind.__mro__ if of.__module__ == rule.__name__ for name in vars(of)}
    asked = {name for name in asked if not name.startswith("_") or name == "__call__"}
    answering = {name: next(of for of in wrapper.__mro__ if name in vars(of)).__module__ for name in asked}
    assert set(answering.values()) == {promises.__name__}, answering


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_wrapped_recipe_says_of_itself_what_the_recipe_says(recipe):
    wrapped, _ = promises.watched(recipe, None)
    assert [each.traits for each in wrapped.rules] == [each.traits for each in recipe.rules]


def test_ahead_hands_on_what_the_other_rule_says():
    assert Ahead(Fill(), 4).traits == replace(Fill().traits, looks_ahead=True)
    assert [KeepInFlight(4, ahead).traits.looks_ahead for ahead in (False, True)] == [False, True]


def test_a_rule_without_traits_has_the_defaults():
    made = recipes.grpo(2, 2)
    assert made.prompts.traits == rule.PromptTraits()
    assert made.stages[0].size.traits == rule.Traits()
