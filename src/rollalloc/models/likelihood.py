"""Forward passes: log-probabilities of completions, the contexts in which a model computes, and whether its cache fits.

The contexts put a model in eval mode (`evaluating`), save memory (`recomputing`), or replace its attention on CPUs by matrix
products, for two cases in which PyTorch's fused attention is slower: decoding of one token at a time on several threads, and
updates in bfloat16, where the backward pass of fused attention takes half of the time of an update.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache as once
from functools import partial
from inspect import signature
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Cache,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rollalloc.files.text import error_text

KL_ROWS = 16  # number of rows on which trainers measure by how much an update changes the policy
Tokens = Sequence[int]

LEAST_SHARED = 16  # minimum length of a common prefix for which sharing saves time
_BY_LENGTH = ("dynamic", "longrope")  # rotary embeddings whose frequencies depend on the length of the row


def completion_logprobs(
    model: PreTrainedModel,
    prompts: Sequence[Tokens],
    completions: Sequence[Tokens],
    *,
    pad_id: int,
    temperature: float = 1.0,
    share: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each completion token, given its prompt and the tokens before it. Differentiable.

        logprobs[b, t] = log softmax(logits / temperature)[completions[b][t]]

    The model's head runs only at positions that predict a completion token. This function changes neither the model's
    mode (train or eval) nor the gradient mode.

    Args:
        model: the model.
        prompts: B prompts of at least one token id each.
        completions: B completions of at least one token id each, with EOS if they have one.
        pad_id: any id in the vocabulary, because padding is masked.
        temperature: temperature of the distribution, above 0.
        share: True: compute a common prefix of all prompts only once, if the model allows it (`shared_prefix`).

    Returns:
        logprobs_BT in float32, 0 after a completion's end; and mask_BT, True on completion tokens. T is the largest length.

    Raises:
        ValueError: there are no prompts, the numbers of prompts and completions differ, or a prompt or completion is empty.
    """
    if not prompts or len(prompts) != len(completions):
        got = f"{len(prompts)} prompts and {len(completions)} completions"
        raise ValueError(f"expected one completion per prompt, and at least one prompt, got {got}; repeat the prompts")
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
    """Logits that predict the completions' tokens, divided by the temperature; the padded tokens; and their mask.

    The first `shared` tokens are the same in all prompts and are computed once.
    """
    rests = [prompt[shared:] for prompt in prompts]
    prompt_BP, prompt_mask_BP = padded(rests, pad_id, side="left", device=model.device)
    completion_BT, mask_BT = padded(completions, pad_id, side="right", device=model.device)
    # The last token of a completion predicts nothing, so the model need not see it.
    fed_BS = torch.cat([prompt_mask_BP, mask_BT[:, :-1]], dim=1)
    ragged = any(len({len(row) for row in column}) > 1 for column in (prompts, completions))
    seen_BS = nn.functional.pad(fed_BS, (shared, 0), value=True)
    output = model(
        input_ids=torch.cat([prompt_BP, completion_BT[:, :-1]], dim=1),
        # Without padding, pass the plain mask: the model then notices that it is all True, and uses faster attention.
        attention_mask=ready_mask(model, seen_BS, fed_BS.shape[1]) if ragged else seen_BS,
        position_ids=positions(fed_BS) + shared,
        **(cache_argument(model, _read_once(model, prompts[0][:shared], len(prompts))) if shared else {}),
        use_cache=shared > 0,
        logits_to_keep=completion_BT.shape[1],
    )
    return output.logits.float() / temperature, completion_BT, mask_BT


def cache_argument(model: PreTrainedModel, cache: Cache | None) -> dict[str, Cache | None]:
    """The cache as a keyword argument of the model's `forward`: `cache`, or `past_key_values` before transformers 5.24."""
    wrapped: Any = getattr(model, "get_base_model", None)  # of PEFT, whose own `forward` does not name the argument
    inner = wrapped() if callable(wrapped) else model
    return {"cache" if _takes_cache(type(inner)) else "past_key_values": cache}


@once
def _takes_cache(kind: type[PreTrainedModel]) -> bool:
    return "cache" in signature(kind.forward).parameters


def _read_once(model: PreTrainedModel, tokens: Tokens, rows: int) -> DynamicCache:
    """Compute the keys and values of a common prefix in one row, and expand them to all rows. Gradients are then summed."""
    cache = DynamicCache(config=model.config)
    ids_1P = sent(np.array([tokens], np.int64), model.device)
    model(input_ids=ids_1P, **cache_argument(model, cache), use_cache=True, logits_to_keep=1)
    layers: list[Any] = cache.layers
    for layer in layers:
        layer.keys, layer.values = layer.keys.expand(rows, -1, -1, -1), layer.values.expand(rows, -1, -1, -1)
    return cache


