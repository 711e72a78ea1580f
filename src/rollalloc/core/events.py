"""The messages between a driver and the core: events that the driver reports, and actions that the core returns.

A driver *tells* the core `Done`, `Failed`, `Cancelled` and `Updated`; also `Offered`, if a framework's own data loader
picks the prompts, and `Moved`, if the recipe's replay has a gate. It *asks* the core for `Actions`. Messages contain only
ids and numbers. Texts, tensors and token log-probabilities are the payload of a rollout: the driver keeps them until the
core lists that rollout in `Actions.release`.

Events are frozen dataclasses. Orders and rows are named tuples: thousands are created, and named tuples are cheaper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class EventError(ValueError):
    """An event is impossible. Only the events before it in the same `tell` were processed."""


class MetricError(EventError):
    """A metric is outside [0, 1], and a rule of the recipe reads metrics as success rates."""


class RuleError(ValueError):
    """A rule of the recipe returned something that its contract does not allow."""


class NoScores(RuntimeError):
    """The run is over because scores are missing (`Allocator.scoreless`): the reward function or the generation fails.

    A trainer that raises this error saves no checkpoint. Fix the cause and resume from the last checkpoint.
    """


class NoProgress(RuntimeError):
    """Nothing is running, and the core can neither order a rollout nor make a batch. The recipe or the driver is wrong."""


LARGEST = 1e30  # largest reward or metric; advantages computed from it still fit into float32
LARGEST_WHOLE = 2**31 - 1  # largest length or version; sums of such numbers still fit into the per-prompt statistics
FARTHEST = 1e3  # nats per token; if the KL divergence of an update is larger, this value is used instead


@dataclass(frozen=True, slots=True)
class Done:
    """A rollout was generated and scored.

    Attributes:
        rollout: the id from its `Order`.
        reward: the number that training uses, after any shaping; within ±`LARGEST`.
        metric: the number that selection uses, such as 1 for right and 0 for wrong; within ±`LARGEST`. It must be in
            [0, 1] if a rule of the recipe reads metrics as success rates (`Recipe.rate_readers`).
        tokens: number of generated tokens, in [0, `LARGEST_WHOLE`].
        version: version of the weights that sampled the rollout's first token; at most the version of the last
            `Updated`.
        last_version: version of the weights that sampled its last token. None means the same as `version`.
        truncated: True if generation stopped at the length limit.
        uncertainty: Σ (1 - π)² over its tokens; 0 or more. π is the probability with which a token was sampled. The sum is
            roughly proportional to the squared norm of the rollout's ∇ log π. None if unknown.
    """

    rollout: int
    reward: float
    metric: float
    tokens: int
    version: int
    last_version: int | None = None
    truncated: bool = False
    uncertainty: float | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A rollout ended without a score, for example because its engine died or its verifier timed out.

    A failure is not a wrong answer: the prompt's success rate does not change.

    Attributes:
        rollout: the id from its `Order`.
        reason: text for the driver's log; the core does not read it.
        tokens: number of tokens generated before the failure.
    """

    rollout: int
    reason: str
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The driver stopped a rollout, because `Actions.cancel` listed it or because the driver had to abort it.

    Attributes:
        rollout: the id from its `Order`.
        tokens: tokens that were generated before it stopped.
    """

    rollout: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Updated:
    """The trainer trained on the outstanding batch, so the weights changed.

    Attributes:
        version: version of the new weights, which is the last version plus 1, whatever the number of optimizer steps.
        approx_kl: the divergence KL(before ‖ after) between the policy before this update and the policy after it, in
            nats per token; 0 or more. Values above `FARTHEST` count as `FARTHEST`. None if it was not measured.
        masked: rollouts of the batch that the trainer's loss left out, for example because they reached the length limit.
            They are not replayed.
    """

    version: int
    approx_kl: float | None = None
    masked: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Moved:
    """The policy has moved this far away from the replayed rows of the outstanding batch.

    For recipes whose replay has a gate (`Recipe.gate`). Tell this before the batch is trained on, and then read
    `Allocator.batch` again: beyond the gate's bound, it has no replayed rows any more.

    Attributes:
        share: share of the replayed rows' tokens that have moved, in [0, 1].
    """

    share: float


@dataclass(frozen=True, slots=True)
class Offered:
    """A framework's own data loader hands over prompts, for recipes whose prompt rule is `AsOffered`.

    Attributes:
        prompts: indices of the prompts, in the loader's order. An empty tuple reports that the loader has ended.
        epoch: the loader's pass over the data, from 0.
    """

    prompts: tuple[int, ...]
    epoch: int


Event = Done | Failed | Cancelled | Updated | Moved | Offered


class Order(NamedTuple):
    """A request to generate these rollouts of one prompt.

    Attributes:
        group: id of the group that the rollouts belong to. A group is one visit of one prompt.
        prompt: index of the prompt, in [0, number of prompts).
        stage: index of the recipe's stage that ordered the rollouts.
        rollouts: ids of the new rollouts. An id is never used twice.
        limit: maximum number of tokens of each of these rollouts, at least 1, where the recipe has a `Limit`. A rollout
            that reaches it is stopped and scored as it is. None: the engine's own maximum.
    """

    group: int
    prompt: int
    stage: int
    rollouts: tuple[int, ...]
    limit: int | None = None


class Row(NamedTuple):
    """One rollout to train on.

    Attributes:
        rollout: its id; the driver has its payload.
        prompt: index of its prompt.
        group: id of its group.
        advantage: its advantage, computed by the recipe.
        weight: factor on the row's loss. It does not include importance ratios: the driver computes them from
            log-probabilities.
        version: version of the weights that sampled the rollout's first token.
        replays: number of earlier batches that trained on this rollout.
    """

    rollout: int
    prompt: int
    group: int
    advantage: float
    weight: float
    version: int
    replays: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows to train on. After training, the driver must tell `Updated`.

    Attributes:
        rows: sorted by group, then by rollout id; replayed rows come last.
        version: version of the weights when the batch was made. The staleness of a row is `version - row.version`.
        short_because: None for a full batch; otherwise the reason why it has fewer groups than the recipe wants.
    """

    rows: tuple[Row, ...]
    version: int
    short_because: str | None = None


class Actions(NamedTuple):
    """The actions that the driver should take now. Each action is returned only once.

    Attributes:
        generate: orders to start.
        cancel: rollouts to stop. The driver must still tell a terminal event for each of them.
        release: rollouts whose payload the driver may free.
        batch: rows to train on, or None.
        finished: the reason why the run is over, or None.
    """

    generate: tuple[Order, ...] = ()
    cancel: tuple[int, ...] = ()
    release: tuple[int, ...] = ()
    batch: Batch | None = None
    finished: str | None = None


NOTHING = Actions()  # shared instance: the usual answer to an asynchronous driver, which asks after every completion
