"""Unsloth, which patches TRL's trainer: lays rows out as its loss expects them, and checks how it was set up.

Unsloth finds padding by its token id, and not by the masks. It moves the tokens of each row to the left, and expects
log-probabilities in that layout. So rows are laid out without padding on the left: the columns of `completion_ids` begin
where the shortest prompt ends. The rest of longer prompts is in these columns too, and `tool_mask` says which tokens count.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import trl
from packaging.version import Version
from torch import Tensor

from rollalloc.drivers.trl.loss_check import counted

log = logging.getLogger(__name__)

TESTED = Version("2026.10.9")
_OF_TOKENS = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")
_CACHE_NAMES = (
    "unsloth",
    "unsloth_zoo",
    "transformers",
    "trl",
)  # the versions at the top of a generated file, in order


def is_unsloths(trainer: Any) -> bool:
    """Whether the trainer's class, or the trainer itself if it is a class, inherits from a class that Unsloth generated."""
    kind = trainer if isinstance(trainer, type) else type(trainer)
    return any(base.__name__.startswith("Unsloth") for base in kind.__mro__)


def check_patch(kind: type, model: Any, args: Any) -> None:
    """Check how TRL was patched, before a trainer is made.

    Args:
        kind: the class of the trainer.
        model: the model, or its name.
        args: TRL's settings, or their class.

    Raises:
        ImportError: TRL was patched after rollalloc's trainer was imported, or Unsloth's file is of other releases.
        ValueError: a setting needs what is not there.
    """
    current: Any = trl.GRPOTrainer
    if current not in kind.__mro__:
        raise ImportError(
            f"TRL's GRPOTrainer was replaced by {current.__module__}.{current.__name__} after rollalloc.drivers.trl was "
            "imported, so AllocatedGRPOTrainer is not of that class; import what patches TRL first (import unsloth in the "
            "first line of the script)"
        )
    if not is_unsloths(kind):
        return
    _check_cache(kind)
    _warn_if_newer()
    if getattr(args, "use_vllm", False) and not isinstance(model, str) and not hasattr(model, "vllm_engine"):
        raise ValueError(
            "use_vllm=True, but Unsloth loaded the model without vLLM; pip install vllm and load the model with "
            "FastLanguageModel.from_pretrained(..., fast_inference=True), or leave use_vllm out"
        )
    if getattr(args, "use_vllm", False) and getattr(args, "loss_type", None) == "vespo":
        raise ValueError(
            "loss_type='vespo' with vLLM is not supported under Unsloth, whose loss takes no importance weights of ours; "
            "use another loss_type, or leave use_vllm out"
        )


def _warn_if_newer() -> None:
    installed = _installed("unsloth")
    if installed is not None and Version(installed) > TESTED:
        log.warning(
            "Unsloth %s is newer than %s, the newest release that rollalloc was tested with. The loss is checked before "
            "anything is trained; if this check fails, pip install unsloth==%s unsloth_zoo==%s",
            *(installed, TESTED, TESTED, TESTED),
        )