def shared_prefix(model: PreTrainedModel, prompts: Sequence[Tokens]) -> int:
    """Length of the prefix that all prompts share and the model can compute once. A prompt's last token is never included.

    The length is 0 if the prefix is too short to save time, or if the model cannot share a prefix. A model that shares a
    prefix must be in eval mode and have a cache of keys and values only. It must also take positions from position ids
    alone, because padding lies between the prefix and the rest of a row.
    """
    first, last = min(prompts, key=tuple), max(prompts, key=tuple)  # their common prefix is the prefix of all prompts
    most = min(map(len, prompts)) - 1
    shared = next((at for at in range(most) if first[at] != last[at]), most)
    return shared if len(prompts) > 1 and shared >= LEAST_SHARED and _can_share(model) else 0


def _can_share(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config()
    return _rotary(config) and not model.training and appends_only(config)


def _rotary(config: PretrainedConfig) -> bool:
    """Whether the model takes a token's position from its position id alone."""
    rope: Any = getattr(config, "rope_parameters", None)
    if rope is None or getattr(config, "alibi", False):
        return False
    of_layers = [each for each in rope.values() if isinstance(each, Mapping)]  # Gemma 3 has one for each type of layer
    return all(each.get("rope_type") not in _BY_LENGTH for each in of_layers or [rope])


def appends_only(config: PretrainedConfig) -> bool:
    """Whether a model's cache consists only of the keys and values of all tokens, in order."""
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


def _logprobs(logits_BTV: Tensor, completion_BT: Tensor, mask_BT: Tensor) -> Tensor:
    # The same as log_softmax, but without a second tensor of shape (B, T, V).
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
    """Exact probability of each prompt's only right answer, and the mean entropy of the policy over the answer's tokens.

        p[n] = exp(Σ_t log π(answers[n][t] | prompts[n], answers[n][:t]))
        entropy[n] = mean_t H(π(· | prompts[n], answers[n][:t]))

    Nothing is sampled, so there is no sampling noise. The model runs in eval mode without gradients.
    Its mode is then restored.

    Args:
        model: the model.
        prompts: N prompts as token ids; N may be 0.
        answers: their right answers as token ids, with EOS.
        pad_id: any id in the vocabulary, because padding is masked.
        temperature: temperature at which rollouts are sampled, above 0.
        batch_rows: rows per forward pass, at least 1.

    Returns:
        p_N in [0, 1], and entropy_N in nats per token.

    Raises:
        ValueError: a prompt or answer is empty, or the numbers of prompts and answers differ.
    """
    p_N, entropy_N = np.empty(len(prompts)), np.empty(len(prompts))
    # Rows of similar length share a forward pass, so that there is little padding.
    by_length_N = np.argsort([len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)])
    with evaluating(model):
        for start in range(0, len(prompts), batch_rows):
            rows_B = by_length_N[start : start + batch_rows]
            prompts_B, answers_B = [prompts[row] for row in rows_B], [answers[row] for row in rows_B]
            logits_BTV, answer_BT, mask_BT = _completion_logits(
                model, prompts_B, answers_B, pad_id, temperature, shared_prefix(model, prompts_B)
            )
            logprobs_BT = _logprobs(logits_BTV, answer_BT, mask_BT).double()
            p_B = logprobs_BT.sum(dim=1).exp()
            # In small parts, because the entropy needs further tensors of the vocabulary's size.
            entropy_BT = torch.cat([_entropy(few_BTV) for few_BTV in logits_BTV.split(32)]) * mask_BT
            entropy_B = entropy_BT.double().sum(dim=1) / mask_BT.sum(dim=1)
            p_N[rows_B], entropy_N[rows_B] = torch.stack([p_B, entropy_B]).cpu().numpy()
    return p_N, entropy_N


def _entropy(logits_BTV: Tensor) -> Tensor:
    return torch.special.entr(logits_BTV.softmax(-1)).sum(-1)  # `entr` is 0 at probability 0, not NaN


