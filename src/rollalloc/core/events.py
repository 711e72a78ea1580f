"""What comes into the core and what goes out: values without logic, which nobody changes.

What comes in are frozen dataclasses; what goes out by the thousand are named tuples, which are cheaper to make.

A driver *tells* the core `Done`, `Failed`, `Cancelled`, `Updated` (and `Offered` where a framework's own
loader draws the prompts) and *asks* it for `Actions`. Everything is an id or a number: text, tensors and token
log-probabilities stay with the driver, as the payload of a rollout, until the core names that rollout in
`Actions.release`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rollalloc.core.latency import Curve

LARGEST = 1e30  # of rewards and metrics: squares and differences of such stay within what trains, float32 included
LARGEST_WHOLE = 2**31 - 1  # of lengths and versions: sums of such stay within what is kept of each prompt
FARTHEST = 1e3  # nats per token that an update counts for: beyond it nothing is left of the policy before


@dataclass(frozen=True, slots=True)
class Done:
    """A rollout was generated and scored.

    Attributes:
        rollout: the id that an `Order` gave.
        reward: what training uses (after shaping); within ±`LARGEST`.
        metric: what selection looks at, such as 1 for right and 0 for wrong; within ±`LARGEST`, and in [0, 1] under a
            recipe whose rules take it for a success rate (`Recipe.rate_readers`).
        tokens: generated tokens, in [0, `LARGEST_WHOLE`].
        version: version of the weights at the rollout's first token, at most the version last told by `Updated`.
        last_version: version at its last token; `version` when None.
        truncated: True where generation hit the length limit.
        uncertainty: sum over its tokens of (1 - π)², π the probability with which each was sampled, at least 0: about the
            squared norm of ∇ log π of the rollout, up to a factor that all share. None where it is unknown.
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
    """A rollout that has no score: its engine died, its verifier timed out. Unscored is not wrong.

    Attributes:
        rollout: the id that an `Order` gave.
        reason: for the driver's log; the core does not read it.
        tokens: generated tokens that were paid all the same.
    """

    rollout: int
    reason: str
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The terminal event of a rollout that `Actions.cancel` named (or that the driver had to abort).

    Attributes:
        rollout: the id that an `Order` gave.
        tokens: tokens generated before it stopped.
    """

    rollout: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Updated:
    """The weights changed: the outstanding batch was trained.

    Attributes:
        version: must exceed every version told before, at most `LARGEST_WHOLE`.
        approx_kl: how far this update moved the policy, the divergence of the one before from the one after, in nats
            per token; 0 or more, of which more than `FARTHEST` counts as that. None: not measured.
        latency: how fast the engine decodes now, (rollouts decoded at once, seconds for a token of each), rollouts growing
            and seconds not falling; holds until another is told. None: as before.
    """

    version: int
    approx_kl: float | None = None
    latency: Curve | None = None


@dataclass(frozen=True, slots=True)
class Offered:
    """A framework's own loader hands prompts over, in its order; for recipes whose prompt rule is `as_offered`."""

    prompts: tuple[int, ...]
    epoch: int


Event = Done | Failed | Cancelled | Updated | Offered


class Order(NamedTuple):
    """Generate these rollouts of one prompt.

    Attributes:
        group: id of the group they belong to; one visit of one prompt.
        prompt: index of the prompt, in [0, number of prompts).
        stage: index of the recipe's stage that ordered them.
        rollouts: new rollout ids, never used before.
    """

    group: int
    prompt: int
    stage: int
    rollouts: tuple[int, ...]


class Row(NamedTuple):
    """One rollout to train on.

    Attributes:
        rollout: its id; the driver holds the payload.
        prompt: index of its prompt.
        group: id of its group.
        advantage: the recipe's advantage.
        weight: multiplies the row's loss. Importance ratios are the driver's, from log-probabilities.
        version: version of the weights at the rollout's first token.
        replays: batches before this one in which it was trained on.
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
    """Train on these rows, then tell `Updated`.

    Attributes:
        rows: in order of group, then of rollout id; those that are replayed come last.
        version: the core's version when the batch was made; a row's staleness is `version - row.version`.
        short_because: None for a full batch, else why it has fewer groups than the recipe asks for.
    """

    rows: tuple[Row, ...]
    version: int
    short_because: str | None = None


class Actions(NamedTuple):
    """What to do now; each action is handed out once.

    Attributes:
        generate: orders to start.
        cancel: rollouts to stop; each still owes its terminal event.
        release: rollouts whose payload may be freed.
        batch: rows to train on, or None.
        finished: why the run is over, or None.
    """

    generate: tuple[Order, ...] = ()
    cancel: tuple[int, ...] = ()
    release: tuple[int, ...] = ()
    batch: Batch | None = None
    finished: str | None = None


NOTHING = Actions()  # the answer to most asks of a driver that tells each completion by itself
