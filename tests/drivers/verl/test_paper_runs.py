"""The configurations of the paper's runs, composed with the installed verl."""

from pathlib import Path
from typing import Any

import pytest

hydra = pytest.importorskip("hydra", reason="verl's environment: make verl-test")
pytest.importorskip("verl")

from omegaconf import OmegaConf  # noqa: E402

from rollalloc.drivers.verl.settings import read_settings  # noqa: E402

FOLDER = Path(__file__).parents[3] / "recipes" / "verl"
ROWS = sorted(path.stem for path in FOLDER.glob("*_*.yaml"))
METHODS = sorted(path.stem for path in (FOLDER / "method").glob("*.yaml"))

pytestmark = pytest.mark.verl


def composed(row: str, method: str) -> dict[str, Any]:
    with hydra.initialize_config_dir(str(FOLDER), version_base=None):
        config = hydra.compose(row, [f"method={method}"])
    return OmegaConf.to_container(config, resolve=False)


def test_every_row_and_method_is_there() -> None:
    assert ROWS == ["deepmath_1.5b", "polaris_14b", "polaris_4b", "polaris_8b"]
    assert METHODS == ["dapo", "darts", "grpo", "pilot_commit", "pods"]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("method", METHODS)
def test_methods_of_a_row_differ_in_the_keys_of_the_recipe_only(row: str, method: str) -> None:
    ours, base = composed(row, method), composed(row, "grpo")
    assert ours["trainer"]["v1"].pop("rollalloc")["recipe"] == method
    base["trainer"]["v1"].pop("rollalloc")
    assert ours == base


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("method", METHODS)
def test_each_is_a_recipe_of_the_rows_own_size(row: str, method: str) -> None:
    config = OmegaConf.create(composed(row, method))
    groups, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    section = OmegaConf.to_container(config.trainer.v1.rollalloc, resolve=True)
    recipe = read_settings(section, groups, n).recipe
    assert recipe.groups == groups == 128
    assert n == (128 if row == "deepmath_1.5b" else 64)
    if method == "pilot_commit":
        assert section["n_pilot"] + section["n_commit"] == n
    if "gen_groups" in section:
        assert recipe.max_candidates == 10 * section["gen_groups"]
    assert groups // config.actor_rollout_ref.actor.ppo_mini_batch_size == 4


@pytest.mark.parametrize("row", ROWS)
def test_no_rollout_is_cut_before_its_length(row: str) -> None:
    """verl refuses a model of fewer positions than `max_model_len`; without it rollouts would be cut in silence."""
    config = OmegaConf.create(composed(row, "grpo"))
    rollout, tokens = config.actor_rollout_ref.rollout, config.data.max_prompt_length + config.data.max_response_length
    assert rollout.max_model_len == rollout.max_num_batched_tokens == tokens
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == tokens
    assert config.actor_rollout_ref.model.path != "Qwen/Qwen2.5-Math-1.5B"
    penalty = config.reward.reward_kwargs
    assert (penalty.max_resp_len, penalty.overlong_buffer_cfg.enable) == (
        config.data.max_response_length,
        row == "deepmath_1.5b",
    )
