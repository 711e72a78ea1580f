"""A curriculum as `rollalloc advise --export` writes it, for the tests that read it back elsewhere."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollalloc.advise.curriculum import curriculum_of, write_curriculum
from rollalloc.advise.rates import fit_rates
from rollalloc.waste.groups import Groups
from rollalloc.waste.readers import read_log

HITS, N = [0, 1, 4, 7, 8, 4], 8  # right rollouts of each of six prompts, of so many


def logged(path: Path, hits: Sequence[int], tokens: int | None = 10) -> Groups:
    """Write a log of ours with these numbers of right rollouts, of `N`, and read it. Each group's lengths are equal."""
    lines = [
        {
            "rollout": group * N + at,
            "group": group,
            "key": f"mine/{group:03}",
            "version": 0,
            "metric": float(at < right),
        }
        | ({} if tokens is None else {"tokens": tokens + group})
        for group, right in enumerate(hits)
        for at in range(N)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    groups = read_log(path).groups
    assert groups is not None
    return groups


def exported(folder: Path, prompts: list[Any]) -> Path:
    """The file for prompts with `HITS` right rollouts of `N`, in `folder`."""
    groups = logged(folder / "rollouts.jsonl", HITS)
    rows = {
        key: {
            "key": key,
            "data_source": "mine",
            "prompt": prompt,
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {"index": number},
        }
        for number, (key, prompt) in enumerate(zip(groups.keys, prompts, strict=True))
    }
    rates = fit_rates(np.array(HITS), np.full(len(HITS), N), resamples=0)
    path = folder / "curriculum.parquet"
    write_curriculum(path, curriculum_of(groups, rates, "variance", prompts=rows))
    return path
