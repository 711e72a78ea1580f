"""SmolLM2-135M through the real verl on CPUs for a few steps: needs its made folder, 12 GB of memory and some minutes.

`rollalloc model smollm2 runs/smollm2-untied --untie`, then `make verl-test ONLY=smollm2`.
"""

import json
import math
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import smollm2

pytest.importorskip("verl")
pytestmark = [pytest.mark.slow, pytest.mark.verl]
ROOT = Path(__file__).parents[3]
STEPS, GROUPS, TRAINED = 2, 4, 4
LIMIT = 1800  # seconds, against a run that hangs
OVERRIDES = {
    "trainer.total_training_steps": STEPS,
    "trainer.resume_mode": "disable",
    "trainer.v1.trainer_mode": "rollalloc",
    "+trainer.v1.rollalloc.recipe": "pilot_commit",
    "+trainer.v1.rollalloc.n_pilot": 2,
    "+trainer.v1.rollalloc.n_commit": 2,
    "+trainer.v1.rollalloc.gen_groups": GROUPS,
    "data.train_batch_size": GROUPS,
    "data.max_prompt_length": 160,
    "data.max_response_length": 16,
    "actor_rollout_ref.rollout.n": TRAINED,
    "actor_rollout_ref.rollout.max_model_len": 192,
    "actor_rollout_ref.actor.ppo_mini_batch_size": GROUPS,
    "actor_rollout_ref.actor.optim.lr": 1e-5,
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": 256,  # the embeddings in one
    "reward.custom_reward_function.path": str(Path(__file__).with_name("real_reward.py")),
}


def test_smollm2_trains_through_verl(tmp_path):
    how = "rollalloc model smollm2 runs/smollm2-untied --untie"
    model = smollm2.made("SMOLLM2_UNTIED", "runs/smollm2-untied", how)
    assert not json.loads((model / "config.json").read_text())["tie_word_embeddings"], f"an untied head: `{how}`"
    found = smollm2.stories(tmp_path / "stories")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").symlink_to(model)
    (tmp_path / "run" / "train.parquet").symlink_to(found.train)
    (tmp_path / "run" / "test.parquet").symlink_to(found.heldout)
    command = ["bash", ROOT / "examples" / "verl" / "cpu.sh", tmp_path / "run"]
    command += [f"{name}={value}" for name, value in OVERRIDES.items()]
    with (tmp_path / "log").open("w") as log:
        environment = os.environ | {"PYTHON": sys.executable}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            code = process.wait(timeout=LIMIT)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert code == 0, (tmp_path / "log").read_text()[-3000:]
    steps = [json.loads(line)["data"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == STEPS
    for step in steps:
        assert math.isfinite(step["actor/grad_norm"])
        causes = {name: value for name, value in step.items() if name.startswith("rollalloc/accounts/")}
        assert step["rollalloc/rollouts_paid"] == sum(causes.values()) > 0
    assert steps[-1]["rollalloc/accounts/failed"] == 0
