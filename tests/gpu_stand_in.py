"""A stand-in for a GPU: tensors on `cuda` that a CPU holds, which raise and make the host wait where CUDA's would.

    with stand_in() as counts:
        policy = Policy.load(folder, device="cuda")
        ...
    counts.synchronisations, counts.to_device, counts.to_host

Values are real, so that what is computed can be compared with a CPU's. What was not moved raises, as do `.numpy()` of a
tensor on the device, a CPU's generator for one, and a CPU's tensor as an index other than of `[]`. The host waits where
`torch.cuda.set_sync_debug_mode` would say so: for a number (`.item()`, `bool`, `float`), for a shape that depends on values
(`nonzero`, a mask as an index), and for every transfer that is not `non_blocking`.

Left out: streams, memory that runs out, kernels that round otherwise, and what compiles or captures. It leans on what
PyTorch 2.13 has inside, is for tests, and needs a PyTorch that finds no GPU.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

_C: Any = torch._C
_DATA: Any = torch.Tensor.data
_DEVICE = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_NAME = "stand_in"  # of the device in PyTorch's own code, which knows no CUDA without its drivers
_TO = ("aten::_to_copy", "aten::copy_")
_INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index")
# The host must know a number, or how many there are.
_WAITS = (
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
)
# Beside what is elementwise, these take a single number from the CPU.
_TAKES_NUMBERS = ("aten::masked_fill", "aten::masked_fill_", "aten::index_fill", "aten::fill_", *_INDEXED)
_HALVED = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention")  # by autocast
_MATH = 0  # of the ways to attend: the one that every device has


@dataclass
class Counts:
    """What was counted so far.

    Attributes:
        synchronisations: times that the host waited for the device.
        to_device: tensors copied to the device.
        to_host: tensors copied from it, single numbers included.
        places: how often the host waited, by operation and line of code.
    """

    synchronisations: int = 0
    to_device: int = 0
    to_host: int = 0
    places: Counter[str] = field(default_factory=Counter[str])

    def reset(self) -> None:
        self.synchronisations = self.to_device = self.to_host = 0
        self.places.clear()

    def waited(self, operation: str) -> None:
        self.synchronisations += 1
        self.places[f"{operation} at {_caller()}"] += 1


_counts = Counts()
_kept: list[object] = []  # registrations, which last as long as the process


@contextmanager
def stand_in() -> Iterator[Counts]:
    """Within, there is a GPU, `cuda:0`; what is counted begins at 0.

    Raises:
        RuntimeError: as `register`.
    """
    register()
    _counts.reset()
    said: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": _no_effect,
        "synchronize": _no_effect,
        "empty_cache": _no_effect,
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_device_capability": lambda device=None: (8, 0),
        "get_device_name": lambda device=None: "stand-in",
        "get_rng_state": lambda device=None: torch.get_rng_state(),  # its random numbers are the CPU's
        "set_rng_state": _no_effect,
        "manual_seed_all": _no_effect,
        "manual_seed": _no_effect,
    }
    with ExitStack() as patched:
        for name, function in said.items():
            patched.enter_context(mock.patch.object(torch.cuda, name, function))
        patched.enter_context(mock.patch.object(torch, "autocast", _Autocast))
        before = torch.__future__.get_swap_module_params_on_conversion()
        # A parameter that is moved becomes another kind of tensor.
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            yield _counts
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)


class OnDevice(torch.Tensor):
    """A tensor on the device.

    Attributes:
        held: its values.
    """

    held: Tensor
    __torch_function__: Any = _C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=torch.device(_NAME, 0),
        )
        made.held = held
        return made

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        return f"{self.held!r} on {_DEVICE}"

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _DEVICE

    @property
    def is_cuda(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return True

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        args, kwargs = tree_map(_inside, (args, kwargs))
        return super().to(*args, **kwargs)

    def cuda(self, *args: Any, **kwargs: Any) -> Tensor:
        return self

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def storage(self) -> Any:
        return self.held.storage()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"can't convert {_DEVICE} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
        )

    @property
    def data(self) -> Tensor:
        return _DATA.__get__(self)

    @data.setter
    def data(self, value: OnDevice) -> None:
        _DATA.__set__(self, value)
        self.held = value.held

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            made = OnDevice(self.held.detach().clone())
            is_parameter = hasattr(self, "_is_param")
            memo[id(self)] = (torch.nn.Parameter(made) if is_parameter else made).requires_grad_(self.requires_grad)
        return memo[id(self)]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _carry_out(func, args, kwargs or {})


class _Autocast(torch.autocast):
    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(device_type, *args, **kwargs)
        if device_type == "cuda":
            self.device = _NAME


# --------------------------------------------------------------------------------------------------------- an operation


def _carry_out(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Do on the CPU what an operation would do on the device; refuse and count what it would."""
    name: str = func.name().partition(".")[0]
    if func._can_decompose() and name != "aten::_fused_sdp_choice":  # what inference mode does not take apart
        return func.decompose(*args, **kwargs)
    given = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
    if lost := [each for each in given if each.device.type in ("cuda", _NAME) and not isinstance(each, OnDevice)]:
        raise NotImplementedError(
            f"{name}: a tensor of {tuple(lost[0].shape)} came to the device in a way not followed"
        )
    asked = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    if asked is not None and asked.type == "cuda" and asked.index:
        raise RuntimeError("CUDA error: invalid device ordinal")
    if name == "aten::_fused_sdp_choice":
        return _MATH
    _refuse_mixed(func, name, args, given)
    if (generator := kwargs.get("generator")) is not None and generator.device.type != "cuda":
        raise RuntimeError(f"Expected a 'cuda' device type for generator but found '{generator.device.type}'")
    _count(name, args, kwargs, given, asked)
    more = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if "device" in more and more["device"] is not None:
        more["device"] = _CPU
    result = func(*tree_map(_held, args), **tree_map(_held, more))
    if name == "aten::copy_":
        return args[0]
    if asked == _CPU:
        return result.clone() if any(result is each.held for each in given if isinstance(each, OnDevice)) else result
    own = {id(each.held): each for each in given if isinstance(each, OnDevice)}

    def there(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return own[id(value)] if id(value) in own else OnDevice(value)

    return tree_map(there, result)


def _refuse_mixed(func: Any, name: str, args: Sequence[Any], given: Sequence[Tensor]) -> None:
    """Refuse tensors of both places, but where CUDA takes them: copies, single numbers, indices from the CPU."""
    if name in _TO:
        return
    there = [each for each in given if isinstance(each, OnDevice)]
    here = [each for each in given if not isinstance(each, OnDevice)]
    if there and here and name in _INDEXED and isinstance(args[0], OnDevice):
        indices = {id(each) for each in args[1] if each is not None}
        here = [each for each in here if id(each) not in indices]
    if torch.Tag.pointwise in func.tags or name in _TAKES_NUMBERS or name.startswith("aten::_foreach"):
        here = [each for each in here if each.ndim]
    if there and here:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {_DEVICE} and cpu! "
            f"(when checking the arguments of {name})"
        )