def padded(
    sequences: Sequence[Tokens], pad_id: int, *, side: Literal["left", "right"], device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Pad sequences of different lengths to one matrix.

    Args:
        sequences: B sequences of at least one token id each.
        pad_id: id of the padding.
        side: the side on which padding is added.
        device: device of the result.

    Returns:
        ids_BT in int64, and mask_BT, False on padding.

    Raises:
        ValueError: a sequence is empty.
    """
    lengths_B = np.array([len(sequence) for sequence in sequences])
    if lengths_B.min() == 0:
        raise ValueError(
            f"expected at least one token per sequence, got none in sequence {lengths_B.argmin()}; drop it"
        )
    columns_T = np.arange(lengths_B.max())
    if side == "left":
        columns_T = columns_T[::-1]
    mask_BT = columns_T < lengths_B[:, None]
    ids_BT = np.full(mask_BT.shape, pad_id, dtype=np.int64)
    ids_BT[mask_BT] = np.concatenate([np.asarray(sequence, dtype=np.int64) for sequence in sequences])
    return sent(ids_BT, device), sent(mask_BT, device)


def sent(array: NDArray[Any], device: torch.device | str) -> Tensor:
    """Copy an array to a device. With CUDA, the host does not wait for the GPU's pending work."""
    # With CUDA this non-blocking copy is safe: unpinned memory is read before the call returns. Other devices may read it
    # later.
    return torch.from_numpy(array).to(device, non_blocking=torch.device(device).type == "cuda")


def ready_mask(model: PreTrainedModel, mask_BS: Tensor, queries: int, appends: bool | None = None) -> Tensor:
    """Expand a mask of keys to a mask for attention, shape (B, 1, queries, S).

    Models expand a mask themselves, but first test whether it is True everywhere. For this test, the host waits for the
    GPU. `mask_BS` is returned unchanged if the model might expand it in another way.

    Args:
        model: the model.
        mask_BS: shape (B, S), False on padding.
        queries: number of queries. They are the last tokens of each row.
        appends: the value of `appends_only(model.config)`, to save time; None: compute it.
    """
    config = model.config
    known = config._attn_implementation in (DECODING, "sdpa") and not getattr(config, "alibi", False)
    appends = appends_only(config) if appends is None else appends
    if not known or not appends or (queries > 1 and not _rotary(config)):
        return mask_BS
    mask_B1QS = mask_BS[:, None, None]
    if queries == 1:
        return mask_B1QS
    columns = mask_BS.shape[1]
    earlier_QS = torch.ones(queries, columns, dtype=torch.bool, device=mask_BS.device).tril(columns - queries)
    return mask_B1QS & earlier_QS


def positions(mask_BT: Tensor) -> Tensor:
    """Position ids, shape (B, T). They number the tokens of each row from 0, without padding."""
    return (mask_BT.cumsum(dim=1) - 1).clamp(min=0)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context of inference mode and eval mode. Afterwards, the previous modes are restored."""
    with in_eval_mode(model), torch.inference_mode():
        yield


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """A context of eval mode. Afterwards, the previous mode of each module is restored."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


MOST_SCORES = 2**23, 2**26  # maximum number of attention scores in memory, with and without gradients; 4 bytes each
DECODING = "rollalloc_decoding"  # transformers' name for this implementation
# Arguments of transformers' own function that this implementation does not support.
_SPECIAL = ("position_bias", "softcap", "cache", "s_aux", "output_attentions")


def decoding_attention(model: PreTrainedModel) -> AbstractContextManager[None]:
    """A context in which a model decodes by two matrix products. It changes only models with `sdpa` attention on a CPU.

    With one thread nothing changes, because fused attention is then as fast.
    """
    return attention_by_products(model) if torch.get_num_threads() > 1 else nullcontext()


@contextmanager
def attention_by_products(model: PreTrainedModel) -> Iterator[None]:
    """A context in which a model uses `attend`. It changes only models with `sdpa` attention on a CPU.

    Do not use it with gradient checkpointing: layers would be recomputed after the context has ended.
    """
    config = model.config
    # A model with its own attention functions has its own registry. Such a model is not changed.
    register = getattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS", None)
    if (
        model.device.type != "cpu"
        or register is not ALL_ATTENTION_FUNCTIONS
        or config.get_text_config() is not config
        or config._attn_implementation != "sdpa"
    ):
        yield
        return
    AttentionInterface.register(DECODING, attend)
    AttentionMaskInterface.register(DECODING, sdpa_mask)
    config._attn_implementation = DECODING
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


def attend(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the same result as transformers' `sdpa`.

        out[b, h] = softmax(scaling · query[b, h] · key[b, k]ᵀ + mask[b]) · value[b, k],   k = h // (H / K)

    Matrix products are used only in two cases: each row has one query; or bfloat16's autocast is on and there are at most
    `MOST_SCORES` attention scores, because all scores are stored. In all other cases `sdpa` is called.

    Args:
        module: the layer.
        query_BHTD: T queries for each of H heads, of size D.
        key_BKSD: S keys for each of K heads. H / K query heads share a key head.
        value_BKSD: S values for each of K heads.
        attention_mask: shape (B, 1, T, S), True where attention is allowed. `sdpa` also accepts a mask to be added. None:
            each query attends to all keys or, in a causal layer, to all keys that are not later.
        scaling: factor of the scores; None: 1 / √D.
        more: further arguments for `sdpa`.
    """
    batch, heads, queries, size = query_BHTD.shape
    plain = attention_mask is None or (attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1)
    most = MOST_SCORES[not torch.is_grad_enabled()]
    few = batch * heads * queries * key_BKSD.shape[2] <= most
    is_faster = queries == 1 or (torch.is_autocast_enabled("cpu") and few)
    if not is_faster or not plain or more.get("dropout") or any(more.get(name) is not None for name in _SPECIAL):
        return sdpa_attention_forward(module, query_BHTD, key_BKSD, value_BKSD, attention_mask, scaling=scaling, **more)
    if attention_mask is None and queries > 1 and _causal(module, more):
        keys = key_BKSD.shape[2]
        attention_mask = query_BHTD.new_ones(queries, keys, dtype=torch.bool).tril(keys - queries)[None, None]
    shared = key_BKSD.shape[1]
    query_BKRD = query_BHTD.reshape(batch, shared, -1, size)  # R: the queries that share the keys of one head
    scores_BKRS = (query_BKRD * (size**-0.5 if scaling is None else scaling)) @ key_BKSD.transpose(2, 3)
    if attention_mask is not None:
        # A finite number instead of -inf: a padding token that attends to nothing would become NaN with -inf, and
        # 0 · NaN would spread to other tokens.
        lowest = torch.finfo(scores_BKRS.dtype).min
        scores_BKRS.view(batch, heads, queries, -1).masked_fill_(~attention_mask, lowest)
    out_BKRD = scores_BKRS.softmax(dim=-1, dtype=torch.float32).to(value_BKSD.dtype) @ value_BKSD
    # The width is inferred, because values may be narrower than keys.
    return out_BKRD.view(batch, heads, queries, -1).transpose(1, 2).contiguous(), None


def _causal(module: nn.Module, more: Mapping[str, Any]) -> bool:
    """Whether a layer without a mask is causal, by the rule of `sdpa`."""
    is_causal = more.get("is_causal")
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


@contextmanager
def recomputing(model: nn.Module) -> Iterator[None]:
    """A context in which only the inputs of the model's layers are stored. The backward pass recomputes the rest.

    Call the model without a cache, because a recomputed layer would append to the cache a second time. Source: Training
    deep nets with sublinear memory cost, arXiv 1604.06174.

    Raises:
        ValueError: the model has no layers that transformers can checkpoint.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        problem = f"{type(model).__name__} has no layers that can be computed again"
        raise ValueError(f"{problem}; train it without gradient checkpointing, with a smaller tokens_per_forward")
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        # In eval mode nothing is random, so the random state need not be saved.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


def why_cache_is_unfit(model: PreTrainedModel) -> str | None:
    """The reason why the sampler cannot generate with a model; None if it can.

    The check lets the model fill a cache with two rows of two tokens, and selects three rows. Then every state in the
    cache must have three rows. Keys and values pass this check. The state of linear attention does not, nor does a state
    outside of the cache.
    """
    rows_B = torch.tensor([1, 0, 1], device=model.device)
    ids_BS = torch.zeros((2, 2), dtype=torch.int64, device=model.device)
    try:
        cache = DynamicCache(config=model.config)
        (name,) = given = cache_argument(model, cache)
        with evaluating(model):
            output = model(
                input_ids=ids_BS,
                position_ids=torch.arange(2, device=model.device).expand(2, 2),
                **given,
                use_cache=True,
                logits_to_keep=1,
            )
    except (AttributeError, TypeError, ValueError) as error:
        return f"a model that takes no cache ({error_text(error)})"
    if getattr(output, name, None) is not cache:
        return "a model that keeps its state outside the cache it is given"
    layers: list[Any] = cache.layers
    for layer in layers:
        select = getattr(layer, "batch_select_indices", lambda rows_B: None)
        select(rows_B)
        if any(len(state) != len(rows_B) for state in _states(layer)):
            return f"a cache whose rows cannot be selected and repeated ({type(layer).__name__})"
    if max((layer.get_seq_length() for layer in layers if hasattr(layer, "get_seq_length")), default=0) != 2:
        return "a cache that holds other tokens than the model was given"
    return None


def _states(layer: object) -> Iterator[Tensor]:
    """All tensors with at least one axis in a layer of a cache, directly or in dictionaries."""
    for value in vars(layer).values():
        for held in value.values() if isinstance(value, dict) else [value]:
            if isinstance(held, Tensor) and held.ndim:
                yield held
