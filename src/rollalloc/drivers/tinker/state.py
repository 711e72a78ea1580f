"""The checkpoint of a run at a service: the allocator, the rollouts it holds, and the path of the weights."""

from __future__ import annotations

from dataclasses import asdict
from functools import cached_property
from secrets import token_hex
from typing import Any

from torch import Tensor

from rollalloc.core.allocator import Allocator
from rollalloc.drivers.tinker.costs import Usage
from rollalloc.drivers.tinker.episodes import Episodes
from rollalloc.drivers.tinker.rollouts import RemoteEngine
from rollalloc.drivers.tinker.service import Service
from rollalloc.drivers.tinker.update import RemoteUpdater
from rollalloc.train.checkpoint import Checkpoint
from rollalloc.train.config import Config
from rollalloc.train.state import RunState


class RemoteState(RunState):
    """The saved state of a run at a service.

    Args:
        service: stores the weights.
        episodes: the training set.
        heldout: the evaluation set, if there is one.

    Attributes:
        path: where the service stores the weights of the newest checkpoint; None before the first one.
    """

    entries = (*RunState.entries, "tinker")
    files = ("payloads",)

    def __init__(
        self,
        service: Service,
        episodes: Episodes,
        heldout: Episodes | None,
        config: Config,
        allocator: Allocator,
        engine: RemoteEngine,
        updater: RemoteUpdater,
    ) -> None:
        super().__init__(config, allocator, engine, updater)
        self.service, self.episodes, self.heldout = service, episodes, heldout
        self.path: str | None = None

    @cached_property
    def identity(self) -> dict[str, Any]:
        remote = self.service.remote
        return {
            "config": {name: value for name, value in self.config.identity().items() if name != "averaging"},
            "prompts": self.episodes.digest(),
            "heldout": None if self.heldout is None else self.heldout.digest(),
            "model": {
                "is": self.service.model,
                "rank": remote.rank,
                "loss": remote.loss,
                "waves": remote.concurrency is None,
            },
        }

    def weights(self) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
        self.path = self.service.keep(f"batch-{self.counters.batches}-{token_hex(4)}")
        return {"tinker": {"path": self.path, "cost": asdict(self.service.usage)}}, {}

    def load_weights(self, saved: Checkpoint) -> None:
        state = saved.state["tinker"]
        self.service.restore(state["path"])
        self.path, self.service.usage = state["path"], Usage(**state["cost"])
