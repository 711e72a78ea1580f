"""Is Pilot-Commit cheaper than GRPO in the shape its authors ran: groups of 64, most prompts without a signal, 200 batches?

    python lab/experiments/released.py probe OUT --tasks TASKS         # which pool is `held`
    python lab/experiments/released.py run OUT --tasks TASKS [--one]   # resumable; --one: carry out the next run and stop
    python lab/experiments/released.py table OUT --tasks TASKS         # of the runs that have ended
    python lab/experiments/released.py figure OUT FIGURE --tasks TASKS

`run` may be started several times on one OUT: each takes the next run that nobody is at work on, and exits with 75 when it
has to wait for another one's tuning run. This plan was committed before any run.

Task: `skills`, except that a share of the skills is known (rate 1) and the others have rates from Beta(.5, .5), since with
the rates of `skills` only four prompts have a success rate above .995. Pools by the exact rate of the initial model, in
percent (< .005 / .125 to .75 / > .995 / rest), with 8,192 prompts to train on and 2,048 held-out ones of the same shares:
    A         35/35/20/10, 256 skills of which 60% are known
    B         10/45/35/10, the same skills
    control   0/100/0/0, the same skills
    held      a pool in which more than a third of the pilots pass for ninety batches, as in the published runs; on the
              others, it is twenty batches, because a small model soon learns its few skills. `probe` trains pc6 alone with
              the learning rate 3e-4 and seed 9790 on `CANDIDATES`, which have more skills, so that each comes up rarely.
              The first, 10/55/25/10, passes .39 in the first ten batches and .12 in the eighth ten. The second,
              0/100/0/0, passes .66 .62 .64 .47 .51 .48 .43 .43 .35 .32 in the tenths of its first hundred batches, and
              is held. (A hundred batches above a third were wanted; 8,192 skills took too long to warm up.)

Arms, all without averaged weights, clipped at a gradient norm of 1:
    grpo        8 prompts x 64, 4 optimizer steps a batch
    pc6, pc4    16 + 48, 24 pilots every round, evicts after one visit, 6 or 4 steps, importance weights on stale rows
    pc6 raw     as pc6, but stale rows count as new: all of what was released
    pc6 queue   as pc6, but groups that are about to expire go first: the order of the first two rounds
    default     pc4 with our defaults: evicts by evidence, pilots as needed
    default queue   as default, but groups that are about to expire go first
    n16         GRPO with 32 x 16, the plainest thing to do instead

Learning rates: the best of `RATES` by the mean of the last three evaluations after 49,152 rollouts of seed 9800; while the
best is at an end, one more beyond it, half or twice as high, is run. pc6 on pool A (which serves B and the control too)
and on held, GRPO on held; GRPO's rate on A is 3e-4, by the second round's tuning (four rates, the same seed and pool),
whose code for GRPO is today's. GRPO's also serves n16; pc6's, all arms of Pilot-Commit.

Runs: `PLAN` has the pools, arms, seeds and rollouts, in the order in which they are made. 98,304 rollouts are 192 batches
of GRPO, as many as to its peak in the published run of 8B. An arm with fewer seeds than planned is reported with those it
has.

This is the third round, planned on 2026-11-28 before any of its runs. In the first two (2026-11-25 and 26; 651a789a and
d5ae4d43), Pilot-Commit committed first to groups that were about to expire, which is not the published order (lab/log,
2026-11-28). Those rounds also had DAPO, three kinds of eviction, groups of 16 and a model of 1M; their commits have them.

Reported against GRPO on the same seed: rollouts, batches and optimizer steps until the smoothed accuracy (mean of three
evaluations, one every 4,096 rollouts, exact) comes to the peak of GRPO's smoothed curve, and to .99 of it; the ratio at
every accuracy as a curve. A method that does not get there counts with what it spent: its ratio is an upper bound, marked.
Intervals: 95% of Student's t over seeds on the logarithm of the ratios.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import exp, inf, log, nan
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray

from asked import half_width
from findings_runs import ONE_VISIT, as_if_on_policy
from rollalloc.compare.compare import is_finished
from rollalloc.data.prompts import write_prompts
from rollalloc.files.claims import InUse
from rollalloc.models.likelihood import exact_answers
from rollalloc.models.policy import Policy
from rollalloc.models.settings import Sampling
from rollalloc.runs.reader import lines_in
from rollalloc.tasks.files import make_once
from rollalloc.tasks.presets import TUNED_WITH
from rollalloc.tasks.skills import LONGEST, Skills, SkillsConfig
from rollalloc.tasks.tiny import SEPARATOR, WarmUp, save_warm_model, spell, word_tokenizer
from rollalloc.train.config import Config, folder_of, is_run_in
from rollalloc.train.loading import one_thread
from rollalloc.train.train import train

EDGES, SHARES = (
    (0.005, 0.125, 0.75, 0.995),
    {  # shares in % of: hopeless, middle, solved, the rest
        "35-35-20": (35, 35, 20, 10),
        "10-45-35": (10, 45, 35, 10),
        "10-55-25": (10, 55, 25, 10),
        "control": (0, 100, 0, 0),
    },
)
TRAIN, HELDOUT, DRAWN = 8192, 2048, 150_000
RATES, TUNING_SEED, PROBE_SEED, SEEDS = (1.5e-4, 3e-4, 6e-4), 9800, 9790, (9811, 9812, 9813, 9814, 9815)
GRPO_ON_A = 3e-4
TUNING_ROLLOUTS, ROLLOUTS, EVERY, WINDOW = 49_152, 98_304, 4_096, 3
A, B, CONTROL = "35-35-20-8192", "10-45-35-8192", "control-8192"
CANDIDATES = ("10-55-25-8192+1024", "control-8192+4096")  # a suffix is the number of skills
HELD = CANDIDATES[1]
LEVELS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
COSTS = ("rollouts", "batches", "steps")
WAIT = 75  # exit status: another process is at work on what the next run needs


@dataclass(frozen=True)
class Arm:
    """A method: its recipe and parameters, whose learning rate it uses, and whether stale rows get importance weights."""

    recipe: str
    parameters: Mapping[str, Any]
    tuned_as: str
    steps: int = 4
    corrected: bool = True


def _pilots(steps: int, *, corrected: bool = True, n_pilot: int = 16, groups: int = 8, **more: Any) -> Arm:
    sizes = {"groups": groups, "n_pilot": n_pilot, "n_commit": 3 * n_pilot, "gen_groups": 3 * groups}
    parameters = {**sizes, "pilots": "every_round", "promote": "top_variance", **ONE_VISIT, **more}
    return Arm("pilot_commit", parameters, "pc6", steps, corrected)


_AS_NEEDED: Mapping[str, Any] = {"pilots": "as_needed", "p_solve": 0.9, "confidence": 0.95, "reprobe_every": 4}
_QUEUE: Mapping[str, Any] = {"promote": "expiring_first"}
ARMS = {
    "grpo": Arm("grpo", {"groups": 8, "n": 64}, "grpo"),
    "pc6": _pilots(6),
    "pc4": _pilots(4),
    "pc6 raw": _pilots(6, corrected=False),
    "pc6 queue": _pilots(6, **_QUEUE),
    "default": _pilots(4, **_AS_NEEDED),
    "default queue": _pilots(4, **_AS_NEEDED, **_QUEUE),
    "n16": Arm("grpo", {"groups": 32, "n": 16}, "grpo"),
}
# Pool, arms, seeds, rollouts: in this order, all arms on a seed before the next seed.
PLAN: Sequence[tuple[str, tuple[str, ...], Sequence[int], int]] = (
    *((pool, ("grpo", "pc6"), (seed,), ROLLOUTS) for seed in SEEDS[:3] for pool in (HELD, CONTROL, B, A)),
    (HELD, ("pc6 queue", "n16", "default", "default queue", "pc4"), SEEDS[:3], ROLLOUTS),
    *((pool, ("grpo", "pc6"), (seed,), ROLLOUTS) for seed in SEEDS[3:] for pool in (HELD, CONTROL, B, A)),
    *((pool, ("default", "default queue", "pc4", "pc6 raw"), SEEDS[:3], ROLLOUTS) for pool in (B, CONTROL, A)),
    (HELD, ("pc6 raw",), SEEDS[:3], ROLLOUTS),
    *((pool, ("default", "default queue", "pc4", "pc6 raw"), SEEDS[3:], ROLLOUTS) for pool in (HELD, B, CONTROL, A)),
)


@dataclass(frozen=True)
class Planned:
    """A run of the plan."""

    pool: str
    arm: str
    rate: float
    seed: int
    rollouts: int

    def run(self, tasks: Path) -> Config:
        arm = ARMS[self.arm]
        return Config(
            **pool_files(tasks, self.pool),
            recipe=arm.recipe,
            parameters=arm.parameters,
            max_rollouts=self.rollouts,
            label=f"{self.arm}@{self.rate:g}",
            task=self.pool,
            seed=self.seed,
            sampling=Sampling(LONGEST + 1),
            learning_rate=self.rate,
            optimizer_steps_per_batch=arm.steps,
            eval_every=EVERY,
            stop_when_barren=False,
            checkpoint_minutes=1.0,
            **TUNED_WITH,
        )


# --------------------------------------------------------------------------------------------------------- carrying out


@dataclass(frozen=True)
class Tuning:
    """The tuning runs of an arm that are needed as far as it is known, in order, and the chosen rate once it is."""

    runs: tuple[Planned, ...]
    rate: float | None


def tuning(arm: str, pool: str, out: Path, tasks: Path) -> Tuning:
    """The tuning of an arm on a pool: the rates, and one more beyond as long as the best is at an end."""
    rates = list(RATES)
    while True:
        runs = tuple(Planned(pool, arm, rate, TUNING_SEED, TUNING_ROLLOUTS) for rate in rates)
        best = _best(runs, out, tasks)
        if best is None:
            return Tuning(runs, None)
        if best == 0:
            rates.insert(0, rates[0] / 2)
        elif best == len(rates) - 1:
            rates.append(2 * rates[-1])
        else:
            return Tuning(runs, rates[best])


def tunings(out: Path, tasks: Path) -> dict[tuple[str, str], Tuning]:
    """By arm and pool, whatever is tuned; A's serve B and the control."""
    tuned = {(arm, pool): tuning(arm, pool, out, tasks) for arm, pool in (("pc6", HELD), ("grpo", HELD), ("pc6", A))}
    return {**tuned, ("grpo", A): Tuning((), GRPO_ON_A)}


