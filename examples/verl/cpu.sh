#!/bin/bash
# Trains a tiny model with verl, Ray, FSDP2 and vLLM on CPUs: examples/verl/cpu.sh FOLDER [verl's overrides]
# For a model of your own on GPUs none of this is needed: add the keys of trainer.v1 to the command you run.
set -e
here=$(dirname "$(readlink -f "$0")")
folder=$(readlink -f "$1")
shift
python=${PYTHON:-python}
export VERL_PLATFORM=cpu VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1
export RAY_DEDUP_LOGS=0 RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1
export VERL_FILE_LOGGER_PATH="$folder/metrics.jsonl"
[ -d "$folder/model" ] || $python "$here/make_tiny.py" "$folder"
modules=verl_on_cpu${VERL_USE_EXTERNAL_MODULES:+,$VERL_USE_EXTERNAL_MODULES}
exec env VERL_USE_EXTERNAL_MODULES="$modules" PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" $python -m verl.trainer.main_ppo \
  trainer.device=cpu trainer.n_gpus_per_node=1 trainer.val_before_train=False 'trainer.logger=[console,file]' \
  trainer.default_local_dir="$folder/checkpoints" \
  algorithm.adv_estimator=grpo reward.num_workers=1 reward.custom_reward_function.path="$here/digits.py" \
  data.train_files="$folder/train.parquet" data.val_files="$folder/test.parquet" data.dataloader_num_workers=0 \
  data.train_batch_size=8 data.max_prompt_length=64 data.max_response_length=32 \
  actor_rollout_ref.model.path="$folder/model" actor_rollout_ref.model.use_remove_padding=False \
  actor_rollout_ref.model.enable_gradient_checkpointing=False \
  +actor_rollout_ref.model.override_config.attn_implementation=sdpa \
  actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.fsdp_config.use_torch_compile=False \
  '+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}' \
  actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True actor_rollout_ref.actor.optim.lr=1e-2 \
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.dtype=float32 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.enforce_eager=True \
  actor_rollout_ref.rollout.free_cache_engine=False +actor_rollout_ref.rollout.enable_sleep_mode=False \
  actor_rollout_ref.rollout.max_model_len=128 actor_rollout_ref.rollout.agent.num_workers=1 \
  +actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=cpu_weights.CpuWorkerExtension \
  actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16 \
  transfer_queue.backend.SimpleStorage.num_data_storage_units=1 \
  hydra.run.dir="$folder/hydra" \
  ray_kwargs.ray_init.num_cpus=16 +ray_kwargs.ray_init.num_gpus=1 +ray_kwargs.ray_init.include_dashboard=False "$@"
