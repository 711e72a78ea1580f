"""Our three trainers and the check of the configuration, with the installed verl; Ray's calls are made up."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("verl", reason="verl's environment: make verl-test")

import torch
import verl
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from rollalloc.core.events import Batch, Row
from rollalloc.drivers.verl import trainer
from rollalloc.drivers.verl.client import Client, ResumingClient
from rollalloc.drivers.verl.configure import configure
from rollalloc.drivers.verl.loader import Prompts, fill_samples
from rollalloc.drivers.verl.modes import MODES
from rollalloc.drivers.verl.rounds import Submission, TrainingRows
from rollalloc.drivers.verl.settings import read_settings
from rollalloc.drivers.verl.trainer import RollallocTrainer
from rollalloc.models.weights import Diverged
from rollalloc.rules.intake import Ahead, Fill

pytestmark = pytest.mark.verl


def test_the_servers_that_serve_are_asked_for_a_client_that_resumes_where_requests_are_broken_off():
    asked = {}
    for mode, manager in {
        "rollalloc": "llm_server_manager",
        "rollalloc_colocate_async": "llm_server_manager",
        "rollalloc_separate_async": "standalone_server_manager",
    }.items():
        made = get_trainer_cls(mode).__new__(get_trainer_cls(mode))
        setattr(made, manager, SimpleNamespace(get_client=lambda client_cls: client_cls))
        asked[mode] = made.get_llm_client()
    assert list(asked.values()) == [Client, ResumingClient, ResumingClient]


def test_a_column_of_a_reserved_name_ends_the_run_when_the_trainer_is_made():
    config = OmegaConf.create({"train_batch_size": 1, "shuffle": False})
    rows = [{"raw_prompt": "a", "index": 0, "extra_info": {"index": 0}}]
    assert len(Prompts(config, rows)) == 1
    with pytest.raises(ValueError, match=r"data\.train_files has columns .* uid \(set for each prompt"):
        Prompts(config, [rows[0] | {"uid": "mine"}])
    with pytest.raises(ValueError, match=r"extra_info\.num_turns"):
        Prompts(config, [rows[0] | {"extra_info": {"num_turns": 3}}])


class Shown:
    """A data set of a custom class, which shows its rows only one by one."""

    def __init__(self, loops, **more):
        self.loops = loops
        vars(self).update(more)

    def __len__(self):
        return len(self.loops)

    def __getitem__(self, at):
        loop = {} if self.loops[at] is None else {"agent_name": self.loops[at]}
        return {"raw_prompt": [{"role": "user", "content": "?"}], "dummy_tensor": torch.zeros(1)} | loop


@pytest.mark.parametrize("limited", [True, False])
def test_a_row_with_a_loop_of_several_turns_is_refused_by_name_when_it_is_drawn_under_a_limit(limited):
    """Its first row does not show it, so that it is seen when the first such row is drawn."""
    config = OmegaConf.create({"prompt_key": "prompt", "train_batch_size": 1, "shuffle": False})
    prompts = Prompts(config, Shown(["single_turn_agent", "tool_agent"]), limited=limited)
    first, second = (Submission(f"g{at}s0r{at}", at, (at,), None) for at in range(2))
    assert len(prompts.rows([first], 0)) == 1
    refused = pytest.raises(
        ValueError, match=r"agent_name of data\.train_files must be single_turn_agent .* got tool_agent"
    )
    with refused if limited else nullcontext():
        prompts.rows([second], 0)
    assert len(Prompts(config, Shown([None]), limited=limited).rows([first], 0)) == 1


def test_a_column_of_loops_of_several_turns_is_refused_under_a_limit_before_anything_is_drawn():
    import datasets

    config = OmegaConf.create({"prompt_key": "prompt", "train_batch_size": 1, "shuffle": False})
    frame = datasets.Dataset.from_dict({"prompt": ["a", "b"], "agent_name": ["single_turn_agent", "tool_agent"]})
    rows = Shown(frame["agent_name"][:], dataframe=frame)
    assert len(Prompts(config, rows)) == 2
    with pytest.raises(ValueError, match="must be single_turn_agent in every row, got tool_agent"):
        Prompts(config, rows, limited=True)


def test_an_update_that_is_not_finite_ends_the_run_before_verl_saves(monkeypatch, tmp_path):
    def update(trainer, batch, metrics):
        metrics |= {"actor/loss": 0.0, "actor/grad_norm": float("nan")}
        return batch

    monkeypatch.setattr(PPOTrainer, "_update_actor", update)
    made = RollallocTrainer.__new__(RollallocTrainer)
    actor = {"ppo_mini_batch_size": 4, "fsdp_config": {"dtype": "bfloat16"}}
    made.config = OmegaConf.create(
        {
            "data": {"train_batch_size": 4},
            "actor_rollout_ref": {"actor": actor, "rollout": {"n": 1}},
            "trainer": {"default_local_dir": str(tmp_path)},
        }
    )
    row = Row(rollout=0, prompt=3, group=0, advantage=1.0, weight=1.0, version=0)
    made._trained, made.global_steps = TrainingRows(Batch((row,) * 4, 0), tuple("abcd"), (row,) * 4), 1
    with pytest.raises(Diverged, match=r"actor/grad_norm is nan in optimizer step 1: .* with the prompts row 3\. "):
        made._update_actor(SimpleNamespace(keys=list("abcd")), {})


@pytest.mark.parametrize(("share", "replays"), [(0.5, 0), (0.7, 2)])
def test_the_gate_is_told_the_share_of_the_replayed_rows_own_tokens_and_metrics_are_of_what_is_trained(
    make_rounds, monkeypatch, share, replays
):
    """Of each replayed row's four tokens, one is a tool's and two of the others have moved: two thirds."""
    section = {"recipe": "reinforce", "replay": 2, "replay_moved": share, "replay_pause": 0}
    made = RollallocTrainer.__new__(RollallocTrainer)
    made.settings, made.global_steps = read_settings(section, 2, 2), 1
    rounds = made.rounds = make_rounds(section, groups=2, n=2)
    made._trained = rounds.next_batch()
    fresh: dict[str, float] = {}
    made._admit(fresh)
    assert fresh["rollalloc/left_out"] == 0
    assert "rollalloc/moved" not in fresh
    rounds.trained(1)
    rounds.crew.rows -= set(made._trained.keys)
    made._trained = rounds.next_batch()
    replayed = [key for key, row in zip(made._trained.keys, made._trained.rows, strict=True) if row.replays]

    def get(keys, partition_id, select_fields):
        assert keys == replayed
        values = {
            "old_log_probs": [-1.0, -1.3, -0.7, -9.0],
            "rollout_log_probs": [-1.1, -1.0, -1.0, -1.0],
            "response_mask": [1, 1, 1, 0],
        }
        return {name: torch.nested.as_nested_tensor([torch.tensor(values[name])] * len(keys)) for name in select_fields}

    monkeypatch.setattr(trainer.tq, "kv_batch_get", get)
    metrics = rounds.metrics(made._trained.batch)
    assert metrics["rollalloc/off_policy_rows"] == 2
    made._admit(metrics)
    assert metrics["rollalloc/moved"] == pytest.approx(2 / 3)
    assert (metrics["rollalloc/rows"], metrics["rollalloc/left_out"]) == (4 + replays, 2 - replays)
    assert metrics["rollalloc/replayed"] == metrics["rollalloc/off_policy_rows"] == replays
    factors = made._trained.factors(own=True, within_group=False)
    assert [factors[key] != 0 for key in replayed] == [replays > 0] * 2


@pytest.mark.parametrize("notices", [True, False])
def test_a_gate_that_leaves_everything_out_says_so_after_eight_batches(make_rounds, monkeypatch, caplog, notices):
    section = {"recipe": "reinforce", "replay": 2, "replay_moved": 0, "replay_pause": 0, "notices": notices}
    made = RollallocTrainer.__new__(RollallocTrainer)
    made.settings, made.global_steps = read_settings(section, 2, 2), 0
    rounds = made.rounds = make_rounds(section, groups=2, n=2)
    values = {"old_log_probs": [-1.0], "rollout_log_probs": [-9.0], "response_mask": [1]}

    def get(keys, partition_id, select_fields):
        return {name: torch.nested.as_nested_tensor([torch.tensor(values[name])] * len(keys)) for name in select_fields}

    monkeypatch.setattr(trainer.tq, "kv_batch_get", get)
    for step in range(1, 11):
        made.global_steps, made._trained = step, rounds.next_batch()
        made._admit({})
        rounds.crew.rows -= set(made._trained.keys)
        rounds.trained(step)
    said = [message.split(" that had")[0] for message in caplog.messages if "replay gives nothing" in message]
    assert said == ["step 9: replay gives nothing: in each of the last 8 batches"] * notices


# ----------------------------------------------------------------------------------------------------- the configuration


@pytest.fixture(scope="module")
def verls_config():
    """verl's own, composed as its command does."""
    from hydra import compose, initialize_config_dir

    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        sizes = ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
        return compose("ppo_trainer", [*sizes, "actor_rollout_ref.rollout.name=vllm"])