def _best(runs: Sequence[Planned], out: Path, tasks: Path) -> int | None:
    """Index of the run with the highest accuracy at the end; None until all have ended."""
    last = [curve.accuracy[-1] for each in runs if (curve := curve_of(each, out, tasks)) is not None]
    return int(np.argmax(last)) if len(last) == len(runs) else None


def planned(out: Path, tasks: Path) -> Iterator[Planned | None]:
    """Every run in its order; None where tuning has to end first."""
    tuned = tunings(out, tasks)
    for of_arm in tuned.values():
        yield from of_arm.runs
    if any(of_arm.rate is None for of_arm in tuned.values()):
        yield None
        return
    for pool, arms, seeds, rollouts in PLAN:
        for seed in seeds:
            for arm in arms:
                rate = tuned[ARMS[arm].tuned_as, HELD if pool == HELD else A].rate
                yield Planned(pool, arm, rate or nan, seed, rollouts)


def carry_out(out: Path, tasks: Path, *, one: bool) -> int:
    """The runs that have not ended and that no other process carries out, or the first of them."""
    for each in planned(out, tasks):
        if each is None:
            return WAIT
        run = each.run(tasks)
        place = folder_of(run, out)
        if is_finished(run, place):
            continue
        try:
            with as_if_on_policy(not ARMS[each.arm].corrected):
                train(run, place, resume=is_run_in(run, place))
        except InUse:
            continue
        print(each, flush=True)
        if one:
            break
    return 0


