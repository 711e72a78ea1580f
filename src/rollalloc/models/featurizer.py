"""Computes features of prompts for a predictor, by one forward pass of the model over each prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from rollalloc.core.recipe import at_least
from rollalloc.core.seeds import rng
from rollalloc.data.feature_blocks import (
    WIDTH,
    FeatureCost,
    Features,
    Tokens,
    check_width,
    log_length,
    projection,
    standardised,
    token_bag,
)
from rollalloc.models.likelihood import evaluating, padded
from rollalloc.models.policy import computing
from rollalloc.models.settings import Precision

BATCH_TOKENS = 4096
SAMPLE = 256  # number of prompts from which the mean and the standard deviation of each column are estimated
_NOISE = 1e-5  # a column is constant if its standard deviation is below this share of its layer's root mean square

Progress = Callable[[int, int], None]


def features_of(
    model: PreTrainedModel,
    tokens: Sequence[Tokens],
    *,
    pad_id: int,
    width: int = WIDTH,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
    precision: Precision = "auto",
    progress: Progress = lambda done, of: None,
) -> Features:
    """Compute three blocks of features: "hidden", from the model's hidden states; "tokens", from token counts; "length".

        hidden[n] = standardised((s[n] − mean) / deviation · P),   s[n, l] = Σ_t h[n, l, t]

    h[n, l, t] is the hidden state of layer l (embeddings included) at token t of prompt n. Columns of a large model may
    differ by a factor of a thousand. Therefore each column of s is first centred and scaled with its mean and standard
    deviation over a sample of 256 prompts. P is a random projection to `width` columns. If s has no more than `width`
    columns, it is not projected. The features depend on the model's weights, so compute them before training.

    Args:
        model: a model in any mode. There must be memory for the hidden states of all layers of one batch.
        tokens: N prompts of at least one token id each.
        pad_id: any id in the vocabulary, because padding is masked.
        width: maximum number of columns of a block, in [1, 1024].
        seed: seed of projection, hash and sample.
        batch_tokens: maximum number of tokens of a forward pass, with padding; at least 1. A longer prompt gets a pass of
            its own.
        precision: precision of the forward passes. Sums and projection are in float32.
        progress: called after each forward pass with the number of tokens done and the number of all tokens.

    Raises:
        ValueError: there are no prompts; a prompt is empty or too long; a number is out of range; the model returns no
            hidden states; or hidden states are not finite.
    """
    started = time.perf_counter()
    check_width(width)
    at_least("seed", seed, 0)
    at_least("batch_tokens", batch_tokens, 1)
    sums = HiddenSums(model, tokens, pad_id, batch_tokens, precision)
    lengths_N = sums.lengths_N
    vocabulary = _vocabulary(model, tokens)
    blocks = {
        "hidden": standardised(_hidden(sums, width, seed, progress)),
        "tokens": token_bag(tokens, vocabulary, width=width, seed=seed),
        "length": log_length(tokens),
    }
    return Features(blocks, FeatureCost(len(tokens), int(lengths_N.sum()), time.perf_counter() - started))


def weights_digest(model: PreTrainedModel) -> str:
    """A digest of a model's weights, rounded to bfloat16, so that the precision of loading has no effect."""
    digest = sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        rounded = parameter.detach().to(torch.bfloat16).contiguous().cpu()
        digest.update(rounded.view(torch.int16).numpy().data)
    return digest.hexdigest()[:32]


