"""The cluster simulator: its speed, its error against the real sampler, and DARTS's published speed-ups against its own.

python lab/experiments/simulate.py speed      # simulated rollouts per minute
python lab/experiments/simulate.py sampler    # seconds of a real wave of our sampler against the simulated ones
python lab/experiments/simulate.py engine TASKS  # seconds a batch of the asynchronous engine against the simulated ones
python lab/experiments/simulate.py darts [sync|async [GPUS [TAILS]]]  # DARTS, part by part, in the published shape
python lab/experiments/simulate.py published [SEEDS]  # published speed-ups of six systems beside the simulated ones
python lab/experiments/simulate.py pods        # PODS's seconds a batch beside its baselines', by the update's share of them
python lab/experiments/simulate.py ahead [GPUS]      # GRPO with more batches than one generated while one is trained
python lab/experiments/simulate.py starved [GPUS]    # groups with long rollouts among the trained and among the begun
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rollalloc import Allocator, recipes
from rollalloc.compare.summary import in_words, interval
from rollalloc.core.recipe import Recipe
from rollalloc.rules.intake import Ahead, Fill
from rollalloc.rules.sizes import Fixed
from rollalloc_lab.simulate.cluster import Cluster, Scenario
from rollalloc_lab.simulate.cost import Costs, Latency
from rollalloc_lab.simulate.hardware import Hardware
from rollalloc_lab.simulate.simulation import Simulation, simulate
from rollalloc_lab.simulate.workload import Fitted, Lengths, Logged, SimulatedOutcome, Workload, read_rollouts

SEEDS = range(5)
SAMPLED_ROWS = (1, 4, 16, 64, 128, 192, 256)
NO_TRAINER = Costs(prefill=0.0, abort=0.0, weight_sync=0.0, logprob=0.0, train=0.0, train_row=0.0, update=0.0)


def speed() -> None:
    """Rollouts a minute of processor time, 64 GPUs, 30 batches of 128 groups of 8."""
    named = {
        "grpo": recipes.grpo(128, 8),
        "darts, tail none": recipes.darts(128, 7, 1, tail="none"),
        "pilot_commit": recipes.pilot_commit(128, 4, 4, 384),
    }
    for name, recipe in named.items():
        for schedule in ("sync", "async"):
            scenario = Scenario(cluster=Cluster(gpus=64, schedule=schedule), batches=30, warmup=0)
            rates = []
            for seed in range(3):
                began = time.process_time()
                paid = simulate(recipe, scenario, seed).paid
                rates.append(60 * paid / (time.process_time() - began))
            print(f"{name}, {schedule}: {statistics.median(rates):,.0f} rollouts per minute "
                  f"({min(rates):,.0f} to {max(rates):,.0f}), bar 1,000,000")  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ the sampler


class Exactly:
    """A workload whose rollouts have given lengths, by their ids; its own only world."""

    def __init__(self, tokens: Sequence[int], limit: int) -> None:
        self.tokens, self.limit, self.prompts = tokens, limit, len(tokens)

    @property
    def longest(self) -> int:
        return self.limit

    def world(self, seed: int) -> Exactly:
        return self

    def describe(self) -> dict[str, Any]:
        return {"source": "the sampler", "prompts": self.prompts}

    def outcome(self, prompt: int, rollout: int) -> SimulatedOutcome:
        return SimulatedOutcome(self.tokens[rollout], self.tokens[rollout] == self.limit, rollout % 2 == 0)


def sampler() -> None:
    """A curve measured on full batches of fixed length, then real waves that end as they do, and their simulation."""
    import torch

    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    from rollalloc.generate.sampler import Request, generate
    from rollalloc.models.settings import Sampling
    from sampler import EOS, PAD, VOCABULARY  # pyright: ignore[reportMissingImports]
    from small import small_model  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    model = small_model(VOCABULARY, pad_id=PAD, eos_id=EOS).eval()
    prompt = tuple(torch.randint(2, VOCABULARY, (8,)).tolist())

    def wave(rows: int, limit: int, eos: Sequence[int], seed: int) -> tuple[float, list[int]]:
        requests = [Request(at, prompt, (at,)) for at in range(rows)]
        began = time.process_time()  # of one thread: the clock on the wall sees what else the machine does
        made = generate(model, requests, Sampling(limit), eos_ids=eos, pad_id=PAD, seed=seed)
        return time.process_time() - began, [len(each.tokens) for each in made]

    wave(64, 16, [EOS], 0)  # warms up
    off = []
    for repeat in range(3):
        seconds = tuple(wave(rows, 48, [], 0)[0] / 48 for rows in SAMPLED_ROWS)
        real, tokens = wave(SAMPLED_ROWS[-1], 128, [EOS], repeat)
        curve = Latency(SAMPLED_ROWS, seconds, "our sampler")
        scenario = Scenario(
            cluster=Cluster(gpus=1, slots=SAMPLED_ROWS[-1]), costs=NO_TRAINER, latency=curve, workload=Exactly(tokens, 128),
            batches=1, warmup=0,
        )  # fmt: skip
        simulated = simulate(recipes.grpo(SAMPLED_ROWS[-1] // 8, 8), scenario, 0).seconds
        off.append(simulated / real - 1)
        print(f"real {real:.2f} s, simulated {simulated:.2f} s, off by {off[-1]:+.0%}; mean length "
              f"{statistics.mean(tokens):.0f}; ms per token at {', '.join(map(str, SAMPLED_ROWS))} rows: "
              f"{', '.join(f'{1000 * value:.2f}' for value in seconds)}", flush=True)  # fmt: skip
    print(f"off by {statistics.median(off):+.0%} in the median, {min(off):+.0%} to {max(off):+.0%}")


# ------------------------------------------------------------------------------------------------ the asynchronous engine


def engine(tasks: str, repeats: str = "3", batches: str = "12") -> None:
    """Batches of walks under the asynchronous engine, generator and trainer a process each, and their simulation.

    Each run is simulated with what it was itself: its rollouts, a curve through its decoding steps, the mean seconds of the
    processor that the trainer's process took, which is the update and what it does besides: scoring, telling, asking,
    writing. So what is tested is how these come together, not whether one run says what another will cost.
    """
    from rollalloc.train.loading import one_thread
    from streaming import WARM, Task, lines, measured_curve

    one_thread()
    task = Task(Path(tasks), "walks/mixed")
    made = lines(((1, 1.0),))
    task.seconds(made["grpo: overlap"], 4999, 2)  # warms up
    for name in ("grpo: overlap", "darts, shortest only: + overlap"):
        line, off = made[name], []
        for repeat in range(int(repeats)):
            with TemporaryDirectory() as folder:
                log = Path(folder) / "run"
                real, done = task.seconds(line, 5000 + repeat, int(batches), log)
                rollouts = read_rollouts(log / "rollouts.jsonl")
            steps = [(rows, seconds) for rows, seconds in task.steps if rows]
            rows_P, seconds_P = zip(*measured_curve(steps), strict=True)
            curve = Latency(rows_P, seconds_P, "an engine's own trace")
            most = max(rows for rows, _ in steps)
            if most > curve.concurrency[-1]:  # a point is the mean of its part
                at, seconds = (*curve.concurrency, most), (*curve.seconds_per_token, curve.seconds_per_token[-1])
                curve = Latency(at, seconds, curve.source)
            scenario = Scenario(
                cluster=Cluster(gpus=2, slots=most, schedule="async"), costs=replace(NO_TRAINER, update=done["trainer"]),
                latency=curve, workload=rollouts, batches=int(batches), warmup=WARM,
            )  # fmt: skip
            simulated = simulate(line.recipe, scenario, 0, max_staleness=line.staleness).per_batch["seconds"]
            off.append(simulated / real - 1)
            print(f"{name}: real {real:.2f} s a batch, simulated {simulated:.2f} s, off by {off[-1]:+.0%}; update "
                  f"{done['update']:.2f} s, processor {done['trainer']:.2f} and {done['generator']:.2f} s, at most "
                  f"{most} rows", flush=True)  # fmt: skip
        print(
            f"{name}: off by {statistics.median(off):+.0%} in the median, {min(off):+.0%} to {max(off):+.0%}; bar 15%"
        )


# ----------------------------------------------------------------------------------------------------------------- DARTS


def arms(tail: Any, groups: int = 256, latency: Any = None) -> dict[str, Recipe]:
    """What is selected, without and with sizes that adapt, and with those that a latency curve prices."""
    darts = recipes.darts(groups, 7, 1, tail=tail)
    floor = {
        name: recipes.darts(groups, 7, 1, tail=tail, least=10, normalise=name != "raw")
        for name in ("raw", "as released")
    }
    return {
        "12 each": _fixed(darts, 12),
        "16 each": _fixed(darts, 16),
        "adaptive": darts,
        **{f"floor of 10, {name}": each for name, each in floor.items()},
    } | ({"priced": recipes.darts(groups, 7, 1, tail=tail, latency=latency)} if latency else {})


def _curve(scenario: Scenario, held: int = 1200) -> tuple[tuple[int, float], ...]:
    """Seconds of a token by how many rollouts all replicas decode, where each holds so many tokens."""
    cluster, pace = scenario.cluster, scenario.pace
    return tuple(
        (cluster.replicas * each, pace.seconds(1.0, each, each * held))
        for each in (1, 4, 16, 32, 64, 128, 192, cluster.slots)
    )


def darts(schedule: Any = "sync", gpus: str = "32", tails: str = "exact,sampled,none") -> None:
    """32 GPUs, 2 a replica, 256 prompts, 8 = 7 + 1 of 12 on average and 16 at most, 8,192 tokens.

    GRPO's seconds per batch over each arm's, paired by seed. Published: 1.09, 1.40, 1.63 for the parts (14B), 1.29 to 1.77
    for the whole. 512 prompts, each visited twice before it counts: in the first pass no prompt has a record of lengths,
    so that sizes cannot adapt.
    """
    for within in (0.5, 0.8):
        workload = Fitted(prompts=512, lengths=Lengths(within=within))
        made = {"GRPO": (recipes.grpo(256, 8), False), "GRPO, overlap": (recipes.grpo(256, 8), True)}
        curve = _curve(Scenario(cluster=Cluster(gpus=int(gpus), gpus_per_replica=2), workload=workload))
        for tail in tails.split(","):
            known = curve if tail != "exact" else None  # lengths have no law where nothing is stopped
            made |= {f"{tail}, {name}, overlap": (each, True) for name, each in arms(tail, latency=known).items()}
        base: list[float] = []
        for name, (recipe, overlap) in made.items():
            cluster = Cluster(gpus=int(gpus), gpus_per_replica=2, schedule=schedule, overlap=overlap)
            scenario = Scenario(cluster=cluster, workload=workload, batches=4, warmup=4)
            seconds = [simulate(recipe, scenario, seed).per_batch["seconds"] for seed in SEEDS]
            base = base or seconds
            ratio = interval([theirs / ours for theirs, ours in zip(base, seconds, strict=True)])
            print(
                f"within {within}, {schedule}, {name}: {statistics.mean(seconds):.1f} s, {ratio.point:.2f} "
                f"[{ratio.low:.2f}–{ratio.high:.2f}]", flush=True
            )  # fmt: skip


# ------------------------------------------------------------------------------------------------------ published figures

LONG = Lengths(median=6000.0, limit=27_648)  # of models that reason at length; deviations are the defaults


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A published setting, batch and GPUs divided by four alike; what a paper does not say is the simulator's default."""

    model: str
    gpu: str = "h100"
    gpus: int
    share: int  # GPUs a replica
    lengths: Lengths = field(default_factory=Lengths)

    def seconds(
        self,
        recipe: Recipe,
        seed: int,
        workload: Workload | None = None,
        batches: int = 2,
        warmup: int = 0,
        **cluster: Any,
    ) -> float:
        """Of a batch."""
        scenario = Scenario(
            cluster=Cluster(gpus=self.gpus, gpus_per_replica=self.share, **cluster),
            hardware=Hardware(model=f"qwen2.5-{self.model}", gpu=self.gpu),
            workload=workload or Fitted(lengths=self.lengths),
            batches=batches,
            warmup=warmup,
        )
        return simulate(recipe, scenario, seed).per_batch["seconds"]


