"""Toy prompts, a reward of one letter, and a budget."""

from dataclasses import replace

from rollalloc import Budget
from rollalloc.data.prompts import EncodedPrompts, PromptSet
from rollalloc.drivers.tinker import Rewarded
from rollalloc.rewards.scorers import InlineScorer


def decode(tokens):
    return "".join(" abcde"[token] for token in tokens)


def first_is(*, solution_str, ground_truth, **_):
    """Right where the first letter is the one."""
    return float(solution_str[:1] == ground_truth)


def prompts_of(count):
    return EncodedPrompts(
        PromptSet(
            keys=tuple(f"toy/{n}" for n in range(count)),
            sources=("toy",) * count,
            prompts=tuple(map(str, range(count))),
            ground_truths=tuple("abcde"[n % 5] for n in range(count)),
            extra_infos=({},) * count,
        ),
        tuple((7, 8 + n) for n in range(count)),
    )


def rewarded(count=8, reward=first_is):
    return Rewarded(prompts_of(count), InlineScorer(reward), decode)


def within(recipe, rollouts):
    return replace(recipe, budget=Budget(run_rollouts=rollouts))
