"""The protocol between a training loop and what generates, and what the engines of this process share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from rollalloc.core.events import Order
from rollalloc.data.prompts import EncodedPrompts
from rollalloc.generate.outcomes import SCORE_AND_ACC, Outcomes, RolloutLog, RolloutResult, stopped, uncertainty_of
from rollalloc.generate.sampler import Generation, pack_generations, unpack_generations
from rollalloc.generate.sampling import Sampling
from rollalloc.models.behaviour import Behaviour
from rollalloc.rewards.function import Outcome, Sample, Unscored
from rollalloc.rewards.scorers import Scorer

Scoring = tuple[list[Generation], Future[list[Outcome]]]  # rollouts that ended, and their scores to come


class RolloutEngine(Protocol):
    """Generates and scores the rollouts that an allocator orders, and keeps them until they are released.

    A training loop needs nothing else of an engine:

        engine.load_weights(allocator.version)           # at the start, and after each update
        actions = allocator.ask(engine.capacity())
        engine.release(actions.release)
        engine.cancel(actions.cancel)
        engine.submit(actions.generate)
        tell(allocator, engine.poll(), outcomes=engine.outcomes, remedy=engine.remedy)

    `poll` returns each submitted rollout exactly once: scored, failed or cancelled. All methods are called from one thread.
    `SyncEngine` and `AsyncEngine` generate in this process or beside it; `drivers.tinker` has one that samples at a service.

    Attributes:
        generations: by rollout, the data that the update needs of rollouts that are scored and not released.
        outcomes: counts and figures of all rollouts.
        remedy: what an error about a metric tells the user to do.
        streams: rollouts go on while a batch is trained, so that the loop submits and polls in the meantime too.
    """

    generations: Any
    outcomes: Outcomes
    remedy: str = SCORE_AND_ACC
    streams: bool = False

    @property
    def can_update(self) -> bool:
        """Whether the weights may change now. False in the middle of a synchronous engine's wave: poll until it is over."""
        return True

    def capacity(self) -> int | None:
        """How many rollouts may be submitted now; None: any number."""
        ...

    def submit(self, orders: Sequence[Order]) -> None:
        """Begin these rollouts. One that came with a checkpoint, in `load_state`, goes on where it was."""
        ...

    def poll(self, *, wait: bool = True) -> list[RolloutResult]:
        """Return what ended since the last call, in the order in which the allocator should be told.

        Args:
            wait: if nothing has ended, wait a moment. False: return at once, after at most one decoding step.

        Raises:
            BackendDied: what generates is gone, or gave no sign of life for too long.
        """
        ...

    def cancel(self, rollouts: Sequence[int]) -> None:
        """Stop these soon. `poll` still returns each once: cancelled, or as it ended before that."""
        ...

    def release(self, rollouts: Sequence[int]) -> None:
        """Forget the data of these rollouts."""
        for rollout in rollouts:
            self.generations.pop(rollout, None)  # a rollout without a score has none

    def load_weights(self, version: int) -> None:
        """Sample with the policy's newest weights from now on; what runs goes on with them.

        Args:
            version: of these weights, as the allocator counts.
        """
        ...

    def pause(self) -> None:
        """Called before an evaluation, during which the run may be saved."""

    def drain(self) -> list[RolloutResult]:
        """Wait for the running rollouts and return them, where generating them again would cost money."""
        return []

    def figures(self) -> dict[str, Any]:
        """The metrics of the rollouts scored since the last call."""
        return self.outcomes.figures()

    def close(self) -> None:
        """Free what generates; what runs is lost, and the allocator's `outstanding` names it. The run may go on later."""

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Everything, as plain data and tensors."""
        ...

    def load_state(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned."""


class LocalEngine(RolloutEngine):
    """The part that `SyncEngine` and `AsyncEngine` share: scoring, logging and keeping rollouts.

    `behaviour` gives the policy that generates; the file `log` gets one line of JSON per rollout.
    """

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
        self._version = 0
        self._order_of: dict[int, Order] = {}  # of each rollout that was submitted and not returned by `poll`
        self._ended: list[RolloutResult] = []  # for the next `poll`

    def cancel(self, rollouts: Sequence[int]) -> None:
        self._cancel_running([rollout for rollout in rollouts if rollout in self._order_of])
        self._ended += [stopped(rollout, self._version) for rollout in rollouts if rollout not in self._order_of]

    def _cancel_running(self, rollouts: Sequence[int]) -> None:
        """Stop rollouts that were submitted."""
        raise NotImplementedError

    def score_samples(
        self, prompts: EncodedPrompts, generations: Sequence[tuple[int, Generation]]
    ) -> Future[list[Outcome]]:
        """Begin to score generations, each given beside the index of its prompt."""
        texts = prompts.prompt_set
        return self.scorer.submit(
            [
                Sample(
                    data_source=texts.sources[prompt],
                    completion=self.policy.text(generation.tokens),
                    ground_truth=texts.ground_truths[prompt],
                    extra_info=texts.extra_infos[prompt],
                    tokens=len(generation.tokens),
                    name=f"{texts.keys[prompt]}#{generation.rollout}",
                )
                for prompt, generation in generations
            ]
        )

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        described, tensors = pack_generations(list(self.generations.values()))
        return {"generations": described, "stream": None, **self.outcomes.state()}, tensors

    def load_state(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.outcomes.load_state(
            {name: value for name, value in state.items() if name not in ("generations", "stream")}
        )
        generations = unpack_generations(state["generations"], tensors)
        self.generations = {generation.rollout: generation for generation in generations}

    def _score(self, ended: Sequence[Generation]) -> Future[list[Outcome]]:
        """Begin to score rollouts that ended; those that were stopped have no score."""
        if any(generation.cancelled for generation in ended):  # stopped rollouts never come together with others
            no_scores: Future[list[Outcome]] = Future()
            no_scores.set_result([Unscored("stopped")] * len(ended))
            return no_scores
        return self.score_samples(
            self.prompts, [(self._order_of[generation.rollout].prompt, generation) for generation in ended]
        )

    def _finish(self, ended: Sequence[Generation], outcomes: Sequence[Outcome]) -> list[RolloutResult]:
        """Log rollouts, keep those that have a score, and return what `poll` says of them."""
        self._write(ended, outcomes)
        results: list[RolloutResult] = []
        for generation, outcome in zip(ended, outcomes, strict=True):
            spans = generation.spans or ((self._version, 0),)
            result = RolloutResult(
                rollout=generation.rollout,
                outcome=outcome,
                tokens=len(generation.tokens),
                version=spans[0][0],
                last_version=spans[-1][0],
                truncated=generation.truncated,
                cancelled=generation.cancelled,
                uncertainty=uncertainty_of(generation.logprobs),
            )
            if result.is_scored:
                self.generations[generation.rollout] = generation
            results.append(result)
        for generation in ended:
            self._order_of.pop(generation.rollout, None)
        return results

    def _write(self, ended: Sequence[Generation], outcomes: Sequence[Outcome]) -> None:
        if not self._log.wanted:
            return
        for generation, outcome in zip(ended, outcomes, strict=True):
            order, versions = self._order_of[generation.rollout], generation.spans or ((self._version, 0),)
            key, text = self.prompts.prompt_set.keys[order.prompt], self.policy.text(generation.tokens)
            figures = {"tokens": len(generation.tokens), "truncated": generation.truncated}
            self._log.add(
                generation.rollout, order, key, versions[0][0], outcome, **figures, text=text, versions=versions
            )
        self._log.flush()
