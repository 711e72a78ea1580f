"""`python -m rollalloc.drivers.verl.check`: what verl and the driver would refuse in a command of verl, before it runs."""

import json
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("verl", reason="verl's environment: make verl-test")

from rollalloc.data._files import write_rows
from rollalloc.drivers.verl.check import checked, composed, main
from rollalloc.drivers.verl.plugin import check_early

pytestmark = pytest.mark.verl
# Overrides of verl's own keys as a user types them; the last two leave out what this machine lacks.
STOCK = ["algorithm.adv_estimator=grpo", "data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=32"]
STOCK += ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.n=8"]
STOCK += ["actor_rollout_ref.actor.use_dynamic_bsz=True", "--no-files", "--no-packages"]
OURS = [*STOCK, "trainer.v1.trainer_mode=rollalloc", "+trainer.v1.rollalloc.recipe=pods", "+trainer.v1.rollalloc.m=4"]


def test_a_command_of_verl_is_taken_as_it_would_be_typed(capsys):
    assert main(["python", "-m", "verl.trainer.main_ppo", *STOCK]) == 0
    out = capsys.readouterr().out
    assert "mode sync: 64 groups per batch, 8 rows each, 2 optimizer steps per batch" in out
    assert "stock verl, 8 rollouts per prompt" in out
    assert "rollouts of a step, if one round of prompts fills the batch: 512 = 64 × 8 (rollouts)" in out


