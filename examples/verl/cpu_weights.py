# pyright: reportMissingImports=false
"""Updates the weights of vLLM on a CPU; enable it with `rollout.engine_kwargs.vllm.worker_extension_cls`."""

from __future__ import annotations

from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


class CpuWorkerExtension(vLLMColocateWorkerExtension):
    """Reloads the whole model at each update. vLLM's CPU layers keep only packed weights, which cannot be overwritten."""

    def update_weights_from_ipc(
        self, peft_config: Any = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Receive all weights from the trainer, then load them.

        Raises:
            ValueError: the model's head is tied to its embeddings, which vLLM packs at its start and never updates.
        """
        if self.model_config.hf_text_config.tie_word_embeddings:
            raise ValueError(
                "on CPUs vLLM cannot update an output head that is tied to the embeddings; use a model with "
                "tie_word_embeddings=false, or GPUs"
            )
        weights: list[tuple[str, torch.Tensor]] = []
        receiver = BucketedWeightReceiver(self._get_zmq_handle(), torch.device("cpu"), use_shm=use_shm)
        receiver.receive_weights(  # copied, since the next bucket overwrites this one
            on_bucket_received=lambda bucket, last: weights.extend((name, tensor.clone()) for name, tensor in bucket)
        )
        self.model_runner.reload_weights(weights_iterator=iter(weights))
