"""A recipe through TRL's public `rollout_func`: nothing private is touched, but every group must have as many rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollalloc.core.events import Batch
from rollalloc.core.recipe import Recipe
from rollalloc.drivers.trl import checks
from rollalloc.drivers.trl.allocation import Allocation, Rollout, idle_rollout
from rollalloc.drivers.trl.callback import AllocationCallback
from rollalloc.drivers.trl.chats import encode
from rollalloc.drivers.trl.figures import batch_figures, evaluated_figures, running_totals, tokens_generated
from rollalloc.drivers.trl.generation import Generator
from rollalloc.drivers.trl.rewards import Score, of_functions

_REWARD, _PROMPT = "rollalloc_reward", "rollalloc_prompt"  # fields that TRL carries from the rollouts to the reward
_WAY_OUT = "use rollalloc.drivers.trl.AllocatedGRPOTrainer, which can"


class AllocatedRollouts(AllocationCallback):
    """A recipe for stock `GRPOTrainer`, in three of its arguments:

        rollouts = AllocatedRollouts(recipe, dataset, reward_funcs)
        GRPOTrainer(..., reward_funcs=rollouts.reward, rollout_func=rollouts, callbacks=[rollouts])

    TRL computes the advantages, over the rows it gets, and draws prompts that nobody uses: in its table of completions they
    stand in the column `prompt`, those really rolled out in `rollalloc_prompt`.

    Args:
        recipe: of rollalloc; its groups have all the same number of rows, sampled from the weights that are trained.
        dataset: the same as the trainer's.
        reward_funcs: one or several, in TRL's signature.
        reward_weights: of the functions; 1 each by default.
        metric: name of the function that selection looks at; None: the weighted sum of all.
        seed: of prompts and sampling, 0 or more.
        use_sampler: whether rollalloc's sampler generates; None: where it applies.
        key: as for `AllocatedGRPOTrainer`, like the two below.
        accept_recipe: as there.
        accept_data: as there.
        notices: as there.

    Raises:
        TypeError: a data set that cannot be indexed, or a reward model.
        ValueError: a recipe that stock TRL cannot train; says why and what can.
    """

    def __init__(
        self,
        recipe: Recipe,
        dataset: Any,
        reward_funcs: Any,
        *,
        reward_weights: Sequence[float] | None = None,
        metric: str | None = None,
        seed: int = 0,
        use_sampler: bool | None = None,
        key: str | None = None,
        accept_recipe: bool = False,
        accept_data: bool = False,
        notices: bool = True,
    ) -> None:
        if obstacle := checks.why_not_in_equal_groups(recipe):
            raise ValueError(f"this recipe cannot go through rollout_func, {obstacle}; {_WAY_OUT}")
        checks.check_indexed(dataset)
        rewards = of_functions(reward_funcs, reward_weights, metric)
        checks.check_metric(recipe, rewards)
        allocation = Allocation(recipe, dataset, rewards, seed, key)
        super().__init__(allocation, accept_recipe=accept_recipe, accept_data=accept_data, notices=notices)
        self._use_sampler = use_sampler
        self._generator: Generator | None = None
        self._figures: dict[str, float] = {}
        self._begun = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **other: Any) -> None:
        recipe = self.allocation.allocator.recipe
        checks.check_sizes(args, recipe)
        checks.check_settings(args, recipe)
        if checks.in_order(recipe, args) != recipe:
            raise ValueError(
                "shuffle_dataset=False, but the recipe shuffles; give AllocatedRollouts dataclasses.replace(recipe, "
                "prompts=InOrder()), of rollalloc.rules.prompts"
            )
        super().on_train_begin(args, state, control, **other)
        if self._generator is not None:
            self._generator.begin()
        self._begun = True

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """What TRL calls for rollouts: in training those of the recipe's next batch, in evaluation those of the prompts."""
        if self._generator is None or self._generator.trainer is not trainer:
            checks.check_data(self.allocation.dataset, trainer.processing_class)
            if trainer.tools or trainer.environments or getattr(trainer, "environment_factories", None):
                raise ValueError(f"tools and environments cannot go through rollout_func; {_WAY_OUT}")
            self._generator = Generator(trainer, use_sampler=self._use_sampler, keep_logprobs=False)
            checks.check_stops(self.allocation.allocator.recipe, self._generator.can_stop)
        if not trainer.model.training:
            tokens = encode(trainer, prompts)
            completions, logprobs = self._generator.complete(tokens)
            return {"prompt_ids": tokens, "completion_ids": completions, "logprobs": logprobs}
        if not self._begun:
            raise ValueError(
                "the recipe does not hear of the trainer's steps; pass callbacks=[rollouts], the same object as rollout_func"
            )
        batch = self.allocation.next_batch(trainer, self._generator)
        trainer.state.num_input_tokens_seen += tokens_generated(self.allocation.generated)
        if batch:
            return self._rows(batch, prompts, trainer)
        nothing = [idle_rollout(self._generator.eos_ids)] * len(prompts)  # equal rewards: no advantage, no gradient
        self._figures = running_totals(self.allocation)
        return _fields(nothing, [0.0] * len(prompts), [""] * len(prompts))

    def reward(self, prompts: Any, completions: Any, **given: Any) -> list[float | None]:
        """The reward function for the trainer: it hands on what was scored, and scores what is evaluated."""
        log_extra, log_metric = given.pop("log_extra"), given.pop("log_metric")
        if _REWARD not in given:
            scores_BF = self._score(prompts, completions, **given)
            for name, value in self._evaluated(scores_BF, given["completion_ids"]).items():
                log_metric(name, value)
            return [self.allocation.rewards.reward(scores_F) for scores_F in scores_BF]
        log_extra(_PROMPT, given[_PROMPT])
        for name, value in self._figures.items():
            log_metric(name, value)
        return given[_REWARD]

    def _score(
        self, prompts: Any, completions: Any, *, completion_ids: Any, trainer_state: Any, **columns: Any
    ) -> list[list[Score]]:
        examples = [
            {"prompt": prompt} | {name: values[at] for name, values in columns.items()}
            for at, prompt in enumerate(prompts)
        ]
        return self.allocation.rewards(examples, completions, completion_ids, trainer_state).scores_BF

    def _evaluated(self, scores_BF: Sequence[Sequence[Score]], completion_ids: Any) -> dict[str, float]:
        """Of this process's part of an evaluation, what several completions of a prompt say together."""
        if self._generator is None:
            return {}
        trainer = self._generator.trainer
        each = trainer.num_generations_eval or trainer.num_generations
        return evaluated_figures(self.allocation.rewards, scores_BF, completion_ids, each)

    def _rows(self, batch: Batch, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """This process's slice of a batch, with the fields that TRL hands on to `reward`."""
        rollouts = self.allocation.rollouts_of(batch.rows)
        expected = len(prompts) * trainer.accelerator.num_processes
        sizes = {sum(row.group == group for row in batch.rows) for group in {row.group for row in batch.rows}}
        if len(rollouts) != expected or sizes != {trainer.num_generations}:
            raise ValueError(
                f"stock TRL needs {expected} rows in groups of {trainer.num_generations}, got {len(rollouts)} in groups of "
                f"{sorted(sizes)}; {batch.short_because or 'some rollouts have no score'}; {_WAY_OUT}"
            )
        trainer.state.num_input_tokens_seen -= tokens_generated(rollouts)  # TRL adds those
        self._figures = batch_figures(self.allocation, batch) | running_totals(self.allocation)
        start = trainer.accelerator.process_index * len(prompts)
        mine = rollouts[start : start + len(prompts)]
        return _fields(
            mine,
            [self.allocation.rewards.reward(each.scores_F) for each in mine],
            trainer.processing_class.batch_decode([each.prompt_tokens for each in mine], skip_special_tokens=True),
        )


def _fields(rollouts: Sequence[Rollout], rewards: Sequence[float | None], prompts: Sequence[str]) -> dict[str, Any]:
    """What TRL expects of `rollout_func`, and what it hands on to the reward function."""
    logprobs = [each.made.logprobs for each in rollouts]
    known = not any(np.isnan(logprob_T).any() for logprob_T in logprobs)
    return {
        "prompt_ids": [list(each.prompt_tokens) for each in rollouts],
        "completion_ids": [list(each.made.tokens) for each in rollouts],
        "logprobs": [logprob_T.tolist() for logprob_T in logprobs] if known else None,
        _REWARD: list(rewards),
        _PROMPT: list(prompts),
    }
