"""From one batch of a recipe to the next: what the core orders is generated, scored and told, on every process alike.

Each process runs the same core and generates and scores its share of the rollouts; then all of them know all results, so
that all of them decide the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from rollalloc.core.allocator import Allocator
from rollalloc.core.events import Actions, Batch, Cancelled, Event, Order, Row, Updated
from rollalloc.core.recipe import Recipe
from rollalloc.core.table import PromptTable
from rollalloc.drivers.trl.chats import Tokens, decode, encode
from rollalloc.drivers.trl.failures import by_all, uninterrupted
from rollalloc.drivers.trl.features import Blocks
from rollalloc.drivers.trl.generation import Generator
from rollalloc.drivers.trl.keys import check_key, keyed
from rollalloc.drivers.trl.movement import Movement
from rollalloc.drivers.trl.rewards import RewardFunctions, Score
from rollalloc.drivers.trl.turns import Played
from rollalloc.generate.outcomes import event, mostly_unscored, no_scores, tell, uncertainty_of
from rollalloc.generate.sampler import Generation, Request
from rollalloc.rewards.function import Scored
from rollalloc.rules.advantages import GRPO, settled

log = logging.getLogger(__name__)

TRLS_GRPO = GRPO(ddof=1, eps=1e-4)  # what stock TRL divides by with scale_rewards="group"


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """What the driver keeps of a rollout until the core releases it.

    Attributes:
        prompt: index in the data set.
        prompt_tokens: its token ids.
        made: the completion, with its behaviour log-probabilities.
        scores_F: by reward function.
        logged: what reward functions logged for the completions table.
        said: prompt and completion as reward functions got them, text or messages.
        own: True at each token that the model generated, False at those of tools' answers; None: all are the model's.
    """

    prompt: int
    prompt_tokens: Tokens
    made: Generation
    scores_F: list[Score]
    logged: dict[str, Any] = field(default_factory=dict[str, Any])
    said: tuple[Any, Any] = ("", "")
    own: tuple[bool, ...] | None = None

    @property
    def length(self) -> int:
        """Tokens that the model generated."""
        return len(self.made.tokens) if self.own is None else sum(self.own)


_Scored = tuple[list[Rollout], dict[str, list[float]]]  # and what reward functions logged as metrics


class Allocation:
    """A recipe at work in a TRL trainer.

    Args:
        recipe: what to do; advantages that leave the deviation open get TRL's.
        dataset: TRL's training data, one row per prompt.
        rewards: scores completions.
        seed: of prompts and sampling.
        key: column of unique keys, by which prompts are found again in another data set; None: the prompt itself.
        features: of the prompts, by block; or what makes them, when the first batch is due.

    Attributes:
        made: features that were made here, and are saved with the run; None: none, or not yet.
        movement: measures how far each batch moves the weights; None: nobody asks.

    Raises:
        ValueError: more groups in a batch than there are prompts, or a key column that does not tell the rows apart.
    """

    def __init__(
        self,
        recipe: Recipe,
        dataset: Any,
        rewards: RewardFunctions,
        seed: int,
        key: str | None = None,
        features: Blocks | Callable[[], Blocks] | None = None,
    ) -> None:
        recipe = replace(recipe, advantage=settled(recipe.advantage, TRLS_GRPO))
        log.info("advantages: %r", recipe.advantage)
        self._make_features = features if callable(features) else None
        self.made: Blocks | None = None
        self.movement: Movement | None = None
        table = PromptTable(len(dataset), features=None if callable(features) else features)
        self.allocator = Allocator(recipe, table, seed)
        check_key(dataset, key)
        self.dataset, self.rewards, self.key = dataset, rewards, key
        self.rollouts: dict[int, Rollout] = {}
        self.finished: str | None = None
        self.generated: list[Rollout] = []  # since the last batch, trained on, stopped or neither
        self.logged: dict[str, list[float]] = {}  # by reward functions, since the last batch
        self.failed = 0  # rollouts without a score since the last batch

    def next_batch(self, trainer: Any, generate: Generator) -> Batch | None:
        """Generate until the core returns a batch; None where the run is over, and `finished` says why.

        Raises:
            NoScores: it is over for want of scores.
        """
        self.generated, self.logged, self.failed, self.finished = [], {}, 0, None
        self.prepare()
        actions = self.allocator.outstanding()  # what an error or Ctrl-C broke off is generated again
        while True:
            if actions.generate or actions.cancel:
                self._roll_out(trainer, generate, actions)
            # A batch may have been returned while rollouts still ran, or never have been trained.
            if batch := self.allocator.batch:
                if self.movement is not None:
                    self.movement.begin(batch, self.rollouts_of(batch.rows))
                return batch
            if actions.finished:
                if self.allocator.scoreless():
                    raise no_scores(mostly_unscored(actions.finished, self.rewards.unscored.reason))
                self.finished = actions.finished
                return None
            actions = self._ask()

    def prepare(self, saved: Blocks | None = None) -> None:
        """Before anything is drawn: make the features that are to be made, or take those that were saved."""
        if self._make_features is None or (self.made is not None and saved is None):
            return
        made, core = self._make_features() if saved is None else saved, self.allocator
        with uninterrupted():
            self.allocator = Allocator(core.recipe, PromptTable(len(self.dataset), features=made), core.seed)
            self.made = made

    @cached_property
    def keys(self) -> dict[str, Any]:
        """What finds the prompts again, made for the first checkpoint: a long data set takes its time."""
        return keyed(self.dataset, self.key).state_dict()

    def trained(self) -> None:
        """The optimizer went over the outstanding batch: the weights have a new version."""
        if batch := self.allocator.batch:
            moved = None if self.movement is None else self.movement.end()
            self._tell([Updated(batch.version + 1, moved)])

    def rollouts_of(self, rows: Iterable[Row]) -> list[Rollout]:
        """What is kept of the rollouts of these rows."""
        return [self.rollouts[row.rollout] for row in rows]

    # ---------------------------------------------------------------------------------------------------------- rollouts

    def _ask(self, capacity: int | None = None) -> Actions:
        with uninterrupted():
            actions = self.allocator.ask(capacity)
            for rollout in actions.release:
                self.rollouts.pop(rollout, None)  # a rollout without a score has none
        return actions

    def _tell(self, events: Sequence[Event]) -> None:
        with uninterrupted():
            tell(self.allocator, events, self.rewards.remedy)

    def _roll_out(self, trainer: Any, generate: Generator, actions: Actions) -> None:
        """Generate and score what is ordered and tell the core; every process tells the same.

        Where a stage has a stop rule and the generator can stop rollouts, those that end are told at once, and the core is
        asked what to stop before generation goes on.
        """
        self._tell([Cancelled(rollout, 0) for rollout in actions.cancel])
        processes, me = trainer.accelerator.num_processes, trainer.accelerator.process_index
        mine = _share(actions.generate, me, processes)
        prompt_of = {rollout: order.prompt for order in mine for rollout in order.rollouts}
        if (turns := generate.turns) is not None:
            rows = [self.dataset[prompt] for prompt in prompt_of.values()]
            self._take(by_all(lambda: self._score(trainer, prompt_of, *turns(list(prompt_of), rows))))
            return
        prompts = list(dict.fromkeys(order.prompt for order in mine))
        asked = dict(zip(prompts, [self.dataset[prompt]["prompt"] for prompt in prompts], strict=True))
        tokens_of = dict(zip(prompts, encode(trainer, list(asked.values())), strict=True))
        requests = [Request(prompt, tokens_of[prompt], rollouts) for prompt, rollouts in _by_prompt(mine).items()]
        running = len(prompt_of)

        def scored(made: Sequence[Generation]) -> _Scored:
            of = [prompt_of[each.rollout] for each in made]
            texts = decode(
                trainer,
                [asked[at] for at in of],
                [(tokens_of[at], each.tokens) for at, each in zip(of, made, strict=True)],
            )
            played = [
                Played(asked[at], tokens_of[at], each, text) for at, each, text in zip(of, made, texts, strict=True)
            ]
            return self._score(trainer, prompt_of, played, {})

        def on_finished(ended: list[Generation]) -> tuple[int, ...]:
            nonlocal running
            running -= len(ended)
            with torch.inference_mode(False):  # reward functions are the user's and may compute what they like
                self._take([scored(ended)])
            return self._ask(capacity=0).cancel if running else ()  # where nothing runs, the loop asks next

        if generate.can_stop and any(order.stage in self.allocator.recipe.stopping for order in actions.generate):
            generate.stream(requests, on_finished)
        else:
            self._take(by_all(lambda: scored(generate(requests))))

    def _take(self, shares: Sequence[_Scored]) -> None:
        """Tell the core what ended in every process."""
        for _, figures in shares:
            for name, values in figures.items():
                self.logged.setdefault(name, []).extend(values)
        everything = sorted((each for ended, _ in shares for each in ended), key=lambda each: each.made.rollout)
        self._tell([self._kept(rollout) for rollout in everything])

    def _score(
        self,
        trainer: Any,
        prompt_of: Mapping[int, int],
        played: Sequence[Played],
        figures: dict[str, list[float]],
    ) -> _Scored:
        """With their scores, and what reward functions logged, beside other figures; what was stopped has no scores."""
        of = [prompt_of[each.made.rollout] for each in played]
        if not played or played[0].made.cancelled:  # those are handed over by themselves
            return [
                Rollout(at, each.prompt_tokens, each.made, []) for at, each in zip(of, played, strict=True)
            ], figures
        rows = {prompt: self.dataset[prompt] for prompt in dict.fromkeys(of)}
        scored = self.rewards(
            [rows[at] | {"prompt": each.prompt} for at, each in zip(of, played, strict=True)],
            [each.completion for each in played],
            [list(each.made.tokens) for each in played],
            trainer.state,
            None if played[0].environment is None else [each.environment for each in played],
        )
        return [
            Rollout(
                prompt,
                each.prompt_tokens,
                each.made,
                scores_F,
                {column: values[at] for column, values in scored.columns.items()},
                (each.prompt, each.completion),
                each.own,
            )
            for at, (prompt, each, scores_F) in enumerate(zip(of, played, scored.scores_BF, strict=True))
        ], figures | scored.figures

    def _kept(self, rollout: Rollout) -> Event:
        """Keep a rollout, unless it has no score, and say what happened to it."""
        made, tokens = rollout.made, rollout.length
        self.generated.append(rollout)
        outcome = self.rewards.unscored if made.cancelled else self.rewards.outcome(rollout.scores_F)
        if isinstance(outcome, Scored):
            self.rollouts[made.rollout] = rollout
        elif not made.cancelled:
            self.failed += 1
        version, cut = self.allocator.version, made.truncated
        own_T = made.logprobs if rollout.own is None else made.logprobs[list(rollout.own)]
        how = {"truncated": cut, "cancelled": made.cancelled, "uncertainty": uncertainty_of(own_T)}
        return event(made.rollout, outcome, tokens, version, **how)


def idle_rollout(eos_ids: Tokens) -> Rollout:
    """Something for the model to read where there is nothing to train on."""
    end = eos_ids[:1]
    return Rollout(0, end, Generation(-1, end, np.zeros(1, np.float32), truncated=False), [])


def _share(orders: Sequence[Order], process: int, processes: int) -> list[Order]:
    """The rollouts that a process generates: neighbours, so that those of a prompt share a prefill."""
    flat = [(order, rollout) for order in orders for rollout in order.rollouts]
    bounds = np.linspace(0, len(flat), processes + 1).astype(int)
    return [order._replace(rollouts=(rollout,)) for order, rollout in flat[bounds[process] : bounds[process + 1]]]


def _by_prompt(orders: Iterable[Order]) -> dict[int, tuple[int, ...]]:
    found: dict[int, list[int]] = {}
    for order in orders:
        found.setdefault(order.prompt, []).extend(order.rollouts)
    return {prompt: tuple(rollouts) for prompt, rollouts in found.items()}
