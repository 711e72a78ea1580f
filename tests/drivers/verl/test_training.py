"""The real verl, Ray, FSDP2 and vLLM on CPUs: `make verl-test`. One run takes a minute or two and 7 GB."""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from shutil import copyfile, copytree

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollalloc.data.feature_blocks import own_features
from rollalloc.data.feature_file import write_features
from rollalloc.data.prompts import load_prompts

pytest.importorskip("verl")

pytestmark = pytest.mark.verl
HERE = Path(__file__).parent
EXAMPLE = HERE.parents[2] / "examples" / "verl" / "cpu.sh"
STOCK = HERE / "stock.json"
STEPS = 3
# In which of them rows of older weights are trained on, or rollouts are stopped, is a matter of chance.
MORE_STEPS = {"pilot_commit": 5, "darts": 5}
LIMIT = 600  # seconds, against a run that hangs
GROUPS = 8  # of the example
TRAINED = 8  # rollouts a group of the example
RECIPES = {
    "grpo": {"recipe": "grpo"},
    "pilot_commit": {"recipe": "pilot_commit", "n_pilot": 4, "n_commit": 4, "gen_groups": 16},
    "dapo": {"recipe": "dapo", "gen_groups": 16},
    "pods": {"recipe": "pods", "m": 4},
    "darts": {"recipe": "darts", "shortest": 3, "longest": 1, "tail": "sampled"},
    "mixture": {"recipe": "pilot_commit+pods", "n_pilot": 4, "n_commit": 4, "gen_groups": 16, "m": 4},
}
LONG = ["data.max_response_length=384", "actor_rollout_ref.rollout.max_model_len=512"]  # so that some end before others

FEW_AT_ONCE = [  # so that an update breaks some off in their middle
    "data.max_response_length=192",
    "actor_rollout_ref.rollout.max_model_len=256",
    "actor_rollout_ref.rollout.max_num_seqs=16",
]


TURNS = [  # verl's loop of turns, with a toy tool and a parser of the calls that a random model makes of it
    "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
    "actor_rollout_ref.rollout.multi_turn.format=digits",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3",
    f"actor_rollout_ref.rollout.multi_turn.function_tool_path={HERE / 'calculator.py'}",
    f"reward.custom_reward_function.path={HERE / 'halves.py'}",
]


class Run:
    """A run of the example, and what it left."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def start(self, *overrides, section=None, mode="rollalloc", **environment):
        """Runs verl to its end; returns its exit code."""
        keys = [f"+trainer.v1.rollalloc.{key}={value}" for key, value in (section or {}).items()]
        mode = [f"trainer.v1.trainer_mode={mode}"] if section else []
        with (self.folder / "log").open("a") as log:
            process = subprocess.Popen(
                ["bash", EXAMPLE, self.folder, *mode, *keys, *overrides],
                stdout=log,
                stderr=log,
                env=os.environ | self.variables | environment,
                start_new_session=True,  # what it starts ends with it
            )
            try:
                return process.wait(timeout=LIMIT)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    @property
    def variables(self):
        return {
            "PYTHON": sys.executable,
            "VERL_USE_EXTERNAL_MODULES": "recorder",
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
            "RECORD": str(self.folder),
        }

    @property
    def log(self):
        return (self.folder / "log").read_text()

    def recorded(self, name):
        return [json.loads(line) for line in (self.folder / f"{name}.jsonl").read_text().splitlines()]

    def metrics(self):
        """verl's own metrics, a dictionary a step."""
        return [line["data"] for line in self.recorded("metrics")]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """A finished run of each recipe, made once."""
    runs = {}

    def get(name):
        if name not in runs:
            run = runs[name] = Run(tmp_path_factory.mktemp(name))
            if len(runs) > 1:  # what cpu.sh makes, made once
                first = next(iter(runs.values())).folder
                copytree(first / "model", run.folder / "model")
                for data in first.glob("*.parquet"):
                    copyfile(data, run.folder / data.name)
            steps = MORE_STEPS.get(name, STEPS)
            overrides = [f"trainer.total_training_steps={steps}", "trainer.resume_mode=disable"]
            overrides += LONG if name == "darts" else []
            assert run.start(*overrides, section=RECIPES.get(name)) == 0, run.log[-3000:]
        return runs[name]

    return get


