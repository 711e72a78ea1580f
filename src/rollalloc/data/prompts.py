"""Prompts in verl's schema, each under a key that outlives a re-ordering of its files, and their tokens.

A row is `data_source`, `prompt: [{role, content}]` or text, `reward_model: {style, ground_truth}` and, optionally,
`ability` and `extra_info: {index, prior, ...}`. Parquet cannot tell a field that is null from one that is not there,
so for JSONL, too, null means not there.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from os import PathLike
from pathlib import Path
from reprlib import repr as short
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.table import PromptTable
from rollalloc.data._files import read_rows, write_rows
from rollalloc.data.encoding import check_template_arguments, encode_prompt

log = logging.getLogger(__name__)

Message = dict[str, Any]
Prompt = str | tuple[Message, ...]

_REQUIRED = ("data_source", "prompt", "reward_model")
_SCHEMA = (
    "verl's schema is data_source: text, prompt: [{role, content}] or text, reward_model: {style, ground_truth} and, "
    "optionally, extra_info: {index, ...}"
)
_DEEPEST = 100  # levels of lists and dictionaries in a row


@dataclass(frozen=True)
class PromptSet:
    """Prompts with their keys and what scores them; entry i of each column belongs to prompt i.

    Attributes:
        keys: unique stable keys, `source/index` or `source/#hash of the content`.
        sources: verl's data_source.
        prompts: text, or chat messages with `role` and `content`.
        ground_truths: what the reward function compares with; never None.
        extra_infos: handed to the reward function; `index` and `prior` (a success rate in [0, 1]) mean something here.
        dropped: how many rows were left out, by reason; only reasons that occurred.
    """

    keys: tuple[str, ...]
    sources: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    ground_truths: tuple[Any, ...]
    extra_infos: tuple[dict[str, Any], ...]
    dropped: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.keys)

    def table(self, features: Mapping[str, NDArray[np.float32]] | None = None) -> PromptTable:
        """What the core may know: keys, sources numbered by first appearance, priors where any prompt has one, features.

        Args:
            features: by name, shape (N, D) each.

        Raises:
            ValueError: no prompts, or a key that occurs twice.
        """
        number = {source: index for index, source in enumerate(dict.fromkeys(self.sources))}
        prior_N = np.array([info.get("prior", math.nan) for info in self.extra_infos], dtype=np.float64)
        return PromptTable(
            keys=self.keys,
            source_N=np.array([number[source] for source in self.sources], dtype=np.int32),
            prior_N=None if np.isnan(prior_N).all() else prior_N,
            features=features,
        )

    def without(self, rows: Collection[int], reason: str) -> PromptSet:
        """The set without the prompts at these indices, which `dropped` counts under `reason`."""
        kept = [row for row in range(len(self)) if row not in rows]
        return replace(
            self,
            keys=tuple(self.keys[row] for row in kept),
            sources=tuple(self.sources[row] for row in kept),
            prompts=tuple(self.prompts[row] for row in kept),
            ground_truths=tuple(self.ground_truths[row] for row in kept),
            extra_infos=tuple(self.extra_infos[row] for row in kept),
            dropped=self.dropped | {reason: self.dropped.get(reason, 0) + len(rows)},
        )


@dataclass(frozen=True)
class EncodedPrompts:
    """Prompts and their token ids, in the same order.

    Attributes:
        prompt_set: the prompts.
        tokens: of each prompt.
        template_args: what the chat template was given besides the messages.
    """

    prompt_set: PromptSet
    tokens: tuple[tuple[int, ...], ...]
    template_args: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class _Row:
    """One valid row and where it stands, `file:row`."""

    place: str
    source: str
    prompt: Prompt
    ground_truth: Any
    extra_info: dict[str, Any]


def refuse_longer(max_new_tokens: int, context: int) -> None:
    """Refuse rollouts that no prompt fits beside.

    Raises:
        ValueError: says both.
    """
    if max_new_tokens >= context:
        raise ValueError(
            f"max_new_tokens must be less than the model's context of {context} tokens, which prompts share, got "
            f"{max_new_tokens}"
        )


def load_prompts(*paths: str | PathLike[str], drop_duplicates: bool = True) -> PromptSet:
    """Loads one set of prompts from parquet and JSONL files in verl's schema, one file after the other.

    A prompt's key is `data_source/index` where `extra_info.index` is there and no other row has the same pair, else
    `data_source/#hash` of prompt and ground truth: an index that restarts in a second file names nobody.

    Args:
        paths: `.parquet` files, and `.jsonl` or `.json` files with one JSON object a line.
        drop_duplicates: leave out a row whose source, prompt and ground truth came before, and count it in
            `dropped["duplicate"]`; otherwise such a row is an error.

    How many rows repeat another, or have an index that another row has, is logged as a warning.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: no paths, a file that is empty or of another format, a row that is not in verl's schema, a
            duplicate that may not be dropped, or one prompt of one source with two ground truths.
    """
    if not paths:
        raise ValueError("load_prompts needs at least one file, got none; give .parquet or .jsonl paths")
    rows = [_parse(place, row) for path in paths for place, row in read_rows(Path(path))]
    distinct = _distinct(rows, drop_duplicates)
    duplicates = len(rows) - len(distinct)
    if duplicates:
        log.warning("%d of %d rows repeat a prompt that came before and were left out", duplicates, len(rows))
    return PromptSet(
        keys=_keys(distinct),
        sources=tuple(row.source for row in distinct),
        prompts=tuple(row.prompt for row in distinct),
        ground_truths=tuple(row.ground_truth for row in distinct),
        extra_infos=tuple(row.extra_info for row in distinct),
        dropped={"duplicate": duplicates} if duplicates else {},
    )


def write_prompts(path: str | PathLike[str], rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows in verl's schema, as `load_prompts` reads them; the file is written whole or not at all.

    Args:
        path: ends in `.parquet`, or in `.jsonl` or `.json` for JSON lines; missing folders are made.
        rows: at least one, each in verl's schema; columns that the schema does not know are kept.

    Raises:
        ValueError: no rows, a row that is not in verl's schema, an unknown suffix, or rows that parquet cannot hold.
    """
    if not rows:
        raise ValueError(f"{path}: expected at least one row to write, got none; check what makes the rows")
    for number, row in enumerate(rows, 1):
        check_row(f"row {number} for {path}", row)
    write_rows(Path(path), rows)


