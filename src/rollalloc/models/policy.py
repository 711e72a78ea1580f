"""The policy: a Hugging Face causal language model and its tokenizer, from the hub or from a local folder.

`Adapter` is what LoRA adds to it through PEFT. `Behaviour` is the policy that samples: the policy itself, or a copy in half
precision or with merged adapters.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from errno import ENOENT
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rollalloc.data.encoding import completion_text, known_tokens
from rollalloc.data.hub import why_unreachable
from rollalloc.models.likelihood import attention_by_products, why_cache_is_unfit
from rollalloc.models.settings import Lora, Precision, SamplingDtype

_NAME = "default"  # PEFT's default name of an adapter; with another name, PEFT would write into a subfolder
_BASE, _ADAPTER = ".base_layer.", ".lora_"  # parts of the names of an adapted layer's tensors
_NAMED = 12  # maximum number of layers that an error lists
BASE_FILE = "base.json"


class Adapter:
    """LoRA adapters of a model, whose other weights are frozen. The model is changed in place and keeps its class.

    Args:
        model: a model in eval mode.
        lora: the settings of the adapters.
        seed: seed of the adapters' initial values.

    Attributes:
        base: SHA-256 of the model's own parameters, which never change.

    Raises:
        ImportError: PEFT is not installed.
        ValueError: a target is not a linear layer; a target is the head of a model with tied embeddings; or the rank
            exceeds the smaller side of a layer.
    """

    def __init__(self, model: PreTrainedModel, lora: Lora, *, seed: int) -> None:
        peft = peft_module()
        targets = _targets(model, lora)
        self.base = digest_of(model)
        shape = {"r": lora.rank, "lora_alpha": lora.scale, "target_modules": targets}
        config = peft.LoraConfig(**shape, lora_dropout=0.0, task_type="CAUSAL_LM")
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():  # PEFT draws initial values on the CPU
            warnings.simplefilter("ignore", FutureWarning)  # PEFT uses a deprecated name in transformers
            torch.manual_seed(seed)
            self._peft = peft.get_peft_model(model, config, adapter_name=_NAME)
        self._peft.eval()

    def save(self, folder: Path, name: str) -> None:
        """Write the adapters in PEFT's format, with the digest and the name or folder (`name`) of the base model."""
        config = self._peft.peft_config[_NAME]
        config.base_model_name_or_path = str(Path(name).resolve()) if name and Path(name).is_dir() else name
        self._peft.save_pretrained(str(folder))
        base = {"model": config.base_model_name_or_path, "sha256": self.base}
        (folder / BASE_FILE).write_text(json.dumps(base, indent=1) + "\n", encoding="utf-8")

    def plain_copy(self) -> PreTrainedModel:
        """A copy of the model in which the adapters are merged into the weights."""
        return deepcopy(self._peft).merge_and_unload().eval()


def plain_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The names and weights of a model. Adapters are merged into the weights: W + alpha / rank · B A."""
    layers: dict[str, Any] = {name: layer for name, layer in model.named_modules() if hasattr(layer, "lora_A")}
    for name, tensor in model.state_dict().items():
        owner, of_base, _ = name.partition(_BASE)
        if name.partition(_ADAPTER)[0] in layers:
            continue
        if of_base and name == f"{owner}{_BASE}weight":
            tensor = tensor + layers[owner].get_delta_weight(_NAME).detach()
        yield name.replace(_BASE, "."), tensor


def digest_of(model: nn.Module) -> str:
    """SHA-256 of a model's parameters, in their order."""
    digest = sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def _targets(model: PreTrainedModel, lora: Lora) -> list[str]:
    """The names of the layers that get adapters, in the form that PEFT expects."""
    layers: dict[str, nn.Module] = {
        name: layer for name, layer in model.named_modules() if isinstance(layer, (nn.Linear, Conv1D))
    }
    head = model.get_output_embeddings()
    rest = {name: layer for name, layer in layers.items() if layer is not head}
    known = sorted({name.rpartition(".")[2] for name in rest})
    if not known:
        raise ValueError(f"{type(model).__name__} has no linear layers for LoRA; train without --lora")
    chosen: dict[str, nn.Module] = {}
    for target in lora.targets or known:
        matching = {name: layer for name, layer in layers.items() if name == target or name.endswith(f".{target}")}
        if not matching:
            shown = ", ".join(known[:_NAMED]) + (", ..." if len(known) > _NAMED else "")
            raise ValueError(f"LoRA: the model has no linear layer {target!r}; it has {shown}")
        if any(layer is head for layer in matching.values()) and model.config.get_text_config().tie_word_embeddings:
            raise ValueError(
                f"LoRA: {target} is the head, and its weights are tied to the embeddings; leave the head "
                "out of the targets, or untie its weights"
            )
        chosen |= {name: layer for name, layer in matching.items() if lora.targets or layer is not head}
    sides = {name: min(cast("Tensor", layer.weight).shape) for name, layer in chosen.items()}
    least = min(sides, key=sides.__getitem__)
    if lora.rank > sides[least]:
        problem = f"rank {lora.rank} is larger than {sides[least]}, the smaller side of {least}"
        raise ValueError(f"LoRA: {problem}; give a smaller rank, or other targets")
    return sorted(set(lora.targets)) or known


def peft_module() -> Any:
    """The module `peft`. If it is missing, raise an ImportError that names the package to install."""
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ImportError(f"LoRA needs PEFT ({error}); pip install 'rollalloc[lora]'") from None


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
        if obstacle := why_cache_is_unfit(model):
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


class Behaviour:
    """The policy that samples, for rollouts and evaluations.

    In float32 this is the trained policy itself. In half precision it is a rounded copy with merged adapters. Each call of
    `policy` copies the current trained weights into it. `rollalloc.train.update` corrects for the rounding.

    Args:
        policy: the trained policy.
        dtype: number format of the weights and of the key-value cache during sampling.
        plain: if the policy has adapters, use a copy even in float32, because a generator in another process needs plain
            weights.

    Attributes:
        trained: the trained policy.
    """

    def __init__(self, policy: Policy, dtype: SamplingDtype, *, plain: bool = False) -> None:
        self.trained = policy
        self._copy: Policy | None = None
        if dtype == "float32" and (policy.adapter is None or not plain):
            return
        model = deepcopy(policy.model) if policy.adapter is None else policy.adapter.plain_copy()
        for parameter in model.parameters():  # buffers are not converted: rotary frequencies need full precision
            parameter.data = parameter.data.to(getattr(torch, dtype))
        model.requires_grad_(plain)  # `weights_of` returns the parameters that require gradients
        self._copy = replace(policy, model=model, adapter=None)

    def policy(self) -> Policy:
        """The sampling policy, with the current weights."""
        if self._copy is None:
            return self.trained
        own_weights = self._copy.model.state_dict()
        with torch.no_grad():
            for name, tensor in plain_weights(self.trained.model):
                own_weights[name].copy_(tensor)
        return self._copy