@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_trains_and_accounts_for_what_it_paid(run_of, name):
    run = run_of(name)
    metrics = run.metrics()
    assert len(metrics) == MORE_STEPS.get(name, STEPS)
    for step in metrics:
        assert math.isfinite(step["actor/grad_norm"])
        causes = {key: value for key, value in step.items() if key.startswith("rollalloc/accounts/")}
        assert step["rollalloc/rollouts_paid"] == sum(causes.values())
    assert metrics[-1]["rollalloc/rollouts_paid"] == len(run.recorded("sessions"))
    assert metrics[-1]["rollalloc/accounts/failed"] == 0
    for update in run.recorded("updates"):
        per_group = Counter(update["uids"])
        assert len(per_group) == len(set(update["prompts"])) == GROUPS
        assert set(per_group.values()) == {RECIPES[name].get("m", 4 if name == "darts" else TRAINED)}


def done_by(run):
    """What a run submitted, sampled and trained on, and the names of verl's metrics, as JSON holds it."""
    sampled = defaultdict(list)
    for line in run.recorded("sessions"):
        sampled[line["step"], line["prompt"], json.dumps(line["sampling"], sort_keys=True)].append(line["session"])
    trained = [
        (line["step"], line["rows"], line["how"], sorted(Counter(line["prompts"]).items()))
        for line in run.recorded("updates")
    ]
    done = {
        "submissions": run.recorded("submissions"),
        "sampled": [(*key, sorted(sessions)) for key, sessions in sorted(sampled.items())],
        "trained": trained,
        "metrics": sorted(run.metrics()[0]),
    }
    return json.loads(json.dumps(done))


def test_switched_off_it_submits_and_trains_what_verl_would(run_of):
    """`stock.json` is what verl did without us: CI saves that run, and `make verl-test` repeats it."""
    stock, ours = json.loads(STOCK.read_text("utf-8")), done_by(run_of("grpo"))
    assert set(stock.pop("metrics")) <= set(ours.pop("metrics"))
    assert ours == stock


def test_stock_verl_does_what_is_recorded(run_of):
    """If another verl does otherwise: `RECORD_STOCK=yes make verl-test ONLY=stock`."""
    done = done_by(run_of("stock"))
    if os.environ.get("RECORD_STOCK"):
        STOCK.write_text(json.dumps(done) + "\n", "utf-8")
    assert done == json.loads(STOCK.read_text("utf-8"))


def test_rows_are_padded_to_two_ranks_after_selection_and_padding_is_no_row_of_the_metrics(tmp_path):
    run = Run(tmp_path / "run")
    batch = ["data.train_batch_size=6", "actor_rollout_ref.actor.ppo_mini_batch_size=3"]
    ranks = ["trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_gpus=2"]
    steps = ["trainer.total_training_steps=3", "trainer.resume_mode=disable"]
    assert run.start(*batch, *ranks, *steps, section={"recipe": "pods", "m": 5}) == 0, run.log[-3000:]
    assert len(run.recorded("optimizer")) == 3 * 2 * 2
    for update, metrics in zip(run.recorded("updates"), run.metrics(), strict=True):
        assert (len(update["keys"]), update["rows"], update["how"]["mini_batch_size"]) == (30, 32, 16)
        assert metrics["rollalloc/padding_rows"] == 2
        assert metrics["prompt_length/max"] < 64  # of padding it is 127


def test_stopped_rollouts_are_counted_and_leave_nothing_on_the_server(run_of):
    metrics = run_of("darts").metrics()
    assert all(step["rollalloc/requests_left"] == 0 for step in metrics)
    assert metrics[-1]["rollalloc/accounts/cancelled"] > 0


