"""Generates rollouts with the model of a TRL trainer: with rollalloc's sampler if it supports the model and the settings,
otherwise with TRL's own back-end.
"""

from __future__ import annotations

import logging
from collections import abc
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from accelerate.utils import gather_object
from numpy.typing import NDArray
from torch import Tensor
from trl import GRPOTrainer

from rollalloc.drivers.trl.distributed import called, in_step, is_sharded, model_to_call
from rollalloc.drivers.trl.rollout import Tokens, eos_ids
from rollalloc.drivers.trl.turns import Turns
from rollalloc.generate import sampler
from rollalloc.generate.sampler import Generation, Request
from rollalloc.models.likelihood import completion_logprobs, in_eval_mode, why_cache_is_unfit
from rollalloc.models.settings import Sampling

log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Generator:
    """Generates rollouts with the model of a TRL trainer.

    Args:
        trainer: TRL's trainer.
        use_sampler: True: generate with rollalloc's sampler. False: generate with TRL's back-end. None: use the sampler if
            it supports the model and the settings, otherwise TRL's back-end.
        keep_logprobs: whether the recipe needs the log-probability of each token under the weights that sampled it.
        tools: TRL's `tools`.
        environment_factory: TRL's `environment_factory`.

    Attributes:
        turns: generates rollouts of several turns. None: there are neither tools nor environments.
        samples: whether rollalloc's sampler generates.
        knows_logprobs: whether the log-probabilities of generations are known; otherwise they are NaN.
        gives_the_policys: whether the log-probabilities equal those of a forward pass with the same weights; False in half
            precision.

    Raises:
        ValueError: `use_sampler` is True, but the sampler does not support the model or a setting.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        use_sampler: bool | None,
        keep_logprobs: bool,
        tools: Sequence[Any] | None = None,
        environment_factory: Any = None,
    ) -> None:
        several = bool(tools) or environment_factory is not None
        self.turns = Turns(trainer, self, tools, environment_factory) if several else None
        obstacle = "tools and environments" if several else _obstacle_to_sampler(trainer)
        obstacle = obstacle or (None if use_sampler is False else _obstacle_in_model(trainer))
        if use_sampler and obstacle:
            raise ValueError(
                f"use_sampler=True, but rollalloc's sampler does not support {obstacle}; set use_sampler=None"
            )
        self.trainer = trainer
        self.samples = obstacle is None if use_sampler is None else use_sampler
        self.knows_logprobs = self.samples or trainer.use_vllm or keep_logprobs
        # In float32 the sampler's log-probabilities match a forward pass over the whole row; in half precision they do not.
        half = trainer.args.bf16 or trainer.args.fp16 or trainer.model.dtype != torch.float32
        self.gives_the_policys = self.samples and not half
        self.eos_ids = eos_ids(trainer)
        self.pad_id = int(trainer.processing_class.pad_token_id)
        self._synced_at: int | None = None
        self._model: Any = None

    def begin(self) -> None:
        """Prepare for a call of `train`, even after an interrupted call: ask for a new batch, and send the weights to vLLM.

        TRL counts micro-batches in `_step`, and asks for a new batch at certain counts. TRL itself never resets the count.
        """
        self._synced_at = self._model = None
        self.trainer._step = 0

    def __call__(self, requests: Sequence[Request], limits: Iterable[int | None] = (None,)) -> list[Generation]:
        """Generate one completion per rollout.

        Args:
            requests: those of this process.
            limits: the different limits of the requests of all processes, in the same order in each of them. TRL's
                back-ends generate what has the same limit in one call, and every process takes part in each call.
        """
        if self.samples:
            return sampler.generate(requests=requests, **self._sampler)
        made: list[Generation] = []
        for limit in limits:
            asked = [request for request in requests if request.limit == limit]
            prompts = [request.tokens for request in asked for _ in request.rollouts]
            rollouts = [rollout for request in asked for rollout in request.rollouts]
            with self._limited_to(limit):
                completions, logprobs = self.complete(prompts)
            likely = self.filled(list(zip(prompts, completions, strict=True)), logprobs)
            made += [
                Generation(rollout, tokens, logprob_T, truncated=tokens[-1] not in self.eos_ids)
                for rollout, tokens, logprob_T in zip(rollouts, completions, likely, strict=True)
            ]
        return made

    @contextmanager
    def _limited_to(self, limit: int | None) -> abc.Iterator[None]:
        """Let TRL's back-end generate at most this many tokens."""
        if limit is None:
            yield
            return
        if self.trainer.use_vllm:
            holder, name = self.trainer.vllm_generation, "max_completion_length"
        else:
            holder, name = self.trainer.generation_config, "max_new_tokens"
        before = getattr(holder, name)
        setattr(holder, name, min(limit, before))
        try:
            yield
        finally:
            setattr(holder, name, before)

    @property
    def can_stop(self) -> bool:
        """Whether rollouts can be stopped: only by rollalloc's sampler, and only in a run with a single process."""
        return self.samples and self.trainer.accelerator.num_processes == 1

    def stream(self, requests: Sequence[Request]) -> abc.Generator[list[Generation], Iterable[int] | None]:
        """Yield rollouts as they end. `send` takes ids of rollouts to stop; see `rollalloc.generate.sampler.stream`."""
        return sampler.stream(requests=requests, **self._sampler)

    def complete(self, prompts: Sequence[Tokens]) -> tuple[list[Tokens], list[NDArray[np.float32]] | None]:
        """Generate one completion per prompt with TRL's back-end.

        Returns:
            The completions, including EOS, and their log-probabilities (None if the back-end returns none).
        """
        if not self.trainer.use_vllm:
            return self._by_trl(prompts), None
        self._sync()
        return self._by_vllm(prompts, max(gather_object([len(prompts)])))

    def filled(
        self, pairs: Sequence[tuple[Tokens, Tokens]], logprobs: list[NDArray[np.float32]] | None
    ) -> list[NDArray[np.float32]]:
        """The log-probabilities of the completions: the back-end's, if it returns them; otherwise those of a forward pass,
        or NaN if the recipe does not need log-probabilities.
        """
        if logprobs is not None:
            return logprobs
        if self.knows_logprobs:
            return self.logprobs(pairs)
        return [np.full(len(tokens), np.nan, np.float32) for _, tokens in pairs]

    def logprobs(self, pairs: Sequence[tuple[Tokens, Tokens]]) -> list[NDArray[np.float32]]:
        """Log-probabilities of the completions' tokens under the model's current weights; see `logprobs_of`."""
        return logprobs_of(self.trainer, self._called_model, pairs)

    def _by_trl(self, prompts: Sequence[Tokens]) -> list[Tokens]:
        """Generate as TRL does with transformers' `generate` or continuous batching, but without dropout."""
        turn: Any = GRPOTrainer._generate_single_turn
        several = (1,) if "num_generations" in signature(turn).parameters else ()  # older TRL has no such parameter
        at_once = max(1, len(prompts)) if _continuous(self.trainer) else self._rows_at_once
        found: list[Any] = []
        with in_eval_mode(self.trainer.model):
            for asked in in_step(self.trainer, _parts(prompts, at_once), self.eos_ids[:1]):
                found += turn(self.trainer, [list(tokens) for tokens in asked], None, {}, *several)[0]
        del found[len(prompts) :]  # completions of the parts that only keep this process in step
        if len(found) != len(prompts):
            raise RuntimeError(
                f"expected {len(prompts)} completions from TRL, got {len(found)}; with continuous batching, TRL's own log "
                "says why the others failed"
            )
        return [self._up_to_the_end(list(tokens)) for tokens in found]

    @property
    def _called_model(self) -> Any:
        """The model, see `model_to_call`. The search takes time, so it is done once per call of `train`."""
        if self._model is None:
            self._model = model_to_call(self.trainer, self.trainer.model_wrapped)
        return self._model

    @property
    def _rows_at_once(self) -> int:
        """The number of rows that stock TRL would generate at once."""
        return self.trainer.args.per_device_train_batch_size * self.trainer.args.steps_per_generation

    @property
    def _sampler(self) -> dict[str, Any]:
        """The sampler's arguments, except for the requests."""
        trainer = self.trainer
        return {
            "model": self._called_model,
            "sampling": Sampling(
                trainer.max_completion_length, temperature=trainer.temperature, max_rows=self._rows_at_once
            ),
            "eos_ids": self.eos_ids,
            "pad_id": self.pad_id,
            "seed": trainer.args.seed,
        }

    def keep_up(self) -> None:
        """Join the other processes' calls of vLLM until no process has a prompt left. vLLM waits for all processes."""
        if self.trainer.use_vllm:
            self._sync()
            while most := max(gather_object([0])):
                self._by_vllm([], most)

    def _sync(self) -> None:
        """Send the weights to vLLM, at most once per step. Under Unsloth, vLLM may share the trainer's own weights."""
        if self._synced_at != self.trainer.state.global_step:
            engine = getattr(self.trainer.vllm_generation, "llm", None)
            if not getattr(engine, "shared_weights", False):
                self.trainer.vllm_generation.sync_weights()
            self._synced_at = self.trainer.state.global_step

    def _by_vllm(self, prompts: Sequence[Tokens], most: int) -> tuple[list[Tokens], list[NDArray[np.float32]]]:
        """Generate with vLLM. Every process must give vLLM the same number of prompts, `most`."""
        filled = [*prompts, *[self.eos_ids[:1]] * (most - len(prompts))]
        _, completions, logprobs, _ = self.trainer.vllm_generation.generate(
            prompts=[list(tokens) for tokens in filled], images=None, num_generations=1
        )
        completions, logprobs = completions[: len(prompts)], logprobs[: len(prompts)]
        # vLLM lists several log-probabilities per token. The first belongs to the sampled token, and may be None.
        first = [[np.nan if at[0] is None else at[0] for at in logprob] for logprob in logprobs]
        return [tuple(tokens) for tokens in completions], [np.array(logprob, np.float32) for logprob in first]

    def _up_to_the_end(self, tokens: list[int]) -> Tokens:
        ends = [at for at, token in enumerate(tokens) if token in self.eos_ids]
        return tuple(tokens[: ends[0] + 1] if ends else tokens)


