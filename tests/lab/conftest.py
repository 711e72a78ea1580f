"""Lets the tests of these folders share their helpers, such as `by_hand`, `logged` and `simulated`."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / name) for name in ("bench", "waste", "simulate", "advise", "report")]