def test_rollouts_are_stopped_at_the_limit_of_their_order(tmp_path):
    """The core refuses a rollout that is longer than its limit, so that the run would end with an error."""
    run = Run(tmp_path / "run")
    overrides = [*LONG, *TURNS[-1:], "trainer.total_training_steps=4", "trainer.resume_mode=disable"]
    assert run.start(*overrides, section={"recipe": "grpo", "limit_at": 0.3}) == 0, run.log[-3000:]
    metrics = run.metrics()
    asked = [line["sampling"].get("max_tokens") for line in run.recorded("sessions")]
    assert asked[: GROUPS * TRAINED] == [None] * GROUPS * TRAINED  # the first batch has none
    [limit] = set(
        asked[GROUPS * TRAINED :]
    )  # only groups without a limit change it, and there are no more of these yet
    assert [step["rollalloc/limit"] for step in metrics] == [limit] * 4
    assert metrics[0]["response_length/max"] > limit == metrics[1]["response_length/max"]
    assert metrics[-1]["rollalloc/accounts/failed"] == 0


@pytest.mark.parametrize("name", ["foresight", "spo"])
def test_the_actor_gets_the_cores_advantage_for_a_lone_rollout(name, tmp_path):
    """Over the whole batch, in both of its mini-batches; foresight's prompts are its own, with features from a file."""
    run = Run(tmp_path / "run")
    section = {"recipe": name}
    if name == "foresight":
        subprocess.run([sys.executable, EXAMPLE.parent / "make_tiny.py", run.folder], check=True)
        keys = load_prompts(run.folder / "train.parquet").keys
        values = np.random.default_rng(0).normal(size=(len(keys), 8))
        write_features(run.folder / "features.safetensors", keys, own_features({"mine": values}))
        section["features"] = run.folder / "features.safetensors"
    steps = [f"trainer.total_training_steps={STEPS}", "trainer.resume_mode=disable"]
    assert run.start(*steps, "actor_rollout_ref.rollout.n=1", section=section) == 0, run.log[-3000:]
    assert "no features" not in run.log
    assert len(run.recorded("optimizer")) == 2 * STEPS
    for update in run.recorded("updates"):
        assert len(update["keys"]) == len(set(update["prompts"])) == GROUPS
    credited = run.recorded("advantages")
    assert len(credited) == STEPS
    for step in credited:
        assert [value for values in step["given"] for value in values] == pytest.approx(step["core"], abs=1e-5)
        if name == "spo":
            assert sum(step["core"]) == pytest.approx(0, abs=1e-6)
            assert sum(value**2 for value in step["core"]) == pytest.approx(GROUPS, rel=1e-3)
        if name == "foresight":  # what did worse than expected counts a tenth
            baselines = [
                reward - (value if value > 0 else value / 0.1)
                for reward, value in zip(step["rewards"], step["core"], strict=True)
            ]
            assert all(0 <= baseline <= 1 for baseline in baselines)
    assert run.metrics()[-1]["rollalloc/rollouts_paid"] == len(run.recorded("sessions")) == STEPS * GROUPS


