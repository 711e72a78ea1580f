"""Produces batches: generates and scores the rollouts that the core orders, and reports them to the core.

Every process has its own copy of the core. Each process generates and scores a share of the rollouts. Then the processes
exchange their results, and all report them in the same order, so that all copies make the same decisions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from rollalloc.core.allocator import Allocator
from rollalloc.core.events import Actions, Batch, Cancelled, Moved, Order, Row, Updated
from rollalloc.core.prompts import PromptTable
from rollalloc.core.recipe import Recipe, doubts
from rollalloc.drivers.trl.dataset import Blocks, check_key, keyed, rows_of
from rollalloc.drivers.trl.distributed import by_all, uninterrupted
from rollalloc.drivers.trl.generation import Generator
from rollalloc.drivers.trl.movement import Movement, moved_share
from rollalloc.drivers.trl.rewards import RewardFunctions
from rollalloc.drivers.trl.rollout import Rollout, decode, encode
from rollalloc.drivers.trl.tensors import counts
from rollalloc.generate.outcomes import RolloutResult, mostly_unscored, no_scores, tell, uncertainty_of
from rollalloc.generate.sampler import Generation, Request
from rollalloc.rules.advantages import GRPO, settled

log = logging.getLogger(__name__)

TRLS_GRPO = GRPO(ddof=1, eps=1e-4)  # stock TRL's standard deviation with scale_rewards="group"


_Scored = tuple[list[Rollout], dict[str, list[float]]]  # rollouts, and the metrics that reward functions logged


class Allocation:
    """The state of a recipe in a TRL trainer: the core, and the data of the rollouts that the core still needs.

    Args:
        recipe: the recipe. If its advantage rule uses the kernel `grpo`, `TRLS_GRPO` replaces this kernel.
        dataset: TRL's training data, one row per prompt.
        rewards: scores completions.
        seed: seed for drawing prompts and for sampling.
        key: name of a column of unique keys, by which a resumed run finds its prompts in a changed data set. None: prompts
            are matched by their content.
        features: the prompts' features by block, or a function that computes the features before the first batch.

    Attributes:
        made: features that the function `features` returned. They are saved with the run. None: nothing was computed.
        movement: measures how far each batch moves the weights. None if the recipe does not read this distance.
        rollouts: the rollouts that the core has not released, by id.
        moved: with a gate on replay, the share of the replayed rows' tokens that had moved in the last batch; else None.
        masked: rollouts of the last batch that the loss leaves out as truncated.
        finished: why the recipe ended; None while it runs.
        generated: number of rollouts generated since the last batch, including those that are not trained on.
        logged: metrics that reward functions logged since the last batch.
        failed: number of rollouts without a score since the last batch.

    Raises:
        ValueError: a batch has more groups than there are prompts, or the key column has duplicates.
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
        for doubt in doubts(recipe):
            log.warning(doubt)
        self._make_features = features if callable(features) else None
        self.made: Blocks | None = None
        self.movement: Movement | None = None
        self.moved: float | None = None
        self.masked: tuple[int, ...] = ()
        table = PromptTable(len(dataset), features=None if callable(features) else features)
        self.allocator = Allocator(recipe, table, seed)
        self._stopping = recipe.stopping
        check_key(dataset, key)
        self.dataset, self.rewards, self.key = dataset, rewards, key
        self.rollouts: dict[int, Rollout] = {}
        self.finished: str | None = None
        self.generated: list[Rollout] = []
        self.logged: dict[str, list[float]] = {}
        self.failed = 0

    def next_batch(self, trainer: Any, generate: Generator) -> Batch | None:
        """Generate until the core returns a batch. If the run is over, return None; `finished` says why.

        Raises:
            NoScores: the run is over because no rollout could be scored.
        """
        self.generated, self.logged, self.failed, self.finished = [], {}, 0, None
        self.prepare()
        actions = self.allocator.outstanding()  # an interrupted call may not have carried out these actions
        while True:
            if actions.generate or actions.cancel:
                self._roll_out(trainer, generate, actions)
            # Read the batch from the core. `actions` lacks a batch that the core made while rollouts were running (`_ask`
            # during streaming), or before an interrupted step.
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

    def admit(self, generate: Generator) -> Batch | None:
        """Let the recipe's gate decide whether the outstanding batch's replayed rows are trained on. Return the batch.

        Also notes which of its rows the loss leaves out.
        """
        batch = self.allocator.batch
        replayed = [] if batch is None else [row for row in batch.rows if row.replays]
        if self.allocator.recipe.gate is not None:
            self.moved = moved_share(generate, self.rollouts_of(replayed)) if replayed else None
            if self.moved is not None:
                self._tell([Moved(self.moved)])
        batch = self.allocator.batch
        rollouts = [] if batch is None else self.rollouts_of(batch.rows)
        self.masked = tuple(each.made.rollout for each in rollouts if not counts(generate.trainer, each))
        return batch

    def prepare(self, saved: Blocks | None = None) -> None:
        """Compute the features, or take the saved features. Call this before the first prompt is drawn.

        Features are computed only once. If the argument `features` is not a function, nothing happens.
        """
        if self._make_features is None or (self.made is not None and saved is None):
            return
        made, core = self._make_features() if saved is None else saved, self.allocator
        with uninterrupted():
            self.allocator = Allocator(core.recipe, PromptTable(len(self.dataset), features=made), core.seed)
            self.made = made

    @cached_property
    def keys(self) -> dict[str, Any]:
        """The keys by which a resumed run finds its prompts. They are computed at the first use, because this takes time."""
        return keyed(self.dataset, self.key).state_dict()

    def trained(self) -> None:
        """Report to the core that the outstanding batch was trained on, so the weights have a new version."""
        if batch := self.allocator.batch:
            moved = None if self.movement is None else self.movement.end()
            self._tell([Updated(batch.version + 1, moved, self.masked)])

    def rollouts_of(self, rows: Iterable[Row]) -> list[Rollout]:
        """The rollouts of these rows, in order."""
        return [self.rollouts[row.rollout] for row in rows]

    # ---------------------------------------------------------------------------------------------------------- rollouts

    def _ask(self, capacity: int | None = None) -> Actions:
        with uninterrupted():
            actions = self.allocator.ask(capacity)
            for rollout in actions.release:
                self.rollouts.pop(rollout, None)  # rollouts without a score are not stored
        return actions

    def _tell(self, events: Sequence[Cancelled | Moved | Updated]) -> None:
        with uninterrupted():
            self.allocator.tell(events)

    def _roll_out(self, trainer: Any, generate: Generator, actions: Actions) -> None:
        """Generate and score the ordered rollouts and report them to the core.

        If a stage has a stop rule and the generator can stop rollouts, each rollout is reported as soon as it ends. The
        core then says which other rollouts to stop, before generation continues.
        """
        self._tell([Cancelled(rollout, 0) for rollout in actions.cancel])
        processes, me = trainer.accelerator.num_processes, trainer.accelerator.process_index
        prompt_of = _share(actions.generate, me, processes)
        rollouts_of: dict[int, list[int]] = {}
        for rollout, prompt in prompt_of.items():
            rollouts_of.setdefault(prompt, []).append(rollout)
        rows = dict(zip(rollouts_of, rows_of(self.dataset, rollouts_of), strict=True))
        if (turns := generate.turns) is not None:
            # Every rollout gets its own copy of the prompt's row, because environments may change it.
            own_rows = [self.dataset[prompt] for prompt in prompt_of.values()]
            self._take(by_all(lambda: self._score(trainer, rows, *turns(prompt_of, own_rows))))
            return
        asked = {prompt: row["prompt"] for prompt, row in rows.items()}
        tokens_of = dict(zip(asked, encode(trainer, list(asked.values())), strict=True))
        limits = {order.prompt: order.limit for order in actions.generate}
        requests = [
            Request(prompt, tokens_of[prompt], tuple(rollouts), limits[prompt])
            for prompt, rollouts in rollouts_of.items()
        ]

        def scored(made: Sequence[Generation]) -> _Scored:
            of = [prompt_of[each.rollout] for each in made]
            pairs = [(tokens_of[prompt], each.tokens) for prompt, each in zip(of, made, strict=True)]
            completions = decode(trainer, [asked[prompt] for prompt in of], pairs)
            ended = [
                Rollout(prompt=prompt, prompt_tokens=tokens_of[prompt], made=each, texts=(asked[prompt], completion))
                for prompt, each, completion in zip(of, made, completions, strict=True)
            ]
            return self._score(trainer, rows, ended, {})

        if generate.can_stop and any(order.stage in self._stopping for order in actions.generate):
            running, stream = len(prompt_of), generate.stream(requests)
            ended = next(stream)
            while running := running - len(ended):
                self._take([scored(ended)])
                ended = stream.send(self._ask(capacity=0).cancel)
            self._take([scored(ended)])  # `next_batch` calls `_ask` after this
        else:
            self._take(by_all(lambda: scored(generate(requests, dict.fromkeys(limits.values())))))

    def _take(self, shares: Sequence[_Scored]) -> None:
        """Report the finished rollouts of all processes to the core, ordered by id."""
        for _, figures in shares:
            for name, values in figures.items():
                self.logged.setdefault(name, []).extend(values)
        everything = sorted((each for ended, _ in shares for each in ended), key=lambda each: each.made.rollout)
        results = [self._result(rollout) for rollout in everything]
        with uninterrupted():
            tell(self.allocator, results, remedy=self.rewards.remedy)

    def _score(
        self,
        trainer: Any,
        rows: Mapping[int, dict[str, Any]],
        ended: list[Rollout],
        figures: dict[str, list[float]],
    ) -> _Scored:
        """Score rollouts. Return them, and `figures` joined with the metrics that reward functions logged.

        Stopped rollouts get no scores.
        """
        if not ended or ended[0].made.cancelled:  # either all rollouts of a list were stopped, or none
            return ended, figures
        scored = self.rewards(
            [rows[rollout.prompt] | {"prompt": rollout.texts[0]} for rollout in ended],
            [rollout.texts[1] for rollout in ended],
            [list(rollout.made.tokens) for rollout in ended],
            trainer.state,
            None if ended[0].environment is None else [rollout.environment for rollout in ended],
        )
        return [
            replace(
                rollout,
                scores_F=scores_F,
                logged={column: values[at] for column, values in scored.columns.items()},
                environment=None,
            )
            for at, (rollout, scores_F) in enumerate(zip(ended, scored.scores_BF, strict=True))
        ], figures | scored.figures

    def _result(self, rollout: Rollout) -> RolloutResult:
        """Keep the rollout if it has a score. Return how it ended."""
        made = rollout.made
        own_T = made.logprobs if rollout.own is None else made.logprobs[list(rollout.own)]
        result = RolloutResult(
            rollout=made.rollout,
            outcome=self.rewards.unscored if made.cancelled else self.rewards.outcome(rollout.scores_F),
            tokens=rollout.length,
            version=self.allocator.version,
            truncated=made.truncated,
            cancelled=made.cancelled,
            uncertainty=uncertainty_of(own_T),
        )
        self.generated.append(rollout)
        if result.is_scored:
            self.rollouts[made.rollout] = rollout
        elif not made.cancelled:
            self.failed += 1
        return result


def _share(orders: Sequence[Order], process: int, processes: int) -> dict[int, int]:
    """The prompt of each rollout of one process: a contiguous part, so that rollouts of a prompt can share a prefill."""
    flat = [(rollout, order.prompt) for order in orders for rollout in order.rollouts]
    bounds = np.linspace(0, len(flat), processes + 1).astype(int)
    return dict(flat[bounds[process] : bounds[process + 1]])
