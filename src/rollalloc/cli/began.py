"""The time at which the command began. The package imports this module first, because its other imports take seconds."""

from __future__ import annotations

import time

BEGAN = time.time()
