"""`AllocatedGRPOTrainer`, which replaces TRL's `GRPOTrainer` and trains under a recipe."""

try:
    import trl as _trl  # noqa: F401
except ImportError as error:
    raise ImportError("rollalloc.drivers.trl needs TRL; pip install 'rollalloc[trl]'") from error

from rollalloc.drivers.trl.silence import SilenceCallback
from rollalloc.drivers.trl.trainer import AllocatedGRPOTrainer

__all__ = ["AllocatedGRPOTrainer", "SilenceCallback"]
