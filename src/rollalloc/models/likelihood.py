"""The plain forward pass: how likely a model finds given completions of given prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache as once
from inspect import signature
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from rollalloc.models.attention import DECODING

Tokens = Sequence[int]

LEAST_SHARED = 16  # tokens that all prompts begin with, from which on they are read once for all
_BY_LENGTH = ("dynamic", "longrope")  # rotary embeddings whose frequencies depend on how long the row is that is read


def completion_logprobs(
    model: PreTrainedModel,
    prompts: Sequence[Tokens],
    completions: Sequence[Tokens],
    *,
    pad_id: int,
    temperature: float = 1.0,
    share: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each completion token given its prompt and the completion so far; differentiable.

        logprobs[b, t] = log softmax(logits / temperature)[completions[b][t]]

    Only the positions that predict a completion token go through the model's head. Runs in the model's own mode
    (train or eval) and under the caller's gradient mode.

    Args:
        prompts: B prompts of at least one token id each.
        completions: B completions of at least one token id each, with their EOS where they have one.
        pad_id: any id in the vocabulary; what stands there is masked.
        temperature: of the distribution the completions are judged under, above 0.
        share: read what all prompts begin with once, where the model can; needs a cache.

    Returns:
        logprobs_BT in float32, 0 beyond a completion's end, and mask_BT, True on its tokens; T is the longest's length.

    Raises:
        ValueError: no prompts, another number of completions than of prompts, or an empty prompt or completion.
    """
    if not prompts or len(prompts) != len(completions):
        got = f"{len(prompts)} prompts and {len(completions)} completions"
        raise ValueError(f"expected one completion per prompt, at least one, got {got}; repeat the prompts")
    shared = shared_prefix(model, prompts) if share else 0
    logits_BTV, completion_BT, mask_BT = _completion_logits(model, prompts, completions, pad_id, temperature, shared)
    return _logprobs(logits_BTV, completion_BT, mask_BT), mask_BT


