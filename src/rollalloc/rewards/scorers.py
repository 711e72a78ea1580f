"""Scorers: run a reward function over samples, in this process or in worker processes that can be killed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from time import monotonic
from typing import Any, Protocol, Self

from rollalloc.rewards._crew import Crew, Job, Limits, Tally
from rollalloc.rewards.function import Outcome, RewardFunction, Sample, load_reward, score_sample


class Scorer(Protocol):
    """Scores samples. As a context manager, a scorer closes itself at the end."""

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Score samples. Return one outcome per sample, in order.

        Raises:
            RuntimeError: a worker could not load the reward function.
            CancelledError: the scorer was closed during the call.
        """
        future = self.submit(samples)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # nobody waits for the samples any more, for example after Ctrl-C
            raise

    def submit(self, samples: Sequence[Sample]) -> Future[list[Outcome]]:
        """Score samples in the background. Return a future of the outcomes."""
        ...

    def report(self) -> dict[str, Any]:
        """Statistics of all samples scored so far, as plain JSON data.

        - `scored`: number of samples with a score
        - `unscored`: number of samples without a score, by reason
        - `seconds`: time spent on samples, summed over workers; `workers`: number of workers
        - `discarded`: number of messages of workers that did not answer a request, or had a wrong form
        - `slowest`: the slowest samples; `lost`: the slowest samples whose worker died or was killed. Both are lists of
          at most 20 entries with `name`, `seconds` and, if unscored, `reason`.
        """
        ...

    def close(self) -> None:
        """Free resources, such as worker processes."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True)
class InlineScorer(Scorer):
    """Calls a trusted function in this process, without time limit or isolation. Do not use it within an event loop."""

    function: RewardFunction
    _tally: Tally = field(default_factory=Tally, init=False, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return InlineScorer, (self.function,)

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        return [self._score(sample) for sample in samples]

    def submit(self, samples: Sequence[Sample]) -> Future[list[Outcome]]:
        future: Future[list[Outcome]] = Future()
        future.set_result(self.score(samples))
        return future

    def report(self) -> dict[str, Any]:
        return self._tally.report()

    def close(self) -> None:
        pass

    def _score(self, sample: Sample) -> Outcome:
        start = monotonic()
        outcome = score_sample(self.function, sample)
        self._tally.add(sample, outcome, monotonic() - start)
        return outcome


class WorkerScorer(Scorer):
    """Runs a reward function in worker processes, so that a sample that hangs or crashes does not affect other samples.

    If a sample takes too long or its worker dies, the worker and all processes that it started are killed, and a new
    worker is started. If the sample was the worker's first, it is `Unscored`. Otherwise an earlier sample may be the cause,
    so the sample is tried again in a fresh worker. Changes that a function makes to its process are undone between samples.
    Answers from processes that the function forks are ignored. docs/rewards.md has the details.

    Workers start at the first call. They run until `close`, or until the interpreter ends. The function's printed output is
    discarded. Workers do not import the caller's main module, so scripts need no `if __name__ == "__main__"`. Several
    threads may share a scorer. POSIX only; the memory limit works on Linux only.

    Args:
        reward: path of the function, see `load_reward`.
        workers: maximum number of workers, at least 1.
        limit_s: seconds per sample and attempt, above 0. The time for importing the module is not included.
        memory_gb: GiB that a worker may allocate after it has imported the module, above 0.
        max_chars: completions with more characters are unscored; at least 1.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        reward: str,
        workers: int = 1,
        limit_s: float = 10.0,
        *,
        memory_gb: float = 4.0,
        max_chars: int = 1_000_000,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}; to score in this process use InlineScorer")
        if not 0 < limit_s < 1e6:
            raise ValueError(f"limit_s must be a positive number of seconds, got {limit_s}")
        if not 0 < memory_gb < 1e6:
            raise ValueError(f"memory_gb must be a positive number of GiB, got {memory_gb}")
        if max_chars < 1:
            raise ValueError(f"max_chars must be at least 1, got {max_chars}")
        self._limits = Limits(reward, workers, limit_s, memory_gb, max_chars)
        self._tally = Tally()
        self._lock = Lock()
        self._crew: Crew | None = None

    @property
    def function(self) -> RewardFunction:
        """The reward function, loaded into this process."""
        return load_reward(self._limits.reward)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the settings, so that a copy starts its own workers."""
        limits = self._limits
        keywords = {"memory_gb": limits.memory_gb, "max_chars": limits.max_chars}
        return partial(WorkerScorer, **keywords), (limits.reward, limits.workers, limits.limit_s)

    def submit(self, samples: Sequence[Sample]) -> Future[list[Outcome]]:
        """Score samples in the background. The future raises the errors of `score`; `close` cancels it.

        The future's callbacks run in the thread that serves the workers, so they must not wait for other samples.
        """
        job = Job(samples, self._limits.max_chars)
        with self._lock:
            while self._crew is None or not self._crew.take(job):
                self._crew = Crew(self._limits, self._tally)
                weakref.finalize(self, self._crew.close)
        return job.future

    def report(self) -> dict[str, Any]:
        return self._tally.report() | {"workers": self._limits.workers}

    def close(self) -> None:
        """End the workers and cancel running calls. A later call of `score` or `submit` starts new workers."""
        with self._lock:
            if self._crew is not None:
                self._crew.close()
