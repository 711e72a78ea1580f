"""A real, tiny transformer learns: exact held-out accuracy rises under GRPO, DAPO and Pilot-Commit.

Every accuracy is exact, by teacher forcing, so that it has no sampling noise; what varies is the training's seed.
"""

from pathlib import Path

import pytest

from rollalloc.models.settings import Sampling
from rollalloc.tasks import skills
from rollalloc.tasks.files import TaskFiles
from rollalloc.tasks.presets import fields_of
from rollalloc.tasks.tiny import WarmUp
from rollalloc.train.config import Config
from rollalloc.train.train import train
from tiny_policy import one_thread

__all__ = ["one_thread"]  # a fixture
pytestmark = pytest.mark.learning

RECIPES = {
    "grpo": {"groups": 16, "n": 8},
    "dapo": {"groups": 8, "n": 8, "gen_groups": 24},
    "pilot_commit": {"groups": 8, "n_pilot": 4, "n_commit": 4, "gen_groups": 24},
}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> TaskFiles:
    """A quarter of the skills, a sixteenth of the prompts; ten bands of initial p from 0 to 1, equally full."""
    config = skills.SkillsConfig(skills=64, images=16, train=512, heldout=128, warm_up=WarmUp(steps=250, batch=64))
    return skills.prepare(tmp_path_factory.mktemp("skills"), "balanced", config)


def accuracies(
    task: TaskFiles, recipe: str, folder: Path, *, seed: int, max_rollouts: int, reward: str = "", **settings
) -> list[float]:
    """Held-out accuracy at each evaluation of a run, the first one before any training."""
    lines = []
    run = Config(
        **fields_of(task) | {"reward": reward or task.reward, "reward_workers": 0, "device": "cpu"},
        recipe=recipe,
        parameters=RECIPES[recipe],
        max_rollouts=max_rollouts,
        seed=seed,
        sampling=Sampling(task.max_new_tokens),
        **settings,
    )
    train(run, folder, lines.append)
    assert all(sum(line["accounts"].values()) == line["rollouts_paid"] <= max_rollouts for line in lines)
    return [line["accuracy"] for line in lines if line["kind"] == "eval" and line["at"] is not None]


@pytest.mark.parametrize("recipe", RECIPES)
def test_accuracy_rises(small, tmp_path, recipe):
    """The gain must be 0.10; error rate: the smallest of 18 measured gains is 4.7 standard deviations above that.

    Measured over seeds 0 to 5 at 8,000 rollouts, from an initial accuracy of 0.391: GRPO gained 0.232 to 0.260, DAPO
    0.186 to 0.228 (mean 0.203, standard deviation 0.018), Pilot-Commit 0.224 to 0.288. Nothing between recipes is
    asserted: their learning rates are not tuned here.
    """
    curve = accuracies(small, recipe, tmp_path, seed=7, max_rollouts=8000, learning_rate=5e-4, eval_every=2000)
    assert len(curve) == 5
    assert 0.3 < curve[0] < 0.5
    assert curve[-1] - curve[0] > 0.10


def test_accuracy_does_not_rise_for_a_reward_that_has_nothing_to_do_with_it(small, tmp_path):
    """The control: what raises accuracy above is the reward, not the training as such.

    Measured over seeds 0 to 5: it falls from 0.391 to between 0.11 and 0.21.
    """
    file = tmp_path / "coin.py"
    file.write_text(
        "from zlib import crc32\n"
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(crc32(f'{extra_info[\"index\"]} {solution_str}'.encode()) % 2)\n"
    )
    curve = accuracies(
        small,
        "grpo",
        tmp_path / "run",
        seed=7,
        max_rollouts=2000,
        reward=f"{file}:score",
        learning_rate=5e-4,
        eval_every=1000,
    )
    assert curve[-1] < curve[0] - 0.1


@pytest.mark.slow
def test_accuracy_rises_on_the_task_at_its_real_size(tmp_path):
    """The gain must be 0.10; error rate: the smallest of 15 measured gains is 8 standard deviations above that.

    Measured over seeds 0 to 4 at 16,000 rollouts, from an initial accuracy of 0.529: GRPO gained 0.299 to 0.354, DAPO
    0.205 to 0.240 (mean 0.226, standard deviation 0.013), Pilot-Commit 0.313 to 0.335. One learning rate for all, tuned
    for none.
    """
    task = skills.prepare(tmp_path / "skills", "late")
    for recipe in RECIPES:
        curve = accuracies(
            task, recipe, tmp_path / recipe, seed=7, max_rollouts=16_000, learning_rate=5e-4, eval_every=8000
        )
        assert 0.45 < curve[0] < 0.6
        assert curve[-1] - curve[0] > 0.10, recipe
