"""The groups that are not over, and their rollouts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from rollalloc.core.group import Group
from rollalloc.core.phase import FOLLOWING, OVER, Phase

_DRAWN, _RUNNING, _READY = Phase.DRAWN, Phase.RUNNING, Phase.READY  # attribute lookup on an Enum is slow


class Flight:
    """All groups between the draw of their prompt and their end.

    Attributes:
        groups: the groups, by id.
        owner: maps each rollout that was ordered and has not ended to its group.
        stopped: maps each cancelled rollout that has not ended to its group. The group itself may be over.
        waiting_S: groups that passed stage s and wait, by id. The last entry has the groups that are ready for a
            batch.
        running_S: number of groups in stage s.
        owing_S: groups with rollouts of stage s that are decided but not ordered yet, as a queue in the order in which the
            groups entered the stage. A group without such rollouts is removed when it reaches the front.
        touched: groups that changed since the stop rule was last asked about them.
    """

    def __init__(self, stages: int) -> None:
        self.groups: dict[int, Group] = {}
        self.owner: dict[int, Group] = {}
        self.stopped: dict[int, Group] = {}
        self.waiting_S: list[dict[int, Group]] = [{} for _ in range(stages)]
        self.running_S = [0] * stages
        self.owing_S: list[deque[Group]] = [deque() for _ in range(stages)]
        self.touched: dict[int, Group] = {}

    @property
    def ready(self) -> dict[int, Group]:
        """Groups that wait for a batch, by id."""
        return self.waiting_S[-1]

    def move(self, group: Group, phase: Phase, stage: int | None = None) -> None:
        """Move a group to another phase; `stage` is the stage that it enters.

        Raises:
            RuntimeError: the transition is not legal, which is a bug in the core.
        """
        if phase not in FOLLOWING[group.phase]:
            raise RuntimeError(f"group {group.id} cannot go from {group.phase.value} to {phase.value}")
        self._leave(group)
        group.phase = phase
        if stage is not None:
            group.stage = stage
        self._enter(group)

    def _leave(self, group: Group) -> None:
        if group.phase is _RUNNING:
            self.running_S[group.stage] -= 1
        # A group that is only drawn is in no index.
        elif group.phase is not _DRAWN:
            del self.waiting_S[self._passed(group)][group.id]

    def _enter(self, group: Group) -> None:
        if group.phase in OVER:
            del self.groups[group.id]
            self.touched.pop(group.id, None)
        elif group.phase is _RUNNING:
            self.groups[group.id] = group
            self.running_S[group.stage] += 1
        else:
            self.waiting_S[self._passed(group)][group.id] = group

    def _passed(self, group: Group) -> int:
        """The index in `waiting_S` for this group. A ready group has the last index, even if it skipped stages."""
        return -1 if group.phase is _READY else group.stage

    def waiting(self) -> list[Group]:
        """All groups that wait, ready or not, sorted by stage and id."""
        return [waiting[group] for waiting in self.waiting_S for group in sorted(waiting)]

    def trailing(self) -> list[Group]:
        """Groups that are over, but have cancelled rollouts without a terminal event; sorted by id."""
        over = {group.id: group for group in self.stopped.values() if group.phase in OVER}
        return [over[group] for group in sorted(over)]

    def restore(self, groups: Iterable[Group]) -> None:
        """Add saved groups to all tables, except `stopped` and `touched`."""
        for group in groups:
            self.groups[group.id] = group
            self.owner.update(dict.fromkeys(group.running, group))
            self._enter(group)
            for stage in sorted({group.stage_of(rollout) for rollout in group.owed}):
                self.owing_S[stage].append(group)
        for stage, owing in enumerate(self.owing_S):
            # By the first id that the stage ordered, because ids rise in the order in which groups entered.
            self.owing_S[stage] = deque(sorted(owing, key=lambda group, at=stage: group.spans[at]))
