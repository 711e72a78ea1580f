"""The asynchronous engine's rollouts, scored by reward functions in TRL's signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rollalloc.core.allocator import Allocator
from rollalloc.core.events import Actions, Order
from rollalloc.data.prompts import EncodedPrompts, PromptSet
from rollalloc.drivers.trl.allocation import Allocation, Rollout
from rollalloc.drivers.trl.chats import Tokens, decode
from rollalloc.experimental.trl_async.judge import Judge
from rollalloc.generate.sampler import Generation
from rollalloc.generate.stream.begin import begin
from rollalloc.generate.stream.streamer import Streamer
from rollalloc.models.behaviour import Behaviour
from rollalloc.models.policy import Policy
from rollalloc.rewards.function import Outcome, Scored
from rollalloc.train.settings import Settings

_NO_SET = PromptSet((), (), (), (), ())  # the reward functions see the data set's own rows


@dataclass(frozen=True, slots=True)
class Chat:
    """What makes token ids of prompts and text of completions, for `rollalloc.drivers.trl.chats`.

    Attributes:
        processing_class: the tokenizer.
        chat_template_kwargs: TRL's setting.
        chat_template: None: the tokenizer's own.
    """

    processing_class: Any
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    chat_template: str | None = None


class Roller(Streamer):
    """What an allocation orders is generated, scored and told; its payloads are the allocation's.

    Args:
        allocation: the recipe at work.
        judge: scores, beside generation.
        policy: that generates, with a model of its own.
        tokens: token ids of each prompt.
        settings: how to sample and to stream.
        chat: makes text of tokens.
        state: gives TRL's `trainer_state` for the reward functions.
    """

    def __init__(
        self,
        allocation: Allocation,
        judge: Judge,
        policy: Policy,
        tokens: tuple[Tokens, ...],
        settings: Settings,
        chat: Chat,
        state: Callable[[], Any],
    ) -> None:
        behaviour = Behaviour(policy, "float32")
        super().__init__(
            behaviour,
            EncodedPrompts(_NO_SET, tokens),
            judge,
            settings.sampling,
            settings.seed,
            begin=begin(
                behaviour,
                tokens,
                settings.sampling,
                settings.streaming,
                seed=settings.seed,
                limit_s=settings.generator_limit_s,
            ),
            streaming=settings.streaming,
        )
        self.remedy = allocation.rewards.remedy
        self.allocation, self._judge, self._chat, self._trainer_state = allocation, judge, chat, state
        # Of rollouts that are scored and not told yet; written beside everything else, so that it goes by single entries.
        self._scored: dict[int, Rollout] = {}
        self._figures: dict[int, dict[str, list[float]]] = {}  # what functions logged, with the first of those scored

    def submit(self, prompts: EncodedPrompts, made: Sequence[tuple[int, Generation]]) -> Future[list[Outcome]]:
        """Begin to score what was generated."""
        return self._judge.submit(lambda: self._judged(prompts.tokens, made))

    def tell(
        self,
        ended: Sequence[Generation],
        outcomes: Sequence[Outcome],
        order_of: Mapping[int, Order],
        allocator: Allocator,
    ) -> None:
        """As every engine's; and what the driver keeps of a rollout is kept."""
        allocation = self.allocation
        super().tell(ended, outcomes, order_of, allocator)
        for made, outcome in zip(ended, outcomes, strict=True):
            prompt = order_of[made.rollout].prompt
            unscored = Rollout(prompt, self.prompts.tokens[prompt], made, [None] * len(allocation.rewards.names))
            rollout = self._scored.pop(made.rollout, unscored)
            allocation.generated.append(rollout)
            for name, values in self._figures.pop(made.rollout, {}).items():
                allocation.logged.setdefault(name, []).extend(values)
            if isinstance(outcome, Scored):
                allocation.rollouts[made.rollout] = rollout
            elif not made.cancelled:
                allocation.failed += 1

    def release(self, actions: Actions) -> None:
        super().release(actions)
        for rollout in actions.release:
            self.allocation.rollouts.pop(rollout, None)

    def _judged(self, tokens: Sequence[Tokens], made: Sequence[tuple[int, Generation]]) -> list[Outcome]:
        """Call the reward functions; runs beside everything else."""
        allocation = self.allocation
        rows = {prompt: allocation.dataset[prompt] for prompt, _ in made}
        asked = [rows[prompt]["prompt"] for prompt, _ in made]
        texts = decode(self._chat, asked, [(tokens[prompt], each.tokens) for prompt, each in made])
        examples = [dict(rows[prompt]) for prompt, _ in made]
        scored = allocation.rewards(examples, texts, [list(each.tokens) for _, each in made], self._trainer_state())
        self._figures[made[0][1].rollout] = scored.figures
        outcomes: list[Outcome] = []
        for at, (prompt, each) in enumerate(made):
            scores_F = scored.scores_BF[at]
            logged = {column: values[at] for column, values in scored.columns.items()}
            self._scored[each.rollout] = Rollout(prompt, tokens[prompt], each, scores_F, logged, (asked[at], texts[at]))
            outcomes.append(allocation.rewards.outcome(scores_F))
        return outcomes
