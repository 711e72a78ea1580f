"""The command line: what a user trains and compares, and that a mistake is one message and exit code 2."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

import rollalloc
from rollalloc.cli.compare import cost_table
from rollalloc.cli.options import RunOptions, parameters_of
from rollalloc.cli.sources import end_said, run_of
from rollalloc.compare.summary import LAST, Interval, RecipeSummary, Summary
from rollalloc.data.prompts import write_prompts
from rollalloc.models.policy import Policy
from rollalloc.models.settings import Clip, Lora, Loss, Sampling
from rollalloc.runs.reader import read_metrics
from rollalloc.tasks import presets
from rollalloc.train.config import Config, Schedule, read_config

OWN = ("--model", "model", "--prompts", "prompts.parquet", "--reward", "my_reward.py:score")
SHORT = ("--max-new-tokens", 4, "--max-rollouts", 32, "--device", "cpu")
GRPO = ("--recipe", "grpo", "--set", "groups=4", "--set", "n=4")


# train


def test_train_runs_on_ones_own_model_prompts_and_reward(call, own, tmp_path):
    file, out = "prompts.parquet", tmp_path / "run"
    arguments = ("--model", own / "model", "--prompts", own / file, "--reward", "my_reward.py:score")
    code, output = call("train", *arguments, *SHORT, *GRPO, "--heldout", "heldout.jsonl", "--out", out)
    assert code == 0, output
    metrics = read_metrics(out / "metrics.jsonl")
    assert metrics[-1]["kind"] == "end"
    assert metrics[-1]["rollouts_paid"] == 32
    evaluations = [line for line in metrics if line["kind"] == "eval"]
    assert all(line["accuracy"] is not None for line in evaluations)
    assert [line["at"] for line in evaluations] == [*range(0, 33, 3), None]  # a grid of a tenth of the budget
    assert metrics[-1]["unscored"] == {}
    assert Policy.load(out / "model", device="cpu").eos_ids == (1,)
    assert "finished: the budget of 32 rollouts is spent" in output
    assert "model and metrics are in" in output


def test_held_out_prompts_that_are_trained_on_are_said_and_many_are_refused(call, own, tmp_path, caplog):
    rows = [json.loads(line) for line in (own / "heldout.jsonl").read_text().splitlines()]
    trained_on = json.loads((own / "prompts.jsonl").read_text().partition("\n")[0])
    trained_on["prompt"] = [{"role": "user", "content": f"  {trained_on['prompt']} "}]  # the same text all the same
    few = [row | {"data_source": source} for source in "abc" for row in rows]
    for name, others in (("many", rows), ("few", few)):
        write_prompts(own / f"{name}.jsonl", [trained_on, *others])
    command = ("train", *OWN, *SHORT, *GRPO, "--reward-workers", 0, "--eval-every", 32)
    code, output = call(*command, "--heldout", "many.jsonl", "--out", tmp_path / "refused")
    assert code == 2
    assert "1 of 13 held-out prompts (8%) are in the training set too, the first 'mine/#" in output
    assert "More than 5% are refused; remove them from one of the files, or accept them with --accept-overlap" in output
    for name, accepted, says in (("many", ["--accept-overlap"], "1 of 13"), ("few", [], "1 of 37")):
        assert call(*command, "--heldout", f"{name}.jsonl", *accepted, "--out", tmp_path / name)[0] == 0
        assert f"{says} held-out prompts" in caplog.text
    code, output = call(*command, "--accept-overlap", "--out", tmp_path / "useless")
    assert "--accept-overlap: it has no effect without held-out prompts" in output


def test_training_prompts_that_repeat_another_are_said(call, own, tmp_path, caplog):
    rows = [json.loads(line) for line in (own / "prompts.jsonl").read_text().splitlines()]
    again = rows[0] | {"prompt": f" {rows[0]['prompt']}", "reward_model": {"ground_truth": "s5"}}
    write_prompts(own / "again.jsonl", [*rows, again])
    options = [{"prompts.parquet": "again.jsonl"}.get(value, value) for value in OWN]
    code, output = call("train", *options, *SHORT, "--reward-workers", 0, "--out", tmp_path / "run")
    assert code == 0, output
    assert "reinforce {'groups': 25, 'n': 1}, learning rate 1e-06, at most 32 rollouts" in output
    assert "1 of 25 training prompts repeat the text of another prompt" in caplog.text
    assert "1 of the repeated prompts have a different ground truth" in caplog.text


def test_adapters_are_trained_resumed_and_saved_from_the_command_line(call, own, tmp_path):
    lora = ("--lora", 4, "--lora-alpha", 2, "--lora-target", "q_proj", "--lora-target", "up_proj")
    less = ("--sampling-dtype", "bfloat16", "--gradient-checkpointing", "--learning-rate", 1e-2)
    command = ("train", *OWN, *SHORT[:2], *SHORT[4:], *GRPO, *less, "--out", tmp_path / "run")
    code, output = call(*command, *lora, "--max-rollouts", 16)
    assert code == 0, output
    assert read_config(tmp_path / "run").lora == Lora(4, 2.0, ("q_proj", "up_proj"))
    assert call(*command, "--max-rollouts", 32, "--accept-recipe", "--resume")[0] == 2
    code, output = call(*command, *lora, "--max-rollouts", 32, "--accept-recipe", "--resume")
    assert code == 0, output
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert (last["rollouts_paid"], last["optimizer_steps"]) == (32, 2)
    plain = Policy.load(tmp_path / "run" / "model", device="cpu").model
    before = dict(Policy.load(own / "model", device="cpu").model.named_parameters())
    changed = {name for name, weight in plain.named_parameters() if not weight.equal(before[name])}
    assert changed == {
        f"model.layers.{layer}.{name}.weight" for layer in range(2) for name in ("self_attn.q_proj", "mlp.up_proj")
    }
    assert (tmp_path / "run" / "model" / "adapter" / "adapter_model.safetensors").is_file()
    code, output = call("train", "--model", tmp_path / "run/model/adapter", *OWN[2:], *GRPO, "--out", tmp_path / "b")
    assert "holds adapters of PEFT, not a model" in output
    code, output = call(*command, "--max-rollouts", 16, "--overwrite")
    assert code == 0, output
    assert not (tmp_path / "run" / "model" / "adapter").exists()


def test_a_console_script_finds_modules_where_it_is_called(script, own, tmp_path):
    """`--reward module:function` names a file beside the prompts; a script's own search path does not hold it."""
    arguments = ("train", *OWN[:-1], "my_reward:score", *SHORT, *GRPO, "--seed", 3, "--out", tmp_path)
    done = script(*arguments)
    assert done.returncode == 0, done.stderr
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["unscored"] == {}
    assert json.loads((tmp_path / "run.json").read_text())["seed"] == 3