def _batches(place: Path) -> list[dict[str, Any]]:
    return [line for line in lines_in(place / "metrics.jsonl") if line["kind"] == "batch"]


def ages_in(place: Path) -> list[float]:
    """The mean age of the trained rows, batch by batch, in updates."""
    return [line["staleness_mean"] for line in _batches(place)]


def _by_twenty(values: Sequence[float]) -> str:
    return " ".join(f"{fmean(values[at : at + 20]):.2f}" for at in range(0, len(values) - 19, 20))


def probe(out: Path, tasks: Path) -> None:
    """Pilot-Commit alone on each candidate: the share of its pilots that pass, by tenths of its first hundred batches."""
    for pool in CANDIDATES:
        each = Planned(pool, "pc6", 3e-4, PROBE_SEED, ROLLOUTS)
        run = each.run(tasks)
        place = folder_of(run, out)
        if not is_finished(run, place):
            train(run, place, resume=is_run_in(run, place))
        shares = passing(place)[:100]
        tenths = [round(fmean(shares[at : at + 10]), 3) for at in range(0, len(shares) - 9, 10)]
        print(pool, f"{len(shares)} of 100 batches", tenths, flush=True)


def passing(place: Path) -> list[float]:
    """The share of the piloted prompts that passed, batch by batch. A batch pays 16 pilots a prompt and 8 x 48 commits."""
    lines = _batches(place)
    piloted = [line["rollouts_paid"] - 8 * 48 * line["batch"] for line in lines]
    failed = [line["accounts"]["out_of_band"] for line in lines]
    piloted_B, failed_B = np.diff(piloted, prepend=0), np.diff(failed, prepend=0)
    return (1 - failed_B[piloted_B > 0] / piloted_B[piloted_B > 0]).tolist()


