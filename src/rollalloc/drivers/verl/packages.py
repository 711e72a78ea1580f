# pyright: reportMissingImports=false
# (verl and its dependencies are installed in a separate environment: constraints/verl-cpu.txt)
"""The packages that a configuration imports when training starts, and that verl does not require by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from omegaconf import OmegaConf

_ROLLOUT, _MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_ATTENTION = "flash_attention_2"  # verl's default
_TRL_WITHOUT_PPO = (1, 13)
_REWARD = "reward.custom_reward_function.path"
_OURS = "pkg://rollalloc.rewards."
# For a key: the modules that verl imports for each of its values. Values that need no further module are left out.
_IMPORTS: Mapping[str, Mapping[Any, tuple[str, ...]]] = {
    f"{_ROLLOUT}.name": {"vllm": ("vllm",), "sglang": ("sglang",), "trtllm": ("tensorrt_llm",)},
    f"{_ROLLOUT}.checkpoint_engine.backend": {
        "nccl": ("cupy",),
        "delta_sharded": ("cupy",),
        "nixl": ("cupy", "nixl"),
        "kimi_ckpt_engine": ("checkpoint_engine",),
        "mooncake": ("mooncake",),
    },
    f"{_ROLLOUT}.trace.backend": {name: (name,) for name in ("weave", "mlflow", "trackio")},
    "actor_rollout_ref.actor.strategy": {
        "megatron": ("megatron.core",),
        "veomni": ("veomni",),
        "torchtitan": ("torchtitan",),
        "automodel": ("nemo_automodel",),
    },
    f"{_MODEL}.use_liger": {True: ("liger_kernel",)},
    "trainer.logger": {
        **{name: (name,) for name in ("tensorboard", "wandb", "mlflow", "swanlab", "clearml", "trackio", "rl_insight")},
        "vemlp_wandb": ("volcengine_ml_platform",),
    },
}
# Keys whose values are names of modules.
_MODULES = (
    f"{_ROLLOUT}.checkpoint_engine.custom_backend_module",
    f"{_MODEL}.external_lib",
    "actor_rollout_ref.actor.optim.optimizer_impl",
)
_INSTALLED_BY = {  # where the name of the distribution differs from the name of the module
    "checkpoint_engine": "checkpoint-engine",
    "cupy": "'verl[cupy-cu130]==0.9.1', or cupy-cuda12x with CUDA 12",
    "liger_kernel": "liger-kernel",
    "math_verify": "'rollalloc[rewards]'",
    "megatron.core": "megatron-core",
    "mooncake": "mooncake-transfer-engine",
    "nemo_automodel": "nemo-automodel",
    "tensorrt_llm": "tensorrt-llm",
    "vllm": "'verl[vllm]==0.9.1'",
    "volcengine_ml_platform": "volcengine-ml-platform",
}


def lacking(config: Any) -> Iterator[str]:
    """For each package that this environment lacks or that spoils it: why it matters, and what to do."""
    for key, module in dict.fromkeys(_imported(config)):
        if not _is_there(module):
            yield (
                f"{key}={OmegaConf.select(config, key)} needs {module}, which is not installed here: pip install "
                f"{_INSTALLED_BY.get(module, module)}, on every node"
            )
    yield from _lacking_attention(config)
    yield from _unusable_trl()


def _imported(config: Any) -> Iterator[tuple[str, str]]:
    """Each module that the configuration needs, with the key that needs it."""
    on_npu = OmegaConf.select(config, "trainer.device") == "npu"
    for key, modules in _IMPORTS.items():
        for value in _values(OmegaConf.select(config, key)):
            for module in modules.get(value, ()):
                if not (on_npu and module == "cupy"):  # there, verl's engine "nccl" uses HCCL
                    yield key, module
    for key in _MODULES:
        for value in _values(OmegaConf.select(config, key)):
            yield key, str(value)
    if str(OmegaConf.select(config, _REWARD)).startswith(_OURS):
        yield _REWARD, "math_verify"


def _values(value: Any) -> Iterable[Any]:
    return value if OmegaConf.is_list(value) else () if value is None else (value,)


def _is_there(module: str) -> bool:
    """Whether a module can be imported. Only the packages that contain it are imported here."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # the package that would contain it is missing; or it was imported without a spec
        return False


def _lacking_attention(config: Any) -> Iterator[str]:
    chosen = OmegaConf.select(config, f"{_MODEL}.override_config") or {}
    attention = chosen.get("attn_implementation", _ATTENTION)
    if attention == _ATTENTION and config.trainer.device != "npu" and not _is_there("flash_attn"):
        yield (
            f"verl loads the model with {_ATTENTION}, and flash_attn is not installed here: build it "
            f"(recipes/verl/README.md), or add +{_MODEL}.override_config.attn_implementation=sdpa "
            f"{_MODEL}.use_remove_padding=False"
        )


def _unusable_trl() -> Iterator[str]:
    """verl cannot load a model beside a TRL that has no classes for PPO."""
    from packaging.version import Version

    try:
        installed = version("trl")
    except PackageNotFoundError:
        return
    if Version(installed).release[:2] >= _TRL_WITHOUT_PPO:
        yield (
            f"TRL {installed} is installed here, and verl 0.9.1 cannot load a model beside TRL 1.13 or newer, because it "
            "imports AutoModelForCausalLMWithValueHead, which TRL no longer has: pip uninstall trl, or use an environment "
            "without it"
        )