def test_reasons_are_shown_as_they_are(call, own, tmp_path):
    """An exception may quote what looks like a terminal's markup."""
    (own / "quoting.py").write_text("def score(**_):\n    raise ValueError('no [/INST] in [bold]')\n")
    code, output = call("train", *OWN[:-1], "quoting.py:score", "--reward-workers", 0, *SHORT, *GRPO, "--out", tmp_path)
    assert code == 2, output
    assert "unscored: ValueError: no [/INST] in [bold]" in output
    assert "mostly because: ValueError: no [/INST] in [bold]." in output
    assert "Traceback" not in output
    assert not (tmp_path / "model").exists()


def test_drop_overlong_leaves_out_what_does_not_fit(call, own, tmp_path):
    arguments = ("train", *OWN[:3], "long.jsonl", *OWN[4:], *SHORT, *GRPO, "--out", tmp_path / "out")
    code, output = call(*arguments)
    assert code == 2
    assert "1 of 6 prompts have more than 60 tokens (context 64 - max_new_tokens 4), for example 'mine/" in output
    assert "; the longest has 71" in output
    code, output = call(*arguments, "--drop-overlong", "--reward-workers", 0)
    assert code == 0, output


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*OWN, "--recipe", "grop"), "unknown recipe 'grop' (did you mean 'grpo'?)"),
        ((*OWN, "--recipe", "grpo", "--set", "group=3"), "grpo has no parameter 'group' (did you mean 'groups'?)"),
        ((*OWN, "--set", "groups"), "expected key=value, got 'groups'"),
        ((*OWN, "--recipe", "no_such_module:mine"), "No module named 'no_such_module'"),
        (("--model", "model"), "--model needs --prompts and --reward as well"),
        ((), "give either --task (skills/balanced"),
        (("--task", "skills", "--model", "model"), "give either --task"),
        (("--task", "chess"), "unknown task 'chess'"),
        (
            ("--task", "sort", "--prompts", "x", "--temperature", "0.5"),
            "--prompts, --temperature: the task sets this itself",
        ),
        (
            (*OWN, "--target", "0.5", "--single-answer"),
            "--target, --single-answer: it has no effect without held-out",
        ),
        ((*OWN[:3], "none.parquet", *OWN[4:]), "none.parquet"),
        ((*OWN[:-1], "none.py:score"), "none.py: no such file"),
        ((*OWN[:-1], "my_reward.py:scor"), "my_reward.py has no 'scor'; did you mean score?"),
        ((*OWN[:-1], "my_reward.py"), "reward must be 'package.module:function' or 'file.py:function'"),
        ((*OWN[:-1], "broken.py:score"), "cannot be loaded, since its module raises SyntaxError"),
        ((*OWN, "--max-new-tokens", "0"), "max_new_tokens must be at least 1, got 0"),
        ((*OWN, "--learning-rate", "inf"), "learning_rate must be above 0 and finite, got inf"),
        ((*OWN, "--aggregation", "mean"), "aggregation must be one of token_mean, sequence_mean, dr_grpo, got 'mean'"),
        ((*OWN, "--dual-clip", "1"), "--dual-clip: expected dual above 1"),
        ((*OWN, "--schedule", "constant", "--schedule-steps", "9"), "--schedule, --warmup-steps, --schedule-steps: "),
        ((*OWN, "--lora", "65"), "is larger than 64, the smaller side of"),
        ((*OWN, "--lora-alpha", "8"), "--lora-alpha: only for adapters; give --lora RANK as well"),
        (("--task", "sort", "--lora", "4"), "--lora: the task sets this itself"),
        ((*OWN, "--engine", "sync", "--no-overlap"), "--no-overlap: only the asynchronous engine uses it"),
        ((*OWN, "--engine", "sync", "--ahead", 2), "--ahead: only the asynchronous engine uses it"),
        ((*OWN, "--engine", "sync", "--generator-limit", 30), "--generator-limit: only the asynchronous engine"),
        ((*OWN, "--engine", "async", "--ahead", 0), "ahead must be a whole number of at least 1"),
        ((*OWN, "--engine", "async", "--ahead", 3, "--staleness", 2), "ahead=3: a batch would be"),
        ((*OWN, "--engine", "async", "--sampling-dtype", "bfloat16"), "asynchronous engine samples in float32"),
        ((*OWN, "--engine", "async", "--generator-limit", 0.1), "generator_limit_s must be at least 1"),
        ((*OWN, "--engine", "async", "--kv-tokens", 4), "kv_tokens must hold at least one rollout"),
        ((*OWN, "--features", "none"), "does not use them"),
        ((*OWN, "--track", "mlflow"), "unknown tracker mlflow; there are tensorboard, wandb"),
        (("--model", "./none", *OWN[2:]), "there is no such folder; give a model's folder"),
        (("--model", "", *OWN[2:]), "--model: expected a model's name or folder"),
        ((*OWN, "--recipe", "grpo", "--set", "groups=25"), "25 groups per batch but there are only 24 prompts"),
        ((*OWN, "--device", "cuda:99"), "device 'cuda:99' cannot be used here"),
        ((*OWN, "--resume", "--overwrite"), "--resume continues a run and --overwrite replaces it"),
        ((*OWN, "--recipe", "racing", "--set", "sizes_S=4"), "racing: sizes_S must be a list of whole numbers, e.g."),
        (
            (*OWN, "--recipe", "grpo", "--set", "n=99999999999"),
            "max_rollouts is too small for even one group (the budget of 4,096",
        ),
        (
            (*OWN, "--recipe", "foresight", "--features", "prompts.parquet"),
            "is no file that `rollalloc features` wrote",
        ),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(call, own, tmp_path, arguments, message):
    (own / "broken.py").write_text("def score(:\n")
    given = arguments if "--max-new-tokens" in arguments or "--task" in arguments else (*arguments, *SHORT[:2])
    code, output = call("train", *given, "--out", tmp_path / "out", "--tasks", tmp_path / "tasks")
    assert code == 2, output
    assert message in output
    assert output.count("error:") == 1
    assert "Traceback" not in output
    assert not (tmp_path / "out").exists()