def _count(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[Tensor], asked: torch.device | None
) -> None:
    if name in _TO:
        source = args[1] if name == "aten::copy_" else args[0]
        from_device = isinstance(source, OnDevice)
        to_device = isinstance(args[0], OnDevice) if name == "aten::copy_" else (asked or source.device).type != "cpu"
        blocking = not (kwargs.get("non_blocking") or (name == "aten::copy_" and args[2:] == (True,)))
        if from_device == to_device:
            return
        _counts.to_host += from_device
        _counts.to_device += to_device
        if blocking:
            _counts.waited(name)
        elif from_device:
            raise RuntimeError(f"a copy to the host that is not waited for is read before it is there ({_caller()})")
    elif name in _INDEXED and isinstance(args[0], OnDevice):
        indices = [each for each in args[1] if each is not None]
        moved = sum(not isinstance(each, OnDevice) for each in indices)
        _counts.to_device += moved
        if moved or any(each.dtype in (torch.bool, torch.uint8) for each in indices):
            _counts.waited(name)
    elif name in _WAITS or (name == "aten::repeat_interleave" and kwargs.get("output_size") is None):
        _counts.to_host += 1
        _counts.waited(name)


def _held(value: Any) -> Any:
    return value.held if isinstance(value, OnDevice) else value