# --------------------------------------------------------------------------------------------------------------- curves


@dataclass(frozen=True)
class Progress:
    """Smoothed accuracy of a run, and what it had spent by then, entry by entry; prompts that were evicted at the end."""

    accuracy: NDArray[np.float64]
    spent: Mapping[str, NDArray[np.float64]]
    evicted: int = 0

    def until(self, accuracy: float, cost: str) -> float:
        """What was spent when the smoothed accuracy first came to this; infinite if it never did."""
        above = np.flatnonzero(self.accuracy >= accuracy)
        if not above.size:
            return inf
        at, spent = int(above[0]), self.spent[cost]
        if at == 0:
            return float(spent[0])
        share = (accuracy - self.accuracy[at - 1]) / (self.accuracy[at] - self.accuracy[at - 1])
        return float(spent[at - 1] + share * (spent[at] - spent[at - 1]))


@cache
def curve_of(each: Planned, out: Path, tasks: Path) -> Progress | None:
    """The progress of a run; None if it has not ended."""
    run = each.run(tasks)
    place = folder_of(run, out)
    if not is_finished(run, place):
        return None
    lines, evicted = list[dict[str, Any]](), 0
    for line in lines_in(place / "metrics.jsonl"):
        if line["kind"] == "batch":
            evicted = line["evicted"]
        elif line["kind"] == "eval" and line["at"] is not None:
            lines.append(line)
    columns = {"rollouts": "at", "batches": "version", "steps": "optimizer_steps"}
    whole = {name: np.array([float(line[key]) for line in lines]) for name, key in columns.items()}
    smooth = np.convolve([line["accuracy"] for line in lines], np.full(WINDOW, 1 / WINDOW), "valid")
    return Progress(smooth, {name: column[WINDOW - 1 :] for name, column in whole.items()}, evicted)


@dataclass(frozen=True)
class Ratio:
    """GRPO's cost over a method's: geometric mean over seeds, Student's 95% interval; `bound` if a run never got there."""

    values: tuple[float, ...]
    bound: bool = False

    @property
    def point(self) -> float:
        return exp(fmean(map(log, self.values)))

    def ends(self) -> tuple[float, float]:
        if len(self.values) < 2:
            return nan, nan
        logs = [log(value) for value in self.values]
        half = half_width(logs)
        return fmean(logs) - half, fmean(logs) + half

    def __str__(self) -> str:
        low, high = map(exp, self.ends())
        values = ", ".join(f"{value:.2f}" for value in self.values)
        if self.bound:
            return f"< {self.point:.2f} ({values})"
        return f"{self.point:.2f} ({values})" if len(self.values) < 3 else f"{self.point:.2f} [{low:.2f}–{high:.2f}]"


