"""What the driver reads of a data set: rows, keys of prompts, columns, and whether each prompt fits the model.

A key is the prompt's content, or the value of a column. A resumed run finds its prompts by key, even in a changed data set.
Everything is checked in all rows and before the first step. Features, from which a recipe predicts success rates, are read
from a file or computed with the model.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from reprlib import repr as short
from typing import Any

import numpy as np
from accelerate.utils import broadcast_object_list
from numpy.typing import NDArray

from rollalloc.core.prompts import PromptTable
from rollalloc.core.recipe import Recipe
from rollalloc.data.feature_file import read_features
from rollalloc.drivers.trl.distributed import is_sharded
from rollalloc.drivers.trl.rewards import RewardFunctions, passed
from rollalloc.drivers.trl.rollout import encode
from rollalloc.models.featurizer import features_of

log = logging.getLogger(__name__)

_AGAIN = "\x1c"  # a separator that does not occur in text


def rows_of(dataset: Any, wanted: Iterable[int]) -> list[Any]:
    """The rows with these numbers. One call for many rows is much faster than one call per row."""
    numbers, several = list(wanted), getattr(dataset, "__getitems__", None)
    return several(numbers) if several else [dataset[number] for number in numbers]


def values_of(dataset: Any, column: str) -> Sequence[Any]:
    """The values of a column in all rows; None in a row without this column."""
    named = column in (getattr(dataset, "column_names", None) or ())
    return dataset[column] if named else [dataset[row].get(column) for row in range(len(dataset))]


def keyed(dataset: Any, column: str | None) -> PromptTable:
    """The table of the data set's prompts, with their keys.

    Without a column, the key is the prompt's content, or the row number if environments supply the prompts. If several rows
    have the same prompt, a count is added to their keys: such rows may be confused if the data set is reordered, of which
    `checks.check_data` warns.

    Args:
        dataset: one row per prompt.
        column: name of a column of unique keys. None: the prompts are the keys.

    Raises:
        ValueError: a row has no key, or two rows have the same key; the message names the rows.
    """
    if column is None and "prompt" not in dataset[0]:
        return PromptTable([str(row) for row in range(len(dataset))])
    texts = _texts(dataset, column or "prompt")
    if column is not None and None in texts:
        raise ValueError(f"key={column!r}: row {texts.index(None)} has no key; each row needs its own key")
    seen: dict[str, int] = {}
    if len(set(texts)) < len(texts):
        for row, text in enumerate(texts):
            seen[text] = count = seen.get(text, 0) + 1
            if count > 1 and column is not None:
                raise ValueError(
                    f"key={column!r}: rows {texts.index(text)} and {row} have the same key, {text!r}; each row needs its "
                    "own key"
                )
            if count > 1:
                texts[row] = f"{text}{_AGAIN}{count}"
    return PromptTable(texts)


def check_key(dataset: Any, column: str | None) -> None:
    """Raise a ValueError if the key column does not exist, or if keys in it are missing or not unique."""
    if column is None:
        return
    if column not in dataset[0]:
        raise ValueError(f"key={column!r} is no column of the data set; it has {', '.join(dataset[0])}")
    keyed(dataset, column)


def _texts(dataset: Any, column: str) -> list[Any]:
    """The values of a column as text. Values other than text become JSON; None stays None."""
    encode = json.JSONEncoder(sort_keys=True, default=str).encode
    return [
        value if value is None or isinstance(value, str) else encode(_without_null(value))
        for value in values_of(dataset, column)
    ]


def _without_null(value: Any) -> Any:
    """A value without null fields. (`datasets` fills missing fields with null, so that all dictionaries have all fields.)"""
    if isinstance(value, dict):
        return {name: _without_null(field) for name, field in value.items() if field is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value


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


_ROWS_AT_ONCE = 1000


def check_prompts(trainer: Any) -> None:
    """Raise an error if a prompt has unknown tokens, or is too long for the model's context.

    Every prompt of the training data and of held-out data is encoded once. Held-out data that cannot be indexed are skipped.

    Raises:
        ValueError: a prompt cannot be encoded, has tokens outside the model's vocabulary, or is longer than the model's
            context minus `max_completion_length`. The message names the rows.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    weight = model.get_input_embeddings().weight
    vocabulary = getattr(weight, "ds_shape", weight.shape)[0]  # DeepSpeed's ZeRO-3 empties the weights that it shards
    pad = trainer.processing_class.pad_token_id
    if pad is not None and pad >= vocabulary:
        raise ValueError(_unknown("padding", pad, vocabulary, trainer))
    limits = {
        "the model's context": getattr(model.config.get_text_config(), "max_position_embeddings", None),
        "vllm_max_model_length": trainer.args.vllm_max_model_length if trainer.use_vllm else None,
    }
    limits = {name: limit for name, limit in limits.items() if limit}
    for where, dataset in data_sets(trainer.train_dataset, trainer.eval_dataset):
        lengths_N: list[int] = []
        for start, prompts in blocks_of(dataset):
            names = [f"row {start + at} of {where}" for at in range(len(prompts))]
            for name, tokens in zip(names, encode(trainer, prompts, names), strict=True):
                if (highest := max(tokens)) >= vocabulary:
                    raise ValueError(_unknown(name, highest, vocabulary, trainer))
                lengths_N.append(len(tokens))
        for name, limit in limits.items():
            _check_lengths(where, lengths_N, name, limit, trainer.max_completion_length or 0)


