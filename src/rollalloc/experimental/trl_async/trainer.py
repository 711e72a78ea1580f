"""`AsyncGRPOTrainer` under a recipe: the recipe decides what is generated and trained on, TRL does everything else."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

from trl.experimental.async_grpo import AsyncGRPOTrainer, async_grpo_trainer

from rollalloc.core.recipe import Recipe
from rollalloc.drivers.trl.allocation import Allocation
from rollalloc.drivers.trl.chats import encode
from rollalloc.drivers.trl.checks import check_data, check_metric
from rollalloc.drivers.trl.features import AUTO, MODEL, Blocks, features_for
from rollalloc.drivers.trl.rewards import of_functions
from rollalloc.experimental.trl_async import checks
from rollalloc.experimental.trl_async.attention import attend_without_flash
from rollalloc.experimental.trl_async.judge import Judge
from rollalloc.experimental.trl_async.roller import Chat, Roller
from rollalloc.experimental.trl_async.saving import AsyncAllocationCallback
from rollalloc.experimental.trl_async.weights import WeightMailbox
from rollalloc.experimental.trl_async.worker import AllocatedWorker
from rollalloc.generate.sampling import Sampling
from rollalloc.generate.stream.settings import Streaming
from rollalloc.models.features import features_of
from rollalloc.models.policy import Policy
from rollalloc.recipes.streaming import streamed_aloud
from rollalloc.train.settings import Settings

log = logging.getLogger(__name__)
_theirs = async_grpo_trainer._TrainBeginCallback


class AllocatedAsyncGRPOTrainer(AsyncGRPOTrainer):
    """TRL's `AsyncGRPOTrainer` under a recipe; no vLLM server is needed.

    The recipe draws the prompts, keyed by `args.seed`, and decides how many rollouts each gets, which of them are trained on
    and their advantages. They come from rollalloc's asynchronous engine, with a model of its own on the trainer's device,
    into which the trainer's weights are copied after each step. A batch of the recipe is one optimizer step. Of TRL's
    private interface `_sync_weight` is called where a second `train()` begins, once `_TrainBeginCallback` says that it has
    done its part, `_rollout_dataset` is told how long was waited, and on a device without CUDA `get_peak_flops_per_device`,
    which fails there, is stood in for while the trainer is made.

    Args:
        *positional: as for `AsyncGRPOTrainer`, like all that is not named here; `args` with `max_steps`.
        recipe: of rollalloc, whose batches are all of one size.
        reward_weights: of the reward functions; 1 each by default.
        metric: name of the reward function that selection looks at; None: the weighted sum of all.
        streaming: whether generation has a process of its own, what becomes of rollouts that an update finds running, and
            what generates.
        ahead: batches that are generated while one is trained, at least, as `rollalloc.recipes.streamed` has it; None: as
            many as the recipe does.
        key: column of unique keys, by which a resumed run finds its prompts in another data set; None: the prompt itself.
        features: what the recipe may know of each prompt before it is rolled out: a file; "model": made from the model as
            training begins; None: nothing. "auto": "model" where the recipe predicts, else nothing.
        accept_recipe: resume under this recipe although the checkpoint was saved under another.
        accept_data: resume although prompts of the checkpoint's data set are gone.

    Raises:
        FileNotFoundError: there is no such model, or file of features.
        TypeError: a data set that cannot be indexed, a reward model, or a model that is not given by name.
        ValueError: settings that the recipe or the driver cannot be true to; names them and the remedy.
    """

    def __init__(
        self,
        *positional: Any,
        recipe: Recipe,
        reward_weights: Sequence[float] | None = None,
        metric: str | None = None,
        streaming: Streaming | None = None,
        ahead: int | None = None,
        key: str | None = None,
        features: Path | str | None = AUTO,
        accept_recipe: bool = False,
        accept_data: bool = False,
        **named: Any,
    ) -> None:
        given = inspect.signature(AsyncGRPOTrainer).bind_partial(*positional, **named).arguments
        checks.check_arguments(given)
        args, dataset = given["args"], given["train_dataset"]
        recipe = streamed_aloud(recipe, log, ahead=ahead)
        steps = checks.check_sizes(args, recipe)
        checks.check_settings(args, recipe)
        args.token_budget = 0  # rows per step are the recipe's; unset, TRL would ask a server that is not there
        rewards = of_functions(given["reward_funcs"], reward_weights, metric)
        check_metric(recipe, rewards)
        policy = _policy(given["model"], args, given.get("processing_class"))
        check_data(dataset, policy.tokenizer)
        chat = Chat(policy.tokenizer, args.chat_template_kwargs or {})
        tokens = tuple(encode(chat, [dataset[row]["prompt"] for row in range(len(dataset))]))
        _check_context(max(map(len, tokens)), args.max_completion_length, policy)
        known = _features(recipe, features, dataset, key, lambda: _of_model(policy, tokens, args.seed))
        self.allocation = Allocation(recipe, dataset, rewards, args.seed, key, known)
        mailbox = WeightMailbox()

        def begin(judge: Judge) -> Roller:
            settings = _settings(args, streaming or Streaming())
            return Roller(self.allocation, judge, policy, tokens, settings, chat, lambda: self.state)

        self._worker = AllocatedWorker(self.allocation, begin, mailbox, steps, policy.eos_ids[0], args.max_staleness)
        self._saving = AsyncAllocationCallback(
            self._worker, self._start_again, accept_recipe=accept_recipe, accept_data=accept_data
        )
        with _flops_without_cuda():
            super().__init__(
                **given
                | {
                    "rollout_worker": self._worker,
                    "weight_transfer": mailbox,
                    "processing_class": policy.tokenizer,
                    "callbacks": [self._saving, *(given.get("callbacks") or [])],
                }
            )
        if self.accelerator.device.type != "cuda":
            attend_without_flash(self.accelerator.unwrap_model(self.model))

    def train(self, resume_from_checkpoint: str | bool | None = None, *more: Any, **other: Any) -> Any:
        """As TRL's; a resumed run goes on with the allocation of that checkpoint, held rollouts included."""
        resume = self._saving.resume(resume_from_checkpoint, self.args.output_dir)
        return super().train(resume, *more, **other)

    def get_train_dataloader(self) -> Any:
        """TRL's, which reads nothing ahead, and ends where the recipe does."""
        return _Unhurried(super().get_train_dataloader(), self)

    def _start_again(self) -> None:
        """What TRL's callback does in the first training only; one that ended before its turn does not count."""
        if any(isinstance(each, _theirs) and each._fired for each in self.callback_handler.callbacks):
            self._sync_weight()
            self._worker.start()


