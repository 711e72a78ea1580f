"""The configurations of the paper's runs, composed with the installed verl."""

from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

hydra = pytest.importorskip("hydra", reason="verl's environment: make verl-test")
pytest.importorskip("verl")

from compositions import composed  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402

from rollalloc import recipes  # noqa: E402
from rollalloc.drivers.verl.check import checked  # noqa: E402
from rollalloc.drivers.verl.check import main as check  # noqa: E402
from rollalloc.drivers.verl.settings import read_settings  # noqa: E402
from rollalloc.recipes.darts import ShortestAndLongest  # noqa: E402
from rollalloc.recipes.pilot_commit import EveryRound, SubsampledPilots  # noqa: E402
from rollalloc.rules.intake import KeepInFlight  # noqa: E402
from rollalloc.rules.prompts import AsOffered  # noqa: E402
from rollalloc.rules.rows import MaxVariance  # noqa: E402

FOLDER = Path(__file__).parents[3] / "recipes" / "verl"
PODS = ["pods_gsm8k", "pods_gsm8k_8gpu", "pods_llama", "pods_math"]
BASES = ("pods_", "darts_")
ROWS = sorted(path.stem for path in FOLDER.glob("*_*.yaml") if not path.stem.startswith(BASES))
DARTS = {
    "darts_dapo17k_14b": 128,
    "darts_dapo17k_30b": 128,
    "darts_dapo17k_32b": 128,
    "darts_deepmath_7b": 256,
    "darts_deepscaler_7b": 256,
    "darts_math_3b": 256,
}
METHODS = sorted(path.stem for path in (FOLDER / "method").glob("*.yaml"))

pytestmark = pytest.mark.verl


def run_of(row: str, *chosen: str) -> Any:
    return composed(command(row, *chosen))


def unresolved(row: str, *chosen: str) -> Any:
    """A run whose values that follow from others still say from which."""
    with hydra.initialize_config_dir(str(FOLDER), version_base=None):
        return OmegaConf.create(OmegaConf.to_container(hydra.compose(row, list(chosen)), resolve=False))


def command(row: str, *chosen: str) -> list[str]:
    return [f"--config-path={FOLDER}", f"--config-name={row}", *chosen]


def recipe_of(config: Any) -> tuple[int, int, Any]:
    groups, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    return groups, n, read_settings(OmegaConf.to_container(config.trainer.v1.rollalloc, resolve=True), groups, n).recipe


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("method", METHODS)
def test_every_row_of_a_paper_makes_a_recipe_of_its_own_size(row: str, method: str) -> None:
    config = run_of(row, f"method={method}")
    section = config.trainer.v1.rollalloc
    groups, n, recipe = recipe_of(config)
    assert recipe.groups == groups == 128
    assert n == (128 if row == "deepmath_1.5b" else 64)
    if method == "pilot_commit":
        assert section["n_pilot"] + section["n_commit"] == n
        assert recipe.intake == EveryRound(3 * groups)
        band = recipe.stages[0].judge  # evicts as published: on one visit, for ever
        assert (band.p_solve, band.confidence, band.reprobe_every) == (1.0, None, None)
    if "gen_groups" in section:
        assert recipe.max_candidates == 10 * section["gen_groups"]
    assert groups // config.actor_rollout_ref.actor.ppo_mini_batch_size == 4


@pytest.mark.parametrize("row", [*ROWS, "darts_math_3b"])
def test_each_method_of_a_row_has_a_log_and_checkpoints_of_its_own(row: str) -> None:
    methods = METHODS if row in ROWS else ["stream", "grpo", "dapo", "roll", "streamdapo"]
    runs = [run_of(row, f"method={name}") for name in methods]
    assert len({run.trainer.experiment_name for run in runs}) == len(methods)
    assert len({run.trainer.default_local_dir for run in runs}) == len(methods)


def test_pilots_as_needed_and_fewer_of_them_trained_on_are_overrides() -> None:
    chosen = ["trainer.v1.rollalloc.pilots=as_needed", "trainer.v1.rollalloc.n_effective=8"]
    as_needed = command("polaris_4b", "method=pilot_commit", *chosen)
    config = composed(as_needed)
    _, _, recipe = recipe_of(config)
    assert (recipe.intake, recipe.rows) == (KeepInFlight(384, ahead=True), SubsampledPilots(8))
    assert checked(config).optimizer_steps == 4
    _, _, first = recipe_of(composed([*as_needed, "trainer.v1.rollalloc.effective=first"]))
    assert first.rows == SubsampledPilots(8, first=True)


