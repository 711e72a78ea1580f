"""Several processes, and signals to one of them.

A forward pass of a sharded model (FSDP, DeepSpeed) needs all processes, so every process must make equally many. An error in
one process stops all, and a step of the core is never interrupted.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from accelerate.utils import gather_object
from torch import Tensor
from trl.models.utils import unwrap_model_for_generation

from rollalloc.files.text import error_text
from rollalloc.models.likelihood import evaluating, in_eval_mode

_T = TypeVar("_T")


def is_sharded(trainer: Any) -> bool:
    """Whether a process may hold only a part of the model's weights."""
    return trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled


def local_part(tensor: Any) -> Tensor:
    """The part of a weight or gradient that this process holds: all of it, unless FSDP or DeepSpeed shard it."""
    part = getattr(tensor, "ds_tensor", tensor)  # ZeRO-3 empties the weight itself
    return part.to_local() if hasattr(part, "to_local") else part


def in_step(trainer: Any, parts: Sequence[Sequence[_T]], idle: _T) -> list[Sequence[_T]]:
    """The parts, and after them as many parts `[idle]` as the process with the most parts has more than this one.

    Every process must call this if the model is sharded. Otherwise the parts are returned as they are.
    """
    if not is_sharded(trainer):
        return list(parts)
    return [*parts, *[[idle]] * (max(gather_object([len(parts)])) - len(parts))]


def model_to_call(trainer: Any, wrapped: Any) -> Any:
    """The model without accelerate's wrappers, which take time. A sharded model keeps them: they gather its weights."""
    return wrapped if is_sharded(trainer) else trainer.accelerator.unwrap_model(wrapped)


@contextmanager
def called(trainer: Any, model: Any) -> Iterator[Any]:
    """A context in which every process can call the model, in eval mode and without gradients.

    A sharded model is not called in inference mode, because the weights that are gathered for it could then not be trained.

    Args:
        trainer: TRL's trainer.
        model: what `model_to_call` returned.
    """
    if not is_sharded(trainer):
        with evaluating(model):
            yield model
    elif trainer.is_deepspeed_enabled and model is trainer.model_wrapped:
        # As TRL generates. With its hooks in place, DeepSpeed would expect the training step to continue this forward pass.
        gather = trainer.args.ds3_gather_for_generation
        with (
            torch.no_grad(),
            unwrap_model_for_generation(model, trainer.accelerator, gather_deepspeed3_params=gather) as unwrapped,
            in_eval_mode(unwrapped),
        ):
            yield unwrapped
    else:
        with torch.no_grad(), in_eval_mode(model):
            yield _Sharded(model, trainer.accelerator.unwrap_model(model))


class _Sharded:
    """Calls the wrapper, which gathers the weights. All attributes are the model's own."""

    def __init__(self, wrapper: Any, model: Any) -> None:
        self._wrapper, self._model = wrapper, model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        return self._wrapper(**inputs)


_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # handlers of these signals may raise an exception at any line


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until the end of the block. A core that was interrupted within a step would be unusable."""
    if threading.current_thread() is not threading.main_thread():  # signal handlers run only in the main thread
        yield
        return
    came: list[tuple[int, Any]] = []
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    deferred = [number for number, handler in handlers.items() if callable(handler)]
    try:
        for number in deferred:
            signal.signal(number, lambda *given: came.append(given))
        yield
    finally:
        for number in deferred:
            signal.signal(number, handlers[number])
        for number, frame in came:
            handlers[number](number, frame)  # pyright: ignore


def by_all(work: Callable[[], _T]) -> list[_T]:
    """Run `work` in every process and gather the results. If `work` fails in one process, all processes raise an error, so
    that no process waits for another.

    Returns:
        The result of each process, in order.

    Raises:
        Exception: the exception of `work`, if it failed in this process.
        RuntimeError: `work` failed in another process; the message names the process and the error.
    """
    made: list[_T] = []
    error: Exception | None = None
    try:
        made.append(work())
    except Exception as raised:
        error = raised
    everyone = gather_object([(made, None if error is None else error_text(error))])
    if error is not None:
        raise error
    for process, (_, failure) in enumerate(everyone):
        if failure is not None:
            raise RuntimeError(f"process {process} could not generate and score its share: {failure}")
    return [one for made, _ in everyone for one in made]