# help, recipes


def test_help_does_not_import_torch():
    code = (
        "import sys\nfrom rollalloc.cli import app\n"
        "for command in [], ['train'], ['compare'], ['features']:\n"
        "    sys.argv = ['rollalloc', *command, '--help']\n"
        "    try:\n        app.main()\n    except SystemExit as end:\n        assert not end.code, end.code\n"
        "sys.exit(','.join({'torch', 'transformers', 'matplotlib', 'pyarrow'} & set(sys.modules)) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: rollalloc") == 4


def test_every_option_of_a_run_is_in_the_help_of_both_commands(call):
    for command in ("train", "compare"):
        code, output = call(command, "--help")
        assert code == 0
        for name in RunOptions.__dataclass_fields__:
            assert f"--{name.replace('_', '-')}" in output


@pytest.mark.parametrize("command", ["train", "compare", "features", "waste", "report", "data prepare"])
def test_eighty_columns_hold_every_option_by_its_whole_name(rollalloc, command):
    code, help_, _ = rollalloc(*command.split(), "--help", columns=80)
    assert code == 0
    assert "…" not in help_
    assert max(map(len, help_.splitlines())) <= 80


def test_python_m_rollalloc_runs_the_command():
    ran = subprocess.run([sys.executable, "-m", "rollalloc", "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout == f"rollalloc {rollalloc.__version__}\n"


def test_recipes_are_listed_with_their_parameters(call):
    code, output = call("recipes")
    assert code == 0
    for word in (
        "grpo",
        "dapo",
        "pilot_commit",
        "pods",
        "darts",
        "racing",
        "n_pilot",
        "max_staleness=4",
        "GRPO: generate",
    ):
        assert word in output


# compare


@pytest.mark.usefixtures("forked_runs")
def test_compare_shows_what_each_paid(call, tmp_path):
    out = tmp_path / "compared"
    arguments = ("compare", *OWN, *SHORT, "--heldout", "heldout.jsonl", "--reward-workers", 0)
    arguments += ("--recipes", "wide=grpo, grpo", "--seeds", 4, "--eval-every", 16, "--target", 0.999)
    arguments += ("--set", "wide.groups=8", "--set", "wide.n=2", "--set", "grpo.groups=2", "--out", out)
    code, output = call(*arguments, "--processes", 2)
    assert code == 0, output
    results = json.loads((out / "results.json").read_text())
    assert [(result["recipe"], result["seed"]) for result in results] == [("wide", 4), ("grpo", 4)]
    assert [result["parameters"] for result in results] == [{"groups": 8, "n": 2}, {"groups": 2, "n": 4}]
    for result in results:
        assert sum(result["accounts"].values()) == result["rollouts_paid"] == 32
    assert "wide" in (out / "report.html").read_text()
    assert "wide" in output
    assert "costs until held-out accuracy 0.999" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--recipes", "grpo,grop"), "unknown recipe 'grop' (did you mean 'grpo'?)"),
        (("--recipes", "a=grpo,a=dapo"), "--recipes names 'a' twice"),
        (("--recipes", "grpo", "--matched", "groups=4,n=4", "--seeds", "1,1"), "a name and seed of its own"),
        (("--recipes", "grpo", "--seeds", "one"), "--seeds: expected whole numbers separated by commas, got 'one'"),
        (
            ("--recipes", "a/b=grpo"),
            "--recipes: the label 'a/b' becomes the name of a folder, so it cannot contain '/'; give another LABEL=grpo",
        ),
        (("--recipes", "grpo", "--set", "groups=3"), "expected LABEL.key with one of grpo; e.g. grpo.groups=8"),
        (("--recipes", "grpo", "--matched", "groups=3"), "--matched expects groups=G,n=N, got 'groups=3'"),
        (
            ("--recipes", "grpo,dapo", "--matched", "groups=4,n=4", "--set", "dapo.groups=2000"),
            "trains on 2000 groups per batch",
        ),
        (
            ("--recipes", "grpo"),
            "max_rollouts: 32 is less than the first batch takes, 64 rollouts for 16 prompts; give at",
        ),
        (("--out", "theirs"), "theirs holds results.json, which was not written by rollalloc"),
    ],
)
def test_a_mistake_in_a_comparison_is_one_message(call, own, tmp_path, arguments, message):
    theirs = own / "theirs" / "results.json"
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_text("mine")
    code, output = call("compare", *OWN, "--heldout", "heldout.jsonl", *SHORT, "--out", tmp_path / "out", *arguments)
    assert code == 2, output
    assert message in output
    assert output.count("error:") == 1
    assert "Traceback" not in output
    assert not (tmp_path / "out").exists()
    assert list(theirs.parent.iterdir()) == [theirs]