@pytest.mark.parametrize("row", ROWS)
def test_no_rollout_is_cut_before_its_length(row: str) -> None:
    """verl refuses a model of fewer positions than `max_model_len`; without it rollouts would be cut in silence."""
    config = run_of(row, "method=grpo")
    rollout, tokens = config.actor_rollout_ref.rollout, config.data.max_prompt_length + config.data.max_response_length
    assert rollout.max_model_len == rollout.max_num_batched_tokens == tokens
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == tokens
    assert config.actor_rollout_ref.model.path != "Qwen/Qwen2.5-Math-1.5B"
    penalty = config.reward.reward_kwargs
    assert (penalty.max_resp_len, penalty.overlong_buffer_cfg.enable) == (
        config.data.max_response_length,
        row == "deepmath_1.5b",
    )


@pytest.mark.parametrize(
    ("row", "pods", "grpo"),
    [
        ("pods_gsm8k", (1, 64, 16), (1, 16)),
        ("pods_math", (1, 32, 8), (1, 8)),
        ("pods_gsm8k_8gpu", (32, 128, 32), (128, 32)),
        ("pods_llama", (1, 64, 16), (1, 16)),
    ],
)
def test_runs_of_pods_have_the_published_baselines(row: str, pods: tuple[int, int, int], grpo: tuple[int, int]) -> None:
    ours, base = (unresolved(row, f"arm={arm}") for arm in ("pods", "grpo"))
    groups, n, recipe = recipe_of(ours)
    assert (groups, n, recipe.rows) == (*pods[:2], MaxVariance(pods[2]))
    assert recipe_of(base)[:2] == grpo
    for config in (ours, base):
        assert config.actor_rollout_ref.actor.ppo_mini_batch_size == config.data.train_batch_size
        tokens = config.data.max_prompt_length + config.data.max_response_length
        assert config.actor_rollout_ref.rollout.max_model_len == tokens
        assert config.actor_rollout_ref.model.get("lora_rank") == (0 if row == "pods_gsm8k_8gpu" else 64)
        for changed in ("experiment_name", "v1"):
            del config.trainer[changed]
        del config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    assert OmegaConf.to_container(ours) == OmegaConf.to_container(base)


def test_llama_has_a_kl_term_and_the_others_of_pods_have_none() -> None:
    for row in PODS:
        actor = run_of(row, "arm=pods").actor_rollout_ref.actor
        assert actor.use_kl_loss == (row == "pods_llama")
    config = run_of("pods_llama", "arm=pods")
    assert checked(config).rows == 16
    assert (config.actor_rollout_ref.actor.kl_loss_coef, config.algorithm.use_kl_in_reward) == (0.04, False)


@pytest.mark.parametrize("rule", ["max_reward", "random", "percentile"])
def test_pods_grids_and_rules_are_overrides(rule: str) -> None:
    chosen = ["row.n.pods=256", "row.m=2", f"trainer.v1.rollalloc.rule={rule}"]
    config = run_of("pods_gsm8k", "arm=pods", *chosen)
    _, n, recipe = recipe_of(config)
    assert (n, recipe) == (256, replace(recipes.pods(1, 256, 2, rule), prompts=AsOffered()))
    assert config.trainer.experiment_name == "pods_gsm8k-pods-256-2"


@pytest.mark.parametrize("row", DARTS)
@pytest.mark.parametrize("method", ["stream", "grpo", "dapo", "roll", "streamdapo"])
def test_runs_of_darts_stream_on_half_of_the_devices_and_train_on_eight_rows_a_group(row: str, method: str) -> None:
    config = run_of(row, f"method={method}")
    step = checked(config)
    assert (step.prompts, step.mode) == (DARTS[row], "separate_async")
    assert step.rows == (8 if method.startswith("stream") else None)
    assert config.actor_rollout_ref.rollout.n == 8
    assert config.actor_rollout_ref.rollout.n_gpus_per_node == config.trainer.n_gpus_per_node == 4
    assert config.trainer.v1.separate_async.parameter_sync_step == step.optimizer_steps == DARTS[row] / 32


