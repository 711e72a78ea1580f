"""TRL's `GRPOTrainer` with a recipe that decides what is generated and trained on. TRL does everything else."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from math import isnan, nan
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import gather
from torch.nn import Module
from trl import GRPOConfig, GRPOTrainer

from rollalloc.core.events import Batch
from rollalloc.core.recipe import Recipe, refuse_other
from rollalloc.drivers.trl import checks
from rollalloc.drivers.trl.allocation import Allocation
from rollalloc.drivers.trl.averaging import AveragedWeights
from rollalloc.drivers.trl.callback import (
    AllocationCallback,
    batch_figures,
    evaluated_figures,
    generated_figures,
    running_totals,
    tokens_generated,
)
from rollalloc.drivers.trl.checkpoints import FiniteTraining
from rollalloc.drivers.trl.dataset import (
    AUTO,
    check_environments,
    check_prompts,
    check_read_by_rewards,
    data_sets,
    features_for,
)
from rollalloc.drivers.trl.generation import Generator
from rollalloc.drivers.trl.loss_check import LossCheck, arguments_of
from rollalloc.drivers.trl.movement import Movement
from rollalloc.drivers.trl.rewards import RewardFunctions
from rollalloc.drivers.trl.rollout import Rollout, decode, encode, parses
from rollalloc.drivers.trl.tensors import training_inputs
from rollalloc.drivers.trl.unsloth import check_patch, is_unsloths, laid_out, padded_by
from rollalloc.named import parameters_of, refuse_unknown
from rollalloc.runs.trl_log import ROLLOUT

log = logging.getLogger(__name__)


class AllocatedGRPOTrainer(GRPOTrainer):
    """TRL's `GRPOTrainer` with a recipe.

    The recipe draws the prompts (with random numbers from `args.seed`), decides how many rollouts each prompt gets, selects
    the rollouts to train on, and computes their advantages. Each checkpoint contains the recipe's state in the folder
    `rollalloc`, and `train(resume_from_checkpoint=...)` continues from this state. Evaluation is TRL's own. In addition,
    this class logs pass@k and related metrics under `rollalloc/breadth/`.

    The class depends on TRL's private interface. It overrides `_generate_and_score_completions`, `_generate_single_turn`,
    `_tokenize_prompts`, `_save_checkpoint`, `_load_best_model` and `_calculate_rewards`, and writes to `_metrics` and
    `_logs`. TRL's own loop calls the tools. The class also works where Unsloth has patched TRL. Whatever computes the loss,
    it is checked on the first rows of a run, before anything is trained.

    Args:
        *positional: arguments of `GRPOTrainer`. Keyword arguments that are not listed here also go to `GRPOTrainer`.
        recipe: a rollalloc recipe, whose sizes must fit TRL's settings; or a name that `rollalloc recipes` lists. Then TRL's
            settings determine its sizes: `num_generations` rows per prompt.
        parameters: parameters of a recipe that is given by name, such as {"promote": "random"}. Sizes among them are kept.
        metric: name of the reward function whose scores the recipe uses for selection. None: the weighted sum of all scores.
        use_sampler: True: generate with rollalloc's sampler. None: use this sampler if it supports the model and settings,
            otherwise use transformers' `generate` or, with `args.use_vllm`, vLLM.
        skip_special_tokens: True: remove all special tokens from the text that reward functions get, as TRL does. False:
            remove only padding and the tokens that end a completion.
        key: name of a column of unique keys, by which a resumed run finds its prompts in a changed data set. None: prompts
            are matched by their content.
        features: the features from which a recipe predicts a prompt's success rate before its first rollout (foresight): the
            path of a file that `rollalloc features` wrote, in which prompts are found by `key`. "model": compute the
            features with the model when training begins. None: no features. "auto": as "model" if the recipe predicts,
            otherwise as None.
        accept_recipe: True: resume even if the checkpoint was saved with another recipe.
        accept_data: True: resume even if prompts of the checkpoint are missing in the data set.
        notices: True: warn when most of the recent rollouts had no effect on training.
        averaging: generate, evaluate and save with an average of the weights over at most this number of recent rows. The
            average begins after 2 · `averaging` rows. rollalloc's own trainer uses 640. Every process needs the whole model
            in float32, and memory for a second copy of the trained weights. 0: no averaging.
        check_loss: True: before the first optimizer step of each call of `train`, check that the trainer's own loss is that
            of the rows (`LossCheck`). False: do not check.

    Raises:
        FileNotFoundError: the file of features does not exist.
        ImportError: TRL was patched after this class was imported.
        TypeError: the data set cannot be indexed, or `recipe` is neither a recipe nor a name.
        ValueError: the recipe or the driver does not support a setting; the message says which, and what to do.
    """

    def __init__(
        self,
        *positional: Any,
        recipe: Recipe | str,
        parameters: Mapping[str, Any] | None = None,
        metric: str | None = None,
        use_sampler: bool | None = None,
        skip_special_tokens: bool = False,
        key: str | None = None,
        features: Path | str | None = AUTO,
        accept_recipe: bool = False,
        accept_data: bool = False,
        notices: bool = True,
        averaging: int = 0,
        check_loss: bool = True,
        **named: Any,
    ) -> None:
        given = arguments_of(GRPOTrainer, positional, named)
        check_patch(type(self), given.get("model"), given.get("args") or GRPOConfig)
        checks.check_arguments(given)
        if isinstance(recipe, str):
            # An unknown name raises an error here, before the model is loaded.
            refuse_unknown(recipe, parameters or {}, parameters_of(recipe))
        else:
            refuse_other(recipe)
        checks.check_model(given.get("model"), given.get("args") or GRPOConfig, given.get("peft_config"))
        if given.get("train_dataset") is not None:
            checks.check_indexed(given["train_dataset"])
        self.skip_special_tokens, self._prompts_checked, self._said_masked = skip_special_tokens, False, False
        super().__init__(*positional, **named)
        checks.warn_if_newer()
        checks.check_kernel(self)
        checks.check_processes(self.args)
        turns = {name for name in ("tools", "environment_factory") if given.get(name)}
        checks.check_data(self.train_dataset, self.processing_class, turns, key)
        checks.check_evaluated(self.eval_dataset, self.train_dataset)
        if turns:
            checks.check_turns(self)
        recipe = checks.in_shape_of(self.args, recipe, parameters or {})
        checks.check_sizes(self.args, recipe)
        checks.check_settings(self.args, recipe)
        rows: Any = self.train_dataset
        checks.warn_of_passes(self.args, recipe, len(rows))
        recipe = checks.in_order(recipe, self.args)
        functions: Any = self.reward_funcs
        tokenizers: Any = self.reward_processing_classes
        template: Any = self.chat_template_kwargs
        weights = self.reward_weights.tolist()
        rewards = RewardFunctions(functions, self.reward_func_names, weights, tokenizers, metric, template)
        checks.check_metric(recipe, rewards)
        self._check_columns(rewards, given.get("environment_factory"))
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
        self._is_unsloths = is_unsloths(self)
        self._loss_check = LossCheck(self, self._generator, wanted=check_loss)
        checks.check_stops(recipe, self.args, self._generator.can_stop)
        checks.check_limit(recipe, self.args, self._generator.turns is not None, self.reward_func_names)
        if recipe.reads_kl:
            self.allocation.movement = Movement(self._generator)
        self._finite = FiniteTraining(self)
        self._allocation_callback = AllocationCallback(
            *(self.allocation, self.averaged, self._finite),
            accept_recipe=accept_recipe,
            accept_data=accept_data,
            notices=notices,
        )
        # Weights are checked, then averaged, and then their batch is reported to the core as trained.
        self.add_callback(self._finite)
        self.add_callback(self.averaged)
        self.add_callback(self._allocation_callback)

    def _check_columns(self, rewards: RewardFunctions, factory: Any) -> None:
        """Raise an error for data that an environment or a reward function cannot use, in training or in evaluations."""
        held_out = None if self.args.eval_strategy == "no" else self.eval_dataset
        for where, dataset in data_sets(self.train_dataset, held_out):
            if not len(dataset):
                continue
            if isinstance(factory, Mapping):
                check_environments(dataset, where, factory)
            check_read_by_rewards(rewards, dataset, where, environments=factory is not None)

    def train(self, resume_from_checkpoint: str | bool | None = None, *more: Any, **other: Any) -> Any:
        """Train as TRL does. A resumed run also restores the recipe's state and the rollouts that the core still needs."""
        checks.check_trainable(self.model)
        resume = self._allocation_callback.resume(resume_from_checkpoint, self.args.output_dir)
        if not self._prompts_checked:
            check_prompts(self)
            self._prompts_checked = True
        self._generator.begin()
        self._loss_check.begin()
        return super().train(resume, *more, **other)

    def evaluate(self, *given: Any, **named: Any) -> Any:
        """Evaluate as TRL does, with the averaged weights if averaging is on."""
        with self.averaged.sampling():
            return super().evaluate(*given, **named)

    def predict(self, *given: Any, **named: Any) -> Any:
        """Predict as TRL does, with the averaged weights if averaging is on."""
        with self.averaged.sampling():
            return super().predict(*given, **named)

    def save_model(self, *given: Any, **named: Any) -> None:
        """Save the model as TRL does, with the averaged weights if averaging is on.

        Raises:
            Diverged: a weight is not finite.
        """
        with self.averaged.sampling():
            self._finite.check_before_saving()
            super().save_model(*given, **named)

    def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        """Compute the loss as TRL, or what patched it, does.

        In training, it is checked before the optimizer steps on it. The first rows of a run also show whether it is the
        loss of these rows.
        """
        own, trained = super().compute_loss, cast("Module", self.model)
        if not trained.training:
            return own(model, inputs, *given, **named)

        def loss(rows: dict[str, Any]) -> Any:
            if not self._is_unsloths:
                return own(model, rows, *given, **named)
            laid, pad = laid_out(self, rows)
            with padded_by(self, pad):
                return own(model, laid, *given, **named)

        if self._loss_check.due:
            self._loss_check(inputs, loss)
        made = loss(inputs)
        self._finite.see(made)
        return made

    def _save_checkpoint(self, *given: Any, **named: Any) -> None:
        """Save the recipe's state, then TRL's part of the checkpoint."""
        self._allocation_callback.before_saving(self.args, self.state)
        super()._save_checkpoint(*given, **named)

    def _load_best_model(self) -> None:
        with self.averaged.sampling():
            super()._load_best_model()

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """In training, ignore the prompts that TRL's sampler drew, and return the recipe's next batch."""
        model: Any = self.model
        if not model.training:
            return super()._generate_and_score_completions(inputs)
        allocation = self.allocation
        with self.averaged.sampling():
            batch = allocation.next_batch(self, self._generator)
        batch = batch and allocation.admit(self._generator)
        rollouts = allocation.rollouts_of(batch.rows) if batch else []
        self._count(batch)
        if batch:
            self._count_masked(batch)
            self._show(batch, rollouts)
        return training_inputs(self, self._generator, batch, rollouts)

    def _tokenize_prompts(self, prompts: Any) -> Any:
        """Encode prompts in the same way as in training, so that an evaluation gets the same tokens.

        For vision models, and for prompts that are rendered with an environment's tools, TRL's own method is used.
        """
        if getattr(self, "_is_vlm", False) or getattr(self, "environment_factories", None) is not None:
            return super()._tokenize_prompts(prompts)
        return [list(ids) for ids in encode(self, prompts)], None, {}

    def _generate_single_turn(self, prompt_ids: Any, *others: Any, **more: Any) -> Any:
        """In training, generate with the driver's generator. TRL's tool loop calls this for each turn."""
        model: Any = self.model
        if not model.training:
            return super()._generate_single_turn(prompt_ids, *others, **more)
        completions, logprobs = self._generator.complete([tuple(ids) for ids in prompt_ids])
        return [list(ids) for ids in completions], logprobs and [each.tolist() for each in logprobs]

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        """Score the completions of an evaluation, with the same checks as in training, and gather scores from all processes.

        Also logs the score of each prompt's best completion, and how much a prompt's completions differ.
        """
        rewards = self.allocation.rewards
        if not (self.tools or parses(self)):  # decode again, because TRL has removed all special tokens
            completions = decode(self, prompts, [((), ids) for ids in completion_ids_list])
        rows = [row | {"prompt": prompt} for row, prompt in zip(inputs, prompts, strict=True)]
        scored = rewards(rows, completions, completion_ids_list, self.state, self.environments or None)
        for column, values in (scored.columns | {ROLLOUT: [None] * len(inputs)}).items():
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
            metrics[name] = [value]  # TRL logs the mean of this list, so the list contains only the last total
        metrics["num_tokens"] = [self.state.num_input_tokens_seen]

    def _count_masked(self, batch: Batch) -> None:
        """Log how many rows the loss leaves out as truncated, and warn of the first batch that teaches nothing by this."""
        if not self.mask_truncated_completions:
            return
        masked = set(self.allocation.masked)
        teaches = [row.rollout not in masked for row in batch.rows if row.advantage * row.weight]
        self._metrics["train"]["rollalloc/masked"].append(len(masked))
        if teaches and not any(teaches) and not self._said_masked and self.accelerator.is_main_process:
            self._said_masked = True
            log.warning(
                "all %d rows of a batch that have an advantage reached their length limit, and "
                "mask_truncated_completions=True leaves such rows out of the loss, so this step teaches nothing. The recipe "
                "still counts them as trained, and chooses prompts by their rewards. Raise max_completion_length=%s, "
                "or the recipe's limit_at if it has one; rollalloc/masked counts such rows. This is said once",
                len(teaches),
                self.max_completion_length,
            )

    def _show(self, batch: Batch, rollouts: Sequence[Rollout]) -> None:
        """Make the trained rollouts TRL's table of completions, each with the ids of its group and of itself.

        TRL's table holds the last rows, as many as a generation batch has; a batch with replayed rows has more.
        """
        logs: Any = self._logs
        args: Any = self.args
        most = max(len(rollouts), args.generation_batch_size)
        logs["prompt"] = deque((each.texts[0] for each in rollouts), most)
        logs["completion"] = deque((each.texts[1] for each in rollouts), most)
        logs["advantages"] = deque((row.advantage for row in batch.rows), most)
        for at, name in enumerate(self.reward_func_names):
            scores = [each.scores_F[at] for each in rollouts]
            logs["rewards"][name] = deque((nan if score is None else score for score in scores), most)  # NaN, as in TRL
        named = [f"{row.group}/{row.rollout}" for row in batch.rows]
        logged = [each.logged | {ROLLOUT: name} for each, name in zip(rollouts, named, strict=True)]
        for column in sorted({*logs["extra"], *(column for each in logged for column in each)}):
            logs["extra"][column] = deque((each.get(column) for each in logged), most)
