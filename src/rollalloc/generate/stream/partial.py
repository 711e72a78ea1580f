"""Stopped rollouts, kept to be gone on with when their prompt is drawn again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from rollalloc.generate.sampler import Generation
from rollalloc.generate.sampling import Sampling

_MOST = 4096  # kept at a time


class Partials:
    """What was generated of rollouts that were stopped, by prompt; the newest of each, and of all so many.

    A rollout that goes on from here is as old as its first token. So one is taken only while it may still be trained on
    after the update that comes next.

    Args:
        on: whether anything is kept.
        sampling: what is as long as it may be is not kept.
        eos_ids: nor what has its end, which a back-end may have stopped in the same moment.
    """

    def __init__(self, on: bool, sampling: Sampling, eos_ids: Sequence[int]) -> None:
        self._on, self._most = on, sampling.max_new_tokens
        self._ends = frozenset((*eos_ids, *sampling.stop_ids))
        # By prompt: what there is, and the last version at which it may be taken.
        self._kept: OrderedDict[int, tuple[Generation, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, prompt: int, made: Generation, max_staleness: int) -> None:
        """A rollout of a prompt was stopped; one without a token is not kept."""
        if not (self._on and 0 < len(made.tokens) < self._most and made.tokens[-1] not in self._ends and made.spans):
            return
        self._kept.pop(prompt, None)
        self._kept[prompt] = made, made.spans[0][0] + max_staleness - 1
        if len(self._kept) > _MOST:
            self._kept.popitem(last=False)

    def take(self, prompt: int, version: int) -> Generation | None:
        """What there is of a prompt, for one rollout; None where there is nothing, or it is too old."""
        made, last = self._kept.pop(prompt, (None, -1))
        return made if version <= last else None
