"""LoRA through PEFT: adds adapters to a model, and merges them into plain weights."""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Iterator
from copy import deepcopy
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rollalloc.models.lora import Lora

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
