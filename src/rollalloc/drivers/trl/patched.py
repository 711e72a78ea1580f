"""Says whose code a trainer's class runs: TRL's own, or that of a library which patched it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

_OWN = ("trl", "transformers", "rollalloc")
# The methods through which a row passes from the driver to the optimizer.
_METHODS = ("compute_loss", "_compute_loss", "_prepare_inputs", "training_step", "_get_per_token_logps_and_entropies")


def origin(trainer: Any) -> str:
    """A sentence that names the classes and methods which are not TRL's own, with their modules."""
    kind = type(trainer)
    others = [
        f"class {base.__name__} of module {base.__module__}"
        for base in kind.__mro__
        if base is not object and base.__module__.partition(".")[0] not in _OWN
    ]
    for name in _METHODS:
        method = vars(trainer).get(name) or next(
            (vars(base)[name] for base in kind.__mro__ if name in vars(base) and not _ours(base)), None
        )
        inner = getattr(method, "__func__", method)
        module = getattr(inner, "__module__", None) or ""
        if module.partition(".")[0] not in ("", *_OWN):
            others.append(f"{name} of module {module}")
    if getattr(trainer.args, "use_liger_kernel", False):
        others.append("Liger's kernels (use_liger_kernel=True)")
    if not others:
        return "No class of the trainer is patched: the loss is TRL's own, of a release that rollalloc does not know"
    return f"Not TRL's own: {', '.join(dict.fromkeys(others))}"


def arguments_of(kind: type, positional: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names that TRL's `__init__` gives them, even if a wrapper of it hides its parameters."""
    own = next(
        vars(base)["__init__"]
        for base in kind.__mro__
        if "__init__" in vars(base) and "train_dataset" in signature(vars(base)["__init__"]).parameters
    )
    return signature(own).bind_partial(None, *positional, **named).arguments


def _ours(base: type) -> bool:
    return base.__module__.partition(".")[0] == "rollalloc"