def _completion_logits(
    model: PreTrainedModel,
    prompts: Sequence[Tokens],
    completions: Sequence[Tokens],
    pad_id: int,
    temperature: float,
    shared: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the positions that predict a completion's tokens, over the temperature; the tokens, and which are real.

    The first `shared` tokens, which all prompts begin with, are read once.
    """
    rests = [prompt[shared:] for prompt in prompts]
    prompt_BP, prompt_mask_BP = padded(rests, pad_id, side="left", device=model.device)
    completion_BT, mask_BT = padded(completions, pad_id, side="right", device=model.device)
    # A completion's last token predicts nothing that is asked for, so it is not fed.
    fed_BS = torch.cat([prompt_mask_BP, mask_BT[:, :-1]], dim=1)
    ragged = any(len({len(each) for each in column}) > 1 for column in (prompts, completions))
    seen_BS = nn.functional.pad(fed_BS, (shared, 0), value=True)
    output = model(
        input_ids=torch.cat([prompt_BP, completion_BT[:, :-1]], dim=1),
        # Where nothing is masked, the model finds that out, and attends faster.
        attention_mask=ready_mask(model, seen_BS, fed_BS.shape[1]) if ragged else seen_BS,
        position_ids=positions(fed_BS) + shared,
        **cache_argument(model, _read_once(model, prompts[0][:shared], len(prompts)) if shared else None),
        use_cache=shared > 0,
        logits_to_keep=completion_BT.shape[1],
    )
    return output.logits.float() / temperature, completion_BT, mask_BT


def cache_argument(model: PreTrainedModel, cache: Cache | None) -> dict[str, Cache | None]:
    """A cache by the name that the model's `forward` has for it: `cache`, and `past_key_values` before transformers 5.24."""
    return {"cache" if _takes_cache(type(model)) else "past_key_values": cache}


@once
def _takes_cache(kind: type[PreTrainedModel]) -> bool:
    return "cache" in signature(kind.forward).parameters


def _read_once(model: PreTrainedModel, tokens: Tokens, rows: int) -> DynamicCache:
    """The keys and values of what all rows begin with: computed in one row, seen by all, with the gradient of all."""
    cache = DynamicCache(config=model.config)
    ids_1P = sent(np.array([tokens], np.int64), model.device)
    model(input_ids=ids_1P, **cache_argument(model, cache), use_cache=True, logits_to_keep=1)
    layers: list[Any] = cache.layers
    for layer in layers:
        layer.keys, layer.values = layer.keys.expand(rows, -1, -1, -1), layer.values.expand(rows, -1, -1, -1)
    return cache


def shared_prefix(model: PreTrainedModel, prompts: Sequence[Tokens]) -> int:
    """Tokens that all prompts begin with and that a model can read once for all of them; each prompt keeps one of its own.

    0 where they are too few to pay, or where the model cannot: it must be in eval mode, with a cache of plain keys and
    values, and know from position ids alone where a token stands, since padding then lies between two tokens.
    """
    first, last = min(prompts, key=tuple), max(prompts, key=tuple)  # in lexical order, so that what these share all do
    most = min(map(len, prompts)) - 1
    shared = next((at for at in range(most) if first[at] != last[at]), most)
    return shared if len(prompts) > 1 and shared >= LEAST_SHARED and _can_share(model) else 0


def _can_share(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config()
    return _rotary(config) and not model.training and appends_only(config)


def _rotary(config: PretrainedConfig) -> bool:
    """Whether a token's position ids alone say where it stands."""
    rope: Any = getattr(config, "rope_parameters", None)
    return rope is not None and rope.get("rope_type") not in _BY_LENGTH and not getattr(config, "alibi", False)


def appends_only(config: PretrainedConfig) -> bool:
    """Whether a model's cache is nothing but the keys and values of every token, in order."""
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


def _logprobs(logits_BTV: Tensor, completion_BT: Tensor, mask_BT: Tensor) -> Tensor:
    # The chosen logit less the log-normaliser: a log-softmax that keeps no second tensor of the vocabulary's width.
    logprobs_BT = logits_BTV.gather(-1, completion_BT[..., None]).squeeze(-1) - logits_BTV.logsumexp(-1)
    return logprobs_BT.masked_fill(~mask_BT, 0.0)


def exact_answers(
    model: PreTrainedModel,
    prompts: Sequence[Tokens],
    answers: Sequence[Tokens],
    *,
    pad_id: int,
    temperature: float = 1.0,
    batch_rows: int = 512,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Exact chance p_N of each prompt's one right answer, and the policy's mean entropy along it.

        p[n] = exp(Σ_t log π(answers[n][t] | prompts[n], answers[n][:t]))
        entropy[n] = mean_t H(π(· | prompts[n], answers[n][:t]))

    No sampling, so no sampling noise. Runs in eval mode without gradients and restores the mode.

    Args:
        prompts: N prompts as token ids.
        answers: their right answers as token ids, EOS included.
        pad_id: any id in the vocabulary.
        temperature: rollouts are sampled at, above 0.
        batch_rows: rows of one forward pass, at least 1.

    Returns:
        p_N in [0, 1], and entropy_N in nats per token.

    Raises:
        ValueError: as `completion_logprobs`; no prompts at all give empty arrays.
    """
    p_N, entropy_N = np.empty(len(prompts)), np.empty(len(prompts))
    # Rows of like length share a forward pass, so that little of it is padding.
    by_length_N = np.argsort([len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)])
    with evaluating(model):
        for start in range(0, len(prompts), batch_rows):
            rows_B = by_length_N[start : start + batch_rows]
            asked, answered = [prompts[row] for row in rows_B], [answers[row] for row in rows_B]
            logits_BTV, answer_BT, mask_BT = _completion_logits(
                model, asked, answered, pad_id, temperature, shared_prefix(model, asked)
            )
            logprobs_BT = _logprobs(logits_BTV, answer_BT, mask_BT).double()
            p_B = logprobs_BT.sum(dim=1).exp()
            # By few rows at a time, for what it takes is as wide as the vocabulary.
            entropy_BT = torch.cat([_entropy(few_BTV) for few_BTV in logits_BTV.split(32)]) * mask_BT
            entropy_B = entropy_BT.double().sum(dim=1) / mask_BT.sum(dim=1)
            p_N[rows_B], entropy_N[rows_B] = torch.stack([p_B, entropy_B]).cpu().numpy()
    return p_N, entropy_N


def _entropy(logits_BTV: Tensor) -> Tensor:
    return torch.special.entr(logits_BTV.softmax(-1)).sum(-1)  # 0 for a token that a model rules out by a logit of -inf


def padded(
    sequences: Sequence[Tokens], pad_id: int, *, side: Literal["left", "right"], device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Sequences of unequal length, none empty, as one matrix: ids_BT in int64, and mask_BT, True but on padding."""
    lengths_B = np.array([len(sequence) for sequence in sequences])
    if lengths_B.min() == 0:
        raise ValueError(f"expected at least one token a sequence, got none in sequence {lengths_B.argmin()}; drop it")
    columns_T = np.arange(lengths_B.max())
    if side == "left":
        columns_T = columns_T[::-1]
    mask_BT = columns_T < lengths_B[:, None]
    ids_BT = np.full(mask_BT.shape, pad_id, dtype=np.int64)
    ids_BT[mask_BT] = np.concatenate([np.asarray(sequence, dtype=np.int64) for sequence in sequences])
    return sent(ids_BT, device), sent(mask_BT, device)


def sent(array: NDArray[Any], device: torch.device | str) -> Tensor:
    """An array on a device; the host does not wait for what a GPU has still to do."""
    # CUDA has read the array when this returns, since its memory is not pinned; others do not promise that.
    return torch.from_numpy(array).to(device, non_blocking=torch.device(device).type == "cuda")


def ready_mask(model: PreTrainedModel, mask_BS: Tensor, queries: int) -> Tensor:
    """A mask of keys as attention takes it, shape (B, 1, queries, S), for the last `queries` tokens of each row.

    A model would make just that of it, but look first whether all of it is True, for which the host waits at every pass.
    As it is, where the model might make something else of it.
    """
    config = model.config
    known = config._attn_implementation in (DECODING, "sdpa") and not getattr(config, "alibi", False)
    if not known or not appends_only(config) or (queries > 1 and not _rotary(config)):
        return mask_BS
    mask_B1QS = mask_BS[:, None, None]
    if queries == 1:
        return mask_B1QS
    columns = mask_BS.shape[1]
    earlier_QS = torch.ones(queries, columns, dtype=torch.bool, device=mask_BS.device).tril(columns - queries)
    return mask_B1QS & earlier_QS


def positions(mask_BT: Tensor) -> Tensor:
    """Position ids that count a row's real tokens from 0, wherever its padding lies."""
    return (mask_BT.cumsum(dim=1) - 1).clamp(min=0)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inference mode with every module in eval mode; on leaving, each module is back in the mode it had."""
    with in_eval_mode(model), torch.inference_mode():
        yield


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode; on leaving, each is back in the mode it had."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