def _darts(shape: Shape, groups: int, seed: int) -> float:
    """12 for 8, shortest only, log-probabilities beside: what streams and is selected, without sizes that adapt."""
    faster = shape.seconds(arms("none", groups)["12 each"], seed, overlap=True)
    return shape.seconds(recipes.grpo(groups, 8), seed) / faster


def _rollpacker(shape: Shape, groups: int, seed: int) -> float:
    """Four rounds of prompts that are not among the longest fifth, the first 8 of 10 rollouts each, and one of these.

    Which prompts are long is known beforehand, and what is decoded of them in short rounds costs nothing: an upper bound.
    """
    world = Fitted(prompts=1000, lengths=shape.lengths).world(seed)
    drawn = [[world.outcome(prompt, 32 * prompt + at) for at in range(32)] for prompt in range(world.prompts)]
    drawn.sort(key=lambda of: sum(each.tokens for each in of))
    plain, short, long = (Logged(rollouts=part) for part in (drawn, drawn[:800], drawn[800:]))
    first = _fixed(recipes.darts(groups, 8, 0, tail="none"), 10)
    grpo = recipes.grpo(groups, 8)
    packed = 4 * shape.seconds(first, seed, workload=short) + shape.seconds(grpo, seed, workload=long)
    return 5 * shape.seconds(grpo, seed, workload=plain) / packed


