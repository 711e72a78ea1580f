"""What outlives the process of a run at a service: the allocator, what it holds, and where the service keeps the weights."""

from __future__ import annotations

from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from secrets import token_hex
from typing import Any

from torch import Tensor

from rollalloc.core.allocator import Allocator
from rollalloc.drivers.tinker.costs import Usage
from rollalloc.drivers.tinker.episodes import Episodes
from rollalloc.drivers.tinker.rollouts import RemoteEngine
from rollalloc.drivers.tinker.service import Service
from rollalloc.drivers.tinker.trajectories import SHAPE, unpack
from rollalloc.drivers.tinker.update import RemoteUpdater
from rollalloc.files.json_shape import TRAINER, check_shape
from rollalloc.train.checkpoint import Checkpoint
from rollalloc.train.settings import Settings
from rollalloc.train.state import RunState

_USAGE = dict.fromkeys(asdict(Usage()), int)
_SHAPE = {
    **TRAINER,
    "rollouts": {
        **{name: of for name, of in TRAINER["rollouts"].items() if name not in ("generations", "stream")},
        "trajectories": SHAPE,
    },
    "tinker": {"path": str, "cost": _USAGE, "cost_lost": _USAGE},
}


class RemoteState(RunState):
    """Of a run at a service.

    Args:
        service: keeps the weights.
        episodes: trained on.
        heldout: evaluated on, if any.

    Attributes:
        lost: what was paid and then done again, after kills.
        path: where the newest checkpoint's weights are; None: there is none.
    """

    def __init__(
        self,
        service: Service,
        episodes: Episodes,
        heldout: Episodes | None,
        settings: Settings,
        allocator: Allocator,
        engine: RemoteEngine,
        updater: RemoteUpdater,
    ) -> None:
        super().__init__(settings, allocator, engine, updater)
        self.service, self.episodes, self.heldout, self.remote_engine = service, episodes, heldout, engine
        self.lost = Usage()
        self.path: str | None = None

    @cached_property
    def identity(self) -> dict[str, Any]:
        remote = self.service.remote
        return {
            "settings": {name: value for name, value in self.settings.identity().items() if name != "averaging"},
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
        cost = {"cost": asdict(self.service.usage), "cost_lost": asdict(self.lost)}
        return {"tinker": {"path": self.path, **cost}}, {}

    def load_weights(self, saved: Checkpoint) -> None:
        told = saved.state["tinker"]
        self.service.restore(told["path"])
        self.path, self.service.usage, self.lost = told["path"], Usage(**told["cost"]), Usage(**told["cost_lost"])
        self.remote_engine.take_up(self.allocator.outstanding())

    def check(self, saved: Checkpoint, place: Path) -> None:
        where = str(place / "checkpoints" / str(saved.batches))
        check_shape(saved.state, _SHAPE, where)
        if "payloads" not in saved.tensors:
            raise ValueError(f"{where}: payloads.safetensors is not among its files; the checkpoint was changed")
        unpack(saved.state["rollouts"]["trajectories"], saved.tensors["payloads"], where)
