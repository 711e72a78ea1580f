"""Settings of the native trainer: what is the same for every recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, get_args

from rollalloc.core.packing import describe
from rollalloc.core.recipe import at_least
from rollalloc.generate.sampling import Sampling, Streaming
from rollalloc.models.dtypes import Precision, SamplingDtype
from rollalloc.train.objective import Loss
from rollalloc.train.schedule import Schedule

Engine = Literal["sync", "async"]
# Settings that change nothing but what is saved and said, and how long is waited for what does not answer:
SAVING = ("checkpoint_every", "checkpoint_minutes", "keep_checkpoints", "log_rollouts", "notices")
WAITING = ("generator_limit_s",)
ASYNC = ("engine", "streaming")  # a run of the synchronous engine does not say them
# A resumed run may have others of those that end it, and of those that bound its memory:
_ENDING = ("max_batches", "stop_when_barren", "target")
_MEMORY = ("tokens_per_forward", "gradient_checkpointing")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is the same for every recipe.

    Attributes:
        seed: of prompts, sampling, mini-batches.
        sampling: of rollouts; top-k and top-p must be off, since the update needs the distribution that was sampled from.
        learning_rate: AdamW's.
        weight_decay: AdamW's.
        betas: AdamW's, each in [0, 1): what its means of the gradient and of its square keep a step.
        schedule: of the learning rate, over optimizer steps or the budget.
        optimizer_steps_per_batch: a batch is split into this many mini-batches, whatever the size of its groups.
        loss: its clipping, its aggregation over tokens, its KL term.
        max_grad_norm: gradients are clipped to this norm.
        adaptive_clip: and to so many times the running mean of their norms, at least 1, where that is less; see
            `rollalloc.train.clipping`. None: to `max_grad_norm` alone.
        averaging: rows that the running mean of the weights spans, at most; it samples, is evaluated and is kept, see
            `rollalloc.train.averaging`. Needs memory for one more copy of what is trained. 0: no mean.
        tokens_per_forward: tokens of one forward and backward pass, prompts and padding included; a longer row has one
            of its own. Bounds memory, changes nothing else.
        precision: the update and an exact accuracy compute in, "fp32", "bf16" or "auto": bf16 on a GPU that has it, else
            fp32. Weights, gradients, optimizer and log-probabilities are in fp32 whatever it is.
        sampling_dtype: of weights and key-value cache while sampling. Other than float32, a copy of the model samples, and
            every row's importance ratio is to that, or its weight, truncated as a stale row's is, where there is no mean.
        gradient_checkpointing: keep the inputs of the model's layers only and compute the rest again in the backward pass.
            Bounds memory; the gradient is the same up to rounding.
        eval_every: rollouts paid between two points of the grid of evaluations.
        eval_samples: rollouts a held-out prompt, where it has not one single right answer.
        max_batches: batches after which the run ends; None: no limit.
        stop_when_barren: end the run when as many groups as there are prompts, and at least 256, had no reward variance.
        target: held-out accuracy at which the run ends, once two weights evaluated in a row reach it; None: none.
        checkpoint_every: batches between two checkpoints; None: no number of them.
        checkpoint_minutes: minutes between two checkpoints; None: no time. One is written at the end, and where the run is
            asked to stop, in any case. No checkpoint changes what is trained.
        keep_checkpoints: newest checkpoints to keep, at least 1.
        log_rollouts: write each rollout's text and score to `rollouts.jsonl`.
        notices: warn of a reward that fails, never differs or is slow, and of rollouts that teach little, in the log,
            `watch` and the page.
        engine: "sync": what is ordered is generated to its end, then a batch is trained. "async": rollouts stream.
        streaming: how; of the asynchronous engine only.
        generator_limit_s: seconds that what generates may give no sign of life, where it has a process of its own; then the
            run is saved and ends. A token is a sign of life, so that no rollout is too long.

    Raises:
        ValueError: a value out of its range.
    """

    seed: int = 0
    sampling: Sampling
    learning_rate: float = 1e-6
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    schedule: Schedule = field(default_factory=Schedule)
    optimizer_steps_per_batch: int = 1
    loss: Loss = field(default_factory=Loss)
    max_grad_norm: float = 1.0
    adaptive_clip: float | None = 1.5
    averaging: int = 640
    tokens_per_forward: int = 8192
    precision: Precision = "auto"
    sampling_dtype: SamplingDtype = "float32"
    gradient_checkpointing: bool = False
    eval_every: int = 2000
    eval_samples: int = 4
    max_batches: int | None = None
    stop_when_barren: bool = True
    target: float | None = None
    checkpoint_every: int | None = None
    checkpoint_minutes: float | None = 10.0
    keep_checkpoints: int = 2
    log_rollouts: bool = False
    notices: bool = True
    engine: Engine = "sync"
    streaming: Streaming = field(default_factory=Streaming)
    generator_limit_s: float = 600.0

    def __post_init__(self) -> None:
        if self.sampling.top_p < 1 or self.sampling.top_k > 0:
            why = "without top_p and top_k, or their log-probabilities are not the policy's"
            raise ValueError(f"rollouts to train on must be sampled {why}; got {self.sampling}")
        at_least("seed", self.seed, 0)
        at_least("averaging", self.averaging, 0)
        if self.seed >= 2**63:
            raise ValueError(f"seed must be less than 2**63, got {self.seed}")
        sizes = ("optimizer_steps_per_batch", "tokens_per_forward", "eval_every", "eval_samples", "keep_checkpoints")
        for name in (*sizes, "max_batches", "checkpoint_every"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        for name in ("learning_rate", "max_grad_norm", "checkpoint_minutes"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < inf:
                raise ValueError(f"{name} must be above 0 and finite, got {getattr(self, name)}")
        if not 1 <= self.generator_limit_s < inf:
            raise ValueError(f"generator_limit_s must be at least 1 and finite, got {self.generator_limit_s}")
        if not (0 <= self.weight_decay < inf and len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)):
            expected = "weight_decay must be 0 or more, and betas (the second is adam_beta2) two numbers in [0, 1)"
            raise ValueError(f"{expected}, got {self.weight_decay} and {self.betas}")
        if self.adaptive_clip is not None and not 1 <= self.adaptive_clip < inf:
            expected = "a multiple of the mean gradient norm, at least 1 and finite, or None for max_grad_norm alone"
            raise ValueError(f"adaptive_clip must be {expected}; got {self.adaptive_clip}")
        if self.target is not None and not 0 < self.target <= 1:
            raise ValueError(f"target must be an accuracy in (0, 1], got {self.target}")
        for name, kind in (("precision", Precision), ("sampling_dtype", SamplingDtype), ("engine", Engine)):
            if getattr(self, name) not in (known := get_args(kind)):
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if self.engine == "async" and self.sampling_dtype != "float32":
            raise ValueError(f"the asynchronous engine samples in float32, got sampling_dtype {self.sampling_dtype!r}")

    def identity(self) -> dict[str, Any]:
        """The settings that a resumed run must have in common with the one that was interrupted, as plain data."""
        may_differ = {*SAVING, *WAITING, *_ENDING, *_MEMORY, *(ASYNC if self.engine == "sync" else ())}
        if self.schedule.over_budget:
            may_differ.remove("max_batches")  # then it is part of what the rate falls over
        if self.engine == "async" and not self.streaming.overlap:
            may_differ.remove("tokens_per_forward")  # rollouts go on by a token after each forward pass
        return {name: value for name, value in describe(self).items() if name not in may_differ}