class _Unhurried:
    """Micro-batches as they are needed: accelerate's loaders take one ahead.

    The last micro-batch of a step would come out only once the first of the next step is there, and the recipe makes that
    batch when this one is trained: both would wait for ever.
    """

    def __init__(self, prepared: Any, trainer: Any) -> None:
        self._loader, self._trainer = prepared.base_dataloader, trainer

    def __iter__(self) -> Iterator[Any]:
        trainer, rows = self._trainer, iter(self._loader)
        while True:
            since = monotonic()
            if not trainer.rollout_worker.wait_for_rows(trainer.args.heartbeat_stale_after_s):
                return
            trainer._rollout_dataset.wait_s += monotonic() - since
            yield next(rows)


def _policy(model: str, args: Any, tokenizer: Any) -> Policy:
    """What generates: the same model once more, with the tokenizer and the ends of a completion that TRL has."""
    policy = Policy.load(model, device=str(args.device))
    if tokenizer is None:
        return policy
    ends = tuple(dict.fromkeys((*policy.eos_ids, tokenizer.eos_token_id)))
    pad_id = policy.pad_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return replace(policy, tokenizer=tokenizer, eos_ids=ends, pad_id=pad_id)


def _check_context(prompt: int, completion: int, policy: Policy) -> None:
    """Refuse prompts that leave no room for a completion."""
    if prompt + completion > policy.context:
        raise ValueError(
            f"the longest prompt has {prompt} tokens and a completion up to max_completion_length={completion}, but the "
            f"model attends to {policy.context}; lower it, or leave out long prompts"
        )


def _settings(args: Any, streaming: Streaming) -> Settings:
    """How to generate: with as many rollouts at a time as TRL lets be in flight."""
    sampling = Sampling(args.max_completion_length, temperature=args.temperature, max_rows=args.max_inflight_tasks)
    limit_s = args.heartbeat_stale_after_s
    return Settings(seed=args.seed, sampling=sampling, engine="async", streaming=streaming, generator_limit_s=limit_s)


def _features(
    recipe: Recipe, given: Path | str | None, dataset: Any, key: str | None, made: Callable[[], Blocks]
) -> Blocks | Callable[[], Blocks]:
    if given == MODEL or (given == AUTO and recipe.reads_features):
        return made
    return features_for(SimpleNamespace(train_dataset=dataset), recipe, None if given == AUTO else given, key)


def _of_model(policy: Policy, tokens: Sequence[tuple[int, ...]], seed: int) -> Blocks:
    return features_of(policy.model, tokens, pad_id=policy.pad_id, seed=seed).blocks


@contextmanager
def _flops_without_cuda() -> Iterator[None]:
    """Within, TRL does not ask CUDA for the name of a device that is none of its own."""
    theirs = async_grpo_trainer.get_peak_flops_per_device

    def asked_of_gpus_only(accelerator: Any, dtype: str) -> float | None:
        return theirs(accelerator, dtype) if accelerator.device.type == "cuda" else None

    async_grpo_trainer.get_peak_flops_per_device = asked_of_gpus_only
    try:
        yield
    finally:
        async_grpo_trainer.get_peak_flops_per_device = theirs
