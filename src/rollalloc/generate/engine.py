"""The protocol between a training loop and a rollout engine, what the local engines share, and the synchronous engine.

The asynchronous one is in `rollalloc.generate.stream`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from rollalloc.core.events import Order
from rollalloc.data.prompts import EncodedPrompts
from rollalloc.generate.outcomes import SCORE_AND_ACC, Outcomes, RolloutLog, RolloutResult, stopped, uncertainty_of
from rollalloc.generate.sampler import Generation, Request, pack_generations, stream, unpack_generations
from rollalloc.models.policy import Behaviour
from rollalloc.models.settings import Sampling
from rollalloc.rewards.function import Outcome, Unscored
from rollalloc.rewards.scorers import Scorer

Scoring = tuple[list[Generation], Future[list[Outcome]]]  # rollouts that ended, and their future scores


class RolloutEngine(Protocol):
    """Generates and scores the rollouts that an allocator orders, and keeps their data until they are released.

    This is how a training loop uses an engine:

        engine.load_weights(allocator.version)           # at the start, and after each update
        actions = allocator.ask(engine.capacity())
        engine.release(actions.release)
        engine.cancel(actions.cancel)
        engine.submit(actions.generate)
        allocator.rest()                                 # long computations, while the engine generates
        tell(allocator, engine.poll(), outcomes=engine.outcomes, remedy=engine.remedy)

    `poll` returns each submitted rollout exactly once: scored, failed or cancelled. All methods are called from one
    thread. `SyncEngine` and `AsyncEngine` generate on this machine; the engine in `drivers.tinker` uses a remote service.

    Attributes:
        generations: the rollouts that are scored and not yet released, by id, with the data that an update needs.
        outcomes: counts and metrics of all rollouts.
        remedy: advice to the user. The error about a metric outside [0, 1] ends with this advice.
        streams: True: rollouts continue while a batch is trained, so the training loop must submit and poll during
            training.
        limits: whether the engine stops rollouts at `Order.limit`. If not, recipes with a limit are refused.
    """

    generations: Any
    outcomes: Outcomes
    remedy: str = SCORE_AND_ACC
    streams: bool = False
    limits: bool = False

    @property
    def can_update(self) -> bool:
        """Whether the weights may change now. If not, a synchronous engine is generating a wave: poll until it ends."""
        return True

    def capacity(self) -> int | None:
        """Number of rollouts that may be submitted now; None: any number."""
        ...

    def submit(self, orders: Sequence[Order]) -> None:
        """Start these rollouts. A rollout that `load_state` restored from a checkpoint continues where it stopped."""
        ...

    def poll(self, *, wait: bool = True) -> list[RolloutResult]:
        """Return the rollouts that ended since the last call, in the order in which the allocator should be told.

        Args:
            wait: True: if no rollout has ended, wait for a short time. False: return after at most one decoding step.

        Raises:
            BackendDied: the generating process has died, or has not responded for too long.
        """
        ...

    def cancel(self, rollouts: Sequence[int]) -> None:
        """Stop these rollouts soon. `poll` still returns each of them once: cancelled, or complete if it ended before."""
        ...

    def release(self, rollouts: Sequence[int]) -> None:
        """Forget the data of these rollouts."""
        for rollout in rollouts:
            self.generations.pop(rollout, None)  # a rollout without a score has no data

    def load_weights(self, version: int) -> None:
        """Sample all further tokens, also the tokens of running rollouts, with the policy's newest weights.

        Args:
            version: the allocator's version number of these weights.
        """
        ...

    def pause(self) -> None:
        """Prepare for an evaluation, during which the run may be saved."""

    def drain(self) -> list[RolloutResult]:
        """If generating the running rollouts again would cost money, wait for them and return them."""
        return []

    def figures(self) -> dict[str, Any]:
        """The metrics of the rollouts scored since the last call."""
        return self.outcomes.figures()

    def examples(self) -> list[dict[str, Any]]:
        """Some of the rollouts that ended since the last call, as lines of `rollouts.jsonl`, for trackers."""
        return []

    def close(self) -> None:
        """Free the generator. Running rollouts are lost. After a resume, the allocator's `outstanding` lists them."""

    # These functions pack and unpack `generations` for the saved state.
    pack: Callable[..., Any] = staticmethod(pack_generations)
    unpack: Callable[..., Any] = staticmethod(unpack_generations)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The complete state, as plain data and tensors. Running rollouts are not included: they start again on resume."""
        described, tensors = self.pack(list(self.generations.values()))
        return {"generations": described, "stream": None, **self.outcomes.state()}, tensors

    def load_state(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Continue from a state that `state` returned."""
        self.outcomes.load_state(
            {name: value for name, value in state.items() if name not in ("generations", "stream")}
        )
        self.generations = {made.rollout: made for made in self.unpack(state["generations"], tensors)}


