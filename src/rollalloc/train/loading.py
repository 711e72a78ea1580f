"""Check a configuration, and load the prompts, the reward and the features that it names.

The model is loaded last, so that most errors are found early.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from errno import ENOENT
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from rollalloc.core.allocator import Allocator
from rollalloc.core.recipe import Recipe, doubts
from rollalloc.core.rule import called
from rollalloc.data.encoding import template_arguments
from rollalloc.data.feature_blocks import Features
from rollalloc.data.feature_file import holds_features, read_features
from rollalloc.data.prompts import (
    EncodedPrompts,
    PromptSet,
    encode_prompts,
    load_prompts,
    load_unless_loaded,
    refuse_longer,
    refuse_trained_on,
    warn_of_repeated,
)
from rollalloc.files.names import ENCODED, FEATURES
from rollalloc.models.featurizer import features_of, weights_digest
from rollalloc.models.policy import Policy, context_of, peft_module, usable_device
from rollalloc.rewards.function import RewardFunction, load_reward
from rollalloc.rewards.overlong import OverlongScorer, doubts_of_penalty
from rollalloc.rewards.scorers import InlineScorer, Scorer, WorkerScorer
from rollalloc.train.config import Config
from rollalloc.train.evaluation import HeldOut

log = logging.getLogger(__name__)

_NO_FEATURES = "none"


@dataclass(frozen=True)
class CheckedRun:
    """What was made to check a run, so that it is made only once.

    Attributes:
        recipe: the recipe, with the run's budget.
        prompts: the training prompts.
        heldout: the held-out prompts; None: no evaluation.
    """

    recipe: Recipe
    prompts: PromptSet
    heldout: PromptSet | None


def check_run(config: Config, like: CheckedRun | None = None) -> CheckedRun:
    """Check a run, as far as possible without its model.

    Args:
        config: configuration of the run.
        like: a checked run with the same data and reward, which are then not loaded again.

    Raises:
        ValueError: the device cannot be used; the recipe cannot be made, or has too few prompts or rollouts; the recipe
            does not read the features; rollouts are longer than the model's context; or too many held-out prompts are
            in the training set.
        OSError: a file cannot be read.
        ImportError: a library is not installed, or the reward function cannot be imported.
    """
    usable_device(config.device)
    recipe = config.make_recipe()
    for doubt in (*doubts(recipe), *(doubts_of_penalty(recipe) if config.overlong_buffer else ())):
        log.warning(doubt)
    if config.lora is not None:
        peft_module()
    _check_features(config, recipe)
    if like is None:
        try_reward(config)
        prompts, held = load_unless_loaded(*config.prompts), None
        warn_of_repeated(prompts)
        if config.heldout is not None:
            held = load_prompts(config.heldout)
            refuse_trained_on(prompts, held, accepted=config.accept_overlap)
    else:
        prompts, held = like.prompts, like.heldout
    _refuse_less_than_a_batch(recipe, len(prompts), config.seed)
    return CheckedRun(recipe, prompts, held)


def _refuse_less_than_a_batch(recipe: Recipe, prompts: int, seed: int) -> None:
    """Raise a ValueError if the budget is too small for the first batch. The run would end without training."""
    budget = recipe.budget.run_rollouts
    begun = Allocator(recipe, prompts, seed).ask(capacity=budget or 0)
    if begun.finished is not None:
        raise ValueError(
            f"max_rollouts is too small for even one group ({begun.finished}); raise it, or make the groups smaller with "
            "--set"
        )
    if budget is None or len(begun.generate) >= recipe.groups:
        return
    # Fewer groups than a batch has: either the recipe wants no more yet, or the budget has no room for more.
    orders = Allocator(replace(recipe, budget=replace(recipe.budget, run_rollouts=None)), prompts, seed).ask().generate
    sizes = sorted(len(order.rollouts) for order in orders)[: recipe.groups]
    if budget < sum(sizes):
        raise ValueError(
            f"max_rollouts: {budget:,} is less than the first batch takes, {sum(sizes):,} rollouts for {len(sizes)} "
            f"prompts; give at least --max-rollouts {sum(sizes)}, or smaller batches (--set groups=... or n=...)"
        )


def try_reward(config: Config) -> None:
    """Check that the reward can be imported and that rollouts fit into the model's context. No model is loaded.

    Raises:
        ValueError, TypeError, OSError, ImportError, AttributeError: the reward cannot be imported, or rollouts do not fit.
    """
    loaded_reward(config.reward)
    context = context_of(config.model)
    if context is not None:
        refuse_longer(config.sampling.max_new_tokens, context)


def _check_features(config: Config, recipe: Recipe) -> None:
    """Check, before a model is loaded, that the features exist and that the recipe uses them."""
    if config.features is None:
        return
    if not recipe.reads_features:
        raise ValueError(f"features: the prompt rule {called(recipe.prompts)} does not use them; leave features out")
    if config.features == _NO_FEATURES:
        return
    if not Path(config.features).is_file():
        raise FileNotFoundError(ENOENT, "expected a file that `rollalloc features` made, or none", config.features)
    if not holds_features(Path(config.features).resolve()):
        raise ValueError(
            f"features: {config.features} is no file that `rollalloc features` wrote, or it is damaged "
            "or of another version of rollalloc"
        )


def features_for(
    config: Config, recipe: Recipe, policy: Policy, train: EncodedPrompts, resumed: Path | None
) -> Features | None:
    """The recipe's features, from the resumed run or a file, or computed with the policy; None if the recipe uses none."""
    if not recipe.reads_features:
        return None
    keys = train.prompt_set.keys
    if resumed is not None and (resumed / FEATURES).is_file():
        try:
            return read_features(resumed / FEATURES, keys)
        except ValueError as error:
            log.warning("the features of the run are computed again, because the prompts differ: %s", error)
    if config.features == _NO_FEATURES:
        log.warning(
            "%s predicts without features, only from each prompt's own rollouts and the mean of all", recipe.prompts
        )
        return None
    if config.features is not None:
        return read_features(Path(config.features), keys, weights=weights_digest(policy.model))
    return features_of(policy.model, train.tokens, pad_id=policy.pad_id)