def pairs_of(pool: str, arm: str, out: Path, tasks: Path) -> list[tuple[Progress, Progress, int]]:
    """GRPO's runs and the arm's on the same pool and seed, as far as both have ended; and the seed."""
    ended: dict[str, dict[int, Progress]] = {"grpo": {}, arm: {}}
    for each in planned(out, tasks):
        if each is not None and each.pool == pool and each.arm in ended and each.seed in SEEDS:
            curve = curve_of(each, out, tasks)
            if curve is not None:
                ended[each.arm][each.seed] = curve
    return [(ended["grpo"][seed], curve, seed) for seed, curve in ended[arm].items() if seed in ended["grpo"]]


def ratio(
    pairs: Sequence[tuple[Progress, Progress, int]], share: float, cost: str, level: float | None = None
) -> Ratio:
    """To that share of GRPO's smoothed peak on each seed, or to a level of accuracy that each GRPO run reaches."""
    values, bound = list[float](), False
    for grpo, other, _ in pairs:
        aim = share * float(grpo.accuracy.max()) if level is None else level
        spent = other.until(aim, cost)
        bound |= spent == inf
        values.append(grpo.until(aim, cost) / min(spent, float(other.spent[cost][-1])))
    return Ratio(tuple(values), bound)


def compared(out: Path, tasks: Path) -> Iterator[tuple[str, str, list[tuple[Progress, Progress, int]]]]:
    """Pools and arms in the plan's order with the pairs that have ended."""
    for pool, arm in dict.fromkeys((pool, arm) for pool, arms, *_ in PLAN for arm in arms):
        if arm != "grpo" and (pairs := pairs_of(pool, arm, out, tasks)):
            yield pool, arm, pairs


def show(out: Path, tasks: Path) -> None:
    """The chosen rates, every run, and the ratios, in Markdown."""
    for (arm, pool), of_arm in tunings(out, tasks).items():
        last = {each.rate: curve_of(each, out, tasks) for each in of_arm.runs}
        ends = {rate: round(float(curve.accuracy[-1]), 4) for rate, curve in last.items() if curve}
        print(f"{arm} on {pool}, tuned to {of_arm.rate}:", ends)
    print("\n| pool | method | seed | rollouts | batches | steps | peak | at the end | evicted |\n|" + "---|" * 9)
    for each in planned(out, tasks):
        curve = None if each is None else curve_of(each, out, tasks)
        if each is None or curve is None:
            continue
        spent = " | ".join(f"{curve.spent[cost][-1]:,.0f}" for cost in COSTS)
        figures = f"{curve.accuracy.max():.4f} | {curve.accuracy[-1]:.4f} | {curve.evicted}"
        print(f"| {each.pool} | {each.arm}@{each.rate:g} | {each.seed} | {spent} | {figures} |")
    print("\nShare of pilots that pass; mean age of the trained rows: by twenty batches\n")
    print("| pool | method | seed | pass | age |\n|" + "---|" * 5)
    for each in planned(out, tasks):
        if each is not None and each.seed in SEEDS and ARMS[each.arm].recipe == "pilot_commit":
            place = folder_of(each.run(tasks), out)
            if is_finished(each.run(tasks), place):
                passed, ages = map(_by_twenty, (passing(place), ages_in(place)))
                print(f"| {each.pool} | {each.arm} | {each.seed} | {passed} | {ages} |")
    for cost in COSTS[:2]:
        print(f"\nGRPO's {cost} over the method's, to each accuracy\n")
        print("| pool | method | seeds | " + " | ".join(map(str, LEVELS)) + " |\n|" + "---|" * (3 + len(LEVELS)))
        for pool, arm, pairs in compared(out, tasks):
            print(f"| {pool} | {arm} | {len(pairs)} | " + " | ".join(to_levels(pairs, cost)) + " |")
    print("\nTo .99 of GRPO's smoothed peak: GRPO's cost over the method's\n")
    print("| pool | method | seeds | rollouts | batches | optimizer steps |\n|" + "---|" * 6)
    for pool, arm, pairs in compared(out, tasks):
        cells = " | ".join(str(ratio(pairs, 0.99, cost)) for cost in COSTS)
        print(f"| {pool} | {arm} | {len(pairs)} | {cells} |")


