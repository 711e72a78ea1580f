"""A recipe with a limit under TRL: the sampler and TRL's back-ends stop rollouts at it, and what cannot be is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tiny_trl
from trl.rewards import get_soft_overlong_punishment

from rollalloc import Limit, recipes
from rollalloc.drivers.trl.checks import check_limit
from rollalloc.generate.sampler import Request

LIMITED = recipes.reinforce(16).replace(limit=Limit(share=0.05, every=2, last=16))
LONG = {
    "num_generations": 2,
    "max_completion_length": 8,
    "per_device_train_batch_size": 16,
    "max_steps": 8,
    "logging_steps": 1,
}


def names_an_image(completions: list[str], **_: object) -> list[float]:
    return [float(text.startswith("a")) for text in completions]


@pytest.mark.parametrize("use_sampler", [True, False])
def test_rollouts_are_stopped_at_the_limit_of_their_order(tmp_path, use_sampler):
    driver = {"use_sampler": use_sampler}
    trainer = tiny_trl.trainer(tmp_path, LIMITED, reward=names_an_image, driver=driver, **LONG)
    limit_of, ended, ask = {}, [], trainer.allocation._ask

    def asking(capacity=None):
        actions = ask(capacity)
        limit_of.update({rollout: order.limit for order in actions.generate for rollout in order.rollouts})
        return actions

    take = trainer.allocation._result

    def taking(rollout):
        ended.append(rollout.made)
        return take(rollout)

    trainer.allocation._ask, trainer.allocation._result = asking, taking
    trainer.train()
    limited = [made for made in ended if limit_of[made.rollout] is not None]
    stopped = [made for made in limited if made.truncated]
    assert len(stopped) < len(limited) < len(ended)
    assert all(len(made.tokens) == limit_of[made.rollout] for made in stopped)
    assert any(len(made.tokens) < 8 for made in stopped)
    assert max(len(made.tokens) for made in ended) == 8  # what has no limit, also after what had one
    logged = [line["rollalloc/limit"] for line in trainer.state.log_history if "rollalloc/limit" in line]
    assert logged
    assert set(logged) <= set(range(1, 9))


def test_each_limit_is_a_call_of_vllm_and_the_settings_are_what_they_were(tmp_path):
    """Every process makes the same calls, also where it has no rollout of a limit."""
    generate = tiny_trl.trainer(tmp_path, LIMITED, driver={"use_sampler": False}, **LONG)._generator
    trainer, calls = generate.trainer, []
    trainer.use_vllm, trainer.vllm_generation = True, SimpleNamespace(max_completion_length=8)

    def complete(prompts):
        calls.append((trainer.vllm_generation.max_completion_length, len(prompts)))
        return [(9,) * trainer.vllm_generation.max_completion_length] * len(prompts), None

    generate.complete = complete
    generate.filled = lambda pairs, logprobs: [None] * len(pairs)
    requests = [Request(0, (3,), (0, 1), 5), Request(1, (3,), (2,)), Request(2, (3,), (3,), 99)]
    made = generate(requests, (5, None, 3, 99))
    assert calls == [(5, 2), (8, 1), (3, 0), (8, 1)]
    assert {one.rollout: len(one.tokens) for one in made} == {0: 5, 1: 5, 2: 8, 3: 8}
    assert trainer.vllm_generation.max_completion_length == 8


def test_the_limit_is_given_back_after_an_error(tmp_path):
    generate = tiny_trl.trainer(tmp_path, LIMITED, driver={"use_sampler": False}, **LONG)._generator

    def failing(prompts):
        assert generate.trainer.generation_config.max_new_tokens == 5
        raise RuntimeError("dead")

    generate.complete = failing
    with pytest.raises(RuntimeError, match="dead"):
        generate([Request(0, (3,), (0,), 5)], (5,))
    assert generate.trainer.generation_config.max_new_tokens == 8


def test_a_limit_with_tools_is_refused(tmp_path):
    args = tiny_trl.settings(tmp_path)
    with pytest.raises(ValueError, match=r"stops rollouts at a length \(limit_at\), which is not supported with tools"):
        check_limit(LIMITED, args, several_turns=True)
    check_limit(recipes.reinforce(16), args, several_turns=True)


def test_a_limit_that_vllms_own_would_replace_is_refused(tmp_path):
    args = tiny_trl.settings(tmp_path, use_vllm=True, generation_kwargs={"max_tokens": 4})
    with pytest.raises(ValueError, match=r"max_tokens'\] replaces the length .*; set max_completion_length instead"):
        check_limit(LIMITED, args, several_turns=False)
    check_limit(LIMITED, tiny_trl.settings(tmp_path, generation_kwargs={"max_tokens": 4}), several_turns=False)


def test_masking_what_is_stopped_is_said(tmp_path, caplog):
    tiny_trl.trainer(tmp_path, LIMITED, mask_truncated_completions=True, **LONG)
    assert "mask_truncated_completions leaves the rollouts out of the loss that the recipe stops" in caplog.text


@pytest.mark.parametrize(("penalised", "limited"), [(True, True), (False, True), (True, False)])
def test_an_overlong_penalty_that_a_limit_makes_idle_is_said(tmp_path, caplog, penalised, limited):
    names = ["right", "soft_overlong_punishment_reward"] if penalised else ["right"]
    recipe = LIMITED if limited else recipes.reinforce(16)
    check_limit(recipe, tiny_trl.settings(tmp_path), several_turns=False, rewards=names)
    assert ("under a lower limit, the penalty does nothing" in caplog.text) is (penalised and limited)
    assert get_soft_overlong_punishment(8, 2).__name__ == "soft_overlong_punishment_reward"
