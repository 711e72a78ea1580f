"""A batched sampler for any Hugging Face causal language model.

A prompt is prefilled once for all its rollouts, finished rollouts leave the batch, and each token's random draw is a
function of (seed, prompt, rollout, position) alone, so that what a rollout draws does not depend on its company.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rollalloc.engines.likelihood import evaluating, padded, positions

# Dropping rows copies the cache, so finished rows stay until they are this share of the batch.
FINISHED_SHARE_TO_DROP = 0.1

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # SplitMix64's increment


@dataclass(frozen=True)
class Sampling:
    """How to sample.

    Attributes:
        max_new_tokens: tokens of a rollout, EOS included, at least 1.
        temperature: divides the logits, above 0.
        top_p: keep the fewest most likely tokens whose probabilities sum to at least this, in (0, 1]; 1 keeps all.
        top_k: keep this many most likely tokens (more where the last one ties); 0 keeps all. Applied before `top_p`.
        max_rows: rollouts in the batch at once, at least 1; it bounds the key-value cache. The rest wait their turn.

    Raises:
        ValueError: a value out of its range.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_rows: int = 1024

    def __post_init__(self) -> None:
        ranges = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (0 < self.temperature < float("inf"), "above 0 and finite (greedy decoding is top_k=1)"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "top_k": (self.top_k >= 0, "at least 0 (0 keeps every token)"),
            "max_rows": (self.max_rows >= 1, "at least 1"),
        }
        for name, (holds, expected) in ranges.items():
            if not holds:
                raise ValueError(f"{name} must be {expected}, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Request:
    """Sample these rollouts of one prompt.

    Attributes:
        prompt: index of the prompt; with the rollout's id it keys the random draws.
        tokens: the prompt's token ids, at least one.
        rollouts: ids of the rollouts.
    """

    prompt: int
    tokens: tuple[int, ...]
    rollouts: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """One sampled rollout.

    Attributes:
        rollout: its id.
        tokens: generated token ids, EOS included where it was sampled.
        logprobs: float32 log-probability of each token under the distribution it was drawn from, that is after
            temperature, top-k and top-p.
        truncated: True where the length limit came before an EOS.
    """

    rollout: int
    tokens: tuple[int, ...]
    logprobs: NDArray[np.float32]
    truncated: bool


def generate(
    model: PreTrainedModel,
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    eos_ids: Sequence[int],
    pad_id: int,
    seed: int,
) -> list[Generation]:
    """Sample every requested rollout.

    The model runs in eval mode without gradients; afterwards its mode is what it was.

    Args:
        eos_ids: tokens that end a rollout, each in the vocabulary.
        pad_id: any id in the vocabulary; what stands there is masked.
        seed: of the run.

    Returns:
        One generation a rollout, in the order requested.

    Raises:
        ValueError: a rollout requested twice, an empty prompt, or an EOS outside the vocabulary.
        FloatingPointError: the model's logits are not numbers.
    """
    # Prompts of like length share a wave, so that little of its prefill is padding.
    by_length = sorted(requests, key=lambda request: len(request.tokens))
    request_R = np.repeat(np.arange(len(requests)), [len(request.rollouts) for request in by_length])
    rollout_R = [rollout for request in by_length for rollout in request.rollouts]
    if len(set(rollout_R)) < len(rollout_R):
        [(twice, times)] = Counter(rollout_R).most_common(1)
        raise ValueError(
            f"each rollout may be requested once, got {twice} {times} times; it would draw the same tokens"
        )
    keys_R = draw_keys(seed, np.array([request.prompt for request in by_length], np.int64)[request_R], rollout_R)

    done: dict[int, Generation] = {}
    with evaluating(model):
        for start in range(0, len(rollout_R), sampling.max_rows):
            wave = slice(start, start + sampling.max_rows)
            present, prompt_B = np.unique(request_R[wave], return_inverse=True)
            rows = _Rows(model, [by_length[index].tokens for index in present], pad_id)
            rows.select(torch.from_numpy(prompt_B).to(model.device))  # a rollout a row, each on its prompt's prefill
            tokens_BT, logprobs_BT = _sample_wave(rows, keys_R[wave], sampling, eos_ids)
            done |= {each.rollout: each for each in _cut(rollout_R[wave], tokens_BT, logprobs_BT, eos_ids)}
    return [done[rollout] for request in requests for rollout in request.rollouts]


def draw_keys(seed: int, prompts_B: ArrayLike, rollouts_B: ArrayLike) -> NDArray[np.uint64]:
    """The key of each rollout's random draws, hashed from (seed, prompt, rollout)."""
    key_B = np.array([seed % 2**64], dtype=np.uint64)
    for ids_B in (prompts_B, rollouts_B):
        key_B = _mix(key_B ^ np.asarray(ids_B, dtype=np.int64).astype(np.uint64))
    return key_B


def uniforms(keys_B: NDArray[np.uint64], position: int) -> NDArray[np.float64]:
    """Draws uniform on [0, 1), multiples of 2⁻⁵³; each the `position`-th value of SplitMix64 started at its key."""
    counter = np.array([position * _GOLDEN_GAMMA % 2**64], dtype=np.uint64)
    return (_mix(keys_B + counter) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x_B: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One step of SplitMix64 (Steele, Lea and Flood, 2014): every bit of the input reaches every bit of the output."""
    z_B = x_B + np.uint64(_GOLDEN_GAMMA)
    z_B = (z_B ^ (z_B >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z_B = (z_B ^ (z_B >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z_B ^ (z_B >> np.uint64(31))


def draw(logits_BV: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token a row by inverting the distribution function.

        token = min{v : Σ_{w≤v} exp(logits[w]) > u · Σ_w exp(logits[w])}

    The inequality is strict, so a token of probability 0 (logit −∞) is never drawn; summing in float64 keeps u · total
    below the total for every u < 1.

    Args:
        logits_BV: unnormalised log-probabilities in float32.
        uniforms_B: in [0, 1), float64.

    Returns:
        tokens_B, and their log-probabilities logprobs_B in float64; NaN in rows whose logits are not numbers.
    """
    shifted_BV = logits_BV - logits_BV.amax(dim=-1, keepdim=True)
    cumulative_BV = shifted_BV.exp().cumsum(dim=-1, dtype=torch.float64)
    total_B1 = cumulative_BV[:, -1:]
    token_B1 = torch.searchsorted(cumulative_BV, uniforms_B[:, None] * total_B1, right=True)
    token_B1.clamp_(max=logits_BV.shape[-1] - 1)  # rows of NaN point past the end
    return token_B1[:, 0], (shifted_BV.gather(-1, token_B1) - total_B1.log())[:, 0]


def restrict(logits_BV: Tensor, *, top_k: int, top_p: float) -> Tensor:
    """Logits with −∞ at every token that `Sampling.top_k`, then `Sampling.top_p`, leave out."""
    if 0 < top_k < logits_BV.shape[-1]:
        least_B1 = logits_BV.topk(top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
    if top_p < 1:
        sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
        probability_BV = sorted_BV.softmax(dim=-1)
        # A token stays while those before it fall short of top_p, so the first always does.
        left_out_BV = probability_BV.cumsum(dim=-1) - probability_BV >= top_p
        logits_BV = logits_BV.masked_fill(left_out_BV.scatter(-1, order_BV, left_out_BV), -torch.inf)
    return logits_BV


class _Rows:
    """The rollouts being sampled, one a row: their cache, and what the model needs beside their next tokens."""

    def __init__(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], pad_id: int) -> None:
        """Prefill; `logits_BV` are those of each prompt's first new token."""
        self._model = model
        self._cache = DynamicCache(config=model.config)
        prompt_BP, self._mask_BS = padded(prompts, pad_id, side="left", device=model.device)
        position_BP = positions(self._mask_BS)
        self._position_B = position_BP[:, -1]
        self.logits_BV = self._forward(prompt_BP, position_BP)

    def select(self, rows_B: Tensor) -> None:
        """Keep these rows, in this order; a row named several times is copied."""
        self._cache.batch_select_indices(rows_B)
        self._mask_BS = self._mask_BS[rows_B]
        self._position_B = self._position_B[rows_B]
        self.logits_BV = self.logits_BV[rows_B]

    def feed(self, token_B: Tensor) -> None:
        """Append a token to each row; `logits_BV` are those of the token after it."""
        self._mask_BS = torch.nn.functional.pad(self._mask_BS, (0, 1), value=True)
        self._position_B = self._position_B + 1
        self.logits_BV = self._forward(token_B[:, None], self._position_B[:, None])

    def _forward(self, ids_BS: Tensor, position_ids_BS: Tensor) -> Tensor:
        output = self._model(
            input_ids=ids_BS,
            attention_mask=self._mask_BS,
            position_ids=position_ids_BS,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float()


def _sample_wave(
    rows: _Rows, keys_B: NDArray[np.uint64], sampling: Sampling, eos_ids: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Tokens and log-probabilities of each row, shape (B, max_new_tokens); arbitrary after a row's first EOS."""
    count, device = len(keys_B), rows.logits_BV.device
    ends_V = _lookup(eos_ids, rows.logits_BV.shape[-1], device)
    tokens_BT = torch.zeros(count, sampling.max_new_tokens, dtype=torch.int64, device=device)
    logprobs_BT = torch.zeros(tokens_BT.shape, dtype=torch.float32, device=device)
    live_B = torch.arange(count, device=device)  # place in the result of each row still in the batch
    finished_B = torch.zeros(count, dtype=torch.bool, device=device)
    for position in range(sampling.max_new_tokens):
        logits_BV = restrict(rows.logits_BV / sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
        token_B, logprob_B = draw(logits_BV, torch.from_numpy(uniforms(keys_B, position)).to(device))
        tokens_BT[live_B, position] = token_B
        logprobs_BT[live_B, position] = logprob_B.float()
        finished_B = finished_B | ends_V[token_B]
        finished = int(finished_B.sum())
        if finished == len(live_B) or position == sampling.max_new_tokens - 1:
            break
        if finished > FINISHED_SHARE_TO_DROP * len(live_B):
            kept_B = (~finished_B).nonzero()[:, 0]
            rows.select(kept_B)
            keys_B = keys_B[kept_B.cpu().numpy()]
            live_B, token_B, finished_B = live_B[kept_B], token_B[kept_B], finished_B[kept_B]
        rows.feed(token_B)
    if logprobs_BT.isnan().any():
        raise FloatingPointError(
            "expected finite logits, got NaN or +inf: the weights diverged or overflow their dtype"
        )
    return tokens_BT.cpu().numpy(), logprobs_BT.cpu().numpy()


def _lookup(ids: Sequence[int], size: int, device: torch.device) -> Tensor:
    """True at each of `ids`, shape (size,)."""
    for token in ids:
        if not 0 <= token < size:
            raise ValueError(f"an EOS id must lie in the model's vocabulary [0, {size}), got {token}")
    found_V = torch.zeros(size, dtype=torch.bool, device=device)
    found_V[list(ids)] = True
    return found_V


def _cut(
    rollouts: Sequence[int], tokens_BT: NDArray[np.int64], logprobs_BT: NDArray[np.float32], eos_ids: Sequence[int]
) -> list[Generation]:
    """Each row up to its first EOS."""
    ends_BT = np.isin(tokens_BT, eos_ids)
    ended_B = np.any(ends_BT, axis=1)
    length_B = np.where(ended_B, ends_BT.argmax(axis=1) + 1, tokens_BT.shape[1])
    return [
        Generation(rollout, tuple(tokens_T[:length].tolist()), logprobs_T[:length].copy(), truncated=not ended)
        for rollout, tokens_T, logprobs_T, length, ended in zip(
            rollouts, tokens_BT, logprobs_BT, length_B, ended_B, strict=True
        )
    ]