def _areal(shape: Shape, groups: int, seed: int) -> float:
    """A quarter of the GPUs trains, 4 versions of staleness, 4 batches on the way."""
    grpo = recipes.grpo(groups, 16)
    ahead = replace(grpo, intake=Ahead(Fill(), 3 * groups), max_staleness=4)
    behind = shape.seconds(ahead, seed, batches=3, warmup=4, schedule="async", trainer_share=0.25)
    return shape.seconds(grpo, seed) / behind


def _duet(shape: Shape, groups: int, seed: int) -> float:
    """Half of the rollouts: its budget without its choice of prompts and its stops, for which there is no rule here."""
    return shape.seconds(recipes.grpo(groups, 8), seed) / shape.seconds(recipes.grpo(groups, 4), seed)


def _pilot_commit(shape: Shape, groups: int, seed: int) -> float:
    piloted = shape.seconds(recipes.pilot_commit(groups, 16, 48, 3 * groups), seed, batches=3, warmup=2)
    return piloted / shape.seconds(recipes.grpo(groups, 64), seed)


def _dapo(shape: Shape, groups: int, seed: int) -> float:
    return shape.seconds(recipes.dapo(groups, 64, 3 * groups), seed) / shape.seconds(recipes.grpo(groups, 64), seed)


def _fixed(recipe: Recipe, n: int) -> Recipe:
    return replace(recipe, stages=(replace(recipe.stages[0], size=Fixed(n)),))