def config_of(verls_config, mode, changes):
    config = verls_config.copy()
    OmegaConf.set_struct(config, False)
    config.trainer.v1.trainer_mode = mode
    config.trainer.v1.rollalloc = {"recipe": "grpo"}
    for key, value in changes.items():
        OmegaConf.update(config, key, value)
    return config


SEPARATE = {
    "actor_rollout_ref.rollout.checkpoint_engine.backend": "nccl",
    "actor_rollout_ref.rollout.nnodes": 1,
    "actor_rollout_ref.rollout.n_gpus_per_node": 1,
    "trainer.v1.separate_async.parameter_sync_step": 2,
}


def test_verls_keys_of_an_asynchronous_mode_become_the_recipes(verls_config):
    assert configure(config_of(verls_config, "rollalloc", {})).recipe.intake == Fill()
    for mode, changes in {"rollalloc_colocate_async": {}, "rollalloc_separate_async": SEPARATE}.items():
        config = config_of(verls_config, mode, changes)
        recipe = configure(config).recipe
        assert (recipe.max_staleness, recipe.intake) == (7, Ahead(Fill(), 8))
        assert config.actor_rollout_ref.rollout.calculate_log_probs
        assert config.algorithm.rollout_correction.rollout_is == "token"
        assert configure(config).recipe == recipe
        verls = f"trainer.v1.{MODES[mode]}.num_warmup_batches"
        changed = changes | {verls: 0.5, "trainer.v1.sampler.max_off_policy_threshold": 3}
        recipe = configure(config_of(verls_config, mode, changed)).recipe
        assert (recipe.max_staleness, recipe.intake) == (2, Ahead(Fill(), 4))


