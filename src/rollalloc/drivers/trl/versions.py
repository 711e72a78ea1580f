"""Warns of TRL releases that are newer than the newest one tested."""

from __future__ import annotations

import logging
from dataclasses import MISSING, fields
from importlib.metadata import version
from typing import Any

from packaging.version import Version
from transformers import TrainingArguments

log = logging.getLogger(__name__)

TESTED = Version("1.16")

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


def warn_if_newer(args: Any, installed: str | None = None) -> None:
    """Warn if TRL is newer than the newest tested release, and if settings are used that only newer releases have.

    Args:
        args: TRL's `GRPOConfig`.
        installed: TRL's version. None: that of the installed package.
    """
    installed = installed or version("trl")
    if Version(installed).release[:2] > TESTED.release[:2]:
        log.warning(
            "TRL %s is newer than %s, the newest release that rollalloc's trainer was tested with; it overrides private "
            "methods of TRL. If training fails or behaves otherwise, pip install 'trl==%s.*'",
            installed,
            TESTED,
            TESTED,
        )
    if changed := _unknown(args):
        log.warning(
            "%s: this setting of TRL %s is not known to rollalloc's trainer, which may ignore it under a recipe",
            ", ".join(f"{name}={value!r}" for name, value in changed.items()),
            installed,
        )


def _unknown(args: Any) -> dict[str, Any]:
    """Settings that neither transformers nor a tested TRL has, if their values are not the defaults."""
    usual = {field.name for field in fields(TrainingArguments)} | KNOWN_SETTINGS
    changed: dict[str, Any] = {}
    for field in fields(args):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if field.name not in usual and (value := getattr(args, field.name)) != default:
            changed[field.name] = value
    return changed
