"""How good a warmed-up model is on its task's training questions, and whether the task leaves room for learning."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from rollalloc.data.prompts import PromptSet
from rollalloc.generate.sampler import Request, generate
from rollalloc.generate.sampling import Sampling
from rollalloc.lab.bench.tasks.tiny import ids_of
from rollalloc.models.likelihood import exact_answers
from rollalloc.models.policy import Policy
from rollalloc.rewards.function import Sample, Scored
from rollalloc.rewards.scorers import WorkerScorer

TRIED, ATTEMPTS = 64, 8  # training questions used; sampled answers per question
LEAST = 0.1  # minimum pass@8; below it, nine of ten groups of eight have no reward
HEADROOM = 0.05  # minimum of pass@8 minus accuracy; below it, sampling finds hardly anything new
_ENOUGH, _ENOUGH_HEADROOM, _EVERY = (
    0.2,
    0.15,
    50,
)  # accuracy and headroom at which a warm-up ends; steps between two checks


def in_band(
    model: PreTrainedModel, tokenizer: Any, prompts: Sequence[str], answers: Sequence[str]
) -> Callable[[int], bool]:
    """Whether a warm-up may end: at least 20% of the answers are right, and pass@8 is well above that.

    Args:
        model: being warmed up.
        tokenizer: its own.
        prompts: some of the training questions.
        answers: the right answer of each; other answers that may be right too are not counted.
    """
    pad_id, eos_id = ids_of(tokenizer)
    asked = [tokenizer(text)["input_ids"] for text in prompts]
    answered = [(*tokenizer(text)["input_ids"], eos_id) for text in answers]

    def enough(step: int) -> bool:
        if step == 0 or step % _EVERY:
            return False
        model.eval()
        p_N, _ = exact_answers(model, asked, answered, pad_id=pad_id, temperature=1.0)
        model.train()
        accuracy, pass_at_8 = float(p_N.mean()), float((1 - (1 - p_N) ** ATTEMPTS).mean())
        return accuracy >= _ENOUGH and pass_at_8 - accuracy >= _ENOUGH_HEADROOM

    return enough


def chances(folder: Path, prompts: PromptSet, reward: str, max_new_tokens: int) -> tuple[float, float]:
    """Accuracy of sampled answers, and pass@8, the share of questions for which one of eight answers is right.

    Args:
        folder: folder of the model.
        prompts: the training questions; the first `TRIED` are used.
        reward: path of the reward function, which runs in a process that can be killed.
        max_new_tokens: per answer.
    """
    policy, count = Policy.load(str(folder), device="cpu"), min(TRIED, len(prompts.prompts))
    requests = [
        Request(at, tuple(policy.tokenizer(str(prompts.prompts[at]))["input_ids"]), _attempts(at))
        for at in range(count)
    ]
    sampling = Sampling(max_new_tokens)
    made = generate(policy.model, requests, sampling, eos_ids=policy.eos_ids, pad_id=policy.pad_id, seed=0)
    samples = [_sample(prompts, each.rollout // ATTEMPTS, policy.text(each.tokens)) for each in made]
    with WorkerScorer(reward, limit_s=2.0) as scorer:
        outcomes = scorer.score(samples)
    scores = [outcome.metric if isinstance(outcome, Scored) else 0.0 for outcome in outcomes]
    right_NE = np.array(scores).reshape(count, ATTEMPTS)
    return float(right_NE.mean()), float(right_NE.max(axis=1).mean())


def refuse_beyond_learning(task: str, accuracy: float, pass_at_8: float, others: Sequence[str]) -> None:
    """Refuse a task from which its warmed-up model can learn nothing, or on which nothing is left to learn.

    Raises:
        ValueError: with both figures, and what to do.
    """
    found = f"after its warm-up {accuracy:.3f} of sampled answers are right and pass@8 is {pass_at_8:.3f}"
    remedy = (
        f"take one of {', '.join(others)}, or train a model of your own, --model with --prompts and --reward, on what "
        "`rollalloc data` prepares"
    )
    if pass_at_8 < LEAST:
        raise ValueError(
            f"{task} cannot be used with its built-in model: {found}, expected at least {LEAST:g}, so that hardly a group "
            f"has a reward and no method could learn; {remedy}"
        )
    if pass_at_8 - accuracy < HEADROOM:
        raise ValueError(
            f"{task} cannot be used with its built-in model: {found}, expected at least {HEADROOM:g} more than that, so "
            f"that sampling finds next to nothing that the model does not do already; {remedy}"
        )


def write_chances(to: Path, accuracy: float, pass_at_8: float) -> None:
    """Save both figures beside the model."""
    (to / "warm_up.json").write_text(json.dumps({"accuracy": accuracy, "pass_at_8": pass_at_8}))


def _attempts(at: int) -> tuple[int, ...]:
    return tuple(range(at * ATTEMPTS, (at + 1) * ATTEMPTS))


def _sample(prompts: PromptSet, at: int, completion: str) -> Sample:
    return Sample(prompts.sources[at], completion, prompts.ground_truths[at], prompts.extra_infos[at])