def test_rows_are_trained_again_as_they_were_generated_also_after_a_kill(tmp_path):
    run = Run(tmp_path / "run")
    section = {"recipe": "foresight", "replay": 5, "replay_staleness": 2, "exponent": "null", "neg": 1}
    dump = run.folder / "dump"
    steps = ["trainer.total_training_steps=6", "trainer.save_freq=2", "actor_rollout_ref.rollout.n=1"]
    steps += [f"+trainer.rollout_data_dir={dump}", f"reward.custom_reward_function.path={HERE / 'halves.py'}"]
    assert run.start(*steps, section=section, KILL_TRAINER_AT="5") != 0
    kept = json.loads((run.folder / "checkpoints/global_step_4/rollalloc.json").read_text())["rounds"]["kept"]
    assert kept, "rows that may be trained again"
    assert run.start(*steps, section=section) == 0, run.log[-3000:]
    credited = run.recorded("advantages")
    assert [step["step"] for step in credited] == [1, 2, 3, 4, 5, 6]
    assert [sum(not replays for replays in step["replays"]) for step in credited] == [8] * 6
    first, again = {}, []
    for step in credited:
        columns = ("rollouts", "replays", "given", "core", "tokens", "behaviour")
        for rollout, replays, given, core, tokens, behaviour in zip(*(step[name] for name in columns), strict=True):
            assert given == pytest.approx([core], abs=1e-5)
            row = (core, tokens, behaviour)
            if replays:
                assert first[rollout][0] == row, "as it was generated, and as it was credited"
                assert step["step"] - first[rollout][1] <= 2
                again.append((step["step"], rollout))
            first.setdefault(rollout, (row, step["step"]))
    assert {step for step, _ in again} >= {2, 3, 4, 5, 6}
    assert {rollout for rollout, _ in kept} & {rollout for step, rollout in again if step > 4}
    by_step = {line["step"]: line["data"] for line in run.recorded("metrics")}  # verl begins the file anew
    assert by_step.keys() >= {5, 6}
    for at, metrics in by_step.items():
        assert "rollout_corr/rollout_is_mean" in metrics
        assert metrics["rollalloc/replayed"] == sum(map(bool, credited[at - 1]["replays"])) > 0
    assert run.metrics()[-1]["rollalloc/rollouts_paid"] == 12 + 5 * 8  # each rollout once
    assert [len((dump / f"{step}.jsonl").read_text().splitlines()) for step in (1, 2, 6)] == [12, 8, 8]


def test_rows_of_older_weights_are_corrected(run_of):
    metrics = run_of("pilot_commit").metrics()
    assert max(step["rollalloc/staleness_max"] for step in metrics) > 0
    assert all("rollout_corr/rollout_is_mean" in step for step in metrics)


def test_a_killed_run_goes_on_with_the_same_prompts(tmp_path):
    run = Run(tmp_path / "run")
    section = RECIPES["pilot_commit"] | {"p_lower": 0, "p_upper": 0, "p_solve": 2}  # every prompt passes
    steps = ["trainer.total_training_steps=5", "trainer.save_freq=2"]
    assert run.start(*steps, section=section, KILL_TRAINER_AT="4") != 0
    held = json.loads((run.folder / "checkpoints/global_step_2/rollalloc.json").read_text())["rounds"]["keys"]
    assert held, "pilots for the next batch"
    assert run.start(*steps, section=section) == 0, run.log[-3000:]
    updates = run.recorded("updates")
    assert [update["step"] for update in updates] == [1, 2, 3, 3, 4, 5]
    resumed = updates[:2] + updates[3:]
    prompts = [prompt for update in resumed for prompt in dict.fromkeys(update["prompts"])]
    assert len(prompts) == len(set(prompts)) == 5 * GROUPS  # none twice
    restored = {key for _, keys in held for key in keys}
    assert restored & {key for update in updates[3:] for key in update["keys"]}
    assert run.metrics()[-1]["rollalloc/accounts/failed"] == 0


@pytest.mark.parametrize(("name", "killed"), [("grpo", True), ("pilot_commit", False)], ids=["one stage", "stages"])
def test_rollouts_go_on_over_an_update_and_begin_again_after_a_kill(name, killed, tmp_path):
    """verl's colocate_async: what runs when a batch is there is broken off for the update and goes on after it."""
    run = Run(tmp_path / "run")
    steps = ["trainer.total_training_steps=5", "trainer.save_freq=2", *FEW_AT_ONCE]
    how = {"section": RECIPES[name], "mode": "rollalloc_colocate_async"}
    if killed:
        assert run.start(*steps, **how, KILL_TRAINER_AT="4") != 0
        state = json.loads((run.folder / "checkpoints/global_step_2/rollalloc.json").read_text())
        running = [rollout for group in state["rounds"]["allocator"]["groups"] for rollout, _ in group["running"]]
        assert running, "rollouts to begin again"
        before = len(run.recorded("sessions"))
    assert run.start(*steps, **how) == 0, run.log[-3000:]
    updates, metrics = run.recorded("updates"), run.metrics()
    assert [update["step"] for update in updates] == [1, 2, 3, 3, 4, 5] if killed else [1, 2, 3, 4, 5]
    for update in updates:
        assert set(Counter(update["uids"]).values()) == {TRAINED}
        assert len(set(update["uids"])) == GROUPS
    for step in metrics:
        causes = {key: value for key, value in step.items() if key.startswith("rollalloc/accounts/")}
        assert step["rollalloc/rollouts_paid"] == sum(causes.values())
        assert "rollout_corr/rollout_is_mean" in step
    assert max(step["rollalloc/streaming/in_flight"] for step in metrics) > 0
    assert max(step["rollalloc/staleness_max"] for step in metrics) > 0
    assert max(step["training/off_policy/trajectory_spans/max"] for step in metrics) > 1, "broken off and gone on with"
    assert metrics[-1]["rollalloc/accounts/failed"] == 0
    sessions = run.recorded("sessions")
    if killed:
        again = [line for line in sessions[before:] if line["step"] == 3][: len(running)]
        assert {line["session"] for line in again} <= set(range(TRAINED))
    else:
        assert metrics[-1]["rollalloc/rollouts_paid"] == len(sessions)


