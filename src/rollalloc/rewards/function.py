"""verl's reward-function convention: finding a function, calling it, and reading what it returns."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Awaitable
from dataclasses import dataclass, field
from difflib import get_close_matches
from numbers import Real
from pathlib import Path
from reprlib import repr as short
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from rollalloc.core.events import LARGEST

_getpid, _exit = os.getpid, os._exit  # bound now: functions that guard themselves take `os` to pieces
_run = asyncio.run  # likewise: some put their own in its place
_REASON_LENGTH = 200  # characters: a reason goes to a log, and an exception's text may quote a whole completion


class RewardFunction(Protocol):
    """verl's `compute_score`: called by keyword; may be `async def`; `to_outcome` says what it may return."""

    def __call__(
        self, *, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
    ) -> Any: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """What a reward function needs to know of one rollout.

    Attributes:
        data_source: where the prompt comes from; a function may serve several sources.
        completion: the generated text, whatever characters it holds.
        ground_truth: what the prompt set holds for the prompt.
        extra_info: likewise.
        tokens: length of the completion, where it is known; for `Shaped`, the function does not see it.
        name: what a report calls the sample, as "gsm8k/17#3"; the function does not see it.
    """

    data_source: str
    completion: str
    ground_truth: Any
    extra_info: dict[str, Any]
    tokens: int | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Scored:
    """A score: `reward` is what training uses, `metric` what selection looks at; both within ±`LARGEST`."""

    reward: float
    metric: float


@dataclass(frozen=True, slots=True)
class Unscored:
    """No score, and why. Unscored is not wrong.

    Attributes:
        reason: why.
        raised: whether the function raised an exception, rather than that it or its process gave no score.
    """

    reason: str
    raised: bool = field(default=False, compare=False)


Outcome = Scored | Unscored


def load_reward(path: str) -> RewardFunction:
    """Finds a reward function by its path.

    Args:
        path: `package.module:function`, or `file.py:function`, the file relative to the working directory. A
            `frameworks.Reward` stands for the function that it wraps.

    Raises:
        ValueError: the path is not of that form.
        FileNotFoundError: there is no such file.
        ImportError: the module cannot be found, or what it imports cannot.
        AttributeError: the module has no such name.
        TypeError: what has that name cannot be called, or wraps more than a function.
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
    return getattr(function, "bare_function", function)


def score_sample(function: RewardFunction, sample: Sample) -> Outcome:
    """Scores one sample. Whatever the function raises makes the sample unscored, `sys.exit` included.

    A coroutine gets an event loop of its own, so that this must not be called from within a running one. A process that
    the function forks ends here, where it returns or raises, as a script would: it must not go on as a second caller.
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
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # a request that is given up cancels its task
        ended = error
        return Unscored(what_was_raised(error), raised=True)
    except BaseException as error:
        ended = error
        raise
    finally:
        end_if_forked(process_id, ended)


def end_if_forked(process_id: int, ended: BaseException | None) -> None:
    """Ends this process where it is not the one that it was, with the exit code of a script that ended so."""
    if _getpid() != process_id:
        code = ended.code if isinstance(ended, SystemExit) else int(ended is not None)
        _exit((code or 0) & 0xFF if isinstance(code, int | None) else 1)


def what_was_raised(error: BaseException) -> str:
    """An exception as the reason for which a sample is unscored; its own text may fail."""
    try:
        return f"{type(error).__name__}: {error}"[:_REASON_LENGTH]
    except Exception:
        return type(error).__name__[:_REASON_LENGTH]


def to_outcome(result: Any) -> Outcome:
    """Reads what a reward function returned; what is not a score becomes `Unscored`, never 0.

    Args:
        result: a number within ±`LARGEST`, both reward and metric; or a dict with `score`, the reward, and optionally
            `acc`, the metric; or None where the sample cannot be scored.
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
    """The value as a float that the core takes, None where it is none."""
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
    # The full path is the name, so that two files of one name stay two modules.
    spec = importlib.util.spec_from_file_location(str(file.resolve()), file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file}: Python cannot load it as a module; give a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a class's module up here
    spec.loader.exec_module(module)
    return module
