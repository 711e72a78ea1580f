"""The policy: a Hugging Face causal language model and its tokenizer, from the hub or from a local folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from errno import ENOENT
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rollalloc.data.encoding import completion_text, known_tokens
from rollalloc.data.hub import why_unreachable
from rollalloc.models.adapter import Adapter, plain_weights
from rollalloc.models.attention import attention_by_products
from rollalloc.models.caching import why_not
from rollalloc.models.dtypes import Precision
from rollalloc.models.lora import Lora

ADAPTER = "adapter"  # subfolder for the adapters of a model that was trained with LoRA
_ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True, eq=False)
class Policy:
    """A model, its tokenizer, and the token ids that the engine needs.

    Attributes:
        model: the model, always in eval mode. (With dropout, update and sampler would compute different log-probabilities.)
        tokenizer: a Hugging Face tokenizer.
        eos_ids: ids of the tokens that end a rollout.
        pad_id: id of the padding token; padding is always masked.
        context: maximum number of tokens that the model can attend to.
        vocabulary: number of tokens for which the model has embeddings.
        adapter: the LoRA adapters. If there are adapters, only they are trained. None: all weights are trained.
    """

    model: PreTrainedModel
    tokenizer: Any
    eos_ids: tuple[int, ...]
    pad_id: int
    context: int
    vocabulary: int
    adapter: Adapter | None = None

    @staticmethod
    def load(name: str | Path, *, device: str | None = None) -> Policy:
        """Load a model from the hub or from a folder.

        Weights are read from safetensors only, in float32. Code that comes with a model is not run.

        Args:
            name: name of a model on the hub, or a folder that `save_pretrained` wrote.
            device: such as "cpu", "cuda" or "cuda:1"; None: a GPU if there is one, otherwise the CPU.

        Raises:
            FileNotFoundError: `name` is a path, and the folder does not exist.
            OSError: the model does not exist, or has no safetensors.
            ValueError: the device, the folder, the tokenizer or the model cannot be used; the message says why.
        """
        name, device = _found(name), usable_device(device)
        if (Path(name) / _ADAPTER_CONFIG).is_file():
            raise ValueError(_is_adapter(name))
        # Load the model before the tokenizer: if the name is wrong, the model's error message is the clearer one.
        model = _from_hub(name, AutoModelForCausalLM, dtype=torch.float32, use_safetensors=True)
        if getattr(model, "_hf_peft_config_loaded", False):
            raise ValueError(_is_adapter(name))
        tokenizer = AutoTokenizer.from_pretrained(str(name))
        model = cast("PreTrainedModel", cast("torch.nn.Module", model).to(device).eval())
        if obstacle := why_not(model):
            problem = f"{name} is {type(model).__name__}, and rollalloc's sampler cannot generate with {obstacle}"
            raise ValueError(
                f"{problem}; use a model with attention only, or train it through TRL (rollalloc.drivers.trl)"
            )
        eos_ids = _eos_ids(model, tokenizer)
        if not eos_ids:
            raise ValueError(f"{name} has no end-of-sequence token; set eos_token in its tokenizer")
        embeddings = cast("torch.nn.Embedding", model.get_input_embeddings())
        pad_id = tokenizer.pad_token_id
        if pad_id is None or pad_id >= embeddings.num_embeddings:  # then the model has no embedding for padding
            pad_id = eos_ids[0]
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if context is None:
            raise ValueError(f"{name} has no context length; set max_position_embeddings in its config.json")
        return Policy(model, tokenizer, eos_ids, pad_id, int(context), embeddings.num_embeddings)

    def with_lora(self, lora: Lora, *, seed: int) -> Policy:
        """Add LoRA adapters. From then on, only the adapters are trained. The model is changed in place.

        Args:
            lora: rank, scale and layers of the adapters.
            seed: seed of the adapters' initial values.

        Raises:
            ImportError: PEFT is not installed.
            ValueError: the policy has adapters already, or `lora` does not fit the model.
        """
        if self.adapter is not None:
            raise ValueError("the policy already has adapters; load the model again")
        return replace(self, adapter=Adapter(self.model, lora, seed=seed))

    def save(self, folder: Path) -> None:
        """Write the model and the tokenizer to a folder, for `load` and for `from_pretrained`.

        If the policy has adapters, they are merged into the written weights. The adapters are also written on their own, to
        `adapter/`, for PEFT.
        """
        if self.adapter is None:
            self.model.save_pretrained(folder)
        else:
            merged = {name: tensor.cpu() for name, tensor in plain_weights(self.model)}
            self.model.save_pretrained(folder, state_dict=merged)
            self.adapter.save(folder / ADAPTER, str(self.model.name_or_path))
        self.tokenizer.save_pretrained(folder)

    def text(self, tokens: Sequence[int]) -> str:
        """Decode a completion for a reward function.

        Only `eos_ids` and `pad_id` are removed; other special tokens, such as `<think>` or `<answer>`, are kept.
        """
        return completion_text(self.tokenizer, tokens, (*self.eos_ids, self.pad_id))

    def answer(self, text: str, *, to: str = "a prompt") -> tuple[int, ...]:
        """Encode a right answer as a completion, with EOS at its end.

        Args:
            text: the answer.
            to: name of the prompt, for the error message.

        Raises:
            ValueError: the tokenizer or the model does not know a token of the text.
        """
        encoded = partial(self.tokenizer, text, add_special_tokens=False)
        ids = known_tokens(f"the answer to {to}", text, lambda: encoded()["input_ids"])
        completion = (*ids, self.eos_ids[0])
        self.refuse_unknown(completion, f"the answer to {to}")
        return completion

    def refuse_unknown(self, tokens: Sequence[int], name: str) -> None:
        """Raise an error if the model has no embedding for a token.

        Args:
            tokens: token ids.
            name: name of the encoded text, for the error message.

        Raises:
            ValueError: a token has no embedding.
        """
        if tokens and (highest := max(tokens)) >= self.vocabulary:
            raise ValueError(
                f"{name} has token {highest} ({self.tokenizer.convert_ids_to_tokens(highest)!r}), but the model has "
                f"embeddings for {self.vocabulary} tokens only (0 to {self.vocabulary - 1}) and the tokenizer has "
                f"{len(self.tokenizer)}; use the model's own tokenizer, or call model.resize_token_embeddings and save both"
            )


def context_of(name: str | Path) -> int | None:
    """Maximum number of tokens that a model can attend to; None if its configuration does not say or cannot be read."""
    try:
        config = _from_hub(_found(name), AutoConfig).get_text_config()
    except (OSError, ValueError):  # `Policy.load` raises a clearer error later
        return None
    return getattr(config, "max_position_embeddings", None)


def usable_device(name: str | None) -> str:
    """Try a device and return its name. None: a GPU if there is one, otherwise the CPU.

    Raises:
        ValueError: the device cannot be used; the message lists the devices that can.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name).cpu()
    except Exception as error:  # the type of the error depends on the device
        devices = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device {name!r} cannot be used here ({reason}); there is {', '.join(devices)}") from None
    return name