def test_the_check_prints_the_recipe_and_its_optimizer_steps(capsys):
    """64 prompts in mini-batches of 24 are two steps, not 2.67."""
    assert main([*OURS, "actor_rollout_ref.actor.ppo_mini_batch_size=24"]) == 0
    out = capsys.readouterr().out
    assert "4 rows each, 2 optimizer steps per batch" in out
    assert "rows=MaxVariance(m=4)" in out


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ([], ["144 = 48 × 2 (pilot) + 16 × 3 (commit)", "without a recipe generates 80 = 16 × 5", "1.8 times as many"]),
        (
            [
                "+trainer.v1.rollalloc.n_pilot=16",
                "+trainer.v1.rollalloc.n_commit=48",
                "+trainer.v1.rollalloc.gen_groups=6",
            ],
            [
                "if 3 rounds of prompts fill the batch: 1,056 = 18 × 16 (pilot) + 16 × 48 (commit)",
                "13.2 times as many",
                "gen_groups=6 is below the 16 prompts of a batch, so that a batch needs at least 3 rounds; by default",
            ],
        ),
    ],
)
def test_a_step_costs_what_it_costs_against_the_command_as_it_was(shapes, says, capsys):
    """By default the shapes follow the command's own: a group of Pilot-Commit has `rollout.n` rollouts."""
    command = [*STOCK, "trainer.v1.trainer_mode=rollalloc", "+trainer.v1.rollalloc.recipe=pilot_commit", *shapes]
    command += ["data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    assert main([*command, "actor_rollout_ref.rollout.n=5"]) == 0
    out = capsys.readouterr().out
    assert [line for line in says if line not in out] == []


def test_the_cost_of_a_step_is_printed_before_ray_starts(capsys):
    """verl's own entry point validates its configuration first; this driver's plug-in adds to that."""
    module = SimpleNamespace(validate_config=lambda config, *_: sys.stdout.write("validated\n"))
    check_early(module)
    words = ["trainer.v1.trainer_mode=rollalloc", "+trainer.v1.rollalloc.recipe=dapo"]
    module.validate_config(composed([*STOCK, *words]), False, False)
    first, second, third, last = capsys.readouterr().out.splitlines()
    assert first == (
        "rollalloc: rollouts of a step, if one round of prompts fills the batch: 1,536 = 192 × 8 (rollout)"
    )
    assert "without a recipe generates 512 = 64 × 8" in second
    assert third.startswith(
        "rollalloc: it tries 192 prompts for a batch of 64, so that an epoch of verl goes through the"
    )
    assert last == "validated"


# Exit code 2: these are no overrides of verl's configuration; 1: a configuration that is refused.
@pytest.mark.parametrize(
    ("wrong", "code", "says"),
    [
        (["data.train_batch_sise=3"], 2, "train_batch_sise"),
        (["--config-name", "none"], 2, "none"),
        (["not an override"], 2, "not an override"),
        (["a\x1b[31m=3"], 2, "a␛[31m=3"),
        (["trainer.v1=3"], 1, "refused: AttributeError: 'int' object has no"),
        (["trainer.v1.rollalloc=7"], 1, "trainer.v1.rollalloc must be a section"),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=0"], 1, "ppo_mini_batch_size must be a whole number of at"),
        (["trainer.nnodes=null"], 1, "trainer.nnodes must be a whole number of at least 1, got None"),
        (["trainer.n_gpus_per_node=0"], 1, "trainer.n_gpus_per_node must be a whole number of at least 1, got 0"),
        (["+trainer.v1.rollalloc.n_comit=4"], 1, "n_comit"),
        (["algorithm.filter_groups.enable=True"], 1, "filter_groups"),
        (["data.gen_batch_size=384"], 1, "data.gen_batch_size=384 has no effect under a recipe"),
        (
            ["+reward.custom_reward_function.reward_kwargs={solution_str: a, bonus: 1}"],
            1,
            "reward_kwargs must not set solution_str: verl passes the sample in these",
        ),
        (
            ["actor_rollout_ref.rollout.val_kwargs.do_sample=True", "actor_rollout_ref.rollout.temperature=0"],
            1,
            "temperature should be greater than 0",  # verl's own words
        ),
        (["trainer.v1.trainer_mode=sync"], 1, "trainer.v1.rollalloc is set, but nothing reads it"),
    ],
)
def test_the_check_names_what_is_wrong_and_fails(wrong, code, says, capsys):
    assert main([*OURS, *wrong]) == code
    shown = capsys.readouterr()
    assert says in shown.err
    assert not shown.out


@pytest.mark.parametrize("command", [STOCK, OURS], ids=["stock", "ours"])
def test_keys_that_verls_trainers_no_longer_read_are_refused_with_the_keys_to_use(command, capsys):
    """They compose, because verl keeps them for its older trainer: Pilot-Commit's own scripts set both."""
    old = ["reward_model.reward_manager=dapo", "custom_reward_function.path=reward.py"]
    assert main([*command, *old]) == 1
    error = capsys.readouterr().err
    assert "reward_model.reward_manager=dapo: use reward.reward_manager.name" in error
    assert "custom_reward_function.path=reward.py: use reward.custom_reward_function.path" in error


ROLLOUT = "actor_rollout_ref.rollout"
STEP = f"{ROLLOUT}.max_num_batched_tokens"


@pytest.mark.parametrize("command", [STOCK, OURS], ids=["stock", "ours"])
@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ([f"{STEP}=256", f"{ROLLOUT}.max_num_seqs=256"], None),
        ([f"{STEP}=255", f"{ROLLOUT}.max_num_seqs=256"], "must be at least max_num_seqs, got 255 and 256"),
        ([f"{STEP}=512", f"+{ROLLOUT}.engine_kwargs.vllm.max_num_seqs=1024"], "must be at least max_num_seqs, got 512"),
        ([f"{ROLLOUT}.enable_chunked_prefill=False", f"{ROLLOUT}.max_model_len=16384"], None),  # verl raises the tokens
        ([f"{ROLLOUT}.enable_chunked_prefill=False", f"{STEP}=128"], None),
        (
            [
                f"{ROLLOUT}.enable_chunked_prefill=False",
                f"{ROLLOUT}.max_model_len=2048",
                f"+{ROLLOUT}.engine_kwargs.vllm.max_num_batched_tokens=1024",
            ],
            "must be at least max_model_len without chunked prefill, got 1024 and 2048",
        ),
    ],
)
def test_limits_that_vllm_refuses_are_refused_before_it_starts(command, limits, says, capsys):
    assert main([*command, *limits]) == (1 if says else 0)
    assert (says or "") in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------------- files