def one_thread() -> None:
    """Use one thread. This suits a tiny model, and a machine on which each core has its own run."""
    torch.set_num_threads(1)
    disable_progress_bar()  # transformers' progress bars would disturb ours


def scorer_of(config: Config) -> Scorer:
    """The scorer of a run. It uses worker processes, unless `reward_workers` is 0."""
    function = loaded_reward(config.reward)  # also for workers, so that a wrong path is found before they start
    scorer: Scorer = InlineScorer(function)
    if config.reward_workers > 0:
        scorer = WorkerScorer(config.reward, config.reward_workers, config.reward_limit_s)
    if config.overlong_buffer is None:
        return scorer
    return OverlongScorer(scorer, config.sampling.max_new_tokens, config.overlong_buffer)


def loaded_reward(reward: str) -> RewardFunction:
    """A reward function by its path."""
    try:
        return load_reward(reward)
    except (ValueError, TypeError, OSError, ImportError, AttributeError):  # the message already says what to do
        raise
    except (Exception, SystemExit) as error:
        what = f"since its module raises {type(error).__name__} when it is imported: {error}"
        raise ImportError(f"{reward} cannot be loaded, {what}") from error


def encoded(config: Config, policy: Policy, prompts: PromptSet, resumed: Path | None = None) -> EncodedPrompts:
    """Encode the prompts as tokens of the policy. `resumed`: the folder of a run that is resumed and may have saved them.

    Raises:
        ValueError: a prompt cannot be encoded, or the tokenizer belongs to another model.
    """
    encoded_prompts = encode_prompts(
        prompts,
        policy.tokenizer,
        context=policy.context,
        max_new_tokens=config.sampling.max_new_tokens,
        overlong="drop" if config.drop_overlong else "error",
        template_args=template_arguments(config.chat_template_args),
        kept=None if resumed is None else resumed / ENCODED,
    )
    for key, tokens in zip(encoded_prompts.prompt_set.keys, encoded_prompts.tokens, strict=True):
        policy.refuse_unknown(tokens, f"prompt {key!r}")
    return encoded_prompts


def held_out_of(config: Config, policy: Policy, heldout: PromptSet) -> HeldOut:
    prompts = encoded(config, policy, heldout)
    if not config.single_answer:
        return HeldOut(prompts)
    named, truths = prompts.prompt_set.keys, prompts.prompt_set.ground_truths
    answers = tuple(
        policy.answer(str(truth), to=f"held-out prompt {key!r}") for key, truth in zip(named, truths, strict=True)
    )
    longest, limit = max(map(len, answers)), config.sampling.max_new_tokens
    if longest > limit:
        what = f"a held-out answer has {longest} tokens with its end of sequence, but a rollout has at most {limit}"
        raise ValueError(f"{what}, so no rollout can be right; raise max_new_tokens")
    return HeldOut(prompts, answers)
