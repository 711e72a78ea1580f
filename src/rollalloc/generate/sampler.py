"""A batched sampler for Hugging Face causal language models with attention.

A prompt is prefilled once for all its rollouts. A prefix that all prompts of a wave share is prefilled only once. Finished
rollouts leave the batch. The random draw of each token is a function of (seed, prompt, rollout, position), so it does not
depend on the other rollouts of the batch.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from rollalloc.models.likelihood import (
    appends_only,
    cache_argument,
    decoding_attention,
    evaluating,
    padded,
    positions,
    ready_mask,
    sent,
    shared_prefix,
)
from rollalloc.models.settings import Sampling

log = logging.getLogger(__name__)

# Finished rows are dropped only when they make up this share of the batch, because dropping rows copies the cache.
FINISHED_SHARE_TO_DROP = 0.1
_AHEAD = 32  # random draws are computed and sent to the device for this many tokens at a time

NOT_FINITE = "expected finite logits, got NaN or +inf: the weights diverged or overflow their dtype"
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # SplitMix64's increment


@dataclass(frozen=True, slots=True)
class Request:
    """The rollouts to sample for one prompt.

    Attributes:
        prompt: index of the prompt. The index and the rollout's id are the key of the random draws.
        tokens: the prompt's token ids, at least one.
        rollouts: ids of the rollouts.
        limit: maximum number of tokens of each rollout, at least 1, if it is lower than `Sampling.max_new_tokens`.
    """

    prompt: int
    tokens: tuple[int, ...]
    rollouts: tuple[int, ...]
    limit: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """One sampled rollout.

    Attributes:
        rollout: its id.
        tokens: generated token ids, including EOS if it was sampled.
        logprobs: log-probability of each token under the distribution from which it was drawn, with the temperature
            applied; float32.
        truncated: True if the rollout reached the length limit before a token that ends a rollout.
        cancelled: True if it was stopped before it ended. `tokens` then has the tokens before the stop, and may be empty.
        spans: pairs (version, number of tokens), in order: the versions of the weights that sampled its tokens. Empty if
            the newest version sampled all tokens. Not saved in checkpoints.
    """

    rollout: int
    tokens: tuple[int, ...]
    logprobs: NDArray[np.float32]
    truncated: bool
    cancelled: bool = False
    spans: tuple[tuple[int, int], ...] = ()


def pack_generations(generations: Sequence[Generation]) -> tuple[list[list[int]], dict[str, Tensor]]:
    """Pack rollouts into a list of [id, number of tokens, truncated], and tensors of all tokens and log-probabilities."""
    described = [[made.rollout, len(made.tokens), int(made.truncated)] for made in generations]
    tokens = [token for made in generations for token in made.tokens]
    logprobs = np.concatenate([np.zeros(0, np.float32), *(made.logprobs for made in generations)])
    return described, {"tokens": torch.tensor(tokens, dtype=torch.int64), "logprobs": torch.from_numpy(logprobs)}


def unpack_generations(described: Sequence[Sequence[int]], tensors: Mapping[str, Tensor]) -> list[Generation]:
    """The inverse of `pack_generations`."""
    tokens, logprobs, start = tensors["tokens"].tolist(), tensors["logprobs"].numpy(), 0
    generations: list[Generation] = []
    for rollout, length, truncated in described:
        here = slice(start, start + length)
        generations.append(Generation(rollout, tuple(tokens[here]), logprobs[here].copy(), bool(truncated)))
        start += length
    return generations


def generate(
    model: PreTrainedModel,
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    eos_ids: Sequence[int],
    pad_id: int,
    seed: int,
) -> list[Generation]:
    """Sample every requested rollout to its end.

    Returns:
        One generation per rollout, in the order of the requests.
    """
    with evaluating(model):  # set once here, because setting the mode in each step costs time
        ended = stream(model, requests, sampling, eos_ids=eos_ids, pad_id=pad_id, seed=seed, mode=nullcontext)
        done = {generation.rollout: generation for generations in ended for generation in generations}
    return [done[rollout] for request in requests for rollout in request.rollouts]


def stream(
    model: PreTrainedModel,
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    eos_ids: Sequence[int],
    pad_id: int,
    seed: int,
    mode: Callable[[], AbstractContextManager[None]] | None = None,
) -> Generator[list[Generation], Iterable[int] | None]:
    """Sample every requested rollout. After each decoding step in which rollouts ended, yield these rollouts.

    `send` takes ids of rollouts to stop. The next list that is yielded contains exactly these rollouts, marked as
    `cancelled`. Then `send` may be called again.

    The model runs in eval mode without gradients; its previous mode is restored afterwards. If CUDA runs out of memory,
    the unfinished rollouts start again in waves of half the size, with the same random draws.

    The same requests in the same waves give exactly the same tokens. In a different batch, the random draws of a rollout
    stay the same, but matrix products may round differently. In rare cases, the rounding changes a token.

    Args:
        eos_ids: tokens that end a rollout, in addition to `sampling.stop_ids`; each in the vocabulary.
        pad_id: any id in the vocabulary, because padding is masked.
        seed: seed of the run.
        mode: returns the context in which the model runs in each step. None: eval mode without gradients.

    Raises:
        ValueError: a rollout is requested twice, a rollout to stop was not requested, a prompt is empty, an EOS id is
            outside the vocabulary, or `kv_tokens` is too small for one rollout.
        FloatingPointError: the model's logits contain NaN or +inf.
        torch.cuda.OutOfMemoryError: the memory is too small for a single rollout.
    """
    mode = mode or partial(evaluating, model)
    # Prompts of similar length share a wave, so that the prefill contains little padding.
    by_length = sorted(requests, key=lambda request: len(request.tokens))
    request_R = np.repeat(np.arange(len(requests)), [len(request.rollouts) for request in by_length])
    rollout_R = [rollout for request in by_length for rollout in request.rollouts]
    if len(set(rollout_R)) < len(rollout_R):
        [(twice, times)] = Counter(rollout_R).most_common(1)
        raise ValueError(
            f"rollout {twice} is requested {times} times; expected one request, as copies would be identical"
        )
    # By the index of the prompt and the id of the rollout, not by their places here: a rollout's draws are the same
    # in any wave, at any place, and if it is generated again after a crash.
    keys_R = draw_keys(seed, np.array([request.prompt for request in by_length], np.int64)[request_R], rollout_R)
    ends_V = ends_of(model, eos_ids, sampling)
    index_of = {rollout: index for index, rollout in enumerate(rollout_R)}
    open_R = np.ones(len(rollout_R), bool)  # not yielded yet
    most = sampling.max_new_tokens
    limit_R = np.array([min(request.limit or most, most) for request in by_length], np.int64)[request_R]
    tokens_R = np.array([len(request.tokens) for request in by_length], np.int64)[request_R] + limit_R
    # Halved for the rest of the call when memory runs out. The next call tries `max_rows` again.
    width = sampling.max_rows
    while open_R.any():
        now_B = np.flatnonzero(open_R)[:width]
        now_B = now_B[: _rows_that_fit(tokens_R[now_B], sampling)]
        present, prompt_B = np.unique(request_R[now_B], return_inverse=True)
        prompts = [by_length[index].tokens for index in present]
        rollouts = [rollout_R[at] for at in now_B]
        # If memory ran out in the last wave, the rollouts that had not ended begin again here, with the same draws.
        wave = _Wave(model, prompts, prompt_B, pad_id, rollouts, keys_R[now_B], sampling, limit_R[now_B], ends_V)
        while wave.running:
            try:
                with mode(), decoding_attention(model):
                    ended = wave.next_ended()
            except torch.cuda.OutOfMemoryError:
                # A single row cannot be halved.
                if len(now_B) == 1:
                    raise
                width = (len(now_B) + 1) // 2
                log.warning("not enough GPU memory for %d rows; continuing with %d", len(now_B), width)
                break
            while ended:
                open_R[[index_of[generation.rollout] for generation in ended]] = False
                to_stop = dict.fromkeys((yield ended) or ())
                if unknown := to_stop.keys() - index_of.keys():
                    raise ValueError(f"only requested rollouts can be stopped, got {sorted(unknown)[:5]}")
                # A rollout may have ended since the caller decided to stop it. It was yielded with its tokens, so it
                # is not yielded again.
                running = [rollout for rollout in to_stop if open_R[index_of[rollout]]]
                ended = wave.cancel(running) if running else []


def _rows_that_fit(tokens_B: NDArray[np.int64], sampling: Sampling) -> int:
    """Number of rows that fit into the cache, from the first row on."""
    if sampling.kv_tokens is None:
        return len(tokens_B)
    sampling.refuse_small_cache(int(tokens_B[0]))
    # Each row takes as much room as the longest of them.
    held_B = np.arange(1, len(tokens_B) + 1) * np.maximum.accumulate(tokens_B)
    return int(np.searchsorted(held_B, sampling.kv_tokens, side="right"))


def draw_keys(seed: int, prompts_B: ArrayLike, rollouts_B: ArrayLike) -> NDArray[np.uint64]:
    """Return the key of each rollout's random draws, a hash of (seed, prompt, rollout)."""
    key_B = np.array([seed % 2**64], dtype=np.uint64)
    for ids_B in (prompts_B, rollouts_B):
        key_B = _mix(key_B ^ np.asarray(ids_B, dtype=np.int64).astype(np.uint64))
    return key_B