def test_trajectories_of_several_turns_with_a_tool_are_rollouts_like_any_other(tmp_path):
    """Some are stopped, in a turn or while they wait for the tool, and some go on over an update between their turns."""
    run = Run(tmp_path / "run")
    steps = ["trainer.total_training_steps=3", "trainer.resume_mode=disable", *FEW_AT_ONCE, *TURNS]
    assert run.start(*steps, section=RECIPES["darts"], mode="rollalloc_colocate_async") == 0, run.log[-3000:]
    several = 0
    for step in run.recorded("advantages"):
        columns = (step[name] for name in ("tokens", "masks", "behaviour", "given", "core", "weights"))
        for tokens, mask, behaviour, given, core, weight in zip(*columns, strict=True):
            assert len(tokens) == len(mask) == len(behaviour) <= 192
            assert all((logprob < 0) == bool(generated) for logprob, generated in zip(behaviour, mask, strict=True))
            assert given == pytest.approx([core * weight], abs=1e-5)  # a late one stands for those that were stopped
            several += mask != sorted(mask)
            assert mask[-1] == 1
    assert several > 0
    metrics = run.metrics()
    assert max(step["training/num_turns/max"] for step in metrics) > 3
    last = metrics[-1]
    assert last["rollalloc/accounts/failed"] == 0 < last["rollalloc/accounts/cancelled"]
    assert last["rollalloc/rollouts_paid"] == len(run.recorded("sessions"))


def test_a_model_learns_to_call_its_tool(tmp_path):
    """verl's `tool_agent` with verl's own parser: a call of the tool pays, a guess does not."""
    run = Run(tmp_path / "run")
    task = EXAMPLE.parents[1] / "multiplying.py"
    subprocess.run([sys.executable, task, run.folder], check=True)
    agent, multi_turn = "actor_rollout_ref.rollout.agent", "actor_rollout_ref.rollout.multi_turn"
    overrides = [
        *(f"{agent}.default_agent_loop=tool_agent", f"{multi_turn}.format=hermes"),
        *(f"{multi_turn}.function_tool_path={task}", f"{multi_turn}.max_assistant_turns=2"),
        *(f"reward.custom_reward_function.path={task}", "data.max_response_length=48"),
        *("trainer.total_training_steps=12", "trainer.resume_mode=disable"),
        *("actor_rollout_ref.actor.optim.lr=1e-3", "actor_rollout_ref.actor.ppo_mini_batch_size=8"),
        *("trainer.val_before_train=True", "trainer.test_freq=12"),
        *(f"actor_rollout_ref.rollout.val_kwargs.{name}" for name in ("do_sample=True", "temperature=1.0")),
    ]
    assert run.start(*overrides, section=RECIPES["pilot_commit"]) == 0, run.log[-3000:]
    steps = run.metrics()
    right = [value for step in steps for name, value in step.items() if re.fullmatch("val-core/.*/mean@1", name)]
    sys.stdout.write(f"held-out accuracy {right}, {steps[-1]['rollalloc/rollouts_paid']:.0f} rollouts\n")
    assert right[-1] > right[0] + 0.15, "256 questions: a standard error of at most .045 of the difference"
    assert steps[-1]["rollalloc/accounts/failed"] == 0
    assert max(step["training/num_turns/max"] for step in steps if "training/num_turns/max" in step) == 4