def test_a_comparison_without_heldout_prompts_is_refused(call, tmp_path):
    code, output = call("compare", *OWN, *SHORT, "--out", tmp_path / "out")
    assert code == 2
    assert "--heldout is missing: recipes are compared by held-out accuracy" in output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_folder_of_others_is_refused_before_a_task_is_made_and_nothing_is_left(call, tmp_path, command):
    run = tmp_path / "out" if command == "train" else tmp_path / "out" / "sort" / "grpo-0"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("mine")
    recipe = ("--recipe", "grpo") if command == "train" else ("--recipes", "grpo", "--seeds", 0)
    where = ("--tasks", tmp_path / "tasks", "--out", tmp_path / "out")
    code, output = call(command, "--task", "sort", *recipe, *where)
    assert code == 2
    there = "metrics.jsonl" if command == "train" else "sort"
    assert f"holds {there}, which was not written by rollalloc" in output
    assert not (tmp_path / "tasks").exists()
    assert list(run.iterdir()) == [run / "metrics.jsonl"]


@pytest.mark.parametrize(("prompts", "rollouts"), [(24, "4,096"), (432, "6,912")])
def test_without_a_budget_a_run_has_one_that_is_said(tmp_path, prompts, rollouts):
    rows = [{"data_source": "m", "prompt": f"p{n}", "reward_model": {"ground_truth": ""}} for n in range(prompts)]
    write_prompts(tmp_path / "prompts.jsonl", rows)
    given = RunOptions(model="model", prompts=[tmp_path / "prompts.jsonl"], reward="r:s")
    assert end_said(given, run_of(given, "grpo", {}, 0)) == (
        f"at most {rollouts} rollouts (the default: 16 a prompt and at least 4,096; --max-rollouts changes it)"
    )


