"""The real runs behind lab/docs/released.md: which ones answer a question, and carrying them out one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from foresight import with_answers
from rollalloc.compare.compare import is_finished
from rollalloc.compare.summary import EndedRun, Interval, ended, interval
from rollalloc.data.prompts import PromptSet, load_prompts, write_prompts
from rollalloc.models.likelihood import exact_answers
from rollalloc.models.policy import Policy
from rollalloc.tasks.files import make_once
from rollalloc.tasks.presets import Tuned, fields_of, task_files, task_run
from rollalloc.train import update
from rollalloc.train.config import Config, folder_of, is_run_in
from rollalloc.train.train import train
from rollalloc.train.update import token_losses

SEEDS = (7010, 7011, 7012, 7013, 7014)  # of runs that differ in one parameter; nothing was tuned on them
CELL_SEEDS, TUNING_SEED = (7000, 7001, 7002, 7003, 7004), 1000  # of the check of the map, and of its learning rates
BUDGET, TUNING_BUDGET = 8_000, 4_000  # rollouts of a run
RATES = (1.5e-4, 3e-4, 6e-4, 1.2e-3)
HOPELESS_BELOW, SOLVED_FROM = 0.01, 0.93  # success rate of the initial model
LATE = "pool/30-50-2048"  # % hopeless, % solved, prompts: the shares of skills/late


@dataclass(frozen=True)
class Variant:
    """What runs of a question share.

    Attributes:
        recipe: its name. parameters: of it. rate: the learning rate. changes: of the trainer's settings. pool: trained on.
        corrected: whether stale rows get importance weights.
    """

    recipe: str
    parameters: Mapping[str, Any]
    rate: float = 3e-4
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    pool: str = LATE
    corrected: bool = True


ONE_VISIT = {"p_solve": 1.0, "confidence": None, "reprobe_every": None}  # how Pilot-Commit evicts as published


def pilots(n_pilot: int = 4, n_commit: int = 4, groups: int = 4, **more: Any) -> dict[str, Any]:
    """Pilot-Commit's parameters as they were tuned on skills/late, or others; pilots for three batches at a time.

    A prompt is evicted as published: these runs were made before eviction by evidence was the default.
    """
    sizes = {"groups": groups, "n_pilot": n_pilot, "n_commit": n_commit, "gen_groups": 3 * groups}
    return {**sizes, **ONE_VISIT, **more}


def _pilot_commit(*sizes: int, **more: Any) -> Variant:
    return Variant("pilot_commit", pilots(*sizes, **more))


_OLD = pilots(gen_groups=48, promote="oldest", max_staleness=8)
_FOUR = {"optimizer_steps_per_batch": 4}
# Question -> label -> what is run. The first label of each is what the others are compared with.
QUESTIONS: dict[str, dict[str, Variant]] = {
    "staleness": {
        "4 + 4": _pilot_commit(),
        "fresh only": _pilot_commit(max_staleness=0),
        "old, corrected": Variant("pilot_commit", _OLD),
        "old, not corrected": Variant("pilot_commit", _OLD, corrected=False),
    },
    "steps": {
        "GRPO, 4 steps": Variant("grpo", {"groups": 16, "n": 8}, changes=_FOUR),
        "Pilot-Commit, 4 steps": replace(_pilot_commit(groups=16), changes=_FOUR),
        "Pilot-Commit, 6 steps": replace(_pilot_commit(groups=16), changes={"optimizer_steps_per_batch": 6}),
    },
    "shares": {
        "GRPO, n = 16": Variant("grpo", {"groups": 4, "n": 16}),
        "2 + 14": _pilot_commit(2, 14),
        "4 + 12": _pilot_commit(4, 12),
        "8 + 8": _pilot_commit(8, 8),
    },
    "windows": {
        "0.125 to 0.75": _pilot_commit(),
        "0 to 0.75": _pilot_commit(p_lower=0.0),
        "0.125 to 1": _pilot_commit(p_upper=0.0, p_solve=2.0),
        "half right": _pilot_commit(p_lower=0.5, p_upper=0.5),
        # As many rows with an advantage a batch, and so as many steps, as the others of these two have.
        "0.125 to 0.75, 2 groups": _pilot_commit(groups=2),
        "0 to 0.75, 8 groups": _pilot_commit(groups=8, p_lower=0.0),
    },
}
# The check of the map: pool, rollouts per group. A batch has 64 rows for all.
CHECKED = ("GRPO", "DAPO, carried", "Pilot-Commit", "REINFORCE")  # with real training, for want of time for more
CELLS = (("pool/40-40-2048", 16), ("pool/10-10-2048", 16))


# Pilot-Commit's own ground: groups of 32, four of five prompts hopeless; and what small groups do there. Each at its best.
LARGE_POOL, LARGE_SEEDS = "pool/80-0-2048", (7020, 7021, 7022, 7023, 7024)


def large() -> dict[str, list[Variant]]:
    """The methods that are trained there, each in two sizes of batch; the first is what the others are compared with."""
    return {
        "GRPO, n = 32": [Variant("grpo", {"groups": groups, "n": 32}) for groups in (2, 4)],
        "Pilot-Commit, 4 + 28": [_pilot_commit(4, 28, groups=groups) for groups in (2, 4)],
        "Pilot-Commit, 8 + 24": [_pilot_commit(8, 24, groups=groups) for groups in (2, 4)],
        "Pilot-Commit, 4 + 4": [_pilot_commit(4, 4, groups=groups) for groups in (4, 8)],
        "GRPO, n = 4": [Variant("grpo", {"groups": groups, "n": 4}) for groups in (8, 32)],
        "REINFORCE": [
            Variant("reinforce", {"groups": groups, "baseline": "running", "neg": 0.1}) for groups in (64, 128)
        ],
        "RAFT": [Variant("raft", {"groups": groups}) for groups in (64, 128)],
    }


def methods(n: int, rows: int = 64) -> dict[str, Variant]:
    """The methods that the map compares, a batch of the same size for all."""
    groups = rows // n
    ahead = {"groups": groups, "n": n, "gen_groups": 3 * groups}
    quarter = max(2, n // 4)
    return {
        "GRPO": Variant("grpo", {"groups": groups, "n": n}),
        "DAPO": Variant("dapo", ahead),
        "DAPO, carried": Variant("dapo_carry", ahead),
        "Pilot-Commit": _pilot_commit(quarter, n - quarter, groups=groups),
        "REINFORCE": Variant("reinforce", {"groups": rows, "baseline": "running", "neg": 0.1}),
        "RAFT": Variant("raft", {"groups": rows}),
    }


# --------------------------------------------------------------------------------------------------------- carrying out


def run_of(variant: Variant, label: str, seed: int, tasks: Path, rollouts: int) -> Config:
    """A run that pays so many rollouts, whatever accuracy it comes to, evaluated five times."""
    tuned = Tuned(variant.parameters, variant.rate)
    settings = {"target": None, "eval_every": rollouts // 5, **variant.changes}
    run = task_run("skills/late", variant.recipe, seed, tasks, tuned=tuned, **settings)
    return replace(run, **pool_fields(tasks, variant.pool), task=variant.pool, label=label, max_rollouts=rollouts)


def carried_out(variant: Variant, label: str, seed: int, tasks: Path, out: Path, rollouts: int) -> EndedRun:
    """The run, unless it is there; what it found."""
    run = run_of(variant, label, seed, tasks, rollouts)
    place = folder_of(run, out)
    if not is_finished(run, place):
        with as_if_on_policy(not variant.corrected):
            train(run, place, resume=is_run_in(run, place))
    found = ended(run, place)
    assert found is not None
    return found


def answers(question: str, tasks: Path, out: Path, seeds: Sequence[int], rollouts: int) -> dict[str, list[EndedRun]]:
    """Every run of a question, by label; all labels on one seed before the next."""
    asked = QUESTIONS[question]
    found: dict[str, list[EndedRun]] = {label: [] for label in asked}
    for seed in seeds:
        for label, variant in asked.items():
            found[label].append(carried_out(variant, label, seed, tasks, out / "matched", rollouts))
            print(question, label, seed, [round(each, 3) for each in found[label][-1].curve.accuracy], flush=True)
    return found


def tuned_rates(tasks: Path, out: Path, rollouts: int) -> dict[str, float]:
    """The learning rate of each method that is checked: the best of the same few on the first cell, on the tuning seed."""
    pool, n = CELLS[0]
    chosen: dict[str, float] = {}
    for name, variant in methods(n).items():
        if name in CHECKED:
            tried = {f"{name}, {n}, {rate:g}": replace(variant, pool=pool, rate=rate) for rate in RATES}
            chosen[name] = best(tried, tasks, out / "tuning", rollouts).rate
    return chosen


def best(tried: Mapping[str, Variant], tasks: Path, out: Path, rollouts: int) -> Variant:
    """Which of these, by label, came to the highest accuracy on the tuning seed."""
    last = [carried_out(one, label, TUNING_SEED, tasks, out, rollouts).last["accuracy"] for label, one in tried.items()]
    at = int(np.argmax(last))
    print("tuned:", list(tried)[at], "of", dict(zip(tried, np.round(last, 4).tolist(), strict=True)), flush=True)
    return list(tried.values())[at]


def large_groups(tasks: Path, out: Path, seeds: Sequence[int]) -> dict[str, list[EndedRun]]:
    """Every run of `large`, by method, with the settings that its search found."""
    chosen = {
        name: best(
            {
                f"{name}, {shape.parameters['groups']} a batch, {rate:g}": replace(shape, pool=LARGE_POOL, rate=rate)
                for shape in shapes
                for rate in RATES
            },
            tasks,
            out / "tuning",
            TUNING_BUDGET,
        )
        for name, shapes in large().items()
    }
    found: dict[str, list[EndedRun]] = {name: [] for name in chosen}
    for seed in seeds:
        for name, variant in chosen.items():
            found[name].append(carried_out(variant, name, seed, tasks, out / "large", BUDGET))
            print(name, seed, [round(each, 3) for each in found[name][-1].curve.accuracy], flush=True)
    return found


def cell(
    at: tuple[str, int], rates: Mapping[str, float], tasks: Path, out: Path, seeds: Sequence[int], rollouts: int
) -> dict[str, list[EndedRun]]:
    """A cell of the map with real training, on fresh seeds: every run, by method."""
    pool, n = at
    every = methods(n)
    found: dict[str, list[EndedRun]] = {name: [] for name in rates}
    for seed in seeds:
        for name, rate in rates.items():
            variant = replace(every[name], pool=pool, rate=rate)
            found[name].append(carried_out(variant, f"{name}, {n}", seed, tasks, out / "cells", rollouts))
            print(at, name, seed, [round(each, 3) for each in found[name][-1].curve.accuracy], flush=True)
    return found


@contextmanager
def as_if_on_policy(so: bool) -> Iterator[None]:
    """If `so`, stale rows count as if the weights before the update had sampled them, as in the code that was published."""

    def without_importance(
        logprobs_BT: torch.Tensor, proximal_BT: torch.Tensor, behaviour_BT: torch.Tensor, *rest: Any
    ):
        return token_losses(logprobs_BT, proximal_BT, proximal_BT, *rest)

    if not so:
        yield
        return
    with patch.object(update, "token_losses", without_importance):
        yield


# ----------------------------------------------------------------------------------------------------------- comparison


def gains(found: Sequence[EndedRun]) -> Interval:
    """Held-out accuracy of each run's last weights, its budget spent, less that of the initial model."""
    return interval([each.last["accuracy"] - each.curve.accuracy[0] for each in found])


