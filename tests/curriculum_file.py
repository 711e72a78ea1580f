"""A curriculum as `rollalloc advise --export` writes it, for the tests that read it back elsewhere."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from rollalloc.lab.advise.curriculum import curriculum_of, write_curriculum
from rollalloc.lab.advise.rates import fit_rates
from rollalloc.lab.waste.readers import read_log

HITS, N = [0, 1, 4, 7, 8, 4], 8  # right rollouts of each of six prompts, of so many


def exported(folder: Path, prompts: list[Any], mix: str = "variance") -> Path:
    """The file for prompts with `HITS` right rollouts of `N`, in `folder`."""
    keys = [f"mine/{number:03}" for number in range(len(HITS))]
    lines = [
        {"rollout": at * N + n, "group": at, "key": key, "version": 0, "metric": float(n < hits), "tokens": 3 + n}
        for at, (key, hits) in enumerate(zip(keys, HITS, strict=True))
        for n in range(N)
    ]
    log = folder / "rollouts.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    groups = read_log(log).groups
    assert groups is not None
    rows = {
        key: {
            "key": key,
            "data_source": "mine",
            "prompt": prompt,
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {"index": number},
        }
        for number, (key, prompt) in enumerate(zip(keys, prompts, strict=True))
    }
    rates = fit_rates(np.array(HITS), np.full(len(HITS), N), resamples=0)
    path = folder / "curriculum.parquet"
    write_curriculum(path, curriculum_of(groups, rates, mix, prompts=rows))
    return path