def published(seeds: str = "5") -> None:
    """The baseline's seconds divided by each method's, or a step's seconds divided by the baseline's. Nothing is fitted."""
    h200 = Shape(model="14b", gpu="h200", gpus=16, share=1, lengths=Lengths(limit=4096))
    sixteen = Lengths(median=3000.0, limit=16_384)
    rows: list[tuple[str, str, Callable[[Shape, int, int], float], Shape, int]] = [
        ("DARTS 3B", "1.29", _darts, Shape(model="3b", gpus=8, share=1), 64),
        ("DARTS 7B", "1.45", _darts, Shape(model="7b", gpus=8, share=1), 64),
        ("DARTS 14B", "1.63", _darts, Shape(model="14b", gpus=8, share=2), 32),
        ("DARTS 32B", "1.77", _darts, Shape(model="32b", gpus=8, share=4, lengths=sixteen), 32),
        ("RollPacker 7B", "2.03–2.56", _rollpacker, Shape(model="7b", gpus=8, share=1, lengths=sixteen), 32),
        ("RollPacker 32B", "2.03–2.56", _rollpacker, Shape(model="32b", gpus=32, share=4, lengths=sixteen), 32),
        ("AReaL 1.5B", "2.77", _areal, Shape(model="1.5b", gpus=32, share=1, lengths=LONG), 128),
        ("AReaL 7B", "2.27", _areal, Shape(model="7b", gpus=48, share=1, lengths=LONG), 128),
        ("AReaL 32B", "1.64", _areal, Shape(model="32b", gpus=96, share=4, lengths=LONG), 128),
        ("DUET, half of the budget", "2.51", _duet, Shape(model="1.5b", gpus=2, share=1), 32),
        ("Pilot-Commit 14B, seconds per step divided by GRPO's", "1.21", _pilot_commit, h200, 32),
        ("DAPO 14B, seconds per step divided by GRPO's", "1.83", _dapo, h200, 32),
    ]
    print("| system | published | simulated | off by |\n|---|---|---|---|")
    for name, figure, measured, shape, groups in rows:
        found = [measured(shape, groups, seed) for seed in range(int(seeds))]
        point, band = interval(found), [float(each) for each in figure.split("–")]
        nearest = min(max(point.point, band[0]), band[-1])
        print(f"| {name} | {figure} | {in_words(point, '.2f')} | {point.point / nearest - 1:+.0%} |", flush=True)