@pytest.mark.usefixtures("forked_runs")
def test_a_run_that_fails_does_not_hide_what_the_others_paid(call, own, tmp_path):
    (own / "twos.py").write_text("def score(data_source, solution_str, ground_truth, extra_info):\n    return 2.0\n")
    arguments = ("compare", *OWN[:-1], "twos.py:score", *SHORT, "--heldout", "heldout.jsonl", "--reward-workers", 0)
    arguments += ("--seeds", 0, "--processes", 1, "--out", tmp_path)
    code, output = call(*arguments, "--recipes", "grpo,mopps", "--set", "grpo.groups=2", "--set", "mopps.groups=2")
    assert code != 0
    assert "mopps with seed 0 failed: " in output, output
    assert "rollout 0: " in output
    assert "costs recipe reached" in output
    assert [result["recipe"] for result in json.loads((tmp_path / "results.json").read_text())] == ["grpo"]
    assert (tmp_path / "report.html").exists()


def rows_of(table):
    return list(zip(*(column.cells for column in table.columns), strict=True))


def recipe(label, costs, ratios, reached, **accounts):
    names = ("rollouts", "tokens", "seconds", "steps")
    return RecipeSummary(
        label=label,
        recipe="grpo",
        parameters={},
        seeds=(0, 1, 2),
        reached=reached,
        costs=dict.fromkeys(names, costs),
        ratios=dict.fromkeys(names, ratios),
        standard_error=0.0,
        last=dict.fromkeys(LAST),
        k=None,
        accounts=accounts,
        rollouts_paid=sum(accounts.values()),
        folders=(),
    )