def _inside(value: Any) -> Any:
    """The device by the name that PyTorch's own code has for it."""
    if isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda")):
        return torch.device(_NAME, 0) if torch.device(value).type == "cuda" else value
    return value


def _caller() -> str:
    """The line of code that asked, outside of PyTorch and of this module."""
    inside = (str(Path(torch.__file__).parent), __file__)
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame = frame.f_back
    return f"{os.sep.join(Path(frame.f_code.co_filename).parts[-2:])}:{frame.f_lineno}"


class _Module(ModuleType):
    """What PyTorch asks of a device's module: that of CUDA, as it is within."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def _no_effect(*args: Any, **kwargs: Any) -> None:
    pass


# -------------------------------------------------------------------------------------------------------- registrations


def register() -> None:
    """Let PyTorch know the device, before the process's first backward pass. It lasts; a second call does nothing.

    Raises:
        RuntimeError: there is a GPU, or another PyTorch, which has not what the stand-in leans on.
    """
    if _kept:
        return
    if torch.cuda.is_available():
        raise RuntimeError("there is a GPU; the stand-in is for where there is none")
    try:
        _kept.append(_guard())
    except (AttributeError, OSError, ValueError) as error:
        raise RuntimeError(
            f"the stand-in for a GPU leans on PyTorch 2.13 on Linux, got {torch.__version__}: {error}"
        ) from None
    aten, every = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    for name in ("empty.memory_format", "empty_strided", "copy_"):
        for key in ("CUDA", "PrivateUse1"):
            aten.impl(name, _kernel(getattr(torch.ops.aten, name.partition(".")[0]), name.partition(".")[2]), key)
    every.fallback(lambda func, *args, **kwargs: _carry_out(func, args, kwargs), "CUDA")
    every.fallback(lambda func, *args, **kwargs: _carry_out(func, args, kwargs), "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in _HALVED:
        aten.impl(name, _halved(getattr(torch.ops.aten, name).default), "AutocastPrivateUse1")
    _kept.extend((aten, every))


def _kernel(packet: Any, overload: str) -> Callable[..., Any]:
    func = getattr(packet, overload or "default")
    return lambda *args, **kwargs: _carry_out(func, args, kwargs)


def _halved(func: Any) -> Callable[..., Any]:
    """An operation as autocast does it: in its type, whatever single precision it is given."""
    key = _C.DispatchKeySet(_C.DispatchKey.AutocastPrivateUse1)

    def cast(value: Any) -> Any:
        single = isinstance(value, Tensor) and value.dtype == torch.float32
        return value.to(torch.get_autocast_dtype(_NAME)) if single else value

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _C._ExcludeDispatchKeyGuard(key):
            return func(*tree_map(cast, args), **tree_map(cast, kwargs))

    return kernel


def _guard() -> object:
    """What PyTorch asks about the streams and the number of devices of a kind; a build without CUDA has none."""

    class Hooks(_C._acc.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return False

        def has_primary_context(self, dev_id: int) -> bool:
            return True

        def is_built(self) -> bool:
            return True

    class Guard(_C._acc.DeviceGuard):
        def type_(self) -> Any:
            return _C._autograd.DeviceType.PrivateUse1

    made = Hooks(), Guard()
    _C._rename_privateuse1_backend(_NAME)
    torch._register_device_module(_NAME, _Module(_NAME))
    _C._acc.register_python_privateuseone_hook(made[0])
    _C._acc.register_python_privateuseone_device_guard(made[1])
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    places = (ctypes.c_void_p * 21).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    kinds = _C._autograd.DeviceType
    places[int(kinds.CUDA)] = places[int(kinds.PrivateUse1)]
    return made