def test_on_devices_of_their_own_rollouts_go_on_while_a_batch_is_trained(tmp_path):
    """verl's separate_async, with the transfer of the weights made up and no replica on the trainer's devices."""
    run = Run(tmp_path / "run")
    rollout = "actor_rollout_ref.rollout"
    pool = ["actor_rollout_ref.hybrid_engine=False", f"{rollout}.nnodes=1", f"{rollout}.n_gpus_per_node=1"]
    engine = f"{rollout}.checkpoint_engine"
    transfer = [f"{engine}.backend=file", f"{engine}.custom_backend_module=weights_by_file"]
    steps = ["trainer.total_training_steps=3", "trainer.v1.separate_async.parameter_sync_step=2"]
    overrides = [*steps, *pool, *transfer, *FEW_AT_ONCE, "ray_kwargs.ray_init.num_gpus=2"]
    how = {"section": RECIPES["grpo"], "mode": "rollalloc_separate_async", "VERL_LOGGING_LEVEL": "WARN"}
    assert run.start(*overrides, **how) == 0, run.log[-3000:]  # at INFO verl 0.9.1 logs a line that raises TypeError
    metrics = run.metrics()
    assert [update["step"] for update in run.recorded("updates")] == [1, 2, 3]
    assert len(run.recorded("optimizer")) == 2 * 3
    assert len(list(run.folder.glob("weights-*.safetensors"))) == 1 + 3
    assert metrics[0]["rollalloc/streaming/in_flight"] > 0
    assert max(step["rollalloc/staleness_max"] for step in metrics) > 0
    assert metrics[-1]["rollalloc/accounts/failed"] == 0
    assert metrics[-1]["rollalloc/rollouts_paid"] == len(run.recorded("sessions"))


@pytest.fixture
def two_nodes(monkeypatch, tmp_path):
    """Two raylets on this machine, to which this process is connected; one whose agents take 15 s to start ends itself.

    Workers have the environment of their raylet, so that what a run has for a cluster of its own, and what `cpu.sh` sets for
    it, is set here.
    """
    import ray
    from ray.cluster_utils import Cluster

    run = Run(tmp_path / "run")
    exported = " ".join(re.findall(r"^export (.*)$", EXAMPLE.read_text(), flags=re.MULTILINE)).split()
    modules = {
        "VERL_USE_EXTERNAL_MODULES": f"verl_on_cpu,{run.variables['VERL_USE_EXTERNAL_MODULES']}",
        "PYTHONPATH": os.pathsep.join([str(EXAMPLE.parent), run.variables["PYTHONPATH"]]),
    }
    for name, value in (run.variables | modules | dict(setting.split("=", 1) for setting in exported)).items():
        monkeypatch.setenv(name, value.strip('"').replace("$folder", str(run.folder)))
    node = {"num_cpus": 8, "num_gpus": 1, "object_store_memory": 2**28, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, connect=True, head_node_args=node)
    try:
        cluster.add_node(**node)
        cluster.wait_for_nodes(timeout=300)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def _ids(cluster):
    return {node.node_id for node in cluster.list_all_nodes()}