def test_the_table_has_intervals_bounds_and_causes_of_waste():
    one = Interval(1.0, 1.0, 1.0, (1.0,) * 5)
    recipes = (
        recipe("grpo", Interval(1500.4, 1000, 2000, (1.0,) * 5), one, 5, trained=500, zero_variance=400, surplus=100),
        recipe("few", Interval(600, None, None, (500.0, 700.0)), Interval(2.5, None, None, (2.0, 3.0)), 3, trained=10),
        recipe(
            "poor",
            Interval(900, None, None, (900.0,), ">"),
            Interval(0.5, None, None, (0.5,), "<"),
            1,
            failed=10,
            trained=0,
        ),
        recipe("none", None, None, 0),
    )
    assert rows_of(cost_table(Summary("sort", 0.85, "grpo", recipes, ()))) == [
        (
            "grpo",
            "5/3",
            "1,500 [1,000–2,000]",
            "1.00 [1.00–1.00]",
            *("1.00",) * 3,
            "50%",
            "zero variance 40%, surplus 10%",
        ),
        ("few", "3/3", "600 (500, 700)", "2.50 (2.00, 3.00)", *("2.50",) * 3, "100%", ""),
        ("poor", "1/3", ">900 (900)", "<0.50 (0.50)", *("<0.50",) * 3, "0%", "failed 100%"),
        ("none", "0/3", "", "", "", "", "", "", ""),
    ]


# Options


def test_values_are_json_where_they_can_be():
    pairs = ["groups=3", "sizes_S=[2, 8]", "surplus=carry", "text=a=b", "max_candidates=null", "p=.5"]
    assert parameters_of(pairs) == {
        "groups": 3,
        "sizes_S": [2, 8],
        "surplus": "carry",
        "text": "a=b",
        "max_candidates": None,
        "p": 0.5,
    }
    assert parameters_of(None) == {}


@pytest.mark.parametrize("recipe", ["grpo", "pilot_commit"])
@pytest.mark.parametrize("task", [None, "sort"])
def test_the_updates_options_are_those_of_the_run_whatever_the_recipe_and_task(own, recipe, task):
    what = {"model": "model", "prompts": [own / "prompts.parquet"], "reward": "my_reward.py:score"}
    given = RunOptions(
        **({"task": task} if task else what),
        optimizer_steps=2,
        warmup_steps=3,
        schedule="cosine",
        schedule_steps=50,
        aggregation="dr_grpo",
        dual_clip=10.0,
        kl=0.01,
        tokens_per_forward=500,
        precision="bf16",
        sampling_dtype="float16",
        gradient_checkpointing=True,
        adam_beta2=0.98,
        max_grad_norm=0.5,
        averaging=320,
        track=["tensorboard", "wandb"],
    )
    run = run_of(given, recipe, {}, 0)
    assert run.schedule == Schedule(warmup=3, shape="cosine", steps=50)
    assert run.loss == Loss(clip=Clip(dual=10.0), aggregation="dr_grpo", kl=0.01)
    assert (run.optimizer_steps_per_batch, run.tokens_per_forward, run.precision) == (2, 500, "bf16")
    assert (run.sampling_dtype, run.gradient_checkpointing) == ("float16", True)
    assert (run.betas, run.max_grad_norm) == ((0.9, 0.98), 0.5)
    assert run.averaging == 320
    assert run_of(replace(given, averaging=0), recipe, {}, 0).averaging == 0
    assert run.track == ("tensorboard", "wandb")


