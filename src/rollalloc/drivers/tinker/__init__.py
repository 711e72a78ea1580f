"""Any recipe over the Tinker API, which samples and trains on somebody else's GPUs: `TinkerTrainer`.

`service` alone speaks to the SDK, and imports it when a trainer is made. `episodes` says what a rollout is: a prompt and a
reward function, or an environment of tinker-cookbook's kind.
"""

from rollalloc.drivers.tinker.costs import Prices, Usage
from rollalloc.drivers.tinker.episodes import Environments, Rewarded
from rollalloc.drivers.tinker.service import Remote, Service, ServiceFailed
from rollalloc.drivers.tinker.trainer import TinkerTrainer

__all__ = ["Environments", "Prices", "Remote", "Rewarded", "Service", "ServiceFailed", "TinkerTrainer", "Usage"]