def to_levels(pairs: Sequence[tuple[Progress, Progress, int]], cost: str) -> list[str]:
    """The ratio to each level between GRPO's beginning and end; a dash where a GRPO run begins above or never gets there."""
    able = [all(grpo.accuracy[0] < level <= grpo.accuracy.max() for grpo, _, _ in pairs) for level in LEVELS]
    return [str(ratio(pairs, 1.0, cost, level)) if can else "–" for level, can in zip(LEVELS, able, strict=True)]


IN_WORDS = {  # the arms of the figure
    "pc6": "Pilot-Commit as published",
    "default": "Pilot-Commit, our defaults",
    "n16": "GRPO in groups of 16",
}
POOLS_IN_WORDS = {
    HELD: "held: a third of the pilots keep passing",
    CONTROL: "control: all prompts between at first",
    B: "B: 10% hopeless, 45% between, 35% solved",
    A: "A: 35% hopeless, 35% between, 20% solved",
}


def draw(out: Path, to: Path, tasks: Path) -> None:
    """GRPO's rollouts over each method's, at every accuracy that both came to; a panel a pool, a line a seed."""
    by_pool: dict[str, list[tuple[str, list[tuple[Progress, Progress, int]]]]] = {}
    for pool, arm, pairs in compared(out, tasks):
        if arm in IN_WORDS:
            by_pool.setdefault(pool, []).append((arm, pairs))
    figure, panels = plt.subplots(2, 2, figsize=(8, 6), sharey=True, layout="constrained", squeeze=False)
    colors = dict(zip(IN_WORDS, ("#0072b2", "#e69f00", "#009e73"), strict=True))  # told apart by colour-blind readers
    for axes, pool in zip(panels.flat, POOLS_IN_WORDS, strict=True):
        for arm, pairs in by_pool.get(pool, []):
            for grpo, other, seed in pairs:
                high = min(float(grpo.accuracy.max()), float(other.accuracy.max()))
                levels = np.linspace(max(float(grpo.accuracy[0]), float(other.accuracy[0])), high, 80)[1:]
                ratios = [grpo.until(level, "rollouts") / other.until(level, "rollouts") for level in levels]
                label = IN_WORDS[arm] if seed == pairs[0][2] else None
                axes.plot(levels, ratios, color=colors[arm], label=label, linewidth=1.2)
        axes.axhline(1, color="0.5", linewidth=0.8)
        axes.set_title(POOLS_IN_WORDS[pool], fontsize=9)
        axes.set(xlabel="held-out accuracy", yscale="log", ylim=(0.25, 3))
        axes.set_yticks((0.25, 0.5, 0.7, 1, 1.5, 2, 3), ("0.25", "0.5", "0.7", "1", "1.5", "2", "3"))
        axes.yaxis.set_minor_locator(plt.NullLocator())
    handles, labels = panels[0, 0].get_legend_handles_labels()  # held has all arms, the panel beside it has room
    panels[0, 1].legend(handles, labels, fontsize=8, frameon=False, loc="upper left")
    figure.supylabel("GRPO's rollouts (8 groups of 64) over the method's (above 1: it is cheaper)", fontsize=9)
    figure.savefig(to, dpi=110)


# ---------------------------------------------------------------------------------------------------------------- pools


@dataclass(frozen=True)
class SharpConfig(SkillsConfig):
    """Of skills of which most are known: a share `known` has rate 1, the others Beta(.5, .5)."""

    known: float = 0.6
    warm_up: WarmUp = field(default_factory=lambda: WarmUp(steps=2000))
    seed: int = 23


@dataclass(frozen=True)
class PoolConfig:
    """A pool's name, and the sizes that decide its prompts."""

    name: str
    heldout: int = HELDOUT
    drawn: int = DRAWN
    seed: int = 17