class LocalEngine(RolloutEngine):
    """The code that `SyncEngine` and `AsyncEngine` share: scoring, logging and keeping rollouts.

    `behaviour` provides the policy that generates. The file `log` gets one line of JSON per rollout. `examples`
    returns up to `keep` rollouts.
    """

    def __init__(
        self,
        behaviour: Behaviour,
        prompts: EncodedPrompts,
        scorer: Scorer,
        sampling: Sampling,
        seed: int,
        log: Path | None = None,
        keep: int = 0,
    ) -> None:
        self.behaviour, self.policy = behaviour, behaviour.trained
        self.prompts, self.scorer, self.sampling, self.seed = prompts, scorer, sampling, seed
        self._log = RolloutLog(log, keep, sampling.max_new_tokens)
        self.generations: dict[int, Generation] = {}
        self.outcomes = Outcomes()
        self._version = 0
        self._order_of: dict[int, Order] = {}  # for each rollout submitted and not yet returned by `poll`
        self._ended: list[RolloutResult] = []  # results to return at the next `poll`

    def examples(self) -> list[dict[str, Any]]:
        return self._log.taken()

    def cancel(self, rollouts: Sequence[int]) -> None:
        self._cancel_running([rollout for rollout in rollouts if rollout in self._order_of])
        self._ended += [stopped(rollout, self._version) for rollout in rollouts if rollout not in self._order_of]

    def _cancel_running(self, rollouts: Sequence[int]) -> None:
        """Stop rollouts that were submitted and have not been returned."""
        raise NotImplementedError

    def score_samples(
        self, prompts: EncodedPrompts, generations: Sequence[tuple[int, Generation]]
    ) -> Future[list[Outcome]]:
        """Start scoring generations. Each comes with the index of its prompt."""
        texts = prompts.prompt_set
        return self.scorer.submit(
            [
                texts.sample(prompt, one.rollout, self.policy.text(one.tokens), len(one.tokens))
                for prompt, one in generations
            ]
        )

    def _score(self, ended: Sequence[Generation]) -> Future[list[Outcome]]:
        """Start scoring rollouts that ended. Stopped rollouts get no score."""
        if any(generation.cancelled for generation in ended):  # `ended` is either all cancelled or all complete
            no_scores: Future[list[Outcome]] = Future()
            no_scores.set_result([Unscored("stopped")] * len(ended))
            return no_scores
        return self.score_samples(
            self.prompts, [(self._order_of[generation.rollout].prompt, generation) for generation in ended]
        )

    def _finish(self, ended: Sequence[Generation], outcomes: Sequence[Outcome]) -> list[RolloutResult]:
        """Log rollouts, keep those that have a score, and return their results for `poll`."""
        results: list[RolloutResult] = []
        for generation, outcome in zip(ended, outcomes, strict=True):
            order, versions = self._order_of.pop(generation.rollout), generation.spans or ((self._version, 0),)
            result = RolloutResult(
                rollout=generation.rollout,
                outcome=outcome,
                tokens=len(generation.tokens),
                version=versions[0][0],
                last_version=versions[-1][0],
                truncated=generation.truncated,
                cancelled=generation.cancelled,
                uncertainty=uncertainty_of(generation.logprobs),
            )
            if self._log.wanted:
                prompts, text = self.prompts.prompt_set, self.policy.text(generation.tokens)
                asked = prompts.text(order.prompt)
                self._log.add(result, order, prompts.keys[order.prompt], text, versions, prompt=asked)
            if result.is_scored:
                self.generations[generation.rollout] = generation
            results.append(result)
        self._log.flush()
        return results


