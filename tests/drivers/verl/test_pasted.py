"""What `rollalloc advise` says to paste for verl, composed and validated by verl and by the driver."""

import shlex

import numpy as np
import pytest

pytest.importorskip("verl", reason="verl's environment: make verl-test")

from rollalloc.advise.pasting import pasted
from rollalloc.advise.verdict import Choice
from rollalloc.data.feature_blocks import FeatureCost, Features
from rollalloc.data.feature_file import write_features
from rollalloc.drivers.verl.check import checked, composed

pytestmark = pytest.mark.verl
STOCK = ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.actor.use_dynamic_bsz=True"]
SHAPES = (
    *(Choice(recipe, 64, 1) for recipe in ("reinforce", "raft", "foresight")),
    Choice("grpo", 16, 4),
    Choice("reinforce", 256, 1),
    Choice("raft", 100, 2),
)


@pytest.mark.parametrize("choice", SHAPES, ids=lambda choice: f"{choice.name} {choice.groups}")
def test_verl_takes_what_is_pasted_and_a_step_is_the_choice(choice, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    features = Features({"own": np.ones((2, 3), np.float32)}, FeatureCost(2, 0, 0.0))
    write_features(tmp_path / "features.safetensors", ["a", "b"], features)
    *before, command = pasted(choice, "verl").replace("\\\n", "").splitlines()
    assert [line.split()[:2] for line in before] == [["rollalloc", "features"]] * (choice.recipe == "foresight")
    step = checked(composed([word for word in shlex.split(command) if word != "..."] + STOCK))
    assert (step.prompts, step.optimizer_steps, step.mode) == (choice.groups, 1, "sync")
    if choice.recipe == "grpo":
        assert step.recipe == f"stock verl, {choice.n} rollouts per prompt"
    else:
        assert f"groups={choice.groups}" in step.recipe
