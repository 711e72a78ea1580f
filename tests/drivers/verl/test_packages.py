"""The packages that a configuration imports when training starts."""

import pytest

pytest.importorskip("verl", reason="verl's environment: make verl-test")

from rollalloc.drivers.verl import packages
from rollalloc.drivers.verl.check import composed, main
from rollalloc.drivers.verl.packages import lacking

pytestmark = pytest.mark.verl
ROLLOUT = "actor_rollout_ref.rollout"
PLAIN = [f"{ROLLOUT}.name=vllm", "trainer.logger=[console,file]"]
SDPA = ["+actor_rollout_ref.model.override_config.attn_implementation=sdpa"]


@pytest.fixture
def without(monkeypatch):
    """Make modules of these names seem not to be installed, and all others seem so."""

    def hide(*names):
        monkeypatch.setattr(packages, "_is_there", lambda module: module not in names)

    return hide


def test_nothing_is_said_where_all_is_installed(without):
    without()
    assert list(lacking(composed([*PLAIN, f"{ROLLOUT}.checkpoint_engine.backend=nccl"]))) == []


@pytest.mark.parametrize(
    ("override", "module", "install"),
    [
        (
            f"{ROLLOUT}.checkpoint_engine.backend=nccl",
            "cupy",
            "'verl[cupy-cu130]==0.9.1', or cupy-cuda12x with CUDA 12",
        ),
        (f"{ROLLOUT}.checkpoint_engine.backend=nixl", "nixl", "nixl"),
        (f"{ROLLOUT}.checkpoint_engine.backend=kimi_ckpt_engine", "checkpoint_engine", "checkpoint-engine"),
        (f"{ROLLOUT}.checkpoint_engine.backend=mooncake", "mooncake", "mooncake-transfer-engine"),
        (f"{ROLLOUT}.checkpoint_engine.custom_backend_module=mine.copies", "mine.copies", "mine.copies"),
        (f"{ROLLOUT}.name=vllm", "vllm", "'verl[vllm]==0.9.1'"),
        (f"{ROLLOUT}.name=sglang", "sglang", "sglang"),
        ("trainer.logger=[console,swanlab]", "swanlab", "swanlab"),
        ("trainer.logger=wandb", "wandb", "wandb"),
        ("actor_rollout_ref.model.use_liger=True", "liger_kernel", "liger-kernel"),
        ("actor_rollout_ref.actor.optim.optimizer_impl=torchao.optim", "torchao.optim", "torchao.optim"),
        ("reward.custom_reward_function.path=pkg://rollalloc.rewards.signed", "math_verify", "'rollalloc[rewards]'"),
    ],
)
def test_a_package_that_the_configuration_imports_is_named_with_the_key_and_the_install(
    without, override, module, install
):
    without(module)
    (line,) = lacking(composed([*PLAIN, *SDPA, override]))
    key = override.partition("=")[0]
    assert line.startswith(f"{key}=")
    assert f"needs {module}, which is not installed here: pip install {install}, on every node" in line


def test_on_an_npu_nccl_needs_no_cupy(without):
    without("cupy")
    words = [*PLAIN, f"{ROLLOUT}.checkpoint_engine.backend=nccl", "trainer.device=npu"]
    assert list(lacking(composed(words))) == []


def test_a_module_within_a_package_that_is_not_there_is_not_there():
    assert packages._is_there("importlib.metadata")
    assert not packages._is_there("no_such_package.part")
    assert not packages._is_there("json.no_such_part")


def test_an_attention_that_is_not_installed_is_said_with_the_keys_of_another(without):
    """verl loads models with FlashAttention 2 if nothing else is chosen, and fails without it when training starts."""
    without("flash_attn")
    (line,) = lacking(composed(PLAIN))
    keys = line.partition(" add ")[2].split()
    assert list(lacking(composed([*PLAIN, *keys]))) == []


@pytest.mark.parametrize(("installed", "noted"), [("1.12.0", False), ("1.13.0", True), ("1.16rc1", True)])
def test_a_trl_beside_which_verl_loads_no_model_is_said(monkeypatch, without, installed, noted):
    """verl's patches of a model import a class from TRL, whatever the model, if any TRL is installed."""
    without()
    monkeypatch.setattr(packages, "version", lambda name: installed)
    assert [line.startswith("TRL 1.1") for line in lacking(composed(PLAIN))] == [True] * noted


def test_the_check_refuses_what_cannot_start_here_unless_it_trains_elsewhere(without, capsys):
    without("cupy")
    words = [*PLAIN, *SDPA, f"{ROLLOUT}.checkpoint_engine.backend=nccl", "--no-files"]
    words += ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_dynamic_bsz=True"]
    assert main(words) == 1
    shown = capsys.readouterr()
    assert "refused: actor_rollout_ref.rollout.checkpoint_engine.backend=nccl needs cupy" in shown.err
    assert "1024 groups per batch" in shown.out
    assert main([*words, "--no-packages"]) == 0
