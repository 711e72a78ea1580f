"""Calls reward functions in TRL's signature: plain functions, async functions and models. None means no score."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence, Set, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from math import isnan
from reprlib import repr as short
from typing import Any

import torch

from rollalloc.core.events import LARGEST
from rollalloc.models.likelihood import evaluating
from rollalloc.rewards.function import Outcome, Scored, Unscored, summed

log = logging.getLogger(__name__)

Score = float | None  # None: the function gave this completion no score

# Names of the arguments that TRL passes to every reward function. No column of the data set may have such a name.
RESERVED = (
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
    "environments",
)
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")  # as in TRL, not passed to reward functions
_TABLE = ("step", "prompt", "completion", "advantage")  # columns of TRL's table of completions
_METRICS = ("reward", "reward_std", "frac_reward_zero_std", "num_tokens")  # metrics that the trainer logs itself


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores and logged values of F reward functions for B completions.

    Attributes:
        scores_BF: one score per completion and function.
        columns: columns that the functions logged for the table of completions, with one value per completion.
        figures: metrics that the functions logged, by name.
    """

    scores_BF: list[list[Score]]
    columns: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    figures: dict[str, list[float]] = field(default_factory=dict[str, list[float]])


@dataclass(frozen=True, eq=False)
class RewardFunctions:
    """The reward functions of a run.

    Attributes:
        functions: functions `f(prompts, completions, completion_ids, **columns)`, plain or async, that return a number or
            None per completion; or models that classify sequences.
        names: a unique name for each function.
        weights: each function's weight in the reward.
        tokenizers: the tokenizer of each model; None for functions.
        metric: name of the function whose scores are the metric. None: the reward is the metric.
        template_kwargs: arguments of the chat template that renders conversations for the models.

    Raises:
        ValueError: `metric` is not among the names.
    """

    functions: Sequence[Callable[..., Any]]
    names: Sequence[str]
    weights: Sequence[float]
    tokenizers: Sequence[Any]
    metric: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    # The warning about a completion without a score. It is given only once.
    _said: list[str] = field(default_factory=list[str], init=False, repr=False)

    def __post_init__(self) -> None:
        if self.metric is not None and self.metric not in self.names:
            raise ValueError(
                f"metric must name one of the reward functions {', '.join(self.names)}, got {self.metric!r}; give "
                "the weight 0 to a function that should affect selection only, and not the advantages"
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
            examples: for each completion, its row of the data set. The columns are passed to the functions.
            completions: text, or messages if prompts are conversations.
            completion_ids: token ids of the completions.
            state: TRL's `trainer_state`.
            environments: the environment of each completion; None without environments.

        Raises:
            ValueError: a column has the name of an argument that TRL passes to the functions; a function did not return a
                finite number or None for each completion; or a function logged a column of another length.
        """
        check_columns(examples[0], "the data set")
        columns: dict[str, list[Any]] = {}
        figures: dict[str, list[float]] = defaultdict(list)

        def log_extra(column: str, values: Iterable[Any]) -> None:
            if column in columns:
                raise ValueError(f"log_extra({column!r}, ...) was called twice in one batch; log it under another name")
            if column in (taken := (*_TABLE, *self.names)):
                raise ValueError(
                    f"log_extra({column!r}, ...): the table of completions has a column of that name already "
                    f"({', '.join(taken)}); log it under another name"
                )
            columns[column] = list(values)
            if (count := len(columns[column])) != len(examples):
                raise ValueError(
                    f"log_extra({column!r}, ...) must get one value for each completion, {len(examples)}, got {count}"
                )

        def log_metric(name: str, value: float) -> None:
            if name in _METRICS or name.startswith(("rewards/", "rollalloc/")):
                raise ValueError(
                    f"log_metric({name!r}, ...): the trainer logs {name} itself; log it under another name"
                )
            figures[name].append(float(value))

        given = {
            **{key: [example[key] for example in examples] for key in examples[0] if key not in _NOT_COLUMNS},
            "prompts": [example["prompt"] for example in examples],
            "completions": list(completions),
            "completion_ids": completion_ids,
            "trainer_state": state,
            "log_extra": log_extra,
            "log_metric": log_metric,
            **({} if environments is None else {"environments": list(environments)}),
        }
        scores_FB: list[Any] = [
            self._judge(name, function, tokenizer, given)
            for name, function, tokenizer in zip(self.names, self.functions, self.tokenizers, strict=True)
        ]
        waiting = [at for at, scores in enumerate(scores_FB) if inspect.isawaitable(scores)]
        for at, scores in zip(waiting, self._await([scores_FB[at] for at in waiting]), strict=True):
            scores_FB[at] = scores
        checked = [_checked(name, scores, len(examples)) for name, scores in zip(self.names, scores_FB, strict=True)]
        scores_BF = [list(scores_F) for scores_F in zip(*checked, strict=True)]
        if not self._said and (text := _without_any_score(examples, completions, scores_BF)):
            self._said.append(text)
            log.warning("%s", text)
        return Scores(scores_BF, columns, dict(figures))

    def reward(self, scores_F: Sequence[Score]) -> Score:
        """The weighted sum of the scores that are not None, rounded if there are several functions; None if all are None."""
        there = [weight * score for weight, score in zip(self.weights, scores_F, strict=True) if score is not None]
        if not there:
            return None
        return there[0] if len(self.names) == 1 else summed(there)

    def outcome(self, scores_F: Sequence[Score]) -> Outcome:
        """Reward and metric of a completion, or `Unscored` if either is missing."""
        reward, metric = self.reward(scores_F), self.selected_by(scores_F)
        if reward is None or metric is None:
            return self.unscored
        return Scored(float(reward), float(metric))

    @property
    def unscored(self) -> Unscored:
        """The outcome of a completion without a score."""
        return Unscored(f"no reward function ({', '.join(self.names)}) had a score for it")

    @property
    def remedy(self) -> str:
        """Advice for the case that the metric is not a success rate."""
        if self.metric is None:
            return f"The metric is the whole reward; {how_to_name_a_metric(self.names)}"
        return (
            f"The metric is the score of {self.metric}: let it return 1 for right and 0 for wrong, or a number between"
        )

    def selected_by(self, scores_F: Sequence[Score]) -> Score:
        """The metric: the score of the function that `metric` names, or the reward."""
        return self.reward(scores_F) if self.metric is None else scores_F[self.names.index(self.metric)]

    @property
    def is_weighted_sum(self) -> bool:
        """Whether the metric combines several functions. If so, a metric of 1 does not mean a right answer."""
        return self.metric is None and sorted(weight for weight in self.weights if weight) != [1.0]

    def _judge(self, name: str, function: Any, tokenizer: Any, given: dict[str, Any]) -> Any:
        if not isinstance(function, torch.nn.Module):
            with _noted(name, given):
                scores = function(**given)
            return _awaited(name, scores, given) if inspect.isawaitable(scores) else scores
        texts = [
            prompt + completion
            if isinstance(completion, str)
            else tokenizer.apply_chat_template([*prompt, *completion], tokenize=False, **self.template_kwargs)
            for prompt, completion in zip(given["prompts"], given["completions"], strict=True)
        ]
        encoded = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
        with evaluating(function):
            return function(**encoded.to(next(function.parameters()).device)).logits[:, 0].tolist()

    def _await(self, waiting: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Run the async functions concurrently and return their results."""
        if not waiting:
            return []

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(*waiting)

        return asyncio.run_coroutine_threadsafe(all_of_them(), self._loop).result()

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the whole run, in its own thread.

        All calls use the same loop. A function may keep a client open, which works only in the loop that opened it.
        """
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="rollalloc-rewards", daemon=True).start()
        return loop


async def _awaited(name: str, scores: Awaitable[Any], given: Mapping[str, Any]) -> Any:
    """The result of an async reward function."""
    with _noted(name, given):
        return await scores


@contextmanager
def _noted(name: str, given: Mapping[str, Any]) -> Iterator[None]:
    """Add a note to an error of a reward function, with the function's name and arguments."""
    try:
        yield
    except Exception as error:
        error.add_note(_what_it_got(name, given))
        raise


_NO_COLUMNS = "no columns of the data set (an evaluation passes the columns of eval_dataset)"


def _what_it_got(name: str, given: Mapping[str, Any]) -> str:
    """Describe the arguments of a reward function, for the author of a function that raised an error."""
    columns = [key for key in given if key not in RESERVED]
    taken = f"{', '.join(columns)} of the data set" if columns else _NO_COLUMNS
    texts = all(isinstance(completion, str) for completion in given["completions"])
    form = "text" if texts else "a list of messages, whose text is completion[0]['content']"
    return (
        f"raised by the reward function {name}. It gets {taken} and "
        f"{', '.join(key for key in given if key in RESERVED)}, all by name; let **kwargs take unused arguments. Each "
        f"completion is {form}. For a completion that it cannot score, the function should return None"
    )


def how_to_name_a_metric(names: Sequence[str]) -> str:
    """Advice for an error: how to name a metric that is a success rate."""
    return (
        f"set metric to the name of the reward function ({', '.join(names)}) that returns 1 for right and 0 for wrong. If "
        "there is no such function, add one with the reward weight 0, so that it affects selection only"
    )


def _without_any_score(
    examples: Sequence[dict[str, Any]], completions: Sequence[Any], scores_BF: Sequence[Sequence[Score]]
) -> str | None:
    """TRL's warning, about the first completion that no function scored. None if all completions have scores."""
    for example, completion, scores_F in zip(examples, completions, scores_BF, strict=True):
        if all(score is None for score in scores_F):
            return (
                f"All reward functions returned None for the following kwargs:\n{example | {'completion': completion}}\n"
                "Please ensure that at least one reward function returns a valid reward. Only the first such completion is "
                "reported; `rollalloc/failed` counts all of them"
            )
    return None


def passed(columns: Iterable[str], *, environments: bool) -> set[str]:
    """Names of the arguments that a reward function gets: these columns of the data set, and those that TRL adds."""
    added = (name for name in RESERVED if environments or name != "environments")
    return {*(column for column in columns if column not in _NOT_COLUMNS), *added}


def check_columns(columns: Iterable[str], where: str) -> None:
    """Raise an error if a column has the name of an argument that TRL passes to every reward function.

    Args:
        columns: column names of a data set.
        where: name of the data set, for the error.

    Raises:
        ValueError: a column has such a name. The message says how to rename it.
    """
    if clashes := [name for name in columns if name in RESERVED]:
        renamed = ", ".join(f"{name!r}: 'my_{name}'" for name in clashes)
        raise ValueError(
            f"{where} has {'columns' if len(clashes) > 1 else 'a column'} {', '.join(map(repr, clashes))}, but reward "
            f"functions get arguments of {'these names' if len(clashes) > 1 else 'this name'} from TRL, so they would not "
            f"get the data; rename with dataset.rename_columns({{{renamed}}})"
        )


def _checked(name: str, scores: Any, expected: int) -> list[Score]:
    """Check that a reward function returned one number or None per completion. NaN is converted to None."""
    wrong = (
        f"the reward function {name} must return a list of {expected} numbers or None, one for each completion, got "
    )
    if isinstance(scores, (str, bytes, Mapping, Set)) or not isinstance(scores, Iterable):
        raise ValueError(f"{wrong}{short(scores)} of type {type(scores).__name__}{_remedy(scores)}")
    if isinstance(scores, torch.Tensor):
        scores = scores.detach()
    sized = isinstance(scores, Sized)
    try:
        length = len(scores) if sized else None
        listed: list[Any] = list(islice(scores, expected + 1))  # not all, because the iterator may be endless
    except TypeError:  # an array or a tensor of shape ()
        raise ValueError(f"{wrong}{short(scores)}, which is a single number") from None
    if (length := len(listed) if length is None else length) != expected:
        more = "" if sized or length < expected else "or more "
        raise ValueError(f"{wrong}{length} {more}of them; None stands for a completion without a score")
    return [_number(score, wrong) for score in listed]


def _number(score: Any, wrong: str) -> Score:
    if score is None:
        return None
    if isinstance(score, (str, bytes, Mapping)) or getattr(score, "ndim", 0):
        raise ValueError(f"{wrong}{short(score)} among them{_remedy(score)}")
    try:
        number = float(score)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{wrong}{short(score)} among them") from None
    if isnan(number):
        return None
    if abs(number) > LARGEST:
        raise ValueError(f"{wrong}{number} among them; numbers must be finite and within ±{LARGEST:g}")
    return number


def _remedy(score: Any) -> str:
    """Advice for a reward function that returns a dictionary, as for verl. "" for values of other types."""
    if not isinstance(score, Mapping):
        return ""
    return (
        "; return the number that is trained on, and log the others by log_extra or log_metric. A reward in verl's "
        "signature works here as rollalloc.rewards.frameworks.Reward"
    )