def test_a_task_is_run_by_its_defaults_unless_tuned_settings_are_asked_for(tmp_path):
    plain = Config(sampling=Sampling(4))
    for task in ("skills/late", "rg/gcd", "walks/mixed"):
        run = run_of(RunOptions(task=task), "foresight", {}, 0)
        assert dict(run.parameters) == {"groups": 32, "n": 1}
        assert run.learning_rate == presets.DEFAULT_RATE
        assert run.betas == plain.betas
        assert run.averaging == plain.averaging > 0
        tuned = run_of(RunOptions(task=task, settings="tuned", learning_rate=1e-3), "foresight", {"neg": 0.7}, 0)
        found = presets.tuned_of(presets.preset_of(task)[1].tuned_on)["foresight"].parameters
        assert dict(tuned.parameters) == {**found, "neg": 0.7}
        assert tuned.learning_rate == 1e-3
        assert (tuned.betas, tuned.averaging) == ((0.9, 0.999), 0)
    with pytest.raises(ValueError, match=r"--settings tuned: dapo\+pods has no tuned settings for sort; leave it out"):
        run_of(RunOptions(task="sort", settings="tuned"), "dapo+pods", {}, 0)
    with pytest.raises(ValueError, match="--settings must be one of defaults, tuned, got 'best'"):
        run_of(RunOptions(task="sort", settings="best"), "grpo", {}, 0)
    with pytest.raises(ValueError, match="there are tuned settings only for built-in tasks"):
        run_of(RunOptions(model="m", prompts=[tmp_path], reward="a:b", settings="tuned"), "grpo", {}, 0)


def test_without_what_the_command_needs_it_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; from rollalloc.cli import main; main()"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr == "error: the command rollalloc needs typer; pip install 'rollalloc[native]'\n"


def test_a_run_that_is_resumed_keeps_its_budget_and_its_grid_where_none_is_given(call, tmp_path):
    command = ("train", *OWN, *GRPO, "--heldout", "heldout.jsonl", "--device", "cpu", "--max-new-tokens", 4)
    command += ("--out", tmp_path / "run", "--resume")
    assert call(*command, "--max-rollouts", 32)[0] == 0
    code, output = call(*command)
    assert code == 0, output
    assert "at most 32 rollouts" in output
    assert "finished: the budget of 32 rollouts is spent" in output
    code, output = call(*command, "--max-rollouts", 64, "--accept-recipe")
    assert code == 0, output
    points = [line["at"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "eval"]
    assert points == [*range(0, 64, 3), None]


# -------------------------------------------------------------------------------------------------------------- recipes


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pilot_commit", ("n_pilot", "pilot rollouts of each prompt", "confidence", "0.95", "--set")),
        ("pilot_commit+pods", ("Train on pilots and commits of a prompt", "rollouts of each prompt to train on")),
        ("reinforce", ("neg", "replay", "rows of earlier batches to train on again")),
        ("dapo_carry", ("deviation", "kind of standard deviation by which")),  # "see grpo" is looked up
    ],
)
def test_recipes_with_a_name_explains_its_parameters(rollalloc, name, words):
    code, out, _ = rollalloc("recipes", name, columns=160)
    assert code == 0
    for word in words:
        assert word in out
