"""The scenario of a simulation: the GPUs, how they are shared, the costs and the workload."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Literal, get_args

from rollalloc.core.recipe import Recipe, at_least
from rollalloc.core.rule import OfferedPromptRule, called
from rollalloc.recipes.streaming import streamed
from rollalloc_lab.simulate.cost import Costs, Latency, Pace, at_most, option, positive
from rollalloc_lab.simulate.hardware import Hardware
from rollalloc_lab.simulate.workload import Fitted, Workload

_MOST = 1_000_000  # maximum number of GPUs, and of slots per replica; a mistyped number must not fill the memory
_MOST_TOKENS = 1_000_000_000_000  # maximum number of tokens that a replica holds

Schedule = Literal["sync", "async"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The GPUs, and how generation and training share them.

    Attributes:
        gpus: number of GPUs; at least 1, with "async" at least 2.
        gpus_per_replica: number of GPUs over which one copy of the model is split.
        slots: maximum number of rollouts that a replica decodes at once.
        schedule: "sync": all GPUs generate, then all train. "async": some GPUs always generate and the others always train;
            at least one batch is generated while another is trained.
        trainer_share: with "async", share of the GPUs that train, in (0, 1).
        ahead: minimum number of batches generated while one is trained. None: the recipe's number.
        overlap: True: compute log-probabilities of all finished rollouts while others are running, even of rollouts that
            will not be trained on. With "sync", the decoding GPUs do this, and the simulation assumes that decoding does not
            slow down.

    Raises:
        ValueError: a number is out of its range, there are too few GPUs for a replica and a trainer, or `ahead` is set
            under "sync".
    """

    gpus: int
    gpus_per_replica: int = option(1, "GPUs that share the model of one replica.")
    slots: int = option(256, "Maximum number of rollouts that a replica decodes at once.")
    schedule: Schedule = field(
        default="sync",
        metadata={"says": "sync: all GPUs generate, then all train; async: some generate, the others train."},
    )
    trainer_share: float = option(0.5, "async: share of the GPUs that train, in (0, 1).")
    ahead: int | None = option(
        None, "async: generate at least this many batches while one trains (default: the recipe's)."
    )
    overlap: bool = option(
        False, "Compute log-probabilities of finished rollouts while others still run, instead of after the last."
    )

    def __post_init__(self) -> None:
        at_least("gpus_per_replica", self.gpus_per_replica, 1)
        at_least("slots", self.slots, 1)
        positive("trainer_share", self.trainer_share)
        if self.trainer_share >= 1:
            raise ValueError(f"trainer_share must lie in (0, 1), got {self.trainer_share}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {self.schedule!r}")
        if self.ahead is not None:
            at_least("ahead", self.ahead, 1)
            if self.schedule == "sync":
                raise ValueError("ahead: with schedule sync, nothing is generated while a batch is trained; use async")
        least = self.gpus_per_replica + (self.schedule == "async")
        at_least(
            "gpus",
            self.gpus,
            least,
            f"a replica of {self.gpus_per_replica}{' and a trainer' * (least > self.gpus_per_replica)}",
        )
        for name in ("gpus", "slots"):
            at_most(name, getattr(self, name), _MOST)

    @cached_property
    def trainers(self) -> int:
        """Number of GPUs that train: with "sync" all, with "async" the trainer's share."""
        if self.schedule == "sync":
            return self.gpus
        return min(self.gpus - self.gpus_per_replica, max(1, round(self.trainer_share * self.gpus)))

    @cached_property
    def replicas(self) -> int:
        """Number of replicas that generate."""
        return (self.gpus - self.trainers * (self.schedule == "async")) // self.gpus_per_replica

    @cached_property
    def unused(self) -> int:
        """Number of GPUs that are left over, too few for another replica. They are idle while the others generate."""
        apart = self.trainers if self.schedule == "async" else 0
        return self.gpus - apart - self.replicas * self.gpus_per_replica


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A simulation, without its recipe and seed.

    Attributes:
        cluster: the GPUs.
        hardware: the model and the GPU type, from which missing costs are estimated.
        costs: all costs except decoding. None: estimated.
        latency: latency of decoding. None: estimated.
        kv_tokens: number of tokens of context that a replica can hold. None: estimated, or unlimited if `latency` is given
            (the model of a measured latency is unknown).
        workload: lengths and success rates of rollouts.
        prompt_tokens: tokens per prompt.
        batches: number of batches to train and measure, at least 1.
        warmup: number of batches before the measured ones. During these batches, pipelines fill and recipes collect
            lengths.

    Raises:
        ValueError: a number is out of its range, there are more slots than the latency curve covers, or the memory is
            too small for one rollout.
    """

    cluster: Cluster
    hardware: Hardware = field(default_factory=Hardware)
    costs: Costs | None = None
    latency: Latency | None = None
    kv_tokens: int | None = option(
        None, "Tokens of context that a replica can hold (default: what fits on --gpu besides the weights)."
    )
    workload: Workload = field(default_factory=Fitted)
    prompt_tokens: int = option(200, "Tokens per prompt.")
    batches: int = option(8, "Batches to train and measure.")
    warmup: int = option(2, "Batches trained before those that are measured, to reach a steady state.")

    def __post_init__(self) -> None:
        at_least("prompt_tokens", self.prompt_tokens, 0)
        at_least("batches", self.batches, 1)
        at_least("warmup", self.warmup, 0)
        for name in ("prompt_tokens", "batches", "warmup"):
            at_most(name, getattr(self, name), _MOST)
        if self.kv_tokens is not None:
            at_least("kv_tokens", self.kv_tokens, 1)
            at_most("kv_tokens", self.kv_tokens, _MOST_TOKENS)
        _ = self.pace
        self._refuse_small_memory()

    def _refuse_small_memory(self) -> None:
        longest = self.prompt_tokens + self.workload.longest
        if longest <= self.room:
            return
        gpus, hardware = self.cluster.gpus_per_replica, self.hardware
        whose = (
            f"{hardware.model} on {gpus} {hardware.gpu}{'s' * (gpus > 1)}"
            if self.kv_tokens is None
            else "with --kv-tokens"
        )
        raise ValueError(
            f"{whose}: keys and values of {self.room:,.0f} tokens fit, but a rollout may need {longest:,}: "
            f"{self.prompt_tokens:,} for the prompt and {self.workload.longest:,} for the completion; give more "
            "--gpus-per-replica, a --gpu with more memory, or shorter rollouts"
        )

    @cached_property
    def charges(self) -> Costs:
        """The costs that apply."""
        return self.costs or self.hardware.costs()

    @cached_property
    def curve(self) -> Latency:
        """The latency curve that applies."""
        return self.latency or self.hardware.latency(self.cluster.gpus_per_replica, self.cluster.slots)

    @cached_property
    def room(self) -> float:
        """Tokens of context that a replica can hold; infinity if unknown."""
        if self.kv_tokens is not None:
            return self.kv_tokens
        return inf if self.latency else self.hardware.kv_tokens(self.cluster.gpus_per_replica)

    @cached_property
    def pace(self) -> Pace:
        """The speed and memory of a replica."""
        again = self.charges.prefill / self.cluster.gpus_per_replica
        return Pace(self.curve.table(self.cluster.slots), self.curve.per_held, self.room, again)

    def fitting(self, recipe: Recipe, max_staleness: int | None = None) -> Recipe:
        """The recipe, adapted to this cluster's schedule.

        Args:
            recipe: any recipe that draws its own prompts.
            max_staleness: replaces the recipe's own value. None: the recipe's own value; with "async", at least 1 and at
                least the cluster's `ahead`.

        Raises:
            ValueError: a data loader draws the recipe's prompts; or the staleness is negative or below `ahead`.
        """
        if isinstance(recipe.prompts, OfferedPromptRule):
            raise ValueError(
                f"{called(recipe.prompts)} gets its prompts from a framework's data loader, which the simulator lacks; "
                "give a recipe that draws its prompts"
            )
        if self.cluster.schedule == "async":
            if max_staleness is None and self.cluster.ahead is None:
                max_staleness = max(recipe.max_staleness, 1)
            return streamed(recipe, staleness=max_staleness, ahead=self.cluster.ahead)
        if max_staleness is None:
            return recipe
        at_least("staleness", max_staleness, 0)
        return replace(recipe, max_staleness=max_staleness)
