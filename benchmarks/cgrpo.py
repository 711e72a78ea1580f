"""C-GRPO by its author's package beside this package's recipe, both under TRL, on skills/late.

pip install --no-deps --target runs/trl-cgrpo-0.2.0 trl==1.14.1 trl-cgrpo==0.2.0      # it goes with no newer TRL
PYTHONPATH=runs/trl-cgrpo-0.2.0 python benchmarks/cgrpo.py rule        # do both stop at the same rollout?
PYTHONPATH=runs/trl-cgrpo-0.2.0 python benchmarks/cgrpo.py training    # accuracy by rollouts, calibration counted and not

Settings are the package's defaults: budgets 2, 4, 8, 16, 32, a calibration every 50 steps; its score is "first_success",
which is the recipe's, and "aps", its default. Each arm is shown at each of two learning rates.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from scipy.stats import bootstrap
from transformers import TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl_cgrpo import CGRPOConfig, CGRPOTrainer
from trl_cgrpo.conformal import conformal_quantile, first_success_score, select_delta_auto
from trl_driver import config, right

from rollalloc import Budget, recipes
from rollalloc.data.prompts import load_prompts
from rollalloc.drivers.trl import AllocatedGRPOTrainer
from rollalloc.lab.bench.presets import task_source
from rollalloc.models.likelihood import exact_answers
from rollalloc.models.policy import Policy
from rollalloc.rules.judges import conformal_place, first_success
from rollalloc.train.execution import one_thread

TASK, GROUPS, CALIBRATION = "skills/late", 8, 32  # prompts to a batch, and to calibrate with
BUDGETS = (2, 4, 8, 16, 32)
RATES = (3e-4, 6e-4)  # at 1e-3 all unlearn
EVERY = 500  # training rollouts between evaluations


# ---------------------------------------------------------------------------------------------------------------- rule


def rule(cases: int) -> None:
    """Rollouts after which each stops, of random prompts and calibrations."""
    rng = np.random.default_rng(0)
    same = earlier = later = 0
    for _ in range(cases):
        rates_N = rng.beta(rng.uniform(0.2, 2), rng.uniform(0.2, 2), 1 + int(rng.integers(60)))
        visits_NG = rng.random((len(rates_N), BUDGETS[-1])) < rates_N[:, None]
        passes_G = rng.random(BUDGETS[-1]) < rng.choice(rates_N)
        theirs, ours = package_stop(visits_NG, passes_G), recipe_stop(visits_NG, passes_G)
        same, earlier, later = same + (theirs == ours), earlier + (ours < theirs), later + (ours > theirs)
    print(f"{cases} prompts: {same} stop at the same rollout, {earlier} earlier in the recipe, {later} later")


def package_stop(visits_NG: np.ndarray, passes_G: np.ndarray) -> int:
    scores = {k: [first_success_score(visit.tolist(), k) for visit in visits_NG] for k in BUDGETS}
    delta, _ = select_delta_auto(scores[BUDGETS[-1]])
    for k in BUDGETS:
        threshold = conformal_quantile(scores[k], delta)
        if passes_G[:k].any() and first_success_score(passes_G.tolist(), k) <= threshold:
            return k
    return BUDGETS[-1]


def recipe_stop(visits_NG: np.ndarray, passes_G: np.ndarray) -> int:
    expected = conformal_place([first_success(visit.astype(float)) for visit in visits_NG], None)
    place = first_success(passes_G.astype(float))
    return next((k for k in BUDGETS if 0 < place <= min(k, expected)), BUDGETS[-1])


# ------------------------------------------------------------------------------------------------------------ training


class Accuracies(TrainerCallback):
    """Exact held-out accuracy whenever so many more training rollouts were paid; ends at the last of them."""

    def __init__(self, policy: Policy, heldout: str, most: int) -> None:
        prompts = load_prompts(heldout)
        self.policy, self.most = policy, most
        self.prompts = [tuple(ids) for ids in policy.tokenizer(list(prompts.prompts))["input_ids"]]
        self.answers = [policy.answer(str(truth)) for truth in prompts.ground_truths]
        self.points: list[tuple[int, int, float]] = []  # training rollouts, those of calibrations, accuracy
        self.paid: Callable[[], tuple[int, int]] = lambda: (0, 0)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._evaluate()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trained, _ = self.paid()
        if trained >= self.points[-1][0] // EVERY * EVERY + EVERY or trained >= self.most:
            self._evaluate()
        control.should_training_stop = trained >= self.most

    def _evaluate(self) -> None:
        chance_N, _ = exact_answers(self.policy.model, self.prompts, self.answers, pad_id=self.policy.pad_id)
        self.points.append((*self.paid(), float(chance_N.mean())))


def passes(completions: list[str], answer: str, **_: Any) -> list[bool]:
    return [text == answer for text in completions]


def by_package(score: str, rate: float, seed: int, most: int, folder: Path) -> Accuracies:
    policy, watch, rows, tokens = _task(folder, most)
    given = _settings(folder, seed, rate, tokens, GROUPS * BUDGETS[-1])
    trainer = CGRPOTrainer(
        policy.model,
        right,
        config(kind=CGRPOConfig, budget_grid=list(BUDGETS), score=score, **given),
        train_dataset=Dataset.from_list(rows[:-CALIBRATION]),
        calibration_dataset=Dataset.from_list(rows[-CALIBRATION:]),
        answer_extractor=str,
        verifier=passes,
        processing_class=policy.tokenizer,
        callbacks=[watch],
    )
    found = trainer._metrics["train"]  # nothing is logged before the end, so that all of it is there
    watch.paid = lambda: (
        round(sum(found["cgrpo/mean_k"]) * GROUPS),
        int(sum(found["cgrpo/calibration_rollouts"])),
    )
    trainer.train()
    return watch


def by_recipe(name: str, rate: float, seed: int, most: int, folder: Path) -> Accuracies:
    policy, watch, rows, tokens = _task(folder, most)
    recipe = recipes.cgrpo(GROUPS, BUDGETS) if name == "cgrpo" else recipes.grpo(GROUPS, 4)
    each = BUDGETS[-1] if name == "cgrpo" else 4
    trainer = AllocatedGRPOTrainer(
        policy.model,
        right,
        config(**_settings(folder, seed, rate, tokens, GROUPS * each), num_generations=each),
        Dataset.from_list(rows[:-CALIBRATION]),
        processing_class=policy.tokenizer,
        callbacks=[watch],
        recipe=replace(recipe, budget=Budget(run_rollouts=10 * most)),
    )
    watch.paid = lambda: (trainer.allocation.allocator.paid, 0)
    trainer.train()
    return watch


def _task(folder: Path, most: int) -> tuple[Policy, Accuracies, list[dict[str, str]], int]:
    source, tokens = task_source(TASK, folder / "tasks")
    prompts, policy = load_prompts(*source.prompts), Policy.load(source.model, device="cpu")
    rows = [{"prompt": str(p), "answer": str(a)} for p, a in zip(prompts.prompts, prompts.ground_truths, strict=True)]
    return policy, Accuracies(policy, str(source.heldout), most), rows, tokens


def _settings(folder: Path, seed: int, rate: float, tokens: int, rows: int) -> dict[str, Any]:
    return {
        "out": folder / "out",
        "seed": seed,
        "learning_rate": rate,
        "per_device_train_batch_size": rows,
        "max_completion_length": tokens,
        "max_steps": 100_000,
        "logging_steps": 1_000_000,
        "epsilon_high": 0.28,
    }


ARMS: dict[str, Callable[[float, int, int, Path], Accuracies]] = {
    "GRPO 8 x 4": lambda *given: by_recipe("grpo", *given),
    "recipe cgrpo": lambda *given: by_recipe("cgrpo", *given),
    "package, first_success": lambda *given: by_package("first_success", *given),
    "package, aps": lambda *given: by_package("aps", *given),
}


def curve(arm: str, rate: float, seed: int, most: int, folder: Path) -> np.ndarray:
    """Points of a run, a row each; one that was made before is read."""
    place = folder / "curves" / f"{arm}-{rate:g}-{seed}-{most}.json"
    if not place.exists():
        torch.manual_seed(seed)
        points = ARMS[arm](rate, seed, most, folder).points
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(points))
        print(f"{arm}, {rate:g}, seed {seed}: {', '.join(f'{a:.3f}' for _, _, a in points)}", flush=True)
    return np.array(json.loads(place.read_text()))


def accuracy_at(points: np.ndarray, rollouts: int, calibration_counts: bool) -> float:
    """Accuracy after so many rollouts, linearly between the points on both sides."""
    paid = points[:, 0] + points[:, 1] * calibration_counts
    return float(np.interp(rollouts, paid, points[:, 2]))


def training(seeds: list[int], most: int, folder: Path) -> None:
    for arm, rate in itertools.product(ARMS, RATES):
        runs = [curve(arm, rate, seed, most, folder) for seed in seeds]
        said = [
            f"{what} {_interval([accuracy_at(run, most, counts) for run in runs])}"
            for what, counts in (("accuracy at equal training rollouts", False), ("calibration counted", True))
        ]
        extra = np.mean([run[-1, 1] / run[-1, 0] for run in runs])
        print(f"{arm}: rate {rate:g}; {'; '.join(said)}; {extra:.0%} more for calibration", flush=True)


def _interval(values: list[float]) -> str:
    if len(values) < 5 or math.isclose(min(values), max(values)):
        return " ".join(f"{value:.3f}" for value in values)
    low, high = bootstrap((values,), np.mean, rng=0).confidence_interval
    return f"{np.mean(values):.3f} [{low:.3f}, {high:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("rule", "training"))
    parser.add_argument("--cases", type=int, default=20_000, help="random prompts of the rule")
    parser.add_argument("--seeds", type=int, nargs="+", default=[8210, 8211, 8212, 8213, 8214])
    parser.add_argument("--rollouts", type=int, default=6000, help="that each run trains on")
    parser.add_argument("--folder", type=Path, default=Path("runs/cgrpo"))
    given = parser.parse_args()
    disable_progress_bar()
    one_thread()
    if given.what == "rule":
        rule(given.cases)
    else:
        training(given.seeds, given.rollouts, given.folder)


if __name__ == "__main__":
    main()