def test_a_run_over_two_nodes_works_on_both(two_nodes, tmp_path):
    """Each has one of two data-parallel ranks; the run joins them as it would a cluster."""
    run = Run(tmp_path / "run")
    join = ["ray_kwargs.ray_init.num_cpus=null", "ray_kwargs.ray_init.num_gpus=null", "trainer.nnodes=2"]
    spread = ["actor_rollout_ref.rollout.agent.num_workers=2", "reward.num_workers=2"]
    steps = ["trainer.total_training_steps=2", "trainer.resume_mode=disable", *FEW_AT_ONCE, *TURNS]
    how = {"section": RECIPES["darts"], "RAY_ADDRESS": two_nodes.address}
    assert run.start(*join, *spread, *steps, **how) == 0, run.log[-3000:]
    placed = _placed()
    for actor in ("WorkerDict", "vLLMHttpServer", "Worker", "RewardLoopWorker"):
        assert placed[actor] == _ids(two_nodes), (actor, placed)
    assert len(placed["TaskRunnerV1"]) == 1, "decisions are made in one place"
    metrics = run.metrics()[-1]
    assert metrics["rollalloc/accounts/failed"] == 0 < metrics["rollalloc/accounts/cancelled"]
    assert metrics["rollalloc/rollouts_paid"] == len(run.recorded("sessions"))


def _placed():
    """Nodes on which actors of each class ran, in the whole life of the cluster that this process is connected to."""
    import ray

    nodes = {}
    for actor in ray._private.state.actors().values():
        nodes.setdefault(actor["ActorClassName"].split(".")[-1], set()).add(actor["Address"]["NodeID"])
    return nodes


def test_a_killed_worker_and_a_hanging_reward_cost_their_rollouts_only(tmp_path):
    run = Run(tmp_path / "run")
    reward = f"reward.custom_reward_function.path={HERE / 'hanging.py'}"
    section = RECIPES["grpo"] | {"reward_timeout": 5}
    overrides = ["trainer.total_training_steps=4", "trainer.resume_mode=disable", reward]
    assert run.start(*overrides, section=section, KILL_AGENT_AT="3") == 0, run.log[-3000:]
    metrics = run.metrics()
    assert [step["rollalloc/accounts/failed"] for step in metrics][:2] == [1, 1]
    assert metrics[2]["rollalloc/accounts/failed"] > 1
    assert metrics[3]["rollalloc/rows"] == GROUPS * TRAINED
    assert "the reward took more than 5" in run.log
    assert "its agent loop worker died" in run.log


@pytest.mark.parametrize(
    ("section", "overrides", "says"),
    [
        ({"recipe": "pilot_commit", "n_pilots": 4}, [], "did you mean 'n_pilot'"),
        (
            {"recipe": "grpo", "limit_at": 0.8},
            TURNS[:1],
            "default_agent_loop must be single_turn_agent, got tool_agent",
        ),
        ({"recipe": "foresight"}, ["data.shuffle=False"], "data.shuffle=False, but the recipe draws prompts by"),
    ],
)
def test_a_wrong_setting_is_refused_before_ray_starts(section, overrides, says, tmp_path):
    run = Run(tmp_path / "run")
    assert run.start(*overrides, section=section) != 0
    assert says in run.log
    assert "ray init kwargs" not in run.log


PAPERS = HERE.parents[2] / "recipes" / "verl"
SMALL_ROW = [  # deepmath_1.5b in its shape, but for sizes: 4 of 12 prompts, 8 + 8 rollouts, four optimizer steps
    "method=pilot_commit",
    *(f"row.{key}" for key in ("pilot=8", "commit=8", "subset=4", "candidates=12", "most=120")),
    *("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=1", "actor_rollout_ref.rollout.n=16"),
    *("trainer.nnodes=1", "trainer.total_training_steps=3", "trainer.test_freq=3", "trainer.save_freq=-1"),
    "trainer.val_before_train=True",
    *("actor_rollout_ref.rollout.max_num_seqs=64", "reward.reward_kwargs.overlong_buffer_cfg.len=16"),
    f"reward.custom_reward_function.path={HERE / 'fifths.py'}",
    "reward.custom_reward_function.name=compute_score",
]
SETS = {
    "math500": "HuggingFaceH4/MATH-500",
    "minerva": "math-ai/minervamath",
    "olympiadbench": "math-ai/olympiadbench",
    "aime24x32": "HuggingFaceH4/aime_2024",
    "aime25x32": "math-ai/aime25",
    "amc23x32": "math-ai/amc23",
}


