"""Lets the tests of this folder share `logged` with those of `waste`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "waste"))