def blocks_of(dataset: Any) -> Iterator[tuple[int, list[Any]]]:
    """The prompts in blocks, each with the row number of its first prompt. No blocks if environments supply the prompts."""
    if not len(dataset) or "prompt" not in dataset[0]:
        return
    for start in range(0, len(dataset), _ROWS_AT_ONCE):
        rows = rows_of(dataset, range(start, min(start + _ROWS_AT_ONCE, len(dataset))))
        yield start, [row["prompt"] for row in rows]


def _check_lengths(where: str, lengths_N: list[int], name: str, limit: int, most: int) -> None:
    room = limit - most
    too_long = [row for row, length in enumerate(lengths_N) if length > room]
    if not too_long:
        return
    shared = f"{name} of {limit} tokens, of which max_completion_length={most} are for the completion"
    if room < 1:
        raise ValueError(
            f"no prompt fits {shared}; set max_completion_length to less than {limit - min(lengths_N) + 1}"
        )
    rows = ", ".join(f"{row} ({lengths_N[row]:,} tokens)" for row in too_long[:_NAMED])
    more = f" and {len(too_long) - _NAMED:,} more" if len(too_long) > _NAMED else ""
    raise ValueError(
        f"{len(too_long):,} of {len(lengths_N):,} prompts of {where} have more than {room:,} tokens, the maximum for "
        f"{shared}: rows {rows}{more}. Remove them ({where}.filter), set a smaller max_completion_length, or take a model "
        "with a longer context"
    )


def _unknown(name: str, token: int, vocabulary: int, trainer: Any) -> str:
    tokenizer = trainer.processing_class
    return (
        f"{name} has token {token} ({tokenizer.convert_ids_to_tokens(token)!r}), but the model has embeddings for "
        f"{vocabulary} tokens only (0 to {vocabulary - 1}) and the tokenizer has {len(tokenizer)}; take the model's own "
        "tokenizer, or call model.resize_token_embeddings(len(tokenizer)) before the trainer is made"
    )


AUTO, MODEL = "auto", "model"

Blocks = Mapping[str, NDArray[np.float32]]


def features_for(
    trainer: Any, recipe: Recipe, given: Path | str | None, key: str | None
) -> Blocks | Callable[[], Blocks]:
    """The features that a trainer uses, or a function that computes them when training begins.

    Args:
        trainer: TRL's trainer.
        recipe: the recipe.
        given: path of a file that `rollalloc features` or `write_features` wrote. "model": compute the features with the
            model when training begins. None: no features. "auto": as "model" if the recipe predicts and the data set has
            prompts, otherwise as None.
        key: column of the prompts' keys, by which features are found in a file. None: the prompts are the keys.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is corrupt or lacks prompts; or features cannot be computed, because the model is sharded or
            environments supply the prompts.
    """
    if given == AUTO:
        there = "prompt" in trainer.train_dataset[0]  # False if environments supply the prompts
        given = MODEL if recipe.reads_features and there else None
    if given == MODEL:
        if is_sharded(trainer):
            raise ValueError(
                'features="model" needs the whole model in each process, but it is sharded; make a file of features once '
                "(`rollalloc features`) and give features=FILE, or features=None"
            )
        if "prompt" not in trainer.train_dataset[0]:
            raise ValueError('features="model": environments create the prompts during training; give features=None')
        return partial(_of_model, trainer)
    if given is None:
        if recipe.reads_features:
            log.warning(
                "no features: until a prompt has outcomes, it is predicted to succeed as often as the average prompt"
            )
        return {}
    check_key(trainer.train_dataset, key)
    keys: Any = keyed(trainer.train_dataset, key).keys
    return read_features(Path(given), keys).blocks


def _of_model(trainer: Any) -> Blocks:
    dataset, accelerator = trainer.train_dataset, trainer.accelerator
    tokens = encode(trainer, [prompt for _, prompts in blocks_of(dataset) for prompt in prompts])
    model = accelerator.unwrap_model(trainer.model_wrapped)
    made = features_of(model, tokens, pad_id=int(trainer.processing_class.pad_token_id), seed=trainer.args.seed)
    blocks: list[Any] = [made.blocks]
    if accelerator.num_processes > 1:  # processes may round differently, but must have equal features
        broadcast_object_list(blocks)
    log.info(
        "features of %d prompts from the model: %d tokens forwarded, %.1f s",
        made.cost.prompts,
        made.cost.tokens,
        made.cost.seconds,
    )
    return blocks[0]
