"""`GRPOTrainer` under a recipe: the recipe decides what is generated and trained on, TRL does everything else."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from math import isnan, nan
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather
from trl import GRPOConfig, GRPOTrainer

from rollalloc.core.events import Batch
from rollalloc.core.recipe import Recipe, refuse_other, refuse_unmeasured
from rollalloc.drivers.trl import checks
from rollalloc.drivers.trl.allocation import Allocation, Rollout
from rollalloc.drivers.trl.averaging import AveragedWeights
from rollalloc.drivers.trl.callback import AllocationCallback
from rollalloc.drivers.trl.chats import decode, encode, parses
from rollalloc.drivers.trl.context import check_prompts
from rollalloc.drivers.trl.features import AUTO, features_for
from rollalloc.drivers.trl.figures import (
    batch_figures,
    evaluated_figures,
    generated_figures,
    running_totals,
    tokens_generated,
)
from rollalloc.drivers.trl.generation import Generator
from rollalloc.drivers.trl.movement import Movement
from rollalloc.drivers.trl.rewards import RewardFunctions
from rollalloc.drivers.trl.tensors import training_inputs
from rollalloc.drivers.trl.versions import warn_if_newer
from rollalloc.named import signature_of


class AllocatedGRPOTrainer(GRPOTrainer):
    """TRL's `GRPOTrainer` under a recipe.

    The recipe draws the prompts, keyed by `args.seed`, and decides how many rollouts each gets, which of them are trained on
    and their advantages. Each checkpoint gets a folder `rollalloc`, from which `train(resume_from_checkpoint=...)` goes on.
    Evaluation is TRL's own; it also logs `rollalloc/breadth/pass_at_k` and its kin.

    Of TRL's private interface `_generate_and_score_completions`, `_generate_single_turn`, `_tokenize_prompts`,
    `_save_checkpoint`, `_load_best_model` and `_calculate_rewards` are overridden, `_metrics` and `_logs` are written to,
    and tools are called by TRL's own loop.

    Args:
        *positional: as for `GRPOTrainer`, like all that is not named here.
        recipe: of rollalloc, or its name, as `rollalloc recipes` lists them. The shape of a batch is that of TRL's settings
            where the recipe was made without `groups`, as `recipes.pilot_commit()`: `num_generations` rows of each prompt.
        metric: name of the reward function that selection looks at; None: the weighted sum of all.
        use_sampler: whether rollalloc's sampler generates; None: where it applies, else transformers' `generate` or, with
            `args.use_vllm`, vLLM.
        skip_special_tokens: leave out every special token of the tokenizer from the text that reward functions get, as TRL
            does; False: only those that end a completion, and padding.
        key: column of unique keys, by which a resumed run finds its prompts in another data set; None: the prompt itself.
        features: what the recipe may know of each prompt before it is rolled out: a file (`rollalloc features`), whose keys
            are those of `key`; "model": made from the model as training begins; None: nothing. "auto": "model" where the
            recipe predicts (foresight), else nothing.
        accept_recipe: resume under this recipe although the checkpoint was saved under another.
        accept_data: resume although prompts of the checkpoint's data set are gone.
        notices: say in the log when most of the last rollouts taught nothing.
        averaging: rows that the running mean of the weights spans, at most, which generates, is evaluated and is saved, as
            640 in rollalloc's own trainer; 0: none. It needs the whole model in float32 on every process, and memory for
            one more copy of what is trained.

    Raises:
        FileNotFoundError: there is no such file of features.
        TypeError: a data set that cannot be indexed, or what is neither a recipe nor a name.
        ValueError: settings that the recipe or the driver cannot be true to; names them and the remedy.
    """

    def __init__(
        self,
        *positional: Any,
        recipe: Recipe | str,
        metric: str | None = None,
        use_sampler: bool | None = None,
        skip_special_tokens: bool = False,
        key: str | None = None,
        features: Path | str | None = AUTO,
        accept_recipe: bool = False,
        accept_data: bool = False,
        notices: bool = True,
        averaging: int = 0,
        **named: Any,
    ) -> None:
        given = inspect.signature(GRPOTrainer).bind_partial(*positional, **named).arguments
        checks.check_arguments(given)
        if isinstance(recipe, str):
            signature_of(recipe)  # an unknown name is said before a model is loaded
        else:
            refuse_other(recipe)
        checks.check_model(given.get("model"), given.get("args") or GRPOConfig, given.get("peft_config"))
        if given.get("train_dataset") is not None:
            checks.check_indexed(given["train_dataset"])
        self.skip_special_tokens, self._prompts_checked = skip_special_tokens, False
        super().__init__(*positional, **named)
        warn_if_newer(self.args)
        checks.check_processes(self.args)
        turns = {name for name in ("tools", "environment_factory") if given.get(name)}
        checks.check_data(self.train_dataset, self.processing_class, turns)
        checks.check_evaluated(self.eval_dataset, self.train_dataset)
        if turns:
            checks.check_turns(self)
        recipe = checks.in_shape_of(self.args, recipe)
        checks.check_sizes(self.args, recipe)
        checks.check_settings(self.args, recipe)
        refuse_unmeasured(recipe, "TRL's trainer")
        rows: Any = self.train_dataset
        checks.warn_of_passes(self.args, recipe, len(rows))
        recipe = checks.in_order(recipe, self.args)
        functions: Any = self.reward_funcs
        tokenizers: Any = self.reward_processing_classes
        template: Any = self.chat_template_kwargs
        weights = self.reward_weights.tolist()
        rewards = RewardFunctions(functions, self.reward_func_names, weights, tokenizers, metric, template)
        checks.check_metric(recipe, rewards)
        self.averaged = AveragedWeights(self, averaging)
        known = features_for(self, recipe, features, key)
        self.allocation = Allocation(recipe, self.train_dataset, rewards, self.args.seed, key, known)
        self._generator = Generator(
            self,
            use_sampler=use_sampler,
            keep_logprobs=recipe.trains_older_rows or recipe.reads_uncertainty or averaging > 0,
            tools=given.get("tools"),
            environment_factory=given.get("environment_factory"),
        )
        checks.check_stops(recipe, self._generator.can_stop)
        if recipe.reads_kl:
            self.allocation.movement = Movement(self._generator)
        self._allocation_callback = AllocationCallback(
            self.allocation, self.averaged, accept_recipe=accept_recipe, accept_data=accept_data, notices=notices
        )
        self.add_callback(self.averaged)  # first: it asks for the batch that the other one tells to be trained
        self.add_callback(self._allocation_callback)

    def train(self, resume_from_checkpoint: str | bool | None = None, *more: Any, **other: Any) -> Any:
        """As TRL's; a resumed run goes on with the allocation of that checkpoint, held rollouts included."""
        resume = self._allocation_callback.resume(resume_from_checkpoint, self.args.output_dir)
        if not self._prompts_checked:
            check_prompts(self)
            self._prompts_checked = True
        self._generator.begin()
        return super().train(resume, *more, **other)

    def evaluate(self, *given: Any, **named: Any) -> Any:
        """As TRL's, of the averaged weights where there are any."""
        with self.averaged.sampling():
            return super().evaluate(*given, **named)

    def predict(self, *given: Any, **named: Any) -> Any:
        """As TRL's, of the averaged weights where there are any."""
        with self.averaged.sampling():
            return super().predict(*given, **named)

    def save_model(self, *given: Any, **named: Any) -> None:
        """As TRL's, of the averaged weights where there are any."""
        with self.averaged.sampling():
            super().save_model(*given, **named)

    def _save_checkpoint(self, *given: Any, **named: Any) -> None:
        """As TRL's, after the allocation's state."""
        self._allocation_callback.before_saving(self.args, self.state)
        super()._save_checkpoint(*given, **named)

    def _load_best_model(self) -> None:
        with self.averaged.sampling():
            super()._load_best_model()

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """A batch of the recipe in place of the prompts that TRL's sampler drew."""
        model: Any = self.model
        if not model.training:
            return super()._generate_and_score_completions(inputs)
        allocation = self.allocation
        with self.averaged.sampling():
            batch = allocation.next_batch(self, self._generator)
        rollouts = allocation.rollouts_of(batch.rows) if batch else []
        self._count(batch)
        if batch:
            self._show(batch, rollouts)
        return training_inputs(self, self._generator, batch, rollouts)

    def _tokenize_prompts(self, prompts: Any) -> Any:
        """As TRL's, but prompts are encoded as in training; by TRL's own where each has an environment's tools."""
        if getattr(self, "_is_vlm", False) or getattr(self, "environment_factories", None) is not None:
            return super()._tokenize_prompts(prompts)
        return [list(ids) for ids in encode(self, prompts)], None, {}

    def _generate_single_turn(self, prompt_ids: Any, *others: Any, **more: Any) -> Any:
        """In training TRL's loop of tools asks for turns here; they come from where the driver's rollouts come from."""
        model: Any = self.model
        if not model.training:
            return super()._generate_single_turn(prompt_ids, *others, **more)
        completions, logprobs = self._generator.complete([tuple(ids) for ids in prompt_ids])
        return [list(ids) for ids in completions], logprobs and [each.tolist() for each in logprobs]

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        """Scores of an evaluation's completions, checked as those of training, gathered from all processes.

        Beside TRL's figures it logs what a prompt's best completion is worth, and how much its completions differ.
        """
        rewards = self.allocation.rewards
        if not (self.tools or parses(self)):  # TRL leaves out every special token
            completions = decode(self, prompts, [((), ids) for ids in completion_ids_list])
        rows = [row | {"prompt": prompt} for row, prompt in zip(inputs, prompts, strict=True)]
        scored = rewards(rows, completions, completion_ids_list, self.state, self.environments or None)
        for column, values in scored.columns.items():
            self._log_completion_extra(column, values)
        for name, values in scored.figures.items():
            for value in values:
                self._log_metric(name, value)
        filled_BF = [[nan if score is None else score for score in scores_F] for scores_F in scored.scores_BF]
        scores_BF = torch.tensor(filled_BF, dtype=torch.float32, device=self.accelerator.device)
        everywhere_BF: Any = gather(scores_BF)
        known_BF = [[None if isnan(score) else score for score in scores_F] for scores_F in everywhere_BF.tolist()]
        each: Any = self.num_generations_eval or self.num_generations
        for name, value in evaluated_figures(rewards, known_BF, completion_ids_list, each).items():
            self._metrics["eval"][name].append(value)
        return everywhere_BF

    def _count(self, batch: Batch | None) -> None:
        self.state.num_input_tokens_seen += tokens_generated(self.allocation.generated)
        metrics = self._metrics["train"]
        for name, value in (
            generated_figures(self.allocation) | (batch_figures(self.allocation, batch) if batch else {})
        ).items():
            metrics[name].append(value)
        for name, value in running_totals(self.allocation).items():
            metrics[name] = [value]  # TRL logs means, and the mean of totals is none
        metrics["num_tokens"] = [self.state.num_input_tokens_seen]

    def _show(self, batch: Batch, rollouts: Sequence[Rollout]) -> None:
        """Put what is trained on into the table of completions."""
        logs = self._logs
        shown = len(logs["prompt"])
        logs["prompt"].extend(each.said[0] for each in rollouts)
        logs["completion"].extend(each.said[1] for each in rollouts)
        logs["advantages"].extend(row.advantage for row in batch.rows)
        for at, name in enumerate(self.reward_func_names):
            scores = [each.scores_F[at] for each in rollouts]
            logs["rewards"][name].extend(nan if score is None else score for score in scores)  # as TRL has it
        for column in sorted({*logs["extra"], *(column for each in rollouts for column in each.logged)}):
            if column not in logs["extra"]:
                logs["extra"][column].extend([None] * shown)
            logs["extra"][column].extend(each.logged.get(column) for each in rollouts)
