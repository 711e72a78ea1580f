"""What foresight predicts against what is true, while it trains: `python lab/experiments/foresight.py TASKS FIGURE.png`.

On skills/late, where a success rate is exact by teacher forcing: after so many rollouts the predicted and the true rate of
1,000 random training prompts, and of those that a draw would choose. One seed is a picture, not a measurement.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from rollalloc.data.prompts import EncodedPrompts, encode_prompts, load_prompts
from rollalloc.models.featurizer import features_of
from rollalloc.models.likelihood import exact_answers
from rollalloc.models.policy import Policy
from rollalloc.predict import quality
from rollalloc.rewards.function import load_reward
from rollalloc.rewards.scorers import InlineScorer
from rollalloc.tasks.presets import task_run
from rollalloc.train.config import Config
from rollalloc.train.loading import one_thread
from rollalloc.train.train import Trainer

MARKS = (320, 960, 1920, 3840)  # rollouts paid
SEED, SHOWN = 1000, 1000


def main(tasks: Path, figure: Path) -> None:
    """Train once, look four times."""
    one_thread()
    run = task_run("skills/late", "foresight", SEED, tasks, target=None)
    policy, recipe = Policy.load(run.model, device="cpu"), run.make_recipe()
    train, answers = with_answers(run, policy, *run.prompts)
    features = features_of(policy.model, train.tokens, pad_id=policy.pad_id)
    shown_K = np.random.default_rng(SEED).choice(len(answers), SHOWN, replace=False)
    marks, seen = list(MARKS), []

    def look(line: dict[str, Any]) -> None:
        if line["kind"] != "batch" or not marks or line["rollouts_paid"] < marks[0]:
            return
        marks.pop(0)
        memory = trainer.allocator._run.memory  # a look inside, which no rule gets
        rule: Any = recipe.prompts
        believed_K = rule.predictor(memory, features.blocks, shown_K)
        true_K, _ = exact_answers(
            policy.model, [train.tokens[at] for at in shown_K], [answers[at] for at in shown_K], pad_id=policy.pad_id
        )
        chosen_K = rule.chances(believed_K) * SHOWN
        seen.append((line["rollouts_paid"], believed_K, true_K, chosen_K))

    run = replace(run, max_batches=-(-MARKS[-1] // 32))  # of 32 rows each
    scorer = InlineScorer(load_reward(run.reward))
    trainer = Trainer(policy, recipe, train, scorer, run, features=features, listener=look)
    trainer.run()
    draw(seen, figure)


def encoded(run: Config, policy: Policy, *files: str) -> EncodedPrompts:
    """Prompts of a task."""
    return encode_prompts(
        load_prompts(*files),
        policy.tokenizer,
        context=policy.context,
        max_new_tokens=run.sampling.max_new_tokens,
        overlong="error",
    )


def with_answers(run: Config, policy: Policy, *files: str) -> tuple[EncodedPrompts, tuple[tuple[int, ...], ...]]:
    """Prompts of a task with one right answer each, and these answers, as token ids."""
    prompts = encoded(run, policy, *files)
    return prompts, tuple(policy.answer(str(truth)) for truth in prompts.prompt_set.ground_truths)


def draw(seen: list[tuple[int, Any, Any, Any]], to: Path) -> None:
    """A panel a mark: predicted to the right, true upwards, larger where a draw is likelier."""
    made, panels = plt.subplots(
        2, -(-len(seen) // 2), figsize=(6.4, 6.4), sharex=True, sharey=True, layout="constrained"
    )
    for axes, (paid, believed_K, true_K, chosen_K) in zip(panels.flat, seen, strict=False):
        axes.plot([0, 1], [0, 1], color="0.6", linewidth=1)
        axes.scatter(believed_K, true_K, s=3 + 9 * np.minimum(chosen_K, 8), alpha=0.35, linewidths=0, color="#2a6fb0")
        hits_K = (np.random.default_rng(0).random(true_K.size) < true_K).astype(float)
        area, best = (quality.auc(p_K, hits_K, np.ones_like(hits_K)) for p_K in (believed_K, true_K))
        off = float(np.abs(believed_K - true_K).mean())
        axes.set_title(f"after {paid:,} rollouts: off by {off:.2f} on average", fontsize=10)
        over_K = believed_K - true_K
        mean, drawn = over_K.mean(), np.average(over_K, weights=chosen_K)
        print(f"{paid} rollouts: AUC {area:.3f}, of the true rates {best:.3f}; mean |p̂ - p| {off:.3f};", end=" ")
        print(f"p̂ - p {mean:+.3f} on average, {drawn:+.3f} where a draw falls")
    made.supxlabel("predicted success rate", fontsize=10)
    made.supylabel("true success rate", fontsize=10)
    made.savefig(to, dpi=140)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
