"""The TRL driver against stock TRL (speed) and against rollalloc's own trainer (learning).

python lab/benchmarks/trl_driver.py speed      # whole steps, 256 rollouts of at most 64 tokens, recipe `grpo`
python lab/benchmarks/trl_driver.py learning   # rollouts to 0.85 on skills/late, two one-sided tests of equivalence
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from scipy.stats import bootstrap, ttest_1samp
from transformers import PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer

from bars import Bars, with_smallest
from rollalloc import Budget, recipes
from rollalloc.data.prompts import load_prompts
from rollalloc.drivers.trl import AllocatedGRPOTrainer
from rollalloc.models.likelihood import exact_answers
from rollalloc.models.policy import Policy
from rollalloc.rules.advantages import GRPO, settled
from rollalloc.runs.cost import Cost, Curve, cost_to_target, curve_of
from rollalloc.runs.reader import read_metrics
from rollalloc.tasks.presets import preset_of, task_files, task_run, tuned_of
from rollalloc.tasks.tiny import EOS_ID, PAD_ID, word_tokenizer
from rollalloc.train.loading import one_thread
from rollalloc.train.train import train
from small import small_model

ROWS, GROUP, TOKENS = 256, 8, 64
# The largest share of stock TRL's step that a step of ours may take, by how rollouts are generated.
SPEED = {"our sampler": 0.85, "our sampler, half of the prompts solved": 0.85, "generate": 1.05}
MARGIN = math.log(1.1)
FEWEST_SEEDS = 6


def config(out: Path | str, kind: type[GRPOConfig] = GRPOConfig, **changes: Any) -> GRPOConfig:
    """TRL's settings in float32 on the CPU, without anything written."""
    given: dict[str, Any] = {
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "lr_scheduler_type": "constant",
    }
    return kind(str(out), **given | changes)


# --------------------------------------------------------------------------------------------------------------- speed


class StepTimes(TrainerCallback):
    """Seconds of each whole step by a clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = self.clock()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(self.clock() - self._began)


def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Nearly every group has both rewards."""
    return [float(len(ids) % 2) for ids in completion_ids]