_Wave = Generator[list[Generation], Iterable[int] | None]


class SyncEngine(LocalEngine):
    """Generates and scores in waves. A wave contains all rollouts that were submitted before a `poll`.

    Rollouts are scored while others are still generated. `poll` returns a wave in the order in which it was submitted, so
    that the allocator's events do not depend on the time that scoring takes. A wave with rollouts of a stage in
    `stopping` is an exception: `poll` returns each rollout after the decoding step in which it ends, so that other
    rollouts can be cancelled.

    Args:
        shared: the arguments of `LocalEngine`.
        stopping: indices of the stages that have a stop rule (`Recipe.stopping`).

    Attributes:
        on_ended: called with the number of rollouts that ended in a decoding step, for a progress display.
    """

    limits = True

    def __init__(self, *shared: Any, stopping: Collection[int] = ()) -> None:
        super().__init__(*shared)
        self._stopping = stopping
        self.on_ended: Callable[[int], None] = lambda count: None
        self._submitted: list[Order] = []
        self._wave: _Wave | None = None
        self._to_cancel: list[int] = []

    @property
    def can_update(self) -> bool:
        return self._wave is None

    def capacity(self) -> int | None:
        return None if self._wave is None else 0

    def submit(self, orders: Sequence[Order]) -> None:
        self._submitted += orders
        self._order_of.update((rollout, order) for order in orders for rollout in order.rollouts)

    def _cancel_running(self, rollouts: Sequence[int]) -> None:
        self._to_cancel += rollouts

    def poll(self, *, wait: bool = True) -> list[RolloutResult]:
        results, self._ended = self._ended, []
        if self._wave is not None:
            to_cancel, self._to_cancel = self._to_cancel, []
            return results + self._scored(self._wave.send(to_cancel))
        if not self._submitted:
            return results
        orders, self._submitted = self._submitted, []
        wave = self._stream(orders)
        if any(order.stage in self._stopping for order in orders):
            self._wave = wave
            return results + self._scored(next(wave))
        self._to_cancel.clear()  # ignored: this wave has no stop rule, so it is generated to its end
        return results + self._whole(wave)

    def load_weights(self, version: int) -> None:
        self._version = version

    def close(self) -> None:
        if self._wave is not None:
            self._wave.close()
        self._wave = None
        self._submitted.clear()
        self._to_cancel.clear()
        self._order_of.clear()

    def _scored(self, ended: list[Generation]) -> list[RolloutResult]:
        """Wait for the scores of rollouts that ended."""
        results = self._finish(ended, self._score(ended).result())
        if not self._order_of:
            self._wave = None
        return results

    def _whole(self, wave: _Wave) -> list[RolloutResult]:
        """Generate a wave to its end. Return its results in the order in which it was submitted."""
        place_of = {rollout: place for place, rollout in enumerate(self._order_of)}
        scoring: list[Scoring] = []
        for ended in wave:
            scoring.append((ended, self._score(ended)))
            self.on_ended(len(ended))
        scored = [each for ended, future in scoring for each in zip(ended, future.result(), strict=True)]
        scored.sort(key=lambda each: place_of[each[0].rollout])
        return self._finish([generation for generation, _ in scored], [outcome for _, outcome in scored])

    def _stream(self, orders: Sequence[Order]) -> _Wave:
        # Joined by prompt, so that they share a prefill.
        rollouts_of: dict[tuple[int, int | None], tuple[int, ...]] = {}
        for order in orders:
            of = order.prompt, order.limit
            rollouts_of[of] = rollouts_of.get(of, ()) + order.rollouts
        return stream(
            self.behaviour.policy().model,
            [
                Request(prompt, self.prompts.tokens[prompt], rollouts, limit)
                for (prompt, limit), rollouts in rollouts_of.items()
            ],
            self.sampling,
            eos_ids=self.policy.eos_ids,
            pad_id=self.policy.pad_id,
            seed=self.seed,
        )
