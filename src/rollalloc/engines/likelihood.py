"""The plain forward pass: how likely a model finds given completions of given prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

Tokens = Sequence[int]


def completion_logprobs(
    model: PreTrainedModel,
    prompts: Sequence[Tokens],
    completions: Sequence[Tokens],
    *,
    pad_id: int,
    temperature: float = 1.0,
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

    Returns:
        logprobs_BT in float32, 0 beyond a completion's end, and mask_BT, True on its tokens; T is the longest's length.

    Raises:
        ValueError: no prompts, another number of completions than of prompts, or an empty prompt or completion.
    """
    if not prompts or len(prompts) != len(completions):
        raise ValueError(
            f"expected one completion a prompt, got {len(prompts)} prompts and {len(completions)} completions; "
            "each needs at least one, and a prompt with several completions stands once for each"
        )
    logits_BTV, completion_BT, mask_BT = _completion_logits(model, prompts, completions, pad_id, temperature)
    return _logprobs(logits_BTV, completion_BT, mask_BT), mask_BT


def _completion_logits(
    model: PreTrainedModel, prompts: Sequence[Tokens], completions: Sequence[Tokens], pad_id: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the positions that predict a completion's tokens, over the temperature; the tokens, and which are real."""
    prompt_BP, prompt_mask_BP = padded(prompts, pad_id, side="left", device=model.device)
    completion_BT, mask_BT = padded(completions, pad_id, side="right", device=model.device)
    # A completion's last token predicts nothing that is asked for, so it is not fed.
    attention_BS = torch.cat([prompt_mask_BP, mask_BT[:, :-1]], dim=1)
    output = model(
        input_ids=torch.cat([prompt_BP, completion_BT[:, :-1]], dim=1),
        attention_mask=attention_BS,
        position_ids=positions(attention_BS),
        use_cache=False,
        logits_to_keep=completion_BT.shape[1],
    )
    return output.logits.float() / temperature, completion_BT, mask_BT


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
        p_N in [0, 1], and entropy_N in nats a token.

    Raises:
        ValueError: as `completion_logprobs`; no prompts at all give empty arrays.
    """
    p_N, entropy_N = np.empty(len(prompts)), np.empty(len(prompts))
    # Rows of like length share a forward pass, so that little of it is padding.
    by_length_N = np.argsort([len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)])
    with evaluating(model):
        for start in range(0, len(prompts), batch_rows):
            rows_B = by_length_N[start : start + batch_rows]
            logits_BTV, answer_BT, mask_BT = _completion_logits(
                model, [prompts[row] for row in rows_B], [answers[row] for row in rows_B], pad_id, temperature
            )
            logprobs_BT = _logprobs(logits_BTV, answer_BT, mask_BT).double()
            p_N[rows_B] = logprobs_BT.sum(dim=1).exp().cpu().numpy()
            # By few rows at a time, for what it takes is as wide as the vocabulary.
            entropy_BT = torch.cat([_entropy(few_BTV) for few_BTV in logits_BTV.split(32)]) * mask_BT
            entropy_N[rows_B] = (entropy_BT.double().sum(dim=1) / mask_BT.sum(dim=1)).cpu().numpy()
    return p_N, entropy_N


def _entropy(logits_BTV: Tensor) -> Tensor:
    return torch.special.entr(logits_BTV.softmax(-1)).sum(-1)  # 0 for a token that a model rules out by a logit of -inf


def padded(
    sequences: Sequence[Tokens], pad_id: int, *, side: Literal["left", "right"], device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Sequences of unequal length as one matrix: ids_BT in int64, and mask_BT, True where an id is not padding.

    Raises:
        ValueError: a sequence is empty; a model has nothing to predict from, or nothing to predict.
    """
    lengths_B = np.array([len(sequence) for sequence in sequences])
    if lengths_B.min() == 0:
        raise ValueError(f"expected at least one token a sequence, got none in sequence {lengths_B.argmin()}; drop it")
    columns_T = np.arange(lengths_B.max())
    if side == "left":
        columns_T = columns_T[::-1]
    mask_BT = columns_T < lengths_B[:, None]
    ids_BT = np.full(mask_BT.shape, pad_id, dtype=np.int64)
    ids_BT[mask_BT] = np.concatenate([np.asarray(sequence, dtype=np.int64) for sequence in sequences])
    return torch.from_numpy(ids_BT).to(device), torch.from_numpy(mask_BT).to(device)


def positions(mask_BT: Tensor) -> Tensor:
    """Position ids that count a row's real tokens from 0, wherever its padding lies."""
    return (mask_BT.cumsum(dim=1) - 1).clamp(min=0)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inference mode with every module in eval mode; on leaving, each module is back in the mode it had."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True
