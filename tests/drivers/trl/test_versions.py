"""A warning names a TRL release above the tested one; settings that only such a release has fail a test here."""

from dataclasses import fields
from importlib.metadata import version

import pytest
import tiny_trl
import trl
from packaging.version import Version
from transformers import TrainingArguments
from trl import GRPOConfig

from rollalloc.drivers.trl import checks
from rollalloc.drivers.trl.checks import TESTED

# All settings of `GRPOConfig` up to that release. The driver honours each of them, raises an error, or warns.
_NAMES = """
    beta cache_implementation cast_lm_head_to_fp32 chat_template_kwargs delta disable_dropout ds3_gather_for_generation
    entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target epsilon epsilon_high
    generation_batch_size generation_kwargs importance_sampling_level log_completions log_completions_hub_repo
    log_multimodal log_unique_prompts loss_type mask_truncated_completions max_completion_length
    max_tool_calling_iterations min_p model_init_kwargs multi_objective_aggregation num_completions_to_print
    num_generations num_generations_eval num_iterations off_policy_mask_threshold pad_to_multiple_of
    ref_model_mixup_alpha ref_model_sync_steps repetition_penalty reward_weights router_aux_loss_coef
    sapo_temperature_neg sapo_temperature_pos scale_rewards shuffle_dataset steps_per_generation sync_ref_model
    temperature top_entropy_quantile top_k top_p transformers_continuous_batching_config trust_remote_code
    use_adaptive_entropy use_bias_correction_kl use_transformers_continuous_batching use_transformers_paged use_vllm
    vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos vllm_enable_sleep_mode vllm_gpu_memory_utilization
    vllm_group_port vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
    vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_max_model_length vllm_mode vllm_model_impl
    vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_structured_outputs_regex
    vllm_tensor_parallel_size
"""
KNOWN_SETTINGS = frozenset(_NAMES.split())


@pytest.mark.parametrize(("installed", "newer"), [("1.0.0", False), ("1.16.3", False), ("1.17.0", True), ("2.0", True)])
def test_a_trainer_of_a_newer_trl_names_it_with_the_one_that_was_tested(
    installed, newer, caplog, monkeypatch, tmp_path
):
    monkeypatch.setattr(checks, "version", lambda package: installed)
    tiny_trl.trainer(tmp_path, "grpo")
    assert (f"TRL {installed} is newer than 1.16" in caplog.text) == newer
    assert ("pip install 'trl==1.16.*'" in caplog.text) == newer


def test_trl_1_15_is_refused_on_a_cpu_unless_its_kernel_is_replaced(monkeypatch, tmp_path):
    monkeypatch.setattr(checks, "version", lambda package: "1.15.2")
    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", None, raising=False)
    with pytest.raises(ValueError, match=r"TRL 1.15 cannot train on a CPU.*pip install 'trl==1.16.\*'.*import unsloth"):
        tiny_trl.trainer(tmp_path, "grpo")
    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", object)
    tiny_trl.trainer(tmp_path, "grpo")


def test_the_installed_trl_has_no_setting_that_the_driver_does_not_know():
    """A setting of a new release is looked at, then honoured, refused or warned of, before its name is added above."""
    if Version(version("trl")).release[:2] > TESTED.release[:2]:
        pytest.skip("not tested yet")
    own = {field.name for field in fields(GRPOConfig)} - {field.name for field in fields(TrainingArguments)}
    assert own <= KNOWN_SETTINGS
