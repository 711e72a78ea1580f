"""The glossary's picture of what allocation is: forty rollouts by each of three recipes, on the same twelve prompts.

    python lab/experiments/picture.py docs/allocation.png

The allocator itself decides; only the rewards are drawn, each with its prompt's success rate. Each recipe pays forty
rollouts: GRPO and Pilot-Commit in one batch, REINFORCE in four. A rollout teaches if it is in the batch with an
advantage other than 0: GRPO and Pilot-Commit compare it with the others of its prompt, REINFORCE with the others of its
batch.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from rollalloc import Allocator, Recipe, recipes
from rollalloc.core.events import Done, Updated

# Pass rates as RL meets them: most prompts are solved or hopeless, few are between.
PASS_RATES = (1.0, 1.0, 1.0, 0.97, 0.75, 0.5, 0.3, 0.03, 0.0, 0.0, 0.0, 0.0)
SEED = 0
RIGHT, WRONG, IDLE = "#0072b2", "#d55e00", "#c9ced6"  # safe for colour-blind readers
PAID = 40  # rollouts of each recipe


@dataclass
class Sampled:
    """A rollout that was paid for: its prompt, its reward, and whether it taught anything."""

    prompt: int
    reward: float
    teaches: bool = False


def one_batch(recipe: Recipe, batches: int = 1) -> list[Sampled]:
    """The rollouts ordered until so many batches are trained on, without later visits that are for batches after these."""
    allocator = Allocator(recipe, prompts=len(PASS_RATES), seed=SEED)
    random = np.random.default_rng(SEED)
    sampled: dict[int, Sampled] = {}
    visits: dict[int, set[int]] = {}
    later: set[int] = set()
    total = batches
    while batches:
        actions = allocator.ask()
        if actions.batch:
            for row in actions.batch.rows:
                sampled[row.rollout].teaches = row.advantage != 0
            allocator.tell([Updated(allocator.version + 1)])
            batches -= 1
            continue
        for order in actions.generate:
            for rollout in order.rollouts:
                reward = float(random.random() < PASS_RATES[order.prompt])
                sampled[rollout] = Sampled(order.prompt, reward)
                allocator.tell([Done(rollout, reward, reward, 1, allocator.version)])
            visits.setdefault(order.prompt, set()).add(order.group)
            if len(visits[order.prompt]) > total:
                later.update(order.rollouts)
    return [one for rollout, one in sampled.items() if rollout not in later]


def draw(axes: Axes, title: str, sampled: list[Sampled]) -> None:
    columns = [0] * len(PASS_RATES)
    for one in sampled:
        colour = (RIGHT if one.reward else WRONG) if one.teaches else IDLE
        marker = "o" if one.reward else "X"
        axes.scatter(columns[one.prompt], -one.prompt, s=62, marker=marker, color=colour, linewidths=0)
        columns[one.prompt] += 1
    teaching = sum(one.teaches for one in sampled)
    axes.set_title(f"{title}\n{teaching} of {len(sampled)} rollouts have an advantage", fontsize=9)
    axes.set_xlim(-0.7, 8.7)
    axes.set_xticks([])
    axes.set_ylim(-len(PASS_RATES) + 0.3, 0.7)
    axes.set_yticks([-prompt for prompt in range(len(PASS_RATES))], [f"{rate:.0%}" for rate in PASS_RATES], fontsize=8)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def main(path: Path) -> None:
    batches = {
        "GRPO: 10 prompts, 4 each": one_batch(recipes.grpo(groups=10, n=4)),
        "REINFORCE: 10 prompts, 1 each, four batches": one_batch(recipes.reinforce(groups=10), batches=4),
        "Pilot-Commit: 2 each, 4 more where they differ": one_batch(
            recipes.pilot_commit(groups=4, n_pilot=2, n_commit=4, gen_groups=12)
        ),
    }
    paid = {title: len(sampled) for title, sampled in batches.items()}
    if set(paid.values()) != {PAID}:
        raise SystemExit(f"expected {PAID} rollouts of each recipe, got {paid}")
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.7), sharey=True)
    for panel, (title, sampled) in zip(axes, batches.items(), strict=True):
        draw(panel, title, sampled)
    axes[0].set_ylabel("prompts, by success rate", fontsize=9)
    figure.text(
        0.5,
        0.02,
        "● right   ✖ wrong   grey: paid for, advantage 0, so that nothing is learned from it",
        ha="center",
        fontsize=9,
        family="DejaVu Sans",
    )
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
