"""Rollouts: carrying out the allocator's orders, and holding what came of them until it is released."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import Tensor

from rollalloc.core.allocator import Allocator, MetricError
from rollalloc.core.events import Actions, Cancelled, Done, Event, Failed, Order
from rollalloc.data.prompts import EncodedPrompts
from rollalloc.engines import checkpoint
from rollalloc.engines.behaviour import Behaviour
from rollalloc.engines.outcomes import HOW_TO_SET_THE_METRIC, Outcomes, RolloutLog
from rollalloc.engines.sampler import Generation, Request, stream
from rollalloc.engines.sampling import Sampling
from rollalloc.rewards.function import Outcome, Sample, Scored, Unscored
from rollalloc.rewards.scorers import Scorer


class Roller:
    """Generates and scores what an allocator orders.

    Args:
        behaviour: gives the policy that generates.
        prompts: what the orders' prompts are.
        scorer: rewards.
        sampling: how.
        seed: of the run.
        log: file that gets a line of JSON a rollout; None: none.

    Attributes:
        generations: by rollout, those that have a score and are not released.
        outcomes: what came of all rollouts.
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

    def carry_out(self, actions: Actions, allocator: Allocator) -> None:
        """Release, generate and score what the actions say, and tell the allocator what happened.

        Rollouts are scored while others are still generated, and told in the order in which they were ordered: what the
        allocator hears does not depend on how long a score takes. Where a stage has a stop rule, what ended is told and the
        core is asked what to stop before generation goes on; a batch that it returns then is the allocator's `batch`.
        """
        self._release(actions)
        allocator.tell([Cancelled(rollout, 0) for rollout in actions.cancel])
        if not actions.generate:
            return
        order_of = {rollout: order for order in actions.generate for rollout in order.rollouts}
        stops = any(order.stage in allocator.recipe.stopping for order in actions.generate)
        scoring: list[tuple[list[Generation], Future[list[Outcome]]]] = []
        running = len(order_of)

        def on_finished(ended: list[Generation]) -> tuple[int, ...]:
            nonlocal running
            running -= len(ended)
            scoring.append((ended, self._submit(ended, order_of)))
            return stop() if stops else ()

        def stop() -> tuple[int, ...]:
            [(ended, future)] = scoring
            scoring.clear()
            self._tell(ended, future.result(), order_of, allocator)
            if not running:  # the loop asks next
                return ()
            meanwhile = allocator.ask(capacity=0)
            self._release(meanwhile)
            return meanwhile.cancel

        requests = [
            Request(order.prompt, self.prompts.tokens[order.prompt], order.rollouts)
            for order in _joined(actions.generate)
        ]
        stream(
            self.behaviour.policy().model,
            requests,
            self.sampling,
            on_finished,
            eos_ids=self.policy.eos_ids,
            pad_id=self.policy.pad_id,
            seed=self.seed,
        )
        place_of = {rollout: place for place, rollout in enumerate(order_of)}
        ended = [each for generations, future in scoring for each in zip(generations, future.result(), strict=True)]
        ended.sort(key=lambda each: place_of[each[0].rollout])
        self._tell([made for made, _ in ended], [outcome for _, outcome in ended], order_of, allocator)

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

    def drain(self, allocator: Allocator) -> None:
        """Nothing: what was begun here has ended when `carry_out` returns."""

    def capacity(self) -> int | None:
        """How many rollouts may be begun: any number, they wait their turn."""
        return None

    # --------------------------------------------------------------------------------------------- saving and loading

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Everything, as plain data and tensors."""
        described, tensors = checkpoint.pack_generations(list(self.generations.values()))
        return {"generations": described, **self.outcomes.state()}, tensors

    def load_state(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave.

        Raises:
            ValueError: keys missing or unknown.
        """
        self.outcomes.load_state({name: value for name, value in state.items() if name != "generations"})
        held = checkpoint.unpack_generations(state["generations"], tensors)
        self.generations = {made.rollout: made for made in held}

    # --------------------------------------------------------------------------------------------------------- scoring

    def _release(self, actions: Actions) -> None:
        for rollout in actions.release:
            self.generations.pop(rollout, None)  # a rollout without a score has none

    def _submit(self, ended: Sequence[Generation], order_of: Mapping[int, Order]) -> Future[list[Outcome]]:
        """Begin to score what was generated; what was stopped has no score."""
        if any(made.cancelled for made in ended):  # those are handed over in a call of their own
            stopped: Future[list[Outcome]] = Future()
            stopped.set_result([Unscored("stopped")] * len(ended))
            return stopped
        return self.submit(self.prompts, [(order_of[made.rollout].prompt, made) for made in ended])

    def _tell(
        self,
        ended: Sequence[Generation],
        outcomes: Sequence[Outcome],
        order_of: Mapping[int, Order],
        allocator: Allocator,
    ) -> None:
        """Say what happened to each, and keep what has a score."""
        version = allocator.version
        self._write(ended, outcomes, order_of, version)
        events: list[Event] = []
        for made, outcome in zip(ended, outcomes, strict=True):
            tokens = len(made.tokens)
            if made.cancelled:
                events.append(Cancelled(made.rollout, tokens))
                continue
            self.outcomes.add(outcome, truncated=made.truncated, tokens=tokens)
            if isinstance(outcome, Scored):
                self.generations[made.rollout] = made
                done = Done(made.rollout, outcome.reward, outcome.metric, tokens, version, truncated=made.truncated)
                events.append(done)
            else:
                events.append(Failed(made.rollout, outcome.reason, tokens))
        try:
            allocator.tell(events)
        except MetricError as error:
            raise MetricError(f"{error}. {HOW_TO_SET_THE_METRIC}") from None

    def _write(
        self, ended: Sequence[Generation], outcomes: Sequence[Outcome], order_of: Mapping[int, Order], version: int
    ) -> None:
        if not self._log.wanted:
            return
        for made, outcome in zip(ended, outcomes, strict=True):
            order = order_of[made.rollout]
            self._log.add(
                made.rollout,
                order,
                self.prompts.prompt_set.keys[order.prompt],
                version,
                outcome,
                tokens=len(made.tokens),
                truncated=made.truncated,
                text=self.policy.text(made.tokens),
            )
        self._log.flush()


def _joined(orders: Sequence[Order]) -> Iterator[Order]:
    """Orders of the same prompt as one, so that they share a prefill."""
    by_group: dict[int, Order] = {}
    for order in orders:
        before = by_group.get(order.group)
        by_group[order.group] = order if before is None else before._replace(rollouts=before.rollouts + order.rollouts)
    yield from by_group.values()
