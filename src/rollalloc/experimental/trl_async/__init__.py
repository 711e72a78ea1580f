"""TRL's experimental `AsyncGRPOTrainer` under a recipe: `AllocatedAsyncGRPOTrainer` in its place."""

try:
    from trl.experimental.async_grpo import async_grpo_trainer as _theirs

    _used = (
        _theirs.RolloutWorkerProtocol,
        _theirs.WeightTransferProtocol,
        _theirs.RolloutSample,
        _theirs._TrainBeginCallback,
    )
except (ImportError, AttributeError) as error:
    from rollalloc.experimental.trl_async.versions import what_is_missing

    raise ImportError(what_is_missing()) from error

from rollalloc.experimental.trl_async.trainer import AllocatedAsyncGRPOTrainer
from rollalloc.experimental.trl_async.weights import WeightMailbox
from rollalloc.experimental.trl_async.worker import AllocatedWorker

__all__ = ["AllocatedAsyncGRPOTrainer", "AllocatedWorker", "WeightMailbox"]