def logprobs_of(trainer: Any, model: Any, pairs: Sequence[tuple[Tokens, Tokens]]) -> list[NDArray[np.float32]]:
    """Log-probabilities of the completions' tokens under a model in eval mode, one micro-batch at a time.

    Args:
        trainer: TRL's trainer. Its temperature, padding and micro-batch size are used.
        model: the model, as `model_to_call` returns it.
        pairs: token ids of (prompt, completion). If the model is sharded, every process must call this, even without pairs.

    Returns:
        For each pair, an array with one entry per token of the completion, shape (T,).
    """
    found: list[NDArray[np.float32]] = []
    end = eos_ids(trainer)[:1]
    with called(trainer, model) as model:
        for part in in_step(trainer, _parts(pairs, trainer.args.per_device_train_batch_size), (end, end)):
            prompts, completions = zip(*part, strict=True)
            logprobs_BT, _ = completion_logprobs(
                model,
                prompts,
                completions,
                pad_id=trainer.processing_class.pad_token_id,
                temperature=trainer.temperature,
                share=not is_sharded(trainer),  # a shared prefix takes a forward pass of its own
            )
            rows_BT = logprobs_BT.cpu().numpy()
            found += [row_T[: len(tokens)].copy() for row_T, tokens in zip(rows_BT, completions, strict=True)]
    return found[: len(pairs)]