ROW = {
    "data_source": "sums",
    "prompt": [{"role": "user", "content": "1 + 1 ="}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 0},
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with data and a reward, and the overrides that name them by relative paths."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.parquet", "test.parquet"):
        write_rows(tmp_path / name, [ROW])
    (tmp_path / "my_reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info): ...\n"
    )
    command = [word for word in OURS if word != "--no-files"]
    command += ["data.train_files=train.parquet", "data.val_files=[test.parquet]"]
    return [*command, "reward.custom_reward_function.path=my_reward.py"]


def test_files_that_are_there_are_accepted_and_named_from_where_the_command_is_given(files, tmp_path, capsys):
    """Ray's processes have another working directory on another node."""
    assert main(files) == 0
    assert capsys.readouterr().err == ""
    config = composed([*files, "trainer.default_local_dir=out", "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B"])
    checked(config)
    assert config.data.train_files == str(tmp_path / "train.parquet")
    assert list(config.data.val_files) == [str(tmp_path / "test.parquet")]
    assert config.reward.custom_reward_function.path == str(tmp_path / "my_reward.py")
    assert config.trainer.default_local_dir == str(tmp_path / "out")
    assert config.actor_rollout_ref.model.path == "Qwen/Qwen2.5-0.5B"  # on the hub: there is no such folder


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.train_files=none.parquet", "data.train_files: there is no file none.parquet (relative paths start at "),
        ("data.val_files=[test.parquet, gone.parquet]", "data.val_files: there is no file gone.parquet"),
        ("data.train_files=my_reward.py", "verl reads .parquet, .json and .jsonl files, not "),
        (
            "data.prompt_key=question",
            "has no column 'question'; its columns are data_source, prompt, reward_model, extra_info",
        ),
        ("reward.custom_reward_function.path=none.py", "path=none.py: there is no such file"),
        ("reward.custom_reward_function.path=pkg://not_there.reward", "there is no such module in this environment"),
        (
            "reward.custom_reward_function.name=score",
            "it does not define score; it defines compute_score; set reward.custom",
        ),
    ],
)
def test_a_file_that_is_missing_or_wrong_is_refused_and_the_plan_of_a_step_is_printed_all_the_same(
    files, override, says, capsys
):
    assert main([*files, override]) == 1
    shown = capsys.readouterr()
    assert f"refused: {says}" in shown.err or says in shown.err
    assert "4 rows each" in shown.out
    assert main([*files, override, "--no-files"]) == 0


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("bare.jsonl", '{"prompt": "a"}', "has no column 'data_source'; its columns are prompt"),
        ("list.jsonl", "[1]", "the first line must be a JSON object, got list"),
        ("empty.jsonl", "", "the first line must be a JSON object"),
        ("broken.parquet", "PAR1", "cannot be read as parquet"),
        ("flat.jsonl", json.dumps(ROW | {"reward_model": "2"}), "reward_model of", ),
        ("taken.jsonl", json.dumps(ROW | {"responses": ["2"]}), "responses (where verl stores what was generated"),
        ("\x1b[31m.jsonl", "", "␛[31m.jsonl"),
    ],
)  # fmt: skip
def test_data_that_verl_could_not_read_are_refused(files, name, content, says, capsys, tmp_path):
    (tmp_path / name).write_text(content)
    assert main([*files, f"data.train_files='{name}'"]) == 1
    assert says in capsys.readouterr().err


def test_a_reward_that_is_no_python_is_refused(files, tmp_path, capsys):
    (tmp_path / "my_reward.py").write_text("def compute_score(:\n")
    assert main(files) == 1
    assert "my_reward.py: invalid syntax" in capsys.readouterr().err


def test_rollouts_of_a_validation_prompt_are_verls_own_column(files, tmp_path):
    """verl reads `__rollout_n__` of a validation set; in training the driver itself puts a column of this name there."""
    write_rows(tmp_path / "test.parquet", [ROW | {"__rollout_n__": 4}])
    assert main(files) == 0
    write_rows(tmp_path / "train.parquet", [ROW | {"__rollout_n__": 4}])
    assert main(files) == 1
