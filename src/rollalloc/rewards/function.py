"""Loads a reward function in verl's convention, calls it, and reads what it returns."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from numbers import Real
from pathlib import Path
from reprlib import repr as short
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from rollalloc.core.events import LARGEST
from rollalloc.files.text import error_text

_getpid, _exit = os.getpid, os._exit  # stored at import, because a reward function may replace them to protect itself
_run = asyncio.run  # stored at import, because some reward functions replace `asyncio.run`
_VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
_REASON_LENGTH = 200  # maximum number of characters: reasons are logged, and an exception may quote a whole completion


class RewardFunction(Protocol):
    """verl's `compute_score`, plain or `async def`, called with keywords. See `to_outcome` for what it may return."""

    def __call__(
        self, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
    ) -> Any: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout to be scored.

    Attributes:
        data_source: name of the prompt's data set, because a function may score several data sets.
        completion: the generated text, with any characters.
        ground_truth: the prompt's ground truth in the data set.
        extra_info: the prompt's `extra_info` in the data set.
        tokens: number of tokens of the completion; None if unknown. Only `OverlongScorer` uses it.
        name: the sample's name in reports, for example "gsm8k/17#3". The function does not get it.
    """

    data_source: str
    completion: str
    ground_truth: Any
    extra_info: dict[str, Any]
    tokens: int | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Scored:
    """A score. `reward` is used for training and `metric` for selecting rollouts; both are within ±`LARGEST`."""

    reward: float
    metric: float


def summed(parts: Iterable[float], decimals: int = 9) -> float:
    """Add the parts of a reward and round the sum, so that 0.1 + 0.2 equals 0.3.

    Otherwise equal rewards would differ by rounding, and a group without a learning signal would count as having one.

    Args:
        parts: the parts, each with its weight.
        decimals: number of decimals that are kept.
    """
    return round(sum(parts), decimals)


@dataclass(frozen=True, slots=True)
class Unscored:
    """A rollout without a score. It is not a wrong answer.

    Attributes:
        reason: why there is no score.
        raised: True if the function raised an exception. False if it returned no score, or if its process died.
    """

    reason: str
    raised: bool = field(default=False, compare=False)


Outcome = Scored | Unscored


def load_reward(path: str) -> RewardFunction:
    """Load a reward function.

    Args:
        path: `package.module:function`, or `file.py:function` with the file relative to the working directory. If the
            object is a `frameworks.Reward`, the function inside it is returned.

    Raises:
        ValueError: the path does not have one of these two forms.
        FileNotFoundError: the file does not exist.
        ImportError: the module, or a module that it imports, was not found.
        AttributeError: the module has no such name.
        TypeError: the object is not callable, cannot take verl's four arguments by name, or is a `Reward` whose scorer does
            more than call a function.
    """
    location, colon, name = path.rpartition(":")
    if not (location and colon and name):
        raise ValueError(
            f"reward must be 'package.module:function' or 'file.py:function', got {path!r}; name both parts"
        )
    module = _load_file(Path(location)) if location.endswith(".py") else _load_module(location)
    if not hasattr(module, name):
        near = get_close_matches(name, vars(module))
        hint = f"did you mean {' or '.join(near)}?" if near else "check the name after the colon"
        raise AttributeError(f"{location} has no {name!r}; {hint}")
    function = getattr(module, name)
    if not callable(function):
        raise TypeError(f"reward {path!r} must be a function, got {short(function)}; name one that can be called")
    function = getattr(function, "bare_function", function)
    _refuse_other_arguments(path, function)
    return function


def _refuse_other_arguments(path: str, function: Callable[..., Any]) -> None:
    """Raise TypeError for a function with other arguments than verl's, such as TRL's: every rollout would be unscored."""
    try:
        # A decorator may change the arguments, so those of the function that it wraps do not count.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return
    try:
        signature.bind(**dict.fromkeys(_VERL_ARGUMENTS))
    except TypeError as error:
        trl = "; `completions` is TRL's: TRL calls it once for many samples, rollalloc and verl once for each"
        raise TypeError(
            f"reward {path!r} must take verl's arguments by name, {', '.join(_VERL_ARGUMENTS)}; its signature is "
            f"{signature}: {error}; wrap it in a function that takes these"
            + (trl if "completions" in signature.parameters else "")
        ) from None


def score_sample(function: RewardFunction, sample: Sample) -> Outcome:
    """Score one sample. If the function raises an exception or calls `sys.exit`, the sample is unscored.

    A coroutine runs in a new event loop, so do not call this within a running loop. If the function forks, the child
    process exits here when the function returns or raises. Otherwise it would continue as a second copy of the caller.
    """
    process_id = _getpid()
    ended: BaseException | None = None
    try:
        result = function(
            data_source=sample.data_source,
            solution_str=sample.completion,
            ground_truth=sample.ground_truth,
            extra_info=sample.extra_info,
        )
        return to_outcome(_run(_finish(result)) if inspect.isawaitable(result) else result)
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # an HTTP client may cancel its task on a time-out
        ended = error
        return Unscored(what_was_raised(error), raised=True)
    except BaseException as error:
        ended = error
        raise
    finally:
        end_if_forked(process_id, ended)


def end_if_forked(process_id: int, ended: BaseException | None) -> None:
    """In a forked process, exit with the exit code that a script would have after the same return or exception.

    Args:
        process_id: id of the process that must not exit.
        ended: the exception that ended the function; None if it returned.
    """
    if _getpid() != process_id:
        code = ended.code if isinstance(ended, SystemExit) else int(ended is not None)
        _exit((code or 0) & 0xFF if isinstance(code, int | None) else 1)


def what_was_raised(error: BaseException) -> str:
    """The reason for an unscored sample: the exception's type and text. If its `str` fails, only the type."""
    try:
        return error_text(error, _REASON_LENGTH)
    except Exception:
        return type(error).__name__[:_REASON_LENGTH]


def to_outcome(result: Any) -> Outcome:
    """Read what a reward function returned. Anything that is not a score becomes `Unscored`, and never 0.

    Args:
        result: a number within ±`LARGEST`, which is both reward and metric; or a dict with `score` (the reward) and
            optionally `acc` (the metric); or None if the sample cannot be scored.
    """
    if result is None:
        return Unscored("reward function returned None")
    if isinstance(result, dict):
        score = result.get("score")
        acc = result.get("acc")
        reward, metric = _finite(score), _finite(score if acc is None else acc)
    else:
        reward = metric = _finite(result)
    if reward is None or metric is None:
        returned = f"reward function returned {short(result)}"
        return Unscored(f"{returned}, expected a number within ±{LARGEST:g} or a dict with 'score'"[:_REASON_LENGTH])
    return Scored(reward, metric)


def _finite(value: Any) -> float | None:
    """The value as a float; None if it is not a number within ±`LARGEST`."""
    if not isinstance(value, (Real, np.bool_)):
        return None
    number = float(value)
    return number if abs(number) <= LARGEST else None


async def _finish(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"cannot import {name!r} for the reward function: {error}; "
            "install it, run from the folder that holds it, or give 'file.py:function'"
        ) from error


def _load_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file, looked in {Path.cwd()}; check the part before the colon")
    # The module's name is its full path, so that two files with the same name do not share one module.
    spec = importlib.util.spec_from_file_location(str(file.resolve()), file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file}: Python cannot load it as a module; give a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a class's module up here
    spec.loader.exec_module(module)
    return module