def more_than(base: Sequence[EndedRun], other: Sequence[EndedRun]) -> Interval:
    """By how much the other gained more on the same seed."""
    return interval([two - one for one, two in zip(gains(base).values, gains(other).values, strict=True)])


# ---------------------------------------------------------------------------------------------------------------- pools


@dataclass(frozen=True)
class PoolSettings:
    """Which prompts a pool has: shares of hopeless and of solved ones in %, and how many to train on."""

    hopeless: int
    solved: int
    train: int
    heldout: int
    seed: int = 17


@dataclass(frozen=True)
class _Of:
    pools: tuple[str, ...] = ("skills/late", "skills/balanced")


def pool_fields(tasks: Path, name: str) -> dict[str, Any]:
    """Fields of a run on the pool `pool/HOPELESS-SOLVED-TRAIN`: skills prompts by their initial exact success rates."""
    hopeless, solved, train = map(int, name.removeprefix("pool/").split("-"))
    settings = PoolSettings(hopeless, solved, train, heldout=train // 4)
    fields = fields_of(task_files("skills/late", tasks))
    made = make_once(tasks / "pools" / name.removeprefix("pool/"), settings, lambda to: _make_pool(to, tasks, settings))
    return fields | {"prompts": (str(made / "train.parquet"),), "heldout": str(made / "heldout.parquet")}


def _make_pool(to: Path, tasks: Path, settings: PoolSettings) -> None:
    prompts = load_prompts(str(_all(tasks)))
    rate_N = np.array([info["exact_p"] for info in prompts.extra_infos])
    rng = np.random.default_rng(settings.seed)
    bands = np.digitize(rate_N, (HOPELESS_BELOW, SOLVED_FROM))
    shares = {0: settings.hopeless, 1: 100 - settings.hopeless - settings.solved, 2: settings.solved}
    free = {band: rng.permutation(np.flatnonzero(bands == band)).tolist() for band in shares}
    for band, share in shares.items():
        wanted = sum(round(size * share / 100) for size in (settings.train, settings.heldout))
        if len(free[band]) < wanted:
            raise ValueError(
                f"{settings} wants {wanted} prompts of band {band}, there are {len(free[band])}; take fewer"
            )
    for split, size in (("train", settings.train), ("heldout", settings.heldout)):
        chosen = [free[band].pop() for band, share in shares.items() for _ in range(round(size * share / 100))]
        write_prompts(to / f"{split}.parquet", [_row(prompts, at, {"split": split}) for at in rng.permutation(chosen)])


def _all(tasks: Path) -> Path:
    return make_once(tasks / "pools" / "all", _Of(), lambda to: _make_all(to, tasks)) / "train.parquet"


def rated_prompts(tasks: Path, policy: Policy) -> tuple[Sequence[Any], Sequence[Any], NDArray[np.float64]]:
    """Prompts of skills and their answers as token ids, and the initial model's success rate of each."""
    run = task_run("skills/late", "grpo", TUNING_SEED, tasks)
    prompts, right = with_answers(run, policy, str(_all(tasks)))
    return prompts.tokens, right, np.array([info["exact_p"] for info in prompts.prompt_set.extra_infos])


def _make_all(to: Path, tasks: Path) -> None:
    """Prompts of two pools, each once, with the initial model's success rate."""
    rows: dict[str, dict[str, Any]] = {}
    for name in _Of().pools:
        run = task_run(name, "grpo", TUNING_SEED, tasks)
        policy = Policy.load(run.model, device="cpu")
        prompts, right = with_answers(run, policy, *run.prompts)
        rate_N, _ = exact_answers(policy.model, prompts.tokens, right, pad_id=policy.pad_id)
        for at, rate in enumerate(rate_N.tolist()):
            more = {"exact_p": rate, "index": len(rows)}
            rows.setdefault(str(prompts.prompt_set.prompts[at]), _row(prompts.prompt_set, at, more))
    write_prompts(to / "train.parquet", list(rows.values()))


def _row(prompts: PromptSet, at: int, more: dict[str, Any]) -> dict[str, Any]:
    return {
        "data_source": prompts.sources[at],
        "prompt": prompts.prompts[at],
        "reward_model": {"style": "rule", "ground_truth": prompts.ground_truths[at]},
        "extra_info": {**prompts.extra_infos[at], **more},
    }
