"""Checks the columns of the data that a run will read, in all rows and before the first step."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from inspect import Parameter, signature
from reprlib import repr as short
from typing import Any

from rollalloc.drivers.trl.keys import values_of
from rollalloc.drivers.trl.rewards import RewardFunctions, passed

log = logging.getLogger(__name__)

_NAMED = 5  # an error names at most this many rows


def data_sets(train: Any, held_out: Any) -> Iterator[tuple[str, Any]]:
    """The training data and all held-out data sets that can be indexed, each with its name.

    Args:
        train: TRL's `train_dataset`.
        held_out: TRL's `eval_dataset`: one data set, several by name, or None.
    """
    yield "train_dataset", train
    for name, dataset in (held_out if isinstance(held_out, Mapping) else {"": held_out}).items():
        if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            yield f"eval_dataset{name and f'[{name!r}]'}", dataset


def check_environments(dataset: Any, where: str, known: Collection[Any]) -> None:
    """Raise an error if a row names no environment, or an unknown one.

    Args:
        dataset: a data set with a column `environment`.
        where: name of the data set, for the error.
        known: names of the environments that TRL's `environment_factory` has.

    Raises:
        ValueError: there is such a row, or no such column. The message names the rows.
    """
    expected = f"expected one of the environments of environment_factory, {', '.join(map(repr, known))}"
    if "environment" not in dataset[0]:
        raise ValueError(f"{where} has no column `environment`; {expected}, in each row")
    names = values_of(dataset, "environment")
    if wrong := [row for row, name in enumerate(names) if name not in known]:
        got = "; ".join(f"row {row} has environment={names[row]!r}" for row in wrong[:_NAMED])
        more = f"; and so on, {len(wrong):,} rows in all" if len(wrong) > _NAMED else ""
        raise ValueError(f"{where}: {got}{more}; {expected}")


def check_conversations(dataset: Any, where: str, turns: Iterable[str]) -> None:
    """Raise an error if a prompt is not a conversation, but tools or environments need one.

    Args:
        dataset: the data set. Without a column `prompt`, nothing is checked, because environments supply the prompts.
        where: name of the data set, for the error.
        turns: which of the arguments "tools" and "environment_factory" were given.

    Raises:
        ValueError: there is such a prompt. The message names its row.
    """
    if "prompt" not in dataset[0]:
        return
    for row, prompt in enumerate(values_of(dataset, "prompt")):
        listed = isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt)
        if not listed or not all(isinstance(message, Mapping) for message in prompt):
            raise ValueError(
                f"{' and '.join(sorted(turns))} need conversations, but row {row} of {where} has the prompt "
                f"{short(prompt)}; make each prompt a list of messages [{{role, content}}], at least one"
            )


def check_read_by_rewards(rewards: RewardFunctions, dataset: Any, where: str, *, environments: bool) -> None:
    """Raise an error if a reward function needs a column that is not there. Warn if a column that it names has empty rows.

    Only parameters that a function names are known; what it reads from `**kwargs` is not.

    Args:
        rewards: the reward functions.
        dataset: a data set on which they will be called.
        where: name of the data set, for the error.
        environments: whether the functions also get environments.

    Raises:
        ValueError: a parameter without a default is neither a column nor an argument that TRL passes.
    """
    columns = list(dataset[0])
    given = passed(columns, environments=environments)
    for name, function in zip(rewards.names, rewards.functions, strict=True):
        parameters = _named_in(function)
        if lacking := [each for each, needed in parameters.items() if needed and each not in given]:
            raise ValueError(
                f"the reward function {name} needs {', '.join(map(repr, lacking))}, but {where} has only the columns "
                f"{', '.join(columns)}; rename a column, dataset.rename_column(..., {lacking[0]!r}), or give the parameter "
                "a default"
            )
        for column in (each for each in parameters if each in columns and each in given):
            if empty := [row for row, value in enumerate(values_of(dataset, column)) if value is None]:
                log.warning(
                    "%s: the column %r, which the reward function %s reads, is None in %d of %d rows, the first of them %d. "
                    "The function should return None for such rows",
                    *(where, column, name, len(empty), len(dataset), empty[0]),
                )


def _named_in(function: Any) -> dict[str, bool]:
    """The parameters that a function names, and whether each needs an argument. Empty if they cannot be known."""
    try:
        # What a decorator passes to the function that it wraps is its own matter.
        parameters = signature(function, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return {}
    named = (each for each in parameters if each.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY))
    return {each.name: each.default is Parameter.empty for each in named}