def _check_cache(kind: type) -> None:
    """Raise an error if the file that Unsloth generated was made for other releases than those installed."""
    base = next(base for base in kind.__mro__ if base.__name__.startswith("Unsloth"))
    file = getattr(sys.modules.get(base.__module__), "__file__", None)
    if file is None or not Path(file).exists():
        return
    with Path(file).open() as opened:
        head = [opened.readline().strip() for _ in range(6)]
    if head[0] != '"""' or head[5] != "__UNSLOTH_VERSIONING__":
        return
    made: dict[str, str] = dict(zip(_CACHE_NAMES, head[1:5], strict=True))
    others = {name: there for name, was in made.items() if (there := _installed(name)) not in (was, None)}
    if others:
        was = ", ".join(f"{name} {made[name]} (installed: {there})" for name, there in others.items())
        raise ImportError(f"{file} was generated for {was}; delete the folder {Path(file).parent} and start again")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def laid_out(trainer: Any, inputs: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """The tensors of a micro-batch in Unsloth's layout, and the id that pads them.

    Importance weights of vLLM's rollouts are multiplied into the advantages, because Unsloth computes weights of its own.

    Args:
        trainer: TRL's trainer.
        inputs: TRL's tensors: B rows, with prompts padded to P tokens and completions to T tokens.

    Returns:
        Tensors by TRL's names, with as many columns of prompt as the shortest prompt has tokens. And an id that no row has.

    Raises:
        ValueError: every id of the vocabulary occurs in the rows, so none is left for padding.
    """
    prompt_BP, here_BP = inputs["prompt_ids"], inputs["prompt_mask"].bool()
    completion_BT, there_BT = inputs["completion_ids"], inputs["completion_mask"].bool()
    # The model needs one token of a row that does not count at all.
    there_BT = there_BT | (
        ~there_BT.any(dim=1, keepdim=True) & (torch.arange(there_BT.shape[1]) == 0).to(there_BT.device)
    )
    prompts_B, completions_B = here_BP.sum(dim=1), there_BT.sum(dim=1)
    shared = int(prompts_B.min())
    width = int((prompts_B + completions_B).max()) - shared
    ids = [
        torch.cat([prompt[here], completion[there]])
        for prompt, here, completion, there in zip(prompt_BP, here_BP, completion_BT, there_BT, strict=True)
    ]
    pad = _unused(trainer, torch.cat(ids))
    ids_BS = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=pad)
    starts_B = prompts_B - shared  # the column, after the shared ones, where a completion begins

    def moved(of_BT: Tensor) -> Tensor:
        wide_BW = of_BT.new_zeros(len(of_BT), width)
        for row, (start, length) in enumerate(zip(starts_B.tolist(), completions_B.tolist(), strict=True)):
            wide_BW[row, start : start + length] = of_BT[row, :length]
        return wide_BW

    advantages = inputs["advantages"]
    if "importance_sampling_ratio" in inputs:
        weights_BT = inputs["importance_sampling_ratio"]
        advantages = (advantages[:, None] if advantages.dim() == 1 else advantages) * weights_BT
    lengths_B = (prompts_B + completions_B)[:, None]
    laid = {
        "prompt_ids": ids_BS[:, :shared],
        "prompt_mask": torch.ones_like(ids_BS[:, :shared]),
        "completion_ids": ids_BS[:, shared:],
        "completion_mask": (torch.arange(width, device=lengths_B.device) < lengths_B - shared).long(),
        "tool_mask": moved(counted(inputs)).long(),
        "advantages": advantages if advantages.dim() == 1 else moved(advantages),
        "num_items_in_batch": inputs["num_items_in_batch"],
    }
    return laid | {name: moved(inputs[name]) for name in _OF_TOKENS if name in inputs}, pad


def _unused(trainer: Any, ids_N: Tensor) -> int:
    """The tokenizer's padding id or, if a row has this id, the smallest id that no row has."""
    used = set(ids_N.unique().tolist())
    vocabulary = trainer.accelerator.unwrap_model(trainer.model).get_input_embeddings().weight.shape[0]
    for candidate in (trainer.processing_class.pad_token_id, *range(vocabulary)):
        if candidate not in used:
            return int(candidate)
    raise ValueError(
        f"the rows of a micro-batch have all {vocabulary} tokens of the vocabulary, and Unsloth needs one for padding; set "
        "a smaller per_device_train_batch_size"
    )


@contextmanager
def padded_by(trainer: Any, pad: int) -> Iterator[None]:
    """A context in which the trainer's loss takes this id for padding, and computes no importance weights of its own."""
    before = trainer.processing_class, trainer.vllm_importance_sampling_correction
    trainer.processing_class, trainer.vllm_importance_sampling_correction = _PaddedBy(before[0], pad), False
    try:
        yield
    finally:
        trainer.processing_class, trainer.vllm_importance_sampling_correction = before


class _PaddedBy:
    """A tokenizer with another padding id."""

    def __init__(self, tokenizer: Any, pad: int) -> None:
        self._tokenizer, self.pad_token_id = tokenizer, pad

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