GATED_SECTION = {"recipe": "reinforce", "replay": 4, "replay_moved": 0.1}
GATED = {"trainer.v1.rollalloc": GATED_SECTION}
STOPS = {
    "trainer.v1.rollalloc": {"recipe": "darts", "shortest": 3, "longest": 1, "tail": "sampled"},
    "algorithm.adv_estimator": "grpo",
}


@pytest.mark.parametrize(
    ("mode", "changes", "says"),
    [
        ("rollalloc", GATED | {"algorithm.rollout_correction": {"bypass_mode": True}}, "replay_moved compares"),
        (
            "rollalloc",
            {"trainer.v1.rollalloc": GATED_SECTION | {"rollout_correction": False}},
            "leave replay_moved out",
        ),
        ("rollalloc_async", {}, r"must be one of rollalloc, rollalloc_colocate_async, rollalloc_separate_async"),
        ("rollalloc_colocate_async", {"trainer.v1.sampler.max_off_policy_threshold": 1}, "at least 2"),
        ("rollalloc_colocate_async", {"trainer.v1.sampler.max_off_policy_threshold": None}, "at least 2"),
        (
            "rollalloc_colocate_async",
            {"trainer.v1.sampler.max_off_policy_strategy": "wait", "trainer.v1.sampler.max_off_policy_threshold": 2},
            r"wait with 1 batches generated ahead needs max_staleness of at least 2, got 1; set .*threshold to at least 3 ",
        ),
        (
            "rollalloc_colocate_async",
            {"trainer.v1.sampler.max_off_policy_strategy": "block"},
            "must be drop or wait, got 'block'",
        ),
        (
            "rollalloc_separate_async",
            SEPARATE | {"actor_rollout_ref.rollout.checkpoint_engine.backend": "naive"},
            r"backend=naive .* set it to nccl, .* or use trainer_mode=rollalloc_colocate_async",
        ),
        ("rollalloc_separate_async", SEPARATE | {"actor_rollout_ref.rollout.nnodes": 0}, "its own devices: set"),
        (
            "rollalloc_separate_async",
            SEPARATE | {"trainer.v1.separate_async.parameter_sync_step": 4},
            r"parameter_sync_step must be .* = 2, got 4",
        ),
        (
            "rollalloc_separate_async",
            SEPARATE | {"trainer.v1.separate_async.hybrid_rollout.enable_switch": True},
            "enable_switch=True .* set it to False",
        ),
        (
            "rollalloc_separate_async",
            SEPARATE
            | {
                "trainer.v1.sampler.max_off_policy_strategy": "wait",
                "trainer.v1.separate_async.num_warmup_batches": 7,
            },
            "wait with 7 batches generated ahead needs .*threshold to at least 9 ",
        ),
        ("rollalloc", {"trainer.use_v1": False}, "use_v1=False selects .* set it to True"),
        (
            "rollalloc",
            STOPS | {"actor_rollout_ref.rollout.name": "trtllm"},
            "must be one of vllm, sglang, got trtllm; .* or choose a recipe that does not stop rollouts",
        ),
        (
            "rollalloc",
            {"trainer.v1.rollalloc.limit_at": 0.8, "actor_rollout_ref.rollout.name": "trtllm"},
            r"at a length \(limit_at\), so rollout.name must be one of vllm, sglang, got trtllm",
        ),
        (
            "rollalloc",
            STOPS | {"actor_rollout_ref.rollout.disaggregation.enabled": True},
            "to another server.*; disable it, or choose a recipe that does not stop rollouts",
        ),
    ],
)
def test_a_setting_that_a_mode_excludes_is_refused_by_name(mode, changes, says, verls_config):
    with pytest.raises(ValueError, match=says):
        configure(config_of(verls_config, mode, changes))


