"""Which TRL has what this driver plugs into."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

TESTED = "1.16.0"  # the trainer is experimental: any other version may have renamed what is used here


def what_is_missing() -> str:
    """What to install, in words, where TRL's asynchronous trainer or one of its protocols is not there."""
    try:
        there = f"this is TRL {version('trl')}"
    except PackageNotFoundError:
        there = "TRL is not installed"
    return (
        "rollalloc.experimental.trl_async needs TRL's experimental AsyncGRPOTrainer with RolloutWorkerProtocol and "
        f"WeightTransferProtocol, and {there}; pip install 'rollalloc[trl]' trl=={TESTED}. GRPOTrainer, of any TRL from "
        "1.0, is served by rollalloc.drivers.trl"
    )
