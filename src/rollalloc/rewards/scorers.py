"""Running a reward function over samples: in this process, or in processes that may be killed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from time import monotonic
from typing import Any, Protocol, Self

from rollalloc.rewards._crew import Crew, Job
from rollalloc.rewards._handle import Limits
from rollalloc.rewards.function import Outcome, RewardFunction, Sample, load_reward, score_sample
from rollalloc.rewards.tally import KnownScores, Tally


class Scorer(Protocol):
    """Scores samples; a context manager that closes itself."""

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """One outcome a sample, in order."""
        ...

    def submit(self, samples: Sequence[Sample]) -> Future[list[Outcome]]:
        """The same, while the caller goes on."""
        ...

    def report(self) -> dict[str, Any]:
        """What has been scored so far, as plain JSON data.

        `scored`: their number, of which `cached` were known already; `discarded`: answers that were no worker's own to
        the request at hand; `seconds`: that the samples took, all workers together; `workers`: how many there are;
        `unscored`: number by reason; `slowest` and `lost`: at most 20 samples each, slowest first,
        with `name`, `seconds` and, if unscored, `reason`; the lost ones are those whose worker had to be killed or died.
        """
        ...

    def close(self) -> None:
        """Frees what scoring holds."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True)
class InlineScorer(Scorer):
    """Calls a trusted function in this process: no limit, no isolation. Not for use within a running event loop."""

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
    """Runs a reward function in processes of its own, which a hanging or crashing sample costs nothing but themselves.

    A sample that takes too long, or whose process dies, is `Unscored`, unless others ran in that process before: then it
    is tried once more in a fresh one. Its process is replaced, together with all that it started, and the samples after
    it go on. What a function changes of its process is put back, and what it forks does not answer in its stead; see
    docs/rewards.md. Processes start with the first call, are kept until `close`, and end with the interpreter, also
    where that is killed; what the function prints is discarded. They are fresh interpreters that do not import the
    caller's main module, so that a script needs no `if __name__ == "__main__"` and a replacement starts fast. Calls
    from several threads share the processes. POSIX only; the limit on memory holds on Linux.

    Args:
        reward: path of the function, as `load_reward` takes it.
        workers: most processes at a time, at least 1.
        limit_s: seconds that a sample may take, each time it is tried, positive; importing the module does not count.
        memory_gb: GiB a sample may make a process allocate, beyond what importing the module took; positive.
        max_chars: a longer completion is unscored, at least 1.
        cached: most scores to remember, so that an identical sample is not scored again; 0 where the function may
            answer the same sample differently.

    Raises:
        ValueError: a setting out of range.
    """

    def __init__(
        self,
        reward: str,
        workers: int = 1,
        limit_s: float = 10.0,
        *,
        memory_gb: float = 4.0,
        max_chars: int = 1_000_000,
        cached: int = 10_000,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}; to score in this process use InlineScorer")
        if not 0 < limit_s < 1e6:
            raise ValueError(f"limit_s must be a positive number of seconds, got {limit_s}")
        if not 0 < memory_gb < 1e6:
            raise ValueError(f"memory_gb must be a positive number of GiB, got {memory_gb}")
        if max_chars < 1:
            raise ValueError(f"max_chars must be at least 1, got {max_chars}")
        if cached < 0:
            raise ValueError(f"cached must be at least 0, got {cached}; 0 remembers nothing")
        self._limits = Limits(reward, workers, limit_s, memory_gb, max_chars)
        self._tally = Tally()
        self._cache = KnownScores(cached)
        self._lock = Lock()
        self._crew: Crew | None = None

    @property
    def function(self) -> RewardFunction:
        """The reward function, loaded into this process."""
        return load_reward(self._limits.reward)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has the same settings and processes of its own."""
        limits = self._limits
        keywords = {"memory_gb": limits.memory_gb, "max_chars": limits.max_chars, "cached": self._cache.entries}
        return partial(WorkerScorer, **keywords), (limits.reward, limits.workers, limits.limit_s)

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """One outcome a sample, in order.

        Raises:
            RuntimeError: a worker could not load the reward function.
            CancelledError: the scorer was closed meanwhile.
        """
        future = self.submit(samples)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # of use after Ctrl-C
            raise

    def submit(self, samples: Sequence[Sample]) -> Future[list[Outcome]]:
        """Scores in the background. The future fails as `score` does, may be cancelled, and is by `close`.

        Its callbacks run in the thread that minds the workers, and must not wait for other samples.
        """
        job = Job(samples, self._limits.max_chars)
        with self._lock:
            while self._crew is None or not self._crew.take(job):
                self._crew = Crew(self._limits, self._tally, self._cache)
                weakref.finalize(self, self._crew.close)
        return job.future

    def report(self) -> dict[str, Any]:
        return self._tally.report() | {"workers": self._limits.workers}

    def close(self) -> None:
        """Ends the processes, and cancels what is under way; a later call starts new ones."""
        with self._lock:
            if self._crew is not None:
                self._crew.close()
