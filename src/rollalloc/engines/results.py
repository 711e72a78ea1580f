"""What came of rollouts: scored, told to the allocator, written down, and held until they are released."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rollalloc.core.allocator import Allocator, MetricError
from rollalloc.core.events import Actions, Cancelled, Done, Event, Failed, Order
from rollalloc.core.packing import exact_keys
from rollalloc.data.prompts import EncodedPrompts
from rollalloc.engines import checkpoint
from rollalloc.engines.policy import Policy
from rollalloc.engines.sampler import Generation
from rollalloc.engines.sampling import Sampling
from rollalloc.rewards.function import Outcome, Sample, Scored, Unscored
from rollalloc.rewards.scorers import Scorer

_REASONS = 20  # told apart in the metrics: an exception may quote the completion, so that each is another
_OTHER_REASONS = "other reasons"
_HOW_TO_SET_IT = (
    'The reward function sets it beside the reward: return {"score": reward, "acc": 1.0 if right else 0.0}. Once it does, '
    "the run can be resumed (--resume)"
)
_QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


class Rollouts:
    """What an allocator orders, however it is generated: the part that is the same for every engine.

    Args:
        policy: generates.
        prompts: what the orders' prompts are.
        scorer: rewards.
        sampling: how.
        seed: of the run.
        log: file that gets a line of JSON a rollout; None: none.

    Attributes:
        generations: by rollout, those that have a score and are not released.
        unscored: rollouts without a score by reason, since the run began.
    """

    def __init__(
        self,
        policy: Policy,
        prompts: EncodedPrompts,
        scorer: Scorer,
        sampling: Sampling,
        seed: int,
        log: Path | None = None,
    ) -> None:
        self.policy, self.prompts, self.scorer, self.sampling, self.seed = policy, prompts, scorer, sampling, seed
        self.log = log
        self.generations: dict[int, Generation] = {}
        self.unscored: dict[str, int] = {}
        # Reward, metric, truncated and tokens of each rollout scored since the last batch:
        self._waves: list[tuple[float, float, bool, int]] = []

    def advance(self, allocator: Allocator) -> Actions:
        """Ask, and have the orders carried out; in the end there is a batch, the run is over, or there is more to ask."""
        raise NotImplementedError

    def go_on(self, allocator: Allocator) -> None:
        """Called now and then while a batch is evaluated and trained: a moment to go on with what comes next."""

    def updated(self, weights: Mapping[str, Tensor], version: int) -> None:
        """The weights changed, as the allocator was told."""

    def close(self) -> None:
        """The run pauses or ends; what is being generated is lost, and ordered again should it go on."""

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
        """What was scored since the last call, trained on or not: a filtered mean would mislead."""
        waves, self._waves = self._waves, []
        if not waves:
            return {"reward_mean": None, "metric_mean": None, "truncated": None, "lengths": None}
        reward_R, metric_R, truncated_R, tokens_R = np.array(waves, np.float64).T
        return {
            "reward_mean": float(reward_R.mean()),
            "metric_mean": float(metric_R.mean()),
            "truncated": float(truncated_R.mean()),
            "lengths": {
                "count": len(waves),
                "truncated": int(truncated_R.sum()),
                "quantiles": np.quantile(tokens_R, _QUANTILES).tolist(),
            },
        }

    def commonest_failure(self) -> str | None:
        """Why most of the rollouts without a score have none; None where all have one."""
        told_apart = {reason: count for reason, count in self.unscored.items() if reason != _OTHER_REASONS}
        return max(told_apart, key=told_apart.__getitem__, default=None)

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
        """Say what happened to each, and keep what has a score."""
        now = ((allocator.version, 0),)
        self._write(ended, outcomes, order_of, now)
        events: list[Event] = []
        for made, outcome in zip(ended, outcomes, strict=True):
            tokens = len(made.tokens)
            if made.cancelled:
                events.append(Cancelled(made.rollout, tokens))
            elif isinstance(outcome, Scored):
                self.generations[made.rollout] = made
                self._waves.append((outcome.reward, outcome.metric, made.truncated, tokens))
                first, last = (made.spans or now)[0][0], (made.spans or now)[-1][0]
                done = Done(made.rollout, outcome.reward, outcome.metric, tokens, first, last, made.truncated)
                events.append(done)
            else:
                self._count_unscored(outcome.reason)
                events.append(Failed(made.rollout, outcome.reason, tokens))
        try:
            allocator.tell(events)
        except MetricError as error:
            raise MetricError(f"{error}. {_HOW_TO_SET_IT}") from None

    def _count_unscored(self, reason: str) -> None:
        if reason not in self.unscored and len(self.unscored) >= _REASONS:
            reason = _OTHER_REASONS
        self.unscored[reason] = self.unscored.get(reason, 0) + 1

    def _write(
        self,
        ended: Sequence[Generation],
        outcomes: Sequence[Outcome],
        order_of: Mapping[int, Order],
        now: tuple[tuple[int, int], ...],
    ) -> None:
        if self.log is None:
            return
        with self.log.open("a", encoding="utf-8") as file:
            for made, outcome in zip(ended, outcomes, strict=True):
                order = order_of[made.rollout]
                scored, reason = (outcome, None) if isinstance(outcome, Scored) else (None, outcome.reason)
                line = {
                    "rollout": made.rollout,
                    "prompt": order.prompt,
                    "key": self.prompts.prompt_set.keys[order.prompt],
                    "group": order.group,
                    "stage": order.stage,
                    "version": (made.spans or now)[0][0],
                    **({"versions": made.spans} if len(made.spans) > 1 else {}),
                    "reward": scored and scored.reward,
                    "metric": scored and scored.metric,
                    "tokens": len(made.tokens),
                    "truncated": made.truncated,
                    "unscored": reason,
                    "text": self.policy.text(made.tokens),
                }
                file.write(json.dumps(line) + "\n")