@pytest.mark.parametrize(("enable", "limit_at"), [(True, 0.8), (False, 0.8), (True, None)])
def test_an_overlong_penalty_that_a_limit_makes_idle_is_said(enable, limit_at, verls_config, caplog):
    penalty = {"reward.reward_kwargs.overlong_buffer_cfg.enable": enable, "trainer.v1.rollalloc.limit_at": limit_at}
    configure(config_of(verls_config, "rollalloc", penalty))
    assert ("under a lower limit, the penalty does nothing" in caplog.text) is (enable and limit_at is not None)


@pytest.mark.parametrize("mode", ["rollalloc", "rollalloc_colocate_async"])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_every_engine_serves_a_recipe_that_stops_nothing(mode, engine, verls_config):
    assert not configure(config_of(verls_config, mode, {"actor_rollout_ref.rollout.name": engine})).recipe.stopping
    if engine != "trtllm":
        assert configure(
            config_of(verls_config, mode, STOPS | {"actor_rollout_ref.rollout.name": engine})
        ).recipe.stopping


def test_validation_files_without_a_number_of_samples_get_verls(tmp_path):
    import datasets

    frame = datasets.concatenate_datasets(
        [
            datasets.Dataset.from_list([{"prompt": "a", "__rollout_n__": 32}]),
            datasets.Dataset.from_list([{"prompt": "b"}]),
        ]
    )
    dataset, plain = SimpleNamespace(dataframe=frame), SimpleNamespace(dataframe=frame.select_columns(["prompt"]))
    fill_samples(dataset, 4)
    assert dataset.dataframe["__rollout_n__"][:] == [32, 4]
    fill_samples(plain, 4)
    assert plain.dataframe.column_names == ["prompt"]
    fill_samples(SimpleNamespace(), 4)  # a class of one's own