# ------------------------------------------------------------------------------------------------------------------ PODS


def pods() -> None:
    """The baseline's seconds per batch over those of PODS, where log-probabilities and update are a share of the baseline's.

    Its two shapes: one GPU, 64 -> 16 rows of a prompt against 16 -> 16; eight, 128 -> 32 of 32 prompts against 32 of 128,
    as many rollouts. "as simulated": the share that the roofline comes to. The optimizer's step and the weights' way cost
    nothing, for they are the same under either. GSM8K's lengths are guesses.
    """
    hardware, workload = Hardware(model="qwen2.5-3b"), Fitted(lengths=Lengths(median=250.0, limit=1024))
    shapes = {
        "one GPU": (1, recipes.grpo(1, 16), recipes.pods(1, 64, 16)),
        "eight GPUs": (8, recipes.grpo(128, 32), recipes.pods(32, 128, 32)),
    }
    costs = replace(hardware.costs(), update=0.0, weight_sync=0.0)
    for name, (gpus, grpo, ours) in shapes.items():

        def of(recipe: Recipe, seed: int, more: float, gpus: int = gpus) -> dict[str, float]:
            """Of a batch, with log-probabilities and update so many times as dear."""
            dearer = replace(costs, logprob=more * costs.logprob, train=more * costs.train)
            cluster = Cluster(gpus=gpus)
            scenario = Scenario(
                cluster=cluster, costs=dearer, hardware=hardware, workload=workload, batches=4, warmup=0
            )
            return simulate(recipe, scenario, seed).per_batch

        found = of(grpo, 0, 1.0)["training_share"]
        for share in (found, 0.25, 0.5, 0.75, 0.9):
            more = share / (1 - share) / (found / (1 - found))
            ratio = interval([of(grpo, seed, more)["seconds"] / of(ours, seed, more)["seconds"] for seed in SEEDS])
            how = ", as simulated" if share == found else ""
            print(f"{name}, update {share:.0%} of the baseline{how}: {in_words(ratio, '.2f')}", flush=True)


# ----------------------------------------------------------------------------------------------------------------- ahead


