"""What DARTS trains on, by what becomes of the tail: the figure of docs/streaming.md.

python lab/experiments/tails.py docs/streaming.png

The real allocator, and rollouts that are nothing but a length, a log-normal one with median 12, cut at 128 tokens, and a
score: a rollout of n tokens is right with a chance that falls, or rises, with n. All that is ordered is decoded in step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray

from rollalloc import Allocator, Recipe, recipes
from rollalloc.core.events import Cancelled, Done, Event, Updated

GROUPS, PROMPTS, BATCHES, LIMIT = 64, 4096, 60, 128
TAILS = {
    "grpo": (recipes.grpo(GROUPS, 8), "#222222", "GRPO, groups of 8: all rollouts"),
    "exact": (recipes.darts(GROUPS, 7, 1, tail="exact"), "#0072b2", "exact: the 7 shortest and the longest"),
    "sampled": (recipes.darts(GROUPS, 7, 1, tail="sampled"), "#009e73", "sampled: the first 7 and one late, weighted"),
    "none": (recipes.darts(GROUPS, 7, 1, tail="none"), "#d55e00", "none: the first 8"),
}
TASKS: dict[str, Callable[[int], float]] = {
    "short ones are right": lambda tokens: 12 / (12 + tokens),
    "long ones are right": lambda tokens: tokens / (12 + tokens),
}


def trained(
    recipe: Recipe, right: Callable[[int], float], seed: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], int, int]:
    """Tokens, scores and weights of the rows that are trained on; decoding steps; tokens paid."""
    allocator, rng = Allocator(recipe, PROMPTS, seed), np.random.default_rng(seed)
    rows: list[tuple[int, float, float]] = []
    running: dict[int, int] = {}  # rollout → its length, when it will have ended
    begun: dict[int, int] = {}
    done: dict[int, tuple[int, float]] = {}
    step = paid = batches = 0
    while batches < BATCHES:
        actions = allocator.ask()
        for order in actions.generate:
            for rollout in order.rollouts:
                running[rollout] = int(np.clip(np.ceil(rng.lognormal(np.log(12), 1.1)), 1, LIMIT + 1))
                begun[rollout] = step
        events: list[Event] = []
        for rollout in actions.cancel:
            paid += step - begun[rollout]
            del running[rollout]
            events.append(Cancelled(rollout, step - begun[rollout]))
        if actions.batch is not None:
            # A rule's advantage is of no interest here: what is asked is which rows stand for what the policy writes.
            rows += [(*done[row.rollout], row.weight) for row in actions.batch.rows]
            batches += 1
            events.append(Updated(allocator.version + 1))
        elif not events:
            step += 1
            for rollout in [each for each, length in running.items() if step - begun[each] >= min(length, LIMIT)]:
                length = running.pop(rollout)
                cut, tokens = length > LIMIT, min(length, LIMIT)
                score = float(not cut and rng.random() < right(tokens))
                done[rollout] = tokens, score
                paid += tokens
                events.append(Done(rollout, score, score, tokens, allocator.version, truncated=cut))
        allocator.tell(events)
    tokens_R, score_R, weight_R = np.array(rows).T
    return tokens_R, score_R, weight_R, step, paid


def main(to: Path) -> None:
    figure, panels = plt.subplots(1, 2, figsize=(9.6, 3.6), layout="constrained")
    print("| tail | task | mean tokens | right | steps per batch | tokens per batch |\n|---|---|---|---|---|---|")
    for name, (recipe, color, label) in TAILS.items():
        for at, (task, right) in enumerate(TASKS.items()):
            tokens_R, score_R, weight_R, steps, paid = trained(recipe, right, 0)
            mean, share = np.average(tokens_R, weights=weight_R), np.average(score_R, weights=weight_R)
            print(f"| {name} | {task} | {mean:.1f} | {share:.3f} | {steps / BATCHES:.0f} | {paid / BATCHES:,.0f} |")
            place = 3 * at + list(TAILS).index(name) * 0.6
            panels[1].barh(place, share, 0.5, color=color)
            panels[1].text(share + 0.01, place, label, va="center", fontsize=7)
            if at == 0:
                order = np.argsort(tokens_R)
                shares = weight_R[order].cumsum() / weight_R.sum()
                panels[0].step(tokens_R[order], shares, color=color, label=label.partition(":")[0], linewidth=1.6)
                if name == "sampled":
                    panels[0].step(
                        tokens_R[order],
                        np.linspace(0, 1, order.size),
                        color=color,
                        linestyle=":",
                        label="sampled, without the weights",
                    )
    panels[0].set(xscale="log", xlabel="tokens of a row", ylabel="share of the weight on shorter rows")
    panels[0].set_xticks((1, 4, 12, 32, 128), labels=("1", "4", "12", "32", "128"))
    panels[0].legend(fontsize=7, frameon=False, loc="upper left")
    panels[1].set(xlim=(0, 1), xlabel="share of the weight on right rows")
    panels[1].set_yticks((0.9, 3.9), labels=[task.replace(" ", "\n", 1) for task in TASKS], fontsize=8)
    panels[1].invert_yaxis()
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(to, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