def _sharp(config: SharpConfig) -> Skills:
    skills, rng = Skills(config), np.random.default_rng([config.seed, 9])
    known_K = rng.random(config.skills) < config.known
    skills.rate_K = np.where(known_K, 1.0, np.clip(rng.beta(0.5, 0.5, config.skills), 0.02, 0.98))
    return skills


def pool_files(tasks: Path, name: str) -> dict[str, Any]:
    """The fields of a `Config` for the model and a pool `SHARES-PROMPTS`, made in the folder if missing."""
    _, more, skills_of = name.partition("+")
    config = SharpConfig(skills=int(skills_of)) if more else SharpConfig()
    skills = _sharp(config)
    rng = np.random.default_rng([config.seed, 0])
    tokenizer = word_tokenizer(skills.words)

    def save(to: Path) -> None:
        save_warm_model(to, tokenizer, config.warm_up, lambda count: skills.noisy_examples(rng, count))

    model = make_once(tasks / "sharp" / f"model{more}{skills_of}", config, save)
    pool = PoolConfig(name)
    made = make_once(tasks / "sharp" / name, pool, lambda to: _make_pool(to, skills, model, pool))
    return {
        "model": str(model),
        "prompts": (str(made / "train.parquet"),),
        "heldout": str(made / "heldout.parquet"),
        "reward": "rollalloc.tasks.skills:compute_score",
        "single_answer": True,
        "reward_workers": 0,
        "device": "cpu",
    }


def _make_pool(to: Path, skills: Skills, model: Path, pool: PoolConfig) -> None:
    shares, _, train = pool.name.partition("+")[0].rpartition("-")
    rng = np.random.default_rng(pool.seed)
    drawn = {spell("k", one_L): one_L for one_L in skills.draw(rng, pool.drawn)}
    prompts = [f"{words} {SEPARATOR}" for words in drawn]
    answers = [spell("a", skills.right_K[one_L]) for one_L in drawn.values()]
    policy = Policy.load(str(model), device="cpu")
    tokens = [tuple(ids) for ids in policy.tokenizer(prompts)["input_ids"]]
    right = [policy.answer(answer) for answer in answers]
    rate_N, _ = exact_answers(policy.model, tokens, right, pad_id=policy.pad_id)
    band_N = np.digitize(rate_N, EDGES)
    kinds = [band_N == 0, band_N == 2, band_N == 4, (band_N == 1) | (band_N == 3)]
    free = [rng.permutation(np.flatnonzero(kind)).tolist() for kind in kinds]
    for split, size in (("train", int(train)), ("heldout", pool.heldout)):
        counts = np.diff(np.rint(np.cumsum([0, *SHARES[shares]]) * size / 100)).astype(int).tolist()
        if any(count > len(left) for count, left in zip(counts, free, strict=True)):
            raise ValueError(f"{pool} wants {counts} prompts of its bands for {split}, {list(map(len, free))} are left")
        chosen = [left.pop() for count, left in zip(counts, free, strict=True) for _ in range(count)]
        rows = [
            {
                "data_source": f"sharp/{pool.name}",
                "prompt": prompts[at],
                "reward_model": {"style": "rule", "ground_truth": answers[at]},
                "extra_info": {"split": split, "index": index, "exact_p": float(rate_N[at])},
            }
            for index, at in enumerate(rng.permutation(chosen).tolist())
        ]
        write_prompts(to / f"{split}.parquet", rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=("probe", "run", "table", "figure"))
    parser.add_argument("out", type=Path)
    parser.add_argument("figure", type=Path, nargs="?")
    parser.add_argument("--tasks", type=Path, required=True, help="where the task is made and kept")
    parser.add_argument("--one", action="store_true")
    asked = parser.parse_args()
    one_thread()
    if asked.action == "probe":
        probe(asked.out, asked.tasks)
    elif asked.action == "run":
        return carry_out(asked.out, asked.tasks, one=asked.one)
    elif asked.action == "table":
        show(asked.out, asked.tasks)
    elif asked.figure is None:
        parser.error("figure: name the file to draw to")
    else:
        draw(asked.out, asked.figure, asked.tasks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
