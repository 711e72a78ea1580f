"""What the training loop asks of an engine, and what the engines in this process share: score, tell, log, hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from rollalloc.core.allocator import Allocator
from rollalloc.core.events import Actions, Order
from rollalloc.core.latency import Curve
from rollalloc.data.prompts import EncodedPrompts
from rollalloc.generate.outcomes import SCORE_AND_ACC, Outcomes, RolloutLog, RolloutResult, tell, uncertainty_of
from rollalloc.generate.sampler import Generation, pack_generations, unpack_generations
from rollalloc.generate.sampling import Sampling
from rollalloc.models.behaviour import Behaviour
from rollalloc.rewards.function import Outcome, Sample, Unscored
from rollalloc.rewards.scorers import Scorer

Scoring = tuple[list[Generation], Future[list[Outcome]]]  # what is being scored


class RolloutEngine(Protocol):
    """Generates and scores the rollouts that an allocator orders, and keeps them until they are released.

    The training loop uses nothing else of an engine. `SyncEngine` and `AsyncEngine` generate in this process or beside
    it; `drivers.tinker` has one that samples at a service.

    Attributes:
        generations: of rollouts that are scored and not released, the data that the update needs, by rollout.
        outcomes: counts and figures of all rollouts.
    """

    generations: Any
    outcomes: Outcomes

    def advance(self, allocator: Allocator) -> Actions:
        """Ask once or more, and carry out the orders. Returns the last actions: they may hold a batch or end the run."""
        ...

    def go_on(self, allocator: Allocator) -> None:
        """Called now and then while a batch is trained, so that generation can go on meanwhile."""

    def before_evaluation(self, allocator: Allocator) -> None:
        """Called before the weights are evaluated; the run may be stopped and saved while they are."""
        self.go_on(allocator)

    def updated(self, version: int) -> None:
        """The weights changed to this version; the allocator knows it already."""

    def latency(self) -> Curve | None:
        """The measured seconds per decoding step by rows; None where the engine does not measure them."""
        return None

    def figures(self) -> dict[str, Any]:
        """The metrics of the rollouts scored since the last call."""
        ...

    def drain(self, allocator: Allocator) -> None:
        """Wait for the running rollouts and tell them, where generating them again would cost money."""

    def close(self) -> None:
        """The run pauses or ends."""

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Everything, as plain data and tensors."""
        ...

    def load_state(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave."""


class LocalEngine(RolloutEngine):
    """The part that `SyncEngine` and `AsyncEngine` share: scoring, telling, logging and holding rollouts.

    `behaviour` gives the policy that generates; the file `log` gets one line of JSON per rollout.

    Attributes:
        remedy: what an error about a metric says is to be done.
    """

    remedy = SCORE_AND_ACC

    def __init__(
        self,
        behaviour: Behaviour,
        prompts: EncodedPrompts,
        scorer: Scorer,
        sampling: Sampling,
        seed: int,
        log: Path | None = None,
    ) -> None:
        self.behaviour, self.policy = behaviour, behaviour.trained
        self.prompts, self.scorer, self.sampling, self.seed = prompts, scorer, sampling, seed
        self._log = RolloutLog(log)
        self.generations: dict[int, Generation] = {}
        self.outcomes = Outcomes()

    def submit(self, prompts: EncodedPrompts, made: Sequence[tuple[int, Generation]]) -> Future[list[Outcome]]:
        """Begin to score generations, each given beside the index of its prompt."""
        given = prompts.prompt_set
        return self.scorer.submit(
            [
                Sample(
                    data_source=given.sources[prompt],
                    completion=self.policy.text(generation.tokens),
                    ground_truth=given.ground_truths[prompt],
                    extra_info=given.extra_infos[prompt],
                    tokens=len(generation.tokens),
                    name=f"{given.keys[prompt]}#{generation.rollout}",
                )
                for prompt, generation in made
            ]
        )

    def figures(self) -> dict[str, Any]:
        """What was scored since the last call, trained on or not."""
        return self.outcomes.figures()

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Everything, as plain data and tensors."""
        described, tensors = pack_generations(list(self.generations.values()))
        return {"generations": described, "stream": None, **self.outcomes.state()}, tensors

    def load_state(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave."""
        self.outcomes.load_state(
            {name: value for name, value in state.items() if name not in ("generations", "stream")}
        )
        held = unpack_generations(state["generations"], tensors)
        self.generations = {made.rollout: made for made in held}

    def release(self, actions: Actions) -> None:
        for rollout in actions.release:
            self.generations.pop(rollout, None)  # a rollout without a score has none

    def score(self, ended: Sequence[Generation], order_of: Mapping[int, Order]) -> Future[list[Outcome]]:
        """Begin to score what was generated; what was stopped has no score."""
        if any(made.cancelled for made in ended):  # those are handed over in a call of their own
            stopped: Future[list[Outcome]] = Future()
            stopped.set_result([Unscored("stopped")] * len(ended))
            return stopped
        return self.submit(self.prompts, [(order_of[made.rollout].prompt, made) for made in ended])

    def tell(
        self,
        ended: Sequence[Generation],
        outcomes: Sequence[Outcome],
        order_of: Mapping[int, Order],
        allocator: Allocator,
    ) -> None:
        """Log the rollouts, tell the allocator how each ended, and keep those that have a score."""
        now = ((allocator.version, 0),)
        self.write(ended, outcomes, order_of, now)
        results = [_result(made, outcome, made.spans or now) for made, outcome in zip(ended, outcomes, strict=True)]
        for made, result in zip(ended, results, strict=True):
            if result.is_scored:
                self.generations[made.rollout] = made
        tell(allocator, results, outcomes=self.outcomes, remedy=self.remedy)

    def write(
        self,
        ended: Sequence[Generation],
        outcomes: Sequence[Outcome],
        order_of: Mapping[int, Order],
        now: tuple[tuple[int, int], ...],
    ) -> None:
        """Take each down in the log; `now`: versions and tokens of one that says none itself."""
        if not self._log.wanted:
            return
        for made, outcome in zip(ended, outcomes, strict=True):
            order, versions = order_of[made.rollout], made.spans or now
            key, text = self.prompts.prompt_set.keys[order.prompt], self.policy.text(made.tokens)
            figures = {"tokens": len(made.tokens), "truncated": made.truncated}
            self._log.add(made.rollout, order, key, versions[0][0], outcome, **figures, text=text, versions=versions)
        self._log.flush()


def _result(made: Generation, outcome: Outcome, spans: Sequence[tuple[int, int]]) -> RolloutResult:
    return RolloutResult(
        rollout=made.rollout,
        outcome=outcome,
        tokens=len(made.tokens),
        version=spans[0][0],
        last_version=spans[-1][0],
        truncated=made.truncated,
        cancelled=made.cancelled,
        uncertainty=uncertainty_of(made.logprobs),
    )