def check_row(place: str, row: Any) -> None:
    """Refuse what is no row in verl's schema.

    Args:
        place: where it stands, for the message.
        row: any plain data.

    Raises:
        ValueError: says what was expected there.
    """
    _parse(place, row)


def encode_prompts(
    prompt_set: PromptSet,
    tokenizer: Any,
    *,
    context: int | None,
    max_new_tokens: int = 0,
    overlong: Literal["error", "drop"] = "error",
    template_args: Mapping[str, Any] | None = None,
) -> EncodedPrompts:
    """Tokenizes every prompt, as `encoding.encode_prompt` says, and checks that prompt and completion fit the context.

    Args:
        prompt_set: the prompts.
        tokenizer: a Hugging Face tokenizer.
        context: tokens that the model can attend to, prompt and completion together; None: as many as there are.
        max_new_tokens: most tokens of a completion; 0: the prompts alone must fit.
        overlong: what to do with a prompt of more than `context - max_new_tokens` tokens: raise, or leave it out and
            count it in `dropped["overlong"]`.
        template_args: further arguments of the chat template, for example `{"enable_thinking": False}`.

    Raises:
        ValueError: a prompt without tokens, one that the tokenizer or its chat template cannot take, messages but no chat
            template, overlong prompts that may not be dropped, or nothing but overlong prompts.
    """
    if overlong not in ("error", "drop"):
        raise ValueError(f"overlong must be 'error' or 'drop', got {overlong!r}")
    template_args = template_args or {}
    check_template_arguments(template_args)
    tokens = [
        encode_prompt(tokenizer, prompt, name=f"prompt {key!r}", arguments=template_args)
        for key, prompt in zip(prompt_set.keys, prompt_set.prompts, strict=True)
    ]
    room = math.inf if context is None else context - max_new_tokens
    if context is not None:
        refuse_longer(max_new_tokens, context)
    too_long = [row for row, ids in enumerate(tokens) if len(ids) > room]
    if too_long:
        of = f"context {context}" + (f" - max_new_tokens {max_new_tokens}" if max_new_tokens else "")
        problem = (
            f"{len(too_long)} of {len(tokens)} prompts have more than {room} tokens ({of}), the longest "
            f"{max(map(len, tokens))}, the first of them {prompt_set.keys[too_long[0]]!r}"
        )
        smaller = ["a smaller max_new_tokens"] if max_new_tokens else []
        if overlong == "error":
            remedy = "".join(smaller) or "take a model with a longer context"
            raise ValueError(f"{problem}; pass overlong='drop' (--drop-overlong) to leave them out, or {remedy}")
        if len(too_long) == len(tokens):
            raise ValueError(f"{problem}; none is left: {' or '.join([*smaller, 'a longer context'])} is needed")
        prompt_set = prompt_set.without(set(too_long), "overlong")
    return EncodedPrompts(prompt_set, tuple(ids for ids in tokens if len(ids) <= room), template_args)


