"""A reward function that verl, TRL and rollalloc's own trainer can all call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollalloc.rewards.extract import Extractor
from rollalloc.rewards.function import RewardFunction, Sample, Scored
from rollalloc.rewards.scorers import InlineScorer, Scorer, WorkerScorer


class Reward:
    """Wraps a scorer as a reward function for verl's `custom_reward_function` and TRL's `reward_funcs`.

    rollalloc's own commands accept a `Reward` too, and run the wrapped function in their own workers. Several threads may
    call a `Reward`. It can be pickled, and a copy starts its own worker processes.

    Args:
        scorer: scores the samples. Its worker processes end with the interpreter, or when you call its `close`.
        ground_truth: for TRL only: name of the data set column that contains the ground truth.
        name: name of the reward in TRL's logs.
        answer: finds the answer in a completion, so that verl can take majority votes among equal answers (`maj@k`).
            None: no votes.
    """

    def __init__(
        self,
        scorer: Scorer,
        *,
        ground_truth: str = "ground_truth",
        name: str = "reward",
        answer: Extractor | None = None,
    ) -> None:
        self.scorer = scorer
        self.answer = answer
        self.ground_truth = ground_truth
        self.__name__ = name

    def __call__(self, *, completions: Sequence[Any] | None = None, **arguments: Any) -> Any:
        """Score one `solution_str` for verl, or a batch of `completions` for TRL.

        Returns:
            For verl, a dict with `score`, `acc`, `unscored` (1.0 or 0.0) and `reason`. With `answer`, it also has `pred`:
            the answer, or "" if there is none. verl requires a score, so an unscored sample has score and acc 0.0, and
            `unscored` distinguishes it from a wrong answer.
            For TRL, a list of rewards. Unscored samples have None, which TRL ignores.

        Raises:
            ValueError: TRL's data set has no column with the name `ground_truth`.
            RuntimeError: a worker could not load the reward function.
        """
        return self._answer_verl(**arguments) if completions is None else self._answer_trl(completions, arguments)

    @property
    def bare_function(self) -> RewardFunction:
        """The wrapped function, without the scorer's processes.

        Raises:
            TypeError: the scorer does more than call a function.
        """
        if not isinstance(self.scorer, (InlineScorer, WorkerScorer)):
            raise TypeError(
                f"a Reward with the scorer {type(self.scorer).__name__} does more than call a function; name a Reward whose "
                "scorer is an InlineScorer or a WorkerScorer"
            )
        return self.scorer.function

    def _answer_verl(
        self, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> dict[str, float | str]:
        extra_info = extra_info or {}
        name = f"{data_source}/{extra_info['index']}" if "index" in extra_info else ""
        (outcome,) = self.scorer.score([Sample(data_source, solution_str, ground_truth, extra_info, name=name)])
        votes = {} if self.answer is None else {"pred": (self.answer(solution_str) or "").strip()}
        if isinstance(outcome, Scored):
            return {"score": outcome.reward, "acc": outcome.metric, "unscored": 0.0, "reason": "", **votes}
        return {"score": 0.0, "acc": 0.0, "unscored": 1.0, "reason": outcome.reason, **votes}

    def _answer_trl(self, completions: Sequence[Any], columns: dict[str, Any]) -> list[float | None]:
        if self.ground_truth not in columns:
            raise ValueError(
                f"the data set has no column {self.ground_truth!r}; its columns are {sorted(columns)}; "
                "name the column with the answers: Reward(..., ground_truth=...)"
            )
        count = len(completions)
        sources = columns.get("data_source", [""] * count)
        extra_infos = columns.get("extra_info", [{}] * count)
        token_ids = columns.get("completion_ids")
        step = getattr(columns.get("trainer_state"), "global_step", 0)
        samples = [
            Sample(
                sources[index],
                _text(completion),
                columns[self.ground_truth][index],
                extra_infos[index],
                tokens=None if token_ids is None else len(token_ids[index]),
                name=f"sample {index} of step {step}",
            )
            for index, completion in enumerate(completions)
        ]
        outcomes = self.scorer.score(samples)
        return [outcome.reward if isinstance(outcome, Scored) else None for outcome in outcomes]


def _text(completion: str | list[dict[str, Any]]) -> str:
    """The text of a completion. If it is a list of messages, return the text of the last message."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else None
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""
