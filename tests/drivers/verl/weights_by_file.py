"""A transfer of weights that works on CPUs, for tests: `checkpoint_engine.custom_backend_module=weights_by_file`.

verl's `separate_async` refuses its `naive` backend, and the others that it brings need GPUs or NPUs.
"""

import asyncio
import os
from pathlib import Path

from safetensors.torch import load_file, save_file
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

FOLDER = Path(os.environ["RECORD"])


def _path(step):
    return FOLDER / f"weights-{step}.safetensors"


@CheckpointEngineRegistry.register("file")
class WeightsByFile(CheckpointEngine):
    """One file a sync, which the trainer writes and the servers wait for."""

    def __init__(self, bucket_size, is_master=False):
        pass

    def prepare(self):
        return {}

    @classmethod
    def build_topology(cls, actor_wg_world_size, rollout_world_size, metadata):
        ranks = list(range(actor_wg_world_size + rollout_world_size))
        return {"rank": ranks[:actor_wg_world_size]}, {"rank": ranks[actor_wg_world_size:]}

    def init_process_group(self, rank):
        self.rank = rank

    def finalize(self):
        pass

    async def send_weights(self, weights, global_steps=None):
        tensors = {name: tensor.detach().clone().contiguous() for name, tensor in weights}
        if self.rank == 0:
            save_file(tensors, written := _path(global_steps).with_suffix(".part"))
            written.rename(_path(global_steps))

    async def receive_weights(self, global_steps=None):
        while not _path(global_steps).exists():
            await asyncio.sleep(0.05)
        for name, tensor in load_file(_path(global_steps)).items():
            yield name, tensor