def ahead(gpus_: str = "8,16,32,64") -> None:
    """GRPO, 128 × 8, synchronous, and 1, 2 and 4 batches ahead: its seconds per batch over each one's, and what is too old.

    With a staleness of just as many updates, and with what `streamed` allows where none is said.
    """
    recipe = recipes.grpo(128, 8)
    for gpus in map(int, gpus_.split(",")):
        base: list[float] = []
        for batches, staleness in ((0, 0), (1, None), (2, 2), (2, None), (4, 4), (4, None)):
            schedule: Any = "async" if batches else "sync"
            cluster = Cluster(gpus=gpus, schedule=schedule, ahead=batches or None)
            scenario = Scenario(cluster=cluster)
            runs = [Simulation(recipe, scenario, seed, max_staleness=staleness, allocator=Allocator) for seed in SEEDS]
            seconds = [each.run().per_batch["seconds"] for each in runs]
            base = base or seconds
            ratio = interval([theirs / ours for theirs, ours in zip(base, seconds, strict=True)])
            made = [each.allocator for each in runs]
            stale = sum(each.accounts()["stale"] for each in made) / sum(each.paid for each in made)
            print(f"{gpus} GPUs, {batches} ahead, staleness {made[0].recipe.max_staleness}: {ratio.point:.2f} "
                  f"[{ratio.low:.2f}–{ratio.high:.2f}], too old {stale:.1%}", flush=True)  # fmt: skip


class Watched(Simulation):
    """A simulation that keeps which groups were begun, how long the longest rollout of each is, and which were trained."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.group_of: dict[int, int] = {}
        self.longest: list[int] = []
        self.begun: list[int] = []  # version at which a group was ordered
        self.trained: set[int] = set()

    def _take(self, actions: Any) -> None:
        version = self.allocator.version
        for order in actions.generate:
            self.group_of.update(dict.fromkeys(order.rollouts, len(self.longest)))
            outcomes = [self.world.outcome(order.prompt, rollout) for rollout in order.rollouts]
            self.longest.append(max(each.tokens for each in outcomes))
            self.begun.append(version)
        super()._take(actions)

    def _update(self, batch: Any) -> None:
        self.trained.update(self.group_of[row.rollout] for row in batch.rows)
        super()._update(batch)


def starved(gpus: str = "32") -> None:
    """Share of groups with a long rollout among those trained, over their share among those begun; GRPO, 128 x 8.

    Long: the longest rollout of a group is among the longest tenth of all groups. Groups that were begun in the last
    updates, as many as the staleness allows, do not count, since they may still be trained.
    """
    for batches, staleness in ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8)):
        ratios, lost = list[float](), list[float]()
        for seed in range(3):
            scenario = Scenario(cluster=Cluster(gpus=int(gpus), schedule="async", ahead=batches), batches=16)
            run = Watched(recipes.grpo(128, 8), scenario, seed, max_staleness=staleness, allocator=Allocator)
            run.run()
            last = run.allocator.version - staleness
            counted = [at for at, version in enumerate(run.begun) if version < last]
            limit = statistics.quantiles([run.longest[at] for at in counted], n=10)[-1]
            long = [at for at in counted if run.longest[at] >= limit]
            among_begun = len(long) / len(counted)
            among_trained = sum(at in run.trained for at in long) / sum(at in run.trained for at in counted)
            ratios.append(among_trained / among_begun)
            lost.append(1 - sum(at in run.trained for at in counted) / len(counted))
        shares = ", ".join(
            f"{ratio:.3f} ({share:.1%} never trained)" for ratio, share in zip(ratios, lost, strict=True)
        )
        print(f"{gpus} GPUs, {batches} ahead, staleness {staleness}: {shares}", flush=True)


COMMANDS: dict[str, Callable[..., None]] = {
    "speed": speed, "sampler": sampler, "engine": engine, "darts": darts, "published": published, "pods": pods,
    "ahead": ahead, "starved": starved,
}  # fmt: skip

if __name__ == "__main__":
    COMMANDS[sys.argv[1]](*sys.argv[2:])