def half_solved(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Every other prompt is always right, as half of the groups are, or more, in real runs."""
    scores = even(completion_ids)
    return [1.0 if len(prompt.split()) % 2 else score for prompt, score in zip(prompts, scores, strict=True)]


def speed(repeats: int, threads: int | None, rows: int, bars: Bars, *, tokens: int = TOKENS) -> None:
    """Ratios of a step's time to stock TRL's in the same repeat.

    Args:
        repeats: pairs, after one that warms up.
        threads: of PyTorch; None: as many as it takes by itself. With one thread the clock counts processor seconds, the
            time that a step takes alone, however busy the machine is.
        rows: of a micro-batch.
        bars: what the medians are held against.
        tokens: limit of a rollout.
    """
    if threads:
        torch.set_num_threads(threads)
    tokenizer = word_tokenizer([f"w{number}" for number in range(51)])
    texts = [" ".join(f"w{(7 * row + at) % 51}" for at in range(5 + row % 4)) for row in range(ROWS)]
    given = {
        "args": config(
            tempfile.mkdtemp(),
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=ROWS // rows,
            num_generations=GROUP,
            max_completion_length=tokens,
            max_steps=1,
            learning_rate=1e-9,  # lengths stay what they are
            logging_steps=10,
        ),
        "train_dataset": Dataset.from_dict({"prompt": texts}),
        "processing_class": tokenizer,
    }
    recipe = recipes.grpo(groups=ROWS // GROUP, n=GROUP)

    def ours(reward: Any = even, **changes: Any) -> AllocatedGRPOTrainer:
        return AllocatedGRPOTrainer(
            small_model(len(tokenizer), pad_id=PAD_ID, eos_id=EOS_ID), reward, recipe=recipe, **given, **changes
        )

    reward: Any = even
    allocated = dict(zip(SPEED, (ours(), ours(half_solved), ours(use_sampler=False)), strict=True))
    trainers: dict[str, GRPOTrainer] = {
        **allocated,
        "stock TRL": GRPOTrainer(small_model(len(tokenizer), pad_id=PAD_ID, eos_id=EOS_ID), reward, **given),
    }
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times = {name: StepTimes(clock) for name in trainers}
    for name, trainer in trainers.items():
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(times[name])
    for repeat in range(repeats + 1):
        # In another order each time, so that a machine that slows down favours nobody.
        for name in random.Random(repeat).sample(list(trainers), len(trainers)):
            trainers[name].train()
        if repeat == 0:
            for each in times.values():
                each.seconds.clear()
    print(f"{torch.get_num_threads()} threads, micro-batches of {rows} rows, {repeats} pairs; median, 95% interval")
    for name, bar in SPEED.items():
        ratios = [mine / theirs for mine, theirs in zip(times[name].seconds, times["stock TRL"].seconds, strict=True)]
        low, high = bootstrap((ratios,), np.median, rng=0).confidence_interval if repeats > 1 else (math.nan, math.nan)
        held = bars.at_most(f"a step with {name}", statistics.median(ratios), bar)
        print(f"{name}: {statistics.median(ratios):.2f} of stock TRL's step [{low:.2f}, {high:.2f}], {held}")
    made = allocated["our sampler"].allocation.generated
    print(f"stock TRL's step: {statistics.median(times['stock TRL'].seconds):.2f} s; "
          f"{sum(len(each.made.tokens) for each in made) / len(made):.1f} tokens per rollout")  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ learning


class Accuracy(TrainerCallback):
    """Exact held-out accuracy on the grid of rollouts paid, as the native trainer takes it; ends at the target."""

    def __init__(self, policy: Policy, heldout: Path | str, every: int, target: float) -> None:
        prompts = load_prompts(heldout)
        self.policy, self.every, self.target = policy, every, target
        self.prompts = [tuple(ids) for ids in policy.tokenizer(list(prompts.prompts))["input_ids"]]
        self.answers = [policy.answer(str(truth)) for truth in prompts.ground_truths]
        self.at: list[int] = []
        self.versions: list[int] = []
        self.accuracy: list[float] = []
        self.trainer: Any = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._evaluate_until(0)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # The weights that this step makes come too late for the points that its rollouts went beyond.
        self._evaluate_until(self.trainer.allocation.allocator.paid - 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        cost = self.cost()
        control.should_training_stop = cost is not None and not cost.censored

    def cost(self) -> Cost | None:
        unknown = (0.0,) * len(self.at)
        curve = Curve(tuple(self.at), unknown, unknown, unknown, tuple(self.versions), tuple(self.accuracy), unknown)
        return cost_to_target(curve, self.target)

    def _evaluate_until(self, paid: int) -> None:
        while len(self.at) * self.every <= paid:
            chance_N, _ = exact_answers(self.policy.model, self.prompts, self.answers, pad_id=self.policy.pad_id)
            self.at.append(len(self.at) * self.every)
            self.versions.append(self.trainer.allocation.allocator.version)
            self.accuracy.append(float(chance_N.mean()))


def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(text == truth) for text, truth in zip(completions, answer, strict=True)]


def through_trl(name: str, seed: int, folder: Path) -> float | None:
    """Rollouts to the target through the TRL driver."""
    preset, task = preset_of("skills/late")[1], task_files("skills/late", folder)
    assert preset.target is not None
    tuned = tuned_of("skills/late")[name]
    recipe = replace(getattr(recipes, name)(**tuned.parameters), budget=Budget(run_rollouts=preset.max_rollouts))
    recipe = replace(recipe, advantage=settled(recipe.advantage, GRPO(ddof=0)))  # as the native trainer has it
    each = sum(stage.size.n for stage in recipe.stages)
    prompts = load_prompts(str(task.train))
    policy = Policy.load(str(task.model), device="cpu")
    watch = Accuracy(policy, str(task.heldout), preset.eval_every, preset.target)
    trainer = AllocatedGRPOTrainer(
        policy.model,
        right,
        config(
            folder / "trl",
            seed=seed,
            learning_rate=tuned.learning_rate,
            per_device_train_batch_size=recipe.groups * each,
            num_generations=each,
            max_completion_length=task.max_new_tokens,
            max_steps=preset.max_rollouts,
            logging_steps=1000,
            epsilon_high=0.28,
        ),
        Dataset.from_dict({"prompt": list(prompts.prompts), "answer": [str(truth) for truth in prompts.ground_truths]}),
        processing_class=policy.tokenizer,
        callbacks=[watch],
        recipe=recipe,
    )
    watch.trainer = trainer
    trainer.train()
    return _rollouts(watch.cost())


def natively(name: str, seed: int, folder: Path) -> float | None:
    """Rollouts to the target through the native trainer."""
    target = preset_of("skills/late")[1].target
    assert target is not None
    run = task_run("skills", name, seed, folder)
    place = folder / "native" / f"{name}-{seed}"
    train(run, place)
    return _rollouts(cost_to_target(curve_of(read_metrics(place / "metrics.jsonl")), target))


def _rollouts(cost: Cost | None) -> float | None:
    return None if cost is None or cost.censored else cost.paid["rollouts"]


def pair(name: str, seed: int, folder: Path) -> tuple[float | None, float | None]:
    """Rollouts to target through TRL and natively; a pair that was measured before is read from the folder."""
    place = folder / "pairs" / f"{name}-{seed}.json"
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps([through_trl(name, seed, folder), natively(name, seed, folder)]))
    trl, native = json.loads(place.read_text())
    print(f"{name}, seed {seed}: {trl and round(trl)} through TRL, {native and round(native)} natively", flush=True)
    return trl, native


def learning(seeds: list[int], names: list[str], folder: Path) -> None:
    """Two one-sided t-tests on the log ratio of rollouts to target, paired by seed, margin 10%, each at 5%."""
    for name in names:
        pairs = [pair(name, seed, folder) for seed in seeds]
        logs = [math.log(trl / native) for trl, native in pairs if trl and native]
        if len(logs) < len(pairs):
            print(f"{name}: a run did not reach the target; no test")
        elif len(logs) < FEWEST_SEEDS:
            print(f"{name}: a test needs at least {FEWEST_SEEDS} seeds")
        else:
            low, high = ttest_1samp(logs, 0.0).confidence_interval(0.90)
            verdict = "equivalent" if low > -MARGIN and high < MARGIN else "not shown to be equivalent"
            print(f"{name}, {len(logs)} seeds: TRL's rollouts over the native trainer's "
                  f"{math.exp(statistics.mean(logs)):.3f}, 90% interval [{math.exp(low):.3f}, {math.exp(high):.3f}], "
                  f"margin [0.909, 1.100]: {verdict}")  # fmt: skip


def main() -> None:
    parser = with_smallest(argparse.ArgumentParser(description=__doc__))
    parser.add_argument("what", choices=("speed", "learning"))
    parser.add_argument("--repeats", type=int, default=4, help="pairs of steps")
    parser.add_argument("--threads", type=int, help="of PyTorch while speed is measured; default: its own choice")
    parser.add_argument("--rows", type=int, default=ROWS, help="of a micro-batch while speed is measured")
    parser.add_argument("--seeds", default="0,1,2,3,4,5")
    parser.add_argument("--recipes", default="grpo,pilot_commit")
    parser.add_argument("--folder", type=Path, default=Path("runs/trl"), help="where the task and the runs are kept")
    given = parser.parse_args()
    disable_progress_bar()
    if given.what == "speed":
        bars = Bars(judged=not given.smallest)
        if given.smallest:
            speed(1, 1, ROWS, bars, tokens=2)
        else:
            speed(given.repeats, given.threads, given.rows, bars)
        bars.end()
    else:
        one_thread()
        learning([int(seed) for seed in given.seeds.split(",")], given.recipes.split(","), given.folder)


if __name__ == "__main__":
    main()
