"""Reward functions in TRL's signature: several with weights, async ones, models; `None` says that one has no score."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite, isnan
from reprlib import repr as short
from typing import Any

import torch

from rollalloc.models.likelihood import evaluating
from rollalloc.rewards.function import Outcome, Scored, Unscored

log = logging.getLogger(__name__)

Score = float | None  # None: this function has no score for it


@dataclass(frozen=True, slots=True)
class Scores:
    """What the reward functions said of B completions.

    Attributes:
        scores_BF: one score a completion and function.
        columns: what they logged for the completions table, by name, one value a completion.
        figures: what they logged as metrics, by name.
    """

    scores_BF: list[list[Score]]
    columns: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    figures: dict[str, list[float]] = field(default_factory=dict[str, list[float]])


@dataclass(frozen=True, eq=False)
class RewardFunctions:
    """Reward functions of a run.

    Attributes:
        functions: `f(prompts, completions, completion_ids, **columns)` → a number or None for each completion, plain or
            async, or models that classify sequences.
        names: of the functions, unique.
        weights: of the functions in the reward.
        tokenizers: of the models; None for the others.
        metric: name of the function that selection looks at; None: the reward.

    Raises:
        ValueError: a metric that is not among the names.
    """

    functions: Sequence[Callable[..., Any]]
    names: Sequence[str]
    weights: Sequence[float]
    tokenizers: Sequence[Any]
    metric: str | None = None

    def __post_init__(self) -> None:
        if self.metric is not None and self.metric not in self.names:
            raise ValueError(
                f"metric must name one of the reward functions {', '.join(self.names)}, got {self.metric!r}; a function "
                "that is to select but not to train gets the reward weight 0"
            )

    def __call__(
        self,
        examples: Sequence[dict[str, Any]],
        completions: Sequence[Any],
        completion_ids: Any,
        state: Any,
        environments: Sequence[Any] | None = None,
    ) -> Scores:
        """Score completions.

        Args:
            examples: the data set's row of each completion; its columns go to the functions.
            completions: text, or messages where prompts are conversations.
            completion_ids: their tokens.
            state: TRL's `trainer_state`.
            environments: what each was played in; None without.

        Raises:
            ValueError: a function returned another number of scores than there are completions, or one that is infinite.
        """
        columns: dict[str, list[Any]] = {}
        figures: dict[str, list[float]] = defaultdict(list)
        given = {
            "prompts": [example["prompt"] for example in examples],
            "completions": list(completions),
            "completion_ids": completion_ids,
            **{key: [example[key] for example in examples] for key in examples[0] if key not in _NOT_COLUMNS},
            "trainer_state": state,
            "log_extra": lambda column, values: columns.setdefault(column, []).extend(values),
            "log_metric": lambda name, value: figures[name].append(float(value)),
            **({} if environments is None else {"environments": list(environments)}),
        }
        scores_FB: list[Any] = [
            self._judge(function, tokenizer, given)
            for function, tokenizer in zip(self.functions, self.tokenizers, strict=True)
        ]
        waiting = [at for at, scores in enumerate(scores_FB) if inspect.isawaitable(scores)]
        for at, scores in zip(waiting, self._await([scores_FB[at] for at in waiting]), strict=True):
            scores_FB[at] = scores
        checked = [_checked(name, scores, len(examples)) for name, scores in zip(self.names, scores_FB, strict=True)]
        scores_BF = [list(scores_F) for scores_F in zip(*checked, strict=True)]
        _say_where_none_is(examples, completions, scores_BF)
        return Scores(scores_BF, columns, dict(figures))

    def reward(self, scores_F: Sequence[Score]) -> Score:
        """The weighted sum of the scores there are; None where there is none."""
        there = [weight * score for weight, score in zip(self.weights, scores_F, strict=True) if score is not None]
        return sum(there) if there else None

    def outcome(self, scores_F: Sequence[Score]) -> Outcome:
        """Reward and metric of a completion, or why it has none."""
        reward, metric = self.reward(scores_F), self.selected_by(scores_F)
        if reward is None or metric is None:
            return self.unscored
        return Scored(float(reward), float(metric))

    @property
    def unscored(self) -> Unscored:
        """A completion without a score."""
        return Unscored(f"no reward function ({', '.join(self.names)}) had a score for it")

    @property
    def remedy(self) -> str:
        """What to do where the metric is no success rate."""
        of = "the whole reward" if self.metric is None else f"what {self.metric} returned"
        return f"The metric is {of}; {how_to_name_a_metric(self.names)}"

    def selected_by(self, scores_F: Sequence[Score]) -> Score:
        """What selection looks at: the score of the function that `metric` names, or the reward."""
        return self.reward(scores_F) if self.metric is None else scores_F[self.names.index(self.metric)]

    def _judge(self, function: Any, tokenizer: Any, given: dict[str, Any]) -> Any:
        if not isinstance(function, torch.nn.Module):
            return function(**given)
        texts = [
            prompt + completion
            if isinstance(completion, str)
            else tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
            for prompt, completion in zip(given["prompts"], given["completions"], strict=True)
        ]
        encoded = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
        with evaluating(function):
            return function(**encoded.to(next(function.parameters()).device)).logits[:, 0].tolist()

    def _await(self, waiting: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Let the async functions run side by side."""
        if not waiting:
            return []

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(*waiting)

        return asyncio.run_coroutine_threadsafe(all_of_them(), self._loop).result()

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """One loop for the whole run, in a thread: a client that a function keeps open belongs to it."""
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="rollalloc-rewards", daemon=True).start()
        return loop


def how_to_name_a_metric(names: Sequence[str]) -> str:
    """What to do where the metric is no success rate."""
    return (
        f"give metric=, the name of the reward function ({', '.join(names)}) that says right, 1, or wrong, 0. Where none "
        "does, add one, with the reward weight 0 so that it selects without training"
    )


def _say_where_none_is(
    examples: Sequence[dict[str, Any]], completions: Sequence[Any], scores_BF: Sequence[Sequence[Score]]
) -> None:
    """Warn, in TRL's words, of the first completion for which no function had a score."""
    for example, completion, scores_F in zip(examples, completions, scores_BF, strict=True):
        if all(score is None for score in scores_F):
            log.warning(
                "All reward functions returned None for the following kwargs:\n%s\nPlease ensure that at least one reward "
                "function returns a valid reward.",
                example | {"completion": completion},
            )
            return


_NOT_COLUMNS = ("prompt", "completion", "completion_ids")


def _checked(name: str, scores: Any, expected: int) -> list[Score]:
    got = len(scores) if isinstance(scores, Collection) else short(scores)
    if got != expected:
        raise ValueError(
            f"the reward function {name} must return one score a completion, {expected}, got {got}; "
            "None stands for a completion without a score"
        )
    try:
        plain = [None if score is None or isnan(score) else float(score) for score in scores]
    except TypeError as error:
        raise ValueError(f"the reward function {name} must return numbers or None, got {short(scores)}") from error
    if bad := [score for score in plain if score is not None and not isfinite(score)]:
        raise ValueError(f"the reward function {name} must return finite numbers or None, got {bad[0]}")
    return plain