def test_stream_has_ten_rollouts_of_every_prompt_and_streamdapo_ten_to_sixteen_with_fewer_longest() -> None:
    stream, streamdapo = (
        recipe_of(run_of("darts_deepmath_7b", f"method={method}"))[2] for method in ("stream", "streamdapo")
    )
    lengths = np.arange(256.0)
    assert set(stream.stages[0].size.spread(lengths, rows=8)) == {10}
    assert stream.rows == ShortestAndLongest(7, 1)
    sizes = streamdapo.stages[0].size.spread(lengths, rows=8)
    assert (min(sizes), max(sizes), sum(sizes)) == (10, 16, 12 * 256)
    assert set(streamdapo.stages[0].size.spread(np.ones(256), rows=8)) == {12}  # of prompts without a record
    assert streamdapo.rows == ShortestAndLongest(5, 3, by_size=True)
    assert streamdapo.stages[0].size.trained == streamdapo.rows  # σ is that of the trained rows, as released


@pytest.mark.parametrize(
    ("row", "choice", "says"),
    [
        ("deepmath_1.5b", "method=pilot_commit", "24,576 = 384 × 32 (pilot) + 128 × 96 (commit)"),
        ("deepmath_1.5b", "method=grpo", "16,384 = 128 × 128 (rollout)"),
        ("polaris_4b", "method=dapo", "24,576 = 384 × 64 (rollout)"),
        ("darts_deepmath_7b", "method=stream", "2,560 = 256 × 10 (rollout)"),
        ("darts_deepmath_7b", "method=streamdapo", "9,216 = 768 × 12 (rollout)"),
        ("pods_gsm8k_8gpu", "arm=pods", "4,096 = 32 × 128 (rollout)"),
        ("pods_gsm8k", "arm=pods", "64 = 1 × 64 (rollout)"),  # with LoRA
        ("pods_math", "arm=grpo", "8 = 1 × 8 (rollout)"),
    ],
)
def test_the_check_says_from_any_folder_what_a_step_is(
    row: str,
    choice: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without the data, which are not there."""
    monkeypatch.chdir(tmp_path)
    assert check(command(row, choice, "--no-files", "--no-packages")) == 0
    assert f"rollouts of a step, if one round of prompts fills the batch: {says}" in capsys.readouterr().out


def test_six_optimizer_steps_are_one_key() -> None:
    """As the released Pilot-Commit takes them, of batches of which the others take four."""
    six = "actor_rollout_ref.actor.ppo_mini_batch_size=21"
    assert checked(run_of("deepmath_1.5b", "method=pilot_commit", six)).optimizer_steps == 6


@pytest.mark.parametrize("row", ROWS)
def test_every_method_of_a_row_has_one_and_the_same_loss(row: str) -> None:
    losses = []
    for method in METHODS:
        config = run_of(row, f"method={method}")
        step = checked(config)
        assert (step.mode == "sync") == (method in ("dapo", "grpo", "pilot_commit", "pods"))
        assert step.optimizer_steps == 4
        actor = OmegaConf.to_container(config.actor_rollout_ref.actor, resolve=True)
        losses.append(
            (actor, OmegaConf.to_container(config.algorithm), config.actor_rollout_ref.rollout.calculate_log_probs)
        )
    assert all(loss == losses[0] for loss in losses)
    assert losses[0][1]["rollout_correction"]["rollout_is"] == "token"


@pytest.mark.parametrize("row", ["polaris_4b", *PODS])
def test_the_check_changes_nothing_and_says_what_it_could_not_check(row: str) -> None:
    """Also rows with LoRA where vLLM, which verl asks about the adapters' rank, is not installed under its own name."""
    config = run_of(row, "arm=pods" if row in PODS else "method=pilot_commit")
    rank = config.actor_rollout_ref.model.get("lora_rank", 0)
    step = checked(config)
    assert step.mode == "sync"
    assert config.actor_rollout_ref.model.get("lora_rank", 0) == rank, "the check changes the configuration"
    rank_is_unchecked = f"whether vLLM supports LoRA rank {rank}, because no package named vllm is installed here"
    assert step.unchecked == (rank_is_unchecked if rank and find_vllm() is None else "")


def find_vllm() -> str | None:
    """vLLM's version; None: it is not installed under this name."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return None


def test_pilot_commit_on_a_row_of_darts_says_which_values_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    without_values = command("darts_math_3b", "method=pilot_commit", "--no-files", "--no-packages")
    assert check(without_values) == 2
    assert "set it with +row.pilot=VALUE, or choose a method that does not read it" in capsys.readouterr().err
    assert check([*without_values, "+row.pilot=2", "+row.commit=6", "+row.promote=top_variance"]) == 0
    assert "3,072 = 768 × 2 (pilot) + 256 × 6 (commit)" in capsys.readouterr().out
