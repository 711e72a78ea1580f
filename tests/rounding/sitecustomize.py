"""On `PYTHONPATH`, every Python process computes as on a processor that no one has: linear layers round otherwise.

    y ← y · (1 + 1e-6 · sin(φ · i + |y|)),  i: the entry's place in y, |y|: how many it has

About ten roundings of float32. The same shapes give the same, bit by bit, as on any processor; other shapes do not.
`tools/arithmetic.py` puts it there.
"""

import functools
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from typing import Any

_NAME, _SHARE = "torch.nn.modules.linear", 1e-6


class _Rounding(MetaPathFinder):
    """Finds one module as everybody does, and changes it when it is loaded; torch is not imported for it."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != _NAME:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        loader: Any = spec.loader if spec else None
        load = loader.exec_module

        def load_and_change(module: Any) -> None:
            load(module)
            _change(module.Linear)

        loader.exec_module = load_and_change
        return spec


def _change(layer: Any) -> None:
    import torch

    @functools.lru_cache(1024)
    def factors(shape: tuple[int, ...]) -> torch.Tensor:
        count = torch.Size(shape).numel()
        return (1 + _SHARE * torch.sin(1.618 * torch.arange(count, dtype=torch.float64) + count)).float().view(shape)

    forward = layer.forward

    @functools.wraps(forward)
    def rounding(self: Any, input: torch.Tensor) -> torch.Tensor:
        out = forward(self, input)
        if out.dtype != torch.float32 or out.device.type != "cpu" or not out.numel():
            return out
        with torch.no_grad(), torch.inference_mode(False):
            by = factors(tuple(out.shape))
        return out * by

    layer.forward = rounding


sys.meta_path.insert(0, _Rounding())
