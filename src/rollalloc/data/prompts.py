"""Reads, checks, writes and encodes prompts in verl's schema. Each prompt gets a key that does not depend on its position.

A row has `data_source`, `prompt` (text or messages `[{role, content}]`), `reward_model: {style, ground_truth}` and,
optionally, `ability` and `extra_info: {index, prior, ...}`. A null field counts as missing in every format, because parquet
does not distinguish null from missing.

It also finds questions that are in both training and evaluation sets, or twice in a training set.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from os import PathLike
from pathlib import Path
from reprlib import repr as short
from typing import Any, Literal
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from rollalloc.core.prompts import PromptTable
from rollalloc.data._files import read_rows, write_rows
from rollalloc.data.encoded_file import digest_of, encoder_digest, read_encoded
from rollalloc.data.encoding import check_template_arguments, encode_each
from rollalloc.rewards.function import Sample

log = logging.getLogger(__name__)

Message = dict[str, Any]
Prompt = str | tuple[Message, ...]

_REQUIRED = ("data_source", "prompt", "reward_model")
_SCHEMA = (
    "verl's schema is data_source: text, prompt: [{role, content}] or text, reward_model: {style, ground_truth} and, "
    "optionally, extra_info: {index, ...}"
)
_DEEPEST = 100  # maximum nesting of lists and dictionaries in a row


@dataclass(frozen=True)
class PromptSet:
    """Prompts with their keys and ground truths. Entry i of each column belongs to prompt i.

    Attributes:
        keys: unique keys, `source/index` or `source/#hash`. The hash is of the prompt and the ground truth.
        sources: verl's `data_source`.
        prompts: text, or messages with `role` and `content`.
        ground_truths: right answers, for the reward function; never None.
        extra_infos: passed to the reward function. rollalloc itself reads two fields: `index`, and `prior`, an estimate of
            the success rate in [0, 1].
        dropped: number of rows that were left out, by reason.
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
        """The core's table of these prompts: keys, priors and features. If no prompt has a prior, `prior_N` is None.

        Args:
            features: feature blocks by name, each of shape (N, D).

        Raises:
            ValueError: there are no prompts, or a key occurs twice.
        """
        prior_N = np.array([info.get("prior", math.nan) for info in self.extra_infos], dtype=np.float64)
        return PromptTable(
            keys=self.keys,
            prior_N=None if np.isnan(prior_N).all() else prior_N,
            features=features,
        )

    def sample(self, prompt: int, rollout: int, completion: str, tokens: int | None) -> Sample:
        """A rollout of the prompt at this index, to be scored. Its name in reports is `key#rollout`."""
        return Sample(
            data_source=self.sources[prompt],
            completion=completion,
            ground_truth=self.ground_truths[prompt],
            extra_info=self.extra_infos[prompt],
            tokens=tokens,
            name=f"{self.keys[prompt]}#{rollout}",
        )

    def text(self, prompt: int) -> str:
        """The text of the prompt at this index. Of messages, each has its role before it."""
        asked = self.prompts[prompt]
        if isinstance(asked, str):
            return asked
        return "\n".join(f"{message['role']}: {message['content']}" for message in asked)

    def without(self, rows: Collection[int], reason: str) -> PromptSet:
        """The set without the prompts at these indices. Their number is added to `dropped[reason]`."""
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
        tokens: token ids of each prompt.
        template_args: arguments of the chat template, in addition to the messages.
    """

    prompt_set: PromptSet
    tokens: tuple[tuple[int, ...], ...]
    template_args: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class _Row:
    """A valid row, with its place in the form `file:row`."""

    place: str
    source: str
    prompt: Prompt
    ground_truth: Any
    extra_info: dict[str, Any]


def refuse_longer(max_new_tokens: int, context: int) -> None:
    """Raise an error if `max_new_tokens` leaves no room for a prompt in the model's context.

    Raises:
        ValueError: max_new_tokens ≥ context.
    """
    if max_new_tokens >= context:
        raise ValueError(
            f"max_new_tokens must be less than the model's context of {context} tokens, because the prompt also needs "
            f"context, got {max_new_tokens}"
        )


def load_prompts(*paths: str | PathLike[str]) -> PromptSet:
    """Load prompts from parquet and JSONL files in verl's schema.

    A prompt's key is `data_source/index`, with the index in `extra_info`, if this key is unique. Otherwise, for example if
    the index starts again in a second file, the key is `data_source/#hash`, with a hash of prompt and ground truth. A row is
    left out, and counted in `dropped["duplicate"]`, if an earlier row has the same source, prompt and ground truth. Warnings
    give the numbers of rows left out, of rows that share an index, and of ground truths that are placeholders ("proof").

    Args:
        paths: `.parquet` files, and `.jsonl` or `.json` files with one JSON object per line.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: there are no paths; a file is empty or has another format; a row is not in verl's schema; or two rows
            of a source have the same prompt and different ground truths.
    """
    if not paths:
        raise ValueError("load_prompts needs at least one file, got none; give .parquet or .jsonl paths")
    rows = [_parse(place, row) for path in paths for place, row in read_rows(Path(path))]
    distinct = _distinct(rows)
    duplicates = len(rows) - len(distinct)
    if duplicates:
        log.warning("%d of %d rows repeat a prompt that came before and were left out", duplicates, len(rows))
    placeholders = Counter(row.ground_truth for row in distinct if is_placeholder(row.ground_truth))
    if 0 < placeholders.total() < len(distinct):  # in all rows, it may be meant so: a reward need not read it
        log.warning(
            "%d of %d ground truths are placeholders, for example %r: a reward that compares answers scores their prompts "
            "wrongly; leave these rows out", placeholders.total(), len(distinct), next(iter(placeholders)),
        )  # fmt: skip
    return PromptSet(
        keys=prompt_keys(
            [(row.source, row.extra_info.get("index"), [row.prompt, row.ground_truth]) for row in distinct]
        ),
        sources=tuple(row.source for row in distinct),
        prompts=tuple(row.prompt for row in distinct),
        ground_truths=tuple(row.ground_truth for row in distinct),
        extra_infos=tuple(row.extra_info for row in distinct),
        dropped={"duplicate": duplicates} if duplicates else {},
    )


def load_unless_loaded(*paths: str | PathLike[str], keep: bool = False) -> PromptSet:
    """`load_prompts`, unless this process has loaded and kept these prompts and their files are unchanged.

    A command counts the prompts for its default budget and keeps them; its run or profile then takes them.

    Args:
        paths: see `load_prompts`.
        keep: keep the prompts for the next call. Otherwise they are forgotten, so that no two runs share them.

    Raises:
        FileNotFoundError, ValueError: see `load_prompts`.
    """
    files = [Path(path) for path in paths]
    seen = [file.stat() for file in files if file.is_file()]
    prompts = _kept(tuple(files), tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in seen))
    if not keep:
        _kept.cache_clear()
    return prompts


@lru_cache(maxsize=1)
def _kept(files: tuple[Path, ...], _seen: tuple[tuple[int, ...], ...]) -> PromptSet:
    return load_prompts(*files)


def write_prompts(path: str | PathLike[str], rows: Sequence[dict[str, Any]]) -> None:
    """Write rows in verl's schema, for `load_prompts`. After an error, an existing file is unchanged.

    Args:
        path: a path that ends in `.parquet`, or in `.jsonl` or `.json` for JSON lines. Missing folders are created.
        rows: at least one row in verl's schema. Other columns are kept.

    Raises:
        ValueError: there are no rows; a row is not in verl's schema; the suffix is unknown; or parquet cannot hold the rows.
    """
    if not rows:
        raise ValueError(
            f"{path}: expected at least one row to write, got none; check the program that creates the rows"
        )
    for number, row in enumerate(rows, 1):
        check_row(f"row {number} for {path}", row)
    write_rows(Path(path), rows)


def check_row(place: str, row: Any) -> None:
    """Raise an error if a row is not in verl's schema.

    Args:
        place: place of the row, for the error.
        row: any plain data.

    Raises:
        ValueError: the message says what was expected and what was found.
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
    kept: Path | None = None,
) -> EncodedPrompts:
    """Encode all prompts with `encoding.encode_each`, and check that prompt and completion fit into the context.

    Args:
        prompt_set: the prompts.
        tokenizer: a Hugging Face tokenizer.
        context: the model's context in tokens, for prompt and completion together. None: no limit.
        max_new_tokens: maximum number of tokens of a completion. 0: only the prompts must fit.
        overlong: what to do with prompts of more than `context - max_new_tokens` tokens. "error": raise an error. "drop":
            leave them out and count them in `dropped["overlong"]`.
        template_args: further arguments of the chat template, for example `{"enable_thinking": False}`.
        kept: a file with the token ids of prompts (`encoded_file`), from which those that it has are taken. It need not
            exist.

    Raises:
        ValueError: a prompt has no tokens, or cannot be tokenized or rendered; there are messages but no chat template; a
            prompt is overlong with `overlong="error"`; or all prompts are overlong.
    """
    if overlong not in ("error", "drop"):
        raise ValueError(f"overlong must be 'error' or 'drop', got {overlong!r}")
    template_args = template_args or {}
    check_template_arguments(template_args)
    keys = prompt_set.keys
    known = {} if kept is None else read_encoded(kept, encoder_digest(tokenizer, template_args))
    tokens: list[tuple[int, ...]] = [known.get(digest_of(prompt), ()) if known else () for prompt in prompt_set.prompts]
    rows = [row for row, ids in enumerate(tokens) if not ids]
    new = [prompt_set.prompts[row] for row in rows]
    made = encode_each(tokenizer, new, lambda at: f"prompt {keys[rows[at]]!r}", arguments=template_args)
    for row, ids in zip(rows, made, strict=True):
        tokens[row] = ids
    room = math.inf if context is None else context - max_new_tokens
    if context is not None:
        refuse_longer(max_new_tokens, context)
    too_long = [row for row, ids in enumerate(tokens) if len(ids) > room]
    if too_long:
        of = f"context {context}" + (f" - max_new_tokens {max_new_tokens}" if max_new_tokens else "")
        problem = (
            f"{len(too_long)} of {len(tokens)} prompts have more than {room} tokens ({of}), for example "
            f"{prompt_set.keys[too_long[0]]!r}; the longest has {max(map(len, tokens))}"
        )
        smaller = ["a smaller max_new_tokens"] if max_new_tokens else []
        if overlong == "error":
            remedy = "".join(smaller) or "use a model with a longer context"
            raise ValueError(f"{problem}; pass overlong='drop' (--drop-overlong) to leave them out, or {remedy}")
        if len(too_long) == len(tokens):
            raise ValueError(f"{problem}; no prompt is left: {' or '.join([*smaller, 'a longer context'])} is needed")
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
        if prior < 0 or prior > 1:  # NaN, for unknown, is allowed
            raise ValueError(f"{place}: extra_info.prior must be a success rate in [0, 1], got {prior}; rescale it")
    _whole_text(place, "reward_model.ground_truth", reward_model["ground_truth"])
    if _has_nan(reward_model["ground_truth"]):
        raise ValueError(
            f"{place}: reward_model.ground_truth must not contain NaN, because no answer equals NaN, got "
            f"{short(reward_model['ground_truth'])}; put the right answer there, or leave the row out"
        )
    return _Row(
        place=place,
        source=_whole_text(place, "data_source", _typed(place, "data_source", row["data_source"], str)),
        prompt=_parse_prompt(place, row["prompt"]),
        ground_truth=reward_model["ground_truth"],
        extra_info=extra_info,
    )


