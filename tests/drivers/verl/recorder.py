"""Loaded into every process of a test's run (VERL_USE_EXTERNAL_MODULES): writes down what verl really does, and breaks it
where a test says so."""

import json
import os
import signal
from functools import wraps
from pathlib import Path

from rollalloc.drivers.verl.hooks import after_import

FOLDER = Path(os.environ["RECORD"])


def write(name, **line):
    with (FOLDER / f"{name}.jsonl").open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def once(name):
    """Whether this is the first to come by with that name, in all processes."""
    try:
        (FOLDER / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def around(owner, name, make):
    setattr(owner, name, wraps(getattr(owner, name))(make(getattr(owner, name))))


def plain(values):
    """A column of a tensor dictionary, whichever of its list types it has, as a list."""
    return values.tolist() if hasattr(values, "tolist") else list(values)


def sessions(module):
    def make(run):
        async def recorded(self, sampling_params, trajectory, **kwargs):
            if not trajectory["validate"]:
                prompt, step = kwargs["extra_info"]["index"], int(trajectory["step"])
                write(
                    "sessions", step=step, prompt=prompt, session=kwargs["session_id"], sampling=dict(sampling_params)
                )
                if step == int(os.environ.get("KILL_AGENT_AT", 0)) and once("agent-killed"):
                    os.kill(os.getpid(), signal.SIGKILL)
            return await run(self, sampling_params, trajectory, **kwargs)

        return recorded

    around(module.AgentLoopWorker, "_run_agent_loop", make)


def submissions(name):
    def watch(module):
        def make(generate):
            def recorded(self, prompts):
                if "validate" not in prompts:
                    n = self.config.actor_rollout_ref.rollout.n
                    sizes = plain(prompts["__rollout_n__"]) if "__rollout_n__" in prompts else [n] * len(prompts)
                    indices = [info["index"] for info in plain(prompts["extra_info"])]
                    write("submissions", step=int(prompts["global_steps"]), prompts=indices, sizes=sizes)
                return generate(self, prompts)

            return recorded

        if hasattr(module, name):  # a worker unpickles its class while that module is being imported
            around(getattr(module, name), "generate_sequences", make)

    return watch


def updates(module):
    import transfer_queue as tq

    def make(update):
        def recorded(self, batch, metrics):
            if self.global_steps == int(os.environ.get("KILL_TRAINER_AT", 0)) and once("trainer-killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            real = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]
            data = tq.kv_batch_get(keys=real, partition_id="train", select_fields=["uid", "extra_info"])
            advantages = credited(self, tq, real)
            batch = update(self, batch, metrics)
            how = {name: batch.extra_info[name] for name in ("mini_batch_size", "global_batch_size", "epochs")}
            prompts = [info["index"] for info in plain(data["extra_info"])]
            uids = [str(uid) for uid in plain(data["uid"])]
            write(
                "updates", step=self.global_steps, keys=real, rows=len(batch.keys), prompts=prompts, uids=uids, how=how
            )
            write("advantages", step=self.global_steps, **advantages)
            return batch

        return recorded

    around(module.PPOTrainer, "_update_actor", make)


def credited(trainer, tq, keys):
    """What the actor gets for each row's advantages, a value a token; what the core said; and the reward."""
    if getattr(trainer, "_trained", None) is None:  # stock verl
        return {}
    fields = ["advantages", "response_mask", "rm_scores", "responses"]
    if trainer.config.actor_rollout_ref.rollout.calculate_log_probs:
        fields.append("rollout_log_probs")
    data = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=fields)
    columns = zip(data["advantages"].unbind(), data["response_mask"].unbind(), strict=True)
    rows = dict(zip(trainer._trained.keys, trainer._trained.rows, strict=True))
    return {
        "given": [
            sorted({round(value, 6) for value in advantage[mask.bool()].tolist()}) for advantage, mask in columns
        ],
        "core": [rows[key].advantage for key in keys],
        "weights": [rows[key].weight for key in keys],
        "rewards": [float(scores.sum()) for scores in data["rm_scores"].unbind()],
        "replays": [rows[key].replays for key in keys],
        "rollouts": [rows[key].rollout for key in keys],
        "tokens": [row.tolist() for row in data["responses"].unbind()],
        "masks": [row.int().tolist() for row in data["response_mask"].unbind()],
        "behaviour": [row.tolist() for row in data["rollout_log_probs"].unbind()]
        if "rollout_log_probs" in data
        else [],
    }


def optimizer(module):
    def make(step):
        def recorded(self, *args, **kwargs):
            write("optimizer", pid=os.getpid())
            return step(self, *args, **kwargs)

        return recorded

    around(module.FSDPEngine, "optimizer_step", make)


after_import("verl.experimental.agent_loop.agent_loop", sessions)
after_import("verl.trainer.ppo.v1.agent_loop_tq", submissions("AgentLoopManagerTQ"))
after_import("rollalloc.drivers.verl.workers", submissions("Manager"))
after_import("verl.trainer.ppo.v1.trainer_base", updates)
after_import("verl.workers.engine.fsdp.transformer_impl", optimizer)
