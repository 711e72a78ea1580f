"""A file of token ids in the folder of a run, so that a resumed run does not encode the same prompts again.

The file has the ids of each prompt by a digest of its text or messages, in safetensors format. The header names what else
the ids depend on. A file of another tokenizer or template, or a damaged one, is ignored.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from hashlib import blake2b, sha256
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

import rollalloc
from rollalloc.files.regular import written

log = logging.getLogger(__name__)

LEAST_PROMPTS = 5_000  # fewer prompts are encoded in about a second
MOST_TOKENS = 500_000_000  # more are not saved; the file would have more than 2 GB
_HEADER = "rollalloc-encoded"
_WIDTH = 16  # bytes of a digest
_CLOCK = "strftime_now"  # a template with this function may give other tokens every day
_NOT_OURS = (OSError, SafetensorError, ValueError, TypeError, LookupError, RecursionError, OverflowError)


def digest_of(prompt: Any) -> bytes:
    """A digest of a prompt's text or messages. A message may have values that JSON has not, such as a date."""
    return blake2b(json.dumps(prompt, default=repr).encode(), digest_size=_WIDTH).digest()


def encoder_digest(tokenizer: Any, arguments: Mapping[str, Any]) -> str | None:
    """A digest of all that token ids depend on beside the prompt: the tokenizer, its chat template, and the libraries.

    Args:
        tokenizer: a Hugging Face tokenizer.
        arguments: further arguments of the chat template.

    Returns:
        None if the ids may differ from call to call: the template reads the clock, or the tokenizer has no description.
    """
    template = json.dumps(getattr(tokenizer, "chat_template", None))
    if not getattr(tokenizer, "is_fast", False) or _CLOCK in template:
        return None
    # Without truncation and padding, which stand before the rest, and which each call of the tokenizer sets anew. As text,
    # because parsing a large vocabulary takes seconds.
    text = tokenizer.backend_tokenizer.to_str()
    backend = sha256(text[max(0, text.find('"added_tokens"')) :].encode()).hexdigest()
    special = sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items())
    libraries = [rollalloc.__version__, *map(_version, ("transformers", "tokenizers", "jinja2"))]
    described = [type(tokenizer).__name__, backend, special, template, sorted(arguments.items()), libraries]
    return sha256(json.dumps(described, default=repr).encode()).hexdigest()


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


def write_encoded(path: Path, encoder: str, prompts: Sequence[Any], tokens: Sequence[Sequence[int]]) -> None:
    """Write the token ids of prompts, completely or not at all. The caller must have claimed the path (`files.claims`).

    Args:
        path: the file.
        encoder: the result of `encoder_digest`.
        prompts: texts or messages.
        tokens: token ids of each prompt.
    """
    digests = np.frombuffer(b"".join(map(digest_of, prompts)), np.uint8).reshape(-1, _WIDTH)
    ends_N = np.cumsum([len(ids) for ids in tokens], dtype=np.int64)
    ids_T = np.fromiter((token for ids in tokens for token in ids), np.int32, int(ends_N[-1]))
    arrays = {"prompts": digests, "ends": ends_N, "ids": ids_T}
    with written(path) as partial:
        save_file(arrays, partial, {_HEADER: json.dumps({"encoder": encoder, "sum": _sum(arrays)})})


def read_encoded(path: Path, encoder: str | None) -> dict[bytes, tuple[int, ...]]:
    """The token ids in a file, by `digest_of` the prompt.

    Empty if there is no file, or if it is damaged or of another encoder: the prompts are then encoded again.

    Args:
        path: the file.
        encoder: the result of `encoder_digest`.
    """
    if encoder is None or not path.is_file():
        return {}
    try:
        with safe_open(path, "numpy") as file:
            header = json.loads(file.metadata()[_HEADER])
            if header["encoder"] != encoder:
                return {}
            arrays = {name: file.get_tensor(name) for name in ("prompts", "ends", "ids")}
        return _checked(arrays, header["sum"])
    except _NOT_OURS as error:
        log.warning("%s is damaged and is not used; the prompts are encoded again: %s", path, error)
        return {}


def _checked(arrays: dict[str, NDArray[Any]], expected: Any) -> dict[bytes, tuple[int, ...]]:
    if _sum(arrays) != expected:
        raise ValueError("its checksum is wrong")
    joined, ids = arrays["prompts"].tobytes(), arrays["ids"].tolist()
    bounds = pairwise([0, *arrays["ends"].tolist()])
    return {joined[_WIDTH * at : _WIDTH * (at + 1)]: tuple(ids[begin:end]) for at, (begin, end) in enumerate(bounds)}


def _sum(arrays: Mapping[str, NDArray[Any]]) -> str:
    """A checksum of the arrays, with their types and shapes."""
    digest = sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