def uniforms(keys_B: NDArray[np.uint64], position: int | NDArray[np.int64]) -> NDArray[np.float64]:
    """Return uniform draws on [0, 1), multiples of 2⁻⁵³: the `position`-th value of SplitMix64 started at each key.

    `keys_B` and `position` are broadcast against each other, as in NumPy.
    """
    counter = np.atleast_1d(np.asarray(position, np.int64)).astype(np.uint64) * np.uint64(_GOLDEN_GAMMA)
    return (_mix(keys_B + counter) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x_B: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One step of SplitMix64 (Steele, Lea and Flood, 2014): every bit of the input reaches every bit of the output."""
    z_B = x_B + np.uint64(_GOLDEN_GAMMA)
    z_B = (z_B ^ (z_B >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z_B = (z_B ^ (z_B >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z_B ^ (z_B >> np.uint64(31))


def next_tokens(
    logits_BV: Tensor, uniforms_B: Tensor, sampling: Sampling
) -> tuple[Tensor, NDArray[np.int64], NDArray[np.float64]]:
    """Return each row's next token on the logits' device, the same token on the host, and its log-probability (host).

    Copying one tensor to the host is the only synchronisation of a decoding step.

    Args:
        logits_BV: logits of the model, in float32.
        uniforms_B: uniform draws of the rows, on the same device.
        sampling: the settings; only the temperature is used.
    """
    if sampling.temperature != 1:
        logits_BV = logits_BV / sampling.temperature
    token_B, logprob_B = draw(logits_BV, uniforms_B)
    # The arrays share memory with the tensors, so nothing is copied.
    if logits_BV.device.type == "cpu":
        return token_B, token_B.numpy(), logprob_B.numpy()
    tokens_B, logprobs_B = torch.stack([token_B.double(), logprob_B]).cpu().numpy()  # float64 represents any id exactly
    return token_B, tokens_B.astype(np.int64), logprobs_B


def draw(logits_BV: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token per row by inverting the distribution function.

        token = min{v : Σ_{w≤v} exp(logits[w]) > u · Σ_w exp(logits[w])}

    The inequality is strict, so a token of probability 0 (logit −∞) is never drawn. The sums are in float64, so that
    u · total is below the total for every u < 1.

    Args:
        logits_BV: unnormalised log-probabilities in float32.
        uniforms_B: in [0, 1), float64.

    Returns:
        Tokens of shape (B,), and their float64 log-probabilities, which are NaN in rows with NaN in their logits.
    """
    # The largest logit becomes 0, so that no exponential overflows.
    shifted_BV = logits_BV - logits_BV.amax(dim=-1, keepdim=True)
    cumulative_BV = shifted_BV.exp().cumsum(dim=-1, dtype=torch.float64)
    total_B1 = cumulative_BV[:, -1:]
    token_B1 = torch.searchsorted(cumulative_BV, uniforms_B[:, None] * total_B1, right=True)
    token_B1.clamp_(max=logits_BV.shape[-1] - 1)  # if a row has NaN, the index is past the end
    return token_B1[:, 0], (shifted_BV.gather(-1, token_B1) - total_B1.log())[:, 0]


class _Wave:
    """Rollouts that are sampled together. Rows are removed as rollouts end."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        prompt_B: NDArray[np.int64],
        pad_id: int,
        rollouts: Sequence[int],
        keys_B: NDArray[np.uint64],
        sampling: Sampling,
        limit_B: NDArray[np.int64],
        ends_V: NDArray[np.bool_],
    ) -> None:
        # The first step does the prefill, because only a step handles out-of-memory errors.
        self._prefill = partial(Rows, model, prompts, prompt_B, pad_id)
        self._rollouts, self._sampling, self._ends_V = rollouts, sampling, ends_V
        self._rows: Rows | None = None
        self._place_of = {rollout: place for place, rollout in enumerate(rollouts)}
        self._running_B = np.ones(len(rollouts), bool)
        self._limit_B, self._shortest, self._longest = limit_B, int(limit_B.min()), int(limit_B.max())
        self._tokens_BT = np.zeros((len(rollouts), self._longest), np.int64)
        self._logprobs_BT = np.zeros(self._tokens_BT.shape, np.float32)
        self._length = 0  # tokens drawn so far, the same for every row
        # The rows in the batch include some rollouts that have ended. For each row: its place in `rollouts`, and its key.
        self._place_B, self._keys_B = np.arange(len(rollouts)), keys_B
        # For each row, on the model's device: its newest token, and its random draws for the next steps.
        self._newest_B = self._draws_BC = torch.empty(0)

    @property
    def running(self) -> bool:
        """Whether any rollout has not ended."""
        return bool(self._running_B.any())

    def next_ended(self) -> list[Generation]:
        """Decode until at least one rollout ends, and return the rollouts that ended. The model must be in eval mode."""
        while not (ended := self._step()):
            pass
        return ended

    def _step(self) -> list[Generation]:
        """Draw each row's next token. Return the rollouts that ended with this token."""
        rows, at = self._advance(), self._length
        # The newest tokens stay on the device, where the next step reads them. Only the copy for the host waits for
        # the device.
        self._newest_B, tokens_B, logprobs_B = next_tokens(rows.logits_BV, self._draws(rows), self._sampling)
        self._tokens_BT[self._place_B, at] = tokens_B
        self._logprobs_BT[self._place_B, at] = logprobs_B
        self._length += 1
        running_B = self._running_B[self._place_B]
        # At the longest limit, every row that still runs ends.
        if self._length < self._shortest:
            running_B &= self._ends_V[tokens_B]
        elif self._length < self._longest:
            running_B &= self._ends_V[tokens_B] | (self._limit_B[self._place_B] <= self._length)
        return self._end(self._place_B[running_B])

    def cancel(self, rollouts: Sequence[int]) -> list[Generation]:
        """Stop rollouts that have not ended. They may be waiting to begin."""
        begun = [self._place_of[rollout] for rollout in rollouts if rollout in self._place_of]
        nothing = np.zeros(0, np.float32)
        return self._end(begun, cancelled=True) + [
            Generation(rollout, (), nothing, truncated=False, cancelled=True)
            for rollout in rollouts
            if rollout not in self._place_of
        ]

    def _advance(self) -> Rows:
        """Run the model for one step. Return the rows, with logits for the next token."""
        if self._rows is None:
            self._rows = self._prefill()
            return self._rows
        running_B = self._running_B[self._place_B]
        # Until then, rows of rollouts that have ended are decoded on, and their tokens are ignored.
        if np.count_nonzero(running_B) < (1 - FINISHED_SHARE_TO_DROP) * len(running_B):
            at_B = self._rows.select(np.flatnonzero(running_B))
            self._place_B, self._keys_B = self._place_B[running_B], self._keys_B[running_B]
            self._newest_B, self._draws_BC = self._newest_B[at_B], self._draws_BC[at_B]
        self._rows.feed(self._newest_B)
        return self._rows

    def _draws(self, rows: Rows) -> Tensor:
        """Return each row's random draw for the next token."""
        ahead = self._length % _AHEAD
        if ahead == 0:
            last = min(self._length + _AHEAD, self._longest)
            # Draws depend only on the key and the position, so those of later steps can be computed now. One transfer
            # to the device then serves `_AHEAD` steps.
            draws_BC = uniforms(self._keys_B[:, None], np.arange(self._length, last))
            self._draws_BC = sent(draws_BC, rows.logits_BV.device)
        return self._draws_BC[:, ahead]

    def _end(self, places: Sequence[int] | NDArray[np.int64], cancelled: bool = False) -> list[Generation]:
        """End the rollouts at these places. Return them with the tokens sampled so far."""
        self._running_B[places] = False
        tokens_BT, logprobs_BT = self._tokens_BT[places, : self._length], self._logprobs_BT[places, : self._length]
        # Looked for only when rollouts end, because a look at every step would cost time. NaN does not go away: it
        # stays in the log-probabilities.
        if np.isnan(logprobs_BT).any():
            raise FloatingPointError(NOT_FINITE)
        return [
            Generation(
                self._rollouts[place],
                tuple(tokens_T.tolist()),
                logprobs_T.copy(),
                truncated=not (cancelled or self._ends_V[tokens_T[-1]]),
                cancelled=cancelled,
            )
            for place, tokens_T, logprobs_T in zip(places, tokens_BT, logprobs_BT, strict=True)
        ]


class Rows:
    """The key-value cache, mask and positions of a batch with one row per rollout, and the logits for the next token."""

    def __init__(
        self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], prompt_B: NDArray[np.int64], pad_id: int
    ) -> None:
        """Prefill each prompt once, then copy it for its rollouts. `logits_BV` are then the logits for the next token."""
        self._model = model
        self._cache = DynamicCache(config=model.config)
        # `DynamicLayer` copies the whole cache to append a token. Only plain `DynamicLayer`s can be replaced.
        self._cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in self._cache.layers]
        shared = shared_prefix(model, prompts)
        # On the left, so that the last column has the last token of every prompt, and all rows append in the same
        # column.
        rest_BP, mask_BP = padded([prompt[shared:] for prompt in prompts], pad_id, side="left", device=model.device)
        if shared:
            self._prefill_shared(prompts[0][:shared], len(prompts))
        self._mask_BS = torch.nn.functional.pad(mask_BP, (shared, 0), value=True)
        self._padded = len({len(prompt) for prompt in prompts}) > 1
        self._appends_only = appends_only(model.config)
        position_BP = positions(mask_BP) + shared
        self._position_B = position_BP[:, -1]
        self.logits_BV = self._forward(rest_BP, position_BP)
        if not np.array_equal(prompt_B, np.arange(len(prompts))):  # several rollouts of a prompt
            self.select(prompt_B)

    @property
    def held(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer, shape (B, heads, columns, width). The last column has the last token."""
        layers: list[Any] = self._cache.layers
        return [(layer.keys, layer.values) for layer in layers]

    def _prefill_shared(self, tokens: Sequence[int], rows: int) -> None:
        """Put the common prefix of all rows into the cache: compute it for one row, then copy it."""
        # Rows of equal length need no mask, and there is only one row here. `__init__` sets this again for the rest
        # of the prompts.
        self._padded = False
        ids_1P = sent(np.array([tokens]), self._model.device)
        self._forward(ids_1P, torch.arange(len(tokens), device=self._model.device)[None])
        self._cache.batch_select_indices(torch.zeros(rows, dtype=torch.int64, device=self._model.device))

    def select(self, rows_B: NDArray[np.int64]) -> Tensor:
        """Keep these rows, in this order; an index may occur several times. Return the indices as a tensor on the device."""
        at_B = sent(rows_B, self.logits_BV.device)
        self._cache.batch_select_indices(at_B)
        self._mask_BS = self._mask_BS[at_B]
        self._position_B = self._position_B[at_B]
        self.logits_BV = self.logits_BV[at_B]
        return at_B

    def feed(self, tokens_B: Tensor) -> None:
        """Append a token to each row. Afterwards, `logits_BV` are the logits for the next token."""
        if self._padded:
            self._mask_BS = torch.nn.functional.pad(self._mask_BS, (0, 1), value=True)
        self._position_B = self._position_B + 1
        self.logits_BV = self._forward(tokens_B[:, None], self._position_B[:, None])

    def _forward(self, ids_BS: Tensor, position_ids_BS: Tensor) -> Tensor:
        mask = None  # rows of equal length need no mask, and attention is faster without one
        if self._padded:
            mask = ready_mask(self._model, self._mask_BS, ids_BS.shape[1], self._appends_only)
        output = self._model(
            input_ids=ids_BS,
            attention_mask=mask,
            position_ids=position_ids_BS,
            **cache_argument(self._model, self._cache),
            use_cache=True,
            logits_to_keep=1,
        )
        # Whatever the model's dtype, tokens are drawn and log-probabilities computed from float32.
        return output.logits[:, -1].float()


def ends_of(model: PreTrainedModel, eos_ids: Sequence[int], sampling: Sampling) -> NDArray[np.bool_]:
    """Return a mask of the tokens that end a rollout, shape (V,). Raise a ValueError for a token outside the vocabulary."""
    ids, size = (*eos_ids, *sampling.stop_ids), model.config.get_text_config().vocab_size
    for token in ids:
        if not 0 <= token < size:
            raise ValueError(f"an EOS id must lie in the model's vocabulary [0, {size}), got {token}")
    found_V = np.zeros(size, bool)
    found_V[list(ids)] = True
    return found_V


ROOM = 32  # number of spare columns, one per token, added whenever the tensors grow


class RoomyLayer(DynamicLayer):
    """The keys and values of one layer, in tensors with spare columns. The model sees only rows and columns in use."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[Tensor] = []  # keys and values, shape (rows, heads, columns, width)
        self._rows = self._filled = 0

    def get_seq_length(self, *args: object) -> int:
        return self._filled

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append tokens to each row. Return all keys and values."""
        self.begin((key_states, value_states))
        before, after = self._filled, self._filled + key_states.shape[-2]
        if after > self._held[0].shape[-2]:
            self.grow(len(key_states), after + ROOM)
        self.put(slice(len(key_states)), slice(before, after), key_states, value_states)
        return self.show(len(key_states), after)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order."""
        self._held = [held.index_select(0, indices) for held in self._held]
        self.show(len(indices), self._filled)

    def begin(self, like: tuple[Tensor, Tensor]) -> None:
        """Initialise an empty layer with the number and the width of heads of `like`. A second call does nothing."""
        if not self._held:
            self._held = [each[:0, :, :0] for each in like]
            self.dtype, self.device, self.is_initialized = like[0].dtype, like[0].device, True

    def grow(self, rows: int, columns: int) -> None:
        """Enlarge the tensors. New entries are 0: they are masked with weight 0, but 0 · NaN would be NaN."""
        for at, held in enumerate(self._held):
            larger = held.new_zeros((rows, held.shape[1], columns, held.shape[3]))
            larger[: held.shape[0], :, : held.shape[2]] = held
            self._held[at] = larger

    def put(self, rows: slice, columns: slice, keys: Tensor, values: Tensor) -> None:
        for held, new in zip(self._held, (keys, values), strict=True):
            held[rows, :, columns] = new

    def move(self, to: Tensor, movers: Tensor, columns: slice) -> None:
        for held in self._held:
            held[to, :, columns] = held[movers, :, columns]

    def shift(self, by: int, rows: int, filled: int) -> None:
        for held in self._held:
            there = held[:rows, :, max(0, -by) : filled].clone()
            held[:rows, :, max(0, by) : filled + by] = there

    def show(self, rows: int, filled: int) -> tuple[Tensor, Tensor]:
        self._rows, self._filled = rows, filled
        keys, values = (held[:rows, :, :filled] for held in self._held)
        self.keys, self.values = keys, values
        return keys, values