@contextmanager
def computing(model: PreTrainedModel, precision: Precision, *, again: bool = False) -> Iterator[None]:
    """A context in which a model computes with the given precision. Weights and gradients stay in float32.

    End the context before the weights change, because PyTorch's autocast keeps copies of the weights.

    Args:
        model: the model.
        precision: "fp32", "bf16", or "auto": bf16 on GPUs that support it.
        again: True if the backward pass recomputes the model's layers, as gradient checkpointing does.
    """
    device, half = model.device, in_bf16(model.device, precision)
    attention = attention_by_products(model) if half and not again else nullcontext()
    with attention, torch.autocast(device.type, torch.bfloat16, enabled=half):
        yield


def in_bf16(device: torch.device, precision: Precision) -> bool:
    """Whether a model on this device computes in bfloat16."""
    return precision == "bf16" or (precision == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported())


def _is_adapter(name: str | Path) -> str:
    do = "give the folder of the merged model (in a run of rollalloc, the parent folder), or merge the adapters"
    return f"{name} holds adapters of PEFT, not a model; {do}: AutoPeftModelForCausalLM ... merge_and_unload()"


def _found(name: str | Path) -> str:
    """Return a model's name on the hub unchanged, or its folder with ~ expanded."""
    text = str(name)
    path = Path(text).expanduser() if text.startswith("~") else Path(text)
    is_path = isinstance(name, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1
    is_path = is_path or (path.parent != Path() and path.parent.is_dir())
    if is_path and not path.is_dir():
        raise FileNotFoundError(
            ENOENT, "there is no such folder; give a model's folder, or the model's name on the hub", str(path)
        )
    return str(path) if is_path else text


def _from_hub(name: str, kind: Any, **how: Any) -> Any:
    """Call `kind.from_pretrained`. If the hub cannot be reached, raise an error that says so."""
    unreachable = None if Path(name).is_dir() else why_unreachable()
    try:
        return kind.from_pretrained(name, **how)
    except OSError as error:
        if unreachable is None:
            raise
        why = f"no folder and no local copy of a model has this name, and the hub cannot be asked ({unreachable})"
        raise FileNotFoundError(ENOENT, f"{why}; give a model's folder, or try again with a network", name) from error


def _eos_ids(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a rollout. The tokenizer's token comes first, because answers end with it in training data."""
    generation = model.generation_config
    named = None if generation is None else generation.eos_token_id
    ids = list(named) if isinstance(named, (list, tuple)) else [named]
    return tuple(dict.fromkeys(token for token in (tokenizer.eos_token_id, *ids) if token is not None))