def _remedy(place: str, row: Mapping[str, Any]) -> str:
    """Advice for an error: the command that converts the file. Empty if the row has no columns of question and answer."""
    file, question, answer = (
        place.rpartition(":")[0],
        next((name for name in ("question", "problem", "prompt", "input", "messages") if name in row), None),
        next((name for name in ("answer", "solution", "ground_truth", "final_answer", "target") if name in row), None),
    )
    if answer is None and question == "messages":
        answer = question  # as in data for supervised training, whose last message is the answer
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
        message = {"content": "", **message}  # a message that only calls tools may have no content
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
    """Return the value. Raise a ValueError if the value has a text with a lone surrogate, which UTF-8 cannot encode."""
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


def _distinct(rows: Sequence[_Row]) -> list[_Row]:
    """The first row with each source and prompt."""
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
    return list(first.values())


def prompt_keys(rows: Sequence[tuple[str, Any, Any]]) -> tuple[str, ...]:
    """Keys of prompts. They do not depend on the files, or on the order of the prompts.

    Args:
        rows: for each prompt: its data source; its index in the data source, or None; and its content as plain data.
    """
    by_index = [None if index is None else f"{source}/{index}" for source, index, _ in rows]
    times = Counter(by_index)
    shared = [key for key in by_index if key is not None and times[key] > 1]
    if shared:
        log.warning(
            "%d of %d rows share an index with another row of the same source, for example %r: their keys are made from "
            "their content instead", len(shared), len(rows), shared[0],
        )  # fmt: skip
    return tuple(
        key if key is not None and times[key] == 1 else f"{source}/#{_digest(content)}"
        for key, (source, _, content) in zip(by_index, rows, strict=True)
    )