@dataclass(frozen=True, eq=False)
class HiddenSums:
    """Runs forward passes over batches of prompts with similar lengths, and sums hidden states over a prompt's tokens.

    For arguments and errors see `features_of`. The model must be in eval mode (`rollalloc.models.likelihood.evaluating`).
    """

    model: PreTrainedModel
    tokens: Sequence[Tokens]
    pad_id: int
    batch_tokens: int = BATCH_TOKENS
    precision: Precision = "auto"

    @cached_property
    def lengths_N(self) -> NDArray[np.int64]:
        """Number of tokens of each prompt."""
        return _lengths(self.model, self.tokens)

    def __call__(self, rows: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
        """Yield batches: the indices of B prompts, and their sums s[l, b, h] on the model's device."""
        for rows_B in self._batches(rows):
            sums_LBH = self._sums(rows_B)
            finite_B = sums_LBH.isfinite().all(dim=2).all(dim=0).cpu().numpy()
            if not finite_B.all():
                problem = f"the model's hidden states of prompt {int(rows_B[~finite_B][0])} are not finite"
                raise ValueError(f"{problem}; try another precision, or leave this prompt out")
            yield rows_B, sums_LBH

    def _batches(self, rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """Sort prompts by length. Yield batches of at most `batch_tokens` tokens with padding, or of one longer prompt."""
        ordered = rows[np.argsort(self.lengths_N[rows], kind="stable")]
        start = 0
        for end, longest in enumerate(self.lengths_N[ordered].tolist()):
            if end > start and (end - start + 1) * longest > self.batch_tokens:
                yield ordered[start:end]
                start = end
        if start < len(ordered):
            yield ordered[start:]

    def _sums(self, rows_B: NDArray[np.int64]) -> Tensor:
        model, device = self.model, self.model.device
        # Padding is on the right, where causal attention does not see it and default positions stay correct.
        ids_BT, mask_BT = padded([self.tokens[row] for row in rows_B], self.pad_id, side="right", device=device)
        body: Any = model.get_decoder()  # without the head, since no logits are needed
        with computing(model, self.precision):
            output = body(input_ids=ids_BT, attention_mask=mask_BT.long(), use_cache=False, output_hidden_states=True)
        states = getattr(output, "hidden_states", None)
        if not states or any(state.shape != (*ids_BT.shape, states[0].shape[-1]) for state in states):
            do = "give features of your own (rollalloc.data.feature_blocks.own_features)"
            raise ValueError(f"{type(model).__name__} gives no hidden states of equal width in all layers; {do}")
        padding_BT1 = ~mask_BT[..., None]
        sums = [state.masked_fill(padding_BT1, 0).sum(dim=1, dtype=torch.float32).to(device) for state in states]
        return torch.stack(sums)


class _Reduction:
    """Centres and scales the columns of sums, then projects them to `width` columns. Uses statistics of S prompts."""

    def __init__(self, sample_LSH: Tensor, width: int, seed: int) -> None:
        layers, _, hidden = sample_LSH.shape
        self._mean_L1H = sample_LSH.mean(dim=1, keepdim=True)
        deviation_L1H = (sample_LSH - self._mean_L1H).square().mean(dim=1, keepdim=True).sqrt()
        size_L11 = sample_LSH.square().mean(dim=(1, 2), keepdim=True).sqrt()
        self._weight_L1H = torch.where(deviation_L1H > _NOISE * size_L11, 1 / deviation_L1H, 0)
        self.width = min(width, layers * hidden)
        self._projection = None
        if self.width < layers * hidden:
            self._projection = torch.from_numpy(projection(seed, layers * hidden, width)).to(sample_LSH.device)

    def __call__(self, sums_LBH: Tensor) -> NDArray[np.float32]:
        x_BC = ((sums_LBH - self._mean_L1H) * self._weight_L1H).transpose(0, 1).flatten(start_dim=1)
        return (x_BC if self._projection is None else x_BC @ self._projection).cpu().numpy()


def _hidden(sums: HiddenSums, width: int, seed: int, progress: Progress) -> NDArray[np.float32]:
    """The sums of all prompts, centred, scaled and projected; shape (N, D), D ≤ width."""
    prompts, tokens, done = len(sums.tokens), int(sums.lengths_N.sum()), 0
    sample = np.sort(rng(seed, "feature sample").choice(prompts, min(SAMPLE, prompts), replace=False))
    rest = np.setdiff1d(np.arange(prompts), sample)
    with evaluating(sums.model):
        held = list(sums(sample))  # a list, because the sample's sums are used twice
        reduced = _Reduction(torch.cat([sums_LBH for _, sums_LBH in held], dim=1), width, seed)
        x_ND = np.empty((prompts, reduced.width), np.float32)
        for rows_B, sums_LBH in chain(held, sums(rest)):
            x_ND[rows_B] = reduced(sums_LBH)
            done += int(sums.lengths_N[rows_B].sum())
            progress(done, tokens)
    return x_ND


def _lengths(model: PreTrainedModel, tokens: Sequence[Tokens]) -> NDArray[np.int64]:
    """Number of tokens of each prompt. Raise a ValueError if a prompt does not fit into the model's context."""
    lengths_N = np.array([len(prompt) for prompt in tokens], np.int64)
    if not lengths_N.size or lengths_N.min() == 0:
        problem = f"none in prompt {lengths_N.argmin()}" if lengths_N.size else "no prompts"
        raise ValueError(f"expected prompts of at least one token each, got {problem}; leave out empty prompts")
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is not None and lengths_N.max() > context:
        longest = f"prompt {lengths_N.argmax()} has {lengths_N.max()} tokens"
        raise ValueError(f"{longest}, but the model's context is {context} tokens; leave the prompt out")
    return lengths_N


def _vocabulary(model: PreTrainedModel, tokens: Sequence[Tokens]) -> int:
    """Number of tokens in the vocabulary. Raise a ValueError if a prompt has a token outside the vocabulary."""
    lowest, highest = min(map(min, tokens)), max(map(max, tokens))
    known = cast("torch.nn.Embedding", model.get_input_embeddings()).num_embeddings
    if lowest < 0 or highest >= known:
        got = f"got {lowest} to {highest}"
        raise ValueError(f"expected tokens in [0, {known}), {got}; use the tokenizer that belongs to the model")
    return known
