# pyright: reportMissingImports=false
# (verl and what it needs live in an environment of their own: constraints/verl-cpu.txt)
"""New weights for vLLM on a CPU, named by `rollout.engine_kwargs.vllm.worker_extension_cls`."""

from __future__ import annotations

from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


class CpuWorkerExtension(vLLMColocateWorkerExtension):
    """Reloads whole models: vLLM's CPU layers drop the plain weight after packing it, so none can be written in place."""

    def update_weights_from_ipc(
        self, peft_config: Any = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Receive all weights from the trainer, then load them."""
        weights: list[tuple[str, torch.Tensor]] = []
        receiver = BucketedWeightReceiver(self._get_zmq_handle(), torch.device("cpu"), use_shm=use_shm)
        receiver.receive_weights(  # a bucket is overwritten by the next one
            on_bucket_received=lambda bucket, last: weights.extend((name, one.clone()) for name, one in bucket)
        )
        self.model_runner.reload_weights(weights_iterator=iter(weights))
