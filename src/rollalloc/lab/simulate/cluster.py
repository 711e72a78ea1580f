"""What is simulated: the GPUs and how they are shared, and everything else that a simulation needs but the recipe."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any, Literal, get_args

from rollalloc.core.recipe import Recipe, at_least, refuse_unmeasured
from rollalloc.core.rule import OfferedPromptRule
from rollalloc.lab.simulate.cost import Costs, Latency, Pace, at_most, positive
from rollalloc.lab.simulate.hardware import Hardware
from rollalloc.lab.simulate.workload import Fitted, Workload
from rollalloc.recipes.streaming import streamed

_MOST = 1_000_000  # GPUs, and slots of a replica: a typing error must not fill the memory
_MOST_TOKENS = 1_000_000_000_000  # that a replica holds

Schedule = Literal["sync", "async"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)


def _says(default: Any, says: str) -> Any:
    return field(default=default, metadata={"says": says})


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs, and who has them when.

    Attributes:
        gpus: at least 1; 2 where they are shared out.
        gpus_per_replica: that share the model of one replica.
        slots: rollouts that a replica decodes at most.
        schedule: "sync": all GPUs generate, then all train. "async": some always generate, the others always train; one
            batch or more is generated while another is trained.
        trainer_share: of the GPUs that train where they are shared out, in (0, 1).
        ahead: batches that are generated while one is trained, at least; None: as many as the recipe does.
        overlap: log-probabilities of what ended are computed while other rollouts run, of what is not trained on, too;
            under "sync" on GPUs that decode, which costs decoding nothing here.

    Raises:
        ValueError: a number out of its range, too few GPUs for a replica and a trainer, or `ahead` under "sync".
    """

    gpus: int
    gpus_per_replica: int = _says(1, "GPUs that share the model of one replica.")
    slots: int = _says(256, "Rollouts that a replica decodes at a time at most.")
    schedule: Schedule = field(
        default="sync",
        metadata={"says": "sync: all GPUs generate, then all train; async: some generate, the others train."},
    )
    trainer_share: float = _says(0.5, "async: share of the GPUs that train.")
    ahead: int | None = _says(None, "async: batches generated while one trains, at least; by default the recipe's.")
    overlap: bool = _says(False, "Log-probabilities of what ended while other rollouts run.")

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
                raise ValueError("ahead: under schedule sync nothing is trained beside what is generated; take async")
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
        """GPUs that train: all, or those set apart."""
        if self.schedule == "sync":
            return self.gpus
        return min(self.gpus - self.gpus_per_replica, max(1, round(self.trainer_share * self.gpus)))

    @cached_property
    def replicas(self) -> int:
        """Of the model that generate."""
        return (self.gpus - self.trainers * (self.schedule == "async")) // self.gpus_per_replica

    @cached_property
    def unused(self) -> int:
        """GPUs that are too few for another replica, and do nothing while others generate."""
        apart = self.trainers if self.schedule == "async" else 0
        return self.gpus - apart - self.replicas * self.gpus_per_replica


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A simulation without its recipe and seed.

    Attributes:
        cluster: the GPUs.
        hardware: the model on them, of which is known by arithmetic what is not given.
        costs: of what is not decoding; None: by arithmetic.
        latency: of decoding; None: by arithmetic.
        kv_tokens: tokens whose keys and values a replica can hold; None: by arithmetic, and without end where `latency` is
            given, since the model that it was measured on is not known.
        workload: lengths and successes.
        prompt_tokens: of every prompt.
        batches: to train and count, at least 1.
        warmup: batches before these, which are not counted: pipelines fill, records of lengths begin.

    Raises:
        ValueError: a number out of its range, more slots than the latency curve has, or memory too small for one rollout.
    """

    cluster: Cluster
    hardware: Hardware = field(default_factory=Hardware)
    costs: Costs | None = None
    latency: Latency | None = None
    kv_tokens: int | None = _says(None, "Tokens that a replica can hold; by default what --model leaves on --gpu.")
    workload: Workload = field(default_factory=Fitted)
    prompt_tokens: int = _says(200, "Tokens of every prompt.")
    batches: int = _says(8, "Batches that are counted.")
    warmup: int = _says(2, "Batches before these, not counted: pipelines fill, records of lengths begin.")

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
            f"{hardware.model} on {gpus} {hardware.gpu}{'s' * (gpus > 1)} has memory for keys and values"
            if self.kv_tokens is None
            else "--kv-tokens is for a memory"
        )
        raise ValueError(
            f"{whose} of {self.room:,.0f} tokens, a rollout may need {longest:,}: {self.prompt_tokens:,} of its prompt "
            f"and {self.workload.longest:,} of its own; give more --gpus-per-replica, a --gpu with more memory, or shorter "
            "rollouts"
        )

    @cached_property
    def charges(self) -> Costs:
        """The costs in force."""
        return self.costs or self.hardware.costs()

    @cached_property
    def curve(self) -> Latency:
        """The latency curve in force."""
        return self.latency or self.hardware.latency(self.cluster.gpus_per_replica, self.cluster.slots)

    @cached_property
    def room(self) -> float:
        """Tokens whose keys and values a replica can hold; infinity where that is not known."""
        if self.kv_tokens is not None:
            return self.kv_tokens
        return inf if self.latency else self.hardware.kv_tokens(self.cluster.gpus_per_replica)

    @cached_property
    def pace(self) -> Pace:
        """How a replica decodes."""
        again = self.charges.prefill / self.cluster.gpus_per_replica
        return Pace(self.curve.table(self.cluster.slots), self.curve.per_held, self.room, again)

    def fitting(self, recipe: Recipe, max_staleness: int | None = None) -> Recipe:
        """The recipe as this cluster carries it out.

        Args:
            recipe: any that draws its own prompts.
            max_staleness: instead of the recipe's own; None: that, but at least 1 where one batch is generated while
                another is trained, and the cluster's `ahead`.

        Raises:
            ValueError: a recipe whose prompts a loader draws, or a negative staleness, or one below `ahead`.
        """
        refuse_unmeasured(recipe, "the simulator")
        if isinstance(recipe.prompts, OfferedPromptRule):
            raise ValueError(
                f"{recipe.prompts!r} waits for a framework's loader, which there is not here; give a recipe that "
                "draws its prompts"
            )
        if self.cluster.schedule == "async":
            if max_staleness is None and self.cluster.ahead is None:
                max_staleness = max(recipe.max_staleness, 1)
            return streamed(recipe, staleness=max_staleness, ahead=self.cluster.ahead)
        if max_staleness is None:
            return recipe
        at_least("staleness", max_staleness, 0)
        return replace(recipe, max_staleness=max_staleness)
