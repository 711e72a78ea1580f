"""Folders of runs as the trainer writes them, made up but consistent, with all the fields or those of an older version."""

import json
from collections.abc import Callable
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollalloc.models.settings import Sampling
from rollalloc.train.config import Config

CAUSES = ("trained", "zero_variance", "out_of_band", "stale", "surplus", "unselected", "cancelled", "failed", "open")
PROMPTS = 400
RunWriter = Callable[..., Path]


@pytest.fixture(scope="session")
def run_into() -> RunWriter:
    """(folder, label, seed, ...) → that folder, with a run in it; see `write_run_to`."""
    return write_run_to


@pytest.fixture(scope="session")
def rollouts_into() -> RunWriter:
    """(folder of a run, groups, texts) → that folder, with a log of rollouts in it; see `write_rollouts`."""
    return write_rollouts


@pytest.fixture
def write_run(tmp_path: Path) -> RunWriter:
    """(label, seed, ...) → `tmp_path/compare/label-seed`, with a run in it."""

    def write(label: str = "grpo", seed: int = 0, **made: Any) -> Path:
        folder = tmp_path / "compare" / f"{label[:40].replace('/', '_')}-{seed}"
        return write_run_to(folder, label, seed, **made)

    return write


def write_run_to(
    folder: Path,
    label: str,
    seed: int,
    *,
    batches: int = 60,
    speed: float = 1.0,
    why: str | None = "target: held-out accuracy 0.81 reaches 0.8",
    evaluated: bool = True,
    old: bool = False,
    unscored: dict[str, int] | None = None,
    max_rollouts: int | None = 6000,
) -> Path:
    """Write `run.json` and `metrics.jsonl` of a run of batches of 100 rollouts.

    Args:
        speed: how fast it learns.
        why: None: the run has not ended.
        old: without the fields of newer versions.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    speed *= 1 + 0.08 * float(rng.standard_normal())
    run = Config(
        model="a/model",
        prompts=("train.parquet",),
        heldout="test.parquet",
        reward="my:score",
        recipe="grpo",
        parameters={"groups": 25, "n": 4},
        seed=seed,
        sampling=Sampling(64),
        learning_rate=3e-4,
        target=0.8,
        eval_every=500,
        max_rollouts=max_rollouts,
        label=label,
    )
    (folder / "run.json").write_text(json.dumps(run.description()))
    lines = [_eval(0, speed, old)] if evaluated else []
    for batch in range(1, batches + 1):
        lines.append(_batch(batch, batches, old, unscored or {}))
        if evaluated and batch % 5 == 0:
            lines.append(_eval(batch * 100, speed, old))
    if why is not None:
        lines.append({"kind": "end", "why": why, **_spent(batches * 100, unscored or {}), "prompts": _states(1.0)})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_rollouts(folder: Path, groups: int, texts: tuple[str, ...] = ("It is 3.",), n: int = 4) -> Path:
    """Write `rollouts.jsonl` and `decisions.jsonl` of groups of n rollouts, in batches of 4 groups.

    Of each batch, two groups are trained on, the third is all alike, and the last rollout of the fourth is stopped.
    """
    lines, decisions = [], []
    for group in range(groups):
        prompt = group % PROMPTS
        for place in range(n):
            is_stopped = group % 4 == 3 and place == n - 1
            score = None if is_stopped else float(place % 2 == 0 or group % 4 == 2)
            line = {
                "rollout": group * n + place,
                "prompt": prompt,
                "key": f"mine/{prompt}",
                "group": group,
                "stage": 0,
                "version": group // 4,
                "reward": score,
                "metric": score,
                "tokens": 10 + place,
                "truncated": False,
                "unscored": "stopped" if is_stopped else None,
                "text": texts[(group * n + place) % len(texts)],
            }
            lines.append(
                line | ({"prompt_text": f"What is {prompt}? {texts[group % len(texts)]}"} if not place else {})
            )
        if group % 4 == 3:
            first, second, alike, cut = range(group - 3, group + 1)
            rows = [[each * n + place, each, 0.5 - place % 2] for each in (first, second) for place in range(n)]
            fates = {"trained": [first, second], "zero_variance": [alike], "out_of_band/too_hard": [cut]}
            decisions.append({"batch": group // 4 + 1, "rows": rows, "groups": fates})
    for name, written in (("rollouts.jsonl", lines), ("decisions.jsonl", decisions)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in written))
    return folder


def _spent(paid: int, unscored: dict[str, int]) -> dict[str, Any]:
    """40% of the rollouts taught; the others are spent on two causes."""
    spent = dict.fromkeys(CAUSES, 0) | {"trained": paid * 2 // 5, "out_of_band": paid // 5}
    spent["zero_variance"] = paid - sum(spent.values())
    return {
        "rollouts_paid": paid,
        "tokens_paid": paid * 20,
        "optimizer_steps": paid // 100,
        "version": paid // 100,
        "epoch": 0,
        "seconds": paid / 50,
        "accounts": spent,
        "unscored": unscored,
    }


def _states(share: float) -> dict[str, int]:
    known = {
        "trained": round(PROMPTS * share * 0.4),
        "zero_variance": round(PROMPTS * share * 0.1),
        "out_of_band/solved": round(PROMPTS * share * share * 0.3),
        "out_of_band/too_hard": round(PROMPTS * share * 0.2 * (1 - share / 2)),
    }
    return {"new": PROMPTS - sum(known.values())} | known


def _batch(batch: int, batches: int, old: bool, unscored: dict[str, int]) -> dict[str, Any]:
    share = batch / batches
    line: dict[str, Any] = {
        "kind": "batch",
        "batch": batch,
        **_spent(batch * 100, unscored),
        "reward_mean": 0.3 + 0.4 * share,
        "metric_mean": 0.3 + 0.4 * share,
        "truncated": 0.05,
        "rows": 64,
        "groups": 16,
        "short_because": None,
        "staleness_mean": 0.4,
        "staleness_max": 2,
        "loss": 0.1,
        "grad_norm": 1.0,
        "clip_fraction": 0.01,
        "steps_in_batch": 1,
        "learning_rate": 3e-4,
        "update_seconds": 0.1,
    }
    if old:
        return line
    newer = {
        "prompts": _states(share),
        "evicted": round(PROMPTS * share * share * 0.3),
        "revived": batch // 10,
        "quarantined": 1 if unscored else 0,
        "ages": {"0": 40, "1": 20, "2": 4},
        "lengths": {"count": 100, "truncated": 5, "quantiles": [2, 6, 10, 15 + 10 * share, 22 + 10 * share, 40, 64]},
    }
    return line | newer


def _eval(paid: int, speed: float, old: bool) -> dict[str, Any]:
    accuracy = 0.1 + 0.85 / (1 + exp(-(paid * speed - 2500) / 900))
    line = {
        "kind": "eval",
        **_spent(paid, {}),
        "accuracy": accuracy,
        "standard_error": 0.0,
        "eval_unscored": 0,
        "eval_seconds": 0.2,
    }
    return line if old else line | {"at": paid, "prompts": _states(min(1.0, paid / 6000))}