def test_a_run_of_the_papers_trains_as_composed_on_a_tiny_model(tmp_path):
    run = Run(tmp_path / "run")
    subprocess.run([sys.executable, EXAMPLE.parent / "make_tiny.py", run.folder], check=True)
    rows = pq.read_table(run.folder / "test.parquet").to_pylist()[:4]
    for name, source in SETS.items():
        samples = {"__rollout_n__": 4} if name.endswith("x32") else {}
        table = pa.Table.from_pylist([row | {"data_source": source} | samples for row in rows])
        pq.write_table(table, run.folder / f"{name}.parquet")
    files = [f"{run.folder}/{name}.parquet" for name in SETS]
    overrides = [*SMALL_ROW, f"row.data={run.folder}", f"data.val_files=[{','.join(files)}]"]
    # After all overrides: cpu.sh has its own before these, and argparse does not join two groups of them.
    overrides += [f"--config-path={PAPERS}", "--config-name=deepmath_1.5b"]
    assert run.start(*overrides) == 0, run.log[-3000:]
    before, *batches = run.metrics()
    for score in ("MATH-500/acc/mean@1", "aime_2024/acc/mean@4", "aime_2024/acc/best@4/mean"):
        assert f"val-core/HuggingFaceH4/{score}" in before.keys() & batches[-1].keys()
    assert len(batches) == 3
    for batch in batches:
        assert batch["rollalloc/accounts/trained"] == 4 * 16 * batch["training/global_step"]
        assert batch["rollalloc/stage/pilot/rollouts"] == 8 * batch["rollalloc/stage/pilot/groups"] >= 8 * 12
        assert batch["rollalloc/stage/commit/rollouts"] == 8 * 4
        causes = {key: value for key, value in batch.items() if key.startswith("rollalloc/accounts/")}
        assert batch["rollalloc/rollouts_paid"] == sum(causes.values())


def test_a_node_that_dies_takes_its_own_sessions_only_and_its_worker_comes_back(two_nodes):
    """verl's placement and our manager over the real Ray; its workers are made up."""
    import asyncio

    import ray
    from omegaconf import OmegaConf
    from verl.utils import tensordict_utils as tu

    from rollalloc.drivers.verl.rounds import SessionOutcome
    from rollalloc.drivers.verl.workers import Manager

    head = two_nodes.head_node.node_id

    class Light:
        """Ends its sessions at once on the head, and on the other node never."""

        def __init__(self, *_):
            self.ended = asyncio.Queue()

        def where(self):
            return ray.get_runtime_context().get_node_id()

        async def generate_sequences(self, chunk):
            if self.where() == head:
                for uid in chunk["uid"]:
                    self.ended.put_nowait(
                        [SessionOutcome(uid, 0, tokens=1, reward=1.0), SessionOutcome(uid, 1, tokens=1, reward=0.0)]
                    )

        async def outcomes(self):
            return await self.ended.get()

        async def ping(self):
            return True

    def told(manager, *uids):
        columns = {"uid": np.array(uids, dtype=object), "__rollout_n__": np.array([2] * len(uids), dtype=object)}
        manager.generate_sequences(tu.get_tensordict(columns))
        outcomes = []
        while len(outcomes) < 2 * len(uids):
            outcomes += manager.outcomes()
        return Counter(outcome.reason for outcome in outcomes)

    rollout = {"actor_rollout_ref": {"rollout": {"agent": {"num_workers": 2}}, "model": {}}}
    manager = Manager(OmegaConf.create(rollout), None)
    manager.agent_loop_workers_class = ray.remote(max_restarts=3, num_cpus=1)(Light)
    asyncio.run(manager._init_agent_loop_workers())
    places = [ray.get(worker.where.remote()) for worker in manager.agent_loop_workers]
    assert set(places) == _ids(two_nodes)
    [other] = [node for node in two_nodes.list_all_nodes() if node.node_id != head]
    two_nodes.remove_node(other)
    assert told(manager, "g0s0r0", "g1s0r2") == {"": 2, "its agent loop worker died": 2}
    assert {ray.get(worker.where.remote()) for worker in manager.agent_loop_workers} == {head}
    assert told(manager, "g2s0r4", "g3s0r6") == {"": 4}
