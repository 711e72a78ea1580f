"""What does verl pay for the same accuracy: its own GRPO, or the same command with `recipe=reinforce` or `pilot_commit`?

    PYTHON=.venv-verl/bin/python python lab/experiments/verl_learning.py run FOLDER [--one]  # resumable; --one: the next run
    python lab/experiments/verl_learning.py table FOLDER                                     # of the runs that are over

The plan, set before any run. Each run is examples/verl/cpu.sh, the tiny model of `make verl-demo`, whose reward is the
share of digits in an answer of up to 32 tokens. 64 rollouts a batch are trained on, in two optimizer steps: verl's GRPO and
Pilot-Commit (4 + 4 rollouts, pilots for 16 prompts) 8 prompts x 8, REINFORCE 64 x 1, all at the example's rate, 1e-2,
which was chosen for none of them; 16 batches; seeds 0, 1, 2 of the data's order, of vLLM's sampling and of the recipe; the
model is the same. Held out: the mean score of 8 prompts x 8 samples at temperature 1, by verl's validation before training
and after every second batch. Reported: rollouts paid until it is first .9, on that grid, and the score at the end. Three
seeds are too few for an interval: every value is shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from verl_modes import SINGLE, carried_out, carry_out, finished

STEPS, EVERY, TARGET, SEEDS, BATCH = 16, 2, 0.9, (0, 1, 2), 64
OURS = "trainer.v1.trainer_mode=rollalloc"
LINES = STEPS + 1  # of metrics: a line for each batch, and one before training
ARMS = {
    "verl's GRPO, 8 x 8": [],
    "recipe=reinforce, 64 x 1": [OURS, "+trainer.v1.rollalloc.recipe=reinforce", *SINGLE],
    "recipe=pilot_commit, 8 x (4 + 4)": [
        OURS,
        "+trainer.v1.rollalloc.recipe=pilot_commit",
        "+trainer.v1.rollalloc.n_pilot=4",
        "+trainer.v1.rollalloc.n_commit=4",
        "+trainer.v1.rollalloc.gen_groups=16",
    ],
}
VALIDATION = [
    f"trainer.test_freq={EVERY}",
    "trainer.val_before_train=True",
    *(f"actor_rollout_ref.rollout.val_kwargs.{each}" for each in ("do_sample=True", "temperature=1.0", "n=8")),
]


def planned(out: Path) -> Iterator[tuple[str, int, Path, list[str]]]:
    """Every run in its order: each arm on one seed before the next seed."""
    for seed in SEEDS:
        for number, (arm, keys) in enumerate(ARMS.items()):
            seeds = [f"data.seed={seed}", f"actor_rollout_ref.rollout.seed={seed}"]
            if keys:
                seeds.append(f"+trainer.v1.rollalloc.seed={seed}")
            how = [f"trainer.total_training_steps={STEPS}", "trainer.resume_mode=disable", *VALIDATION, *keys, *seeds]
            yield arm, seed, out / f"{number}-{seed}", how


def curve_of(folder: Path) -> list[tuple[float, float]]:
    """Rollouts paid and held-out score at each validation; empty if the run is not over."""
    if finished(folder, LINES) is None:
        return []
    found = []
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        score = [value for name, value in line["data"].items() if name.startswith("val-") and "/score/mean@" in name]
        paid = line["data"].get("rollalloc/rollouts_paid", BATCH * line["step"])
        if score:
            found.append((paid if line["step"] else 0, score[0]))
    return found


def show(out: Path) -> None:
    print(f"| arm | seed | rollouts to {TARGET} | rollouts paid | score at the start and at the end |")
    print("|---|---|---|---|---|")
    for arm, seed, folder, _ in planned(out):
        if curve := curve_of(folder):
            reached = next((f"{paid:,.0f}" for paid, score in curve if score >= TARGET), f"> {curve[-1][0]:,.0f}")
            print(f"| {arm} | {seed} | {reached} | {curve[-1][0]:,.0f} | {curve[0][1]:.3f}, {curve[-1][1]:.3f} |")


if __name__ == "__main__":
    carry_out(__doc__, planned, curve_of, lambda _, folder, keys: carried_out(folder, keys, LINES), show)
