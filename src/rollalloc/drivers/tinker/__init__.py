"""Runs any recipe over the Tinker API, which samples and trains on remote GPUs: `TinkerTrainer`.

Only `service` calls the SDK, and imports the SDK when a `Service` is created. `episodes` defines what a rollout is: either
a completion scored by a reward function, or an episode in an environment with tinker-cookbook's interface.
"""

from rollalloc.drivers.tinker.costs import Prices, Usage
from rollalloc.drivers.tinker.episodes import Environments, Rewarded
from rollalloc.drivers.tinker.service import Remote, Service, ServiceFailed
from rollalloc.drivers.tinker.trainer import TinkerTrainer

__all__ = ["Environments", "Prices", "Remote", "Rewarded", "Service", "ServiceFailed", "TinkerTrainer", "Usage"]