def _parse(place: str, raw: Any) -> _Row:
    row = _without_nulls(place, _typed(place, "a row", raw, dict))
    if missing := [name for name in _REQUIRED if name not in row]:
        found = ", ".join(str(name).encode("unicode_escape").decode() for name in raw) or "nothing"
        raise ValueError(
            f"{place}: {', '.join(missing)} missing or null, found {found}; {_SCHEMA}{_remedy(place, row)}"
        )
    reward_model = _typed(place, "reward_model", row["reward_model"], dict)
    if "ground_truth" not in reward_model:
        raise ValueError(f"{place}: reward_model.ground_truth missing or null, got {short(reward_model)}; {_SCHEMA}")
    extra_info = _typed(place, "extra_info", row.get("extra_info", {}), dict)
    if "index" in extra_info:
        _whole_text(place, "extra_info.index", _typed(place, "extra_info.index", extra_info["index"], int, str))
    if "prior" in extra_info:
        prior = _typed(place, "extra_info.prior", extra_info["prior"], float, int)
        if prior < 0 or prior > 1:  # NaN passes: unknown
            raise ValueError(f"{place}: extra_info.prior must be a success rate in [0, 1], got {prior}; rescale it")
    _whole_text(place, "reward_model.ground_truth", reward_model["ground_truth"])
    if _has_nan(reward_model["ground_truth"]):
        raise ValueError(
            f"{place}: reward_model.ground_truth must not be or hold NaN, which equals nothing, got "
            f"{short(reward_model['ground_truth'])}; put the answer there, or leave the row out"
        )
    return _Row(
        place=place,
        source=_whole_text(place, "data_source", _typed(place, "data_source", row["data_source"], str)),
        prompt=_parse_prompt(place, row["prompt"]),
        ground_truth=reward_model["ground_truth"],
        extra_info=extra_info,
    )


def _remedy(place: str, row: Mapping[str, Any]) -> str:
    """The command that writes a file of other columns in the schema, where a question and an answer are among them."""
    file, question, answer = (
        place.rpartition(":")[0],
        next((name for name in ("question", "problem", "prompt", "input") if name in row), None),
        next((name for name in ("answer", "solution", "ground_truth", "final_answer", "target") if name in row), None),
    )
    if not (file and question and answer):
        return ""
    return (
        f". `rollalloc data convert {file} --question {question} --answer {answer} --out prompts.parquet` writes such "
        "a file"
    )


def _parse_prompt(place: str, prompt: Any) -> Prompt:
    if isinstance(_typed(place, "prompt", prompt, str, list), str):
        return _whole_text(place, "prompt", prompt)
    if not prompt:
        raise ValueError(f"{place}: prompt must hold at least one message, got an empty list; {_SCHEMA}")
    return tuple(_parse_message(place, message) for message in prompt)


