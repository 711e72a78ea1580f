"""Shows what a run of the example learned and paid: show.py FOLDER. Fails where the mean reward did not reach 0.9."""

import json
import sys
from pathlib import Path

COUNTED = ("rollalloc/rollouts_paid", "rollalloc/accounts/")
lines = [json.loads(line) for line in (Path(sys.argv[1]) / "metrics.jsonl").read_text().splitlines()]
steps = [(line["step"], line["data"]) for line in lines if "critic/score/mean" in line["data"]]
causes = [key for key, value in steps[-1][1].items() if value and key.startswith(COUNTED)]
print("step  reward " + " ".join(f"{key.rsplit('/')[-1]:>13}" for key in causes))
for step, data in steps:
    print(f"{step:4}  {data['critic/score/mean']:6.3f} " + " ".join(f"{data[key]:13.0f}" for key in causes))
work = sum(data["rollalloc/driver_seconds"] for _, data in steps) / sum(data["timing_s/step"] for _, data in steps)
print(f"rollouts are counted from the start; the driver's own work is {work:.1%} of the steps' time")
reached = steps[-1][1]["critic/score/mean"]
sys.exit(None if reached >= 0.9 else f"the mean reward is {reached:.3f} at the end, expected at least 0.9")
