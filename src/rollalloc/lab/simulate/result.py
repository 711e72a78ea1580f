"""Results of a simulated run, and of several seeds together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from rollalloc.lab.bench.summary import Interval, interval

USES = ("decoding", "pausing", "training", "idle", "unused")


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """Totals from the start of a run until one of its updates.

    Attributes:
        clock: seconds.
        decoding, pausing, training, idle, unused: GPU-seconds, which sum to clock × GPUs. Pausing is prefill and weight
            synchronization; unused are GPUs too few for another replica.
        slot_seconds: sum over rollouts of the seconds spent on a replica.
        tail: seconds in which few rollouts ran and none waited.
        paid: rollouts ordered.
        stopped: rollouts that were stopped.
        preempted: number of preemptions because a replica's memory was full.
        tokens: generated, of rollouts that ended.
        rows: trained on.
        row_tokens: trained on, without prompts.
        accounts: rollouts by cause; `open` ones have not ended.
    """

    clock: float = 0.0
    decoding: float = 0.0
    pausing: float = 0.0
    training: float = 0.0
    idle: float = 0.0
    unused: float = 0.0
    slot_seconds: float = 0.0
    tail: float = 0.0
    paid: int = 0
    stopped: int = 0
    preempted: int = 0
    tokens: int = 0
    rows: int = 0
    row_tokens: int = 0
    accounts: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run, after its warm-up.

    Attributes:
        seed: seed of the run.
        gpus: number of GPUs of the cluster.
        batches: trained.
        seconds: that they took.
        batch_seconds: seconds of each batch.
        gpu_seconds: by use, as in `Books`; they sum to seconds × GPUs.
        busy_slots: share of the slots that had a rollout, over the whole time.
        tail: share of the time in which few rollouts ran and none waited.
        paid, stopped, preempted, tokens, rows, row_tokens: as in `Books`.
        accounts: rollouts that ended in this time, by cause.
        why: why the run ended before all batches were trained; None if it did not.
    """

    seed: int
    gpus: int
    batches: int
    seconds: float
    batch_seconds: tuple[float, ...]
    gpu_seconds: Mapping[str, float]
    busy_slots: float
    tail: float
    paid: int
    stopped: int
    preempted: int
    tokens: int
    rows: int
    row_tokens: int
    accounts: Mapping[str, int]
    why: str | None

    @classmethod
    def of(cls, books: Sequence[Books], *, seed: int, gpus: int, slots: int, why: str | None) -> Result:
        """The difference between the first and the last of some books.

        Args:
            books: at least two.
            seed: seed of the run.
            gpus: number of GPUs of the cluster.
            slots: number of slots of all replicas.
            why: as the attribute.
        """
        first, last = books[0], books[-1]
        seconds = last.clock - first.clock

        def since(name: str) -> Any:
            return getattr(last, name) - getattr(first, name)

        return cls(
            seed=seed,
            gpus=gpus,
            batches=len(books) - 1,
            seconds=seconds,
            batch_seconds=tuple(after.clock - before.clock for before, after in pairwise(books)),
            gpu_seconds={use: since(use) for use in USES},
            busy_slots=since("slot_seconds") / (slots * seconds) if seconds else 0.0,
            tail=since("tail") / seconds if seconds else 0.0,
            **{name: since(name) for name in ("paid", "stopped", "preempted", "tokens", "rows", "row_tokens")},
            accounts={
                cause: count - first.accounts.get(cause, 0) for cause, count in last.accounts.items() if cause != "open"
            },
            why=why,
        )

    @property
    def per_batch(self) -> dict[str, float]:
        """Costs and shares per batch."""
        paid = {name: getattr(self, name) / self.batches for name in ("paid", "stopped", "preempted", "tokens", "rows")}
        gpu_seconds = sum(self.gpu_seconds.values())
        uses = {f"{use}_share": spent / gpu_seconds if gpu_seconds else 0.0 for use, spent in self.gpu_seconds.items()}
        cost = {"seconds": self.seconds / self.batches, "gpu_seconds": gpu_seconds / self.batches}
        return {**cost, "busy_slots": self.busy_slots, "tail": self.tail, **paid, **uses}


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedRecipe:
    """One recipe on one cluster, over seeds.

    Attributes:
        label: label of the recipe.
        gpus: number of GPUs of the cluster.
        figures: per batch, by name.
        faster: the first recipe's seconds over this one's on the same cluster, paired by seed; above 1 this one is faster.
        results: one per seed.
    """

    label: str
    gpus: int
    figures: Mapping[str, Interval]
    faster: Interval
    results: tuple[Result, ...]

    @classmethod
    def of(cls, label: str, results: Sequence[Result], baseline: Sequence[Result]) -> PricedRecipe:
        """Combine the seeds; the baseline has the same seeds."""
        each = [result.per_batch for result in results]
        pairs = zip(baseline, results, strict=True)
        return cls(
            label=label,
            gpus=results[0].gpus,
            figures={name: interval([one[name] for one in each]) for name in each[0]},
            faster=interval([theirs.per_batch["seconds"] / ours.per_batch["seconds"] for theirs, ours in pairs]),
            results=tuple(results),
        )

    def described(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "label": self.label,
            "gpus": self.gpus,
            "faster": asdict(self.faster),
            "per_batch": {name: asdict(value) for name, value in self.figures.items()},
            "seeds": [asdict(result) for result in self.results],
        }
