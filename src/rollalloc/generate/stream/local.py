"""rollalloc's sampler as a back-end in this process: each `poll` runs one decoding step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from rollalloc.generate.sampler import NOT_FINITE, Generation, Rows, draw_keys, ends_of, next_tokens, uniforms
from rollalloc.generate.stream.backend import Decoding, Paused, RunningRow, spans_of
from rollalloc.generate.stream.slab import Slab
from rollalloc.models.likelihood import appends_only, cache_argument, decoding_attention, evaluating, ready_mask, sent
from rollalloc.models.weights import load_weights, weights_of

_PREFILL_TOKENS = 1 << 15  # maximum number of tokens, padding included, in one prefill of paused rows
# Names of the arrays with one entry per row in `LocalBackend`.
_OF_ROWS = ("_key_R", "_count_R", "_position_R", "_most_R", "_tokens_RT", "_logprobs_RT", "_versions_RT")


class LocalBackend:
    """Samples with a model in this process. Rows join and leave at every step.

    A rollout's random draws depend only on (seed, prompt, rollout, position).

    Args:
        model: the model that samples. Its cache must consist of keys and values only.
        decoding: settings of decoding.
        version: version of the model's weights.
        repeatable: True: after each `load_weights`, the keys and values of running rows are computed again. A run that is
            paused, saved and resumed right after a `load_weights` then samples the same tokens as an uninterrupted run.
            False: keys and values are kept, to save this computation.

    Raises:
        ValueError: the model's cache has more than keys and values, `kv_tokens` is too small for one rollout, or
            an EOS id is outside the vocabulary.
    """

    def __init__(
        self, model: PreTrainedModel, decoding: Decoding, *, version: int = 0, repeatable: bool = False
    ) -> None:
        refuse_unstreamable(model)
        self._repeatable = repeatable
        self._model, self._decoding, self._sampling = model, decoding, decoding.sampling
        self._ends_V = ends_of(model, decoding.eos_ids, decoding.sampling)
        self.slots = decoding.slots
        self._version = version
        self._waiting: deque[RunningRow] = deque()
        self._over: list[Generation] = []  # cancelled rollouts that `poll` has not returned yet
        self._paces: list[tuple[int, float]] = []
        self._slab = Slab(model)
        self._running: list[RunningRow] = []  # this list and the arrays below are in the order of the slab's rows
        self._key_R = np.zeros(0, np.uint64)
        self._count_R = np.zeros(0, np.int64)  # number of tokens of the completion so far
        self._position_R = np.zeros(0, np.int64)  # position of the newest token
        self._most_R = np.zeros(0, np.int64)  # number of tokens with which the rollout ends
        width = self._sampling.max_new_tokens
        self._tokens_RT = np.zeros((0, width), np.int64)
        self._logprobs_RT = np.zeros((0, width), np.float32)
        self._versions_RT = np.zeros((0, width), np.int64)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._running or self._waiting or self._over)

    # ------------------------------------------------------------------------------------------------- the interface

    def capacity(self) -> int:
        return max(0, self.slots - len(self._running) - len(self._waiting))

    def submit(self, rows: Sequence[RunningRow]) -> None:
        self._decoding.refuse_unfit(rows, [row.rollout for row in (*self._running, *self._waiting)])
        self._waiting.extend(rows)

    def cancel(self, rollouts: Sequence[int]) -> None:
        named = set(rollouts)
        self._over += [
            replace(row.sampled, rollout=row.rollout, cancelled=True) for row in self._waiting if row.rollout in named
        ]
        self._waiting = deque(row for row in self._waiting if row.rollout not in named)
        self._over += self._leave(
            np.array([at for at, row in enumerate(self._running) if row.rollout in named], np.int64), cancelled=True
        )

    def poll(self, wait_s: float) -> list[Generation]:
        over, self._over = self._over, []
        if not (self._running or self._waiting):
            return over
        began = time.perf_counter()
        with evaluating(self._model), decoding_attention(self._model):
            logits = [self._feed()] if self._running else []
            while self._waiting and len(self._running) < self.slots:
                logits.append(self._join())
            ended = self._draw(torch.cat(logits))
        self._paces.append((len(self._running), time.perf_counter() - began))
        return over + self._leave(ended)

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        here = weights_of(self._model)
        # Without this condition, the model would copy its own tensors onto themselves.
        if any(here[name] is not tensor for name, tensor in weights.items()):
            load_weights(self._model, weights)
        self._version = version
        if self._repeatable:
            self.pause()

    def pause(self) -> Paused:
        """Return all rows. Drop the keys and values of running rows; the next `poll` computes them again.

        Another back-end that starts with these rows, in this order and with the same weights, samples the same tokens.
        """
        running = [
            replace(row, sampled=replace(self._ended(at, cancelled=True), cancelled=False))
            for at, row in enumerate(self._running)
        ]
        self._waiting.extendleft(reversed(running))
        self._running.clear()
        self._slab = Slab(self._model)
        return Paused(tuple(self._waiting), tuple(self._over))

    def paces(self) -> Sequence[tuple[int, float]]:
        paces, self._paces = self._paces, []
        return paces

    def figures(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._waiting.clear()
        self._running.clear()
        self._slab = Slab(self._model)

    # ---------------------------------------------------------------------------------------------------------- a step

    def _feed(self) -> Tensor:
        """Compute the logits that follow the newest token of each row."""
        slab, count = self._slab, len(self._running)
        slab.make_room()
        newest_B = self._tokens_RT[np.arange(count), self._count_R[:count] - 1]
        self._position_R[:count] += 1
        mask = slab.mask_BC
        newest_B1, position_B1 = sent(np.stack([newest_B, self._position_R[:count]])[..., None], self._model.device)
        output = self._model(
            input_ids=newest_B1,
            attention_mask=None if mask is None else ready_mask(self._model, mask, 1, appends=True),
            position_ids=position_B1,
            **cache_argument(self._model, slab.cache),
            use_cache=True,
            logits_to_keep=1,
        )
        slab.wrote()
        return output.logits[:, -1].float()

    def _join(self) -> Tensor:
        """Prefill the next waiting rows (`_next_to_join`). Return the logits for their next tokens."""
        joining = self._next_to_join()
        texts = [row.tokens + row.sampled.tokens for row in joining]
        place_of = {text: place for place, text in enumerate(dict.fromkeys(texts))}
        rows = Rows(self._model, list(place_of), np.array([place_of[text] for text in texts]), self._decoding.pad_id)
        length_K = np.array([len(text) for text in texts])
        if rows.held[0][0].shape[-2] != length_K.max():
            what = f"{type(self._model).__name__} does not keep exactly the given tokens in its cache"
            raise ValueError(f"{what}; use the synchronous engine (--engine sync)")
        self._slab.join(rows.held, length_K)
        self._write_down(joining, length_K)
        return rows.logits_BV

    def _next_to_join(self) -> list[RunningRow]:
        """Take waiting rows for the free slots. Paused rows may be long, so the size of one pass is limited."""
        joining: list[RunningRow] = []
        longest = 0
        while self._waiting and len(self._running) + len(joining) < self.slots:
            row = self._waiting[0]
            longest = max(longest, len(row.tokens) + len(row.sampled.tokens))
            if joining and row.sampled.tokens and longest * (len(joining) + 1) > _PREFILL_TOKENS:
                break
            joining.append(self._waiting.popleft())
        return joining

    def _write_down(self, joining: Sequence[RunningRow], length_K: NDArray[np.int64]) -> None:
        first, count = len(self._running), len(self._running) + len(joining)
        self._running += joining
        if count > len(self._count_R):
            for name in _OF_ROWS:
                held = getattr(self, name)
                more = np.zeros((2 * count - len(held), *held.shape[1:]), held.dtype)
                setattr(self, name, np.concatenate([held, more]))
        new = slice(first, count)
        self._key_R[new] = draw_keys(
            self._decoding.seed, [row.prompt for row in joining], [row.rollout for row in joining]
        )
        self._count_R[new] = [len(row.sampled.tokens) for row in joining]
        self._position_R[new] = length_K - 1
        most = self._sampling.max_new_tokens
        self._most_R[new] = [min(row.limit or most, most) for row in joining]
        for at, row in enumerate(joining, start=first):
            before = slice(0, len(row.sampled.tokens))
            self._tokens_RT[at, before], self._logprobs_RT[at, before] = row.sampled.tokens, row.sampled.logprobs
            self._versions_RT[at, before] = [version for version, count in row.sampled.spans for _ in range(count)]

    def _draw(self, logits_BV: Tensor) -> NDArray[np.int64]:
        """Draw each row's next token. Return the rows that end with this token."""
        count = len(self._running)
        at_B = self._count_R[:count].copy()
        draws_B = sent(uniforms(self._key_R[:count], at_B), logits_BV.device)
        _, tokens_B, logprobs_B = next_tokens(logits_BV, draws_B, self._sampling)
        if np.isnan(logprobs_B).any():
            raise FloatingPointError(NOT_FINITE)
        rows_B = np.arange(count)
        self._tokens_RT[rows_B, at_B] = tokens_B
        self._logprobs_RT[rows_B, at_B] = logprobs_B
        self._versions_RT[rows_B, at_B] = self._version
        self._count_R[:count] += 1
        return np.flatnonzero(self._ends_V[tokens_B] | (at_B + 1 >= self._most_R[:count]))

    def _leave(self, rows_K: NDArray[np.int64], cancelled: bool = False) -> list[Generation]:
        """Remove rows and return their rollouts in their present state."""
        if not rows_K.size:
            return []
        ended = [self._ended(at, cancelled) for at in rows_K.tolist()]
        to, movers = self._slab.leave(rows_K)
        for name in _OF_ROWS:
            getattr(self, name)[to] = getattr(self, name)[movers]
        for place, mover in zip(to.tolist(), movers.tolist(), strict=True):
            self._running[place] = self._running[mover]
        del self._running[self._slab.live :]
        return ended

    def _ended(self, at: int, cancelled: bool) -> Generation:
        row = self._running[at]
        count = int(self._count_R[at])
        tokens = tuple(self._tokens_RT[at, :count].tolist())
        return Generation(
            row.rollout,
            tokens,
            self._logprobs_RT[at, :count].copy(),
            truncated=not (cancelled or self._ends_V[tokens[-1]]),
            cancelled=cancelled,
            spans=spans_of(self._versions_RT[at, :count].tolist()),
        )


def refuse_unstreamable(model: PreTrainedModel) -> None:
    """Raise a ValueError if rollouts of this model cannot join and leave while others run."""
    if not appends_only(model.config):
        what = f"whose cache is plain keys and values, and {type(model).__name__} has sliding windows or states"
        raise ValueError(f"rollouts stream only from a model {what}: use the synchronous engine (--engine sync)")
