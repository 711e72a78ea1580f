"""What came of rollouts: scored, told to the allocator, written down, and held until they are released."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from rollalloc.core.allocator import Allocator
from rollalloc.core.events import Actions, Event, Order
from rollalloc.core.latency import Curve
from rollalloc.data.prompts import EncodedPrompts
from rollalloc.generate.outcomes import SCORE_AND_ACC, Outcomes, RolloutLog, event, tell, uncertainty_of
from rollalloc.generate.sampler import Generation, pack_generations, unpack_generations
from rollalloc.generate.sampling import Sampling
from rollalloc.models.behaviour import Behaviour
from rollalloc.rewards.function import Outcome, Sample, Scored, Unscored
from rollalloc.rewards.scorers import Scorer

Scoring = tuple[list[Generation], Future[list[Outcome]]]  # what is being scored


class Rolls(Protocol):
    """Carries out orders, and holds what came of them.

    Attributes:
        generations: by rollout, the payloads that the update needs and that are not released.
        outcomes: what came of all rollouts.
    """

    generations: Any
    outcomes: Outcomes

    def advance(self, allocator: Allocator) -> Actions:
        """Ask, and have the orders carried out; in the end there is a batch, the run is over, or there is more to ask."""
        ...

    def go_on(self, allocator: Allocator) -> None:
        """Called now and then while a batch is trained: a moment to go on with what comes next."""

    def before_evaluation(self, allocator: Allocator) -> None:
        """Called before the weights are evaluated; the run may be stopped and saved while they are."""
        self.go_on(allocator)

    def updated(self, version: int) -> None:
        """The weights changed, as the allocator was told."""

    def latency(self) -> Curve | None:
        """How fast it decodes; None where it does not measure that."""
        return None

    def figures(self) -> dict[str, Any]:
        """What was scored since the last call, and how."""
        ...

    def drain(self, allocator: Allocator) -> None:
        """Let what is under way end, and tell it, where it would be paid twice."""

    def close(self) -> None:
        """The run pauses or ends."""

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Everything, as plain data and tensors."""
        ...

    def load_state(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave."""


class Rollouts(Rolls):
    """What an allocator orders, however it is generated: the part that is the same for every engine.

    `behaviour` gives the policy that generates; the file `log` gets a line of JSON a rollout.

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
        """Say what happened to each, and keep what has a score."""
        now = ((allocator.version, 0),)
        self.write(ended, outcomes, order_of, now)
        events: list[Event] = []
        for made, outcome in zip(ended, outcomes, strict=True):
            tokens, spans, cut = len(made.tokens), made.spans or now, made.truncated
            first, last = spans[0][0], spans[-1][0]
            how = {"truncated": cut, "cancelled": made.cancelled, "uncertainty": uncertainty_of(made.logprobs)}
            events.append(event(made.rollout, outcome, tokens, first, last, **how))
            if made.cancelled:
                continue
            self.outcomes.add(outcome, truncated=cut, tokens=tokens)
            if isinstance(outcome, Scored):
                self.generations[made.rollout] = made
        tell(allocator, events, self.remedy)

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