def _digest(value: Any) -> str:
    """A 64-bit hash of plain Python data, as hexadecimal digits. It is the same in every process."""
    return blake2b(json.dumps(value, sort_keys=True, default=repr).encode(), digest_size=8).hexdigest()


_PLACEHOLDERS = frozenset(("proof", "notfound", "not found", "not_found", "n/a", "nan", "null"))


def is_placeholder(answer: Any) -> bool:
    """Whether an answer is a placeholder, such as "proof", "notfound", "None" or "N/A". Only Python's None is capitalized:
    "none" may be an answer in words.
    """
    if not isinstance(answer, str):
        return False
    text = answer.strip()
    return text == "None" or text.lower() in _PLACEHOLDERS


MOST_SHARED = 0.05  # a run is refused if a larger share of its held-out prompts is in the training set


def normalised(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Normalize a prompt's text for comparison: its Unicode form, case and white space. System messages are left out.

    Punctuation is kept, because 2 + 3 and 2 - 3 are different questions.
    """
    texts = (
        [prompt] if isinstance(prompt, str) else [str(m.get("content")) for m in prompt if m.get("role") != "system"]
    )
    return " ".join(normalize("NFKC", " ".join(texts)).casefold().split())


def same_text(prompts: Iterable[str], among: Iterable[str]) -> dict[int, int]:
    """Find the prompts whose text also occurs in `among`.

    Args:
        prompts: normalised texts, for example of held-out prompts.
        among: normalised texts, for example of training prompts.

    Returns:
        A dictionary from the index of each such prompt to the index of the first equal text in `among`.
    """
    first: dict[str, int] = {}
    for at, text in enumerate(among):
        first.setdefault(text, at)
    return {at: first[text] for at, text in enumerate(prompts) if text in first}


def repeated(texts: Sequence[str]) -> dict[int, int]:
    """A dictionary from the index of each text that repeats an earlier text to the index of its first occurrence.

    Args:
        texts: normalised texts.
    """
    return {at: first for at, first in same_text(texts, texts).items() if at != first}


def warn_of_repeated(train: PromptSet) -> None:
    """Warn about training prompts with the same text as another prompt."""
    again = repeated([normalised(prompt) for prompt in train.prompts])
    if not again:
        return
    keys, truths = train.keys, train.ground_truths
    differ = sum(truths[at] != truths[first] for at, first in again.items())
    at, first = next(iter(again.items()))
    log.warning(
        "%d of %d training prompts repeat the text of another prompt, such as %r and %r (case, layout and system messages "
        "are ignored); %d of the repeated prompts have a different ground truth",
        len(again), len(train), keys[at], keys[first], differ,
    )  # fmt: skip


def warn_of_copies(prompts: Iterable[Any], name: str, resumed: str = "") -> None:
    """Warn if training prompts are copies of earlier ones, as in DAPO-Math-17k. The drivers for TRL and verl call this.

    Args:
        prompts: the prompts, text or messages.
        name: name of the data for the message, for example "train_dataset".
        resumed: a sentence that says how a resumed run tells such rows apart.
    """
    first: dict[int, int] = {}  # by hash, because there may be millions of long prompts
    copies, example = 0, (0, 0)
    for row, prompt in enumerate(prompts):
        if (at := first.setdefault(hash(repr(prompt)), row)) != row:
            copies, example = copies + 1, example if copies else (row, at)
    if copies:
        log.warning(
            "%d of %d rows of %s have the prompt of an earlier row, for example row %d that of row %d. The recipe takes "
            "each row for a prompt of its own: it may draw a prompt several times for a batch, and splits its record among "
            "the rows. Keep one row of each prompt, unless the reward reads columns in which they differ%s",
            copies, copies + len(first), name, *example, resumed and f". {resumed}",
        )  # fmt: skip


def refuse_trained_on(train: PromptSet, held: PromptSet, *, accepted: bool) -> None:
    """Warn about held-out prompts that are in the training set.

    Raises:
        ValueError: their share is above `MOST_SHARED`, and it is not `accepted`.
    """
    shared = same_text(map(normalised, held.prompts), map(normalised, train.prompts))
    if not shared:
        return
    at, seen = next(iter(shared.items()))
    problem = (
        f"{len(shared)} of {len(held)} held-out prompts ({len(shared) / len(held):.0%}) are in the training set too, the "
        f"first {held.keys[at]!r} as {train.keys[seen]!r}. The accuracy partly measures trained prompts"
    )
    if len(shared) > MOST_SHARED * len(held) and not accepted:
        raise ValueError(
            f"{problem}. More than {MOST_SHARED:.0%} are refused; remove them from one of the files, or accept them with "
            "--accept-overlap"
        )
    log.warning("%s", problem)


def warn_of_shared(train: Any, held: Any, name: str, column: str = "prompt") -> None:
    """Warn if prompts of a held-out data set are also in the training set. The drivers for TRL and verl call this.

    Args:
        train: the training data. Nothing is checked unless both data sets have a length and the column.
        held: the held-out data.
        name: name of the held-out data for the message, for example "eval_dataset".
        column: name of the column of prompts.
    """
    columns = [getattr(dataset, "column_names", None) or () for dataset in (train, held)]
    if not all(
        column in names and hasattr(dataset, "__len__") for names, dataset in zip(columns, (train, held), strict=True)
    ):
        return
    shared = same_text(map(normalised, held[column]), map(normalised, train[column]))
    if shared:
        at, seen = next(iter(shared.items()))
        log.warning(
            "%d of %d prompts of %s (%.0f%%) are in the training set too, for example row %d as row %d of the training set. "
            "The accuracy is then partly measured on trained prompts", len(shared), len(held), name,
            100 * len(shared) / len(held), at, seen,
        )  # fmt: skip