def _parse_message(place: str, message: Any) -> Message:
    if _typed(place, "each message", message, dict).get("tool_calls"):
        message = {"content": "", **message}  # of a message that only calls tools the content may be missing or null
    for name in ("role", "content"):
        _whole_text(place, f"{name} of each message", _typed(place, f"{name} of each message", message.get(name), str))
    _whole_text(place, "each message", message)
    return message


def _typed(place: str, name: str, value: Any, *kinds: type) -> Any:
    if isinstance(value, kinds):
        return value
    expected = " or ".join(kind.__name__ for kind in kinds)
    raise ValueError(
        f"{place}: {name} must be {expected}, got {short(value)} of type {type(value).__name__}; {_SCHEMA}"
    )


def _whole_text(place: str, name: str, value: Any) -> Any:
    """The value, if none of its texts has half a character: no tokenizer and no file would take it."""
    for text in filter(lambda leaf: isinstance(leaf, str), _leaves(value)):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{place}: {name} must be text, got {short(text)} with half of a surrogate pair, "
                f"{text[error.start]!r}, as character {error.start + 1}; write the file again as UTF-8"
            ) from None
    return value


def _has_nan(value: Any) -> bool:
    return any(isinstance(leaf, float) and math.isnan(leaf) for leaf in _leaves(value))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for entry in value:
            yield from _leaves(entry)
    else:
        yield value


def _without_nulls(place: str, value: Any, depth: int = 0) -> Any:
    if depth > _DEEPEST:
        raise ValueError(f"{place}: a row must not be nested more than {_DEEPEST} levels deep; flatten it")
    if isinstance(value, dict):
        return {name: _without_nulls(place, entry, depth + 1) for name, entry in value.items() if entry is not None}
    if isinstance(value, (list, tuple)):
        return [_without_nulls(place, entry, depth + 1) for entry in value]
    return value


def _distinct(rows: Sequence[_Row], drop_duplicates: bool) -> list[_Row]:
    """The first row of each (source, prompt)."""
    first: dict[tuple[str, str], _Row] = {}
    for row in rows:
        earlier = first.setdefault((row.source, _digest(row.prompt)), row)
        if earlier is row:
            continue
        if _digest(earlier.ground_truth) != _digest(row.ground_truth):
            raise ValueError(
                f"{earlier.place} and {row.place} hold the same prompt of {row.source!r} with different ground truths, "
                f"{short(earlier.ground_truth)} and {short(row.ground_truth)}; keep the right one"
            )
        if not drop_duplicates:
            raise ValueError(
                f"{earlier.place} and {row.place} hold the same prompt of {row.source!r}; "
                "pass drop_duplicates=True, or take one out"
            )
    return list(first.values())


def _keys(rows: Sequence[_Row]) -> tuple[str, ...]:
    return prompt_keys([(row.source, row.extra_info.get("index"), [row.prompt, row.ground_truth]) for row in rows])


def prompt_keys(rows: Sequence[tuple[str, Any, Any]]) -> tuple[str, ...]:
    """Keys by which prompts are known in whatever file and order they come.

    Args:
        rows: data source, index within it or None, and content (plain data) of each prompt.
    """
    by_index = [None if index is None else f"{source}/{index}" for source, index, _ in rows]
    times = Counter(by_index)
    shared = [key for key in by_index if key is not None and times[key] > 1]
    if shared:
        log.warning(
            "%d of %d rows have an index that another row of their source has too, the first %r: their keys are made from "
            "their content instead", len(shared), len(rows), shared[0],
        )  # fmt: skip
    return tuple(
        key if key is not None and times[key] == 1 else f"{source}/#{_digest(content)}"
        for key, (source, _, content) in zip(by_index, rows, strict=True)
    )


def _digest(value: Any) -> str:
    """64 bits of a hash of plain Python data, the same in every process, as hexadecimal digits."""
    return blake2b(json.dumps(value, sort_keys=True, default=repr).encode(), digest_size=8).hexdigest()
