"""Rollouts: carrying out the allocator's orders, and holding what came of them until it is released."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from rollalloc.core.allocator import Allocator
from rollalloc.core.events import Actions, Cancelled, Done, Event, Failed, Order
from rollalloc.core.packing import exact_keys
from rollalloc.data.prompts import EncodedPrompts
from rollalloc.engines import checkpoint
from rollalloc.engines.policy import Policy
from rollalloc.engines.sampler import Generation, Request, Sampling, generate, stream
from rollalloc.rewards.function import Outcome, Sample, Scored
from rollalloc.rewards.scorers import Scorer

_REASONS = 20  # told apart in the metrics: an exception may quote the completion, so that each is another
_OTHER_REASONS = "other reasons"


class Roller:
    """Generates and scores what an allocator orders.

    Args:
        policy: generates.
        prompts: what the orders' prompts are.
        scorer: rewards.
        sampling: how.
        seed: of the run.

    Attributes:
        generations: by rollout, those that have a score and are not released.
        unscored: rollouts without a score by reason, since the run began.
    """

    def __init__(self, policy: Policy, prompts: EncodedPrompts, scorer: Scorer, sampling: Sampling, seed: int) -> None:
        self.policy, self.prompts, self.scorer, self.sampling, self.seed = policy, prompts, scorer, sampling, seed
        self.generations: dict[int, Generation] = {}
        self.unscored: dict[str, int] = {}
        self._waves: list[tuple[float, float, bool]] = []  # reward, metric, truncated of rollouts since the last batch

    def carry_out(self, actions: Actions, allocator: Allocator) -> None:
        """Release, generate and score what the actions say, and tell the allocator what happened.

        Where a stage has a stop rule, what ended is told and the core is asked what to stop while the rest is generated; a
        batch that it returns then stays `outstanding`.
        """
        self._release(actions)
        events: list[Event] = [Cancelled(rollout, 0) for rollout in actions.cancel]
        orders = list(_joined(actions.generate))
        prompt_of = {rollout: order.prompt for order in orders for rollout in order.rollouts}
        requests = [Request(order.prompt, self.prompts.tokens[order.prompt], order.rollouts) for order in orders]
        if all(allocator.recipe.stages[order.stage].stop is None for order in orders):
            made = sample(self.policy, requests, self.sampling, self.seed)
            allocator.tell(events + self._scored(made, prompt_of, allocator.version))
            return
        allocator.tell(events)
        running = len(prompt_of)

        def on_finished(ended: list[Generation]) -> tuple[int, ...]:
            nonlocal running
            running -= len(ended)
            allocator.tell(self._scored(ended, prompt_of, allocator.version))
            if not running:  # the loop asks next
                return ()
            meanwhile = allocator.ask(capacity=0)
            self._release(meanwhile)
            return meanwhile.cancel

        stream(
            self.policy.model,
            requests,
            self.sampling,
            on_finished,
            eos_ids=self.policy.eos_ids,
            pad_id=self.policy.pad_id,
            seed=self.seed,
        )

    def figures(self) -> dict[str, float | None]:
        """Means over everything generated since the last call, trained on or not: a filtered mean would mislead."""
        waves, self._waves = self._waves, []
        if not waves:
            return {"reward_mean": None, "metric_mean": None, "truncated": None}
        means = np.mean(np.array(waves, np.float64), axis=0).tolist()
        return dict(zip(("reward_mean", "metric_mean", "truncated"), means, strict=True))

    # --------------------------------------------------------------------------------------------- saving and loading

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Everything, as plain data and tensors."""
        described, tensors = checkpoint.pack_generations(list(self.generations.values()))
        return {"generations": described, "waves": self._waves, "unscored": dict(self.unscored)}, tensors

    def load_state(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave.

        Raises:
            ValueError: keys missing or unknown.
        """
        exact_keys(state, ("generations", "waves", "unscored"), "rollouts")
        held = checkpoint.unpack_generations(state["generations"], tensors)
        self.generations = {made.rollout: made for made in held}
        self._waves, self.unscored = list(state["waves"]), dict(state["unscored"])

    # --------------------------------------------------------------------------------------------------------- scoring

    def _release(self, actions: Actions) -> None:
        for rollout in actions.release:
            self.generations.pop(rollout, None)  # a rollout without a score has none

    def _scored(self, generations: Sequence[Generation], prompt_of: dict[int, int], version: int) -> list[Event]:
        """Score what was generated, keep what has a score, and say what happened to each."""
        events: list[Event] = [Cancelled(made.rollout, len(made.tokens)) for made in generations if made.cancelled]
        ended = [made for made in generations if not made.cancelled]
        outcomes = score(
            self.scorer, self.policy, self.prompts, [(prompt_of[made.rollout], made.tokens) for made in ended]
        )
        for made, outcome in zip(ended, outcomes, strict=True):
            tokens = len(made.tokens)
            if isinstance(outcome, Scored):
                self.generations[made.rollout] = made
                self._waves.append((outcome.reward, outcome.metric, made.truncated))
                done = Done(made.rollout, outcome.reward, outcome.metric, tokens, version, truncated=made.truncated)
                events.append(done)
            else:
                self._count_unscored(outcome.reason)
                events.append(Failed(made.rollout, outcome.reason, tokens))
        return events

    def _count_unscored(self, reason: str) -> None:
        if reason not in self.unscored and len(self.unscored) >= _REASONS:
            reason = _OTHER_REASONS
        self.unscored[reason] = self.unscored.get(reason, 0) + 1


def sample(policy: Policy, requests: Sequence[Request], sampling: Sampling, seed: int) -> list[Generation]:
    """Sample every requested rollout of a policy to its end, in the order requested."""
    return generate(policy.model, requests, sampling, eos_ids=policy.eos_ids, pad_id=policy.pad_id, seed=seed)


def score(
    scorer: Scorer, policy: Policy, prompts: EncodedPrompts, completions: Sequence[tuple[int, Sequence[int]]]
) -> list[Outcome]:
    """The outcome of each completion, given as (prompt, its tokens)."""
    given = prompts.prompt_set
    return scorer.score(
        [
            Sample(
                data_source=given.sources[prompt],
                completion=policy.text(tokens),
                ground_truth=given.ground_truths[prompt],
                extra_info=given.extra_infos[prompt],
                tokens=len(tokens),
                name=given.keys[prompt],
            )
            for prompt, tokens in completions
        ]
    )


def _joined(orders: Sequence[Order]) -> Iterator[Order]:
    """Orders of the same prompt as one, so that they share a prefill."""
    by_group: dict[int, Order] = {}
    for order in orders:
        before = by_group.get(order.group)
        by_group[order.group] = order if before is None else replace(before, rollouts=before.rollouts + order.rollouts)
    yield from by_group.values()
