"""How much prediction could gain: foresight that predicts the true success rate, beside foresight and REINFORCE.

`python benchmarks/oracle.py TASKS OUT [TASK ...]`, tuning seeds. On tasks with one right answer a prompt the rate under the
current weights is exact, by teacher forcing. The oracle looks at the weights and pays nothing for it: it is a diagnostic of
what a better predictor would be worth, and no method.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from foresight import with_answers
from numpy.typing import ArrayLike, NDArray

from rollalloc.core.recipe import Recipe
from rollalloc.lab.bench.presets import TUNING_SEEDS, task_run
from rollalloc.models.features import features_of
from rollalloc.models.likelihood import exact_answers
from rollalloc.models.policy import Policy
from rollalloc.predict import quality
from rollalloc.predict.predictor import Features, Memory, Predictor
from rollalloc.rewards.function import load_reward
from rollalloc.rewards.scorers import InlineScorer
from rollalloc.runs.cost import cost_to_target, curve_of
from rollalloc.train.description import Run
from rollalloc.train.evaluation import HeldOut
from rollalloc.train.execution import one_thread
from rollalloc.train.native import Trainer

TASKS = ("skills/late", "rg/gcd", "rg/spell_backward")
MOST = 16_000  # rollouts
GRID = {
    "rg/gcd": {"eval_every": 200},
    "rg/spell_backward": {"eval_every": 200},
}  # the target lies within the first 1,000


@dataclass(frozen=True, slots=True, kw_only=True)
class TrueRates(Predictor):
    """Says what is so; learns nothing. One process trains one policy, whose rates `of` knows."""

    of: ClassVar[Callable[[NDArray[np.int64]], NDArray[np.float64]]]

    def __call__(self, memory: Memory, features: Features, prompts_K: ArrayLike) -> NDArray[np.float64]:
        true_K = TrueRates.of(np.asarray(prompts_K, np.int64))
        return np.clip(true_K, quality.LEAST, 1 - quality.LEAST)

    def due(self, memory: Memory) -> bool:
        return False


def predicted(recipe: Recipe, **changes: Any) -> Recipe:
    """Foresight with other settings of its prompt rule."""
    return replace(recipe, prompts=replace(recipe.prompts, **changes))


# Method -> the recipe whose tuned settings it has, and what is changed. The oracle needs no warming up.
METHODS: dict[str, tuple[str, Callable[[Recipe], Recipe]]] = {
    "reinforce": ("reinforce", lambda recipe: recipe),
    "foresight": ("foresight", lambda recipe: recipe),
    "uniform": ("foresight", partial(predicted, exponent=None)),
    "oracle": ("foresight", partial(predicted, predictor=TrueRates(), warm=0)),
    "oracle, exponent 1": ("foresight", partial(predicted, predictor=TrueRates(), warm=0, exponent=1.0)),
    "oracle, uniform": ("foresight", partial(predicted, predictor=TrueRates(), warm=0, exponent=None)),
}
COMPARED = {"reinforce", "foresight", "oracle"}  # before the others


def metrics_of(run: Run, change: Callable[[Recipe], Recipe]) -> Iterator[dict[str, Any]]:
    """Train, and give the lines of the metrics."""
    policy = Policy.load(run.source.model, device="cpu")
    train, answers = with_answers(run, policy, *run.source.prompts)
    heldout = HeldOut(*with_answers(run, policy, str(run.source.heldout)))

    def rates(prompts_K: NDArray[np.int64]) -> NDArray[np.float64]:
        asked = prompts_K.tolist()
        tokens, right = [train.tokens[at] for at in asked], [answers[at] for at in asked]
        return exact_answers(
            policy.model, tokens, right, pad_id=policy.pad_id, temperature=run.settings.sampling.temperature
        )[0]

    TrueRates.of = rates
    recipe, lines = change(run.made_recipe()), []
    features = features_of(policy.model, train.tokens, pad_id=policy.pad_id) if recipe.reads_features else None
    scorer = InlineScorer(load_reward(run.source.reward))
    Trainer(
        policy, recipe, train, scorer, run.settings, heldout=heldout, features=features, listener=lines.append
    ).run()
    yield from lines


def main(tasks: Path, out: Path, *names: str) -> None:
    """Rollouts and tokens to the target, a line a run, added to `out`; runs that are there are not repeated."""
    one_thread()
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    there = {(each["task"], each["seed"], each["method"]) for each in done}
    every = [
        (task, seed, method)
        for methods in (COMPARED, METHODS.keys() - COMPARED)
        for task in names or TASKS
        for seed in TUNING_SEEDS
        for method in sorted(methods, reverse=True)
    ]
    for task, seed, method in every:
        if (task, seed, method) in there:
            continue
        recipe, change = METHODS[method]
        run = replace(task_run(task, "", recipe, seed, tasks, **GRID.get(task, {})), max_rollouts=MOST)
        target = run.settings.target
        assert target is not None
        cost = cost_to_target(curve_of(metrics_of(run, change)), target)
        assert cost is not None
        found = {"task": task, "seed": seed, "method": method, "censored": cost.censored}
        found |= {name: round(cost.paid[name]) for name in ("rollouts", "tokens")}
        print(found, flush=True)
        with out.open("a") as file:
            file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
