"""The example's reward, which never comes back from its second call."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "verl"))
from digits import compute_score as digits


def compute_score(*args, **kwargs):
    try:
        (Path(os.environ["RECORD"]) / "reward-hung").touch(exist_ok=False)
    except FileExistsError:
        return digits(*args, **kwargs)
    time.sleep(10_000)
    return None
