"""PODS's cost: seconds of training until a run has the baseline's best accuracy.

python recipes/verl/time_to_peak.py METRIC BASELINE.jsonl RUN.jsonl ...

The files are those of verl's `file` logger, METRIC is a key of its validation, e.g. val-core/openai/gsm8k/acc/mean@1.
Seconds are those of the steps, without validation and checkpoints. The target is a share, 0.99, of the baseline's highest
accuracy; a baseline that was stopped while it still rose has no peak yet.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

SHARE = 0.99


def curve(path: Path, metric: str) -> Iterator[tuple[float, float]]:
    """Seconds of training and accuracy at each validation of a run."""
    seconds = 0.0
    for line in path.read_text(encoding="utf-8").splitlines():
        data = json.loads(line)["data"]
        seconds += data.get("timing_s/step", 0.0) - data.get("timing_s/save_checkpoint", 0.0)
        if metric in data:
            yield seconds, data[metric]


def seconds_to(path: Path, metric: str, target: float) -> float | None:
    """Seconds of training until the first validation at or above the target; None where there is none."""
    return next((seconds for seconds, accuracy in curve(path, metric) if accuracy >= target), None)


def table(metric: str, baseline: Path, *others: Path) -> Iterator[str]:
    """A line for each run: its seconds, and the baseline's over them.

    Raises:
        ValueError: the baseline was never validated under that metric.
    """
    target = SHARE * max((accuracy for _, accuracy in curve(baseline, metric)), default=0.0)
    reference = seconds_to(baseline, metric, target)
    if reference is None:
        raise ValueError(f"{baseline} has no {metric}; name a key of its validation, e.g. val-core/SOURCE/acc/mean@1")
    for path in (baseline, *others):
        seconds = seconds_to(path, metric, target)
        took = "never" if seconds is None else f"after {seconds:.0f} s"
        ratio = f", the baseline's over it {reference / seconds:.2f}" if seconds else ""
        yield f"{path}: {target:.4f} {took}{ratio}"


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.stdout.writelines(f"{line}\n" for line in table(sys.argv[1], *map(Path, sys.argv[2:])))
