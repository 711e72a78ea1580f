"""What is refused before training, each with what was expected, what came and what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny_async
import tiny_trl

from rollalloc import recipes

GRPO, AHEAD = tiny_async.RECIPES["grpo"], tiny_async.RECIPES["pilot_commit"]


@pytest.mark.parametrize(
    ("recipe", "changes", "said"),
    [
        (AHEAD, {"max_staleness": 3}, r"max_staleness=3: TRL would drop rows unseen .* max_staleness=4"),
        (GRPO, {"gradient_accumulation_steps": 3}, r"4 groups of 4 rows per batch.*has 12 rows"),
        (GRPO, {"num_generations": 8}, r"num_generations=8, but a group of the recipe has 4 rows; set 4"),
        (GRPO, {"token_budget": 128}, r"token_budget=128 .* not of a batch"),
        (GRPO, {"weight_sync_steps": 2}, r"weight_sync_steps=2"),
        (GRPO, {"max_steps": -1}, r"max_steps must be given"),
        (GRPO, {"top_k": 5}, r"top_k=5: the log-probabilities"),
        (GRPO, {"log_completions": True}, r"log_completions=True is not supported"),
        (GRPO, {"model_init_kwargs": {"revision": "x"}}, r"model_init_kwargs=.* is not supported"),
        (recipes.foresight(groups=16, replay=4), {"num_generations": 1}, r"Replay.* adds rows"),
        (recipes.spo(groups=16), {"num_generations": 1}, r"how far each update moved the weights"),
        (recipes.knapsack(groups=4, n=4), {}, r"do not say how many rows"),
    ],
)
def test_settings_that_cannot_agree_are_refused(recipe, changes, said, model, tmp_path):
    with pytest.raises(ValueError, match=said):
        tiny_async.trainer(tmp_path, recipe, model, **changes)


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        ({"tools": [len]}, ValueError, r"tools is not supported"),
        ({"rollout_worker": object()}, ValueError, r"rollout_worker is not supported"),
    ],
)
def test_arguments_that_are_not_served_are_refused(more, error, said, model, tmp_path):
    with pytest.raises(error, match=said):
        tiny_async.trainer(tmp_path, GRPO, model, more=more)


def test_a_model_in_memory_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"name or folder as text, got LlamaForCausalLM"):
        tiny_async.trainer(tmp_path, GRPO, tiny_trl.tiny_model())


def test_prompts_that_leave_no_room_are_refused(model, tmp_path):
    with pytest.raises(ValueError, match=r"a completion up to max_completion_length=30, but the model attends to 32"):
        tiny_async.trainer(tmp_path, GRPO, model, max_completion_length=30)


def test_the_trainers_bound_on_staleness_may_be_looser_and_not_tighter(model, tmp_path):
    tiny_async.trainer(tmp_path, AHEAD, model, max_staleness=4)
    tiny_async.trainer(tmp_path, replace(AHEAD, max_staleness=3), model, max_staleness=3)


def test_what_is_ahead_is_old_and_trl_must_not_drop_it(model, tmp_path):
    made = tiny_async.trainer(tmp_path, GRPO, model, max_staleness=4, driver={"ahead": 2})
    recipe, expected = made.allocation.allocator.recipe, recipes.streamed(GRPO, ahead=2)
    assert (recipe.intake, recipe.max_staleness) == (expected.intake, 4)
    with pytest.raises(ValueError, match=r"max_staleness=3: TRL would drop rows unseen .* max_staleness=4"):
        tiny_async.trainer(tmp_path, GRPO, model, max_staleness=3, driver={"ahead": 2})
    with pytest.raises(ValueError, match="ahead must be a whole number of at least 1"):
        tiny_async.trainer(tmp_path, GRPO, model, driver={"ahead": 0})


def test_a_weighted_sum_is_no_success_rate(model, tmp_path):
    with pytest.raises(ValueError, match=r"takes the metric for a success rate"):
        tiny_async.trainer(tmp_path, AHEAD, model, driver={"reward_weights": [0.5]})
