"""Logs of 1,000,000 rollouts, made up, read and profiled: CPU seconds of each format, and the peak of the memory.

python lab/benchmarks/reading.py [ROLLOUTS]  # each format in a process of its own
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from rollalloc.advise.profile import profile_of
from rollalloc.waste.readers import read_log

N, GROUPS, PROMPTS = 8, 64, 20_000
FORMATS = ("rollalloc", "verl", "trl")


def rollouts(count: int) -> Iterator[dict[str, Any]]:
    """Groups of 8, 64 a step, of prompts of 40 words and completions of 20 to 120."""
    draw = random.Random(0)
    words = [f"word{number}" for number in range(2000)]
    prompts = [" ".join(draw.choices(words, k=40)) for _ in range(PROMPTS)]
    texts = [" ".join(draw.choices(words, k=draw.randint(20, 120))) for _ in range(5000)]
    rates = [draw.betavariate(0.5, 0.5) for _ in prompts]
    for group in range(count // N):
        prompt = draw.randrange(PROMPTS)
        for at in range(N):
            right, text = float(draw.random() < rates[prompt]), draw.choice(texts)
            yield {"id": group * N + at, "group": group, "step": group // GROUPS, "key": prompt,
                   "prompt": prompts[prompt], "text": text, "right": right}  # fmt: skip


def write(folder: Path, format: str, count: int) -> None:
    """A log as the trainer writes it."""
    for step, rows in groupby(rollouts(count), key=lambda row: row["step"]):
        if format == "trl":
            table = [{"step": step, "prompt": row["prompt"], "completion": row["text"], "right": row["right"],
                      "advantage": row["right"] - 0.5} for row in rows]  # fmt: skip
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), folder / f"completions_{step:06d}.parquet")
            continue
        name = f"{step}.jsonl" if format == "verl" else "rollouts.jsonl"
        with (folder / name).open("a") as file:
            file.writelines(json.dumps(line_of(row, format)) + "\n" for row in rows)


def line_of(row: dict[str, Any], format: str) -> dict[str, Any]:
    """A line of JSON."""
    if format == "verl":
        return {"input": row["prompt"], "output": row["text"], "gts": "3", "score": row["right"], "step": row["step"]}
    return {"rollout": row["id"], "prompt": row["key"], "key": f"made/{row['key']}", "group": row["group"], "stage": 0,
            "version": row["step"], "reward": row["right"], "metric": row["right"], "tokens": len(row["text"]) // 4,
            "truncated": False, "unscored": None, "text": row["text"]}  # fmt: skip


def measure(folder: str) -> None:
    """CPU seconds of reading and of the profile."""
    begun = time.process_time()
    log = read_log(folder)
    read = time.process_time()
    profile = profile_of(log)
    done = time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{profile.rollouts:,} rollouts: read in {read - begun:.1f} s, profiled in {done - read:.1f} s, {peak:,.0f} MiB"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].isdecimal():
        measure(sys.argv[1])
    else:
        for each in FORMATS:
            with tempfile.TemporaryDirectory() as place:
                write(Path(place), each, int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
                print(each, end=": ", flush=True)
                subprocess.run([sys.executable, __file__, place], check=True)