def _parts(rows: Sequence[_T], at_once: int) -> list[Sequence[_T]]:
    return [rows[start : start + at_once] for start in range(0, len(rows), at_once)]


def steps_per_batch(args: Any) -> int:
    """The number of optimizer steps on each batch of the recipe, from TRL's settings alone.

        steps_per_generation · num_iterations / gradient_accumulation_steps

    Raises:
        ValueError: the quotient is not a whole number.
    """
    passes, accumulated = args.steps_per_generation * args.num_iterations, args.gradient_accumulation_steps
    if passes % accumulated:
        raise ValueError(
            "a batch of the recipe must be trained in whole optimizer steps, but steps_per_generation × num_iterations = "
            f"{args.steps_per_generation} × {args.num_iterations} micro-batches are not a multiple of "
            f"gradient_accumulation_steps={accumulated}; leave steps_per_generation unset, or change it"
        )
    return passes // accumulated


def widened(trainer: Any, filled: tuple[Tensor, Tensor], *, side: Literal["left", "right"]) -> tuple[Tensor, Tensor]:
    """Pad ids and mask on this side until their width is a multiple of TRL's `pad_to_multiple_of`."""
    ids_BT, mask_BT = filled
    lacking = -ids_BT.shape[1] % (trainer.pad_to_multiple_of or 1)
    where = (lacking, 0) if side == "left" else (0, lacking)
    pad_id = int(trainer.processing_class.pad_token_id)
    return (
        torch.nn.functional.pad(ids_BT, where, value=pad_id),
        torch.nn.functional.pad(mask_BT, where, value=False),
    )


def _obstacle_to_sampler(trainer: Any) -> str | None:
    """Name the first setting of the trainer that rollalloc's sampler does not support; None if it supports all."""
    args = trainer.args
    obstacles = {
        "use_vllm": trainer.use_vllm,
        "continuous batching": _continuous(trainer),
        # Under these settings, the log-probabilities of sampled tokens would differ from the policy's.
        "top_p": args.top_p < 1,
        "top_k": (args.top_k or 0) > 0,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty != 1.0,
        "generation_kwargs": args.generation_kwargs,
        "cache_implementation": getattr(args, "cache_implementation", None),
        "a sharded model": is_sharded(trainer),
    }
    return next((name for name, there in obstacles.items() if there), None)


def _continuous(trainer: Any) -> bool:
    """Whether TRL uses continuous batching. Both names of the setting are checked, because TRL has renamed it."""
    names = ("use_transformers_continuous_batching", "use_transformers_paged")
    return any(getattr(trainer, name, False) for name in names)


def _obstacle_in_model(trainer: Any) -> str | None:
    """Say and log why rollalloc's sampler does not support the model; None if it does."""
    obstacle = why_cache_is_unfit(trainer.accelerator.unwrap_model(trainer.model))
    if obstacle:
        log.warning("TRL generates, because rollalloc's sampler does not support %s", obstacle)
    return obstacle
