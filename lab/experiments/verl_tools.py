"""Does verl's `tool_agent` learn to call a tool under REINFORCE, DAPO and Pilot-Commit as it does under verl's own GRPO?

    PYTHON=.venv-verl/bin/python python lab/experiments/verl_tools.py run FOLDER [--one]  # resumable; --one: the next run
    python lab/experiments/verl_tools.py table FOLDER                                     # of the runs that are over

The plan, set before any run. The task and the warmed-up tiny Qwen2 are those of examples/multiplying.py, made
once: products of two numbers of two digits, a tool that multiplies and that a third of the first rollouts call. 64 rollouts
a batch are trained on, in one optimizer step at 1e-3, which was tuned for none of them: verl's GRPO, DAPO and Pilot-Commit
(4 + 4) 8 prompts x 8, DAPO and Pilot-Commit with up to 16 prompts at once, REINFORCE 64 x 1; 12 batches; seeds 0 and 1 of
the data's order, of vLLM's sampling and of the recipe; then, added after seed 0 of the first three arms and before any
figure of seed 1, seed 2. Held out: 256 questions, one sample each at temperature 1, before training and after every batch
(standard error up to .03). Until 26 November 2026, 63 of them were among the training prompts; the runs since then, by the
same plan, have none of them. Reported: the accuracy after the last batch at which no more than 768 rollouts were paid, which
is what verl's GRPO and REINFORCE pay in all, and at the end, with what was paid. Three seeds are too few for an interval:
every value is shown.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import verl_learning
from verl_modes import carried_out, carry_out, finished

BATCHES, SEEDS, BATCH = 12, (0, 1, 2), 64
LINES = BATCHES + 1  # of metrics: a line for each batch, and one before training
TASK = Path(__file__).parents[2] / "examples" / "multiplying.py"
GRPO, REINFORCE, PILOT_COMMIT = verl_learning.ARMS.items()
DAPO = [verl_learning.OURS, "+trainer.v1.rollalloc.recipe=dapo", "+trainer.v1.rollalloc.gen_groups=16"]
ARMS = dict([GRPO, REINFORCE, ("recipe=dapo, 8 x 8", DAPO), PILOT_COMMIT])
AGENT, TURNS = "actor_rollout_ref.rollout.agent", "actor_rollout_ref.rollout.multi_turn"
SHARED = [
    *(f"{AGENT}.default_agent_loop=tool_agent", f"{TURNS}.format=hermes", f"{TURNS}.max_assistant_turns=2"),
    *(f"{TURNS}.function_tool_path={TASK}", f"reward.custom_reward_function.path={TASK}"),
    *("data.max_response_length=48", "actor_rollout_ref.actor.optim.lr=1e-3"),
    *(f"trainer.total_training_steps={BATCHES}", "trainer.resume_mode=disable"),
    *("trainer.val_before_train=True", "trainer.test_freq=1"),
    *(f"actor_rollout_ref.rollout.val_kwargs.{each}" for each in ("do_sample=True", "temperature=1.0")),
]


def planned(out: Path) -> Iterator[tuple[str, int, Path, list[str]]]:
    """Every run in its order: seeds 0 and 1, of them Pilot-Commit last, since it was measured before; then seed 2."""
    runs = [(arm, seed) for seed in SEEDS for arm in ARMS]
    for arm, seed in sorted(runs, key=lambda run: (run[1] == SEEDS[-1], run[0] == PILOT_COMMIT[0])):
        seeds = [f"data.seed={seed}", f"actor_rollout_ref.rollout.seed={seed}"]
        seeds += [f"+trainer.v1.rollalloc.seed={seed}"] if ARMS[arm] else []
        prompts = 64 if arm == REINFORCE[0] else 8  # all of a batch, so that it is one optimizer step
        how = [*SHARED, *ARMS[arm], f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}", *seeds]
        yield arm, seed, out / f"{list(ARMS).index(arm)}-{seed}", how


def run(out: Path, folder: Path, keys: list[str]) -> None:
    """One run, on the model and the prompts that all share."""
    python = os.environ.get("PYTHON", sys.executable)
    if not (out / "task" / "test.parquet").exists():
        subprocess.run([python, TASK, out / "task"], check=True)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("model", "train.parquet", "test.parquet"):
        if not (folder / name).exists():
            (folder / name).symlink_to(out / "task" / name)
    carried_out(folder, keys, LINES)


def curve_of(folder: Path) -> list[tuple[float, float]]:
    """Rollouts paid and held-out accuracy, before training and after each batch; empty if the run is not over."""
    curve = []
    for batch, data in enumerate(finished(folder, LINES) or []):
        accuracy = next(value for name, value in data.items() if name.startswith("val-core/") and "/mean@1" in name)
        curve.append((data.get("rollalloc/rollouts_paid", BATCH * batch) if batch else 0, accuracy))
    return curve


def show(out: Path) -> None:
    most = BATCHES * BATCH
    print(f"| arm | seed | accuracy at the start | after at most {most} rollouts | at the end | rollouts paid |")
    print("|---|---|---|---|---|---|")
    for arm, seed, folder, _ in planned(out):
        if curve := curve_of(folder):
            equal = [accuracy for paid, accuracy in curve if paid <= most][-1]
            print(f"| {arm} | {seed} | {curve[0][1]:.3f} | {equal:.3f} | {curve[-1][1]:.3f} | {curve[-1][0]:,.0f} |")


if __name__ == "__main__":
    carry_out(__doc__, planned, curve_of, run, show)
